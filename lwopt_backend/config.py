"""The optimizer's options: one pydantic model for ds_config.json and for Python, checked before anything is built.

Names and defaults are torch.optim.Muon's and torch.optim.AdamW's; what is ours stands at the end of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from lwopt_backend.spelling import nearest, suggestion

# Strict: a number in quotes, or true for 1, is a slip that should be seen.
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Aspect = Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]


class Options(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MuonOptions(Options):
    """torch.optim.Muon's arguments."""

    lr: NonNegative = 1e-3
    weight_decay: NonNegative = 0.1
    momentum: BelowOne = 0.95
    nesterov: StrictBool = True
    ns_coefficients: tuple[Finite, Finite, Finite] = (3.4445, -4.7750, 2.0315)
    eps: NonNegative = 1e-7
    ns_steps: Annotated[int, Field(ge=1, lt=100, strict=True)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None


class AdamWOptions(Options):
    """torch.optim.AdamW's arguments."""

    lr: NonNegative = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 1e-2
    amsgrad: StrictBool = False


class LayerWiseConfig(MuonOptions):
    """Muon's options, AdamW's in a section, and ours that hold for every host.

    - ``include`` / ``exclude``: globs on parameter names that overrule the routing by structure; exclude wins.
    - ``allow_no_matrix``: a model without a single matrix parameter is an error unless this is set.
    - ``ns_dtype``: dtype of the Newton-Schulz iteration; torch.optim.Muon's is bfloat16.
    - ``gram_aspect``: matrices whose longer side is at least this many times the shorter go through Gram Newton-Schulz:
      the same polynomial from products of the small side only. None: none do; 1.5 is where it starts to pay.
    - ``exchange_dtype``: dtype on the wire; ``auto`` is ``ns_dtype``, with which nothing is lost.
    - ``report``: print the routing and the plan once, on rank 0.
    """

    adamw: AdamWOptions = AdamWOptions()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_no_matrix: StrictBool = False
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    gram_aspect: Aspect | None = None
    exchange_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    report: StrictBool = True

    @property
    def wire_dtype(self) -> str:
        return self.ns_dtype if self.exchange_dtype == "auto" else self.exchange_dtype


class LayerWiseMuonConfig(LayerWiseConfig):
    """``optimizer.params`` of ``"type": "LayerWiseMuon"``, for DeepSpeed's ZeRO.

    - ``policy``: who owns a matrix: ``stay`` (the rank that stores most of it), ``balance`` (even work) or ``auto``
      (whichever has the shorter modelled step).
    - ``bucket_numel``: elements of the matrices that share one all-to-all; two such buckets are in flight.
    - ``ns_device``: where matrices are orthogonalized, also where DeepSpeed keeps the optimizer in the CPU's memory:
      ``auto`` on the accelerator if there is one, ``cpu`` on the CPU.
    - ``storage``: who holds parameters, gradients and state: ``zero``, DeepSpeed's optimizers, to which the three
      options above belong; or ``owned``, we ourselves (stages 0 to 2), to which those below belong.
    - ``layout``, ``bucket_mb``, ``group_size``: as in ``OwnedConfig``.
    """

    policy: Literal["auto", "stay", "balance"] = "auto"
    bucket_numel: Annotated[int, Field(ge=1, strict=True)] = 2**24
    ns_device: Literal["auto", "cpu"] = "auto"
    storage: Literal["zero", "owned"] = "zero"
    layout: Literal["auto", "padded", "compact"] = "auto"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 64.0
    group_size: Annotated[int, Field(ge=1, strict=True)] | None = None

    @model_validator(mode="after")
    def _options_of_the_storage(self) -> LayerWiseMuonConfig:
        of = {"zero": ("policy", "bucket_numel", "ns_device"), "owned": ("layout", "bucket_mb", "group_size")}
        other = "owned" if self.storage == "zero" else "zero"
        wrong = [key for key in of[other] if key in self.model_fields_set]
        if wrong:
            raise ValueError(
                f'{", ".join(map(repr, wrong))}: only for "storage": "{other}", but the storage is {self.storage!r}'
            )
        return self


class FSDP2Config(LayerWiseConfig):
    """The options of ``LayerWiseOptimizer`` on FSDP2.

    - ``layout``: how a bucket lies on the wire: ``compact`` (parts as long as needed), ``padded`` (equal parts) or
      ``auto`` (equal where nothing is padded for it).
    - ``bucket_matrices``: matrices that share one all-to-all; None is twice the number of ranks. Two such buckets are
      in flight.
    - ``bucket_numel``: a bucket never holds more elements than this, unless a single matrix does; None is no limit.
    - ``state_dtype``: of the optimizer's state: the ``parameter``'s, as torch's optimizers, or ``float32``.
    """

    layout: Literal["auto", "padded", "compact"] = "auto"
    bucket_matrices: Annotated[int, Field(ge=1, strict=True)] | None = None
    bucket_numel: Annotated[int, Field(ge=1, strict=True)] | None = None
    state_dtype: Literal["parameter", "float32"] = "parameter"


class OwnedConfig(LayerWiseConfig):
    """The options of ``lwopt_backend.LayerWiseOptimizer``, which owns the buffers of parameters and gradients.

    - ``layout``: of every bucket: ``padded`` (equal parts, fixed-size collectives), ``compact`` (no padding, parts as
      long as needed) or ``auto`` (the shorter modelled step; says which and why).
    - ``bucket_mb``: a bucket is closed once it has so many MiB of gradients.
    - ``group_size``: ranks that own together; the others are instances of them that hold the same. None: chosen by the
      planner, all ranks unless there are too few matrices for them.
    - ``grad_dtype``: of gradients until they are at their owners: the ``parameter``'s, or ``float32``.
    - ``keep_full_grads``: the mean gradients are on all ranks after backward, in ``param.grad``, at the memory that
      takes; otherwise only owners have them.
    - ``overlap_grad_reduce``: buckets leave during backward as they fill, rather than at the step.
    - ``overlap_param_gather``: parameters return while the next forward pass runs, each module waiting for its own.
    - ``step_in_backward``: a bucket is updated in backward as soon as it is there; gradients cannot be clipped then.
    - ``bus_alignment``: padded buckets end on 2^16 elements, which NCCL moves at full bandwidth.
    """

    layout: Literal["auto", "padded", "compact"] = "auto"
    bucket_mb: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = 64.0
    group_size: Annotated[int, Field(ge=1, strict=True)] | None = None
    grad_dtype: Literal["parameter", "float32"] = "parameter"
    keep_full_grads: StrictBool = False
    overlap_grad_reduce: StrictBool = True
    overlap_param_gather: StrictBool = False
    step_in_backward: StrictBool = False
    bus_alignment: StrictBool = False


M = TypeVar("M", bound=Options)


def parse(model: type[M], options: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from ``options``. Raises ValueError that names every wrong key, what was expected and found."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
    raise ValueError("\n  ".join([f"{where}: {len(problems)} wrong option(s)", *problems]))


def _problem(model: type[Options], detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    *section, _ = location or [""]
    key = ".".join(location)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_hint(model, location)}"
    found = f"{key}: {detail['msg'][0].lower()}{detail['msg'][1:]}; found {detail['input']!r}"
    if detail["input"] == "auto" and section:
        return f"{found}, which Hugging Face fills for lr and weight_decay outside of sections only; write a value"
    return found


def _hint(model: type[Options], location: list[str]) -> str:
    """The nearest known key at this level, or the section that has a key of exactly this name."""
    *sections, name = location
    for section in sections:
        model = _section(model, section)
    if nearest(name, model.model_fields) is None:
        for section, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Options) and name in inner.model_fields:
                return f"did you mean '{section}.{name}'?"
    return suggestion(name, model.model_fields)


def _section(model: type[Options], name: str) -> type[Options]:
    annotation = model.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Options)
    return annotation
