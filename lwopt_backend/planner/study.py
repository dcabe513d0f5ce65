"""A model on a cluster: the parameters of each stage under tensor, pipeline and expert parallelism, and its plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce

from lwopt_backend.plan.buckets import Timeline
from lwopt_backend.plan.cost import RankMemory, StepTime
from lwopt_backend.planner import EXPERTS
from lwopt_backend.planner.part import Part, Planned
from lwopt_backend.planner.setting import Setting, Share, share_of
from lwopt_backend.planner.shapes import ModelShapes
from lwopt_backend.planner.shares import plan_fsdp2_share, plan_plain_share, plan_zero_share
from lwopt_backend.routing.matrices import Divided
from lwopt_backend.routing.routing import Route
from lwopt_backend.runtime.agreement import plan_digest


def plan_share(name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None) -> Planned:
    """The plan of ``setting.engine`` over ``ranks`` ranks.

    ``base`` is each rank's other work, which DeepSpeed's groups ignore.
    """
    if setting.engine == "plain":
        return plan_plain_share(name, shared, ranks, setting, base)
    if setting.engine == "fsdp2":
        return plan_fsdp2_share(name, shared, ranks, setting, base)
    return plan_zero_share(name, shared, ranks, setting)


# How tensor, pipeline and expert parallelism spread a model over ranks.

EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")  # one expert's number in its parameters' names


@dataclass(frozen=True, slots=True)
class Deployment:
    """``world_size`` ranks: ``pp`` stages, each of ``tp`` x ``dp`` ranks; experts over ``ep`` of a stage's ranks.

    Experts are not cut by ``tp``. Raises ValueError if the numbers do not divide.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"world_size: expected a multiple of tp x pp = {self.tp} x {self.pp}, found {self.world_size}; give "
                f"the number of all ranks, e.g. {self.tp * self.pp * self.world_size} for {self.world_size} "
                "data-parallel ranks"
            )
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"ep: expected a divisor of the {self.stage_ranks} ranks of a pipeline stage, found {self.ep} "
                f"(world_size {self.world_size} / pp {self.pp}); world_size counts all ranks, not data-parallel ones"
            )

    @property
    def stage_ranks(self) -> int:
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """The number of ranks among which a dense matrix's owner is chosen."""
        return self.world_size // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """The number of ranks among which an expert matrix's owner is chosen."""
        return self.stage_ranks // self.ep


def stages(routes: Sequence[Route], pp: int) -> list[list[Route]]:
    """The parameters of each pipeline stage: whole layers, as evenly as possible, earlier stages the longer ones.

    A layer is the parameters with the same first number in their names. Those before the first layer join the first
    stage, those after the last one the last. Raises ValueError if there are fewer layers than stages.
    """
    if pp == 1:
        return [list(routes)]
    layers = sorted({int(number.group()) for r in routes if (number := re.search(r"\d+", r.name))})
    if len(layers) < pp:
        raise ValueError(f"pp: expected at most {len(layers)}, the layers in the parameters' names, found {pp}")
    sizes = [len(layers) // pp + (stage < len(layers) % pp) for stage in range(pp)]
    stage_of = dict(zip(layers, (stage for stage, size in enumerate(sizes) for _ in range(size))))
    found: list[list[Route]] = [[] for _ in range(pp)]
    last_seen = 0
    seen_layer = False
    for route in routes:
        number = re.search(r"\d+", route.name)
        if number:
            last_seen, seen_layer = stage_of[int(number.group())], True
        found[last_seen if number else (pp - 1 if seen_layer else 0)].append(route)
    return found


def is_expert(route: Route, pattern: str) -> bool:
    """Whether ``ep`` spreads a parameter, by a glob on its name."""
    return fnmatchcase(route.name, pattern)


def local_experts(
    routes: Sequence[Route], divided: Mapping[str, Divided], ep: int, pattern: str
) -> tuple[list[Route], dict[str, Divided]]:
    """One rank's share of the expert parameters among ``routes``: the first ``1/ep`` of every layer's.

    Also returns their matrices from ``divided``. Experts are counted by the number behind ``.experts.`` in their names,
    or by the first dimension of a stack. All ranks store equally many, so one stands for all. Raises ValueError if
    ``ep`` does not divide them.
    """

    experts = [route for route in routes if is_expert(route, pattern)]
    numbers = [EXPERT.search(route.name) for route in experts]
    stacked = [route for route, number in zip(experts, numbers) if number is None]
    for route in stacked:
        if len(route.shape) < 3 or route.shape[0] % ep:
            raise ValueError(
                f"ep {ep}: expected one numbered expert (...experts.<number>...), or a stack whose first dimension "
                f"{ep} divides; found {route.name!r} of shape {route.shape}"
            )
    count = 1 + max((int(number.group()) for number in numbers if number), default=-1)
    if count % ep:
        raise ValueError(f"ep: expected a divisor of the {count} experts of a layer, found {ep}")
    local = []
    parts = {}
    for route, number in zip(experts, numbers):
        if number is not None and int(number.group()) >= count // ep:
            continue
        local.append(route if number else replace(route, shape=(route.shape[0] // ep, *route.shape[1:])))
        if route.name not in divided:
            continue
        found = divided[route.name]
        if not number:  # a stack: its first slices
            slices = found.blocks[0].grid.slices // ep
            blocks = [replace(b, grid=replace(b.grid, slices=slices)) for b in found.blocks if b.slice < slices]
            found = replace(found, blocks=tuple(blocks))
        parts[route.name] = found
    return local, parts


# A study: one model on one deployment, with plans of every pipeline stage and both kinds of buffers.


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: the plans of what its ranks share, the dense parameters first."""

    index: int
    planned: tuple[Planned, ...]
    deployment: Deployment
    setting: Setting

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stage's matrices."""
        return tuple(each.part for each in self.planned if each.part is not None)

    @property
    def ranks(self) -> int:
        return self.deployment.stage_ranks

    @property
    def digest(self) -> str:
        """The plan digest; for one stage without ``tp`` and ``ep``, it is that of a run."""
        return plan_digest(self.lines())

    def lines(self) -> Iterator[str]:
        for each in self.planned:
            yield from each.lines

    def loads(self) -> list[int]:
        """Per rank of the stage, the cost of its matrices in all buffers."""
        sums = [0] * self.ranks
        for part in self.parts:
            loads = part.loads
            for rank in range(self.ranks):
                sums[rank] += loads[self.place(part, rank)]
        return sums

    def memory(self) -> list[RankMemory]:
        """Per rank of the stage, the memory of everything that is trained."""
        return [
            sum((each.memory(self.place(each, rank)) for each in self.planned), start=RankMemory())
            for rank in range(self.ranks)
        ]

    def place(self, shared: Part | Planned, rank: int) -> int:
        """The place of a stage's rank within its instance. Neighbours differ in tp or ep first, then in dp."""
        apart = self.deployment.ep if shared.name == "experts" else self.deployment.tp
        return rank // apart % shared.group_size

    @property
    def time(self) -> StepTime:
        """The step time of all buffers: work until the last rank is done, and all wires one after another."""
        both = [part.time for part in self.parts]
        busiest = max(self.setting.seconds(max(self.loads())), *(time.compute for time in both))
        return StepTime(busiest, sum(time.wire for time in both), sum(time.latency for time in both))

    @property
    def timeline(self) -> Timeline:
        """The modelled step of the optimizer, with transfers behind work where they can be: experts, then the rest."""
        return reduce(Timeline.then, (part.timeline for part in reversed(self.parts)))


@dataclass(frozen=True)
class Study:
    """All stages of a model on a deployment. ``worst``, the slowest, is shown."""

    routes: tuple[Route, ...]
    deployment: Deployment
    setting: Setting
    stages: tuple[Stage, ...]

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: (stage.time.total, -stage.index))

    @property
    def digest(self) -> str:
        """The plan digest; of several stages, the digest of their digests."""
        if len(self.stages) == 1:
            return self.stages[0].digest
        return plan_digest(f"stage {stage.index}: {stage.digest}" for stage in self.stages)


def plan_study(model: ModelShapes, deployment: Deployment, setting: Setting, *, experts: str = EXPERTS) -> Study:
    """Plan every stage of ``deployment``.

    ``experts`` is the glob of the parameters that expert parallelism spreads. Raises ValueError if a stage has no
    matrix, if numbers do not divide, or for tensor parallelism under DeepSpeed.
    """
    if deployment.tp > 1 and setting.engine.startswith("zero"):
        raise ValueError(
            f"--tp {deployment.tp} is not planned for engine {setting.engine!r}: names and shapes do not show how "
            "DeepSpeed's tensor parallelism cuts a matrix; "
            + ("stage 3 trains no such model." if setting.engine == "zero3" else "a run prints its plan.")
            + " Leave --tp out, or plan it for 'fsdp2'"
        )
    planned, divided = [], model.divided
    for index, members in enumerate(stages(model.routes, deployment.pp)):
        spread = None
        if deployment.ep > 1:
            local, parts = local_experts(members, divided, deployment.ep, experts)
            members = [route for route in members if not is_expert(route, experts)]
            spread = share_of(local, parts, setting) if local else None
        dense = share_of(members, divided, setting, tp=deployment.tp)
        planned.append(_plan_stage(index, dense, spread, deployment, setting))
    return Study(model.routes, deployment, setting, tuple(planned))


def _plan_stage(index: int, dense: Share, spread: Share | None, deployment: Deployment, setting: Setting) -> Stage:
    stage = Stage(index, (), deployment, setting)
    planned: list[Planned] = []
    base = None
    if spread is not None:
        experts = plan_share("experts", spread, deployment.expert_dp, setting.of_experts())
        planned.append(experts)  # planned first: dense matrices go to the ranks with the least work on experts
        # A dense owner is tp ranks, which take turns and lie next to each other; the first of them stands for all.
        base = [experts.loads[stage.place(experts, rank * deployment.tp)] for rank in range(deployment.dp)]
    if dense.grouping.groups:
        planned.insert(0, plan_share("dense", dense, deployment.dp, setting, base))
    if not any(each.part for each in planned):
        why = "name some with --include (add some to a list of shapes), or train it with AdamW"
        raise ValueError(f"stage {index}: expected a matrix to plan, found none; {why}")
    return replace(stage, planned=tuple(planned))
