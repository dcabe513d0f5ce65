"""From param groups of sharded parameters to steppers: one per device mesh, planned in an order that ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lwopt_backend.config import FSDP2Config
from lwopt_backend.grouping import Grouping
from lwopt_backend.integrations.fsdp2.meshes import Mesh, mesh_of, meshes_of, sharding_of
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper, own_group
from lwopt_backend.mesh_plan import Member, by_wire, sharding_in
from lwopt_backend.registry import build_matrix_rules
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.ranks import Alone, Collectives

NAME = "LayerWiseOptimizer"
Exchange = Sequence[tuple[Mesh, Collectives]]


def exchange_groups(params: Iterable[Tensor]) -> list[tuple[Mesh, Collectives]]:
    """The meshes of the parameters with their exchange groups, in the order in which all ranks go through them.

    Called on all ranks of the meshes. Raises ValueError if no parameter is a DTensor.
    """
    meshes = meshes_of(params)
    if not meshes:
        raise ValueError(
            f"{NAME}: no parameter of the model is a DTensor; call fully_shard(model) before, or pass "
            "sharded_later=True if Accelerate shards it in prepare()"
        )
    return [(mesh, own_group(mesh)) for mesh in meshes]


def bind(
    exchange: Exchange,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    grouping: Grouping,
    config: FSDP2Config,
) -> list[MeshStepper]:
    """Plan for the parameters that ``groups`` hold, in the model's order. Called on all ranks of the meshes.

    The work that a rank was given on one mesh counts on the next. Plain tensors come last, in a stepper of their own.
    Raises, on all ranks, what is wrong on any.
    """

    order = {name: position for position, name in enumerate(grouping.names.values())}

    def decide() -> tuple[list[Member], list[list[str]]]:
        members = sorted(_members(groups, names, grouping), key=lambda member: order[member.name])
        return members, [[m.line() for m in members if mesh_of(m.param) == mesh] for mesh, _ in exchange]

    collectives = [of_mesh for _, of_mesh in exchange]
    members = agree_in_all(collectives, NAME, decide)
    rules = build_matrix_rules(groups, config)
    load = 0  # of this rank, on the meshes before
    steppers = []
    lines: list[list[str]] = [[] for _ in exchange]
    for number, (mesh, of_mesh) in enumerate(exchange):
        for own in by_wire([member for member in members if mesh_of(member.param) == mesh], rules):
            stepper = MeshStepper(mesh, of_mesh, own, groups, rules, config, of_mesh.gather_objects(load))
            load = stepper.plan.ownership.loads[of_mesh.rank]
            steppers.append(stepper)
            lines[number] += stepper.planned.lines()
    agree_in_all(collectives, NAME, lambda: (None, lines))
    plain = [member for member in members if mesh_of(member.param) is None]
    alone = [MeshStepper(None, Alone(), own, groups, rules, config, [0]) for own in by_wire(plain, rules)]
    return [*steppers, *alone]


def names_of(
    held: Sequence[Sequence[Tensor]], bound: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Names of the parameters ``held``: as they were bound under ``names``, or by place if others took their places.

    Raises RuntimeError for parameters that are neither.
    """
    known = {id(p): n for params, theirs in zip(bound, names) for p, n in zip(params, theirs)}
    if all(id(param) in known for params in held for param in params):
        return [[known[id(param)] for param in params] for params in held]
    if [len(params) for params in held] != [len(theirs) for theirs in names]:
        raise RuntimeError(f"{NAME}: the param groups hold parameters that it was not made with; make a new one")
    return [list(theirs) for theirs in names]


def _members(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], grouping: Grouping) -> list[Member]:
    members = []
    for number, (group, group_names) in enumerate(zip(groups, names)):
        for name, param in zip(group_names, group["params"]):
            if param.is_meta:
                raise ValueError(
                    f"parameter {name!r} is on the meta device; call model.to_empty(device=...) and initialise it "
                    "before the optimizer is made"
                )
            blocks = grouping.matrices_in(name)
            sharding = sharding_of(name, param)
            for block in blocks:
                sharding_in(sharding, block).check(name)
            members.append(Member(name, param, number, group["rule"], sharding, name in grouping.transposed, blocks))
    return members
