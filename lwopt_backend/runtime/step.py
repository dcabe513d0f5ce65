"""The step of a bucket as a task, and the window of buckets in flight. Every engine's step follows from these.

A bucket's step is written from top to bottom, and yields where ranks meet (``|``)::

    FSDP2, ZeRO 3, what ZeRO 1 and 2 cut   direction | wire | transform at the owner | wire | apply
    copies of these on other ranks (HSDP)  ... | wire in the row | wire in the column | apply
    ZeRO 0                                 direction, transform at the owner | wire | apply
    ZeRO 1 and 2, whole at their owner     direction, transform, apply
    plain PyTorch                          | wire: reduce | direction, transform, apply | wire: gather
    element-wise                           plain PyTorch: | reduce | optimizer | gather;  others: optimizer

One fact explains them. Where a host stores gradients and state (FSDP2, ZeRO), momentum is made before the wire, which
takes directions to the owners. In plain PyTorch it is made after the wire, which takes gradients there: the owner alone
has the state. At ZeRO 0 every rank has all gradients: the owner makes momentum, and the wire to it takes nothing.

Where a task stands is a bucket's state; nothing else notes it. ``next`` goes on to where ranks meet next. All ranks do
that in one order, because collectives begin there. ``close`` ends a task early: its ``finally`` waits for its
collectives, since a transport writes into its buffers, and frees these. Nothing else waits for a bucket that is not
stepped to its end, whether its step raised, its gradients were dropped, or its optimizer is collected. That may take
until the group's timeout, if another rank never begins the collective. When Python exits, nothing waits.

On FSDP2 and under ZeRO, the step advances the tasks, two buckets at a time (``Window``): a task lives within one call.
In plain PyTorch a task outlives the call that begins it (``Underway``). The hook of a gradient begins reductions; a
later bucket's hook, the end of the pass or the step goes on with them. The step begins the return of new values; the
next forward pass ends it, or whoever reads parameters before. A reentrant checkpoint runs a pass within a hook of the
outer one, on the same thread: its gradients arrive before the outer pass goes on.

One thread at a time goes on with the tasks of an optimizer. Nothing locks them; ``Underway`` raises where it sees two
threads in a task. Hooks run on autograd's thread of a GPU, on a CPU on that of the pass, while ``backward`` waits for
them. A thread that copies a model, or takes its ``state_dict()``, waits for values on their way, as a forward pass
does: call ``synchronize()`` before it begins. A finalizer closes tasks on any thread, where the last reference to an
optimizer goes: nobody else has them then.

No context manager spans a ``yield``: ``no_grad``, a stream or a profiler's label would stay on for whoever goes on with
the task. Who does, sets what it needs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan
from lwopt_backend.plan.exchange import own_block
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime.buffers import BucketBuffers, PartsPending
from lwopt_backend.runtime.capture import Capture
from lwopt_backend.runtime.collectives import (
    Collectives,
    all_reduce_nbytes,
    changing,
    of_rule,
    phase,
    sampled,
    sending,
)
from lwopt_backend.runtime.exchange import Arrival, Packing, Parts, ways_back, ways_to_owners
from lwopt_backend.runtime.pieces import Pieces, PiecesOf, joined
from lwopt_backend.runtime.places import NONE, Batch, Batches, BucketPlaces, Places, Rules
from lwopt_backend.runtime.quantized import QuantizedState
from lwopt_backend.runtime.state import OwnerState, step_whole
from lwopt_backend.runtime.tensors import (
    apply_by_norms,
    cast_all,
    copy_alike,
    copy_all,
    in_tiles,
    moved,
    moved_all,
    moves_like,
    parts_like,
    side_by_side,
    sums_of_matrices,
    take_filled,
    to_fill,
    views_like,
)

Task = Generator[str, None, None]  # of one bucket; yields the name of what is on the wire


@dataclass
class Underway:
    """A task that ``next`` begins, and goes on with. ``at`` is what it has on the wire, nothing once it has ended. One
    that has ``failed``, and why, refuses to go on: what it had on the wire is lost."""

    task: Task
    at: str = ""
    failed: str = ""

    def __iter__(self) -> Underway:
        return self

    def __next__(self) -> str:
        if self.failed:
            raise RuntimeError(
                f"expected the {self.at} of other ranks, but receiving them ended in an error on this rank; end all "
                f"ranks, and resume from a checkpoint. The error was: {self.failed}"
            )
        if inspect.getgeneratorstate(self.task) == inspect.GEN_RUNNING:
            raise RuntimeError(
                f"expected one thread to wait for the {self.at}, found two; call optimizer.synchronize() before "
                "another thread reads or copies the model"
            )
        try:
            self.at = next(self.task)
        except StopIteration:
            self.at = ""
            raise
        except BaseException as error:
            self.failed = one_line(error)
            raise
        return self.at

    def close(self) -> None:
        """End it early."""
        self.at = ""
        self.task.close()

    discard = close


def one_line(error: BaseException) -> str:
    """An error in one line, without what it keeps alive."""
    return f"{type(error).__name__}: {error}"


class Window:
    """The buckets of a step that are on their way, at most two of them on their way to owners. Left by an error, it
    closes their tasks."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._coming = iter(tasks)
        self._latest: Task | None = None
        self._earlier: list[Task] = []  # the latest first

    def advance(self) -> bool:
        """Every bucket that left before the latest one goes on to where ranks meet next; then another one leaves.
        Returns whether any is on its way."""
        for task in list(self._earlier):
            if next(task, ENDED) is ENDED:
                self._earlier.remove(task)
        if self._latest is not None:
            self._earlier.insert(0, self._latest)
        self._latest = next(self._coming, None)
        if self._latest is not None:
            next(self._latest)
        return bool(self._earlier) or self._latest is not None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = (self._latest, *self._earlier)
        told = first_error(task.close for task in tasks if task is not None)
        if told is not None and not isinstance(told, RuntimeError):  # of ranks that are gone, which an error has told
            raise told


ENDED = object()


def first_error(calls: Iterable[Callable[[], object]]) -> BaseException | None:
    """Make all of these calls, whichever of them raise; returns the first error."""
    first: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            first = error if first is None else first
    return first


def wait_for(travelling: Iterable[Arrival | PartsPending | Underway | None]) -> None:
    """At the end of a task, in its ``finally``: wait for all that it has in flight, whichever wait raises. An error
    that has ended the task already is the one to tell."""
    # In a ``finally``, this is the exception on its way through; ``close`` throws GeneratorExit into the task. If the
    # task has ended by itself, it is one that a caller is handling, if any.
    ended = sys.exc_info()[0] not in (None, GeneratorExit)
    if sys.is_finalizing():
        return
    error = first_error(each.discard for each in travelling if each is not None)
    if error is not None and not (ended and isinstance(error, RuntimeError)):
        raise error


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step is given: rules by kind, and this rank's pieces by atom."""

    rules: Rules
    pieces: PiecesOf
    skipped: frozenset[int] = NONE  # atoms that do not change


# Plain PyTorch: the owners' step lies between the two.

GRADIENTS = "gradients"


def reduced(bucket: BucketBuffers, earlier: Underway | None) -> Task:
    """The gradients of one backward pass: | wire: reduce | sum of all passes. If ``replicas`` own the same parts,
    a wire across instances precedes the sum, after that of an ``earlier`` pass."""
    travelling: PartsPending | None = bucket.launch()
    try:
        yield GRADIENTS
        assert travelling is not None
        travelling = bucket.arrive(travelling, earlier or ())
        if travelling is not None:
            yield "sums across instances"
            bucket.add_crossed(travelling)
            travelling = None
    finally:
        wait_for([travelling, earlier])


def returned(bucket: BucketBuffers) -> Task:
    """New values: | wire: gather |."""
    travelling = bucket.send_values()
    try:
        yield "values"
        bucket.receive_values(travelling)
    finally:
        wait_for([travelling])


class Matrices:
    """What rules do with ``atoms``, up to ``batch_numel`` elements at once: with whole matrices of equal shape, and
    element by element with this rank's pieces of any.

    ``kinds`` says, by atom, which of the rules of a step is its rule; weights of one kind have one dtype, and so have
    their gradients and states. With 0 elements, matrices go one by one, which yields the bits of an unsharded
    optimizer, and is faster on a CPU; batches save kernel launches on an accelerator. Rules run on whole matrices on
    ``rule_device``, wherever they are stored; ``owner_state`` is also there. State in 8 bits is in ``quantized``, where
    the elements are. With ``capture``, their work on a batch is captured and replayed.
    """

    def __init__(
        self,
        atoms: Sequence[Atom],
        kinds: Sequence[int],
        rule_device: torch.device,
        *,
        quantized: QuantizedState,
        batch_numel: int = 0,
        capture: bool = False,
    ) -> None:
        self.atoms, self._shapes = atoms, [atom.rule_shape for atom in atoms]
        self.batches = Batches(atoms, kinds, batch_numel)
        self.owner_state = OwnerState(atoms, rule_device)
        self.quantized = quantized
        self._rule_device = rule_device
        self._batched = batch_numel > 0
        self._capture = Capture(2 * len(atoms)) if capture else None

    @torch.no_grad()
    def step(self, atoms: Iterable[int], rules: Rules, pieces: PiecesOf) -> None:
        """Direction, transform, apply, of ``atoms`` that this rank stores whole."""
        for batch in self.batches.of(tuple(atoms), rules):
            rule, of_batch = rules[batch.kind], [pieces[atom] for atom in batch.atoms]
            with changing(_name(rule), partial(_values, of_batch)):
                if isinstance(rule, WeightRule):
                    grads, values, _ = joined(of_batch)
                    value, grad = (self._stack(batch.atoms, some) for some in (values, grads))
                    update = self.step_weight(rule, batch.atoms[0], value, grad)
                else:
                    stack = self._stack(batch.atoms, self._directions(rule, batch.atoms, of_batch))
                    update = self.transform(rule, batch.atoms, stack)
                    del stack
                self._apply(rule, batch, of_batch, update.reshape(len(batch.atoms), -1).unbind())
                del update  # the next batch needs the memory

    def _directions(self, rule: MatrixRule, atoms: Sequence[int], of_batch: Sequence[Pieces]) -> Sequence[Tensor]:
        """Advance the state of a batch; returns the direction of each piece."""
        with self.quantized.opened(rule.quantized, atoms, of_batch) as (grads, values, states):
            return rule.directions([*grads], [*values], states)

    def _stack(self, batch: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
        """The matrices of a batch from all their pieces; a single contiguous piece is not copied."""
        if len(pieces) == 1:
            return pieces[0].reshape(self.atoms[batch[0]].shape).contiguous()
        widest = max(pieces, key=lambda piece: piece.itemsize)
        stack = self.empty(batch, widest, self._rule_device)
        filled = to_fill(stack, widest.device)
        copy_all(views_like(filled.view(-1), pieces), pieces)
        take_filled(stack, filled)
        return stack

    def empty(self, batch: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
        """A tensor for the matrices of a batch: one as a matrix, several as a stack."""
        shape = self.atoms[batch[0]].shape
        return like.new_empty(shape if len(batch) == 1 else (len(batch), *shape), device=device)

    def transform(self, rule: MatrixRule, atoms: Sequence[int], stack: Tensor) -> Tensor:
        """The updates of the matrices of a batch, in the shape of the stored matrices."""
        stack = moved(stack, self._rule_device)
        transposed, tiles = self.atoms[atoms[0]].transposed, self.atoms[atoms[0]].tiles
        with phase(of_rule(_name(rule))):
            stack = side_by_side(stack, tiles)
            stack = stack.mT.contiguous() if transposed else stack
            state: dict[str, Any] = {}
            work = rule.transform
            if isinstance(rule, OwnerStateRule):
                state = self.owner_state.of(atoms[0], rule)
                work = partial(_with_state, rule, state)
            update = work(stack) if self._capture is None else self._capture.run(rule, tuple(atoms), state, work, stack)
            update = sampled(_name(rule), update)
            update = in_tiles(update.mT if transposed else update, tiles)
            if self._batched:  # then all are copied in one operation
                update = update.contiguous()
        return update

    def step_weight(self, rule: WeightRule, atom: int, value: Tensor, grad: Tensor) -> Tensor:
        """The new weight of a matrix, in the shape of the stored matrix; may change ``value`` in place."""
        transposed, tiles = self.atoms[atom].transposed, self.atoms[atom].tiles
        state = self.owner_state.of(atom, rule)
        value, grad = (side_by_side(moved(t, self._rule_device).float(), tiles) for t in (value, grad))
        if transposed:
            value, grad = value.T.contiguous(), grad.T.contiguous()
        with phase(of_rule(_name(rule))):
            step_whole(rule, self.atoms[atom], value, grad, state)
        return in_tiles(value.T if transposed else value, tiles)

    # Of pieces in a buffer, given as its flat ``parts``, in the order of its segments

    def pack_directions(self, parts: Parts, batches: Sequence[Batch], given: StepInput) -> None:
        """Advance the state, and copy the direction of this rank's fragment of each atom into its part."""
        for batch in batches:
            of_batch = [given.pieces[atom] for atom in batch.atoms]
            directions = self._directions(given.rules[batch.kind], batch.atoms, of_batch)
            copy_alike(parts_like(parts, batch.places, of_batch), directions)

    def pack_values(self, parts: Parts, batches: Sequence[Batch], given: StepInput) -> None:
        """Copy this rank's fragment of the weight of each atom into its part."""
        for batch in batches:
            of_batch = [given.pieces[atom] for atom in batch.atoms]
            copy_all(parts_like(parts, batch.places, of_batch), joined(of_batch).values)

    def accumulate(self, batches: Sequence[Batch], given: StepInput) -> None:
        """Accumulate the gradients into the element-wise state, where another rank sends the direction."""
        for batch in batches:
            rule, of_batch = given.rules[batch.kind], [given.pieces[atom] for atom in batch.atoms]
            with self.quantized.opened(rule.quantized, batch.atoms, of_batch) as (grads, values, states):
                rule.accumulate_all(grads, values, states)

    def sums(self, parts: Parts, places: Places, given: StepInput) -> dict[int, Tensor]:
        """``sums_of`` this rank's fragment of each counted atom whose rule uses norms, with its part of the updates."""
        found: dict[int, Tensor] = {}
        for batch in places.returned:
            part_of = dict(zip(batch.atoms, batch.places))
            atoms = [atom for atom in batch.atoms if given.rules[batch.kind].by_norms and atom in places.counted]
            if atoms:
                of_batch = [given.pieces[atom] for atom in atoms]
                grads, values, _ = joined(of_batch)
                moves = moves_like(of_batch, [parts[part_of[atom]] for atom in atoms])
                sums = sums_of_matrices(cast_all(values, grads[0].dtype), moves, of_batch)
                found.update(zip(atoms, sums.unbind()))
        return found

    def apply(
        self, parts: Parts, batches: Sequence[Batch], given: StepInput, sums: Mapping[int, Tensor] | None = None
    ) -> None:
        """Decay this rank's fragment of each atom, and apply its part of the updates. ``sums`` are those of the whole
        matrices, for rules that use norms."""
        for batch in batches:
            rule, of_batch = given.rules[batch.kind], [given.pieces[atom] for atom in batch.atoms]
            with changing(_name(rule), partial(_values, of_batch)):
                self._apply(rule, batch, of_batch, [parts[place] for place in batch.places], sums)

    def _apply(
        self,
        rule: MatrixRule,
        batch: Batch,
        of_batch: Sequence[Pieces],
        updates: Sequence[Tensor],
        sums: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Apply the flat updates of a batch, the new weights if it is a ``WeightRule``, to pieces of the weights."""
        atoms, (grads, values, _) = batch.atoms, joined(of_batch)
        dtype = grads[0].dtype
        moves = moved_all(moves_like(of_batch, updates), values[0].device)
        if isinstance(rule, WeightRule):
            copy_all(values, moves)
            return
        # If the state is wider than the weight, the step is computed in the state's dtype and rounded once.
        wide = cast_all(values, dtype)
        if rule.by_norms:
            of_all = (
                sums_of_matrices(wide, moves, of_batch) if sums is None else torch.stack([sums[atom] for atom in atoms])
            )
            factors = rule.factors(of_all, [self._shapes[atom] for atom in atoms])
            apply_by_norms(rule, wide, moves, of_batch, factors)
        else:
            shapes = [self._shapes[atom] for atom, pieces in zip(atoms, of_batch) for _ in pieces.values]
            numels = batch.numels if all([pieces.is_flat for pieces in of_batch]) else None
            rule.apply_all(wide, cast_all(moves, dtype, numels) if len(atoms) > 1 else moves, shapes)
        if wide is not values:
            copy_all(values, wide)


def _with_state(rule: OwnerStateRule, state: dict[str, Any], matrix: Tensor) -> Tensor:
    return rule.transform_with(matrix, state)


def _name(rule: MatrixRule) -> str:
    return rule.rule_name or type(rule).__name__


def _values(of_batch: Sequence[Pieces]) -> list[Tensor]:
    return [*chain.from_iterable(pieces.values for pieces in of_batch)]


class MatrixStepper:
    """Steps the matrices of one plan on one rank, bucket by bucket. ``batch_numel`` and ``capture`` are as in
    ``Matrices``.

    Matrices are exchanged on ``device``, wherever they are stored; the rule runs on ``rule_device``, by default the
    same. ``owned`` are the atoms that this rank owns, ``owner_state`` is their owner state. A step's rules are by kind,
    and ``kinds`` says which is an atom's; all rules exchange in one dtype.
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
        self._local = plan.local_atoms(rank)
        self._new_matrices = partial(
            Matrices,
            rule_device=rule_device or device,
            quantized=QuantizedState(plan.atoms, lambda atom: plan.layout.fragment(atom, rank)),
            batch_numel=batch_numel,
            capture=capture,
        )
        self.matrices = self._new_matrices(plan.atoms, kinds)
        self._buckets: dict[int, BucketPlaces] = {}
        self.owned = [atom for atom, owner in enumerate(plan.ownership.owners) if owner == rank]
        self.owner_state = self.matrices.owner_state

    @torch.no_grad()
    def step(self, given: StepInput) -> None:
        """Update weights and state in what is ``given``. Called on all ranks, which skip the same atoms."""
        with self.window(given) as window:
            window.advance()
            window.advance()
            self.step_in_place(given)  # while two buckets travel
            while window.advance():
                pass

    def window(self, given: StepInput) -> Window:
        """The buckets of a step, in the plan's order."""
        own = self.in_blocks(given.rules)
        given = replace(given, skipped=given.skipped | own)
        travel = [number for number, atoms in enumerate(self._plan.buckets) if not own.issuperset(atoms)]
        return Window(self._exchanged(number, given) for number in travel)

    def step_in_place(self, given: StepInput) -> None:
        """The step of matrices that do not travel, through views: those that this rank stores whole and owns, and its
        own blocks of others."""
        self._step_local([atom for atom in self._local if atom not in given.skipped], given)
        if own := self.in_blocks(given.rules) - given.skipped:
            self._step_own([atom for atom in self._own if atom in own], given)

    def _exchanged(self, bucket: int, given: StepInput) -> Task:
        """The step of a bucket whose matrices travel: direction | wire | transform at the owner | wire | apply."""
        travelling: list[Arrival] = []
        try:
            self._depart(bucket, given, travelling)
            yield "directions"  # none, if the owners have all of them (``MatrixPlan.stays``), as at ZeRO 0
            travelling = [self._update_owned(bucket, travelling, given)]
            yield "updates"
            if self._plan.rows is not None:  # ranks of other rows store copies
                travelling = [travelling[0].passed_on()]
                yield "updates in the column"
            self._apply_returned(bucket, travelling[0], given)
        finally:
            wait_for(travelling)

    # Before the wire, where elements are stored

    def _depart(self, bucket: int, given: StepInput, travelling: list[Arrival]) -> None:
        """Start sending a bucket's directions to the owners, and its weights if its rule is a ``WeightRule``. What has
        left is ``travelling``, also if the rule raises after that."""
        way, places = self._to_owners[bucket], self._places(bucket, given.skipped)
        with phase(way.label):
            packing = self._packing(bucket, given)
            self.matrices.pack_directions(packing.parts, places.sent, given)
            travelling.append(way.send(packing))
        self.matrices.accumulate(places.copies, given)
        if isinstance(self._first_rule(bucket, given), WeightRule):
            with phase(way.label):
                packing = self._packing(bucket, given)
                self.matrices.pack_values(packing.parts, places.sent, given)
                travelling.append(way.send(packing))

    def _packing(self, bucket: int, given: StepInput) -> Packing:
        """The buffers of what is sent to the owners."""
        places, dtype = self._places(bucket, given.skipped), self._first_rule(bucket, given).exchange_dtype
        return self._to_owners[bucket].packing(dtype, _device_of(places.sent, given.pieces), zeros=places.skips_sent)

    # At the owner

    def _update_owned(self, bucket: int, arriving: list[Arrival], given: StepInput) -> Arrival:
        """Wait, update the matrices of a bucket that this rank owns, and start sending their updates back. Empties
        ``arriving``, so that the buffers of what has arrived are free while a rule computes."""
        places, way = self._places(bucket, given.skipped), self._back[bucket]
        batches = self.matrices.batches.of(places.owned, given.rules)
        arrived = []
        while arriving:
            arrived.append(self._whole_of(arriving[0], batches, places))
            del arriving[0]
        directions, *weights = arrived
        updates: list[Tensor] = []
        for number, batch in enumerate(batches):
            rule, stack = given.rules[batch.kind], directions.pop(0)
            if isinstance(rule, WeightRule):
                updates.append(self.matrices.step_weight(rule, batch.atoms[0], weights[0][number], stack))
            else:
                updates.append(self.matrices.transform(rule, batch.atoms, stack))
        dtype, computed = self._first_rule(bucket, given).exchange_dtype, next((u.device for u in updates), None)
        with phase(way.label):
            packing = way.packing(dtype, computed, zeros=places.skips_owned)
            of_buffer, cuts = places.sent_back.pairs(batches, updates, packing.parts)
            copy_alike(of_buffer, cuts)
            return way.send(packing)

    def _whole_of(self, arrival: Arrival, batches: Sequence[Batch], places: Places) -> list[Tensor]:
        """Wait; returns the matrices that arrived, batch by batch."""
        stacks = [self.matrices.empty(batch.atoms, arrival.received) for batch in batches]
        with phase(arrival.way.label):
            of_buffer, cuts = places.arrived.pairs(batches, stacks, arrival.parts())
            copy_alike(cuts, of_buffer)
        return stacks

    # After the wire, where elements are stored

    def _apply_returned(self, bucket: int, returning: Arrival, given: StepInput) -> None:
        """Wait, decay the weights, and apply the updates."""
        places = self._places(bucket, given.skipped)
        with phase(returning.way.label):
            parts = returning.parts(_device_of(places.returned, given.pieces))
            self.matrices.apply(parts, places.returned, given, self._sums(places, parts, given))

    def _sums(self, places: Places, parts: Parts, given: StepInput) -> Mapping[int, Tensor] | None:
        """``sums_of`` the whole matrices of a bucket, added over the ranks, if its rules use norms: 24 bytes each."""
        by_norms = {kind for kind, rule in given.rules.items() if rule.by_norms}
        atoms = [atom for atom in places.active if self._kinds[atom] in by_norms] if by_norms else []
        if not atoms:
            return None
        found = self.matrices.sums(parts, places, given)
        nothing = torch.zeros(3, dtype=torch.float64, device=self._device)
        sums = torch.stack([found[atom].to(self._device) if atom in found else nothing for atom in atoms])
        sending(all_reduce_nbytes(sums.nbytes, self._collectives.world_size))
        self._collectives.all_reduce(sums)
        return dict(zip(atoms, sums))

    # Matrices that do not travel

    def _step_local(self, atoms: Sequence[int], given: StepInput) -> None:
        self.matrices.step(atoms, given.rules, given.pieces)

    def in_blocks(self, rules: Rules) -> frozenset[int]:
        """The exchanged atoms of which each rank updates its own block in this step."""
        if self._plan.block_period == 1:
            return NONE
        return frozenset(atom for atom in self._plan.in_blocks if rules[self._kinds[atom]].blocks is not None)

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
    def _own_matrices(self) -> Matrices:
        """This rank's blocks. A block that is the whole matrix has its kind, the others' kinds are below zero."""
        atoms = [self._own.get(number, atom) for number, atom in enumerate(self._plan.atoms)]
        pairs = zip(self._kinds, zip(atoms, self._plan.atoms))
        return self._new_matrices(atoms, [kind if own is whole else ~kind for kind, (own, whole) in pairs])

    def _step_own(self, atoms: Sequence[int], given: StepInput) -> None:
        """Update this rank's blocks by the rule of blocks, a block that is the whole matrix by that of matrices."""
        of_blocks = {~kind: rule.blocks for kind, rule in given.rules.items() if rule.blocks is not None}
        self._own_matrices.step(atoms, {**given.rules, **of_blocks}, given.pieces)

    # The plan's buckets here

    def _places(self, bucket: int, skipped: frozenset[int]) -> Places:
        if bucket not in self._buckets:
            out, back = self._to_owners[bucket], self._back[bucket]
            rank, batches = self._collectives.rank, self.matrices.batches
            self._buckets[bucket] = BucketPlaces(self._plan, rank, bucket, out.transfer, back, batches)
        return self._buckets[bucket].without(skipped)

    def _first_rule(self, bucket: int, given: StepInput) -> MatrixRule:
        """A rule of the bucket, all of whose rules have equal exchanges."""
        return given.rules[self._kinds[self._plan.buckets[bucket][0]]]


def _device_of(batches: Sequence[Batch], pieces: PiecesOf) -> torch.device | None:
    """Where this rank stores its pieces of these matrices; None if there are none."""
    return next((value.device for batch in batches for value in pieces[batch.atoms[0]].values), None)
