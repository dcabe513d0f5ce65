"""The bytes that a rank stores and sends in owned storage, computed from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.config.hosts import OwnedConfig
from lwopt_backend.config.registry import state_nbytes
from lwopt_backend.plan.buffers.layout import Bucket, Piece
from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.routing.grouping import Member
from lwopt_backend.runtime.buckets import all_reduce_nbytes
from lwopt_backend.runtime.whole import owned_dtype
from lwopt_backend.storage.owned import Holdings, OwnedCore


def memory_of_all(core: OwnedCore, groups: Sequence[Mapping[str, Any]], config: OwnedConfig) -> list[RankMemory]:
    """The bytes of every rank, transient ones included. Called on all ranks."""
    kept = sum(bucket.grad_nbytes for bucket in core.manager.buckets)
    mine = RankMemory(transient=max(0, core.manager.ledger.most_held - kept), state=core.stepper.owner_nbytes())
    for held in core.holdings:
        mine += memory_of(core, groups, config, held, held.sharers.instance.rank)
    return core.holdings[0].sharers.everyone.gather_objects(mine)


def memory_of(
    core: OwnedCore, groups: Sequence[Mapping[str, Any]], config: OwnedConfig, held: Holdings, rank: int
) -> RankMemory:
    """The bytes of ``rank`` of an instance for what ``held`` shares."""
    members = [core.members[number] for number in held.numbers]
    grad_dtype = torch.float32 if config.grad_dtype == "float32" else None
    return rank_memory(held.plan, rank, members, groups, grad_dtype=grad_dtype, keep_full=config.keep_full_grads)


def rank_memory(
    plan: OwnedPlan,
    rank: int,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    *,
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> RankMemory:
    """The bytes of ``rank`` of an instance for ``members``, which the plan's slots name by position."""
    of_buckets = (
        _of_bucket(bucket, rank, list(bucket.pieces(rank)), plan, members, groups, grad_dtype, keep_full)
        for bucket in plan.buckets
    )
    return sum(of_buckets, RankMemory())


def rank_memories(
    plan: OwnedPlan,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    *,
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> list[RankMemory]:
    """``rank_memory`` of every rank of an instance."""
    found = [RankMemory()] * plan.group_size
    for bucket in plan.buckets:
        for rank, pieces in enumerate(bucket.pieces_of_all()):
            found[rank] += _of_bucket(bucket, rank, pieces, plan, members, groups, grad_dtype, keep_full)
    return found


def _of_bucket(
    bucket: Bucket,
    rank: int,
    pieces: Sequence[Piece],
    plan: OwnedPlan,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> RankMemory:
    dtype = members[bucket.slots[0].param].param.dtype
    stepped = owned_dtype(dtype)
    wire = (grad_dtype or dtype).itemsize
    filled = bucket.numel - bucket.padding
    owned = sum(piece.numel for piece in pieces)
    start, stop = bucket.parts[rank]
    if keep_full:
        gradients, padding = filled * wire, bucket.padding * wire
    else:
        gradients, padding = owned * stepped.itemsize, (stop - start - owned) * stepped.itemsize
    state = 0
    for piece in pieces:
        member = members[piece.param]
        state += state_nbytes(piece.numel, groups[member.group], stepped)
    gathered = bucket.return_numels()[rank]
    sent = bucket.reduce_numels()[rank] * wire + gathered * (dtype.itemsize + (wire if keep_full else 0))
    sent += all_reduce_nbytes((stop - start) * stepped.itemsize, plan.instances)
    return RankMemory(
        parameters=filled * dtype.itemsize,
        gradients=gradients,
        masters=owned * stepped.itemsize if stepped != dtype else 0,
        state=state,
        padding=bucket.padding * dtype.itemsize + padding,
        sent=sent,
    )
