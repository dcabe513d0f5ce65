"""State in flat tensors that DeepSpeed cuts over ranks: gathered by parameter and key, and put together again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, CheckpointError, Param
from lwopt_backend.checkpoint.deepspeed.model import ModelStates, as_number, whole
from lwopt_backend.checkpoint.lazy import LazyTensor, held

STEP = "step"


@dataclass
class Gathered:
    """What the ranks' files have of one parameter. ``pieces`` by key are (start, tensor), flat; ``copies`` by key are
    whole and must be equal; ``numbers`` are the same on all ranks."""

    shape: tuple[int, ...]
    group: int
    pieces: dict[str, list[tuple[int, LazyTensor]]] = field(default_factory=dict)
    copies: dict[str, list[LazyTensor]] = field(default_factory=dict)
    numbers: dict[str, LazyTensor | float] = field(default_factory=dict)
    owner: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, key: str, start: int, tensor: LazyTensor) -> None:
        self.pieces.setdefault(key, []).append((start, tensor))

    def add_number(self, name: str, key: str, value: Any, file: Path) -> None:
        """Raises CheckpointError if another rank had another number."""
        if key in self.numbers and as_number(self.numbers[key]) != as_number(value):
            raise CheckpointError(
                f"parameter {name!r}: {key!r} is {as_number(self.numbers[key])} on the ranks before, "
                f"{as_number(value)} in "
                f"{file}; the files are of different savings"
            )
        self.numbers[key] = value

    def param(self, name: str, states: ModelStates) -> Param:
        """Raises CheckpointError unless the pieces are the whole parameter, once."""
        found = {key: self._whole(name, key, pieces, states.path) for key, pieces in self.pieces.items()}
        found.update({key: copies[0] for key, copies in self.copies.items()})
        found.update({key: _scalar(value, key) for key, value in self.numbers.items() if key != STEP})
        ordered = {key: found[key] for key in sorted(found, key=lambda key: key != MASTER)}
        step = as_number(self.numbers.get(STEP))
        return Param(states.weight(name, self.shape), ordered, step, self.group, self.owner)

    def replicas(self, name: str) -> list[tuple[str, LazyTensor, LazyTensor]]:
        """Copies that two ranks have."""
        return [
            (f"{key} of {name}, which several ranks store whole", copies[0], other)
            for key, copies in self.copies.items()
            for other in copies[1:]
        ]

    def _whole(self, name: str, key: str, pieces: list[tuple[int, LazyTensor]], file: Path) -> LazyTensor:
        end = 0
        ordered = sorted(pieces, key=lambda piece: piece[0])
        for start, tensor in ordered:
            if start != end:
                raise CheckpointError(
                    f"{key} of parameter {name!r} in {file.parent}: element {end} comes next, found a piece from "
                    f"{start} on ({tensor.where}); the files do not belong together"
                )
            end += tensor.numel
        if end != math.prod(self.shape):
            raise CheckpointError(
                f"{key} of parameter {name!r} in {file.parent}: expected {math.prod(self.shape)} elements, found {end} "
                "in all ranks' files; copy the whole folder again"
            )
        return whole([tensor for _, tensor in ordered if tensor.numel] or [ordered[0][1]], self.shape)


def _scalar(value: LazyTensor | float, key: str) -> LazyTensor:
    return value if isinstance(value, LazyTensor) else held(torch.tensor(float(value)), key)


def cut(tensor: Any, start: int, numel: int, what: str, file: Path) -> LazyTensor:
    """Elements from ``start`` on of a flat tensor. Raises CheckpointError if there are not as many."""
    if not isinstance(tensor, LazyTensor) or len(tensor.shape) != 1 or start < 0 or start + numel > tensor.numel:
        found = tensor.shape if isinstance(tensor, LazyTensor) else type(tensor).__name__
        raise CheckpointError(
            f"{what}: expected a flat tensor with elements {start} to {start + numel} in {file}, found {found}"
        )
    return tensor.piece(start, start + numel)


def params_of(gathered: Mapping[str, Gathered], states: ModelStates) -> dict[str, Param]:
    return {name: found.param(name, states) for name, found in gathered.items()}


def replicas_of(gathered: Mapping[str, Gathered]) -> tuple[tuple[str, LazyTensor, LazyTensor], ...]:
    return tuple(pair for name, found in gathered.items() for pair in found.replicas(name))
