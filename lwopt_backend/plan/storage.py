"""How a host stores parameters: which rank holds which elements of which parameter."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

from lwopt_backend.plan.block_views import View

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
    """Where the parameters of a plan lie. A parameter has at most one fragment on each rank."""

    @property
    def world_size(self) -> int: ...

    @property
    def copies_keep_state(self) -> bool:
        """Whether every copy's rank keeps the state of its piece, or only the rank that sends it."""

    def fragments(self, index: int) -> Sequence[Fragment]:
        """Every rank's fragment of parameter ``index``, in rank order, copies included; empty ones are left out."""

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """What ``rank`` stores of parameter ``index``, or None."""

    def sources(self, index: int, owner: int) -> Sequence[Fragment]:
        """The fragments, in rank order, that are sent to ``owner``: together exactly the parameter's elements."""

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        """Whether the fragment of ``rank`` is among ``sources(index, owner)``, if it has one."""

    def kind(self, index: int) -> Hashable:
        """Parameters of one kind lie alike."""

    def place(self, index: int) -> str:
        """Where parameter ``index`` lies, in a spelling that ranks can compare."""


class Partition:
    """Storage in which a rank holds one contiguous range of a parameter, from every ``size`` elements the next rank."""

    __slots__ = ()
    copies_keep_state: ClassVar[bool] = True

    def span(self, index: int) -> tuple[int, int, int, int]:
        """Of parameter ``index``: where it begins in what is cut, its elements, a rank's ``size`` and base."""
        raise NotImplementedError

    def fragments(self, index: int) -> tuple[Fragment, ...]:
        """The fragments of parameter ``index`` in rank order; together they are exactly its elements."""
        begin, numel, size, _ = self.span(index)
        ranks = range(begin // size, (begin + numel - 1) // size + 1)
        return tuple(part for rank in ranks if (part := self.fragment(index, rank)) is not None)

    def fragment(self, index: int, rank: int) -> Fragment | None:
        """What ``rank`` stores of parameter ``index``, or None."""
        begin, numel, size, base = self.span(index)
        low, high = max(begin, rank * size), min(begin + numel, (rank + 1) * size)
        return Fragment(rank, low - begin, high - begin, base + low - rank * size) if low < high else None

    def views(self, index: int, rank: int) -> tuple[View, ...]:
        """Where in the flat tensor of ``rank`` its fragment of parameter ``index`` lies; none if it has none."""
        held = self.fragment(index, rank)
        return () if held is None else (View(held.offset, (held.numel,), (1,)),)

    def sources(self, index: int, owner: int) -> tuple[Fragment, ...]:
        return self.fragments(index)

    def is_source(self, index: int, rank: int, owner: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FlatPartition(Partition):
    """ZeRO-1/2's storage of one param group: parameters end to end, padded, cut into equal parts.

    ::

        p0 p0 p0 p0 | p0 p1 p1 p1 | p1 p2 __ __        world_size 3, partition_numel 4, 2 elements of padding
           rank 0        rank 1        rank 2

    A parameter lies in one contiguous fragment on each rank it touches. Offsets are exact integers, so the
    storage of every rank is known on every rank without a message.
    """

    world_size: int
    numels: tuple[int, ...]
    offsets: tuple[int, ...]  # start of every parameter in the group's flat buffer
    partition_numel: int

    @classmethod
    def build(
        cls, numels: Iterable[int], world_size: int, *, alignment: int = 2, param_alignment: int = 1
    ) -> FlatPartition:
        """DeepSpeed's layout: every start on ``param_alignment`` elements, the end on ``alignment * world_size``.

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
                raise ValueError(
                    f"parameter {index} has {numel} elements; a flat partition holds parameters of at least one"
                )
            if offset < end:
                raise ValueError(f"parameter {index} starts at {offset} but element {end} is next; parameters overlap")
            end = offset + numel
        if end > self.world_size * self.partition_numel:
            raise ValueError(
                f"parameters end at {end}, beyond {self.world_size} partitions of {self.partition_numel} elements"
            )

    def span(self, index: int) -> tuple[int, int, int, int]:
        return self.offsets[index], self.numels[index], self.partition_numel, 0

    def kind(self, index: int) -> int:
        return index

    def place(self, index: int) -> str:
        return f"at {self.offsets[index]} of {self.partition_numel}"

    def stored_numel(self, rank: int) -> int:
        """Elements of parameters, without padding, that ``rank`` stores."""
        low, high = rank * self.partition_numel, (rank + 1) * self.partition_numel
        return sum(max(0, min(high, o + n) - max(low, o)) for o, n in zip(self.offsets, self.numels))
