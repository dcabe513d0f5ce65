"""One optimizer step of a plan's matrices, and the early exchange of buckets in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan, Segment
from lwopt_backend.plan.exchange import own_block
from lwopt_backend.rules import MatrixRule, WeightRule
from lwopt_backend.runtime.collectives import Collectives, all_reduce_nbytes, sending
from lwopt_backend.runtime.exchange import Arrival, Beside, Segments, ways_back, ways_to_owners
from lwopt_backend.runtime.undisturbed import undisturbed
from lwopt_backend.runtime.whole import Slices, Storage, WholeMatrices, advance, copy_alike, filled_on

# Early exchange: buckets sent in the backward pass, used only if they equal those that the step would send.

LONGEST_PAUSE = 32  # steps


class EarlyExchange:
    """The buckets of one stepper that are exchanged before the step.

    A bucket is sent when the last of its gradients is ready, with the directions that follow from these gradients. The
    step advances the state, computes the directions again, and compares them with those sent, bit by bit. If any rank
    finds a difference, because gradients were clipped, unscaled or otherwise changed in between, the bucket is
    exchanged again. The result therefore always equals that of a step without early exchange. After such a
    repetition, early exchange pauses for 1 step, then for 2, up to 32.

    Directions are computed on a different stream from that of the gradients, so that gradients need not wait. A read
    may be torn by a later change of the gradient; the comparison finds that difference too.
    """

    def __init__(self, stepper: MatrixStepper, buckets: Sequence[Sequence[int]], device: torch.device) -> None:
        self._stepper = stepper
        self._device = device
        self._beside = Beside(device)
        self._buckets = buckets
        self._bucket_of = {atom: number for number, bucket in enumerate(buckets) for atom in bucket}
        self._waiting = [set(bucket) for bucket in buckets]
        self._departed: dict[int, Arrival] = {}
        self._advanced: set[int] = set()
        self._pause = 0
        self._penalty = 1

    @torch.no_grad()
    def ready(self, atom: int, now: Callable[[], tuple[Sequence[MatrixRule], Storage]]) -> None:
        """Note that an atom's gradient is ready. Called on all ranks, for the same atoms in the same order.

        ``now`` returns the current rules and storage, and is called only for a bucket's last atom. If a gradient is
        ready a second time, it belongs to another micro-batch, and everything sent so far is dropped as stale.
        """
        bucket = self._bucket_of.get(atom)
        if bucket is None or self._pause:
            return
        self._beside.follow()  # this gradient's stream: every FSDP2 root reduces on its own
        if atom not in self._waiting[bucket]:
            self.forget()
        self._waiting[bucket].discard(atom)
        if not self._waiting[bucket]:
            rules, storage = now()
            if self._stepper.in_blocks(rules).intersection(self._buckets[bucket]):
                return
            atoms = self._stepper.sent_atoms(bucket)
            with (
                undisturbed(),
                torch.no_grad(),
                self._beside.running(lambda: [part.grad for atom in atoms for part in storage(atom)]),
            ):
                self._departed[bucket] = self._stepper.send_directions(bucket, _Run(rules, copied(storage)))

    def forget(self) -> None:
        """Drop all exchanges in flight."""
        self._beside.join()
        for arrival in self._departed.values():
            arrival.discard()
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]

    def touched(self, rules: Sequence[MatrixRule], storage: Storage, missing: set[int]) -> Tensor:
        """Advance the state of the buckets already sent, and compare them with what the step would send.

        Returns int32 flags of shape (buckets of the plan,), 1 where a bucket must be exchanged again.

        ``missing`` are atoms that no longer have a gradient on this rank.
        """
        self._beside.join()
        flags = torch.zeros(len(self._buckets), dtype=torch.int32, device=self._device)
        for bucket, arrival in self._departed.items():
            if missing.intersection(self._buckets[bucket]):
                flags[bucket] = 1
                continue
            sent = [data for _, data in arrival.sent()]
            now = self._stepper.advance_sent(bucket, rules, storage, arrival)
            if sent:
                flags[bucket] |= (_bits(torch.cat(now)) != _bits(torch.cat(sent))).any()
            self._advanced.add(bucket)
        return flags

    def settle(self, touched: Sequence[int]) -> Mapping[int, Arrival | None]:
        """The buckets already sent, as ``step`` takes them in ``departed``, given the flags of all ranks."""
        self._pause = max(0, self._pause - 1)
        wrong = [bucket for bucket in self._departed if touched[bucket]]
        for bucket in wrong:
            self._departed.pop(bucket).discard()
        settled: dict[int, Arrival | None] = dict.fromkeys(self._advanced)
        settled.update(self._departed)
        if wrong:
            self._pause, self._penalty = self._penalty, min(2 * self._penalty, LONGEST_PAUSE)
        elif self._departed:
            self._penalty = 1
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]
        return settled


def copied(storage: Storage) -> Storage:
    """Fragments with copies of their state, for an advance before the step."""

    def copies(index: int) -> list[Slices]:
        parts = storage(index)
        return [Slices(p.value, p.grad, {key: tensor.clone() for key, tensor in p.state.items()}) for p in parts]

    return copies


def _bits(tensor: Tensor) -> Tensor:
    """The bits as integers, so that NaN equals itself, and 0 does not equal -0."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


# One optimizer step of one plan's matrices on one rank.
#
# ::
#
#     bucket 0: advance the momentum, send the directions to the owners
#     for every bucket:     the same for the next bucket
#                           if it is the first, step the local matrices while both are on the wire
#                           receive this bucket, update its owned matrices, send the updates back
#                           receive the previous bucket's updates, decay, apply them
#
# At most two buckets are in flight. Matrices stored whole at their owner never enter a buffer: they are updated through
# views, one at a time or in batches, so a step's temporaries are one matrix (or one bucket).


class MatrixStepper:
    """Steps the matrices of one plan. The rule takes up to ``batch_numel`` elements at once, as in ``WholeMatrices``.

    With 0, it takes matrices one by one, which yields the bits of an unsharded optimizer, and is faster on a CPU.
    Batching saves kernel launches on an accelerator. Matrices are exchanged on ``device``, wherever they are stored;
    the rule runs on ``rule_device``, by default the same.

    ``owned`` are the atoms that this rank owns, ``owner_state`` is their owner state.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        collectives: Collectives,
        device: torch.device,
        *,
        batch_numel: int = 0,
        rule_device: torch.device | None = None,
    ) -> None:
        rank = collectives.rank
        self._collectives = collectives
        self._to_owners = ways_to_owners(plan, collectives, device)
        self._back = ways_back(plan, collectives, device)
        self._lag = 0 if plan.rows is None else 1  # updates are passed on during the next bucket's computation
        self._local = plan.local_atoms(rank)
        self._owned = [[atom for atom in bucket if plan.ownership.owners[atom] == rank] for bucket in plan.buckets]
        sent = [{segment.atom for segment in way.transfer.sends} for way in self._to_owners]
        self._copies = [  # by bucket, atoms of which this rank stores a piece that another sends
            [a for a in bucket if plan.keeps_state(a, rank) and a not in here]
            for bucket, here in zip(plan.buckets, sent)
        ]
        self._plan = plan
        self._first = [bucket[0] for bucket in plan.buckets]
        self._buckets, self._device = plan.buckets, device
        owners = plan.ownership.owners
        # One rank counts a piece that several ranks store: the one that would send it to the owner.
        self._counted = [{a for a in bucket if plan.layout.is_source(a, rank, owners[a])} for bucket in plan.buckets]
        self.owned = [atom for atom, owner in enumerate(plan.ownership.owners) if owner == rank]
        self._new_matrices = partial(WholeMatrices, rule_device=rule_device or device, batch_numel=batch_numel)
        self._whole = self._new_matrices(plan.atoms)
        self.owner_state = self._whole.owner_state

    @torch.no_grad()
    def step(
        self,
        rules: Sequence[MatrixRule],
        storage: Storage,
        *,
        active: Callable[[int], bool] | None = None,
        departed: Mapping[int, Arrival | None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Update the weights and the state in ``storage``. Called on all ranks of the group.

        ``rules`` has one rule per matrix; all of them exchange in one dtype. A matrix that is not ``active`` is not
        changed; ``active`` must return the same on all ranks, and by default all are. ``departed`` has the buckets
        whose state is already advanced, with their exchange if it was started. ``meanwhile`` runs while the first
        bucket is on the wire.
        """
        own = self.in_blocks(rules)
        of_all = _Run(rules, storage, active)
        whole = active if not own else lambda atom: atom not in own and (active is None or active(atom))
        run = _Run(rules, storage, whole, departed or {})
        count = len(self._to_owners)
        buckets = [number for number, atoms in enumerate(self._buckets) if not own.issuperset(atoms)]
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
            self._step_own(of_all.active_of([atom for atom in self._own if atom in own]), run)
        self._apply_all_but(0, returning, run)

    def in_blocks(self, rules: Sequence[MatrixRule]) -> frozenset[int]:
        """The exchanged atoms of which each rank updates its own block in this step."""
        if self._plan.block_period == 1:
            return frozenset()
        return frozenset(atom for atom in self._plan.in_blocks if rules[atom].blocks is not None)

    def _step_local(self, run: _Run) -> None:
        self._whole.step(run.active_of(self._local), run.rules, run.storage)

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
        return self._new_matrices([self._own.get(i, atom) for i, atom in enumerate(self._plan.atoms)])

    def _step_own(self, atoms: Sequence[int], run: _Run) -> None:
        """Update this rank's blocks by the rule of blocks, a block that is the whole matrix by that of matrices."""
        rules = list(run.rules)
        for atom in atoms:
            blocks = rules[atom].blocks
            if blocks is not None and self._own[atom] is not self._plan.atoms[atom]:
                rules[atom] = blocks
        self._own_matrices.step(atoms, rules, run.storage)

    def sent_atoms(self, bucket: int) -> list[int]:
        """The atoms of a bucket of which this rank sends a piece."""
        return [segment.atom for segment in self._to_owners[bucket].transfer.sends]

    def send_directions(self, bucket: int, run: _Run, *, advance: bool = True) -> Arrival:
        """Start the all-to-all that sends a bucket's directions to their owners."""
        return self._send(
            bucket, run, lambda into: self._whole.pack_directions(into, run.rules, run.storage, advance=advance)
        )

    def advance_sent(
        self, bucket: int, rules: Sequence[MatrixRule], storage: Storage, arrival: Arrival
    ) -> list[Tensor]:
        """Advance the state of a bucket that was sent before; returns the current directions."""
        now = torch.empty_like(arrival.data)
        with filled_on(_device_of(self.sent_atoms(bucket), storage) or now.device, now) as filled:
            into = {segment.atom: data for segment, data in arrival.sent(filled)}
            self._whole.pack_directions(into, rules, storage, advance=True)
        for atom in self._copies[bucket]:
            advance(rules[atom], storage(atom))
        return [data for _, data in arrival.sent(now)]

    def _send(self, bucket: int, run: _Run, pack: Callable[[dict[int, Tensor]], None]) -> Arrival:
        """Start an all-to-all to the owners; ``pack`` fills the given flat tensors, by atom."""

        def packed(segments: Segments) -> None:
            pack({segment.atom: target for segment, target in segments})

        dtype = run.rules[self._first[bucket]].exchange_dtype
        stored = _device_of(run.active_of(self.sent_atoms(bucket)), run.storage)
        return self._to_owners[bucket].start(dtype, run.has, packed, stored)

    def _depart(self, bucket: int, run: _Run) -> list[Arrival]:
        """Start sending a bucket's directions to the owners, and its weights if its rule is a ``WeightRule``."""
        if bucket >= len(self._to_owners):
            return []
        advanced = bucket in run.departed
        arrivals = [run.departed.get(bucket) or self.send_directions(bucket, run, advance=not advanced)]
        for atom in [] if advanced else self._copies[bucket]:
            run.advance(atom)
        if isinstance(run.rules[self._first[bucket]], WeightRule):
            arrivals.append(self._send(bucket, run, lambda into: self._whole.pack_values(into, run.storage)))
        return arrivals

    def _update_owned(self, bucket: int, arriving: Sequence[Arrival], run: _Run) -> Arrival:
        batches = list(self._whole.batches(run.active_of(self._owned[bucket]), run.rules))
        arrived = [self._whole_of(arrival, batches) for arrival in arriving]
        updates = self._updates(batches, arrived, run)

        def packed(segments: Segments) -> None:
            cuts, targets = _cut_all(updates, segments)
            copy_alike(targets, cuts)

        dtype = run.rules[self._first[bucket]].exchange_dtype
        computed = next((update.device for update in updates.values()), None)
        return self._back[bucket].start(dtype, lambda segment: segment.atom in updates, packed, computed)

    def _updates(self, batches: Sequence[list[int]], arrived: Sequence[list[Tensor]], run: _Run) -> dict[int, Tensor]:
        """The updates of the matrices of a bucket that this rank owns, by atom."""
        directions, *weights = arrived
        updates: dict[int, Tensor] = {}
        for number, batch in enumerate(batches):
            rule, stack = run.rules[batch[0]], directions.pop(0)
            if isinstance(rule, WeightRule):
                updates[batch[0]] = self._whole.step_weight(rule, batch[0], weights[0][number], stack)
            else:
                updates.update(zip(batch, self._whole.transform(rule, batch, stack)))
        return updates

    def _whole_of(self, arrival: Arrival, batches: Sequence[list[int]]) -> list[Tensor]:
        """Wait; returns the matrices that arrived, batch by batch."""
        stacks = [self._whole.empty(batch, arrival.received) for batch in batches]
        matrices: dict[int, Tensor] = {}
        for batch, stack in zip(batches, stacks):
            matrices.update(zip(batch, stack.view(-1, *stack.shape[-2:])))

        def deliver(segments: Segments) -> None:
            copy_alike(*_cut_all(matrices, segments))

        arrival.wait(deliver)
        return stacks

    def _apply_all_but(self, last: int, returning: list[tuple[int, Arrival]], run: _Run) -> None:
        """Pass the last bucket's updates on to copies, if there are any; apply all but those of the ``last`` buckets.
        Drops references to applied updates."""
        if returning:
            bucket, arrival = returning.pop()
            returning.append((bucket, arrival.passed_on()))
        while len(returning) > last:
            self._apply_returned(*returning.pop(0), run)

    def _apply_returned(self, bucket: int, returning: Arrival, run: _Run) -> None:
        def apply(segments: Segments) -> None:
            active = run.active
            updates = {each.atom: update for each, update in segments if active is None or active(each.atom)}
            self._whole.apply(updates, run.rules, run.storage, self._sums(bucket, updates, run))

        atoms = [segment.atom for segment in returning.way.transfer.receives]
        returning.wait(apply, _device_of(run.active_of(atoms), run.storage))

    def _sums(self, bucket: int, updates: Mapping[int, Tensor], run: _Run) -> Mapping[int, Tensor] | None:
        """``sums_of`` the whole matrices of a bucket, added over the ranks, if its rules use norms: 24 bytes each."""
        atoms = [atom for atom in run.active_of(self._buckets[bucket]) if run.rules[atom].by_norms]
        if not atoms:
            return None
        counted = {atom: updates[atom] for atom in atoms if atom in updates and atom in self._counted[bucket]}
        found = self._whole.sums(counted, run.storage)
        nothing = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums = torch.stack([found[atom].to(self._device) if atom in found else nothing for atom in atoms])
        sending(all_reduce_nbytes(sums.nbytes, self._collectives.world_size))
        self._collectives.all_reduce(sums)
        return dict(zip(atoms, sums))


@dataclass(frozen=True, slots=True)
class _Run:
    """The arguments of one step."""

    rules: Sequence[MatrixRule]
    storage: Storage
    active: Callable[[int], bool] | None = None
    departed: Mapping[int, Arrival | None] = field(default_factory=dict)

    @property
    def has(self) -> Callable[[Segment], bool] | None:
        """Whether a segment's matrix is active; None if all are."""
        active = self.active
        return None if active is None else lambda segment: active(segment.atom)

    def active_of(self, atoms: Sequence[int]) -> Sequence[int]:
        return atoms if self.active is None else [atom for atom in atoms if self.active(atom)]

    def advance(self, atom: int) -> None:
        """Advance the state of this rank's copy of an atom that another rank sends."""
        if self.active is None or self.active(atom):
            advance(self.rules[atom], self.storage(atom))


def _device_of(atoms: Sequence[int], storage: Storage) -> torch.device | None:
    """Where this rank stores its fragments of these matrices; None if there are no matrices."""
    return next((part.value.device for atom in atoms for part in storage(atom)), None)


def _cut_all(matrices: Mapping[int, Tensor], segments: Segments) -> tuple[list[Tensor], list[Tensor]]:
    """The elements of the segments of these ``matrices``, and their parts of the buffer, in their shapes.

    A matrix that its segments fill in order, such as rows over ranks, is cut by one call of the host.
    """
    of_atom: dict[int, list[tuple[Segment, Tensor]]] = {}
    for each in segments:
        if each[0].atom in matrices:
            of_atom.setdefault(each[0].atom, []).append(each)
    cuts: list[Tensor] = []
    parts: list[Tensor] = []
    for atom, here in of_atom.items():
        matrix, end = matrices[atom], 0
        for segment, _ in here:
            end = segment.stop if segment.start == end and segment.runs == 1 else -1
        if end == matrix.numel() and matrix.is_contiguous():
            cuts += matrix.view(-1).split_with_sizes([segment.numel for segment, _ in here])
            parts += [part for _, part in here]
        else:
            shaped = [_cut(matrix, segment) for segment, _ in here]
            cuts += shaped
            parts += [part.view_as(cut) for (_, part), cut in zip(here, shaped)]
    return cuts, parts


def _cut(matrix: Tensor, segment: Segment) -> Tensor:
    """The segment's elements; whole rows or a rectangle as a view, whatever the matrix's strides."""
    columns, length = matrix.shape[1], segment.stop - segment.start
    row, column = divmod(segment.start, columns)
    if segment.runs > 1:
        return matrix[row : row + segment.runs, column : column + length]
    if column == 0 and length % columns == 0:
        return matrix[row : row + length // columns]
    return matrix.reshape(-1)[segment.start : segment.stop]
