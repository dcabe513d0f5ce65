"""Choices without torch: the error of all checkpoint code, formats and families by name, a model's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lwopt_backend.config.options import Count, Options, option


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not be converted. The message names file, tensor, and what to do."""


# Formats that can be read and written, by name. The command's help shows them, so nothing here imports torch.

AUTO = "auto"
DEBUG = "LWOPT_DEBUG"  # set to 1 in the environment, tracebacks of errors are printed

_HERE = "lwopt_backend.checkpoint"


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its help; the modules that read and write it, the latter if it is written; its writer's name for
    readers' errors; the pointer file, if it has one, in the folder of steps; and how a step's folder is named.

    Modules are imported when needed: torch.distributed.checkpoint takes half a second."""

    help: str
    reader: str
    writer: str | None = None
    written: str = ""
    pointer: str | None = None
    step_folder: str = ""


# In the order in which a folder is tested: Megatron's are also torch's formats, and weights may be next to any state.
_MEGATRONS = "latest_checkpointed_iteration.txt"
FORMATS = {
    "megatron-torch": Format("Megatron's --ckpt-format torch", f"{_HERE}.megatron.torch_format", pointer=_MEGATRONS),
    "megatron-dist": Format("Megatron's torch_dist", f"{_HERE}.megatron.torch_dist", pointer=_MEGATRONS),
    "megatron-fsdp": Format("Megatron's fsdp_dtensor", f"{_HERE}.megatron.fsdp_dtensor", pointer=_MEGATRONS),
    "universal": Format(
        "DeepSpeed's universal format",
        reader=f"{_HERE}.deepspeed.universal",
        writer=f"{_HERE}.deepspeed.universal",
        written="deepspeed universal",
        pointer="latest_universal",
        step_folder="global_step{step}",
    ),
    "deepspeed": Format("DeepSpeed's own files, stages 0 to 3", f"{_HERE}.deepspeed.zero", pointer="latest"),
    "dcp": Format(
        "torch.distributed.checkpoint, of FSDP2 and of plain PyTorch",
        reader=f"{_HERE}.dcp.reader",
        writer=f"{_HERE}.dcp.saving",
        written="torch dcp",
    ),
    "safetensors": Format(
        "weights as safetensors",
        reader=f"{_HERE}.safetensors",
        writer=f"{_HERE}.safetensors",
        written="safetensors",
    ),
}
TARGETS = tuple(name for name, format in FORMATS.items() if format.writer)

# Families of parameter names; ``names`` has their maps.
FAMILIES = ("megatron-core", "hf-llama", "hf-mixtral", "hf-qwen-moe", "hf-moe-stacked", "hf-gpt2")


# The numbers that a name map needs: given, from the checkpoint's arguments, or implied by shapes; never guessed.

OURS = "this package"
ARGUMENTS = {  # their names in Megatron's arguments and Hugging Face's configs
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "query_groups": ("num_query_groups", "num_key_value_heads"),
    "kv_channels": ("kv_channels", "head_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


class Numbers(Options):
    """A model's numbers, each optional if the checkpoint's arguments or shapes imply it."""

    layers: Count | None = option(None, "transformer layers", OURS)
    heads: Count | None = option(None, "attention heads of queries", OURS)
    query_groups: Count | None = option(None, "heads of keys; without grouping as many as of queries", OURS)
    kv_channels: Count | None = option(None, "outputs of one head", OURS)
    experts: Count | None = option(None, "experts of a layer", OURS)
    vocab_size: Count | None = option(None, "rows of embedding and output layer to keep; None keeps all", OURS)

    def filled(self, arguments: Mapping[str, Any]) -> Numbers:
        """With the numbers in ``arguments`` for those not given. Raises CheckpointError if one is not a number."""
        found: dict[str, int | None] = {}
        for key, names in ARGUMENTS.items():
            name = next((name for name in names if arguments.get(name) is not None), names[0])
            value = found[key] = arguments.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise CheckpointError(
                    f"the checkpoint's argument {name!r} is {value!r}; expected a number; give {key!r}"
                )
        grouped = arguments.get("group_query_attention")
        if grouped is False:  # then Megatron's num_query_groups is 1, an unused default
            found["query_groups"] = found["heads"]
        elif grouped is None and arguments.get("num_query_groups") == 1:  # perhaps a default; shapes decide
            found["query_groups"] = None
        given = {key: value for key, value in found.items() if value is not None and getattr(self, key) is None}
        return self.model_copy(update=given)


@dataclass(frozen=True, slots=True)
class QKV:
    """The outputs of q, k and v: ``groups`` times ``queries`` of q, then ``channels`` each of k and v."""

    groups: int
    queries: int
    channels: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.queries, self.channels, self.channels

    @property
    def rows(self) -> int:
        return self.groups * sum(self.sizes)


def qkv_of_fused(numbers: Numbers, rows: int, where: str) -> QKV:
    """The division of a fused matrix's rows, given two of heads, groups and channels. Raises CheckpointError."""
    heads, groups, channels = numbers.heads or 0, numbers.query_groups or 0, numbers.kv_channels or 0
    if (heads > 0) + (groups > 0) + (channels > 0) < 2:
        raise CheckpointError(
            f"{where}: expected two of heads, query_groups and kv_channels, to divide q, k and v; found "
            f"{_known(numbers)}; give them"
        )
    if heads and groups:
        channels = channels or rows // (heads + 2 * groups)
    elif heads:
        groups = (rows // channels - heads) // 2
    else:
        heads = rows // channels - 2 * groups
    return _fitting(QKV(groups, heads * channels // max(groups, 1), channels), rows, numbers, where)


def qkv_of_parts(numbers: Numbers, q: int, k: int, where: str) -> QKV:
    """The division of the rows of separate q and k, given one of heads, groups and channels. Raises CheckpointError."""
    heads, groups, channels = numbers.heads, numbers.query_groups, numbers.kv_channels
    if not (heads or groups or channels):
        raise CheckpointError(
            f"{where}: expected one of heads, query_groups and kv_channels, to divide q, k and v; found "
            f"{_known(numbers)}; give them"
        )
    if not channels:
        channels = k // groups if groups else q // (heads or 1)
    groups = groups or k // max(channels, 1)
    return _fitting(QKV(groups, q // max(groups, 1), channels), q + 2 * k, numbers, where)


def _fitting(found: QKV, rows: int, numbers: Numbers, where: str) -> QKV:
    heads = found.groups * found.queries // max(found.channels, 1)
    whole = min(found.groups, found.queries, found.channels) > 0 and found.queries % found.channels == 0
    if not whole or found.rows != rows or numbers.heads not in (None, heads):
        raise CheckpointError(
            f"{where}: expected (heads + 2 * query_groups) * kv_channels rows of q, k and v, found {rows}, which do "
            f"not divide by {_known(numbers)}; give the numbers of this model"
        )
    return found


def _known(numbers: Numbers) -> str:
    keys = ("heads", "query_groups", "kv_channels")
    return ", ".join(f"{key} {getattr(numbers, key) or 'unknown'}" for key in keys)
