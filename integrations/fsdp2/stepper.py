"""The parameters of one device mesh: planned together, exchanged over one process group, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import FSDP2Config
from lwopt_backend.integrations.fsdp2.meshes import Mesh, describe, gradient, local
from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout, Sharding, plan_spread
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES, elementwise_options
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.elementwise import step_elementwise
from lwopt_backend.runtime.owner_state import OwnerState
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.ranks import Alone, Collectives
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import Slices

BATCH_NUMEL = 2**26  # elements that an accelerator takes through a rule at once
States = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """A trained parameter: its name, its param group's position and rule, how it lies over its mesh, and whether it is
    a matrix that is stored as (inputs, outputs)."""

    name: str
    param: Tensor
    group: int
    rule: str
    sharding: Sharding
    transposed: bool

    def line(self) -> str:
        """What ranks must have decided alike of it."""
        return f"{self.name} {self.sharding} {self.param.dtype} by {self.rule} of group {self.group}"


class MeshStepper:
    """``members`` of one ``mesh``, or the plain tensors, of which every rank steps its own copy, where it is None.

    ``loads`` are the flops that each rank of the mesh has elsewhere. Made on all ranks of the mesh.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        collectives: Collectives,
        members: Sequence[Member],
        groups: Sequence[Mapping[str, Any]],
        config: FSDP2Config,
        loads: Sequence[int],
    ) -> None:
        self.mesh = mesh
        self.collectives = collectives
        self.members = list(members)
        self.groups = groups
        self.config = config
        # Backward computes the last layers' gradients first, so these are sent first.
        self.matrices = [i for i in reversed(range(len(members))) if members[i].rule in MATRIX_RULES]
        self.plan = self._plan(groups, loads)
        self.device = mesh.device if mesh else (local(members[0].param).device if members else torch.device("cpu"))
        batch = 0 if self.device.type == "cpu" else BATCH_NUMEL
        self.stepper = MatrixStepper(self.plan, collectives, self.device, batch_numel=batch)

    def _plan(self, groups: Sequence[Mapping[str, Any]], loads: Sequence[int]) -> MatrixPlan:
        members = [self.members[index] for index in self.matrices]
        atoms = [_atom(m, groups[m.group], self.config) for m in members]
        coordinates = self.mesh.coordinates if self.mesh else ((0,),)
        return plan_spread(
            atoms,
            MeshLayout(coordinates, tuple(m.sharding for m in members)),
            exchange_layout=self.config.layout,
            element_bytes=getattr(torch, self.config.wire_dtype).itemsize,
            bucket_matrices=self.config.bucket_matrices,
            bucket_numel=self.config.bucket_numel,
            loads=loads,
        )

    def lines(self) -> list[str]:
        """What all ranks of the mesh must have decided alike."""
        return [*(member.line() for member in self.members), *self.plan.lines()]

    def presence(self, more: Tensor | None = None) -> Presence:
        """Start to agree on which members have a gradient, and on ``more`` flags. Called on all ranks of the mesh."""
        here = [member.param.grad is not None for member in self.members]
        return Presence(self.collectives, here, self.device, more)

    def step_matrices(
        self,
        rules: Sequence[MatrixRule],
        storage: Shards,
        presence: Presence,
        departed: Mapping[int, Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """One step of the matrices, ``rules`` one for each. Called on all ranks of the mesh."""
        self.stepper.step(
            rules,
            storage,
            active=lambda atom: presence(self.matrices[atom]),
            departed=departed,
            meanwhile=meanwhile,
        )

    def rules_of(self, rules: Mapping[int, MatrixRule]) -> list[MatrixRule]:
        """One rule per matrix of the plan, from the rules of the param groups."""
        return [rules[self.members[index].group] for index in self.matrices]

    def make_owner_state(self, rules: Mapping[int, MatrixRule], states: States) -> None:
        """State for the matrices that this rank owns, by rules that keep some there.

        In ``states`` its names stand for it, with tensors that have no memory: a flattened checkpoint is read by them.
        """
        held = self.stepper.owner_state = OwnerState(self.plan, self.rules_of(rules), self.collectives, self.device)
        for (atom, key), like in held.shapes().items():
            states[self.members[self.matrices[atom]].param][key] = like

    def storage(self, states: States) -> Shards:
        return Shards([self.members[index] for index in self.matrices], states)

    def elementwise(self, group: int, states: States, presence: Presence) -> list[Slices]:
        """This rank's pieces of the element-wise members of a param group that have a gradient somewhere."""
        chosen = [i for i, m in enumerate(self.members) if m.group == group and m.rule in ELEMENTWISE_RULES]
        return [piece(self.members[i], states[self.members[i].param]) for i in chosen if presence(i)]


def _atom(member: Member, group: Mapping[str, Any], config: FSDP2Config) -> Atom:
    rows, columns = member.param.shape
    cost = MATRIX_RULES[member.rule].cost((rows, columns), group, config)
    return Atom(member.name, (rows, columns), cost, member.transposed)


class Shards:
    """This rank's pieces of the matrices, looked up once a step."""

    def __init__(self, members: Sequence[Member], states: States) -> None:
        self._members = members
        self._states = states
        self._pieces: dict[int, Slices] = {}

    def part(self, index: int) -> Slices:
        if index not in self._pieces:
            member = self._members[index]
            self._pieces[index] = piece(member, self._states[member.param])
        return self._pieces[index]


def piece(member: Member, state: Mapping[str, Any]) -> Slices:
    """This rank's part of the parameter, its gradient in the state's dtype (zero where it is missing), and its state.

    Raises TypeError for a gradient that is not a dense tensor.
    """
    value = local(member.param)
    shards = {key: local(tensor) for key, tensor in state.items() if not tensor.is_meta}  # the rest is at the owner
    grad = gradient(member.name, member.param)
    if grad is None:
        grad = torch.zeros_like(value)
    if grad.layout != torch.strided:
        raise TypeError(f"{describe(member.name, member.param)}: expected a dense gradient, found {grad.layout}")
    dtype = next((s.dtype for key, s in shards.items() if key != "step" and s.shape == value.shape), value.dtype)
    return Slices(value, grad.to(dtype), shards)


def step_elementwise_groups(
    groups: Sequence[Mapping[str, Any]],
    steppers: Sequence[MeshStepper],
    presences: Sequence[Presence],
    states: States,
) -> None:
    """One step of every element-wise param group, on this rank's pieces of whatever mesh.

    Where the state has a wider dtype than the parameter, the step is computed in the state's and rounded at its end.
    """
    for number, group in enumerate(groups):
        if group["rule"] not in ELEMENTWISE_RULES:
            continue
        parts = [
            part for stepper, here in zip(steppers, presences) for part in stepper.elementwise(number, states, here)
        ]
        wide = [
            part
            if part.value.dtype == part.grad.dtype
            else Slices(part.value.to(part.grad.dtype), part.grad, part.state)
            for part in parts
        ]
        optimizer = ELEMENTWISE_RULES[group["rule"]].optimizer
        step_elementwise(optimizer, elementwise_options(group["rule"], group), wide)
        for part, computed in zip(parts, wide):
            if computed is not part:
                part.value.copy_(computed.value)


def own_group(mesh: Mesh) -> Collectives:
    """The exchange group of a mesh, a communicator of its own. Called on all its ranks."""
    return TorchCollectives.over(mesh.ranks, mesh.handle.get_all_groups()) if len(mesh.ranks) > 1 else Alone()
