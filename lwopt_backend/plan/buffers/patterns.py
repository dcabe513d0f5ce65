"""Packing matrices into equal bins, by patterns.

A model repeats few shapes many times. So a bin is filled once, as well as its room allows, and that filling is repeated
as often as the matrices last: a thousand bins of forty thousand matrices take a millisecond, whatever their number.
The filling of one bin is the minimum-bin-slack idea of Gupta and Ho (1999), over kinds instead of items.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

SEARCH_NODES = 50  # of one bin's search after its first filling; more finds nothing better on the models tried


@dataclass(frozen=True, slots=True)
class Pattern:
    """A bin's content, ``counts`` of (kind, how many), used by ``times`` bins."""

    counts: tuple[tuple[int, int], ...]
    times: int


def height_bound(sizes: Sequence[int], counts: Sequence[int], bins: int) -> int:
    """No packing into ``bins`` has a lower highest bin. ``sizes`` fall.

    The mean; and, of c items that are at least as large as one of size s, some bin holds ceil(c / bins).
    """
    total = larger = bound = 0
    for size, count in zip(sizes, counts):
        if count:
            total += size * count
            larger += count
            bound = max(bound, -(-larger // bins) * size)
    return max(bound, -(-total // bins))


def pack(
    sizes: Sequence[int], counts: Sequence[int], bins: int, *, tolerance: float = 1e-3
) -> tuple[int, list[Pattern]]:
    """The lowest height found, and patterns of that height. ``sizes`` fall and may repeat.

    Tries the bound itself, then rooms above it until one fits, then halves the gap down to ``tolerance``.
    """
    bound = height_bound(sizes, counts, bins)
    found = fit(sizes, counts, bins, bound)
    if found is not None:
        return bound, found
    low, room, step = bound, float(bound), max(1.0, bound * 0.004)
    while found is None:
        low, room, step = int(room), room + step, step * 1.6
        found = fit(sizes, counts, bins, int(room))
    high = int(room)
    while high - low > max(1, int(bound * tolerance)):
        middle = (low + high) // 2
        tried = fit(sizes, counts, bins, middle)
        low, high, found = (low, middle, tried) if tried is not None else (middle, high, found)
    return max(sum(sizes[kind] * count for kind, count in pattern.counts) for pattern in found), found


def fit(sizes: Sequence[int], counts: Sequence[int], bins: int, room: int) -> list[Pattern] | None:
    """Patterns for at most ``bins`` bins of ``room`` that hold everything, or None if this search finds none."""
    left = list(counts)
    remaining = sum(size * count for size, count in zip(sizes, left))
    patterns: list[Pattern] = []
    first = 0
    while True:
        while first < len(left) and not left[first]:
            first += 1
        if first == len(left):
            return patterns
        spare = bins * room - remaining
        if spare < 0 or bins == 0 or sizes[first] > room:
            return None
        best, slack = _BinSearch(sizes, left, room, good=spare // bins).fill(first)
        if slack > spare:
            return None
        times = min(bins, *(left[kind] // count for kind, count in best))
        if slack * bins > spare:  # a wasteful filling: only as often as the spare room lasts
            times = min(times, spare // slack)
        patterns.append(Pattern(tuple(best), times))
        for kind, count in best:
            left[kind] -= count * times
        remaining -= (room - slack) * times
        bins -= times


class _BinSearch:
    """Depth first over kinds, the largest first, for the fullest bin; ends at the first with at most ``good`` slack."""

    def __init__(self, sizes: Sequence[int], left: Sequence[int], room: int, *, good: int) -> None:
        self.sizes, self.left, self.room, self.good = sizes, left, room, good
        self.nodes = SEARCH_NODES
        self.filled_once = False
        self.chosen: list[tuple[int, int]] = []
        self.best: list[tuple[int, int]] = []
        self.slack = room + 1

    def fill(self, first: int) -> tuple[list[tuple[int, int]], int]:
        """The best bin that holds at least one of kind ``first``, which fits, and its slack."""
        for count in range(self._most(first, self.room), 0, -1):
            self._take(first, count, self.room)
            if self._done():
                break
        return self.best, self.slack

    def _most(self, kind: int, room: int) -> int:
        return min(self.left[kind], room // self.sizes[kind])

    def _done(self) -> bool:
        return self.slack <= self.good or (self.filled_once and self.nodes < 0)

    def _take(self, kind: int, count: int, room: int) -> None:
        if count:
            self.chosen.append((kind, count))
        self._dive(kind + 1, room - count * self.sizes[kind])
        if count:
            self.chosen.pop()

    def _dive(self, kind: int, room: int) -> None:
        self.nodes -= self.filled_once
        while kind < len(self.left) and not self._most(kind, room):
            kind += 1
        if room < self.slack:
            self.best, self.slack = list(self.chosen), room
        if kind == len(self.left):
            self.filled_once = True
            return
        if self._done():
            return
        for count in range(self._most(kind, room), -1, -1):
            self._take(kind, count, room)
            if self._done():
                return


def longest_first(sizes: Sequence[int], counts: Sequence[int], bins: int) -> tuple[int, list[Pattern]]:
    """The longest item to the lowest bin, and so on (Graham 1969): the height, and one pattern a bin."""
    heights = [(0, index) for index in range(bins)]
    content: list[dict[int, int]] = [{} for _ in range(bins)]
    for kind, count in enumerate(counts):
        for _ in range(count):
            height, index = heights[0]
            content[index][kind] = content[index].get(kind, 0) + 1
            heapq.heapreplace(heights, (height + sizes[kind], index))
    return max(heights)[0], [Pattern(tuple(sorted(bin.items())), 1) for bin in content if bin]
