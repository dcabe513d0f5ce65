"""The formats that can be read, and how a folder's format is recognised."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from lwopt_backend.checkpoint import safetensors as safetensors_folder
from lwopt_backend.checkpoint.choices import AUTO, FORMATS
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.dcp import reader as dcp
from lwopt_backend.checkpoint.deepspeed import universal as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed import zero as deepspeed_zero
from lwopt_backend.checkpoint.megatron import conventions
from lwopt_backend.checkpoint.megatron import fsdp_dtensor as megatron_fsdp
from lwopt_backend.checkpoint.megatron import torch_dist as megatron_dist
from lwopt_backend.checkpoint.megatron import torch_format as megatron_torch
from lwopt_backend.config.options import suggestion

POINTERS = (deepspeed_zero.POINTER, deepspeed_universal.POINTER, conventions.POINTER)  # files that name a folder


_MODULES = (megatron_torch, megatron_dist, megatron_fsdp, deepspeed_universal, deepspeed_zero, dcp, safetensors_folder)
READERS: dict[str, ModuleType] = dict(zip(FORMATS, _MODULES, strict=True))


def find(path: Path, format: str = AUTO) -> str:
    """The name in READERS of a folder's format: ``format``, or the first whose reader recognises the folder.

    Raises CheckpointError if there is none.
    """
    if format != AUTO and format not in READERS:
        raise CheckpointError(f"unknown format {format!r}; {suggestion(format, (AUTO, *READERS))}")
    if not path.is_dir():
        found = "no folder" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {found}; expected a checkpoint's folder")
    kind = format if format != AUTO else next((name for name in READERS if READERS[name].recognises(path)), None)
    if kind is None:
        hint = ""
        if any(path.glob("*.distcp")):
            hint = ": it has .distcp files, but no .metadata that says what is in them; copy all files"
        if name := next((name for name in POINTERS if (path / name).is_file()), None):
            hint = f": its file {name} names {(path / name).read_bytes()[:100]!r}, where there is none; copy all of it"
        known = "; ".join(f"{name} ({meaning})" for name, meaning in FORMATS.items())
        raise CheckpointError(f"{path} is no checkpoint that is known{hint}; known are {known}")
    return kind


def read(path: Path, format: str = AUTO) -> Checkpoint:
    checkpoint: Checkpoint = READERS[find(path, format)].read(path)
    return checkpoint
