"""What rules keep at the owners of matrices, in checkpoints of ours: read when it is asked for, laid out as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.deepspeed.pieces import Gathered
from lwopt_backend.checkpoint.lazy import LazyTensor

KEY = "owner_state"  # under which our optimizers save it
MATRICES = "matrices"  # and which matrices are in a parameter: their names and elements, in the order of their places


class OwnerStates(Mapping[int, Mapping[str, Any]]):
    """State by a matrix's place in its parameter; its tensors are read from the file when one is asked for."""

    def __init__(self, saved: Mapping[Any, Any]) -> None:
        self._saved = saved

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        state: Mapping[str, Any] = read(self._saved[place])
        return state

    def __iter__(self) -> Iterator[int]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def read(state: Any) -> Any:
    """The same with tensors in place of those that were lazy."""
    if isinstance(state, LazyTensor):
        return _as_it_lay(state.read(), state.stride)
    if isinstance(state, dict):
        return {key: read(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(read(value) for value in state)
    return state


def _as_it_lay(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """The bits of a matrix product depend on how its factors lie in memory."""
    if stride is None or stride == tensor.stride() or 0 in stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def matrices_in(saved: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """By parameter, which elements its matrices are, of what our optimizer saved; None where it does not tell."""
    if MATRICES not in saved:
        return None
    return {name: [elements for _, elements in matrices] for name, matrices in saved[MATRICES].items()}


def take_owner_states(gathered: Mapping[str, Gathered], of_ranks: list[tuple[Path, Mapping[str, Any]]]) -> None:
    """Put what the files' dictionaries hold by a matrix's name where its parameter is. Raises CheckpointError."""
    found: dict[str, dict[int, Any]] = {}
    for file, saved in of_ranks:
        places = {
            matrix: (name, place)
            for name, matrices in (saved.get(MATRICES) or {}).items()
            for place, (matrix, _) in enumerate(matrices)
        }
        for matrix, state in (saved.get(KEY) or {}).items():
            name, place = places.get(matrix) or _place(matrix, gathered, file)
            found.setdefault(name, {})[place] = state
    for name, states in found.items():
        gathered[name].owner = OwnerStates(dict(sorted(states.items())))


def _place(matrix: str, params: Mapping[str, Gathered], file: Path) -> tuple[str, int]:
    """The parameter and the place in it, where the file does not tell; a slice's name ends in its number."""
    if matrix in params:
        return matrix, 0
    if (numbered := re.fullmatch(r"(.+)\[(\d+)\]", matrix)) and numbered[1] in params:
        return numbered[1], int(numbered[2])
    raise CheckpointError(
        f"{file}: the owner of {matrix!r} keeps state of a part of a fused parameter, and the checkpoint, which an "
        "earlier version saved, does not tell which rows it is; load it where it was saved, and save it again"
    )
