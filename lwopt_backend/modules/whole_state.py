"""A module's state in whole tensors, for optimizers whose ``state_dict`` has them, or sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.modules.parts import Part
from lwopt_backend.owned.state_files import write_whole

FILE = "whole.pt"


def save_whole(part: Part, folder: Path, *, writes: bool) -> None:
    """Bring what is sharded together, tensor by tensor, on the rank that ``writes``. Called on all of the module's."""

    def gathered(tensor: Tensor) -> Tensor | None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.detach().cpu() if writes else None

    content = {"params": _params(part), "state_dict": _each_tensor(part.optimizer.state_dict(), gathered)}
    if writes:
        write_whole(folder / FILE, lambda file: torch.save(content, file))


def load_whole(part: Part, folder: Path) -> None:
    """Take what ``save_whole`` wrote. Called on all ranks of the module.

    Raises ValueError, before anything is changed, for a file that cannot be read and for other parameters.
    """
    path = folder / FILE
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        saved, state_dict = content["params"], content["state_dict"]
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or not a file of a module's state: {error}") from error
    ours = _params(part)
    if ours != saved:
        mine, theirs = next(((a, b) for a, b in zip(ours, saved) if a != b), (f"{len(ours)}", f"{len(saved)}"))
        raise ValueError(f"{path}: expected parameter {mine}, found {theirs}; load what the same parameters had")
    part.optimizer.load_state_dict(state_dict)
    for param, state in part.optimizer.state.items():  # nothing stays in the file, which the next save removes
        part.optimizer.state[param] = _each_tensor(state, torch.clone)


def _params(part: Part) -> list[list[Any]]:
    return [[name, list(param.shape)] for name, param in part.params()]


def _each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(entry, change) for entry in value)
    return value
