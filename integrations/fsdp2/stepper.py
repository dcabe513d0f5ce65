"""The parameters of one device mesh: planned together, exchanged over one process group, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import FSDP2Config
from lwopt_backend.integrations.fsdp2.meshes import Mesh, describe, gradient, local
from lwopt_backend.mesh_plan import Member, plan_mesh
from lwopt_backend.plan.blocks import Block
from lwopt_backend.plan.mesh import Coordinate
from lwopt_backend.registry import ELEMENTWISE_RULES
from lwopt_backend.row_scaling import RowScaling
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.ranks import Alone, Collectives
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import Slices
from lwopt_backend.runtime.views import local_views

BATCH_NUMEL = 2**26  # elements that an accelerator takes through a rule at once
States = Mapping[Tensor, dict[str, Any]]


class MeshStepper:
    """``members`` of one ``mesh``, or the plain tensors, of which every rank steps its own copy, where it is None.

    Their ``rules``, by param group, exchange alike. ``loads`` are the flops that each rank of the mesh has elsewhere.
    Made on all ranks of the mesh.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        collectives: Collectives,
        members: Sequence[Member],
        groups: Sequence[Mapping[str, Any]],
        rules: Mapping[int, MatrixRule],
        config: FSDP2Config,
        loads: Sequence[int],
    ) -> None:
        self.mesh = mesh
        self.collectives = collectives
        self.members = list(members)
        self.groups = groups
        self.config = config
        coordinates = mesh.coordinates if mesh else ((0,),)
        self.planned = plan_mesh(self.members, groups, rules, config, coordinates, loads)
        self.plan = self.planned.plan
        self.matrices, self.places = self.planned.matrices, self.planned.places
        self.blocks = [self.planned.block(atom) for atom in range(len(self.matrices))]
        self.device = mesh.device if mesh else (local(members[0].param).device if members else torch.device("cpu"))
        batch = 0 if self.device.type == "cpu" else BATCH_NUMEL
        self.stepper = MatrixStepper(self.plan, collectives, self.device, batch_numel=batch)

    def presence(self, more: Tensor | None = None, *, changed: bool = False) -> Presence:
        """Start to agree on which members have a gradient, on whether the model was ``changed``, and on ``more`` flags.
        Called on all ranks of the mesh."""
        here = [member.param.grad is not None for member in self.members]
        return Presence(self.collectives, [*here, changed], self.device, more)

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

    def storage(self, states: States) -> Shards:
        coordinate = self.mesh.coordinates[self.collectives.rank] if self.mesh else (0,)
        return Shards([self.members[index] for index in self.matrices], self.blocks, coordinate, states)

    def scale_rows(self, row_scaling: RowScaling) -> None:
        """Apply the factors that were set for a step to this rank's parts."""
        coordinate = self.mesh.coordinates[self.collectives.rank] if self.mesh else (0,)
        for member in self.members:
            row_scaling.scale_box(member.name, local(member.param), member.sharding.box(coordinate))

    def elementwise(self, group: int, states: States, presence: Presence) -> list[Slices]:
        """This rank's pieces of the element-wise members of a param group that have a gradient somewhere."""
        chosen = [i for i, m in enumerate(self.members) if m.group == group and m.rule in ELEMENTWISE_RULES]
        return [piece(self.members[i], states[self.members[i].param]) for i in chosen if presence(i)]


class Shards:
    """This rank's pieces of the matrices, looked up once a step."""

    def __init__(
        self, members: Sequence[Member], blocks: Sequence[Block], coordinate: Coordinate, states: States
    ) -> None:
        self._members = members
        self._blocks = blocks
        self._coordinate = coordinate
        self._states = states
        self._whole: dict[str, Slices] = {}  # this rank's part of a member, by its name
        self._pieces: dict[int, list[Slices]] = {}

    def parts(self, index: int) -> Sequence[Slices]:
        if index not in self._pieces:
            self._pieces[index] = self._parts(self._members[index], self._blocks[index])
        return self._pieces[index]

    def _parts(self, member: Member, block: Block) -> list[Slices]:
        if member.name not in self._whole:
            self._whole[member.name] = piece(member, self._states[member.param])
        whole, sharding = self._whole[member.name], member.sharding
        if block.is_everything and len(sharding.shape) == 2:
            return [whole]
        box = sharding.box(self._coordinate)
        tensors = whole.value, whole.grad, *whole.state.values()
        values, grads, *states = (local_views(tensor, block, sharding.shape, box) for tensor in tensors)
        return [
            Slices(value, grad, dict(zip(whole.state, state))) for value, grad, *state in zip(values, grads, *states)
        ]


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


def own_group(mesh: Mesh) -> Collectives:
    """The exchange group of a mesh, a communicator of its own. Called on all its ranks."""
    return TorchCollectives.over(mesh.ranks, mesh.handle.get_all_groups()) if len(mesh.ranks) > 1 else Alone()
