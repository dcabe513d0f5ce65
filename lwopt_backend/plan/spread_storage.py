"""Storage in which every parameter lies on every rank: a part of it (ZeRO-3), or a copy (stage 0)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from lwopt_backend.plan.storage import Fragment, Partition


@dataclass(frozen=True, slots=True)
class Place:
    """``numel`` elements from ``begin`` of a parameter of which every rank holds ``part``, from ``base`` of its own."""

    begin: int
    numel: int
    part: int
    base: int


@dataclass(frozen=True, slots=True)
class ParameterPartition(Partition):
    """ZeRO-3's storage: every parameter is padded and cut into equal parts, and a rank's parts lie end to end.

    ::

        p0 p0 | p0 p0 | p0 __        p0 of 5 elements and p1 of 2 on 3 ranks, 3 elements a rank:
        p1    | p1    | __           rank 0 stores p0 p0 p1, rank 1 p0 p0 p1, rank 2 p0 __ __

    """

    world_size: int
    places: tuple[Place, ...]
    partition_numel: int

    @classmethod
    def build(cls, numels: Iterable[int], world_size: int) -> ParameterPartition:
        """Raises ValueError for a parameter without elements."""
        numels = tuple(numels)
        if 0 in numels:
            raise ValueError(f"parameter {numels.index(0)} has no elements; a partition holds parameters of at least 1")
        parts = [-(-numel // world_size) for numel in numels]
        bases = [0, *accumulate(parts)]
        places = tuple(Place(0, numel, part, base) for numel, part, base in zip(numels, parts, bases))
        return cls(world_size, places, bases[-1])

    def span(self, index: int) -> tuple[int, int, int, int]:
        place = self.places[index]
        return place.begin, place.numel, place.part, place.base

    def kind(self, index: int) -> tuple[int, int, int]:
        place = self.places[index]
        return place.begin, place.numel, place.part

    def place(self, index: int) -> str:
        place = self.places[index]
        return f"from {place.begin} in parts of {place.part} at {place.base} of {self.partition_numel}"

    def stored_numel(self, rank: int) -> int:
        """Elements of parameters, without padding, that ``rank`` stores."""
        held = (self.fragment(index, rank) for index in range(len(self.places)))
        return sum(part.numel for part in held if part is not None)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Every rank stores every parameter; the owner takes its own copy and keeps the state alone."""

    copies_keep_state: ClassVar[bool] = False

    world_size: int
    numels: tuple[int, ...]

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
