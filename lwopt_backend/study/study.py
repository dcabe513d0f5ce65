"""A study: one model on one deployment, every pipeline stage and both kinds of buffers planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lwopt_backend.atoms import Divided
from lwopt_backend.config import OwnedConfig
from lwopt_backend.model_shapes import ModelShapes
from lwopt_backend.plan.machine import StepTime
from lwopt_backend.routing import Route
from lwopt_backend.runtime.agreement import plan_digest
from lwopt_backend.study.deployment import EXPERTS, Deployment, is_expert, local_experts, stages
from lwopt_backend.study.engines import plan_share
from lwopt_backend.study.grouping import Share, share_of
from lwopt_backend.study.part import Part, Planned, RankMemory
from lwopt_backend.study.setting import Setting


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: what its ranks share, the dense parameters first."""

    index: int
    planned: tuple[Planned, ...]
    deployment: Deployment
    setting: Setting

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its matrices."""
        return tuple(each.part for each in self.planned if each.part is not None)

    @property
    def ranks(self) -> int:
        return self.deployment.stage_ranks

    @property
    def digest(self) -> str:
        """The name of the plan: of one stage without ``tp`` and ``ep`` that of a run."""
        return plan_digest(self.lines())

    def lines(self) -> Iterator[str]:
        for each in self.planned:
            yield from each.lines

    def loads(self) -> list[int]:
        """Per rank of the stage, the cost of what it owns of all buffers."""
        sums = [0] * self.ranks
        for part in self.parts:
            loads = part.loads
            for rank in range(self.ranks):
                sums[rank] += loads[self.place(part, rank)]
        return sums

    def memory(self) -> list[RankMemory]:
        """Per rank of the stage, of everything that is trained."""
        return [
            sum((each.memory(self.place(each, rank)) for each in self.planned), start=RankMemory())
            for rank in range(self.ranks)
        ]

    def place(self, shared: Part | Planned, rank: int) -> int:
        """Which rank of an instance a rank of the stage is. Neighbours differ in tp first, and in ep, then in dp."""
        apart = self.deployment.ep if shared.name == "experts" else self.deployment.tp
        return rank // apart % shared.group_size

    @property
    def time(self) -> StepTime:
        """Of all buffers: the rank that is busiest in all of them together, wires one after the other."""
        both = [part.time for part in self.parts]
        busiest = self.setting.seconds(max(self.loads()))
        return StepTime(busiest, sum(time.wire for time in both), sum(time.latency for time in both))


@dataclass(frozen=True)
class Study:
    """All stages of a model on a deployment. ``worst`` is the stage that takes longest, the one that is shown."""

    routes: tuple[Route, ...]
    deployment: Deployment
    setting: Setting
    stages: tuple[Stage, ...]

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: (stage.time.total, -stage.index))

    @property
    def digest(self) -> str:
        """The name of the plan; of several stages, of all their names."""
        if len(self.stages) == 1:
            return self.stages[0].digest
        return plan_digest(f"stage {stage.index}: {stage.digest}" for stage in self.stages)


def plan_study(model: ModelShapes, deployment: Deployment, setting: Setting, *, experts: str = EXPERTS) -> Study:
    """Plan every stage of ``deployment``.

    ``experts`` is the glob of the parameters that expert parallelism spreads. Raises ValueError if a stage has no
    matrix, or numbers do not divide.
    """
    planned = []
    for index, members in enumerate(stages(model.routes, deployment.pp)):
        dense, spread = _shares(members, model.divided, deployment, setting, experts)
        planned.append(_plan_stage(index, dense, spread, deployment, setting))
    return Study(model.routes, deployment, setting, tuple(planned))


def _shares(
    members: Sequence[Route], divided: Mapping[str, Divided], deployment: Deployment, setting: Setting, experts: str
) -> tuple[Share, Share | None]:
    """The dense parameters of a stage, and the experts of one of its ranks."""
    if deployment.ep == 1:
        return share_of(members, divided, setting, tp=deployment.tp), None
    local, parts = local_experts(members, divided, deployment.ep, experts)
    dense = [route for route in members if not is_expert(route, experts)]
    return share_of(dense, divided, setting, tp=deployment.tp), share_of(local, parts, setting) if local else None


def _plan_stage(index: int, dense: Share, spread: Share | None, deployment: Deployment, setting: Setting) -> Stage:
    stage = Stage(index, (), deployment, setting)
    planned: list[Planned] = []
    base = None
    if spread is not None:
        # Experts bring their own ranks; a group size that the user gave is the dense buffer's.
        own = setting.owned(group_size=None) if isinstance(setting.config, OwnedConfig) else setting
        experts = plan_share("experts", spread, deployment.expert_dp, own)
        planned.append(experts)
        base = [experts.loads[stage.place(experts, rank * deployment.tp)] for rank in range(deployment.dp)]
    if dense.grouping.groups:
        planned.insert(0, plan_share("dense", dense, deployment.dp, setting, base))
    if not any(each.part for each in planned):
        raise ValueError(f"stage {index} has no matrix to plan; name some with --include, or train it with AdamW")
    return replace(stage, planned=tuple(planned))
