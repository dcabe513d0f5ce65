"""Parameters with several matrices in them, end to end in buckets that are cut between ranks where a matrix ends.

::

    | e0 e1 e2 e3 | e4 e5 | q k v | q k v |     stacks and fused weights, each in one piece, to be a view
    | rank 0  | rank 1  | rank 2  | rank 3 |     matrices lie whole in one part; nothing is padded

So the experts of a stack have several owners, though the stack is one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.buffers.arrangement import Bucket, BucketLayout, Slot
from lwopt_backend.plan.buffers.setting import OwnedParam


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Parameter ``param`` as its matrices, in their order in memory: elements and cost of each."""

    param: int
    parts: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.parts)


def arrange_cut(members: Sequence[Cuttable], before: Sequence[int], dtype: str) -> tuple[Bucket, list[int]]:
    """One bucket of ``members``, in this order, over as many ranks as ``before``, the work that each has anyway.

    Consecutive matrices go to consecutive ranks, so that the busiest one has least to do. Returns the bucket and the
    work that is added to each rank.
    """
    parts = [part for member in members for part in member.parts]
    costs = [cost for _, cost in parts]
    counts = _counts(costs, before)
    slots, end = [], 0
    for member in members:
        slots.append(Slot(member.param, end, member.numel))
        end += member.numel
    bounds, added, first, start = [], [], 0, 0
    for count in counts:
        mine = parts[first : first + count]
        stop = start + sum(numel for numel, _ in mine)
        bounds.append((start, stop))
        added.append(sum(cost for _, cost in mine))
        first, start = first + count, stop
    sizes = {stop - start for start, stop in bounds}
    layout: BucketLayout = "padded" if len(sizes) == 1 else "compact"
    return Bucket("matrix", layout, dtype, tuple(slots), tuple(bounds), end), added


def _counts(costs: Sequence[int], before: Sequence[int]) -> list[int]:
    """How many consecutive matrices each rank takes: the least largest sum, found by bisection."""
    low, high = max(before), max(before) + sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _filled(costs, before, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = _filled(costs, before, low)
    assert found is not None
    return found


def _filled(costs: Sequence[int], before: Sequence[int], limit: int) -> list[int] | None:
    """Every rank takes what fits under the limit; None if some are left."""
    counts, place = [], 0
    for load in before:
        first = place
        while place < len(costs) and load + costs[place] <= limit:
            load += costs[place]
            place += 1
        counts.append(place - first)
    return counts if place == len(costs) else None


def cut_buckets(
    params: Sequence[OwnedParam], bucket_numel: int, before: Sequence[int]
) -> tuple[list[Bucket], list[int], list[str]]:
    """Parameters with several matrices, in backward order; a bucket is closed at ``bucket_numel``."""
    buckets: list[Bucket] = []
    loads = [0] * len(before)
    open_buckets: dict[str, list[Cuttable]] = {}
    cuttable = [i for i in reversed(range(len(params))) if params[i].parts]
    for index in cuttable:
        param = params[index]
        members = open_buckets.setdefault(param.dtype, [])
        members.append(Cuttable(index, param.parts))
        last = all(params[other].dtype != param.dtype for other in cuttable if other < index)
        if last or sum(member.numel for member in members) >= bucket_numel:
            work = [had + more for had, more in zip(before, loads)]
            bucket, added = arrange_cut(open_buckets.pop(param.dtype), work, param.dtype)
            buckets.append(bucket)
            loads = [had + more for had, more in zip(loads, added)]
    matrices = sum(len(params[index].parts) for index in cuttable)
    told = f"{matrices} matrices of {len(cuttable)} parameters that hold several are owned one by one."
    return buckets, loads, [told]
