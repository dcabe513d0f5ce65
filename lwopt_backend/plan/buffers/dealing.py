"""Who owns which matrix of a buffer, and where its buckets close.

Everything is integer arithmetic in a fixed order, so every rank and every machine finds the same plan.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

SOFT_MINIMUM = 0.9  # of a bucket's largest matrix times the ranks, as in Megatron-Core
MORE_ROOM = (5, 1)  # percent by which a rank's part may exceed its minimum, so that the work can be even
MOST_PARTS = 2**16  # buckets times ranks; the time of planning grows with these
Sizes = list[tuple[int, int]]  # a size, and its count


def ends_where_even(numels: Sequence[int], ranks: int, bucket_numel: int) -> list[int]:
    """Where padded buckets end: at ``bucket_numel``, and then before a matrix that would add padding to all ranks.

    A bucket has ``SOFT_MINIMUM`` times its largest matrix for each rank. Megatron-Core closes its buckets by this rule
    (``LayerWiseDistributedOptimizer``, August 2026).
    """
    ends: list[int] = []
    parts, fullest, filled, largest = [0] * ranks, 0, 0, 0
    for place, numel in enumerate(numels):
        enough = filled >= max(bucket_numel, int(ranks * largest * SOFT_MINIMUM))
        if filled and enough and parts[0] + numel > fullest:
            ends.append(place)
            parts, fullest, filled, largest = [0] * ranks, 0, 0, 0
        part = parts[0] + numel
        heapq.heapreplace(parts, part)
        fullest, filled, largest = max(fullest, part), filled + numel, max(largest, numel)
    return [*ends, len(numels)]


def ends_where_full(numels: Sequence[int], ranks: int, bucket_numel: int) -> list[int]:
    """Where compact buckets end: as soon as they have ``bucket_numel`` elements.

    A bucket of a model with very many matrices is larger, so that a plan has at most ``MOST_PARTS`` parts.
    """
    enough = max(bucket_numel, -(-sum(numels) * ranks // MOST_PARTS))
    ends, filled = [], 0
    for place, numel in enumerate(numels[:-1], start=1):
        filled += numel
        if filled >= enough:
            ends.append(place)
            filled = 0
    return [*ends, len(numels)]


def deal(numels: Sequence[int], costs: Sequence[int], loads: list[int], room: int) -> list[int]:
    """Owners of matrices: the costliest first, to the rank with the least work that has ``room`` (Graham 1969).

    Equal matrices are dealt to ranks in turn, because a rank is no longer the first once it has one. A matrix for which
    no rank has room goes to the rank with the fewest elements. ``loads``, each rank's work so far, is updated.
    """
    filled = [0] * len(loads)
    smallest = min(numels)
    ready = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ready)
    passed: list[tuple[int, int]] = []  # ranks without room for a matrix of this size
    size = 0
    owners = [0] * len(numels)
    for place in sorted(range(len(numels)), key=lambda place: -costs[place]):
        if numels[place] != size:
            size, ready, passed = numels[place], [*ready, *passed], []
            heapq.heapify(ready)
        owner = None  # ranks without any room are dropped
        while ready and owner is None:
            entry = heapq.heappop(ready)
            if filled[entry[1]] + size <= room:
                owner = entry[1]
            elif filled[entry[1]] + smallest <= room:
                passed.append(entry)
        if owner is None:
            owner = min(range(len(filled)), key=filled.__getitem__)
            passed = [entry for entry in passed if entry[1] != owner]
        owners[place] = owner
        filled[owner] += size
        loads[owner] += costs[place]
        if filled[owner] + smallest <= room:
            heapq.heappush(ready, (loads[owner], owner))
    return owners


def deal_padded(numels: Sequence[int], costs: Sequence[int], loads: list[int]) -> list[int]:
    """Owners of a padded bucket's matrices, by the best of three deals: two with ``MORE_ROOM``, one in bins.

    The best has the least sum of two ratios: the longest part to the mean part, and a rank's maximum work, including
    earlier buckets, to the mean work. ``loads`` is updated.
    """
    ranks, room = len(loads), least_room(numels, len(loads))
    work = max(1, sum(loads) + sum(costs))
    best: tuple[Fraction, list[int], list[int]] | None = None
    deals = [*((deal, room * (100 + more) // 100) for more in MORE_ROOM), (deal_bins, room)]
    for deal_in, most in deals:
        after, parts = list(loads), [0] * ranks
        owners = deal_in(numels, costs, after, most)
        for numel, owner in zip(numels, owners):
            parts[owner] += numel
        uneven = Fraction(max(parts), sum(numels)) + Fraction(max(after), work)
        if best is None or uneven < best[0]:
            best = uneven, owners, after
    assert best is not None
    loads[:] = best[2]
    return best[1]


def deal_bins(numels: Sequence[int], costs: Sequence[int], loads: list[int], room: int) -> list[int]:
    """Owners of matrices packed in bins: the largest first, each into the first bin that has ``room``.

    The costliest bin then goes to the rank with the least work. A matrix for which no bin has room goes into the
    emptiest. ``loads`` is updated.
    """
    filled = [0] * len(loads)
    bins: list[list[int]] = [[] for _ in loads]
    place, size = 0, 0
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], -costs[index])):
        if numels[index] != size:
            place, size = 0, numels[index]
        while place < len(bins) and filled[place] + size > room:  # as full for the next matrix of this size
            place += 1
        chosen = place if place < len(bins) else min(range(len(bins)), key=filled.__getitem__)
        filled[chosen] += size
        bins[chosen].append(index)
    bins.sort(key=lambda content: -sum(costs[index] for index in content))
    owners = [0] * len(numels)
    for rank, content in zip(sorted(range(len(loads)), key=loads.__getitem__), bins):
        for index in content:
            owners[index] = rank
            loads[rank] += costs[index]
    return owners


def least_room(numels: Sequence[int], ranks: int) -> int:
    """The room that ranks need for matrices of these sizes, by MULTIFIT (Coffman et al. 1978).

    At most 13/11 of the best deal's.
    """
    sizes = sorted(Counter(numels).items(), reverse=True)
    low = max(sizes[0][0], -(-sum(numels) // ranks))
    if _fit(sizes, ranks, low):
        return low
    high = 2 * low  # first fit needs no more: every rank but one would be more than half full
    while high - low > max(1, low // 10_000):
        middle = (low + high) // 2
        low, high = (low, middle) if _fit(sizes, ranks, middle) else (middle, high)
    return high


def _fit(sizes: Sizes, ranks: int, room: int) -> bool:
    """Whether all fit if the largest come first, each to the first rank with room for it."""
    alike = [(room, ranks)]  # one entry for ranks with the same room left
    for size, count in sizes:
        after: Sizes = []
        for left, times in alike:
            each = left // size
            full = min(times, count // each) if each else 0
            count -= full * each
            rest = min(count, each) if full < times else 0
            count -= rest
            after += [(left - full_of * size, n) for full_of, n in ((each, full), (rest, int(rest > 0))) if n]
            if times - full - (rest > 0):
                after.append((left, times - full - (rest > 0)))
        alike = after
        if count:
            return False
    return True
