"""How a host stores parameters: which rank has which elements, and where they are in its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeVar

from lwopt_backend.plan.atoms import Atom, Block, Stripes

T = TypeVar("T")
Span = tuple[int, int]  # offset, size
Box = tuple[tuple[int, ...], tuple[int, ...]]  # the offset and the size, both per dimension


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a flattened tensor, beginning at ``offset``, with ``sizes`` and ``strides``."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_range(cls, start: int, stop: int) -> View:
        """The elements [start, stop)."""
        return cls(start, (stop - start,), (1,))

    @classmethod
    def of_box(cls, shape: Sequence[int], box: Sequence[Span]) -> View:
        """The elements of a ``box`` in a tensor of ``shape``."""
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        offset = sum(begin * stride for (begin, _), stride in zip(box, strides))
        return cls(offset, tuple(size for _, size in box), strides)

    @property
    def span(self) -> tuple[int, int]:
        """Start and stop of the range that contains its elements."""
        if 0 in self.sizes:
            return self.offset, self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides))
        return self.offset, self.offset + last + 1

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The boxes of a tensor of ``shape`` that make up a range of its elements, in order; a box stays one."""
        if len(self.sizes) <= 1:
            return boxes_of(shape, *self.span)
        return [(tuple(unravel(self.offset, shape)) if 0 not in self.sizes else (0,) * len(shape), self.sizes)]


def range_views(block: Block, start: int, stop: int, offset: int) -> tuple[View, ...]:
    """The block's elements in ``[start, stop)`` of the flattened parameter, stored from ``offset`` of a flat tensor.

    Concatenated, the views are the block's own range in row-major order.
    """
    width = block.grid.columns
    dims: list[tuple[int, int]] = []  # the fewest, for the same elements in the same order
    for size, stride in [*_dims(block.rows, width), *_dims(block.columns, 1)]:
        if size > 1 and dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    dims = dims or [(1, 1)]
    sizes, strides = [size for size, _ in dims], tuple(stride for _, stride in dims)
    origin = offset - start + block.flat(0)
    found = []
    for corner, lengths in _boxes(sizes, block.before(start), block.before(stop)):
        begin = origin + sum(place * stride for place, stride in zip(corner, strides))
        found.append(_without_ones(View(begin, lengths, strides)))
    return tuple(found)


def rectangle(block: Block, shape: Sequence[int], box: Sequence[Span]) -> tuple[Span, Span] | None:
    """The block's own rows and columns in a box of a parameter of ``shape``, or None.

    Raises ValueError for a box that cuts a dimension flattened into rows or columns, except the first.
    """
    shape, box, _ = _in_rows(block, shape, box, ())
    lead = block.grid.lead(shape)
    for place, (begin, size) in zip(unravel(block.slice, shape[:lead]), box):
        if not begin <= place < begin + size:
            return None
    top, height = box[lead]
    left, width = _flattened(block, shape[lead + 1 :], box[lead + 1 :])
    rows, columns = block.rows.before(top), block.columns.before(left)
    held = block.rows.before(top + height) - rows, block.columns.before(left + width) - columns
    return ((rows, held[0]), (columns, held[1])) if min(held) > 0 else None


def box_views(block: Block, shape: Sequence[int], box: Sequence[Span], strides: Sequence[int]) -> tuple[View, ...]:
    """The block's elements in a local tensor that is ``box`` of a parameter of ``shape``, with any ``strides``.

    The views give the part of the block that ``rectangle`` returns, row by row. Their sizes do not depend on the
    strides. Raises ValueError if the box cuts runs of columns apart, which would need a view for every row.
    """
    shape, box, strides = _in_rows(block, shape, box, strides)
    held = rectangle(block, shape, box)
    if held is None:
        return ()
    lead = block.grid.lead(shape)
    (row, height), (column, width) = held
    slice_places = unravel(block.slice, shape[:lead])
    origin = sum((place - begin) * stride for place, (begin, _), stride in zip(slice_places, box, strides))
    origin += (block.rows.at(0) - box[lead][0]) * strides[lead]
    down = _dims(block.rows, strides[lead])
    if len(shape) - lead == 2:
        across = _dims(block.columns, strides[-1])
        origin += (block.columns.at(0) - box[-1][0]) * strides[-1]
    else:
        across = [(size, stride) for (_, size), stride in zip(box[lead + 1 :], strides[lead + 1 :])]
        column = block.columns.at(column) - box[lead + 1][0] * math.prod(shape[lead + 2 :])
    sideways = _boxes([size for size, _ in across], column, column + width)
    if height > 1 and len(sideways) > 1:
        raise ValueError(f"the part {box} cuts runs of columns apart ({block})")
    found = []
    for corner, sizes in _boxes([size for size, _ in down], row, row + height):
        for side, widths in sideways:
            both = [*down, *across]
            begin = origin + sum(place * stride for place, (_, stride) in zip((*corner, *side), both))
            found.append(_without_ones(View(begin, sizes + widths, tuple(stride for _, stride in both))))
    return tuple(found)


def _dims(stripes: Stripes, stride: int) -> list[tuple[int, int]]:
    """Sizes and strides of the stripes, whose neighbouring indices are ``stride`` apart."""
    run = (stripes.length, stride)
    if stripes.count == 1:
        return [run]
    outer = (stripes.count, stripes.pitch * stride)
    return [outer] if stripes.length == 1 else [outer, run]


def boxes_of(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that make up the elements [start, stop) of a flattened tensor of ``sizes``, in order; at least one."""
    if start >= stop or not sizes:  # nothing, or one element
        return [((0,) * len(sizes), (0,) * len(sizes))]
    return _boxes(sizes, start, stop)


def _boxes(sizes: Sequence[int], low: int, high: int) -> list[Box]:
    if low >= high:
        return []
    if len(sizes) == 1:
        return [((low,), (high - low,))]
    inner = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        return _in_row(first, _boxes(sizes[1:], head, tail))
    found = []
    if head:
        found += _in_row(first, _boxes(sizes[1:], head, inner))
        first += 1
    if first < last:
        found.append(((first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])))
    return found + _in_row(last, _boxes(sizes[1:], 0, tail))


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [((row, *corner), (1, *sizes)) for corner, sizes in boxes]


def _without_ones(view: View) -> View:
    kept = [(size, stride) for size, stride in zip(view.sizes, view.strides) if size > 1] or [(1, 1)]
    return View(view.offset, tuple(size for size, _ in kept), tuple(stride for _, stride in kept))


def _in_rows(
    block: Block, shape: Sequence[int], box: Sequence[Span], strides: Sequence[int]
) -> tuple[Sequence[int], Sequence[Span], Sequence[int]]:
    """The shape, the box and the strides with one dimension for those that are flattened into rows."""
    lead, count = block.grid.in_rows(shape)
    if count == 1:
        return shape, box, strides
    stop = lead + count
    inner = math.prod(shape[lead + 1 : stop])
    (begin, size), others = box[lead], box[lead + 1 : stop]
    if size and any(span != (0, full) for span, full in zip(others, shape[lead + 1 : stop])):
        raise ValueError(f"the part {box} cuts a dimension flattened into rows, and only the first may be cut")
    if strides and size > 1 and any(strides[i] != shape[i + 1] * strides[i + 1] for i in range(lead, stop - 1)):
        raise ValueError(f"the part {box} has strides {strides}, and the rows of {block} are not evenly apart in it")
    rows = begin * inner, size * inner
    flat = *shape[:lead], math.prod(shape[lead:stop]), *shape[stop:]
    return flat, (*box[:lead], rows, *box[stop:]), (*strides[:lead], *strides[stop - 1 :])


def _flattened(block: Block, sizes: Sequence[int], box: Sequence[Span]) -> Span:
    """The columns that the box has, if dimensions are flattened into columns."""
    if len(box) > 1 and 0 not in (held for _, held in box):
        if any(span != (0, full) for span, full in zip(box[1:], sizes[1:])):
            raise ValueError(f"the part {box} cuts a dimension flattened into columns, and only the first may be cut")
        if block.columns.count > 1:
            raise ValueError(f"columns {block.columns} of flattened dimensions cannot be a separate block")
    return box[0][0] * math.prod(sizes[1:]), math.prod(held for _, held in box)


def unravel(position: int, sizes: Sequence[int]) -> list[int]:
    places = []
    for size in reversed(sizes):
        position, place = divmod(position, size)
        places.append(place)
    return places[::-1]


SUB_GROUP_SIZE = 10**9  # elements of a rank, DeepSpeed's default of zero_optimization.sub_group_size


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements of a flattened parameter, stored by ``rank`` from ``offset`` of its local storage.

    They are ``runs`` runs of ``stop - start`` elements, ``pitch`` apart, the first of them ``[start, stop)``: one run
    for a range of the flattened parameter or for whole rows, several for a rectangle.
    """

    rank: int
    start: int
    stop: int
    offset: int
    runs: int = 1
    pitch: int = 0

    @property
    def numel(self) -> int:
        return (self.stop - self.start) * self.runs


class Layout(Protocol):
    """Where the parameters of a plan are stored. A parameter has at most one fragment on each rank."""

    @property
    def world_size(self) -> int: ...

    def keeps_state(self, index: int, rank: int, owner: int) -> bool:
        """Whether ``rank``, which has a fragment of parameter ``index``, keeps the fragment's state."""

    def fragments(self, index: int) -> Sequence[Fragment]:
        """Every rank's fragment of parameter ``index``, in rank order, including copies, excluding empty ones."""

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """The fragment of parameter ``index`` on ``rank``, or None."""

    def sources(self, index: int, owner: int) -> Sequence[Fragment]:
        """The fragments, in rank order, that are sent to ``owner``: together exactly the parameter's elements."""

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        """Whether the fragment of ``rank`` is among ``sources(index, owner)``, if it has one."""

    def kind(self, index: int) -> Hashable:
        """A key that is equal for parameters with equal storage."""

    def place(self, index: int) -> str:
        """The place of parameter ``index``, as text that ranks can compare."""


def by_kind(layout: Layout, indices: Iterable[int], result: Callable[[int], T]) -> list[T]:
    """``result(index)`` for each of ``indices``; called once for those with equal storage."""
    found: dict[Hashable, T] = {}
    results = []
    for index in indices:
        kind = layout.kind(index)
        if kind not in found:
            found[kind] = result(index)
        results.append(found[kind])
    return results


FEW = 8  # pieces of a matrix; these are counted rank by rank


@dataclass(frozen=True, slots=True)
class Spread:
    """A matrix's elements on all ranks, copies included; and its pieces, or the largest one's if there are many."""

    total: int
    largest: int
    few: tuple[tuple[int, int], ...]  # ranks and elements


class Alike:
    """Numbers of matrices that are equal in storage, shape and cost. Plans of the same matrices share them.

    ``numbers`` has that of every matrix, ``firsts`` the first matrix of every number.
    """

    def __init__(self, atoms: Sequence[Atom], layout: Layout) -> None:
        self.atoms, self._layout = atoms, layout
        found: dict[Hashable, int] = {}
        keys = ((layout.kind(index), atom.shape, atom.cost) for index, atom in enumerate(atoms))
        self.numbers = [found.setdefault(key, len(found)) for key in keys]
        self.firsts = dict(zip(reversed(self.numbers), range(len(atoms) - 1, -1, -1)))
        self._numels: dict[int, dict[int, int]] = {}
        self._spreads: dict[int, Spread] = {}

    def numels(self, number: int) -> dict[int, int]:
        """By rank, the elements that it stores of such a matrix."""
        if number not in self._numels:
            parts = self._layout.fragments(self.firsts[number])
            self._numels[number] = {part.rank: part.numel for part in parts}
        return self._numels[number]

    def spread(self, number: int) -> Spread:
        if number not in self._spreads:
            numels = self.numels(number)
            many = len(numels) > FEW
            few = () if many else tuple(numels.items())
            self._spreads[number] = Spread(sum(numels.values()), max(numels.values()) if many else 0, few)
        return self._spreads[number]


class Partition:
    """Storage in which a rank has one contiguous range of a parameter; the next rank begins after ``size`` elements."""

    __slots__ = ()
    numels: tuple[int, ...]

    def keeps_state(self, index: int, rank: int, owner: int) -> bool:
        return True

    def span(self, index: int) -> tuple[int, int, int, int]:
        """The start of parameter ``index`` in the cut storage, its elements, a rank's ``size``, and its base."""
        raise NotImplementedError

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        """The fragments of parameter ``index`` in rank order; together they are exactly its elements."""
        begin, numel, size, _ = self.span(index)
        ranks = range(begin // size, (begin + numel - 1) // size + 1)
        return tuple(part for rank in ranks if (part := self.fragment(index, rank)) is not None)

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """The fragment of parameter ``index`` on ``rank``, or None."""
        begin, numel, size, base = self.span(index)
        low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        return Fragment(rank, low - begin, high - begin, base + low - rank * size) if low < high else None

    def stored_numel(self, rank: int) -> int:
        """Elements of parameters, without padding, that ``rank`` stores."""
        held = (self.fragment(index, rank) for index in range(len(self.numels)))
        return sum(part.numel for part in held if part is not None)

    def views(self, index: int, rank: int) -> tuple[View, ...]:
        """The view of the fragment of parameter ``index`` in the flat tensor of ``rank``; none if it has none."""
        held = self.fragment(index, rank)
        return () if held is None else (View(held.offset, (held.numel,), (1,)),)

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return self.fragments(index)

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FlatPartition(Partition):
    """ZeRO-1/2's storage of one param group: parameters concatenated, padded, cut into equal parts.

    ::

        p0 p0 p0 p0 | p0 p1 p1 p1 | p1 p2 __ __        world_size 3, partition_numel 4, 2 elements of padding
           rank 0        rank 1        rank 2

    A parameter has one contiguous fragment on each rank that it touches. Offsets are exact integers, so every
    rank knows the storage of all ranks without a message.
    """

    world_size: int
    numels: tuple[int, ...]
    offsets: tuple[int, ...]  # start of every parameter in the group's flat buffer
    partition_numel: int
    _held: dict[int, tuple[Fragment, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, numels: Iterable[int], world_size: int, *, alignment: int = 2, param_alignment: int = 1
    ) -> FlatPartition:
        """DeepSpeed's layout: starts are multiples of ``param_alignment``, the end of ``alignment * world_size``.

        ``alignment`` is DeepSpeed's ``nccl_start_alignment_factor`` (2), ``param_alignment`` is 1 unless
        ``zero_optimization.parameter_alignment`` is set.
        """
        numels = tuple(numels)
        padded = [-(-n // param_alignment) * param_alignment for n in numels]
        ends = list(accumulate(padded))
        offsets = tuple(end - size for end, size in zip(ends, padded))
        used = offsets[-1] + numels[-1] if numels else 0
        unit = alignment * world_size
        return cls(world_size, numels, offsets, -(-used // unit) * unit // world_size)

    def __post_init__(self) -> None:
        end = 0
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            if numel < 1:
                raise ValueError(f"parameter {index}: expected at least one element in a flat partition, found {numel}")
            if offset < end:
                raise ValueError(f"parameter {index}: expected a start from {end} on, found {offset}; it overlaps")
            end = offset + numel
        if end > self.world_size * self.partition_numel:
            raise ValueError(
                f"expected an end within {self.world_size} partitions of {self.partition_numel} elements, found {end}"
            )

    def span(self, index: int) -> tuple[int, int, int, int]:
        return self.offsets[index], self.numels[index], self.partition_numel, 0

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        if index not in self._held:  # no two parameters have equal storage, and planning asks for it again and again
            self._held[index] = Partition.fragments(self, index)
        return self._held[index]

    def kind(self, index: int) -> int:
        return index

    def place(self, index: int) -> str:
        return f"at {self.offsets[index]} of {self.partition_numel}"


@dataclass(frozen=True, slots=True)
class ParameterPartition(Partition):
    """ZeRO-3's storage: every parameter is padded and cut into equal parts, and a rank's parts are concatenated.

    ::

        p0 p0 | p0 p0 | p0 __        p0 of 5 elements and p1 of 2 on 3 ranks, 3 elements a rank:
        p1    | p1    | __           rank 0 stores p0 p0 p1, rank 1 p0 p0 p1, rank 2 p0 __ __

    """

    world_size: int
    numels: tuple[int, ...]
    parts: tuple[int, ...]  # elements of every parameter on each rank, with padding
    bases: tuple[int, ...]  # where they begin there
    partition_numel: int

    @classmethod
    def build(cls, numels: Iterable[int], world_size: int) -> ParameterPartition:
        """Raises ValueError for a parameter without elements."""
        numels = tuple(numels)
        if 0 in numels:
            raise ValueError(f"parameter {numels.index(0)}: expected at least one element, found none")
        parts = tuple(-(-numel // world_size) for numel in numels)
        *bases, end = accumulate(parts, initial=0)
        return cls(world_size, numels, parts, tuple(bases), end)

    def span(self, index: int) -> tuple[int, int, int, int]:
        return 0, self.numels[index], self.parts[index], self.bases[index]

    def kind(self, index: int) -> tuple[int, int]:
        return self.numels[index], self.parts[index]

    def place(self, index: int) -> str:
        return f"in parts of {self.parts[index]} at {self.bases[index]} of {self.partition_numel}"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Every rank stores every parameter; the owner uses its own copy, and it alone keeps the state."""

    world_size: int
    numels: tuple[int, ...]

    def keeps_state(self, index: int, rank: int, owner: int) -> bool:
        return rank == owner

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        return tuple(Fragment(rank, 0, self.numels[index], 0) for rank in range(self.world_size))

    def fragment(self, index: int, rank: int) -> Fragment:
        return Fragment(rank, 0, self.numels[index], 0)

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return (self.fragment(index, owner),)

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return rank == owner

    def kind(self, index: int) -> int:
        return self.numels[index]

    def place(self, index: int) -> str:
        return f"{self.world_size} copies"

    def stored_numel(self, rank: int) -> int:
        return sum(self.numels)


# Blocks of parameters in flat storage: a rank's elements of a block, and their places.

StorageLayout = FlatPartition | ParameterPartition | Replicas


def in_blocks(storage: StorageLayout, blocks: Sequence[Sequence[Block]]) -> BlockLayout:
    """The same storage of the blocks of every parameter; ``blocks[i]`` are parameter i's, numbered consecutively.

    Raises ValueError for blocks of another parameter's size.
    """
    params = tuple(param for param, members in enumerate(blocks) for _ in members)
    flat = tuple(block for members in blocks for block in members)
    for param, block in zip(params, flat):
        numel = storage.numels[param]
        if block.grid.slices * block.grid.slice_numel != numel:
            raise ValueError(f"parameter {param} has {numel} elements, but block {block.name!r} is of {block.grid}")
    return BlockLayout(storage, params, flat)


@dataclass(frozen=True)
class BlockLayout:
    """``blocks`` in ``storage``; ``params`` has each block's parameter. A plan's ``Layout``.

    A rank has one contiguous range of a parameter, or all of it, and so of each block.
    """

    storage: StorageLayout
    params: tuple[int, ...]
    blocks: tuple[Block, ...]
    _views: dict[tuple[int, int], tuple[View, ...]] = field(default_factory=dict, compare=False, repr=False)
    _fragments: dict[int, tuple[Fragment, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return self.storage.world_size

    def place(self, index: int) -> str:
        block, place = self.blocks[index], self.storage.place(self.params[index])
        return place if block.is_everything else f"{block}, {place}"

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """The fragment of block ``index`` on ``rank``, or None; ``offset`` is its start, ``views`` has all elements."""
        number, shift = self._stored(index, rank)
        part, block = self.storage.fragment(self.params[index], number), self.blocks[index]
        if part is None:
            return None
        start, stop = block.before(shift + part.start), block.before(shift + part.stop)
        offset = part.offset - part.start - shift
        return Fragment(rank, start, stop, offset + block.flat(start)) if start < stop else None

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        """The fragments of block ``index`` in rank order, copies included; together they are exactly its elements."""
        if index not in self._fragments:
            parts = (self.fragment(index, rank) for rank in self._holders(index))
            self._fragments[index] = tuple(part for part in parts if part is not None)
        return self._fragments[index]

    def views(self, index: int, rank: int) -> tuple[View, ...]:
        """Views of the fragment of block ``index`` in the flat tensor of ``rank``, in order; none if it is empty."""
        if (index, rank) not in self._views:  # used in every step
            number, shift = self._stored(index, rank)
            part, block = self.storage.fragment(self.params[index], number), self.blocks[index]
            found = () if part is None else range_views(block, shift + part.start, shift + part.stop, part.offset)
            self._views[index, rank] = found
        return self._views[index, rank]

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return tuple(part for part in self.fragments(index) if self.is_source(index, part.rank, owner))

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return self.keeps_state(index, rank, owner)

    def keeps_state(self, index: int, rank: int, owner: int) -> bool:
        return self.storage.keeps_state(self.params[index], self._stored(index, rank)[0], self._stored(index, owner)[0])

    def kind(self, index: int) -> int:
        return self._kinds[index]

    @cached_property
    def _kinds(self) -> list[int]:
        """Per block, the number of the first one with equal storage: numbers compare faster than blocks."""
        first: dict[Hashable, int] = {}
        return [first.setdefault(self._kind(index), index) for index in range(len(self.blocks))]

    def _kind(self, index: int) -> Hashable:
        return self.storage.kind(self.params[index]), self.blocks[index]

    def _stored(self, index: int, rank: int) -> tuple[int, int]:
        """The number of ``rank`` in ``storage``, and the number of the parameter's elements before those stored."""
        return rank, 0

    def _holders(self, index: int) -> Iterable[int]:
        """In order, the ranks that may have some of the block."""
        return self._near(index, 0)

    def _near(self, index: int, shift: int) -> range:
        """The numbers in ``storage`` of ranks that may have some of the block, if it has ``shift`` elements less."""
        if isinstance(self.storage, Replicas):
            return range(self.storage.world_size)
        block, (begin, numel, size, _) = self.blocks[index], self.storage.span(self.params[index])
        low, high = block.before(shift), block.before(shift + numel)
        first, last = (begin + block.flat(place) - shift for place in (low, high - 1))
        return range(first // size, last // size + 1) if low < high else range(0)
