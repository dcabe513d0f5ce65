"""Weights in Hugging Face's older files, of torch.save: pytorch_model.bin, or the files that its index names."""

from __future__ import annotations

from pathlib import Path

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, reader
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.safetensors import sharded, weights

ONE_FILE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def recognises(path: Path) -> bool:
    return (path / ONE_FILE).is_file() or (path / INDEX).is_file()


@reader("torch")
def read(path: Path) -> Checkpoint:
    """The weights in a folder, without state. Raises CheckpointError if files are damaged or missing."""
    return weights("pytorch_model.bin", path, *sharded(path, ONE_FILE, INDEX, _load))


def _load(path: Path) -> dict[str, LazyTensor]:
    found = torch_files.load(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected tensors by name, found a {type(found).__name__}")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, LazyTensor)}
