"""A plan on top of work that its ranks have anyway: dense matrices beside experts, whose owners are settled first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lwopt_backend.plan.buffers.layout import BufferPlan, aligned_shard
from lwopt_backend.plan.buffers.placement import place_costliest_first
from lwopt_backend.plan.buffers.refine import relieve
from lwopt_backend.plan.buffers.stream import Stream


def on_top_of(plan: BufferPlan, base: Sequence[int]) -> BufferPlan:
    """``plan`` with owners such that the largest sum of a shard's ``base`` and its load is small; no more padding.

    Of three plans the one with the smallest largest sum, the earlier on a tie: as it is, its shards dealt out anew (the
    costliest to the rank with the least ``base``), its matrices placed anew in shards that are no larger.
    """
    return min(_candidates(plan, base), key=lambda candidate: max(map(sum, zip(base, candidate.loads()))))


def _candidates(plan: BufferPlan, base: Sequence[int]) -> Iterator[BufferPlan]:
    yield plan
    loads = plan.loads()
    heavy_first = sorted(range(plan.shards), key=lambda shard: (-loads[shard], shard))
    light_first = sorted(range(plan.shards), key=lambda shard: (base[shard], shard))
    rank_of = dict(zip(heavy_first, light_first))
    yield replace(plan, owners=tuple(rank_of[owner] for owner in plan.owners))
    stream = Stream(plan.atoms)
    of_bucket = list(reversed(plan.buckets))
    cuts = (0, *(i for i in range(1, len(of_bucket)) if of_bucket[i] != of_bucket[i - 1]), len(of_bucket))
    caps = list(plan.shard_numels) if plan.layout == "padded" else [plan.numel + len(stream) * 64] * (len(cuts) - 1)
    placed = place_costliest_first(stream, cuts, stream.costs, caps, plan.shards, base)
    if all(height <= cap for height, cap in zip(placed.heights, caps)):
        relieve(placed, caps)
        heights = tuple(aligned_shard(height, plan.shards) for height in placed.heights)
        numels = plan.shard_numels if plan.layout == "padded" else heights
        yield replace(plan, owners=tuple(reversed(placed.owners)), shard_numels=numels)
