"""Parameters over a device mesh, as DTensors store them: every rank has one box of every parameter, or none.

Also over tensor- and data-parallel ranks, as ZeRO stores them: every rank has a part of its flat shard, or the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from lwopt_backend.plan.atoms import Block, TrainedParam
from lwopt_backend.plan.layouts import (
    BlockLayout,
    FlatPartition,
    Fragment,
    Layout,
    Replicas,
    Span,
    View,
    box_views,
    boxes_of,
    rectangle,
    unravel,
)

Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a parameter of ``shape`` is sharded over a mesh of ``mesh_shape``.

    ``dims[i]`` is the tensor dimension that mesh dimension i cuts, or None if it replicates. Mesh dimensions cut from
    left to right, and those that are ``late`` after the others (FSDP2 on a tensor-parallel parameter: DTensor's
    ``_StridedShard``). A cut is that of ``torch.chunk``: equal parts of ceil(size / parts), the last ones shorter or
    empty. The matrix is ``block`` of the parameter; without a block it is the parameter itself.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    late: tuple[bool, ...]
    block: Block | None = None

    def box(self, coordinate: Coordinate) -> tuple[Span, ...]:
        """Per tensor dimension, the offset and the size of the part at ``coordinate``."""
        spans = [(0, size) for size in self.shape]
        for mesh_dim in sorted(range(len(self.dims)), key=lambda i: self.late[i]):
            dim = self.dims[mesh_dim]
            if dim is not None:
                spans[dim] = _chunk(spans[dim], self.mesh_shape[mesh_dim], coordinate[mesh_dim])
        return tuple(spans)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        return tuple(size for _, size in self.box(coordinate))

    @property
    def copied(self) -> tuple[int, ...]:
        """The mesh dimensions that replicate the parameter."""
        return tuple(i for i, dim in enumerate(self.dims) if dim is None)

    def fragment(self, rank: int, coordinate: Coordinate) -> Fragment | None:
        """The rectangle of the matrix at ``coordinate``, or None if it is empty."""
        held: Sequence[Span] | None
        if self.block is None:
            held, width = self.box(coordinate), self.shape[1]
        else:
            held, width = rectangle(self.block, self.shape, self.box(coordinate)), self.block.columns.size
        if held is None:
            return None
        (top, rows), (left, columns) = held
        if rows == 0 or columns == 0:
            return None
        start = top * width + left
        if columns == width or rows == 1:
            return Fragment(rank, start, start + rows * columns, 0)
        return Fragment(rank, start, start + columns, 0, rows, width)

    def check(self, param: str) -> None:
        """Raises ValueError, the same on every rank, if a part of ``param`` has no views of the block."""
        if self.block is None:
            return
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        first = unravel(self.block.slice, self.shape[: self.block.grid.lead(self.shape)])[:1]
        for box in _boxes_of(replace(self, block=None)):
            if any(not begin <= place < begin + size for place, (begin, size) in zip(first, box)):
                continue  # it has other slices, as almost all boxes of a large stack
            try:
                box_views(self.block, self.shape, box, strides)
            except ValueError as error:
                raise ValueError(
                    f"parameter {param!r}, block {self.block.name!r}: sharded as {self}, {error}; shard another "
                    f"dimension of it, or keep its matrices undivided with atoms: {{{param!r}: 'whole'}}"
                ) from None

    def __str__(self) -> str:
        cuts = ", ".join(
            f"{size} copies" if dim is None else f"{size} of dim {dim}{' late' if late else ''}"
            for size, dim, late in zip(self.mesh_shape, self.dims, self.late)
        )
        return f"{'x'.join(map(str, self.shape))} over {cuts}{f', {self.block}' if self.block else ''}"


@lru_cache(maxsize=16)  # for the many matrices of a stack
def _boxes_of(sharding: Sharding) -> tuple[tuple[Span, ...], ...]:
    """The different boxes of all coordinates, in their order."""
    parts = [range(size) if dim is not None else range(1) for size, dim in zip(sharding.mesh_shape, sharding.dims)]
    return tuple(dict.fromkeys(map(sharding.box, itertools.product(*parts))))


def _chunk(span: Span, parts: int, index: int) -> Span:
    begin, size = span
    length = -(-size // parts)
    offset = min(length * index, size)
    return begin + offset, min(length, size - offset)


@dataclass(frozen=True, slots=True)
class MeshRows:
    """Ranks of a mesh that copies all matrices (HSDP): each row stores them once, the ranks of a column store the same.

    ``of[rank]`` has the rank's row and column, as ranks in ascending order.

    ::

        0 1        rows (0, 1) and (2, 3), columns (0, 2) and (1, 3)
        2 3

    """

    of: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of_mesh(cls, coordinates: Sequence[Coordinate], copied: Collection[int]) -> MeshRows | None:
        """None if there is only one row, or one column: then a rank stores everything."""
        of = []
        for along in (False, True):  # a row's ranks are in the same place along the dimensions that copy
            keys = [tuple(part for dim, part in enumerate(at) if (dim in copied) != along) for at in coordinates]
            groups: dict[Coordinate, list[int]] = {}
            for rank, key in enumerate(keys):
                groups.setdefault(key, []).append(rank)
            if len(groups) == 1:
                return None
            members = {key: tuple(ranks) for key, ranks in groups.items()}
            of.append([members[key] for key in keys])
        return cls(tuple(zip(*of)))

    def groups(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """All rows, and all columns."""
        rows, columns = map(set, zip(*self.of))
        return sorted(rows), sorted(columns)

    def place(self, rank: int) -> int:
        """The place of ``rank`` in its row."""
        return self.of[rank][0].index(rank)

    def turns(self) -> list[int]:
        """Per rank, its number in column order, so that consecutive numbers are in different rows.

        A column's parts are padded to the longest, so rows should own equal amounts.
        """
        in_order = [rank for column in self.groups()[1] for rank in column]
        return [turn for _, turn in sorted(zip(in_order, range(len(in_order))))]


@dataclass(frozen=True)
class MeshLayout:
    """Matrices over one device mesh. ``coordinates[rank]`` is the mesh coordinate of a rank of the exchange group."""

    coordinates: tuple[Coordinate, ...]
    shardings: tuple[Sharding, ...]
    _held: dict[int, dict[int, Fragment]] = field(default_factory=dict, compare=False, repr=False)
    _firsts: dict[Sharding, list[tuple[int, int]]] = field(default_factory=dict, compare=False, repr=False)
    _sent: dict[tuple[int, Coordinate], tuple[Fragment, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def world_size(self) -> int:
        return len(self.coordinates)

    @cached_property
    def _copied(self) -> set[int]:
        """The mesh dimensions that replicate every parameter."""
        return set.intersection(*(set(sharding.copied) for sharding in set(self.shardings)))

    @cached_property
    def rows(self) -> MeshRows | None:
        """The rows along these dimensions."""
        return MeshRows.of_mesh(self.coordinates, self._copied) if self.shardings else None

    @cached_property
    def instance(self) -> MeshLayout:
        """One of the ``rows`` by itself, whose ranks are numbered by their places in it."""
        rows = self.rows
        assert rows is not None
        row = rows.of[0][0]

        def kept(of_dims: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(each for dim, each in enumerate(of_dims) if dim not in self._copied)

        within = {
            each: replace(each, mesh_shape=kept(each.mesh_shape), dims=kept(each.dims), late=kept(each.late))
            for each in dict.fromkeys(self.shardings)
        }
        coordinates = tuple(kept(self.coordinates[rank]) for rank in row)
        return MeshLayout(coordinates, tuple(map(within.__getitem__, self.shardings)))

    def fragments(self, index: int) -> Sequence[Fragment]:
        return tuple(self._by_rank(index).values())

    def fragment(self, index: int, rank: int) -> Fragment | None:
        return self._by_rank(index).get(rank)

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        """The copy in the owner's row of the mesh, the nearest, is sent; the owner's own if it is whole."""
        kind, copied = self.kind(index), self.shardings[index].copied
        copy = tuple(self.coordinates[owner][i] for i in copied)
        if (kind, copy) not in self._sent:
            parts = (part for part in self.fragments(index) if self.is_source(index, part.rank, owner))
            self._sent[kind, copy] = tuple(parts)
        return self._sent[kind, copy]

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        mine, theirs = self.coordinates[rank], self.coordinates[owner]
        return all(mine[i] == theirs[i] for i in self.shardings[index].copied)

    def keeps_state(self, index: int, rank: int, owner: int) -> bool:
        return True

    @cached_property
    def _kinds(self) -> tuple[list[int], list[str]]:
        """By matrix, the number of its sharding, of which hashes are fast; and by number, the sharding as text."""
        numbers: dict[Sharding, int] = {}
        kinds = [numbers.setdefault(sharding, len(numbers)) for sharding in self.shardings]
        return kinds, [*map(str, numbers)]

    def kind(self, index: int) -> int:
        return self._kinds[0][index]

    def place(self, index: int) -> str:
        return self._kinds[1][self._kinds[0][index]]

    def _by_rank(self, index: int) -> dict[int, Fragment]:
        kind = self._kinds[0][index]
        if kind not in self._held:
            sharding = self.shardings[index]
            parts = (sharding.fragment(rank, self.coordinates[rank]) for rank in self._near(sharding))
            self._held[kind] = {part.rank: part for part in parts if part is not None}
        return self._held[kind]

    def _near(self, sharding: Sharding) -> Sequence[int]:
        """The ranks that store the matrix's part of the first dimension: in a stack of many, few ranks have one."""
        block, ranks = sharding.block, range(self.world_size)
        lead = block.grid.lead(sharding.shape) if block is not None else 0
        if block is None or not lead:
            return ranks
        whole = replace(sharding, block=None)
        if whole not in self._firsts:
            self._firsts[whole] = [(begin, begin + size) for (begin, size), *_ in map(whole.box, self.coordinates)]
        place = unravel(block.slice, sharding.shape[:lead])[0]
        return [rank for rank, (begin, end) in zip(ranks, self._firsts[whole]) if begin <= place < end]


def rows_of(layout: Layout) -> MeshRows | None:
    """The rows of a mesh with copies of all matrices; None for any other layout."""
    return layout.rows if isinstance(layout, MeshLayout) else None


def in_whole(param: TrainedParam, shard: int, start: int, stop: int) -> Iterator[View]:
    """The place in the whole parameter of the elements [start, stop) of a tensor-parallel rank's flat shard."""
    if param.cut is None:
        yield View.of_range(start, stop)
        return
    local, dim, first = param.local_shape, param.cut.dim, 0
    width = math.prod(local[1:])
    for rows in param.parts or local[:1]:
        low, high = max(start, first * width), min(stop, (first + rows) * width)
        for corner, sizes in boxes_of(local, low, high):
            begin = [
                place + shard * size if i == dim > 0 else place for i, (place, size) in enumerate(zip(corner, local))
            ]
            if dim == 0 and low < high:
                begin[0] += first * (param.cut.ranks - 1) + shard * rows
            yield View.of_box(param.shape, list(zip(begin, sizes)))
        first += rows


@dataclass(frozen=True)
class TensorShards(BlockLayout):
    """Matrices that tensor parallelism cuts, or copies. A rank stores its shards as ``storage`` says.

    ``places[rank]`` has the tensor- and the data-parallel rank of a rank of the exchange group. The elements of a
    parameter that is ``cut`` are numbered shard by shard, in ``blocks`` as well. So every rank has ranges of elements,
    and a matrix cut by columns is not in order: its shards are the ``Atom.tiles`` that its owner puts side by side.

    ::

        0  1  2  3        0  1 |  6  7        a 2 x 4 matrix cut by rows, a 3 x 4 matrix cut by columns, over 2 ranks
        ----------        2  3 |  8  9
        4  5  6  7        4  5 | 10 11        by ZeRO-1/2 on 3 data-parallel ranks (0, 1) has elements 2 and 3 of it

    """

    storage: FlatPartition | Replicas
    places: tuple[tuple[int, int], ...] = field(kw_only=True)
    cut: tuple[bool, ...] = field(kw_only=True)

    @property
    def world_size(self) -> int:
        return len(self.places)

    @cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        return {place: rank for rank, place in enumerate(self.places)}

    def beside(self, rank: int) -> list[int]:
        """The ranks that have the same shards as ``rank``, in data-parallel order."""
        tensor = self.places[rank][0]
        return [self._ranks[place] for place in sorted(self.places) if place[0] == tensor]

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        """Among copies, those of the owner's tensor-parallel rank, and at stage 0 of its data-parallel rank.

        At stage 0, one of the ranks that store a shard keeps its state, so every shard's ranks have it.
        """
        near = self.cut[self.params[index]] or self.places[rank][0] == self.places[owner][0]
        return near and self.keeps_state(index, rank, owner)

    def place(self, index: int) -> str:
        """The first one also names the ranks' places, once in a plan."""
        param = self.params[index]
        whose = "shard" if self.cut[param] else "copy"
        of_all = f" of {self.places}" if index == 0 else ""
        return f"{self.blocks[index]}, {whose} {self.storage.place(param)}{of_all}"

    def _kind(self, index: int) -> Hashable:
        return super()._kind(index), self.cut[self.params[index]]

    def _stored(self, index: int, rank: int) -> tuple[int, int]:
        tensor, data = self.places[rank]
        return data, self._shift(index, tensor)

    def _shift(self, index: int, tensor: int) -> int:
        param = self.params[index]
        return tensor * self.storage.numels[param] if self.cut[param] else 0

    def _holders(self, index: int) -> Iterable[int]:
        tensors = {tensor for tensor, _ in self.places}
        near = ((tensor, data) for tensor in tensors for data in self._near(index, self._shift(index, tensor)))
        return sorted(self._ranks[place] for place in near)
