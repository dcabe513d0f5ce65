"""A study: one model on one deployment, every pipeline stage and both kinds of buffers planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lwopt_backend.plan.machine import StepTime
from lwopt_backend.plan.types import Atom
from lwopt_backend.routing import Route
from lwopt_backend.study.atoms import Split, as_trained, check_splits, make_atoms
from lwopt_backend.study.deployment import EXPERTS, Deployment, is_expert, local_experts, stages
from lwopt_backend.study.engines import elementwise_memory, plan_part
from lwopt_backend.study.part import Part, RankMemory, Setting


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: its buffers, and the element-wise elements of one of its ranks."""

    index: int
    parts: tuple[Part, ...]
    elementwise_numel: int
    deployment: Deployment
    setting: Setting

    @property
    def ranks(self) -> int:
        return self.deployment.stage_ranks

    def loads(self) -> list[int]:
        """Per rank of the stage, the cost of what it owns of all buffers."""
        sums = [0] * self.ranks
        for part in self.parts:
            for rank in range(self.ranks):
                sums[rank] += part.loads[self.place(part, rank)]
        return sums

    def memory(self) -> list[RankMemory]:
        """Per rank of the stage, of all buffers and of the element-wise parameters."""
        rest = elementwise_memory(self.elementwise_numel, self.deployment.dp, self.setting)
        return [
            sum((part.memory[self.place(part, rank)] for part in self.parts), start=rest) for rank in range(self.ranks)
        ]

    def place(self, part: Part, rank: int) -> int:
        """Which shard of ``part`` a rank of the stage is. Neighbours differ in tp first, and in ep, then in dp."""
        apart = self.deployment.ep if part.name == "experts" else self.deployment.tp
        return rank // apart % part.group_size

    @property
    def time(self) -> StepTime:
        """Of all buffers: the rank that is busiest in all of them together, wires one after the other."""
        busiest = self.setting.cost.seconds(max(self.loads()), self.setting.machine.flops_per_second)
        both = [part.time for part in self.parts]
        return StepTime(busiest, sum(time.wire for time in both), sum(time.latency for time in both))


@dataclass(frozen=True, slots=True)
class Study:
    """All stages of a model on a deployment. ``worst`` is the stage that takes longest, the one that is shown."""

    routes: tuple[Route, ...]
    deployment: Deployment
    setting: Setting
    stages: tuple[Stage, ...]

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: (stage.time.total, -stage.index))


def plan_study(
    routes: Sequence[Route],
    deployment: Deployment,
    setting: Setting,
    *,
    splits: Mapping[str, Split] | None = None,
    experts: str = EXPERTS,
) -> Study:
    """Plan every stage of ``deployment``; stages of equal shapes are planned once.

    ``experts`` is the glob of the parameters that expert parallelism spreads. Raises ValueError if a stage has no
    matrix, or numbers do not divide.
    """
    splits = splits or {}
    check_splits(routes, splits)
    routes, splits = as_trained(routes, splits)
    known: dict[tuple[object, ...], Stage] = {}
    planned = []
    for index, members in enumerate(stages(routes, deployment.pp)):
        dense, spread, rest = _buffers(members, deployment, setting, splits, experts)
        key = (tuple(_shapes(dense)), tuple(_shapes(spread)), rest)
        if key not in known:
            known[key] = _plan_stage(index, dense, spread, rest, deployment, setting)
        planned.append(_renamed(known[key], index, dense, spread))
    return Study(tuple(routes), deployment, setting, tuple(planned))


def _shapes(atoms: Sequence[Atom]) -> list[tuple[int, int]]:
    return [atom.shape for atom in atoms]


def _buffers(
    members: Sequence[Route],
    deployment: Deployment,
    setting: Setting,
    splits: Mapping[str, Split],
    experts: str,
) -> tuple[list[Atom], list[Atom], int]:
    """The dense atoms of a stage, the expert atoms of one of its ranks, and its element-wise elements."""
    spread = local_experts(members, deployment.ep, experts) if deployment.ep > 1 else []
    dense = [r for r in members if deployment.ep == 1 or not is_expert(r, experts)]
    dense_atoms, rest = make_atoms(dense, splits, setting.cost, tp=deployment.tp)
    spread_atoms, spread_rest = make_atoms(spread, splits, setting.cost)
    numel = sum(-(-math.prod(r.shape) // deployment.tp) for r in rest if r.kind != "frozen")
    return dense_atoms, spread_atoms, numel + sum(math.prod(r.shape) for r in spread_rest if r.kind != "frozen")


def _plan_stage(
    index: int, dense: list[Atom], spread: list[Atom], rest: int, deployment: Deployment, setting: Setting
) -> Stage:
    parts = []
    if spread:
        # Experts bring their own ranks; a group size that the user gave is the dense buffer's.
        parts.append(plan_part("experts", spread, deployment.expert_dp, replace(setting, group_size=None)))
    if dense or not spread:
        parts.append(plan_part("dense", dense, deployment.dp, setting))
    stage = Stage(index, tuple(reversed(parts)), rest, deployment, setting)
    return _dealt_around_experts(stage) if len(parts) == 2 else stage


def _dealt_around_experts(stage: Stage) -> Stage:
    """Dense shards renumbered, so that the heaviest lies where the experts leave most time.

    A shard's number is free: all buckets have equal shards, whichever rank holds them.
    """
    dense, spread = stage.parts
    if dense.layout == "host":
        return stage
    taken = [0] * dense.group_size
    for rank in range(stage.ranks):
        shard = stage.place(dense, rank)
        taken[shard] = max(taken[shard], spread.loads[stage.place(spread, rank)])
    freest = sorted(range(dense.group_size), key=lambda shard: (taken[shard], shard))
    heaviest = sorted(range(dense.group_size), key=lambda shard: (-dense.loads[shard], shard))
    place = dict(zip(heaviest, freest))
    source = {new: old for old, new in place.items()}
    dealt = replace(
        dense,
        owners=tuple(place[owner] for owner in dense.owners),
        loads=tuple(dense.loads[source[shard]] for shard in range(dense.group_size)),
        memory=tuple(dense.memory[source[shard]] for shard in range(dense.group_size)),
    )
    return replace(stage, parts=(dealt, spread))


def _renamed(stage: Stage, index: int, dense: list[Atom], spread: list[Atom]) -> Stage:
    """A stage of the same shapes with the names of its own matrices."""
    names = {"dense": tuple(dense), "experts": tuple(spread)}
    return replace(stage, index=index, parts=tuple(replace(part, atoms=names[part.name]) for part in stage.parts))
