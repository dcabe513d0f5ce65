"""Where the parameters of a bucket lie in its buffer, and which part of the buffer is whose.

::

    padded     | a a a . | b b c . | d d d d |     equal parts, one per rank, every parameter starts on 64 elements
    compact    | a a a | b b c | d d d d |         parts as long as what they hold: no padding anywhere

Matrices lie whole in the part of their owner. Element-wise parameters lie end to end and are cut wherever a part ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lwopt_backend.plan.buffers.layout import BufferPlan, aligned_shard
from lwopt_backend.plan.buffers.stream import ALIGNMENT, aligned, shard_multiple

Kind = Literal["matrix", "elementwise"]
BucketLayout = Literal["padded", "compact"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Parameter ``param`` in elements [offset, offset + numel) of a bucket's buffer."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of flattened parameter ``param``, from ``offset`` of the bucket's buffer on."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's buffer of ``numel`` elements. Rank r of those that share it owns ``parts[r]``, a (start, stop)."""

    kind: Kind
    layout: BucketLayout
    dtype: str
    slots: tuple[Slot, ...]
    parts: tuple[tuple[int, int], ...]
    numel: int

    def __post_init__(self) -> None:
        end = 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            if slot.offset < end or slot.offset + slot.numel > self.numel:
                raise ValueError(f"parameter {slot.param} at {slot.offset} overlaps another or leaves the buffer")
            end = slot.offset + slot.numel
        end = 0
        for start, stop in sorted(self.parts):
            if start != end or stop < start:
                raise ValueError(f"parts {self.parts} are not a partition of {self.numel} elements")
            end = stop
        if end != self.numel:
            raise ValueError(f"parts {self.parts} are not a partition of {self.numel} elements")

    @property
    def padding(self) -> int:
        """Elements of the buffer that no parameter has."""
        return self.numel - sum(slot.numel for slot in self.slots)

    @property
    def even(self) -> bool:
        """Whether the parts are equal and in rank order, so that fixed-size collectives move them."""
        size = self.numel // len(self.parts)
        return all(part == (rank * size, (rank + 1) * size) for rank, part in enumerate(self.parts))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What ``rank`` owns, in the order of the buffer."""
        return self._pieces(sorted(self.slots, key=lambda slot: slot.offset), rank)

    def pieces_of_all(self) -> list[list[Piece]]:
        """Per rank, what it owns; of many ranks in less time than one by one."""
        slots = sorted(self.slots, key=lambda slot: slot.offset)
        ends = [slot.offset + slot.numel for slot in slots]
        starts = [slot.offset for slot in slots]
        found = []
        for rank, (start, stop) in enumerate(self.parts):
            near = slots[bisect_right(ends, start) : bisect_left(starts, stop)]
            found.append(list(self._pieces(near, rank)))
        return found

    def _pieces(self, slots: Sequence[Slot], rank: int) -> Iterator[Piece]:
        start, stop = self.parts[rank]
        for slot in slots:
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                yield Piece(slot.param, low - slot.offset, high - slot.offset, low)

    def reduce_numels(self) -> list[int]:
        """Per rank, the elements that it sends to bring gradients to their owners: all but its own part."""
        return [self.numel - (stop - start) for start, stop in self.parts]

    def return_numels(self) -> list[int]:
        """Per rank, the elements that it sends to bring new parameters to everybody: its part to each other rank."""
        return [(stop - start) * (len(self.parts) - 1) for start, stop in self.parts]

    def line(self) -> str:
        """One line that all ranks must agree on."""
        places = " ".join(f"{slot.param}@{slot.offset}+{slot.numel}" for slot in self.slots)
        return f"{self.kind} {self.layout} {self.dtype} {places} in parts {self.parts}"


def arrange_matrices(
    plan: BufferPlan, params: Sequence[int], layout: BucketLayout, dtype: str, *, multiple: int = 1
) -> list[Bucket]:
    """The buckets of ``plan``, whose matrix i is parameter ``params[i]``, in backward order.

    A padded buffer ends on a multiple of ``multiple``, beyond the usual alignment.
    """
    members: list[list[list[int]]] = [[[] for _ in range(plan.shards)] for _ in plan.shard_numels]
    for index in reversed(range(len(plan.atoms))):
        members[plan.buckets[index]][plan.owners[index]].append(index)
    numels = [atom.numel for atom in plan.atoms]
    buckets = []
    for of_ranks in members:
        if layout == "padded":
            size = max(sum(aligned(numels[i]) for i in mine) for mine in of_ranks)
            size = _part_size(size, plan.shards, multiple)
            parts = [(rank * size, (rank + 1) * size) for rank in range(plan.shards)]
        else:
            of_ranks = [sorted(mine, key=lambda i: numels[i] % ALIGNMENT > 0) for mine in of_ranks]
            parts = _end_to_end([sum(numels[i] for i in mine) for mine in of_ranks])
        slots = []
        for (start, _), mine in zip(parts, of_ranks):
            for index in mine:
                slots.append(Slot(params[index], start, numels[index]))
                start += aligned(numels[index]) if layout == "padded" else numels[index]
        buckets.append(Bucket("matrix", layout, dtype, tuple(slots), tuple(parts), max(stop for _, stop in parts)))
    return buckets


def arrange_elementwise(
    members: Sequence[tuple[int, int]], shards: int, layout: BucketLayout, dtype: str, *, multiple: int = 1
) -> Bucket:
    """One bucket of (parameter, elements), cut evenly; a compact one on 64 elements, its last part is shorter."""
    if layout == "compact":
        members = sorted(members, key=lambda member: member[1] % ALIGNMENT > 0)
    slots, end = [], 0
    for param, numel in members:
        slots.append(Slot(param, end, numel))
        end += aligned(numel) if layout == "padded" else numel
    if layout == "padded":
        size = _part_size(-(-end // shards), shards, multiple)
        parts = [(rank * size, (rank + 1) * size) for rank in range(shards)]
        return Bucket("elementwise", layout, dtype, tuple(slots), tuple(parts), shards * size)
    size = aligned(-(-end // shards))
    parts = [(min(end, rank * size), min(end, (rank + 1) * size)) for rank in range(shards)]
    return Bucket("elementwise", layout, dtype, tuple(slots), tuple(parts), end)


def _part_size(numel: int, shards: int, multiple: int) -> int:
    """At least ``numel``, so that ``shards`` parts end on lcm(shards, 128) and on ``multiple``."""
    size = aligned_shard(numel, shards)
    while size * shards % multiple:
        size += shard_multiple(shards)
    return size


def _end_to_end(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Parts of these sizes; those that are no multiple of the alignment come last, so that they shift no other."""
    parts = [(0, 0)] * len(sizes)
    end = 0
    for rank in sorted(range(len(sizes)), key=lambda r: sizes[r] % ALIGNMENT > 0):
        parts[rank] = (end, end + sizes[rank])
        end += sizes[rank]
    return parts
