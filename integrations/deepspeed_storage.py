"""What DeepSpeed steps at a time, as planned (``zero_storage``) and as found before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend.group_plan import GroupPlan, HostLayout
from lwopt_backend.integrations import deepspeed_engine
from lwopt_backend.plan import Replicas
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.routing import full_shape
from lwopt_backend.row_scaling import RowScaling
from lwopt_backend.runtime.ranks import Collectives
from lwopt_backend.zero_storage import unit_layouts


@dataclass(frozen=True)
class Unit:
    """Parameters that are stepped at a time. ``group`` is the number of their param group, ``ranks`` share them."""

    group: int
    params: list[Tensor]
    layout: HostLayout
    ranks: Collectives


def units(engine: DeepSpeedEngine, groups: Sequence[Mapping[str, Any]], ranks: Sequence[Collectives]) -> list[Unit]:
    """What DeepSpeed will step at a time, in its order. ``ranks[i]`` share param group i."""
    stage = deepspeed_engine.sharding_stage(engine)
    found = []
    for number, (group, sharers) in enumerate(zip(groups, ranks)):
        params = group["params"]
        layouts = unit_layouts(
            [_numel(param) for param in params],
            sharers.world_size,
            stage,
            is_matrix=group["rule"] in MATRIX_RULES,
            sub_group_size=engine.zero_sub_group_size(),
            param_alignment=deepspeed_engine.param_alignment(engine, params),
        )
        found += [Unit(number, params[part], layout, sharers) for part, layout in layouts]
    return found


def _numel(param: Tensor) -> int:
    return math.prod(full_shape(param))


def flat_tensors(engine: DeepSpeedEngine, found: Sequence[Unit], groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """This rank's flat tensor of every unit, stages 1 to 3."""
    if deepspeed_engine.sharding_stage(engine) == 3:
        return deepspeed_engine.sub_group_tensors(found[0].params[0])
    return [groups[unit.group]["params"][0] for unit in found]


def check_as_planned(unit: Unit, number: int, plan: GroupPlan, flat: Tensor, stage: int) -> None:
    """Raises RuntimeError if DeepSpeed stores this rank's pieces elsewhere than planned."""
    rank = unit.ranks.rank
    assert not isinstance(plan.layout, Replicas)
    if flat.numel() != plan.layout.partition_numel:
        raise RuntimeError(f"{plan.rule}: planned {plan.layout.partition_numel} elements a rank, found {flat.numel()}")
    for index, (spec, param) in enumerate(zip(plan.specs, unit.params)):
        planned = plan.layout.fragment(index, rank)
        if stage == 3:
            found = deepspeed_engine.stored_part(param, rank, number)
        else:
            found = deepspeed_engine.stored_fragment(param, rank)
        if planned != found:
            raise RuntimeError(f"parameter {spec.name!r}: planned {planned}, but DeepSpeed stores {found}")


@torch.no_grad()
def scale_rows(unit: Unit, plan: GroupPlan, flat: Tensor, row_scaling: RowScaling) -> None:
    """Apply the factors that were set for a step to what this rank stores of a unit, and forget them."""
    for index, (spec, param) in enumerate(zip(plan.specs, unit.params)):
        if flat is unit.params[0]:  # stage 0, where every rank stores all parameters
            row_scaling.scale_box(spec.name, param.data, [(0, size) for size in param.shape])
            continue
        held = plan.layout.fragment(index, unit.ranks.rank)
        if held is not None:
            row_scaling.scale_range(spec.name, flat.narrow(0, held.offset, held.numel), held.start)
    row_scaling.forget(spec.name for spec in plan.specs)
