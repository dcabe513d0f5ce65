"""What a rank holds and sends in owned storage, worked out from the plan, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lwopt_backend.owned.members import Member
from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.registry import rule_named


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. ``parameters`` to ``padding`` are held between a backward pass and its step.

    ``gradients`` are gone after the step; ``padding`` is that of parameters and gradients. ``transient`` is the most
    that was held on top of them at once, so far, on this rank (0 of others). ``sent`` is what a step with one backward
    pass sends.
    """

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    state: int = 0
    padding: int = 0
    transient: int = 0
    sent: int = 0

    @property
    def long_lived(self) -> int:
        return self.parameters + self.gradients + self.masters + self.state + self.padding

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(*(getattr(self, f) + getattr(other, f) for f in self.__slots__))


def rank_memory(
    plan: OwnedPlan,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    *,
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> list[RankMemory]:
    """Per rank of an instance, what it holds of ``members``, which the plan's slots name by position."""
    return [
        sum((_of_bucket(b, rank, plan, members, groups, grad_dtype, keep_full) for b in plan.buckets), RankMemory())
        for rank in range(plan.group_size)
    ]


def _of_bucket(
    bucket: Bucket,
    rank: int,
    plan: OwnedPlan,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> RankMemory:
    dtype = members[bucket.slots[0].param].param.dtype
    owned_dtype = torch.float32 if dtype.itemsize < 4 else dtype
    wire = (grad_dtype or dtype).itemsize
    filled = bucket.numel - bucket.padding
    pieces = list(bucket.pieces(rank))
    owned = sum(piece.numel for piece in pieces)
    start, stop = bucket.parts[rank]
    if keep_full:
        gradients, padding = filled * wire, bucket.padding * wire
    else:
        gradients, padding = owned * owned_dtype.itemsize, (stop - start - owned) * owned_dtype.itemsize
    state = 0
    for piece in pieces:
        member = members[piece.param]
        flat = torch.empty(piece.numel, dtype=owned_dtype, device="meta")
        tensors = rule_named(member.rule).new_state(flat, groups[member.group]).values()
        state += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    across = 2 * (stop - start) * owned_dtype.itemsize * (plan.instances - 1) // plan.instances
    return RankMemory(
        parameters=filled * dtype.itemsize,
        gradients=gradients,
        masters=owned * owned_dtype.itemsize if owned_dtype != dtype else 0,
        state=state,
        padding=bucket.padding * dtype.itemsize + padding,
        sent=bucket.reduce_numels()[rank] * wire + bucket.return_numels()[rank] * dtype.itemsize + across,
    )
