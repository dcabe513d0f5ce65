"""Steps of matrices that lie whole on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Atom
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.owner_state import OwnerState
from lwopt_backend.runtime.storage import Slices, Storage


class WholeMatrices:
    """Runs rules on whole matrices among ``atoms``; up to ``batch_numel`` elements of equal shape go through together.

    ``rule_device`` is where the rule runs, wherever the matrices lie.
    """

    def __init__(self, atoms: Sequence[Atom], rule_device: torch.device, *, batch_numel: int = 0) -> None:
        self._atoms = atoms
        self._rule_device = rule_device
        self._batch_numel = batch_numel
        self.owner_state: OwnerState | None = None  # made by who steps rules that have some

    @torch.no_grad()
    def step(self, atoms: Sequence[int], rules: Sequence[MatrixRule], storage: Storage) -> None:
        """Update the weights and the state of ``atoms``, of which ``storage`` has all elements."""
        for batch in self.batches(atoms, rules):
            parts = [storage.part(atom) for atom in batch]
            directions = []
            for atom, part in zip(batch, parts):
                rules[atom].accumulate(part.grad, part.state)
                directions.append(rules[atom].direction(part.grad, part.state).view(self._atoms[atom].shape))
            for atom, part, update in zip(batch, parts, self.transform(rules[batch[0]], batch, directions)):
                apply_update(part, update, rules[atom], self._atoms[atom])

    def transform(self, rule: MatrixRule, atoms: Sequence[int], matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        matrices = [matrix.to(self._rule_device) for matrix in matrices]
        if not self._atoms[atoms[0]].transposed:
            return self._run_rule(rule, atoms, matrices)
        return [update.T for update in self._run_rule(rule, atoms, [matrix.T.contiguous() for matrix in matrices])]

    def _run_rule(self, rule: MatrixRule, atoms: Sequence[int], matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.owner_state is not None and self.owner_state.holds(atoms[0]):
            return [rule.transform_with(matrix, self.owner_state.of(atom)) for atom, matrix in zip(atoms, matrices)]
        if len(matrices) == 1:
            return [rule.transform(matrices[0])]
        return rule.transform(torch.stack(list(matrices))).unbind(0)

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


def apply_update(part: Slices, update: Tensor, rule: MatrixRule, atom: Atom) -> None:
    """Decay a piece of a weight and move it by the same piece of its matrix's update."""
    # Where the state is wider than the weight, the step is computed in the state's dtype and rounded once.
    value = part.value if part.value.dtype == part.grad.dtype else part.value.to(part.grad.dtype)
    update = update.reshape(value.shape).to(value.device)
    value.mul_(1 - rule.lr * rule.weight_decay)
    value.add_(update, alpha=-rule.lr * rule.scale(atom.rule_shape))
    if value is not part.value:
        part.value.copy_(value)
