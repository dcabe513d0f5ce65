"""Where this rank's part of a matrix lies, and rules run on whole matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from lwopt_backend.plan import Atom
from lwopt_backend.plan.atoms import Block
from lwopt_backend.plan.layouts import Span, View, box_views
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.collectives import of_rule
from lwopt_backend.runtime.state import OwnerState


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which an owner steps parameters of ``dtype``: fp32, if they are narrower, in masters; else their own."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor, in equal shapes."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def slices_of(views: Sequence[Sequence[Tensor]], keys: Iterable[str]) -> list[Slices]:
    """From views of the weight, the gradient and the state of each of ``keys``: as many slices as each has views."""
    return [Slices(value, grad, dict(zip(keys, state))) for value, grad, *state in zip(*views)]


class Storage:
    """This rank's part of a set of matrices, for one step: views are made once."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence[Slices]] = {}

    def parts(self, index: int) -> Sequence[Slices]:
        """This rank's fragment of matrix ``index``, of which it stores something, in one or several views.

        Their elements, one view after the other, are the fragment's row by row.
        """
        if index not in self._found:
            self._found[index] = self._views_of(index)
        return self._found[index]

    def _views_of(self, index: int) -> Sequence[Slices]:
        raise NotImplementedError


class FlatLayout(Protocol):
    """Storage of a rank in one flat tensor."""

    def views(self, index: int, rank: int) -> Sequence[View]:
        """Where in it the rank's fragment of matrix ``index`` lies, in order."""


class FlatStorage(Storage):
    """One flat partition per group, as ZeRO-1/2 keep it: views into it, nothing is copied."""

    def __init__(self, layout: FlatLayout, rank: int, slices: Slices) -> None:
        super().__init__()
        self._layout = layout
        self._rank = rank
        self._slices = slices

    def _views_of(self, index: int) -> Sequence[Slices]:
        views, flat = self._layout.views(index, self._rank), self._slices
        return slices_of([flat_views(t, views) for t in (flat.value, flat.grad, *flat.state.values())], flat.state)


# Views of a local tensor that a plan tells of; they share its memory.


def flat_views(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Views into a rank's flat tensor, of one dimension, such as ``BlockPartition.views`` gives."""
    (stride,) = flat.stride()
    return [_view(flat, View(v.offset * stride, v.sizes, tuple(stride * s for s in v.strides))) for v in views]


def local_views(local: Tensor, block: Block, shape: Sequence[int], box: Sequence[Span]) -> list[Tensor]:
    """What ``local``, a rank's ``box`` of a parameter of ``shape``, holds of a block, as it lies in memory.

    Together they are the rank's fragment of the block row by row. Of two local tensors with other strides the views
    have the same shapes. Raises ValueError as ``box_views`` does.
    """
    return [_view(local, view) for view in box_views(block, shape, box, local.stride())]


def _view(tensor: Tensor, view: View) -> Tensor:
    return tensor.as_strided(view.sizes, view.strides, tensor.storage_offset() + view.offset)


# Steps of matrices that lie whole on this rank, and what a rule is asked on the pieces of those that do not.


class WholeMatrices:
    """Runs rules on whole matrices among ``atoms``; up to ``batch_numel`` elements of equal shape go through together.

    ``rule_device`` is where the rule runs, wherever the matrices lie, and where ``owner_state`` is kept.
    """

    def __init__(self, atoms: Sequence[Atom], rule_device: torch.device, *, batch_numel: int = 0) -> None:
        self._atoms = atoms
        self._rule_device = rule_device
        self._batch_numel = batch_numel
        self.owner_state = OwnerState(atoms, rule_device)

    @torch.no_grad()
    def step(self, atoms: Sequence[int], rules: Sequence[MatrixRule], storage: Storage) -> None:
        """Update the weights and the state of ``atoms``, of which ``storage`` has all elements."""
        for batch in self.batches(atoms, rules):
            parts = [storage.parts(atom) for atom in batch]
            rule = rules[batch[0]]
            if isinstance(rule, WeightRule):
                for atom, pieces in zip(batch, parts):
                    value = self._matrix(atom, [part.value for part in pieces])
                    grad = self._matrix(atom, [part.grad for part in pieces])
                    put(pieces, self.step_weight(rule, atom, value, grad))
                continue
            directions = []
            for atom, pieces in zip(batch, parts):
                directions.append(self._matrix(atom, directions_of(rules[atom], pieces, advance=True)))
            for atom, pieces, update in zip(batch, parts, self.transform(rule, batch, directions)):
                apply_update(pieces, update, rules[atom], self._atoms[atom])

    def _matrix(self, atom: int, pieces: Sequence[Tensor]) -> Tensor:
        """All pieces of an atom as one matrix; a single contiguous piece as it lies."""
        return joined(pieces).reshape(self._atoms[atom].shape).contiguous()

    def transform(self, rule: MatrixRule, atoms: Sequence[int], matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """The update of each matrix, in the shape in which it is stored."""
        matrices = [matrix.to(self._rule_device) for matrix in matrices]
        with record_function(_label(rule)):
            if not self._atoms[atoms[0]].transposed:
                return self._run_rule(rule, atoms, matrices)
            return [update.T for update in self._run_rule(rule, atoms, [matrix.T.contiguous() for matrix in matrices])]

    def _run_rule(self, rule: MatrixRule, atoms: Sequence[int], matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(rule, OwnerStateRule):
            return [rule.transform_with(m, self.owner_state.of(atom, rule)) for atom, m in zip(atoms, matrices)]
        if len(matrices) == 1:
            return [rule.transform(matrices[0])]
        return rule.transform(torch.stack(list(matrices))).unbind(0)

    def step_weight(self, rule: WeightRule, atom: int, value: Tensor, grad: Tensor) -> Tensor:
        """The new weight of a matrix, in the shape in which it is stored; ``value`` may be changed."""
        value, grad = (tensor.to(self._rule_device, torch.float32) for tensor in (value, grad))
        transposed, state = self._atoms[atom].transposed, self.owner_state.of(atom, rule)
        if transposed:
            value, grad = value.T.contiguous(), grad.T.contiguous()
        first = not state
        with record_function(_label(rule)):
            rule.step(value, grad, state)
        if first:
            nested.check(state)
        return value.T if transposed else value

    def batches(self, atoms: Sequence[int], rules: Sequence[MatrixRule]) -> Iterator[list[int]]:
        """Atoms of equal shape, orientation and rule together, at most ``batch_numel`` elements at a time."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for atom in atoms:
            key = self._atoms[atom].shape, self._atoms[atom].transposed, id(rules[atom])
            alike.setdefault(key, []).append(atom)
        for members in alike.values():
            size = max(1, self._batch_numel // self._atoms[members[0]].numel)
            for begin in range(0, len(members), size):
                yield members[begin : begin + size]


def _label(rule: MatrixRule) -> str:
    return of_rule(rule.rule_name or type(rule).__name__)


# On the pieces of a matrix that this rank stores, in their order


def advance(rule: MatrixRule, pieces: Sequence[Slices]) -> None:
    """Take the gradient into the element-wise state."""
    for part in pieces:
        rule.accumulate(rule.gradient(part.grad, part.value), part.state)


def directions_of(rule: MatrixRule, pieces: Sequence[Slices], *, advance: bool) -> list[Tensor]:
    """What the rule's ``transform`` needs of these pieces, once their gradients are in the state.

    ``advance`` takes them there, piece by piece, so that the state is still in the cache when it is read.
    """
    found = []
    for part in pieces:
        grad = rule.gradient(part.grad, part.value)
        if advance:
            rule.accumulate(grad, part.state)
        found.append(rule.direction(grad, part.state))
    return found


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces' elements in their order: a single piece in its shape, several end to end."""
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])


def apply_update(pieces: Sequence[Slices], update: Tensor, rule: MatrixRule, atom: Atom) -> None:
    """Decay pieces of a weight and move them by the same pieces of their matrix's update."""
    for part, moved in zip(pieces, _cut_like(pieces, update)):
        # Where the state is wider than the weight, the step is computed in the state's dtype and rounded once.
        value = part.value if part.value.dtype == part.grad.dtype else part.value.to(part.grad.dtype)
        rule.apply(value, moved.to(value.device), atom.rule_shape)
        if value is not part.value:
            part.value.copy_(value)


def put(pieces: Sequence[Slices], weight: Tensor) -> None:
    """Make pieces of a weight those of ``weight``."""
    for part, new in zip(pieces, _cut_like(pieces, weight)):
        part.value.copy_(new)


def _cut_like(pieces: Sequence[Slices], whole: Tensor) -> list[Tensor]:
    if len(pieces) == 1:
        return [whole.reshape(pieces[0].value.shape)]
    flats = whole.reshape(-1).split([part.value.numel() for part in pieces])
    return [flat.view(part.value.shape) for flat, part in zip(flats, pieces)]
