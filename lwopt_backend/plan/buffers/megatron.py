"""What Megatron-Core plans for the same matrices: the reference that a plan of ours is never worse than.

Written from the behaviour of ``LayerWiseDistributedOptimizer`` (Megatron-LM, August 2026): buckets close by a soft
minimum size, shards are filled by Megatron's cost estimate with loads carried over, within 1.3 times the mean size;
``ping_pong`` is its older assignment, which its compact layout still uses. ``benchmarks/planner.py`` compares the
results with figures that Megatron's own code gave.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lwopt_backend.plan.buffers.cuts import Cuts
from lwopt_backend.plan.buffers.stream import Stream

SOFT_MINIMUM = 0.9  # of shards x the bucket's largest matrix
CAP = 1.3  # of a shard's mean size


def closing_rule(stream: Stream, shards: int, bucket_numel: int | None) -> Cuts:
    """Megatron's buckets: at least ``bucket_numel``, then as long as the next matrix fits into existing padding."""
    if bucket_numel is None:
        return (0, len(stream))
    cuts = [0]
    loads, highest, filled, largest = [0] * shards, 0, 0, 0
    for position, numel in enumerate(stream.numels):
        enough = filled >= max(bucket_numel, int(shards * largest * SOFT_MINIMUM))
        if position > cuts[-1] and enough and loads[0] + numel > highest:
            cuts.append(position)
            loads, highest, filled, largest = [0] * shards, 0, 0, 0
        highest = max(highest, loads[0] + numel)
        heapq.heapreplace(loads, loads[0] + numel)
        filled += numel
        largest = max(largest, numel)
    return (*cuts, len(stream))


def capped_shards(stream: Stream, cuts: Cuts, shards: int) -> list[int]:
    """Megatron's owners, by position: the costliest matrix first, to the least loaded shard that has room."""
    owners = [0] * len(stream)
    loads = [0] * shards
    for start, stop in zip(cuts, cuts[1:]):
        _fill_bucket(stream, range(start, stop), owners, loads)
    return owners


def _fill_bucket(stream: Stream, bucket: range, owners: list[int], loads: list[int]) -> None:
    numels, costs = stream.numels, stream.estimates
    filled = [0] * len(loads)
    cap = sum(numels[i] for i in bucket) / len(loads) * CAP
    smallest = min(numels[i] for i in bucket)
    lightest = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(lightest)
    for position in sorted(bucket, key=lambda i: -costs[i]):
        owner = _with_room(lightest, filled, cap, numels[position], smallest)
        if owner is None:
            owner = min(range(len(filled)), key=filled.__getitem__)
            lightest = [entry for entry in lightest if entry[1] != owner]
            heapq.heapify(lightest)
        owners[position] = owner
        filled[owner] += numels[position]
        loads[owner] += costs[position]
        if filled[owner] + smallest <= cap:
            heapq.heappush(lightest, (loads[owner], owner))


def _with_room(lightest: list[tuple[int, int]], filled: list[int], cap: float, numel: int, smallest: int) -> int | None:
    """Takes the least loaded shard with room for ``numel`` off the heap; shards with room for nothing are dropped."""
    passed = []
    owner = None
    while lightest and owner is None:
        load, shard = heapq.heappop(lightest)
        if filled[shard] + numel <= cap:
            owner = shard
        elif filled[shard] + smallest <= cap:
            passed.append((load, shard))
    for entry in passed:
        heapq.heappush(lightest, entry)
    return owner


def ping_pong(numels: Sequence[int], shards: int) -> list[int]:
    """Owners of matrices of ``numels`` in model order: sorted by size, dealt 0..n-1, n-1..0, and so on."""
    owners = [0] * len(numels)
    for place, index in enumerate(sorted(range(len(numels)), key=numels.__getitem__)):
        turn, step = divmod(place, shards)
        owners[index] = step if turn % 2 == 0 else shards - 1 - step
    return owners
