"""The options that hold for a whole optimizer, by host. Those of a rule are the fields of its dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.options import Globs, Positive, parse
from lwopt_backend.rules.protocol import option

UNPLANNED = ("report", "on_nonfinite", "skip_above")  # options on which no plan depends
NAME = "LayerWiseOptimizer"  # of every engine's optimizer, in errors and tables
MEGATRON = "Megatron-Core"


@dataclass(frozen=True)
class ClipGroup:
    """Parameters whose gradients have a separate norm and maximum norm: by globs on their names, by the kind of rule
    that trains them, or by both."""

    max_norm: Positive
    params: Globs = ()
    kind: Literal["matrix", "elementwise"] | None = None

    def __post_init__(self) -> None:
        if not self.params and self.kind is None:
            raise ValueError("expected 'params', globs on names, or 'kind', 'matrix' or 'elementwise'; found neither")


def _clip_groups(given: Any) -> dict[str, ClipGroup]:
    sections = given.items() if isinstance(given, Mapping) else [("", given)]
    for name, section in sections:
        if not isinstance(section, Mapping):
            what = f"clip_groups[{name!r}]: expected a section" if name else "clip_groups: expected sections by name,"
            raise ValueError(f"{what} with 'params' and 'max_norm'; found {section!r}")
    return {name: parse(ClipGroup, dict(section), f"clip_groups[{name!r}]") for name, section in sections}


@dataclass(frozen=True)
class HostConfig:
    """Options that every host has."""

    whose: ClassVar[str]  # for errors, if an option of this host is given to another
    advice: ClassVar[str] = "leave it out"

    @property
    def stores_whole(self) -> bool:
        """Whether every matrix is whole at one rank, so that no rank has a block of it."""
        return isinstance(self, BufferConfig) and getattr(self, "storage", "owned") == "owned"

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Raises ValueError for a given option that another one makes useless."""

    @classmethod
    def lacks(cls, name: str, *others: type[HostConfig]) -> str:
        """A sentence on an option or a method ``name`` of the hosts ``others``."""
        whose = " and ".join(other.whose for other in others)
        if cls is HostConfig:
            return f"{name} is {whose}; expected an option that every engine has; leave it out"
        return f"{name} is {whose}, but this optimizer is {cls.whose}; {others[-1].advice}"

    include: Globs = option((), "globs of parameters that are matrices, whatever the model's structure suggests")
    exclude: Globs = option((), "globs of parameters that are not matrices; exclude wins over include")
    atoms: dict[str, Any] = option(
        {},
        "by glob, the matrices in a parameter, if they are not found from the model: a division, or a word",
        check=AtomSettings.checked,
    )
    convolutions: Literal["elementwise", "flatten"] = option(
        "elementwise",
        "convolutions: 'elementwise', or 'flatten', matrices of (outputs, inputs x kernel), one for each group; "
        "depthwise ones stay element-wise",
    )
    allow_no_matrix: bool = option(False, "accept a model without a matrix, which is otherwise an error")
    exchange_dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "dtype on the wire; 'auto': the rule's, which loses nothing"
    )
    capture: bool = option(
        False,
        "capture what a rule does with a batch of whole matrices in a CUDA graph, in the third step, and replay it "
        "later. Takes memory for a rule's input and output of every matrix. On CPUs, only the buffers are kept",
    )
    on_nonfinite: Literal["auto", "skip", "raise", "step"] = option(
        "auto",
        "a step with NaN or infinite gradients on any rank: 'skip', 'raise', 'step' or 'auto'. Auto: as DeepSpeed's "
        "configuration says there; skip with skip_above and in ModuleOptimizers; otherwise step, as torch does",
    )
    skip_above: float | None = option(
        None,
        "skip a step if the norm of all gradients before clipping is above this; None: never",
        f"{MEGATRON}'s grad_norm_skip_threshold",
        gt=0,
    )
    report: bool = option(
        True, "print and log, on rank 0, the routing, the plan, and later the parameters that never had a gradient"
    )


@dataclass(frozen=True)
class ClippingConfig(HostConfig):
    """Options of hosts whose gradients this package clips."""

    clip_groups: dict[str, ClipGroup] = option(
        {},
        "by name, parameters that are clipped apart from the rest, by their own norm. A group has 'max_norm', and "
        "'params', globs on names, or 'kind', 'matrix' or 'elementwise', or both",
        MEGATRON,
        check=_clip_groups,
    )


@dataclass(frozen=True)
class BufferConfig(HostConfig):
    """Options of this package's buffers: in plain PyTorch, and with DeepSpeed's ``"storage": "owned"``."""

    layout: Literal["auto", "padded", "compact"] = option(
        "auto",
        "layout of every bucket: 'padded', 'compact' or 'auto'. Padded: equal parts, fixed-size collectives; "
        "compact: no padding, unequal parts; auto: padded if padding adds little and pays",
    )
    bucket_mb: float = option(64.0, "MiB of gradients that close a bucket", gt=0)
    pad_buckets_for_high_nccl_busbw: bool = option(
        False, "end padded buckets on multiples of 2^16 elements, which NCCL sends faster", MEGATRON
    )
    group_size: int | None = option(
        None,
        "number of ranks that share one copy of the buffers; the other ranks hold further copies, as in HSDP. "
        "None: all ranks",
        ge=1,
    )

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        if given.get("pad_buckets_for_high_nccl_busbw") and given.get("layout") == "compact":
            raise ValueError(
                "pad_buckets_for_high_nccl_busbw: expected layout 'padded' or 'auto', found 'compact', whose buckets "
                "are not padded; leave it out"
            )


OF_BUCKETS = ("layout", "bucket_mb", "pad_buckets_for_high_nccl_busbw", "group_size")
THESE_OF_BUCKETS = f"{', '.join(OF_BUCKETS[:-1])} and {OF_BUCKETS[-1]}"


@dataclass(frozen=True)
class ZeROConfig(BufferConfig):
    """Options for DeepSpeed. ``storage`` decides which of the others may be given."""

    whose: ClassVar[str] = "for DeepSpeed"

    policy: Literal["auto", "stay", "balance"] = option(
        "auto",
        "choice of a matrix's owner: 'stay', 'balance' or 'auto'. Stay: the rank that stores most of the matrix; "
        "balance: even work; auto: the one with the shorter modelled step",
    )
    bucket_numel: int | None = option(
        None,
        "maximum elements of the matrices that share one all-to-all, unless a single matrix has more. None: "
        "no limit; the number of buckets makes the modelled step shortest. Two buckets are in flight",
        ge=1,
    )
    ns_device: Literal["auto", "cpu"] = option(
        "auto",
        "device that updates matrices: 'auto', the accelerator if there is one, or 'cpu'. It is used also if "
        "DeepSpeed keeps the optimizer in CPU memory",
    )
    storage: Literal["zero", "owned"] = option(
        "zero",
        "holder of parameters, gradients and state: 'zero', DeepSpeed, or 'owned', this package. With zero: policy, "
        f"bucket_numel and ns_device; with owned, at stages 0 to 2: {THESE_OF_BUCKETS}",
    )

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        super().check_given(given)
        options = {"zero": ("policy", "bucket_numel", "ns_device"), "owned": OF_BUCKETS}
        storage = given.get("storage", "zero")
        other = "owned" if storage == "zero" else "zero"
        if wrong := ", ".join(repr(key) for key in options[other] if key in given):
            raise ValueError(f'{wrong}: expected only with "storage": "{other}", found {storage!r}; leave it out')


@dataclass(frozen=True)
class FSDP2Config(ClippingConfig):
    """Options of ``LayerWiseOptimizer`` for a ``fully_shard`` model."""

    whose: ClassVar[str] = "for fully_shard models"
    advice: ClassVar[str] = (
        "call fully_shard(model) before it is made, or pass sharded_later=True if Accelerate shards it in prepare()"
    )

    bucket_matrices: int | None = option(
        None,
        "number of matrices that share one all-to-all. None: the number that makes the modelled step "
        "shortest, or on a CPU that keeps all ranks at work, at least twice the number of ranks. Two buckets "
        "are in flight",
        ge=1,
    )
    bucket_numel: int | None = option(
        None, "maximum elements of a bucket, unless a single matrix has more; None: no limit", ge=1
    )
    copies: Globs = option(
        (),
        "globs of parameters on meshes of some ranks which are copies of each other. They must be equal; without it, "
        "each mesh has different parameters (experts)",
    )
    share_copies: bool | None = option(
        None,
        "under HSDP, whether the copies share the work, and send each other the updates; or each does all of it by "
        "itself. None: the one with the shorter modelled step; shared on a CPU, with bucket_matrices or bucket_numel, "
        "and where a rule keeps owner state",
    )
    state_dtype: Literal["parameter", "float32"] = option(
        "parameter",
        "dtype of the optimizer's state: the parameter's or its wider grad_dtype, as in torch; or 'float32'",
    )


@dataclass(frozen=True)
class PlainConfig(BufferConfig, ClippingConfig):
    """Options of ``LayerWiseOptimizer`` for a plain model."""

    whose: ClassVar[str] = "for plain models"

    grad_dtype: Literal["parameter", "float32"] = option(
        "parameter", "dtype of gradients until they reach their owners: the parameter's, or 'float32'"
    )
    keep_full_grads: bool = option(
        False,
        "keep the mean gradients in param.grad on all ranks after backward. That takes memory for all gradients; "
        "otherwise only owners have them",
    )
    broadcast_buffers: bool = option(
        True,
        "copy buffers, such as BatchNorm's, from the first rank to all. This happens when the optimizer is made, and "
        "after each backward pass whose gradients are reduced",
        "DDP",
    )
    overlap_grad_reduce: bool = option(
        True,
        "send buckets during backward as they fill, not at the step. With keep_full_grads, false means at the end of "
        "backward",
        MEGATRON,
    )
    overlap_param_gather: bool = option(
        False, "return parameters while the next forward pass runs; each module waits for its own parameters", MEGATRON
    )


HOSTS: dict[str, type[HostConfig]] = {"DeepSpeed": ZeROConfig, "FSDP2": FSDP2Config, "plain PyTorch": PlainConfig}
