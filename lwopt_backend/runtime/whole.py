"""Views of this rank's part of a matrix, and rules that run on whole matrices."""

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
    """The dtype in which owners step parameters of ``dtype``: fp32 (masters) if it is narrower, else ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor, in equal shapes."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def slices_of(views: Sequence[Sequence[Tensor]], keys: Iterable[str]) -> list[Slices]:
    """Zip views of the weight, of the gradient and of the state tensor of each of ``keys`` into slices."""
    return [Slices(value, grad, dict(zip(keys, state))) for value, grad, *state in zip(*views)]


class Storage:
    """This rank's parts of a set of matrices during one step; views are made once."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence[Slices]] = {}

    def parts(self, index: int) -> Sequence[Slices]:
        """This rank's fragment of matrix ``index``, which is not empty, in one or several views.

        Concatenated, the views have the fragment's elements in row-major order.
        """
        if index not in self._found:
            self._found[index] = self._views_of(index)
        return self._found[index]

    def _views_of(self, index: int) -> Sequence[Slices]:
        raise NotImplementedError


class FlatLayout(Protocol):
    """Where matrices are in a rank's flat tensor."""

    def views(self, index: int, rank: int) -> Sequence[View]:
        """The views of the rank's fragment of matrix ``index``, in order."""


class FlatStorage(Storage):
    """Views of a rank's flat partition, as ZeRO stores it. Copies nothing."""

    def __init__(self, layout: FlatLayout, rank: int, slices: Slices) -> None:
        super().__init__()
        self._layout = layout
        self._rank = rank
        self._slices = slices

    def _views_of(self, index: int) -> Sequence[Slices]:
        views, flat = self._layout.views(index, self._rank), self._slices
        return slices_of([flat_views(t, views) for t in (flat.value, flat.grad, *flat.state.values())], flat.state)


# Views of a local tensor, as a plan describes them. They share its memory.


def flat_views(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Views of a rank's one-dimensional tensor, as ``BlockPartition.views`` describes them."""
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
    """Runs rules on whole matrices among ``atoms``, up to ``batch_numel`` elements of equal shape at once.

    Rules run on ``rule_device``, wherever the matrices are stored; ``owner_state`` is on it, too.
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
        """An atom's pieces as one contiguous matrix; a single contiguous piece is not copied."""
        return joined(pieces).reshape(self._atoms[atom].shape).contiguous()

    def transform(self, rule: MatrixRule, atoms: Sequence[int], matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """The update of each matrix, in the shape of the stored matrix."""
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
        """The new weight of a matrix, in the shape of the stored matrix; may change ``value`` in place."""
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
        """Yield atoms of equal shape, orientation and rule, at most ``batch_numel`` elements or one atom at a time."""
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


# On the pieces of a matrix that this rank stores, in order


def advance(rule: MatrixRule, pieces: Sequence[Slices]) -> None:
    """Accumulate the gradient into the element-wise state."""
    for part in pieces:
        rule.accumulate(rule.gradient(part.grad, part.value), part.state)


def directions_of(rule: MatrixRule, pieces: Sequence[Slices], *, advance: bool) -> list[Tensor]:
    """The direction of each piece, which the rule's ``transform`` takes.

    ``advance`` first accumulates a piece's gradient into its state, which is then in the cache when it is read.
    """
    found = []
    for part in pieces:
        grad = rule.gradient(part.grad, part.value)
        if advance:
            rule.accumulate(grad, part.state)
        found.append(rule.direction(grad, part.state))
    return found


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces as one tensor: a single piece as it is, several flattened and concatenated."""
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])


def apply_update(pieces: Sequence[Slices], update: Tensor, rule: MatrixRule, atom: Atom) -> None:
    """Decay pieces of a weight, and apply the same pieces of the matrix's ``update`` to them."""
    for part, moved in zip(pieces, _cut_like(pieces, update)):
        # Where the state is wider than the weight, the step is computed in the state's dtype and rounded once.
        value = part.value if part.value.dtype == part.grad.dtype else part.value.to(part.grad.dtype)
        rule.apply(value, moved.to(value.device), atom.rule_shape)
        if value is not part.value:
            part.value.copy_(value)


def put(pieces: Sequence[Slices], weight: Tensor) -> None:
    """Copy the same pieces of ``weight`` into pieces of a weight."""
    for part, new in zip(pieces, _cut_like(pieces, weight)):
        part.value.copy_(new)


def _cut_like(pieces: Sequence[Slices], whole: Tensor) -> list[Tensor]:
    if len(pieces) == 1:
        return [whole.reshape(pieces[0].value.shape)]
    flats = whole.reshape(-1).split([part.value.numel() for part in pieces])
    return [flat.view(part.value.shape) for flat, part in zip(flats, pieces)]
