"""Owned buffers: what is planned, buckets with slots and shards, and the arrangement of parameters."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from operator import sub
from typing import Literal

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import CostModel, Machine, max_min_squared, per_rank


@dataclass(frozen=True, slots=True)
class OwnedParam:
    """A parameter as planning sees it. ``atom`` is None for an element-wise one; a ``tied`` one is used several times.

    ``parts`` are the elements and cost of its matrices, if it has several that lie end to end.
    """

    name: str
    numel: int
    dtype: str
    atom: Atom | None
    tied: bool = False
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """How to plan. ``bucket_numel`` is the least size of a bucket; a padded one ends on a ``bus_multiple``."""

    layout: str
    bucket_numel: int
    machine: Machine
    cost: CostModel
    elements: Elements
    bus_multiple: int = 1


LAYOUTS = ("auto", "padded", "compact")


def check_choices(layout: str, group_size: int | None, ranks: int) -> None:
    """Raises ValueError for an unknown layout, and for a group size that does not divide the ranks."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; expected 'padded', 'compact' or 'auto'")
    if group_size is not None and (group_size < 1 or ranks % group_size):
        raise ValueError(f"group size {group_size} does not divide the {ranks} data-parallel ranks; expected a divisor")


# The matrices of a buffer in backward order, the order in which gradients become ready.

MOST_KINDS = 64  # the most kinds of matrices that packing distinguishes; models have about ten
ALIGNMENT = 64  # elements; every matrix starts on a multiple, as in Megatron-Core (cuBLASLt wants 128 bytes in bf16)


def aligned(numel: int) -> int:
    """``numel`` rounded up to the alignment of a matrix's start."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def shard_multiple(world_size: int) -> int:
    """The multiple of a shard's size with which a bucket ends on lcm(world_size, 128) elements."""
    return math.lcm(ALIGNMENT, math.lcm(world_size, 128) // world_size)


@dataclass(frozen=True, slots=True)
class AtomKind:
    """What packing sees of a matrix; matrices of one kind are interchangeable."""

    numel: int  # aligned
    cost: int  # by the plan's cost model
    estimate: int  # by Megatron-Core's estimate


def _kinds(seen: Iterable[AtomKind]) -> tuple[list[AtomKind], dict[AtomKind, int]]:
    """The kinds, largest first, and which is whose. If there are too many, a kind is a class of similar sizes.

    A class has the largest measures of its members, so what is packed by classes fits.
    """
    kinds = sorted(set(seen), key=lambda kind: (-kind.numel, -kind.cost, -kind.estimate))
    class_of = {kind: index for index, kind in enumerate(kinds)}
    if len(kinds) > MOST_KINDS:
        width = math.log(kinds[0].numel / kinds[-1].numel) / MOST_KINDS or 1.0
        steps = [int(math.log(kinds[0].numel / kind.numel) / width) for kind in kinds]
        places = {step: index for index, step in enumerate(sorted(set(steps)))}
        class_of = {kind: places[step] for kind, step in zip(kinds, steps)}
        members: list[list[AtomKind]] = [[] for _ in places]
        for kind in kinds:
            members[class_of[kind]].append(kind)
        kinds = [AtomKind(*(max(measure) for measure in zip(*map(astuple, some)))) for some in members]
    return kinds, class_of


class Stream:
    """Atoms in backward order, with their kinds (largest first) and running sums, which make any range quick to judge.

    ``atoms`` are in model order; position 0 of the stream is the last. ``layer_starts`` are the positions at which the
    first number in the names changes.
    """

    def __init__(self, atoms: Sequence[Atom]) -> None:
        sorts: dict[tuple[tuple[int, int], int], int] = {}  # a matrix is one of a few: its shape and its cost
        sort_of = [sorts.setdefault((atom.shape, atom.cost), len(sorts)) for atom in reversed(atoms)]
        seen = [AtomKind(aligned(math.prod(shape)), cost, max_min_squared(shape)) for shape, cost in sorts]
        self.numels = [*map([kind.numel for kind in seen].__getitem__, sort_of)]
        self.costs = [*map([kind.cost for kind in seen].__getitem__, sort_of)]
        self.estimates = [*map([kind.estimate for kind in seen].__getitem__, sort_of)]
        self.kinds, class_of = _kinds(seen)
        self.kind_of = array("H", map([class_of[kind] for kind in seen].__getitem__, sort_of))
        self.numel_before = list(accumulate(self.numels, initial=0))
        kinds = range(len(self.kinds))
        self._counts_before = [*zip(*(accumulate(map(kind.__eq__, self.kind_of), initial=0) for kind in kinds))]
        numbers = [re.search(r"\d+", atom.name) for atom in reversed(atoms)]
        layers = [number and number.group() for number in numbers]
        self.layer_starts = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]

    def __len__(self) -> int:
        return len(self.numels)

    def numel(self, start: int, stop: int) -> int:
        """Aligned elements of positions [start, stop)."""
        return self.numel_before[stop] - self.numel_before[start]

    def counts(self, start: int, stop: int) -> tuple[int, ...]:
        """Per kind, the number of matrices in positions [start, stop)."""
        return tuple(map(sub, self._counts_before[stop], self._counts_before[start]))


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Matrices of one buffer over ``shards`` ranks, in model order.

    ::

        bucket 0 (last layers)         bucket 1                        padded: every bucket is ``shards`` equal parts
        | a a a . | b b c c | d d d d |  e e . . | f f f f | g g g . |         of shard_numels[bucket] elements
          shard 0   shard 1   shard 2    shard 0   shard 1   shard 2   compact: the dots are left out

    ``owners[i]`` is the shard of matrix i, ``buckets[i]`` its bucket; buckets are in backward order.
    """

    layout: str  # "padded" or "compact"
    strategy: str  # the name of the strategy that found it
    atoms: tuple[Atom, ...]
    shards: int
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    shard_numels: tuple[int, ...]  # per bucket, the elements of its fullest shard, aligned

    @property
    def numel(self) -> int:
        """Elements of the matrices."""
        return sum(atom.numel for atom in self.atoms)

    @property
    def buffer_numel(self) -> int:
        """Elements of the long-lived buffer: with padding in a padded layout, without in a compact one."""
        return self.shards * sum(self.shard_numels) if self.layout == "padded" else self.numel

    @property
    def padding(self) -> float:
        """Padding divided by the matrices' elements; 0.5 is 50 %."""
        return self.buffer_numel / self.numel - 1

    @property
    def bucket_numels(self) -> list[int]:
        """Per bucket, the elements that are exchanged."""
        if self.layout == "padded":
            return [self.shards * numel for numel in self.shard_numels]
        totals = [0] * len(self.shard_numels)
        for atom, bucket in zip(self.atoms, self.buckets):
            totals[bucket] += atom.numel
        return totals

    def loads(self) -> list[int]:
        """Per shard, the cost of its matrices."""
        return per_rank(self.owners, (atom.cost for atom in self.atoms), self.shards)

    def owned_numels(self) -> list[int]:
        """Per shard, the elements of its matrices."""
        return per_rank(self.owners, (atom.numel for atom in self.atoms), self.shards)


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1.0 is perfect, also without any load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def aligned_shard(numel: int, shards: int) -> int:
    """A shard's size rounded up to where the next bucket may start."""
    multiple = shard_multiple(shards)
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
        """Whether the parts are equal and in rank order, so that fixed-size collectives can exchange them."""
        size = self.numel // len(self.parts)
        return all(part == (rank * size, (rank + 1) * size) for rank, part in enumerate(self.parts))

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
            near = slots[bisect_right(ends, start) : bisect_left(starts, stop)]
            found.append(list(self._pieces(near, rank)))
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
    plan: BufferPlan, params: Sequence[int], layout: BucketLayout, dtype: str, *, multiple: int = 1
) -> list[Bucket]:
    """The buckets of ``plan``, whose matrix i is parameter ``params[i]``, in backward order.

    A padded buffer ends on a multiple of ``multiple``, in addition to the usual alignment.
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
            sizes = [sum(numels[i] for i in mine) for mine in of_ranks]
            parts, end = [(0, 0)] * plan.shards, 0
            # Sizes that are no multiple of the alignment come last, so that they shift no other part.
            for rank in sorted(range(plan.shards), key=lambda r: sizes[r] % ALIGNMENT > 0):
                parts[rank] = (end, end + sizes[rank])
                end += sizes[rank]
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
    """One bucket of (parameter, elements), cut evenly; a compact one at 64 elements, with a shorter last part."""
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
