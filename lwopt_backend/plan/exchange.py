"""Which elements one rank sends and receives in one bucket's all-to-all, and passes on to copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.layouts import Fragment, Layout, by_kind
from lwopt_backend.plan.mesh import MeshRows


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
    """One rank's part of an all-to-all: what it sends and receives, in wire order (by peer, then by atom)."""

    world_size: int
    sends: tuple[Segment, ...]
    receives: tuple[Segment, ...]

    @property
    def send_splits(self) -> list[int]:
        return self._splits(self.sends)

    @property
    def receive_splits(self) -> list[int]:
        return self._splits(self.receives)

    def within(self, ranks: Sequence[int]) -> Transfer:
        """The part between these ascending ranks; their all-to-all numbers them from 0."""
        number = {rank: place for place, rank in enumerate(ranks)}
        sends, receives = (
            tuple(replace(segment, peer=number[segment.peer]) for segment in segments if segment.peer in number)
            for segments in (self.sends, self.receives)
        )
        return Transfer(len(ranks), sends, receives)

    def _splits(self, segments: Sequence[Segment]) -> list[int]:
        splits = [0] * self.world_size
        for segment in segments:
            splits[segment.peer] += segment.numel
        return splits


def transfer_of(
    bucket: Sequence[int], owners: Sequence[int], layout: Layout, rank: int, rows: MeshRows | None, *, back: bool
) -> Transfer:
    """The transfer of the bucket's atoms, piece by piece, to their owners, as ``rank`` sees it.

    Or ``back``, from the owners to every rank that stores a piece, copies included. With ``rows``, only the part within
    the rank's row.
    """
    stored, owned = [], []  # pieces of this rank, and all pieces of its own atoms
    for atom in bucket:
        owner, part = owners[atom], layout.fragment(atom, rank)
        if part is not None and (back or layout.is_source(atom, rank, owner)):
            stored.append(_segment(atom, owner, part))
        if owner == rank:
            parts = layout.fragments(atom) if back else layout.sources(atom, owner)
            owned += [_segment(atom, part.rank, part) for part in parts]
    # A stable sort: within one peer, atoms keep the bucket's order on both sides of the wire.
    both = (tuple(sorted(segments, key=lambda segment: segment.peer)) for segments in (stored, owned))
    there = Transfer(layout.world_size, *both)
    found = replace(there, sends=there.receives, receives=there.sends) if back else there
    return found if rows is None else found.within(rows.of[rank][0])


def along_column(back: Transfer, rows: MeshRows, rank: int) -> list[list[Segment]]:
    """Per rank of the column of ``rank``, its segments of ``back`` that come from owners in that rank's row."""
    members = (set(rows.of[member][0]) for member in rows.of[rank][1])
    return [[segment for segment in back.receives if segment.peer in row] for row in members]


def copied_numels(bucket: Sequence[int], owners: Sequence[int], layout: Layout, rows: MeshRows | None) -> list[int]:
    """Per rank, the size of a part in its column's all-gather: the largest of its ranks'."""
    if rows is None:
        return []
    found = [0] * layout.world_size
    first: dict[Hashable, int] = {}
    alike = ((first.setdefault(layout.kind(atom), atom), rows.of[owners[atom]][0]) for atom in bucket)
    for (atom, row), times in Counter(alike).items():
        for rank in row:
            part = layout.fragment(atom, rank)
            found[rank] += 0 if part is None else part.numel * times
    return [max(found[member] for member in column) for _, column in rows.of]


def _segment(atom: int, peer: int, part: Fragment) -> Segment:
    return Segment(atom, peer, part.start, part.stop, part.runs, part.pitch)


# Matrices that ranks update block by block (MuonBP): each rank's own fragment is a matrix by itself and is not sent.


def own_block(atom: Atom, part: Fragment) -> Atom | None:
    """A fragment as a matrix: whole rows of ``atom``, or a rectangle; None if it begins or ends inside a row."""
    if part.numel == atom.numel:
        return atom
    width = atom.shape[1] // atom.tiles
    rows, columns = (part.runs, part.stop - part.start) if part.runs > 1 else (part.numel // width, width)
    tile = width * atom.shape[0]
    cut = part.start % width or part.stop % width or part.start // tile != (part.stop - 1) // tile
    return None if cut and part.runs == 1 else replace(atom, shape=(rows, columns), tiles=1)


def with_own_blocks(atoms: Sequence[Atom], indices: Iterable[int], layout: Layout) -> frozenset[int]:
    """Those among ``indices`` of which every rank that stores some has a block, with the block's state."""

    def has_blocks(index: int) -> bool:
        parts = layout.fragments(index)
        there = (own_block(atoms[index], part) is not None for part in parts)
        return all(there) and all(layout.keeps_state(index, part.rank, 0) for part in parts)

    indices = list(indices)
    return frozenset(index for index, has in zip(indices, by_kind(layout, indices, has_blocks)) if has)
