"""The options that hold for a whole optimizer, by host. Those of a rule are the fields of its dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, model_validator

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.options import Count, Globs, Options, Positive, option, parse

NAME = "LayerWiseOptimizer"  # of every engine's optimizer, in errors and tables
MEGATRON = "Megatron-Core"


class ClipGroup(Options):
    """Parameters, by globs on their names, whose gradients have a norm and a largest norm of their own."""

    params: Annotated[Globs, Field(min_length=1)]
    max_norm: Positive


def _clip_groups(given: Any) -> dict[str, ClipGroup]:
    sections = given.items() if isinstance(given, Mapping) else [("", given)]
    for name, section in sections:
        if not isinstance(section, (Mapping, ClipGroup)):
            what = f"clip_groups[{name!r}]: expected a section" if name else "clip_groups: expected sections by name,"
            raise ValueError(f"{what} with 'params' and 'max_norm'; found {section!r}")
    return {name: parse(ClipGroup, dict(section), f"clip_groups[{name!r}]") for name, section in sections}


class HostConfig(Options):
    """Options that every host has."""

    whose: ClassVar[str]  # for errors, if an option of this host is given to another: whose it is, and what to do
    advice: ClassVar[str] = "leave it out"

    @property
    def without_blocks(self) -> str | None:
        """Why there is no ``block_period`` here; None where a rank may have its own block of a matrix."""
        return "owned storage keeps every matrix whole at one rank, which has no other block of it"

    @classmethod
    def lacks(cls, name: str, *others: type[HostConfig]) -> str:
        """A sentence on an option or a method ``name`` of the hosts ``others``."""
        whose = " and ".join(other.whose for other in others)
        return f"{name} is {whose}, but this optimizer is {cls.whose}; {others[-1].advice}"

    include: Globs = option((), "globs on names of parameters that are matrices, whatever the model's structure says")
    exclude: Globs = option((), "globs on names of parameters that are none; wins over include")
    atoms: Annotated[dict[str, Any], PlainValidator(AtomSettings.checked)] = option(
        {}, "by glob, which matrices are in a parameter, where that is not found out: a division, or a word"
    )
    allow_no_matrix: StrictBool = option(
        False, "a model without a single matrix parameter is an error unless this is set"
    )
    exchange_dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "dtype on the wire; 'auto' is the rule's, with which nothing is lost"
    )
    report: StrictBool = option(True, "print the routing and the plan once, on rank 0")


class ClippingConfig(HostConfig):
    """Options of hosts whose gradients we clip ourselves."""

    clip_groups: Annotated[dict[str, ClipGroup], BeforeValidator(_clip_groups)] = option(
        {},
        "by name, parameters whose gradients are clipped apart from the rest, by their own norm: 'params', globs on "
        "names, and 'max_norm'",
        MEGATRON,
    )


class OwnedStorageConfig(HostConfig):
    """Options of owned storage, under DeepSpeed or without it."""

    layout: Literal["auto", "padded", "compact"] = option(
        "auto",
        "of every bucket: 'padded' (equal parts, fixed-size collectives), 'compact' (no padding, parts as long as "
        "needed) or 'auto' (padded if that adds at most 5 %, else compact)",
    )
    bucket_mb: Positive = option(64.0, "a bucket is closed once it has so many MiB of gradients")
    group_size: Count | None = option(
        None,
        "ranks that share one copy of the buffers, the others have further copies, as in HSDP. None: all ranks",
    )


class ZeROConfig(OwnedStorageConfig):
    """Options for DeepSpeed. ``storage`` decides which of the others may be given."""

    whose: ClassVar[str] = "for DeepSpeed"

    @property
    def without_blocks(self) -> str | None:
        return super().without_blocks if self.storage == "owned" else None

    policy: Literal["auto", "stay", "balance"] = option(
        "auto",
        "who owns a matrix: 'stay' (the rank that stores most of it), 'balance' (even work) or 'auto' (whichever has "
        "the shorter modelled step)",
    )
    bucket_numel: Count | None = option(
        None,
        "the most elements of the matrices that share one all-to-all, unless a single matrix has more; None: no limit, "
        "buckets are as many as make the modelled step shortest. Two are in flight",
    )
    ns_device: Literal["auto", "cpu"] = option(
        "auto",
        "where matrices are updated, also where DeepSpeed keeps the optimizer in the CPU's memory: 'auto' on the "
        "accelerator if there is one, 'cpu' on the CPU",
    )
    storage: Literal["zero", "owned"] = option(
        "zero",
        "who holds parameters, gradients and state: 'zero', DeepSpeed's optimizers, to which policy, bucket_numel and "
        "ns_device belong; or 'owned', we ourselves (stages 0 to 2), to which layout, bucket_mb and group_size belong",
    )

    @model_validator(mode="after")
    def _options_of_the_storage(self) -> ZeROConfig:
        options = {"zero": ("policy", "bucket_numel", "ns_device"), "owned": ("layout", "bucket_mb", "group_size")}
        other = "owned" if self.storage == "zero" else "zero"
        wrong = [key for key in options[other] if key in self.model_fields_set]
        if wrong:
            names = ", ".join(map(repr, wrong))
            raise ValueError(f'{names}: only for "storage": "{other}", but the storage is {self.storage!r}')
        return self


class FSDP2Config(ClippingConfig):
    """Options of ``LayerWiseOptimizer`` for a ``fully_shard`` model."""

    whose: ClassVar[str] = "for fully_shard models"
    advice: ClassVar[str] = (
        "call fully_shard(model) before it is made, or pass sharded_later=True if Accelerate shards it in prepare()"
    )

    @property
    def without_blocks(self) -> str | None:
        return None

    bucket_matrices: Count | None = option(
        None,
        "matrices that share one all-to-all; None: as many as make the modelled step shortest, on a CPU as give all "
        "ranks work at the same time, at least twice the number of ranks. Two buckets are in flight",
    )
    bucket_numel: Count | None = option(
        None, "a bucket never holds more elements than this, unless a single matrix does; None: no limit"
    )
    state_dtype: Literal["parameter", "float32"] = option(
        "parameter", "of the optimizer's state: the parameter's, as torch's optimizers, or 'float32'"
    )


class OwnedConfig(OwnedStorageConfig, ClippingConfig):
    """Options of ``LayerWiseOptimizer`` for a plain model."""

    whose: ClassVar[str] = "for plain models"

    grad_dtype: Literal["parameter", "float32"] = option(
        "parameter", "of gradients until they are at their owners: the parameter's, or 'float32'"
    )
    keep_full_grads: StrictBool = option(
        False,
        "the mean gradients are on all ranks after backward, in param.grad, at the memory that takes; otherwise only "
        "owners have them",
    )
    overlap_grad_reduce: StrictBool = option(
        True, "buckets leave during backward as they fill, rather than at the step", MEGATRON
    )
    overlap_param_gather: StrictBool = option(
        False, "parameters return while the next forward pass runs, each module waiting for its own", MEGATRON
    )


HOSTS: dict[str, type[HostConfig]] = {"DeepSpeed": ZeROConfig, "FSDP2": FSDP2Config, "plain PyTorch": OwnedConfig}
