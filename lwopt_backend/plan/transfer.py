"""Which elements one rank sends and receives in one bucket's all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.storage import FlatPartition


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``[start, stop)`` of atom ``atom`` that move between this rank and ``peer``."""

    atom: int
    peer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part of an all-to-all: what it sends and receives, in wire order (by peer, then by atom)."""

    rank: int
    world_size: int
    sends: tuple[Segment, ...]
    receives: tuple[Segment, ...]

    def reversed(self) -> Transfer:
        """The way back: what came returns to where it came from."""
        return Transfer(self.rank, self.world_size, sends=self.receives, receives=self.sends)

    @property
    def send_splits(self) -> list[int]:
        return _splits(self.sends, self.world_size)

    @property
    def receive_splits(self) -> list[int]:
        return _splits(self.receives, self.world_size)

    @property
    def wire_numel(self) -> int:
        """Elements this rank puts on the wire; what it keeps for itself is not counted."""
        return sum(segment.numel for segment in self.sends if segment.peer != self.rank)


def _splits(segments: Sequence[Segment], world_size: int) -> list[int]:
    splits = [0] * world_size
    for segment in segments:
        splits[segment.peer] += segment.numel
    return splits


def to_owners(bucket: Sequence[int], owners: Sequence[int], layout: FlatPartition, rank: int) -> Transfer:
    """The transfer that brings every fragment of the bucket's atoms to the atom's owner, as ``rank`` sees it."""
    sends, receives = [], []
    for atom in bucket:
        owner = owners[atom]
        for part in layout.fragments(atom):
            if part.rank == rank:
                sends.append(Segment(atom, owner, part.start, part.stop))
            if owner == rank:
                receives.append(Segment(atom, part.rank, part.start, part.stop))
    # A stable sort: within one peer, atoms keep the bucket's order on both sides of the wire.
    key = lambda segment: segment.peer  # noqa: E731
    return Transfer(rank, layout.world_size, tuple(sorted(sends, key=key)), tuple(sorted(receives, key=key)))
