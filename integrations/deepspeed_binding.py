"""What is decided when an engine takes the optimizer: routing, groups, what is stepped at a time, and its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import logger
from torch import Tensor

from lwopt_backend import report
from lwopt_backend.chosen import Rules, settings_lines
from lwopt_backend.config import ZeROConfig
from lwopt_backend.group_plan import GroupPlan, Member, members_digest, plan_group
from lwopt_backend.group_stepper import GroupStepper
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations import deepspeed_engine, deepspeed_pipeline
from lwopt_backend.integrations.deepspeed_refusals import reasons_to_refuse
from lwopt_backend.integrations.deepspeed_storage import Unit, check_as_planned, flat_tensors, units
from lwopt_backend.plan import machine_of
from lwopt_backend.replicated_stepper import ReplicatedStepper, new_replicated_stepper
from lwopt_backend.routing import Route, full_shape
from lwopt_backend.runtime.agreement import agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.ranks import Collectives
from lwopt_backend.watched_model import WatchedModel


@dataclass(frozen=True)
class Binding:
    """What an optimizer knows once an engine has taken it. ``plans[i]`` is about ``units[i]``."""

    name: str  # of the optimizer's type, for errors
    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: list[Collectives]  # every group of ranks that this one shares parameters with
    units: list[Unit]
    plans: list[GroupPlan]
    stage: deepspeed_pipeline.Stage | None  # of a pipeline
    watched: WatchedModel

    @property
    def replicated(self) -> bool:
        """Whether every rank stores all parameters whole."""
        return deepspeed_engine.sharding_stage(self.engine) == 0

    @property
    def plan_digest(self) -> str:
        """The name of the plan of this rank's parameters."""
        return plan_digest(line for plan in self.plans for line in plan.plan_lines())

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, each marked with what identifies its members in a checkpoint."""
        return [{**group, "members": self._members(number)} for number, group in enumerate(self.grouping.groups)]

    def _members(self, group: int) -> str:
        return members_digest([plan for unit, plan in zip(self.units, self.plans) if unit.group == group])

    def announce(self, config: ZeROConfig, notes: Sequence[str]) -> None:
        """On the first rank, print routing and plans; warn of ``notes`` and of clipping that nobody asked for."""
        if self.engine.global_rank == 0:
            if config.report:
                report.show(*self.announcement(), self.plan_digest)
            deepspeed_engine.warn(self.engine, notes)

    def announcement(self) -> tuple[list[Route], dict[str, list[GroupPlan]], list[dict[str, Any]]]:
        """What ``report.show`` prints: the whole model's routes, the plans by who shares them, and the param groups."""
        plans: dict[str, list[GroupPlan]] = {}
        for ranks in self.ranks:
            shared = [plan for unit, plan in zip(self.units, self.plans) if unit.ranks is ranks]
            experts = any(self.grouping.groups[unit.group].get("moe") for unit in self.units if unit.ranks is ranks)
            whose = "" if self.stage is None else self.stage.note
            if experts:
                whose = f"Experts that {ranks.world_size} ranks share (of each such set, this is the first):"
            if shared:
                plans.setdefault(whose, []).extend(shared)
        own = {route.name: route for route in self.grouping.routes}
        everyone = self.grouping.routes if self.stage is None else self.stage.all_routes
        return [own.get(route.name, route) for route in everyone], plans, self.grouping.groups

    def stepper(
        self, unit: Unit, plan: GroupPlan, tensor: Tensor, config: ZeROConfig
    ) -> GroupStepper | ReplicatedStepper:
        """What steps a unit, of which ``tensor`` is what DeepSpeed steps."""
        if self.replicated:
            return new_replicated_stepper(plan, unit.params, unit.ranks, config, self.engine.device)
        return GroupStepper(plan, tensor, unit.ranks, config, self.engine.device)

    def warn_of_changes(self) -> None:
        """Say once, on the first of the ranks that share parameters, what DeepSpeed does not train."""
        news = self.watched.news() if self.ranks[0].rank == 0 else None
        if news is not None:
            logger.warning(f"{self.name}: {news}")

    def stored(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Per unit, the tensor that DeepSpeed steps; of replicated parameters the first. Called on all ranks.

        Raises RuntimeError, on every rank, if DeepSpeed stores parameters elsewhere than planned. ``groups`` are the
        optimizer's param groups.
        """
        if self.replicated:
            return [unit.params[0] for unit in self.units]

        def check() -> tuple[list[Tensor], list[list[str]]]:
            stage = deepspeed_engine.sharding_stage(self.engine)
            flats = flat_tensors(self.engine, self.units, groups)
            for number, (unit, plan, flat) in enumerate(zip(self.units, self.plans, flats, strict=True)):
                check_as_planned(unit, number, plan, flat, stage)
            return flats, [[] for _ in self.ranks]

        return agree_in_all(self.ranks, self.name, check)


def bind(name: str, engine: DeepSpeedEngine, given: list[dict[str, Any]], rules: Rules, config: ZeROConfig) -> Binding:
    """Route, plan and agree for the optimizer of type ``name``. Called on all ranks; raises ValueError on all of them
    where something cannot work."""
    ranks = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]
    stage = deepspeed_pipeline.meet(engine, given, rules, config)
    return agree_in_all(ranks, name, lambda: _decide(name, engine, given, rules, config, ranks, stage))


def _decide(
    name: str,
    engine: DeepSpeedEngine,
    given: list[dict[str, Any]],
    rules: Rules,
    config: ZeROConfig,
    ranks: list[TorchCollectives],
    stage: deepspeed_pipeline.Stage | None,
) -> tuple[Binding, list[list[str]]]:
    reasons = reasons_to_refuse(engine, given)
    if reasons:
        raise ValueError("\n  ".join([f"{name} cannot train with this configuration:", *reasons]))
    if stage is None:
        grouping = group_parameters(engine.module, given, rules, config, stacks=True)
    else:
        grouping = group_parameters(engine.module, given, rules, config, routes=stage.routes, elsewhere=stage.elsewhere)
        deepspeed_pipeline.check_tied(engine, stage)
        deepspeed_pipeline.check_groups(engine, stage)
    machine = machine_of(engine.device.type)
    by_group = {sharers.group: sharers for sharers in ranks}
    of_groups = [by_group[deepspeed_engine.group_ranks(engine, group)] for group in grouping.groups]
    found = units(engine, grouping.groups, of_groups)
    plans = []
    for unit in found:
        members = [_member(p, grouping) for p in unit.params]
        plans.append(plan_group(grouping.groups[unit.group], members, unit.layout, config, machine))
    lines = [settings_lines(rules, config) for _ in ranks]
    for sharers, of_sharers in zip(ranks, lines):
        of_sharers += [line for unit, plan in zip(found, plans) if unit.ranks is sharers for line in plan.lines()]
    trained = [(grouping.names[id(param)], param) for group in grouping.groups for param in group["params"]]
    watched = WatchedModel(engine.module, trained, advice="call deepspeed.initialize after the last such change")
    return Binding(name, engine, grouping, list(ranks), found, plans, stage, watched), lines


def _member(param: Tensor, grouping: Grouping) -> Member:
    name = grouping.names[id(param)]
    dtype, blocks = str(param.dtype).removeprefix("torch."), grouping.matrices_in(name)
    return name, full_shape(param), dtype, name in grouping.transposed, blocks
