"""Names and shapes of a Megatron checkpoint: whole parameters, layer by layer, whatever ranks wrote it."""

from __future__ import annotations

from pathlib import Path

from lwopt_backend.checkpoint.megatron import dist_reader as megatron_dist
from lwopt_backend.checkpoint.megatron import fsdp_reader as megatron_fsdp
from lwopt_backend.checkpoint.megatron import torch_reader as megatron_torch
from lwopt_backend.model_shapes.torch_files import stored
from lwopt_backend.model_shapes.types import Contents

_READERS = {megatron_torch: "torch", megatron_dist: "torch_dist", megatron_fsdp: "fsdp_dtensor"}


def is_megatron_folder(folder: Path) -> bool:
    """Whether Megatron wrote it."""
    return any(reader.recognises(folder) for reader in _READERS)


def read_megatron_folder(folder: Path) -> Contents:
    """The parameters in the model's order. Raises ValueError."""
    reader = next(reader for reader in _READERS if reader.recognises(folder))
    params = reader.read_weights(folder)
    return Contents(
        f"Megatron's {_READERS[reader]} checkpoint {folder.name}",
        tuple(stored(name, param.best) for name, param in params.items()),
    )
