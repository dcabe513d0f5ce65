"""Plans for the parameters of one device mesh, as FSDP2 shards them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend import registry
from lwopt_backend.config import FSDP2Config
from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout, Sharding, plan_spread
from lwopt_backend.plan.blocks import Block
from lwopt_backend.plan.mesh import Coordinate
from lwopt_backend.registry import cost_of, state_nbytes, wire_of
from lwopt_backend.rules import MatrixRule


@dataclass(frozen=True)
class Member:
    """A trained parameter: its name, its param group's position and rule, how it lies over its mesh, whether it is
    stored as (inputs, outputs), and the matrices in it."""

    name: str
    param: Tensor
    group: int
    rule: str
    sharding: Sharding
    transposed: bool
    blocks: tuple[Block, ...] = ()

    def line(self) -> str:
        """What ranks must have decided alike of it."""
        return f"{self.name} {self.sharding} {self.param.dtype} by {self.rule} of group {self.group}"


@dataclass(frozen=True)
class MeshPlan:
    """``members`` in the model's order, and how their matrices are updated. An atom is block ``places[atom]`` of member
    ``matrices[atom]``."""

    members: tuple[Member, ...]
    matrices: tuple[int, ...]
    places: tuple[int, ...]
    plan: MatrixPlan

    def block(self, atom: int) -> Block:
        return self.members[self.matrices[atom]].blocks[self.places[atom]]

    def lines(self) -> list[str]:
        """What all ranks of the mesh must have decided alike."""
        return [*(member.line() for member in self.members), *self.plan.lines()]


def plan_mesh(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    rules: Mapping[int, MatrixRule],
    config: FSDP2Config,
    coordinates: tuple[Coordinate, ...],
    loads: Sequence[int],
) -> MeshPlan:
    """Plan ``members`` of one mesh, whose ``rules``, by param group, exchange alike.

    ``coordinates`` are the ranks' places in the mesh, ``loads`` the flops that each rank has elsewhere.
    """
    # Backward computes the last layers' gradients first, so these are sent first.
    pairs = [(i, place) for i in reversed(range(len(members))) for place in range(len(members[i].blocks))]
    found = [(members[i], members[i].blocks[place]) for i, place in pairs]
    wire = wire_of(rules[found[0][0].group]) if found else {}
    plan = plan_spread(
        [
            Atom(block.of(m.name), block.shape, cost_of(block.shape, groups[m.group]), m.transposed)
            for m, block in found
        ],
        MeshLayout(coordinates, tuple(sharding_in(m.sharding, block) for m, block in found)),
        exchange_layout=config.layout,
        bucket_matrices=config.bucket_matrices,
        bucket_numel=config.bucket_numel,
        loads=loads,
        **wire,
    )
    return MeshPlan(tuple(members), tuple(i for i, _ in pairs), tuple(place for _, place in pairs), plan)


def sharding_in(sharding: Sharding, block: Block) -> Sharding:
    """How one matrix in a parameter lies, of which ``sharding`` tells how it lies itself."""
    return sharding if block.is_everything and len(sharding.shape) == 2 else replace(sharding, block=block)


def by_wire(members: Sequence[Member], rules: Mapping[int, MatrixRule]) -> list[list[Member]]:
    """Matrices whose rules exchange alike; element-wise members are with the first of them."""
    found: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        if member.group in rules:
            found.setdefault(tuple(wire_of(rules[member.group]).values()), []).append(member)
    if not found:
        return [list(members)] if members else []
    first = next(iter(found.values()))
    kept = {id(member) for member in first} | {id(member) for member in members if member.group not in rules}
    return [[m for m in members if id(m) in kept], *list(found.values())[1:]]


def new_state(like: Tensor, group: Mapping[str, Any], config: FSDP2Config) -> dict[str, Tensor]:
    """Fresh state for a parameter, laid out as it is and in the dtype that the configuration says."""
    if config.state_dtype == "float32":
        like = torch.empty_like(like, dtype=torch.float32)
    return dict(registry.new_state(like, group))


def mesh_state_nbytes(
    members: Sequence[Member], groups: Sequence[Mapping[str, Any]], config: FSDP2Config, coordinate: Coordinate
) -> int:
    """Bytes of the state that the rank at ``coordinate`` keeps."""
    found = 0
    for m in members:
        dtype = torch.float32 if config.state_dtype == "float32" else m.param.dtype
        found += state_nbytes(math.prod(m.sharding.local_shape(coordinate)), groups[m.group], dtype)
    return found
