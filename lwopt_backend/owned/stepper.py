"""One step of owned buffers on one rank, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import LayerWiseConfig
from lwopt_backend.owned.members import Member
from lwopt_backend.registry import (
    ELEMENTWISE_RULES,
    build_matrix_rules,
    elementwise_options,
    rule_named,
)
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.bucket_buffers import BucketBuffers
from lwopt_backend.runtime.bucket_manager import BucketManager
from lwopt_backend.runtime.elementwise import step_elementwise
from lwopt_backend.runtime.storage import Slices
from lwopt_backend.runtime.whole import WholeMatrices

BATCH_NUMEL = 2**24  # elements of equal matrices that go through the rule together on an accelerator
Groups = Sequence[Mapping[str, Any]]


class OwnedStepper:
    """Steps what this rank owns of ``members``, the parameters of ``manager``, and keeps their state.

    ``state`` has, by a member's number, the state tensors of this rank's piece of it, flat.
    """

    def __init__(
        self, members: Sequence[Member], groups: Groups, manager: BucketManager, config: LayerWiseConfig
    ) -> None:
        self._members = members
        self._manager = manager
        self._config = config
        self._atoms, self._places, self._atoms_of = [], [], []
        for number, member in enumerate(members):
            atoms = member.atoms(groups[member.group], config)
            self._atoms_of.append(range(len(self._atoms), len(self._atoms) + len(atoms)))
            self._atoms += atoms
            self._places += [(number, index) for index in range(len(atoms))]
        device = members[0].param.device
        self._whole = WholeMatrices(self._atoms, device, batch_numel=0 if device.type == "cpu" else BATCH_NUMEL)
        self._pieces: dict[int, Slices] = {}  # of the bucket that is being stepped
        self.updated: set[int] = set()  # buckets that were stepped in backward
        self.state: dict[int, dict[str, Tensor]] = {}
        for bucket in manager.buckets:
            for piece, value in zip(bucket.pieces, bucket.owned_values()):
                member = members[piece.param]
                self.state[piece.param] = rule_named(member.rule).new_state(value, groups[member.group])

    @torch.no_grad()
    def step(self, groups: Groups, active: Callable[[int], bool]) -> None:
        """Update every bucket and start its parameters' return. Called on all ranks, after ``manager.finish``.

        A member that is not ``active`` stays as it is, state included; all ranks must say the same of it.
        """
        rules = self._rules(groups)
        for number, bucket in enumerate(self._manager.settled()):
            if number not in self.updated:
                self._update(bucket, groups, rules, active)
            self._manager.send_values(number)
        self.updated = set()

    @torch.no_grad()
    def step_arrived(self, groups: Groups) -> None:
        """Update the buckets that have come in backward, as far as this rank knows that their owned members have a
        gradient; the others wait for the step."""
        rules = None
        for number, bucket in self._manager.here():
            if number in self.updated or not all(self._manager.has_gradient(p.param) for p in bucket.pieces):
                continue
            rules = rules or self._rules(groups)
            self._update(bucket, groups, rules, lambda member: True)
            bucket.drop_owned_gradients()
            self.updated.add(number)

    def part(self, index: int) -> Slices:
        """Matrix ``index`` of the bucket that is being stepped."""
        number, place = self._places[index]
        whole, atom = self._pieces[number], self._atoms[index]
        flats = whole.value, whole.grad, *whole.state.values()
        value, grad, *state = (t.narrow(0, place * atom.numel, atom.numel).view(atom.shape) for t in flats)
        return Slices(value, grad, dict(zip(whole.state, state)))

    def _rules(self, groups: Groups) -> list[MatrixRule]:
        by_group = build_matrix_rules([group["rule"] for group in groups], groups, self._config)
        return [by_group[self._members[number].group] for number, _ in self._places]

    def _update(
        self, bucket: BucketBuffers, groups: Groups, rules: Sequence[MatrixRule], active: Callable[[int], bool]
    ) -> None:
        pieces = zip(bucket.pieces, bucket.owned_values(), bucket.owned_grads())
        self._pieces = {
            piece.param: Slices(value, grad, self.state[piece.param])
            for piece, value, grad in pieces
            if active(piece.param)
        }
        self._whole.step([atom for number in self._pieces for atom in self._atoms_of[number]], rules, self)
        by_group: dict[int, list[Slices]] = {}
        for number, slices in self._pieces.items():
            if not self._members[number].is_matrix:
                by_group.setdefault(self._members[number].group, []).append(slices)
        for number, parts in by_group.items():
            rule = groups[number]["rule"]
            step_elementwise(ELEMENTWISE_RULES[rule].optimizer, elementwise_options(rule, groups[number]), parts)
        self._pieces = {}
        bucket.publish_masters()
