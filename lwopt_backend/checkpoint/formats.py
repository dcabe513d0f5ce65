"""Formats by name, and reading any of them; families of names, a model's numbers.

The command's help needs these, so torch is imported only to read a folder."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.config.options import suggestion

if TYPE_CHECKING:
    from lwopt_backend.checkpoint.contents import Checkpoint


AUTO = "auto"
MOST_BELOW, SHOWN = 1000, 8  # entries of a folder that is no checkpoint that are looked at, and checkpoints named

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
        reader=f"{_HERE}.dcp.state_dicts",
        writer=f"{_HERE}.dcp.saving",
        written="torch dcp",
    ),
    "accelerate": Format(
        "the two folders of torch.distributed.checkpoint that Accelerate and the Trainer save on FSDP2",
        reader=f"{_HERE}.dcp.state_dicts",
        writer=f"{_HERE}.dcp.accelerate",
        written="torch dcp",
    ),
    "safetensors": Format(
        "weights as safetensors",
        reader=f"{_HERE}.safetensors",
        writer=f"{_HERE}.safetensors",
        written="safetensors",
    ),
    "pytorch-bin": Format("weights as pytorch_model.bin", f"{_HERE}.pytorch_bin"),
}
ON_FSDP2 = ("dcp", "accelerate")  # whose weights are the masters
TARGETS = tuple(name for name, format in FORMATS.items() if format.writer)


def find(path: Path, format: str = AUTO) -> str:
    """The name in FORMATS of a folder's format: ``format``, or the first whose reader recognises the folder.

    Raises CheckpointError if there is none, or if the folder is of another format than ``format``.
    """
    if format != AUTO and format not in FORMATS:
        raise CheckpointError(f"unknown format {format!r}; {suggestion(format, (AUTO, *FORMATS))}")
    if not path.is_dir():
        found = "something else" if path.exists() else "nothing"
        raise CheckpointError(f"{path}: expected a checkpoint's folder, found {found}; give the folder")
    kind = _recognised(path, format)
    hint = _hint(path) if kind is None else ""  # which may name a step that is damaged
    if kind is None and (below := {at: of for at, of in _below(path).items() if repr(at.name) not in hint}):
        listed = [f"{found.relative_to(path)} ({name})" for found, name in below.items()]
        more = f" and {len(listed) - SHOWN} more" * (len(listed) > SHOWN)
        said = f"expected one checkpoint, found none{hint}; give a folder in it"
        raise CheckpointError(f"{path}: {said}: {', '.join(listed[:SHOWN])}{more}")
    if kind is None and format == AUTO:
        known = "; ".join(f"{name} ({of_name.help})" for name, of_name in FORMATS.items())
        raise CheckpointError(
            f"{path}: expected a checkpoint of a known format, found none{hint}. Known formats: {known}"
        )
    if kind is None:  # its reader says what is wrong
        return format
    if format not in (AUTO, kind):
        said = f"expected {FORMATS[format].help}, found {FORMATS[kind].help}"
        raise CheckpointError(f"{path}: {said}; say --from {kind}, or leave it out")
    return kind


def _below(path: Path) -> dict[Path, str]:
    """The checkpoints in a folder, or else in its folders, with their formats."""
    for places in ("*", "*/*"):
        entries = sorted(itertools.islice(path.glob(places), MOST_BELOW))
        kinds = {each: _recognised(each) for each in entries if each.is_dir() and not each.name.startswith(".")}
        if found := {each: kind for each, kind in kinds.items() if kind}:
            return found
    return {}


def _hint(path: Path) -> str:
    """What else is known of a folder that is no checkpoint."""
    if any(path.glob("*.distcp")):
        return ": it has .distcp files, but no .metadata with their contents; copy all files"
    for name, format in FORMATS.items():
        if format.pointer and (path / format.pointer).is_file():
            try:
                return f": its file {format.pointer} names {step_path(path, name).name!r}, which is none"
            except CheckpointError as error:
                return f": {error}"
    return ""


def step_path(path: Path, format: str) -> Path:
    """The folder of one step that is read, which a pointer in ``path`` may name."""
    found: Path = _reader(format).read.folder_of(path)
    return found


def recognises(name: str, path: Path) -> bool:
    """Whether a folder is a checkpoint of the format, or of its steps."""
    try:
        return bool(_reader(name).recognises(path))
    except (CheckpointError, OSError):
        return False


def _recognised(path: Path, first: str = AUTO) -> str | None:
    return next((name for name in (first, *FORMATS) if name != AUTO and recognises(name, path)), None)


def read(path: Path, format: str = AUTO) -> Checkpoint:
    """The checkpoint in a folder, of the given or the recognised format. Raises CheckpointError."""
    checkpoint: Checkpoint = _reader(find(path, format)).read(path)
    return checkpoint


def _reader(name: str) -> Any:
    return importlib.import_module(FORMATS[name].reader)


# Families of parameter names; ``names`` has their maps.
FAMILIES = ("megatron-core", "hf-llama", "hf-mixtral", "hf-qwen-moe", "hf-moe-stacked", "hf-gpt2")


# The numbers that a name map needs: given, from the checkpoint's arguments, or implied by shapes; never guessed.

ARGUMENTS = {  # their names in Megatron's arguments and Hugging Face's configs
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "query_groups": ("num_query_groups", "num_key_value_heads"),
    "kv_channels": ("kv_channels", "head_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}


@dataclass(frozen=True)
class Numbers:
    """A model's numbers, each None if the checkpoint's arguments or shapes imply it."""

    layers: int | None = None  # of the transformer
    heads: int | None = None  # of queries
    query_groups: int | None = None  # heads of keys; without grouping as many as of queries
    kv_channels: int | None = None  # outputs of one head
    experts: int | None = None  # of a layer
    vocab_size: int | None = None  # rows of embedding and output layer to keep; None keeps all

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
        return replace(self, **given)
