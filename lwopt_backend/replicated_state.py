"""State of replicated parameters in a checkpoint: whole, parameter by parameter, as a single process would save it.

So it can be loaded with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.group_plan import GroupPlan
from lwopt_backend.plan import FlatPartition
from lwopt_backend.replicated_stepper import owned_bases, state_numel
from lwopt_backend.runtime.ranks import Collectives


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of parameter ``param``, whose state begins at ``offset`` of a rank's flat state."""

    param: int
    start: int
    stop: int
    offset: int


def gather_whole(plan: GroupPlan, state: Mapping[str, Any], ranks: Collectives) -> list[dict[str, Any]] | None:
    """Every parameter's state, on the CPU, on the first of ``ranks``; None on the others. Called on all of them."""
    whole: list[dict[str, Any]] = [{} for _ in plan.specs]
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            for of_param in whole:
                of_param[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        padded = value.new_zeros(max(state_numel(plan, rank) for rank in range(ranks.world_size)))
        padded[: value.numel()] = value
        flats = ranks.gather_to_first(padded)
        if flats is None:
            continue
        for spec, of_param in zip(plan.specs, whole):
            of_param[key] = torch.empty(spec.shape, dtype=value.dtype)
        for rank, flat in enumerate(flats):
            for piece in _pieces(plan, rank):
                target = whole[piece.param][key].view(-1)[piece.start : piece.stop]
                target.copy_(flat.narrow(0, piece.offset, target.numel()))
    return whole if ranks.rank == 0 else None


def take_part(plan: GroupPlan, saved: Sequence[Mapping[str, Any]], rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's flat state of the parameters whose whole states were ``saved``."""
    part: dict[str, Any] = {}
    for key, value in saved[0].items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            part[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        flat = torch.zeros(state_numel(plan, rank), dtype=value.dtype)
        for piece in _pieces(plan, rank):
            source = saved[piece.param][key].reshape(-1)[piece.start : piece.stop]
            flat.narrow(0, piece.offset, source.numel()).copy_(source)
        part[key] = flat.to(device)
    return part


def _pieces(plan: GroupPlan, rank: int) -> Iterator[Piece]:
    """What ``rank`` keeps state of."""
    if plan.matrices is None:
        assert isinstance(plan.layout, FlatPartition)
        for index in range(len(plan.specs)):
            held = plan.layout.fragment(index, rank)
            if held is not None:
                yield Piece(index, held.start, held.stop, held.offset)
        return
    bases = owned_bases(plan, rank)
    first = 0
    for index, spec in enumerate(plan.specs):
        start = 0
        while start < spec.numel:
            size = plan.matrices.atoms[first].numel
            if first in bases:
                yield Piece(index, start, start + size, bases[first])
            start, first = start + size, first + 1
