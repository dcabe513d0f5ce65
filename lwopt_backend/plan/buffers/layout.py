"""Plain PyTorch's buckets: the planned parameters, buckets with slots and shards, and the arrangement of parameters."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, get_args

from lwopt_backend.plan.atoms import Atom


@dataclass(frozen=True, slots=True)
class BufferParam:
    """A parameter as planning sees it. ``atom`` is None for an element-wise one; a ``tied`` one is used several times.

    ``parts`` are the elements and cost of its matrices, if it has several that lie end to end.
    """

    name: str
    numel: int
    dtype: str
    atom: Atom | None
    tied: bool = False
    parts: tuple[tuple[int, int], ...] = ()


Layout = Literal["auto", "padded", "compact"]  # as an option; auto is one of the others
LAYOUTS = get_args(Layout)
ALIGNMENT = 64  # elements; every matrix starts on a multiple, as in Megatron-Core (cuBLASLt wants 128 bytes in bf16)


def aligned(numel: int) -> int:
    """``numel`` rounded up to the alignment of a matrix's start."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


BUCKET_END = 128  # elements; a padded bucket ends on a multiple of it and of the ranks, as in Megatron-Core
NCCL_BUCKET_END = 2**16  # likewise with pad_buckets_for_high_nccl_busbw


def shard_multiple(world_size: int, end: int = BUCKET_END) -> int:
    """The multiple for a shard's size so that a bucket ends on a multiple of lcm(world_size, ``end``) elements."""
    return math.lcm(ALIGNMENT, math.lcm(world_size, end) // world_size)


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1.0 is perfect, also without any load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def aligned_shard(numel: int, shards: int, end: int = BUCKET_END) -> int:
    """A shard's size rounded up to where the next bucket may start."""
    multiple = shard_multiple(shards, end)
    return -(-numel // multiple) * multiple


# Where a bucket's parameters are in its buffer, and which rank owns which part of the buffer.
#
# ::
#
#     padded     | a a a . | b b c . | d d d d |     equal parts, one per rank, every parameter starts on 64 elements
#     compact    | a a a | b b c | d d d d |         parts of exact lengths: no padding anywhere
#
# A matrix is whole in its owner's part. Element-wise parameters are concatenated and cut wherever a part ends.

Kind = Literal["matrix", "elementwise"]
BucketLayout = Literal["padded", "compact"]


def never(layout: NoReturn) -> NoReturn:
    """At the end of every choice by the layout: mypy tells where a new one is missing."""
    raise AssertionError(layout)


def place_numel(numel: int, layout: BucketLayout) -> int:
    """The elements of a bucket's buffer that a parameter takes."""
    if layout == "padded":
        return aligned(numel)
    if layout == "compact":
        return numel
    never(layout)


@dataclass(frozen=True, slots=True)
class Slot:
    """Parameter ``param`` in elements [offset, offset + numel) of a bucket's buffer."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of flattened parameter ``param``, beginning at ``offset`` of the bucket's buffer."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's buffer of ``numel`` elements. Rank r of those that share it owns ``parts[r]``, a (start, stop).

    ``owned`` is (rank, start, stop) of the parts that have elements. ``even`` is whether all are equal and in rank
    order, so that fixed-size collectives can exchange them.
    """

    kind: Kind
    layout: BucketLayout
    dtype: str
    slots: tuple[Slot, ...]
    parts: tuple[tuple[int, int], ...]
    numel: int
    padding: int = field(init=False)  # elements of the buffer that no parameter has
    even: bool = field(init=False)
    owned: tuple[tuple[int, int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "padding", self.numel - sum(slot.numel for slot in self.slots))
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
        size = self.numel // len(self.parts)
        even = all(part == (rank * size, (rank + 1) * size) for rank, part in enumerate(self.parts))
        owned = tuple((rank, start, stop) for rank, (start, stop) in enumerate(self.parts) if start < stop)
        object.__setattr__(self, "even", even)
        object.__setattr__(self, "owned", owned)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The pieces that ``rank`` owns, in the order of the buffer."""
        return self._pieces(sorted(self.slots, key=lambda slot: slot.offset), rank)

    def pieces_of_all(self) -> list[list[Piece]]:
        """Per rank, the pieces that it owns; faster than ``pieces`` for many ranks."""
        slots = sorted(self.slots, key=lambda slot: slot.offset)
        ends = [slot.offset + slot.numel for slot in slots]
        starts = [slot.offset for slot in slots]
        found = []
        for rank, (start, stop) in enumerate(self.parts):
            near = slots[bisect_right(ends, start) : bisect_left(starts, stop)] if start < stop else []
            found.append(list(self._pieces(near, rank)) if near else [])
        return found

    def _pieces(self, slots: Sequence[Slot], rank: int) -> Iterator[Piece]:
        start, stop = self.parts[rank]
        for slot in slots:
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                yield Piece(slot.param, low - slot.offset, high - slot.offset, low)

    def sent_numels(self, rank: int) -> tuple[int, int]:
        """The elements that a rank sends to reduce gradients to their owners: all but its own part. And with new
        parameters: its part, to each other rank."""
        start, stop = self.parts[rank]
        return self.numel - (stop - start), (stop - start) * (len(self.parts) - 1)

    def line(self) -> str:
        """The line that must be equal on all ranks."""
        places = " ".join(f"{slot.param}@{slot.offset}+{slot.numel}" for slot in self.slots)
        return f"{self.kind} {self.layout} {self.dtype} {places} in parts {self.parts}"


def arrange_matrices(
    members: Sequence[tuple[int, int]],
    owners: Sequence[int],
    shards: int,
    layout: BucketLayout,
    dtype: str,
    end: int = BUCKET_END,
) -> Bucket:
    """One bucket of (parameter, elements) in backward order, each in the part of its owner, one of ``shards`` ranks."""
    of_ranks: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    for member, owner in zip(members, owners):
        of_ranks[owner].append(member)
    if layout == "padded":
        size = max(sum(aligned(numel) for _, numel in mine) for mine in of_ranks)
        size = aligned_shard(size, shards, end)
        parts = [(rank * size, (rank + 1) * size) for rank in range(shards)]
    elif layout == "compact":
        of_ranks = [
            sorted(mine, key=lambda member: member[1] % ALIGNMENT > 0) if len(mine) > 1 else mine for mine in of_ranks
        ]
        sizes = [sum(numel for _, numel in mine) for mine in of_ranks]
        parts, filled = [(0, 0)] * shards, 0
        # Unaligned sizes come last, so that they shift no other part.
        for rank in sorted(range(shards), key=lambda r: sizes[r] % ALIGNMENT > 0):
            parts[rank] = (filled, filled + sizes[rank])
            filled += sizes[rank]
    else:
        never(layout)
    slots = []
    for (start, _), mine in zip(parts, of_ranks):
        for param, numel in mine:
            slots.append(Slot(param, start, numel))
            start += place_numel(numel, layout)
    return Bucket("matrix", layout, dtype, tuple(slots), tuple(parts), max(stop for _, stop in parts))


def arrange_elementwise(
    members: Sequence[tuple[int, int]], shards: int, layout: BucketLayout, dtype: str, multiple: int = BUCKET_END
) -> Bucket:
    """One bucket of (parameter, elements), cut evenly; a compact one at 64 elements, with a shorter last part."""
    if layout == "compact":
        members = sorted(members, key=lambda member: member[1] % ALIGNMENT > 0)
    slots, end = [], 0
    for param, numel in members:
        slots.append(Slot(param, end, numel))
        end += place_numel(numel, layout)
    if layout == "padded":
        size = aligned_shard(-(-end // shards), shards, multiple)
        end = shards * size
    elif layout == "compact":
        size = aligned(-(-end // shards))
    else:
        never(layout)
    parts = [(min(end, rank * size), min(end, (rank + 1) * size)) for rank in range(shards)]
    return Bucket("elementwise", layout, dtype, tuple(slots), tuple(parts), end)
