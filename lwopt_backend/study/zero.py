"""ZeRO in a study: what ``LayerWise`` plans under DeepSpeed for a data-parallel model."""

from __future__ import annotations

from collections.abc import Sequence

from lwopt_backend.config import ZeROConfig
from lwopt_backend.group_plan import GroupPlan, Member, plan_group
from lwopt_backend.plan import FlatPartition, ParameterPartition
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.study.grouping import Share
from lwopt_backend.study.hosts import host_part
from lwopt_backend.study.part import Collective, Elementwise, Planned, RankMemory
from lwopt_backend.study.setting import Setting
from lwopt_backend.zero_storage import unit_layouts

MASTER = 4  # bytes: DeepSpeed keeps fp32 partitions beside parameters of any dtype


def plan_zero_share(name: str, shared: Share, ranks: int, setting: Setting) -> Planned:
    """What ``LayerWise`` plans, param group by param group; DeepSpeed's own collectives are counted, ours follow."""
    config, stage = setting.config, int(setting.engine[-1])
    assert isinstance(config, ZeROConfig)
    plans = []
    for group in shared.grouping.groups:
        layouts = unit_layouts(
            [param.numel() for param in group["params"]],
            ranks,
            stage,
            is_matrix=group["rule"] in MATRIX_RULES,
            sub_group_size=setting.sub_group_size,
        )
        members = _members(group["params"], shared)
        plans += [plan_group(group, members[part], layout, config, setting.plans_for) for part, layout in layouts]
    matrices = [plan for plan in plans if plan.matrices is not None]
    rest = [plan for plan in plans if plan.matrices is None]
    part = None
    if matrices:
        part = host_part(
            name,
            [plan.matrices for plan in matrices if plan.matrices is not None],
            shared,
            setting,
            _memory(matrices, ranks, setting, stage),
            buffer_numel=sum(map(_stored, matrices)) * ranks,
            host=_traffic(matrices, ranks, setting, stage),
            spread=stage == 3,
        )
    return Planned(
        name,
        ranks,
        ranks,
        part,
        Elementwise(
            sum(map(_numel, rest)),
            tuple(_memory(rest, ranks, setting, stage)),
            tuple(_traffic(rest, ranks, setting, stage)) if rest else (),
        ),
        tuple(line for plan in plans for line in plan.plan_lines()),
        tuple(part.loads) if part else (0,) * ranks,
        shared,
    )


def _members(params: Sequence[object], shared: Share) -> list[Member]:
    grouping, found = shared.grouping, []
    shapes = {route.name: route.shape for route in grouping.routes}
    for param in params:
        name = grouping.names[id(param)]
        dtype = str(getattr(param, "dtype", "")).removeprefix("torch.")
        found.append((name, shapes[name], dtype, name in grouping.transposed, grouping.matrices_in(name)))
    return found


def _numel(plan: GroupPlan) -> int:
    return sum(spec.numel for spec in plan.specs)


def _stored(plan: GroupPlan) -> int:
    """Elements that every rank holds of the fp32 parameters."""
    assert isinstance(plan.layout, (FlatPartition, ParameterPartition))
    return plan.layout.partition_numel


def _memory(plans: Sequence[GroupPlan], ranks: int, setting: Setting, stage: int) -> list[RankMemory]:
    """Per rank, what DeepSpeed holds, and the state that the plan says."""
    stored, numel = sum(map(_stored, plans)), sum(map(_numel, plans))
    parameter, gradient = setting.dtype.itemsize, setting.grad_dtype.itemsize
    state = [sum(plan.state_bytes[rank] for plan in plans) for rank in range(ranks)]
    if stage == 3:
        return [RankMemory(stored * parameter, stored * gradient, stored * MASTER, mine) for mine in state]
    kept = stored * ranks * gradient if stage == 1 else stored * gradient
    copied = stored * 4  # the step's own fp32 copy of the partition's gradients
    padding = (stored * ranks - numel) * parameter
    return [RankMemory(numel * parameter, kept + copied, stored * MASTER, mine, padding) for mine in state]


def _traffic(plans: Sequence[GroupPlan], ranks: int, setting: Setting, stage: int) -> list[Collective]:
    """DeepSpeed's own: stages 1 and 2 all-reduce gradients and gather parameters, stage 3 shards both."""
    share = (ranks - 1) / ranks
    numel = sum(map(_stored, plans)) * ranks
    parameters, gradients = (
        int(numel * setting.dtype.itemsize * share),
        int(numel * setting.grad_dtype.itemsize * share),
    )
    if stage == 3:
        return [
            Collective("zero3's reduce-scatter of gradients", 1, gradients),
            Collective("zero3's all-gathers of parameters", 2, 2 * parameters),
        ]
    return [
        Collective(f"{setting.engine}'s all-reduce of gradients", 1, 2 * gradients),
        Collective(f"{setting.engine}'s all-gather of parameters", 1, parameters),
    ]
