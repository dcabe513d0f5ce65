"""One step of owned buffers on one rank, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import HostConfig
from lwopt_backend.elementwise_groups import ElementwiseGroups
from lwopt_backend.owned.members import Member
from lwopt_backend.plan import Atom
from lwopt_backend.plan.block_views import View, range_views
from lwopt_backend.registry import build_matrix_rules, new_state
from lwopt_backend.row_scaling import RowScaling
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.bucket_buffers import BucketBuffers
from lwopt_backend.runtime.bucket_manager import BucketManager
from lwopt_backend.runtime.storage import Slices
from lwopt_backend.runtime.views import flat_views
from lwopt_backend.runtime.whole import WholeMatrices

BATCH_NUMEL = 2**24  # elements of equal matrices that go through the rule together on an accelerator
Groups = Sequence[Mapping[str, Any]]


class OwnedStepper:
    """Steps what this rank owns of ``members``, the parameters of ``manager``, and keeps their state.

    ``state`` has, by a member's number, the state tensors of this rank's piece of it, flat.
    """

    def __init__(
        self,
        members: Sequence[Member],
        groups: Groups,
        manager: BucketManager,
        config: HostConfig,
        row_scaling: RowScaling,
    ) -> None:
        self._row_scaling = row_scaling
        self._members = members
        self._manager = manager
        self._config = config
        mine = {piece.param: piece for bucket in manager.buckets for piece in bucket.pieces}
        self._atoms: list[Atom] = []
        self._places: list[tuple[int, Sequence[View]]] = []  # by atom: its member, and where it lies in our piece of it
        self._atoms_of: dict[int, dict[int, int]] = {}  # of every member's matrices that are ours, by their place in it
        for number, member in enumerate(members):
            self._atoms_of[number] = {}
            for place, (atom, block) in enumerate(zip(member.atoms(groups[member.group]), member.blocks)):
                piece = mine.get(number)
                if piece is not None and piece.start <= block.flat(0) < piece.stop:
                    self._atoms_of[number][place] = len(self._atoms)
                    self._atoms.append(atom)
                    self._places.append((number, range_views(block, piece.start, piece.stop, 0)))
        device = members[0].param.device
        self._whole = WholeMatrices(self._atoms, device, batch_numel=0 if device.type == "cpu" else BATCH_NUMEL)
        self._pieces: dict[int, Slices] = {}  # of the bucket that is being stepped
        self._elementwise = ElementwiseGroups()
        self.updated: set[int] = set()  # buckets that were stepped in backward
        self.state: dict[int, dict[str, Tensor]] = {}
        for bucket in manager.buckets:
            for piece, value in zip(bucket.pieces, bucket.owned_values()):
                member = members[piece.param]
                self.state[piece.param] = new_state(value, groups[member.group])

    @torch.no_grad()
    def step(self, groups: Groups, active: Callable[[int], bool]) -> None:
        """Update every bucket and start its parameters' return. Called on all ranks, after ``manager.finish``.

        A member that is not ``active`` stays as it is, state included; all ranks must say the same of it.
        """
        rules = self._rules(groups)
        for number, bucket in enumerate(self._manager.settled()):
            if number not in self.updated:
                self._update(bucket, groups, rules, active)
            self._scale(bucket)
            self._manager.send_values(number)
        self.updated = set()
        self._row_scaling.clear()

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

    def _scale(self, bucket: BucketBuffers) -> None:
        """Multiply what this rank owns by the factors that were set for this step."""
        pieces = zip(bucket.pieces, bucket.owned_values()) if self._row_scaling else ()
        if any([self._row_scaling.scale_range(self._members[p.param].name, value, p.start) for p, value in pieces]):
            bucket.publish_masters()

    def parts(self, index: int) -> Sequence[Slices]:
        """Matrix ``index`` of the bucket that is being stepped."""
        number, views = self._places[index]
        whole = self._pieces[number]
        values, grads, *states = (flat_views(t, views) for t in (whole.value, whole.grad, *whole.state.values()))
        return [
            Slices(value, grad, dict(zip(whole.state, state))) for value, grad, *state in zip(values, grads, *states)
        ]

    def owner_states(self, number: int) -> dict[int, dict[str, Any]]:
        """What this rank keeps of a member's matrices beside the flat state, by a matrix's place in the member."""
        held = self._whole.owner_state.held()
        return {place: held[atom] for place, atom in self._atoms_of[number].items() if atom in held}

    def take_owner_states(self, number: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what was loaded for a member's matrices; those without any begin anew."""
        for place, atom in self._atoms_of[number].items():
            if place in states:
                self._whole.owner_state.put(atom, states[place])
            else:
                self._whole.owner_state.forget(atom)

    def owner_nbytes(self) -> int:
        """Of all that ``owner_states`` gives."""
        return self._whole.owner_state.nbytes()

    def _rules(self, groups: Groups) -> list[MatrixRule]:
        by_group = build_matrix_rules(groups, self._config)
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
        self._whole.step([atom for number in self._pieces for atom in self._atoms_of[number].values()], rules, self)
        by_group: dict[int, list[Slices]] = {}
        for number, slices in self._pieces.items():
            if not self._members[number].is_matrix:
                by_group.setdefault(self._members[number].group, []).append(slices)
        for number, parts in by_group.items():
            self._elementwise.step(number, groups[number], parts)
        self._pieces = {}
        bucket.publish_masters()
