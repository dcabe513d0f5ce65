"""One optimizer step of one plan's matrices on one rank.

::

    bucket 0: advance the momentum, send the directions to the owners
    for every bucket:     the same for the next bucket
                          if it is the first, step the local matrices while both are on the wire
                          receive this bucket, update its owned matrices, send the updates back
                          receive the previous bucket's updates, decay, apply them

At most two buckets are in flight. Matrices stored whole at their owner never enter a buffer: they are updated through
views, one at a time or in batches, so a step's temporaries are one matrix (or one bucket).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan, Segment, Transfer
from lwopt_backend.plan.exchange import own_block
from lwopt_backend.rules import MatrixRule, WeightRule
from lwopt_backend.runtime.collectives import Collectives, all_reduce_nbytes, sending
from lwopt_backend.runtime.exchange import Arrival, Parts, Way, ways_back, ways_to_owners
from lwopt_backend.runtime.pieces import Storage
from lwopt_backend.runtime.whole import Batch, Rules, WholeMatrices, copy_alike, filled_on

NONE: frozenset[int] = frozenset()
KEPT = 4  # sets of skipped matrices for which a bucket's places are known


class MatrixStepper:
    """Steps the matrices of one plan. ``batch_numel`` and ``capture`` are as in ``WholeMatrices``.

    With 0, it takes matrices one by one, which yields the bits of an unsharded optimizer, and is faster on a CPU.
    Batching saves kernel launches on an accelerator. Matrices are exchanged on ``device``, wherever they are stored;
    the rule runs on ``rule_device``, by default the same.

    A step's ``rules`` are by kind, and ``kinds`` says which is an atom's. ``owned`` are the atoms that this rank owns,
    ``owner_state`` is their owner state.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        kinds: Sequence[int],
        collectives: Collectives,
        device: torch.device,
        *,
        batch_numel: int = 0,
        rule_device: torch.device | None = None,
        capture: bool = False,
    ) -> None:
        rank = collectives.rank
        self._plan, self._kinds = plan, kinds
        self._collectives, self._device = collectives, device
        self._to_owners = ways_to_owners(plan, collectives, device)
        self._back = ways_back(plan, collectives, device)
        self._lag = 0 if plan.rows is None else 1  # updates are passed on during the next bucket's computation
        self._local = plan.local_atoms(rank)
        self._new_matrices = partial(
            WholeMatrices, rule_device=rule_device or device, batch_numel=batch_numel, capture=capture
        )
        self._whole = self._new_matrices(plan.atoms, kinds)
        self._buckets: dict[int, BucketPlaces] = {}
        self.owned = [atom for atom, owner in enumerate(plan.ownership.owners) if owner == rank]
        self.owner_state = self._whole.owner_state

    def _places(self, bucket: int, skipped: frozenset[int]) -> Places:
        if bucket not in self._buckets:
            out, back = self._to_owners[bucket], self._back[bucket]
            rank = self._collectives.rank
            self._buckets[bucket] = BucketPlaces(self._plan, rank, bucket, out.transfer, back, self._whole)
        return self._buckets[bucket].without(skipped)

    @torch.no_grad()
    def step(
        self,
        rules: Rules,
        storage: Storage,
        *,
        active: Callable[[int], bool] | None = None,
        departed: Mapping[int, Arrival | None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Update the weights and the state in ``storage``. Called on all ranks of the group.

        All ``rules`` exchange in one dtype. A matrix that is not ``active`` is not changed; ``active`` must return the
        same on all ranks, and by default all are. ``departed`` has the buckets whose state is already advanced, with
        their exchange if it was started. ``meanwhile`` runs while the first bucket is on the wire.
        """
        inactive = NONE if active is None else frozenset(a for a in range(len(self._kinds)) if not active(a))
        own = self.in_blocks(rules)
        run = Run(rules, storage, inactive | own, departed or {})
        count = len(self._to_owners)
        buckets = [number for number, atoms in enumerate(self._plan.buckets) if not own.issuperset(atoms)]
        first, *further = *buckets, count
        arriving = self._depart(first, run)
        if meanwhile is not None:
            meanwhile()
        returning: list[tuple[int, Arrival]] = []
        for bucket, after in zip(buckets, further):
            following = self._depart(after, run)
            if bucket == first:
                self._step_local(run)
            sent_back = self._update_owned(bucket, arriving, run)
            self._apply_all_but(self._lag, returning, run)
            returning.append((bucket, sent_back))
            arriving = following
        if first == count:
            self._step_local(run)
        if own:
            self._step_own([atom for atom in self._own if atom in own and atom not in inactive], run)
        self._apply_all_but(0, returning, run)

    def in_blocks(self, rules: Rules) -> frozenset[int]:
        """The exchanged atoms of which each rank updates its own block in this step."""
        if self._plan.block_period == 1:
            return NONE
        return frozenset(atom for atom in self._plan.in_blocks if rules[self._kinds[atom]].blocks is not None)

    def _step_local(self, run: Run) -> None:
        self._whole.step((atom for atom in self._local if atom not in run.skipped), run.rules, run.storage)

    @cached_property
    def _own(self) -> dict[int, Atom]:
        """This rank's blocks as matrices, of the atoms in ``in_blocks`` of which it has one."""
        found = {}
        for atom in sorted(self._plan.in_blocks):
            part = self._plan.layout.fragment(atom, self._collectives.rank)
            block = None if part is None else own_block(self._plan.atoms[atom], part)
            if block is not None:
                found[atom] = block
        return found

    @cached_property
    def _own_matrices(self) -> WholeMatrices:
        """This rank's blocks. A block that is the whole matrix has its kind, the others' kinds are below zero."""
        atoms = [self._own.get(number, atom) for number, atom in enumerate(self._plan.atoms)]
        pairs = zip(self._kinds, zip(atoms, self._plan.atoms))
        return self._new_matrices(atoms, [kind if own is whole else ~kind for kind, (own, whole) in pairs])

    def _step_own(self, atoms: Sequence[int], run: Run) -> None:
        """Update this rank's blocks by the rule of blocks, a block that is the whole matrix by that of matrices."""
        of_blocks = {~kind: rule.blocks for kind, rule in run.rules.items() if rule.blocks is not None}
        self._own_matrices.step(atoms, {**run.rules, **of_blocks}, run.storage)

    def sent_atoms(self, bucket: int) -> list[int]:
        """The atoms of a bucket of which this rank sends a piece."""
        return [segment.atom for segment in self._to_owners[bucket].transfer.sends]

    def send_directions(self, bucket: int, run: Run, *, advance: bool = True) -> Arrival:
        """Start the all-to-all that sends a bucket's directions to their owners."""

        def pack(parts: Parts) -> None:
            sent = self._places(bucket, run.skipped).sent
            self._whole.pack_directions(parts, sent, run.rules, run.storage, advance=advance)

        return self._send(bucket, run, pack)

    def advance_sent(self, bucket: int, rules: Rules, storage: Storage, arrival: Arrival) -> Parts:
        """Advance the state of a bucket that was sent before; returns the parts with the current directions."""
        now, places = torch.empty_like(arrival.data), self._places(bucket, NONE)
        with filled_on(_device_of(places.sent, storage) or now.device, now) as filled:
            self._whole.pack_directions(arrival.sent(filled), places.sent, rules, storage, advance=True)
        self._whole.advance(places.copies, rules, storage)
        return arrival.sent(now)

    def _send(self, bucket: int, run: Run, pack: Callable[[Parts], None]) -> Arrival:
        """Start an all-to-all to the owners; ``pack`` fills the parts."""
        places = self._places(bucket, run.skipped)
        dtype, stored = self._first_rule(bucket, run).exchange_dtype, _device_of(places.sent, run.storage)
        return self._to_owners[bucket].start(dtype, pack, stored, zeros=places.skips_sent)

    def _first_rule(self, bucket: int, run: Run) -> MatrixRule:
        """A rule of the bucket, all of whose rules have equal exchanges."""
        return run.rules[self._kinds[self._plan.buckets[bucket][0]]]

    def _depart(self, bucket: int, run: Run) -> list[Arrival]:
        """Start sending a bucket's directions to the owners, and its weights if its rule is a ``WeightRule``."""
        if bucket >= len(self._to_owners):
            return []
        # What left in the backward pass has its gradients in the momentum, and must not add them again.
        advanced, places = bucket in run.departed, self._places(bucket, run.skipped)
        arrivals = [run.departed.get(bucket) or self.send_directions(bucket, run, advance=not advanced)]
        if not advanced:
            self._whole.advance(places.copies, run.rules, run.storage)
        if isinstance(self._first_rule(bucket, run), WeightRule):
            arrivals.append(
                self._send(bucket, run, lambda parts: self._whole.pack_values(parts, places.sent, run.storage))
            )
        return arrivals

    def _update_owned(self, bucket: int, arriving: Sequence[Arrival], run: Run) -> Arrival:
        places = self._places(bucket, run.skipped)
        batches = self._whole.batches(places.owned, run.rules)
        arrived = [self._whole_of(arrival, batches, places) for arrival in arriving]
        updates = self._updates(batches, arrived, run)

        def pack(parts: Parts) -> None:
            of_buffer, cuts = places.sent_back.pairs(batches, updates, parts)
            copy_alike(of_buffer, cuts)

        dtype, computed = self._first_rule(bucket, run).exchange_dtype, next((u.device for u in updates), None)
        return self._back[bucket].start(dtype, pack, computed, zeros=places.skips_owned)

    def _updates(self, batches: Sequence[Batch], arrived: Sequence[list[Tensor]], run: Run) -> list[Tensor]:
        """The updates of the matrices of a bucket that this rank owns, batch by batch."""
        directions, *weights = arrived
        updates: list[Tensor] = []
        for number, batch in enumerate(batches):
            rule, stack = run.rules[batch.kind], directions.pop(0)
            if isinstance(rule, WeightRule):
                updates.append(self._whole.step_weight(rule, batch.atoms[0], weights[0][number], stack))
            else:
                updates.append(self._whole.transform(rule, batch.atoms, stack))
        return updates

    def _whole_of(self, arrival: Arrival, batches: Sequence[Batch], places: Places) -> list[Tensor]:
        """Wait; returns the matrices that arrived, batch by batch."""
        stacks = [self._whole.empty(batch.atoms, arrival.received) for batch in batches]

        def deliver(parts: Parts) -> None:
            of_buffer, cuts = places.arrived.pairs(batches, stacks, parts)
            copy_alike(cuts, of_buffer)

        arrival.wait(deliver)
        return stacks

    def _apply_all_but(self, last: int, returning: list[tuple[int, Arrival]], run: Run) -> None:
        """Pass the last bucket's updates on to copies, if there are any; apply all but those of the ``last`` buckets.
        Drops references to applied updates."""
        if returning:
            bucket, arrival = returning.pop()
            returning.append((bucket, arrival.passed_on()))
        while len(returning) > last:
            self._apply_returned(*returning.pop(0), run)

    def _apply_returned(self, bucket: int, returning: Arrival, run: Run) -> None:
        places = self._places(bucket, run.skipped)

        def apply(parts: Parts) -> None:
            sums = self._sums(places, parts, run)
            self._whole.apply(parts, places.returned, run.rules, run.storage, sums)

        returning.wait(apply, _device_of(places.returned, run.storage))

    def _sums(self, places: Places, parts: Parts, run: Run) -> Mapping[int, Tensor] | None:
        """``sums_of`` the whole matrices of a bucket, added over the ranks, if its rules use norms: 24 bytes each."""
        atoms = [atom for atom in places.active if run.rules[self._kinds[atom]].by_norms]
        if not atoms:
            return None
        found = self._whole.sums(parts, places.returned, places.counted, run.rules, run.storage)
        nothing = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums = torch.stack([found[atom].to(self._device) if atom in found else nothing for atom in atoms])
        sending(all_reduce_nbytes(sums.nbytes, self._collectives.world_size))
        self._collectives.all_reduce(sums)
        return dict(zip(atoms, sums))


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
    arrived: Cuts
    sent_back: Cuts
    returned: Sequence[Batch]
    counted: frozenset[int]


class BucketPlaces:
    """The places of a bucket's matrices, found once: for steps with all of them, and for the last few others.

    ``out`` is this rank's part of the transfer to the owners, ``back`` the way back.
    """

    def __init__(
        self, plan: MatrixPlan, rank: int, bucket: int, out: Transfer, back: Way, whole: WholeMatrices
    ) -> None:
        self._atoms, owners, self._whole = plan.buckets[bucket], plan.ownership.owners, whole
        self._sends = [(segment.atom, segment.numel) for segment in out.sends]
        self._arriving = [(segment.atom, segment.numel) for segment in back.arriving]
        here = {segment.atom for segment in out.sends}
        copies = [atom for atom in self._atoms if plan.keeps_state(atom, rank) and atom not in here]
        parts = ((atom, plan.layout.fragment(atom, rank)) for atom in copies)
        self._copies = [(atom, part.numel) for atom, part in parts if part is not None]
        self._owned = [atom for atom in self._atoms if owners[atom] == rank]
        self._arrived, self._sent_back = Cuts(plan.atoms, out.receives), Cuts(plan.atoms, back.transfer.sends)
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
        batches = partial(self._whole.batches_of_pieces, skipped=skipped)
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


class Cuts:
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
            found = [cut(m, segment) for m, atom in zip(matrices, batch.atoms) for segment in self._segments[atom]]
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


def cut(matrix: Tensor, segment: Segment) -> Tensor:
    """The segment's elements; whole rows or a rectangle as a view, whatever the matrix's strides."""
    columns, length = matrix.shape[1], segment.stop - segment.start
    row, column = divmod(segment.start, columns)
    if segment.runs > 1:
        return matrix[row : row + segment.runs, column : column + length]
    if column == 0 and length % columns == 0:
        return matrix[row : row + length // columns]
    return matrix.reshape(-1)[segment.start : segment.stop]


@dataclass(frozen=True, slots=True)
class Run:
    """The arguments of one step."""

    rules: Rules
    storage: Storage
    skipped: frozenset[int] = NONE
    departed: Mapping[int, Arrival | None] = field(default_factory=dict)


def _device_of(batches: Sequence[Batch], storage: Storage) -> torch.device | None:
    """Where this rank stores its pieces of these matrices; None if there are none."""
    return next((value.device for batch in batches for value in storage(batch.atoms[0]).values), None)
