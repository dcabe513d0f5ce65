"""State that only the owner of a matrix keeps, whole: factors of SOAP or Shampoo, of whatever shapes and number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Atom
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.ranks import Collectives

CHECKPOINT_KEY = "owner_state"  # under which checkpoints of DeepSpeed have it


class OwnerState:
    """What this rank keeps of the ``atoms`` that it owns, by their number; on ``device``."""

    def __init__(self, atoms: Sequence[Atom], device: torch.device) -> None:
        self._atoms = atoms
        self._device = device
        self._held: dict[int, dict[str, Any]] = {}
        self._tried: set[int] = set()  # state as it will be after a first step, which has not been taken

    def of(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        """The state of a matrix for its next step; the rule changes it in place."""
        if atom in self._tried:
            self._tried.discard(atom)
            self._held[atom].clear()
        if atom not in self._held:
            self._held[atom] = self._new(atom, rule)
        return self._held[atom]

    def _new(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        if isinstance(rule, OwnerStateRule):
            return rule.new_owner_state(self._atoms[atom].rule_shape, self._device)
        return {}

    def held(self) -> Mapping[int, dict[str, Any]]:
        """What there is, by atom. Of a matrix that was never stepped there may be nothing."""
        return {atom: state for atom, state in self._held.items() if atom not in self._tried}

    def make(self, atoms: Iterable[int], rules: Sequence[MatrixRule]) -> None:
        """Have state for ``atoms``, so that a checkpoint knows its names and shapes before there was a step.

        A ``WeightRule`` has none before its first step; that is tried on other numbers, and forgotten at the real one.
        """
        for atom in atoms:
            rule = rules[atom]
            if not keeps_state(rule) or self._held.get(atom):
                continue
            self._held[atom] = self._new(atom, rule)
            if isinstance(rule, WeightRule):
                self._tried.add(atom)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    value, grad = (torch.randn(self._atoms[atom].rule_shape).to(self._device) for _ in range(2))
                    rule.step(value, grad, self._held[atom])

    def expected(self, atom: int) -> dict[str, Any]:
        """State of the form that a checkpoint has, after ``make``."""
        return self._held[atom]

    def is_real(self, atom: int) -> bool:
        """Whether there was a step, or a checkpoint of one."""
        return atom in self._held and atom not in self._tried

    def put(self, atom: int, state: Mapping[str, Any]) -> None:
        """Take over what was loaded."""
        self._tried.discard(atom)
        self._held[atom] = nested.to_device(dict(state), self._device)

    def forget(self, atom: int) -> None:
        """Begin anew."""
        self._tried.discard(atom)
        self._held.pop(atom, None)

    def by_name(self) -> dict[str, dict[str, Any]]:
        """What there is, by a matrix's name."""
        return {self._atoms[atom].name: state for atom, state in self.held().items()}

    def take(self, atoms: Iterable[int], states: Mapping[str, dict[str, Any]]) -> None:
        """Take over what was loaded, by name; matrices without any begin anew."""
        for atom in atoms:
            name = self._atoms[atom].name
            self.put(atom, states[name]) if name in states else self.forget(atom)

    def nbytes(self) -> int:
        """Of all tensors that are held."""
        tensors = (t for state in self.held().values() for _, t in nested.leaves(state) if isinstance(t, Tensor))
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def brought_here(
    saved: Mapping[str, dict[str, Any]], wanted: Sequence[str], ranks: Collectives
) -> dict[str, dict[str, Any]]:
    """The states of matrices ``wanted`` on this rank, of those that any rank has ``saved``. Called on all ranks.

    Owners may be others than when they were saved; what is saved elsewhere only is fetched.
    """
    missing = {name for names in ranks.gather_objects([n for n in wanted if n not in saved]) for name in names}
    offers = ranks.gather_objects({name: saved[name] for name in missing if name in saved}) if missing else []
    found = {name: state for offer in offers for name, state in offer.items()}
    return {name: saved[name] if name in saved else found[name] for name in wanted if name in saved or name in found}


def keeps_state(rule: MatrixRule) -> bool:
    """Whether a rule keeps state at owners at all."""
    return isinstance(rule, (OwnerStateRule, WeightRule))
