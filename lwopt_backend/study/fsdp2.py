"""FSDP2 in a study: what ``LayerWiseOptimizer`` plans for a model whose rows are sharded over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lwopt_backend.config import FSDP2Config
from lwopt_backend.mesh_plan import Member, MeshPlan, by_wire, mesh_state_nbytes, plan_mesh
from lwopt_backend.plan import Sharding
from lwopt_backend.registry import MATRIX_RULES, build_matrix_rules
from lwopt_backend.study.grouping import Share
from lwopt_backend.study.hosts import host_part
from lwopt_backend.study.part import Collective, Elementwise, Planned, RankMemory
from lwopt_backend.study.setting import Setting

PARAMETER_BYTES = 2  # bf16 on the wire, whatever dtype the shards have


def plan_fsdp2_share(
    name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None
) -> Planned:
    """What is planned for a mesh of ``ranks`` ranks, each of which has the work ``base`` on smaller meshes."""
    config, groups = setting.config, shared.grouping.groups
    assert isinstance(config, FSDP2Config)
    rules = build_matrix_rules(groups, config)
    members = _members(shared, ranks)
    coordinates = tuple((rank,) for rank in range(ranks))
    loads = tuple(base or (0,) * ranks)
    plans: list[MeshPlan] = []
    for own in by_wire(members, rules):
        plans.append(plan_mesh(own, groups, rules, config, coordinates, loads))
        loads = plans[-1].plan.ownership.loads
    matrices = [member for member in members if member.rule in MATRIX_RULES]
    rest = [member for member in members if member.rule not in MATRIX_RULES]
    part = None
    if matrices:
        part = host_part(
            name,
            [planned.plan for planned in plans if planned.plan.atoms],
            shared,
            setting,
            _memory(matrices, shared, setting, ranks),
            buffer_numel=_numel(matrices),
            host=_traffic(matrices, setting, ranks),
            spread=True,
        )
    return Planned(
        name,
        ranks,
        ranks,
        part,
        Elementwise(_numel(rest), tuple(_memory(rest, shared, setting, ranks)), tuple(_traffic(rest, setting, ranks))),
        tuple(line for planned in plans for line in planned.lines()),
        loads,
        shared,
        None if base is None else tuple(base),
    )


def _members(shared: Share, ranks: int) -> list[Member]:
    """All trained parameters in the model's order, as ``fully_shard`` has them."""
    grouping = shared.grouping
    group_of = {id(param): number for number, group in enumerate(grouping.groups) for param in group["params"]}
    params = {grouping.names[id(param)]: param for group in grouping.groups for param in group["params"]}
    found = []
    for route in grouping.routes:
        param = params.get(route.name)
        if param is None:
            continue
        number = group_of[id(param)]
        sharding = Sharding(tuple(param.shape), (ranks,), (0,), (False,))
        transposed, blocks = route.name in grouping.transposed, grouping.matrices_in(route.name)
        found.append(Member(route.name, param, number, grouping.groups[number]["rule"], sharding, transposed, blocks))
    return found


def _numel(members: Sequence[Member]) -> int:
    return sum(member.param.numel() for member in members)


def _memory(members: Sequence[Member], shared: Share, setting: Setting, ranks: int) -> list[RankMemory]:
    """Per rank, its shards of parameters and gradients, and the state that the optimizer makes for them."""
    config, groups = setting.config, shared.grouping.groups
    assert isinstance(config, FSDP2Config)
    alike: dict[tuple[tuple[int, ...], int], list[Member]] = {}
    for member in members:
        alike.setdefault((member.sharding.shape, member.group), []).append(member)
    found = []
    for rank in range(ranks):
        numel = sum(len(some) * math.prod(some[0].sharding.local_shape((rank,))) for some in alike.values())
        state = sum(len(some) * mesh_state_nbytes(some[:1], groups, config, (rank,)) for some in alike.values())
        found.append(RankMemory(numel * setting.dtype.itemsize, numel * setting.dtype.itemsize, 0, state))
    return found


def _traffic(members: Sequence[Member], setting: Setting, ranks: int) -> list[Collective]:
    """FSDP2's own."""
    if not members:
        return []
    sent = _numel(members) * (ranks - 1) / ranks
    return [
        Collective("fsdp2's reduce-scatter of gradients", 1, int(sent * setting.grad_dtype.itemsize)),
        Collective("fsdp2's all-gathers of parameters", 2, int(2 * sent * PARAMETER_BYTES)),
    ]
