"""Which matrices are stepped together, and where those of a bucket lie in its buffers. Nothing here holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan, Segment, Transfer
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime.exchange import Parts, Way

Rules = Mapping[int, MatrixRule]  # by kind
NONE: frozenset[int] = frozenset()
KEPT = 4  # sets of other matrices, whose batches and places are known


class Batch(NamedTuple):
    """Matrices of one ``kind`` that go through its rule at once, with their elements; of pieces, the elements of each
    and their ``places`` in a buffer."""

    kind: int
    atoms: list[int]
    numels: list[int]
    places: list[int]


class Batches:
    """Batches of ``atoms``, by their numbers: at most ``batch_numel`` elements, or one matrix, of one of the
    ``kinds``."""

    def __init__(self, atoms: Sequence[Atom], kinds: Sequence[int], batch_numel: int) -> None:
        self._atoms, self._kinds, self._batch_numel = atoms, kinds, batch_numel
        self._known: dict[tuple[tuple[int, ...], frozenset[int]], Sequence[Batch]] = {}
        self._room = 0  # for so many matrices more in what is known

    def of(self, atoms: tuple[int, ...], rules: Rules) -> Sequence[Batch]:
        """Whole matrices of one kind, shape and orientation; one at a time if the rule takes no more."""
        key = atoms, frozenset(kind for kind, rule in rules.items() if takes_one(rule))
        if key not in self._known:
            self._room -= len(atoms)
            if self._room < 0:
                self._known.clear()
                self._room = KEPT * len(self._atoms) - len(atoms)
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, atoms: tuple[int, ...], single: frozenset[int]) -> Sequence[Batch]:
        def alike(atom: int) -> Hashable:
            of = self._atoms[atom]
            return of.shape, of.transposed, of.tiles, atom if self._kinds[atom] in single else None

        return self._divided([(atom, self._atoms[atom].numel, 0) for atom in atoms], alike)

    def of_pieces(self, numels: Iterable[tuple[int, int]], skipped: frozenset[int]) -> Sequence[Batch]:
        """Batches of pieces in a buffer, given the atom and the elements of each, without ``skipped`` atoms."""
        kept = [(atom, numel, place) for place, (atom, numel) in enumerate(numels) if atom not in skipped]
        return self._divided(kept, lambda atom: None)

    def _divided(self, pieces: Iterable[tuple[int, int, int]], alike: Callable[[int], Hashable]) -> list[Batch]:
        """Batches of at most ``batch_numel`` elements, or one piece, of one kind, that are ``alike``. A piece is its
        atom, its elements and its place."""
        found: dict[Hashable, list[Batch]] = {}
        totals: dict[Hashable, int] = {}
        for atom, numel, place in pieces:
            key = (self._kinds[atom], alike(atom))
            total = totals.get(key, 0) + numel
            if key not in found or total > self._batch_numel:
                found.setdefault(key, []).append(Batch(self._kinds[atom], [], [], []))
                total = numel
            batch = found[key][-1]
            batch.atoms.append(atom)
            batch.numels.append(numel)
            batch.places.append(place)
            totals[key] = total
        return list(chain.from_iterable(found.values()))


def takes_one(rule: MatrixRule) -> bool:
    """Whether a rule takes whole matrices one at a time."""
    return isinstance(rule, (OwnerStateRule, WeightRule))


@dataclass(frozen=True, slots=True)
class Places:
    """Where those matrices of a bucket that a step does not skip lie in its buffers on one rank. Depends on no tensor.

    ``copies`` are pieces that this rank stores and another sends. ``skips_sent`` is whether this rank would send a
    piece of a skipped matrix, ``skips_owned`` whether it owns one. ``counted`` has the matrices of which this rank
    counts its piece, where several ranks store it.
    """

    active: Sequence[int]
    sent: Sequence[Batch]
    skips_sent: bool
    copies: Sequence[Batch]
    owned: tuple[int, ...]
    skips_owned: bool
    arrived: SegmentPlaces
    sent_back: SegmentPlaces
    returned: Sequence[Batch]
    counted: frozenset[int]


class BucketPlaces:
    """The places of a bucket's matrices, found once: for steps with all of them, and for the last few others.

    ``out`` is this rank's part of the transfer to the owners, ``back`` the way back.
    """

    def __init__(self, plan: MatrixPlan, rank: int, bucket: int, out: Transfer, back: Way, batches: Batches) -> None:
        self._atoms, owners, self._batches = plan.buckets[bucket], plan.ownership.owners, batches
        self._sends = [(segment.atom, segment.numel) for segment in out.sends]
        self._arriving = [(segment.atom, segment.numel) for segment in back.arriving]
        here = {segment.atom for segment in out.sends}
        copies = [atom for atom in self._atoms if plan.keeps_state(atom, rank) and atom not in here]
        parts = ((atom, plan.layout.fragment(atom, rank)) for atom in copies)
        self._copies = [(atom, part.numel) for atom, part in parts if part is not None]
        self._owned = [atom for atom in self._atoms if owners[atom] == rank]
        self._arrived = SegmentPlaces(plan.atoms, out.receives)
        self._sent_back = SegmentPlaces(plan.atoms, back.transfer.sends)
        # One rank counts a piece that several ranks store: the one that would send it to the owner.
        self._counted = frozenset(a for a in self._atoms if plan.layout.is_source(a, rank, owners[a]))
        self._known: dict[frozenset[int], Places] = {}

    def without(self, skipped: frozenset[int]) -> Places:
        """The places of those that are not ``skipped``."""
        skipped = skipped.intersection(self._atoms) if skipped else skipped
        if skipped not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            self._known[skipped] = self._find(skipped)
        return self._known[skipped]

    def _find(self, skipped: frozenset[int]) -> Places:
        batches = partial(self._batches.of_pieces, skipped=skipped)
        return Places(
            active=[atom for atom in self._atoms if atom not in skipped],
            sent=batches(self._sends),
            skips_sent=any(atom in skipped for atom, _ in self._sends),
            copies=batches(self._copies),
            owned=tuple(atom for atom in self._owned if atom not in skipped),
            skips_owned=not skipped.isdisjoint(self._owned),
            arrived=self._arrived,
            sent_back=self._sent_back,
            returned=batches(self._arriving),
            counted=self._counted,
        )


class SegmentPlaces:
    """Where the segments of a buffer lie in whole matrices. A matrix that its segments fill in order, such as rows over
    ranks, is cut by one call of the host, with all of a stack."""

    def __init__(self, atoms: Sequence[Atom], segments: Sequence[Segment]) -> None:
        self._places: dict[int, list[int]] = {}
        self._segments: dict[int, list[Segment]] = {}
        for place, segment in enumerate(segments):
            self._places.setdefault(segment.atom, []).append(place)
            self._segments.setdefault(segment.atom, []).append(segment)
        cut = self._segments.items()
        self._in_order = {atom for atom, parts in cut if fills_in_order(parts, atoms[atom].numel)}
        self._numels = {atom: [segment.numel for segment in parts] for atom, parts in cut}

    def pairs(
        self, batches: Sequence[Batch], stacks: Sequence[Tensor], parts: Parts
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of the buffer that belong to these batches, and the same elements of their matrices, in one shape
        each."""
        of_buffer: list[Tensor] = []
        cuts: list[Tensor] = []
        for batch, stack in zip(batches, stacks):
            here = [parts[place] for atom in batch.atoms for place in self._places[atom]]
            if stack.is_contiguous() and self._in_order.issuperset(batch.atoms):
                numels = [numel for atom in batch.atoms for numel in self._numels[atom]]
                of_buffer += here
                cuts += stack.view(-1).split_with_sizes(numels)
                continue
            matrices = stack.unbind() if stack.ndim > 2 else [stack]
            found = [
                elements_of(m, segment) for m, atom in zip(matrices, batch.atoms) for segment in self._segments[atom]
            ]
            of_buffer += [part.view_as(elements) for part, elements in zip(here, found)]
            cuts += found
        return of_buffer, cuts


def fills_in_order(segments: Sequence[Segment], numel: int) -> bool:
    """Whether segments are ranges that follow each other from the first element of a matrix to its last."""
    end = 0
    for segment in segments:
        if segment.start != end or segment.runs > 1:
            return False
        end = segment.stop
    return end == numel


def elements_of(matrix: Tensor, segment: Segment) -> Tensor:
    """The segment's elements; whole rows or a rectangle as a view, whatever the matrix's strides."""
    columns, length = matrix.shape[1], segment.stop - segment.start
    row, column = divmod(segment.start, columns)
    if segment.runs > 1:
        return matrix[row : row + segment.runs, column : column + length]
    if column == 0 and length % columns == 0:
        return matrix[row : row + length // columns]
    return matrix.reshape(-1)[segment.start : segment.stop]
