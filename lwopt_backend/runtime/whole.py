"""Views of this rank's part of a matrix, and rules that run on whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Atom
from lwopt_backend.plan.atoms import Block
from lwopt_backend.plan.layouts import BlockLayout, Partition, Span, View, box_views
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.rules.protocol import sums_of
from lwopt_backend.runtime.collectives import changing, of_rule, phase, sampled
from lwopt_backend.runtime.state import OwnerState, step_whole


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which owners step parameters of ``dtype``: fp32 (masters) if it is narrower, otherwise ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor, in equal shapes."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    def cut(self, views: Callable[[Tensor], Sequence[Tensor]]) -> list[Slices]:
        """The elements that ``views`` returns of each tensor, one by one."""
        of_all = map(views, (self.value, self.grad, *self.state.values()))
        return [Slices(value, grad, dict(zip(self.state, state))) for value, grad, *state in zip(*of_all)]


# This rank's fragment of a matrix, by number. It is not empty, and has one or several views, which concatenated have
# the fragment's elements in row-major order.
Storage = Callable[[int], Sequence[Slices]]


class FlatPieces:
    """The places of the fragments of ``count`` matrices in a rank's flat partition, as ZeRO stores it. Found once."""

    def __init__(self, layout: Partition | BlockLayout, rank: int, count: int) -> None:
        self._views = [layout.views(index, rank) for index in range(count)]
        self._sizes: list[int] = []  # of every view and of the gap before it, if all are ranges in order
        self._end = 0
        every = list(chain.from_iterable(self._views))
        for view in every:
            begin, stop = view.span
            if view.strides == (1,) and begin >= self._end:
                self._sizes += [begin - self._end, stop - begin]
                self._end = stop
        self._in_order = len(self._sizes) == 2 * len(every)

    def storage(self, slices: Slices) -> Storage:
        """Views of the partition during one step, without copies; one call for each of the ``slices``."""
        if not self._in_order:
            return cache(lambda index: slices.cut(partial(flat_views, views=self._views[index])))
        cut = iter(slices.cut(self._ranges))
        pieces = [list(islice(cut, len(views))) for views in self._views]
        return lambda index: pieces[index]

    def _ranges(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split_with_sizes([*self._sizes, flat.numel() - self._end])[1::2]


# Views of a local tensor, as a plan describes them. They share its memory.


def flat_views(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Views of a rank's one-dimensional tensor, as ``BlockLayout.views`` describes them."""
    (stride,) = flat.stride()
    return [_view(flat, View(v.offset * stride, v.sizes, tuple(stride * s for s in v.strides))) for v in views]


def local_views(local: Tensor, block: Block, shape: Sequence[int], box: Sequence[Span]) -> list[Tensor]:
    """The elements of ``block`` in ``local``, which is a rank's ``box`` of a parameter of ``shape``, as views.

    Concatenated, they are the rank's fragment of the block in row-major order. Their shapes do not depend on the
    strides of ``local``. Raises ValueError as ``box_views`` does.
    """
    return [_view(local, view) for view in box_views(block, shape, box, local.stride())]


def _view(tensor: Tensor, view: View) -> Tensor:
    return tensor.as_strided(view.sizes, view.strides, tensor.storage_offset() + view.offset)


# Steps of matrices that this rank stores whole, and a rule's element-wise work on pieces of the others.


class WholeMatrices:
    """Runs rules on ``atoms``, up to ``batch_numel`` elements at once: on whole matrices of equal shape, and element by
    element on this rank's pieces of any.

    Rules run on whole matrices on ``rule_device``, wherever they are stored; ``owner_state`` is also there.
    """

    def __init__(self, atoms: Sequence[Atom], rule_device: torch.device, *, batch_numel: int = 0) -> None:
        self._atoms = atoms
        self._rule_device = rule_device
        self._batch_numel = batch_numel
        self.owner_state = OwnerState(atoms, rule_device)

    @torch.no_grad()
    def step(self, atoms: Sequence[int], rules: Sequence[MatrixRule], storage: Storage) -> None:
        """Update the weights and the state of ``atoms``, which ``storage`` has whole."""
        for batch in self.batches(atoms, rules):
            parts = [storage(atom) for atom in batch]
            with changing(_name(rules[batch[0]]), partial(_values, parts)):
                self._step(rules[batch[0]], batch, parts)

    def _step(self, rule: MatrixRule, batch: Sequence[int], parts: Sequence[Sequence[Slices]]) -> None:
        if isinstance(rule, WeightRule):
            (pieces,) = parts
            value, grad = (self._stack(batch, [[getattr(p, of) for p in pieces]]) for of in ("value", "grad"))
            updates: Sequence[Tensor] = [self.step_weight(rule, batch[0], value, grad)]
        else:
            directions = iter(directions_of(rule, list(chain.from_iterable(parts)), advance=True))
            stack = self._stack(batch, [[next(directions) for _ in pieces] for pieces in parts])
            updates = self.transform(rule, batch, stack)
        self._apply(rule, batch, parts, updates)

    def _stack(self, batch: Sequence[int], pieces: Sequence[Sequence[Tensor]]) -> Tensor:
        """The matrices of a batch from their pieces; a single contiguous piece is not copied."""
        if len(batch) == 1 and len(pieces[0]) == 1:
            return pieces[0][0].reshape(self._atoms[batch[0]].shape).contiguous()
        every = list(chain.from_iterable(pieces))
        widest = max(every, key=lambda piece: piece.itemsize)
        stack = self.empty(batch, widest, self._rule_device)
        with filled_on(widest.device, stack) as filled:
            copy_all(_like(filled.view(-1), every), every)
        return stack

    def empty(self, batch: Sequence[int], like: Tensor, device: torch.device | None = None) -> Tensor:
        """A tensor for the matrices of a batch: one as a matrix, several as a stack."""
        shape = self._atoms[batch[0]].shape
        return like.new_empty(shape if len(batch) == 1 else (len(batch), *shape), device=device)

    def transform(self, rule: MatrixRule, atoms: Sequence[int], stack: Tensor) -> Sequence[Tensor]:
        """The update of each matrix of a batch, in the shape of the stored matrix."""
        stack = moved(stack, self._rule_device)
        transposed, tiles = self._atoms[atoms[0]].transposed, self._atoms[atoms[0]].tiles
        with phase(of_rule(_name(rule))):
            stack = _side_by_side(stack, tiles)
            stack = stack.mT.contiguous() if transposed else stack
            if isinstance(rule, OwnerStateRule):
                update = rule.transform_with(stack, self.owner_state.of(atoms[0], rule))
            else:
                update = rule.transform(stack)
            update = sampled(_name(rule), update)
            update = _in_tiles(update.mT if transposed else update, tiles)
            if self._batch_numel:  # then all are copied in one operation
                update = update.contiguous()
        return update.unbind(0) if len(atoms) > 1 else [update]

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

    def batches(
        self, atoms: Sequence[int], rules: Sequence[MatrixRule], pieces: Mapping[int, int] | None = None
    ) -> Iterator[list[int]]:
        """Yield atoms of one rule, at most ``batch_numel`` elements or one atom at a time.

        With ``pieces``, the elements that this rank has of each atom, only these count, and shapes may differ. Without,
        atoms have equal shape and orientation, and come one at a time if the rule takes no more.
        """
        found: dict[tuple[Any, ...], list[int]] = {}
        for atom in atoms:
            of = self._atoms[atom]
            key = (of.shape, of.transposed, of.tiles) if pieces is None else ()
            found.setdefault((id(rules[atom]), *key), []).append(atom)
        for members in found.values():
            single = pieces is None and isinstance(rules[members[0]], (OwnerStateRule, WeightRule))
            batch: list[int] = []
            total = 0
            for atom in members:
                numel = self._atoms[atom].numel if pieces is None else pieces[atom]
                if batch and (single or total + numel > self._batch_numel):
                    yield batch
                    batch, total = [], 0
                batch.append(atom)
                total += numel
            yield batch

    def pack_directions(
        self, into: Mapping[int, Tensor], rules: Sequence[MatrixRule], storage: Storage, *, advance: bool
    ) -> None:
        """Copy the direction of this rank's fragment of each atom into a flat tensor."""
        for batch in self.batches(list(into), rules, _numels(into)):
            parts = [storage(atom) for atom in batch]
            targets = [_like(into[atom], [part.value for part in of_atom]) for atom, of_atom in zip(batch, parts)]
            pieces = directions_of(rules[batch[0]], list(chain.from_iterable(parts)), advance=advance)
            copy_alike(list(chain.from_iterable(targets)), pieces)

    def pack_values(self, into: Mapping[int, Tensor], storage: Storage) -> None:
        """Copy this rank's fragment of the weight of each atom into a flat tensor."""
        for atom, target in into.items():
            pieces = [part.value for part in storage(atom)]
            copy_all(_like(target, pieces), pieces)

    def sums(self, updates: Mapping[int, Tensor], storage: Storage) -> dict[int, Tensor]:
        """``sums_of`` this rank's fragment of each atom, with the flat fragment of its update."""
        found = {}
        for atom, update in updates.items():
            pieces = storage(atom)
            wide = cast_all([part.value for part in pieces], [part.grad.dtype for part in pieces])
            found[atom] = sums_of(wide, _like(update, wide))
        return found

    def apply(
        self,
        updates: Mapping[int, Tensor],
        rules: Sequence[MatrixRule],
        storage: Storage,
        sums: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Decay this rank's fragment of each atom, and apply the flat fragment of its update.

        ``sums`` are those of the whole matrices, for rules that use norms.
        """
        for batch in self.batches(list(updates), rules, _numels(updates)):
            parts = [storage(atom) for atom in batch]
            with changing(_name(rules[batch[0]]), partial(_values, parts)):
                self._apply(rules[batch[0]], batch, parts, [updates[atom] for atom in batch], sums)

    def _apply(
        self,
        rule: MatrixRule,
        batch: Sequence[int],
        parts: Sequence[Sequence[Slices]],
        updates: Sequence[Tensor],
        sums: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Apply the updates of a batch, the new weights if it is a ``WeightRule``, to pieces of the weights."""
        every = list(chain.from_iterable(parts))
        values, dtypes = [part.value for part in every], [part.grad.dtype for part in every]
        moves = [
            move
            for pieces, update in zip(parts, updates)
            for move in _like(update.reshape(-1) if len(pieces) > 1 else update, [part.value for part in pieces])
        ]
        if moves[0].device.type != values[0].device.type:
            flat = torch.cat([move.reshape(-1) for move in moves]) if len(moves) > 1 else moves[0]
            moves = _like(moved(flat, values[0].device), moves)
        if isinstance(rule, WeightRule):
            copy_all(values, moves)
            return
        shapes = [self._atoms[atom].rule_shape for atom, pieces in zip(batch, parts) for _ in pieces]
        # If the state is wider than the weight, the step is computed in the state's dtype and rounded once.
        wide = cast_all(values, dtypes)
        if rule.by_norms:
            counts = [len(pieces) for pieces in parts]
            self._apply_by_norms(rule, batch, _dealt(wide, counts), _dealt(moves, counts), sums)
        else:
            rule.apply_all(wide, cast_all(moves, dtypes) if len(batch) > 1 else moves, shapes)
        if any(new is not value for value, new in zip(values, wide)):
            copy_all(values, wide)

    def _apply_by_norms(
        self,
        rule: MatrixRule,
        batch: Sequence[int],
        values: Sequence[Sequence[Tensor]],
        moves: Sequence[Sequence[Tensor]],
        sums: Mapping[int, Tensor] | None,
    ) -> None:
        """Without ``sums`` these are whole matrices."""
        of_all = [sums[atom] for atom in batch] if sums is not None else list(map(sums_of, values, moves))
        factors = rule.factors(torch.stack(of_all), [self._atoms[atom].rule_shape for atom in batch])
        for *of_matrix, keep, move in zip(values, moves, *factors):
            for value, update in zip(*of_matrix):
                rule.apply_by(value, update, keep, move)


def _dealt(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """The tensors in order, that many at a time."""
    every = iter(tensors)
    return [list(islice(every, count)) for count in counts]


def _numels(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    return {atom: tensor.numel() for atom, tensor in tensors.items()}


def _values(parts: Sequence[Sequence[Slices]]) -> list[Tensor]:
    return [part.value for part in chain.from_iterable(parts)]


def _name(rule: MatrixRule) -> str:
    return rule.rule_name or type(rule).__name__


# For the pieces of a matrix that this rank stores, in order


def advance(rule: MatrixRule, pieces: Sequence[Slices]) -> None:
    """Accumulate the gradient into the element-wise state."""
    for part in pieces:
        rule.accumulate(rule.gradient(part.grad, part.value), part.state)


def directions_of(rule: MatrixRule, pieces: Sequence[Slices], *, advance: bool) -> Sequence[Tensor]:
    """The direction of each piece, which the rule's ``transform`` takes.

    ``advance`` first accumulates a piece's gradient into its state, which is then read from the cache.
    """
    grads, values, states = ([getattr(part, of) for part in pieces] for of in ("grad", "value", "state"))
    return rule.directions(grads, values, states, advance=advance)


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
    return [flat.view_as(piece) for flat, piece in zip(tensor.split([p.numel() for p in pieces]), pieces)]


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


def cast_all(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors in these dtypes; those that have it already, unchanged."""
    kinds = {*dtypes, *(tensor.dtype for tensor in tensors)}
    if len(kinds) == 1:
        return list(tensors)
    if len(tensors) == 1 or len(kinds) != 2 or len(set(dtypes)) != 1:
        return [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes)]
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtypes[0], device=tensors[0].device)
    cast = _like(flat, tensors)
    copy_all(cast, tensors)
    return cast
