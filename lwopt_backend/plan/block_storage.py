"""Blocks of parameters in flat storage: which elements of a block a rank holds, and where they lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from lwopt_backend.plan.block_views import View, range_views
from lwopt_backend.plan.blocks import Block
from lwopt_backend.plan.spread_storage import ParameterPartition, Replicas
from lwopt_backend.plan.storage import FlatPartition, Fragment


def in_blocks(
    storage: FlatPartition | ParameterPartition | Replicas, blocks: Sequence[Sequence[Block]]
) -> BlockPartition | BlockReplicas:
    """The same storage of the blocks of every parameter; ``blocks[i]`` are those of parameter i, numbered end to end.

    Raises ValueError for blocks of another parameter's size.
    """
    params = tuple(param for param, members in enumerate(blocks) for _ in members)
    flat = tuple(block for members in blocks for block in members)
    for param, block in zip(params, flat):
        numel = storage.numels[param] if isinstance(storage, Replicas) else storage.span(param)[1]
        if block.grid.slices * block.grid.slice_numel != numel:
            raise ValueError(f"parameter {param} has {numel} elements, but block {block.name!r} is of {block.grid}")
    return (
        BlockReplicas(storage, params, flat) if isinstance(storage, Replicas) else BlockPartition(storage, params, flat)
    )


@dataclass(frozen=True)
class BlockPartition:
    """Storage in which a rank holds one contiguous range of a parameter, and so of each block. A plan's ``Layout``."""

    copies_keep_state: ClassVar[bool] = True

    storage: FlatPartition | ParameterPartition
    params: tuple[int, ...]  # the parameter of every block
    blocks: tuple[Block, ...]
    _views: dict[tuple[int, int], tuple[View, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return self.storage.world_size

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """What ``rank`` stores of block ``index``, or None; it begins at ``offset``, ``views`` tells how it lies."""
        part, block = self.storage.fragment(self.params[index], rank), self.blocks[index]
        if part is None:
            return None
        start, stop = block.before(part.start), block.before(part.stop)
        return Fragment(rank, start, stop, part.offset + block.flat(start) - part.start) if start < stop else None

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        """The fragments of block ``index`` in rank order; together they are exactly its elements."""
        begin, _, size, _ = self.storage.span(self.params[index])
        block, found, place = self.blocks[index], [], 0
        while place < block.numel:
            part = self.fragment(index, (begin + block.flat(place)) // size)
            assert part is not None and part.start == place, (block, place, part)
            found.append(part)
            place = part.stop
        return tuple(found)

    def views(self, index: int, rank: int) -> tuple[View, ...]:
        """Where in the flat tensor of ``rank`` its fragment of block ``index`` lies, in order; none if it has none."""
        if (index, rank) not in self._views:  # asked for in every step
            part = self.storage.fragment(self.params[index], rank)
            found = () if part is None else range_views(self.blocks[index], part.start, part.stop, part.offset)
            self._views[index, rank] = found
        return self._views[index, rank]

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return self.fragments(index)

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return True

    def kind(self, index: int) -> int:
        return self._kinds[index]

    @cached_property
    def _kinds(self) -> list[int]:
        """The number of the first block that lies alike: numbers are quicker to compare than blocks."""
        first: dict[Hashable, int] = {}
        keys = ((self.storage.kind(param), block) for param, block in zip(self.params, self.blocks))
        return [first.setdefault(key, index) for index, key in enumerate(keys)]

    def place(self, index: int) -> str:
        block, place = self.blocks[index], self.storage.place(self.params[index])
        return place if block.is_everything else f"{block} {place}"

    def stored_numel(self, rank: int) -> int:
        """Elements of parameters, without padding, that ``rank`` stores."""
        return self.storage.stored_numel(rank)


@dataclass(frozen=True)
class BlockReplicas:
    """Every rank stores every parameter, in a tensor of its own, and so every block. A plan's ``Layout``."""

    copies_keep_state: ClassVar[bool] = False

    storage: Replicas
    params: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def world_size(self) -> int:
        return self.storage.world_size

    def fragment(self, index: int, rank: int) -> Fragment:
        block = self.blocks[index]
        return Fragment(rank, 0, block.numel, block.flat(0))

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        return tuple(self.fragment(index, rank) for rank in range(self.world_size))

    def views(self, index: int, rank: int) -> tuple[View, ...]:
        """Where in its parameter's flat tensor block ``index`` lies, the same on every rank."""
        block = self.blocks[index]
        return range_views(block, 0, block.grid.slices * block.grid.slice_numel, 0)

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return (self.fragment(index, owner),)

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return rank == owner

    def kind(self, index: int) -> int:
        return self.blocks[index].numel

    def place(self, index: int) -> str:
        block, place = self.blocks[index], self.storage.place(self.params[index])
        return place if block.is_everything else f"{block}, {place}"

    def stored_numel(self, rank: int) -> int:
        return self.storage.stored_numel(rank)
