"""State of replicated parameters in a checkpoint: whole, parameter by parameter, as a single process would save it.

So it can be loaded with another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.group_plan import GroupPlan
from lwopt_backend.plan import FlatPartition
from lwopt_backend.plan.block_views import View, range_views
from lwopt_backend.replicated_stepper import owned_bases, state_numel
from lwopt_backend.runtime.ranks import Collectives
from lwopt_backend.runtime.views import flat_views


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of parameter ``param``, by a view of it flattened; their state begins at ``offset`` of a rank's."""

    param: int
    view: View
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """The piece of a tensor that is as large as the parameter and contiguous."""
        (found,) = flat_views(whole.view(-1), [self.view])
        return found


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
                target = piece.of(whole[piece.param][key])
                target.copy_(flat.narrow(0, piece.offset, target.numel()).view(target.shape))
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
            source = piece.of(saved[piece.param][key].contiguous())
            flat.narrow(0, piece.offset, source.numel()).view(source.shape).copy_(source)
        part[key] = flat.to(device)
    return part


def _pieces(plan: GroupPlan, rank: int) -> Iterator[Piece]:
    """What ``rank`` keeps state of."""
    if plan.matrices is None:
        assert isinstance(plan.layout, FlatPartition)
        for index in range(len(plan.specs)):
            held = plan.layout.fragment(index, rank)
            if held is not None:
                yield Piece(index, View(held.start, (held.numel,), (1,)), held.offset)
        return
    bases = owned_bases(plan, rank)
    blocks = [(index, block) for index, of_param in enumerate(plan.blocks) for block in of_param]
    for atom, (index, block) in enumerate(blocks):
        offset = bases.get(atom)
        if offset is None:
            continue
        for view in range_views(block, 0, plan.specs[index].numel, 0):
            yield Piece(index, view, offset)
            offset += math.prod(view.sizes)
