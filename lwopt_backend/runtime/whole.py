"""Rules that run on whole matrices, and their element-wise work on pieces."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lwopt_backend.plan import Atom
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.rules.protocol import sums_of
from lwopt_backend.runtime.capture import Capture
from lwopt_backend.runtime.collectives import changing, of_rule, phase, sampled
from lwopt_backend.runtime.pieces import Pieces, Storage, joined
from lwopt_backend.runtime.state import OwnerState, step_whole


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which owners step parameters of ``dtype``: fp32 (masters) if it is narrower, otherwise ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else dtype


# Steps of matrices that this rank stores whole, and a rule's element-wise work on pieces of the others.

Rules = Mapping[int, MatrixRule]  # by kind
KEPT = 4  # steps with other matrices, whose batches are known


class Batch(NamedTuple):
    """Matrices of one ``kind`` that go through its rule at once, with their elements; of pieces, the elements of each
    and their ``places`` in a buffer."""

    kind: int
    atoms: list[int]
    numels: list[int]
    places: list[int]


class WholeMatrices:
    """Runs rules on ``atoms``, up to ``batch_numel`` elements at once: on whole matrices of equal shape, and element by
    element on this rank's pieces of any.

    ``kinds`` says, by atom, which of the rules of a step is its rule; weights of one kind have one dtype, and so have
    their gradients and states. Rules run on whole matrices on ``rule_device``, wherever they are stored;
    ``owner_state`` is also there. With ``capture``, their work on a batch is captured and replayed.
    """

    def __init__(
        self,
        atoms: Sequence[Atom],
        kinds: Sequence[int],
        rule_device: torch.device,
        *,
        batch_numel: int = 0,
        capture: bool = False,
    ) -> None:
        self._atoms, self.kinds = atoms, kinds
        self._rule_device = rule_device
        self._batch_numel = batch_numel
        self._known: dict[tuple[tuple[int, ...], frozenset[int]], Sequence[Batch]] = {}
        self._room = 0  # for so many matrices more in what is known
        self.owner_state = OwnerState(atoms, rule_device)
        self._capture = Capture(2 * len(atoms)) if capture else None

    @torch.no_grad()
    def step(self, atoms: Iterable[int], rules: Rules, storage: Storage) -> None:
        """Update the weights and the state of ``atoms``, which ``storage`` has whole."""
        for batch in self.batches(tuple(atoms), rules):
            rule, of_batch = rules[batch.kind], [storage(atom) for atom in batch.atoms]
            with changing(_name(rule), partial(_values, of_batch)):
                self._step(rule, batch, of_batch)

    def _step(self, rule: MatrixRule, batch: Batch, of_batch: Sequence[Pieces]) -> None:
        atoms, every = batch.atoms, joined(of_batch)
        if isinstance(rule, WeightRule):
            value, grad = (self._stack(atoms, pieces) for pieces in (every.values, every.grads))
            stack = self.step_weight(rule, atoms[0], value, grad)
        else:
            directions = rule.directions([*every.grads], [*every.values], every.states, advance=True)
            stack = self.transform(rule, atoms, self._stack(atoms, directions))
        self._apply(rule, batch, of_batch, stack.reshape(len(batch.atoms), -1).unbind())

    def _stack(self, batch: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
        """The matrices of a batch from all their pieces; a single contiguous piece is not copied."""
        if len(pieces) == 1:
            return pieces[0].reshape(self._atoms[batch[0]].shape).contiguous()
        widest = max(pieces, key=lambda piece: piece.itemsize)
        stack = self.empty(batch, widest, self._rule_device)
        with filled_on(widest.device, stack) as filled:
            copy_all(_like(filled.view(-1), pieces), pieces)
        return stack

    def empty(self, batch: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
        """A tensor for the matrices of a batch: one as a matrix, several as a stack."""
        shape = self._atoms[batch[0]].shape
        return like.new_empty(shape if len(batch) == 1 else (len(batch), *shape), device=device)

    def transform(self, rule: MatrixRule, atoms: Sequence[int], stack: Tensor) -> Tensor:
        """The updates of the matrices of a batch, in the shape of the stored matrices."""
        stack = moved(stack, self._rule_device)
        transposed, tiles = self._atoms[atoms[0]].transposed, self._atoms[atoms[0]].tiles
        with phase(of_rule(_name(rule))):
            stack = _side_by_side(stack, tiles)
            stack = stack.mT.contiguous() if transposed else stack
            state: dict[str, Any] = {}
            work = rule.transform
            if isinstance(rule, OwnerStateRule):
                state = self.owner_state.of(atoms[0], rule)
                work = partial(_with_state, rule, state)
            update = work(stack) if self._capture is None else self._capture.run(rule, tuple(atoms), state, work, stack)
            update = sampled(_name(rule), update)
            update = _in_tiles(update.mT if transposed else update, tiles)
            if self._batch_numel:  # then all are copied in one operation
                update = update.contiguous()
        return update

    def step_weight(self, rule: WeightRule, atom: int, value: Tensor, grad: Tensor) -> Tensor:
        """The new weight of a matrix, in the shape of the stored matrix; may change ``value`` in place."""
        transposed, tiles = self._atoms[atom].transposed, self._atoms[atom].tiles
        state = self.owner_state.of(atom, rule)
        value, grad = (_side_by_side(moved(t, self._rule_device).float(), tiles) for t in (value, grad))
        if transposed:
            value, grad = value.T.contiguous(), grad.T.contiguous()
        with phase(of_rule(_name(rule))):
            step_whole(rule, self._atoms[atom], value, grad, state)
        return _in_tiles(value.T if transposed else value, tiles)

    def batches(self, atoms: tuple[int, ...], rules: Rules) -> Sequence[Batch]:
        """Whole matrices of one kind, shape and orientation; one at a time if the rule takes no more."""
        key = atoms, frozenset(kind for kind, rule in rules.items() if takes_one(rule))
        if key not in self._known:
            self._room -= len(atoms)
            if self._room < 0:
                self._known.clear()
                self._room = KEPT * len(self._atoms) - len(atoms)
            self._known[key] = self._find_batches(*key)
        return self._known[key]

    def _find_batches(self, atoms: tuple[int, ...], single: frozenset[int]) -> Sequence[Batch]:
        def alike(atom: int) -> Hashable:
            of = self._atoms[atom]
            return of.shape, of.transposed, of.tiles, atom if self.kinds[atom] in single else None

        return self._divided([(atom, self._atoms[atom].numel, 0) for atom in atoms], alike)

    def batches_of_pieces(self, numels: Iterable[tuple[int, int]], skipped: frozenset[int]) -> Sequence[Batch]:
        """Batches of pieces in a buffer, given the atom and the elements of each, without ``skipped`` atoms."""
        kept = [(atom, numel, place) for place, (atom, numel) in enumerate(numels) if atom not in skipped]
        return self._divided(kept, lambda atom: None)

    def _divided(self, pieces: Iterable[tuple[int, int, int]], alike: Callable[[int], Hashable]) -> list[Batch]:
        """Batches of at most ``batch_numel`` elements, or one piece, of one kind, that are ``alike``. A piece is its
        atom, its elements and its place."""
        found: dict[Hashable, list[Batch]] = {}
        totals: dict[Hashable, int] = {}
        for atom, numel, place in pieces:
            key = (self.kinds[atom], alike(atom))
            total = totals.get(key, 0) + numel
            if key not in found or total > self._batch_numel:
                found.setdefault(key, []).append(Batch(self.kinds[atom], [], [], []))
                total = numel
            batch = found[key][-1]
            batch.atoms.append(atom)
            batch.numels.append(numel)
            batch.places.append(place)
            totals[key] = total
        return list(chain.from_iterable(found.values()))

    # Of pieces in a buffer, given as its flat ``parts``, in the order of its segments

    def pack_directions(
        self, parts: Sequence[Tensor], batches: Sequence[Batch], rules: Rules, storage: Storage, *, advance: bool
    ) -> None:
        """Copy the direction of this rank's fragment of each atom into its part."""
        for batch in batches:
            of_batch = [storage(atom) for atom in batch.atoms]
            grads, values, states = joined(of_batch)
            directions = rules[batch.kind].directions(grads, values, states, advance=advance)
            copy_alike(_parts_like(parts, batch, of_batch), directions)

    def pack_values(self, parts: Sequence[Tensor], batches: Sequence[Batch], storage: Storage) -> None:
        """Copy this rank's fragment of the weight of each atom into its part."""
        for batch in batches:
            of_batch = [storage(atom) for atom in batch.atoms]
            copy_all(_parts_like(parts, batch, of_batch), joined(of_batch).values)

    def advance(self, batches: Sequence[Batch], rules: Rules, storage: Storage) -> None:
        """Accumulate the gradients into the element-wise state, where another rank sends the direction."""
        for batch in batches:
            grads, values, states = joined([storage(atom) for atom in batch.atoms])
            rules[batch.kind].accumulate_all(grads, values, states)

    def sums(
        self, parts: Sequence[Tensor], batches: Sequence[Batch], counted: Container[int], rules: Rules, storage: Storage
    ) -> dict[int, Tensor]:
        """``sums_of`` this rank's fragment of each ``counted`` atom whose rule uses norms, with its part of the
        updates."""
        found: dict[int, Tensor] = {}
        for batch in batches:
            places = dict(zip(batch.atoms, batch.places))
            atoms = [atom for atom in batch.atoms if rules[batch.kind].by_norms and atom in counted]
            if atoms:
                of_batch = [storage(atom) for atom in atoms]
                grads, values, _ = joined(of_batch)
                moves = _moves(of_batch, [parts[places[atom]] for atom in atoms])
                sums = _sums(cast_all(values, grads[0].dtype), moves, of_batch)
                found.update(zip(atoms, sums.unbind()))
        return found

    def apply(
        self,
        parts: Sequence[Tensor],
        batches: Sequence[Batch],
        rules: Rules,
        storage: Storage,
        sums: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Decay this rank's fragment of each atom, and apply its part of the updates.

        ``sums`` are those of the whole matrices, for rules that use norms.
        """
        for batch in batches:
            rule, of_batch = rules[batch.kind], [storage(atom) for atom in batch.atoms]
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
        moves = _moves(of_batch, updates)
        if moves[0].device.type != values[0].device.type:
            flat = torch.cat([move.reshape(-1) for move in moves]) if len(moves) > 1 else moves[0]
            moves = _like(moved(flat, values[0].device), moves)
        if isinstance(rule, WeightRule):
            copy_all(values, moves)
            return
        # If the state is wider than the weight, the step is computed in the state's dtype and rounded once.
        wide = cast_all(values, dtype)
        if rule.by_norms:
            of_all = _sums(wide, moves, of_batch) if sums is None else torch.stack([sums[atom] for atom in atoms])
            factors = rule.factors(of_all, [self._atoms[atom].rule_shape for atom in atoms])
            _apply_by_norms(rule, wide, moves, of_batch, factors)
        else:
            shapes = [self._atoms[atom].rule_shape for atom, pieces in zip(atoms, of_batch) for _ in pieces.values]
            numels = batch.numels if all([pieces.is_flat for pieces in of_batch]) else None
            rule.apply_all(wide, cast_all(moves, dtype, numels) if len(atoms) > 1 else moves, shapes)
        if wide is not values:
            copy_all(values, wide)


# Of rules that use norms of whole matrices: pieces of equal sizes at once, on copies.

COPIED_NUMEL = 2**25  # elements at once


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors of equal sizes, at most ``COPIED_NUMEL`` elements or one tensor at a time."""
    found: dict[int, list[list[int]]] = {}
    for number, tensor in enumerate(tensors):
        numel = tensor.numel()
        some = found.setdefault(numel, [[]])
        if some[-1] and (len(some[-1]) + 1) * numel > COPIED_NUMEL:
            some.append([])
        some[-1].append(number)
    return [numbers for some in found.values() for numbers in some]


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one size as rows, a copy unless there is only one."""
    if len(tensors) == 1:
        return tensors[0].reshape(1, -1)
    return torch.stack([tensor.reshape(-1) for tensor in tensors])


def _sums(values: Sequence[Tensor], moves: Sequence[Tensor], of_batch: Sequence[Pieces]) -> Tensor:
    """``sums_of`` every matrix, whose pieces follow each other, of shape (matrices, 3)."""
    of_pieces: dict[int, Tensor] = {}
    for numbers in _alike(values):
        sums = sums_of(*(_rows([tensors[number] for number in numbers]) for tensors in (values, moves)))
        of_pieces.update(zip(numbers, sums.unbind()))
    every = iter(of_pieces[number] for number in range(len(values)))
    of_matrices = [[next(every) for _ in pieces.values] for pieces in of_batch]
    return torch.stack([found[0] if len(found) == 1 else torch.stack(found).sum(0) for found in of_matrices])


def _apply_by_norms(
    rule: MatrixRule,
    values: Sequence[Tensor],
    moves: Sequence[Tensor],
    of_batch: Sequence[Pieces],
    factors: tuple[Tensor, Tensor],
) -> None:
    """``factors`` are by matrix, whose pieces follow each other."""
    matrices = [number for number, pieces in enumerate(of_batch) for _ in pieces.values]
    keeps, shares = (factor.unbind() for factor in factors)
    for numbers in _alike(values):
        here = [matrices[number] for number in numbers]
        if len(here) == 1:
            rule.apply_by(values[numbers[0]], moves[numbers[0]], keeps[here[0]], shares[here[0]])
            continue
        rows, updates = (_rows([tensors[number] for number in numbers]) for tensors in (values, moves))
        keep, share = (torch.stack([of_all[number] for number in here])[:, None] for of_all in (keeps, shares))
        rule.apply_by(rows, updates, keep, share)
        into = [values[number] for number in numbers]
        copy_all(into, [row.view_as(value) for row, value in zip(rows, into)])


def _with_state(rule: OwnerStateRule, state: dict[str, Any], matrix: Tensor) -> Tensor:
    return rule.transform_with(matrix, state)


def takes_one(rule: MatrixRule) -> bool:
    """Whether a rule takes whole matrices one at a time."""
    return isinstance(rule, (OwnerStateRule, WeightRule))


def _name(rule: MatrixRule) -> str:
    return rule.rule_name or type(rule).__name__


def _values(of_batch: Sequence[Pieces]) -> list[Tensor]:
    return [*chain.from_iterable(pieces.values for pieces in of_batch)]


def _parts_like(parts: Sequence[Tensor], batch: Batch, of_batch: Sequence[Pieces]) -> list[Tensor]:
    """The batch's parts of a buffer, as views like the pieces."""
    return [view for place, pieces in zip(batch.places, of_batch) for view in _of_part(parts[place], pieces)]


def _moves(of_batch: Sequence[Pieces], updates: Sequence[Tensor]) -> list[Tensor]:
    """The updates, flat by matrix, like the pieces of all matrices."""
    return [move for pieces, update in zip(of_batch, updates) for move in _of_part(update, pieces)]


def _of_part(part: Tensor, pieces: Pieces) -> Sequence[Tensor]:
    """The elements of a fragment, which are flat, like its pieces."""
    return (part,) if pieces.is_flat else _like(part, pieces.values)


# Matrices in tiles (``Atom``)


def _side_by_side(stack: Tensor, tiles: int) -> Tensor:
    """Matrices with their columns in order, from matrices in tiles."""
    if tiles == 1:
        return stack
    rows, columns = stack.shape[-2:]
    return stack.view(*stack.shape[:-2], tiles, rows, columns // tiles).transpose(-3, -2).reshape(stack.shape)


def _in_tiles(stack: Tensor, tiles: int) -> Tensor:
    """The inverse of ``_side_by_side``."""
    if tiles == 1:
        return stack
    rows, columns = stack.shape[-2:]
    return stack.reshape(*stack.shape[:-2], rows, tiles, columns // tiles).transpose(-3, -2).reshape(stack.shape)


# Between an accelerator and the CPU, where a host may offload tensors: in one copy.


@contextmanager
def filled_on(device: torch.device, target: Tensor) -> Iterator[Tensor]:
    """A tensor to fill on ``device``, copied to ``target`` at the end; ``target`` itself if it is there."""
    if device.type == target.device.type:
        yield target
        return
    filled = _beside(target, device)
    yield filled
    target.copy_(filled, non_blocking=target.device.type != "cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``. The host waits for copies to the CPU."""
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cpu":
        return _beside(tensor, device).copy_(tensor)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    with filled_on(tensor.device, target) as filled:
        filled.copy_(tensor)
    return target


def _beside(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape and dtype on ``device``. On the CPU its memory is pinned, so that an accelerator can copy
    it asynchronously. torch keeps freed pinned memory, in blocks of a power of two bytes, and reuses it after the
    copies."""
    pinned = device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)


# Many tensors in one operation.


def _like(tensor: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive elements in the shapes of ``pieces``. The tensor is flat unless there is only one piece."""
    if len(pieces) == 1:
        return [tensor.reshape_as(pieces[0])]
    flats = zip(tensor.split([piece.numel() for piece in pieces]), pieces)
    return [flat if piece.ndim == 1 else flat.view_as(piece) for flat, piece in flats]


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes."""
    if len({tensor.dtype for tensor in into}) == 1:
        copy_alike(into, tensors)
        return
    for target, tensor in zip(into, tensors):  # on CUDA, some versions of torch assume the first one's dtype for all
        target.copy_(tensor)


def copy_alike(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """``copy_all`` into tensors of one dtype."""
    if into:
        torch._foreach_copy_(list(into), list(tensors))


def cast_all(tensors: list[Tensor], dtype: torch.dtype, numels: list[int] | None = None) -> list[Tensor]:
    """Tensors of one dtype in another; the given list if they have it. ``numels`` are theirs if they are flat."""
    if tensors[0].dtype == dtype:
        return tensors
    if len(tensors) == 1:
        return [tensors[0].to(dtype)]
    total = sum(numels or [tensor.numel() for tensor in tensors])
    flat = torch.empty(total, dtype=dtype, device=tensors[0].device)
    cast = _like(flat, tensors) if numels is None else [*flat.split_with_sizes(numels)]
    copy_alike(cast, tensors)
    return cast
