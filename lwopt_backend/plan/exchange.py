"""Which elements one rank sends and receives in one bucket's all-to-all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lwopt_backend.plan.layouts import Fragment, Layout


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of atom ``atom`` that are sent between this rank and ``peer``; runs are as in ``Fragment``."""

    atom: int
    peer: int
    start: int
    stop: int
    runs: int = 1
    pitch: int = 0

    @property
    def numel(self) -> int:
        return (self.stop - self.start) * self.runs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part of an all-to-all: what it sends and receives, in wire order (by peer, then by atom).

    ``split`` is None for parts of exact lengths, else the elements between every two ranks: all parts are equally long,
    padded at their end.
    """

    world_size: int
    sends: tuple[Segment, ...]
    receives: tuple[Segment, ...]
    split: int | None = None

    @property
    def send_splits(self) -> list[int]:
        return self._splits(self.sends)

    @property
    def receive_splits(self) -> list[int]:
        return self._splits(self.receives)

    @property
    def send_offsets(self) -> list[int]:
        """The offset of every sent segment in the buffer."""
        return self._offsets(self.sends)

    @property
    def receive_offsets(self) -> list[int]:
        return self._offsets(self.receives)

    def _splits(self, segments: Sequence[Segment]) -> list[int]:
        if self.split is not None:
            return [self.split] * self.world_size
        splits = [0] * self.world_size
        for segment in segments:
            splits[segment.peer] += segment.numel
        return splits

    def _offsets(self, segments: Sequence[Segment]) -> list[int]:
        offsets, end, peer = [], 0, -1
        for segment in segments:
            if self.split is not None and segment.peer != peer:
                end, peer = segment.peer * self.split, segment.peer
            offsets.append(end)
            end += segment.numel
        return offsets


def to_owners(
    bucket: Sequence[int], owners: Sequence[int], layout: Layout, rank: int, split: int | None = None
) -> Transfer:
    """The transfer that sends the bucket's atoms, piece by piece, to their owners, as ``rank`` sees it."""
    sends, receives = [], []
    for atom in bucket:
        owner = owners[atom]
        part = layout.fragment(atom, rank)
        if part is not None and layout.is_source(atom, rank, owner):
            sends.append(_segment(atom, owner, part))
        if owner == rank:
            receives += [_segment(atom, part.rank, part) for part in layout.sources(atom, owner)]
    return _transfer(layout, sends, receives, split)


def to_fragments(
    bucket: Sequence[int], owners: Sequence[int], layout: Layout, rank: int, split: int | None = None
) -> Transfer:
    """The transfer back: from the owners to every rank that stores a piece, copies included."""
    sends, receives = [], []
    for atom in bucket:
        owner = owners[atom]
        part = layout.fragment(atom, rank)
        if part is not None:
            receives.append(_segment(atom, owner, part))
        if owner == rank:
            sends += [_segment(atom, part.rank, part) for part in layout.fragments(atom)]
    return _transfer(layout, sends, receives, split)


def equal_split(bucket: Sequence[int], owners: Sequence[int], layout: Layout, alike: dict[Hashable, int]) -> int:
    """The most elements that any two ranks exchange: the length of all parts if these are equally long.

    ``alike`` has one atom of every kind that was met in the layout, and is filled.
    """
    owned: dict[int, Counter[Hashable]] = defaultdict(Counter)
    for atom in bucket:
        kind = layout.kind(atom)
        alike.setdefault(kind, atom)
        owned[owners[atom]][kind] += 1
    longest = 0
    for counts in {frozenset(counts.items()) for counts in owned.values()}:  # owners of the same kinds receive the same
        received: Counter[int] = Counter()
        for kind, count in counts:
            for part in layout.fragments(alike[kind]):
                received[part.rank] += part.numel * count
        longest = max(longest, *received.values())
    return longest


def _segment(atom: int, peer: int, part: Fragment) -> Segment:
    return Segment(atom, peer, part.start, part.stop, part.runs, part.pitch)


def _transfer(layout: Layout, sends: list[Segment], receives: list[Segment], split: int | None) -> Transfer:
    # A stable sort: within one peer, atoms keep the bucket's order on both sides of the wire.
    key = lambda segment: segment.peer  # noqa: E731
    return Transfer(layout.world_size, tuple(sorted(sends, key=key)), tuple(sorted(receives, key=key)), split)
