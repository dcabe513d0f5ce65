"""Steps that are run on this machine's own cores beside what the model says of them: ``simulate.py --validate``.

What a system does per step, on real collectives with real Newton-Schulz. Gradients are taken to be there; a step is
what follows backward.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from plans import ping_pong
from simulate_systems import compare, megatron_plan
from torch import Tensor

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import BufferPlan
from lwopt_backend.plan.cost import MACHINES, CostModel, Machine, StepTime
from lwopt_backend.plan.layouts import FlatPartition
from lwopt_backend.planner.models import ModelShapes, Training
from lwopt_backend.planner.part import Part
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route
from lwopt_backend.rules import newton_schulz
from lwopt_backend.runtime.collectives import TorchCollectives, join, leave

LAYERS, WIDTH = 6, 384
BUCKET_NUMEL = 2_000_000
PROBES = (50_000, 4_000_000)  # elements of the two gathers that give latency and bandwidth
REPEATS = 9


@dataclass(frozen=True, slots=True)
class Validated:
    """One system's step on this machine: modelled and median measured seconds."""

    system: str
    modelled: StepTime
    measured: float

    @property
    def ratio(self) -> float:
        return self.modelled.total / self.measured


def validate(ranks: int) -> tuple[Machine, list[Validated]]:
    """Run every system's step on ``ranks`` processes of this machine, and model it by what its parts took alone.

    The model gets three measurements: each shape's Newton-Schulz, and gathers of two sizes for latency and bandwidth
    (an all-gather's and a reduce-scatter's mean). What is compared is whether they add up to steps. Returns the
    machine as measured, too.
    """
    model = gpt_matrices(LAYERS, WIDTH)
    parts = {layout: _our_ranks(model, ranks, MACHINES["cpu"], layout) for layout in ("padded", "compact")}
    measured = _run(ranks, _schedules(parts, ranks))
    machine = _machine(measured, ranks)
    cost = CostModel("measured", "ns", lambda shape: round(1e9 * measured.shapes[shape]), "on this machine")
    modelled: dict[str, StepTime] = {}
    for layout in parts:
        part = _our_ranks(model, ranks, machine, layout, cost)
        figures = compare(part, _setting(machine, layout, ranks, cost))
        modelled |= {f"ours, {layout}" if f.system == "ours" else f.system: f.time for f in figures}
    return machine, [Validated(name, modelled[name], seconds) for name, seconds in measured.steps.items()]


def _setting(machine: Machine, layout: str, ranks: int, cost: CostModel | None = None) -> Setting:
    options = {"layout": layout, "bucket_mb": 4 * BUCKET_NUMEL / 2**20, "group_size": ranks}
    return Setting.of("owned", machine, cost, options, grad_dtype="float32", plans_for=MACHINES["cpu"])


def _our_ranks(model: ModelShapes, ranks: int, machine: Machine, layout: str, cost: CostModel | None = None) -> Part:
    study = plan_study(model, Deployment(ranks), _setting(machine, layout, ranks, cost))
    return study.worst.parts[0]


def gpt_matrices(layers: int, width: int) -> ModelShapes:
    """The matrices of a small GPT, in model order."""
    d = width
    shapes = {"qkv": (3 * d, d), "o": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    routes = [
        Route(f"h.{layer}.{name}", shape, "matrix", "2-D weight")
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    return ModelShapes("a small GPT", *Training().of(routes))


def _run(ranks: int, schedules: Sequence[Schedule]) -> Measured:
    """The schedules on ``ranks`` new processes; rank 0's medians."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as processes,
    ):
        meeting_point = str(Path(folder) / "ranks")
        arguments = (ranks, meeting_point, schedules, PROBES, REPEATS)
        running = [processes.submit(run_trial, rank, *arguments) for rank in range(ranks)]
        return [future.result() for future in running][0]


def _machine(measured: Measured, ranks: int) -> Machine:
    """Latency and bandwidth from the mean of gathers and scatters of two sizes."""
    small, large = ((gather + scatter) / 2 for gather, scatter in zip(measured.gathers, measured.scatters))
    sent = [4 * numel * (ranks - 1) / ranks for numel in measured.numels]
    bandwidth = (sent[1] - sent[0]) / max(large - small, 1e-9)
    rounds = max(1, (ranks - 1).bit_length())
    latency = max(0.0, small - sent[0] / bandwidth) / rounds
    return Machine("this machine", MACHINES["cpu"].flops_per_second, bandwidth, latency)


def _schedules(parts: Mapping[str, Part], ranks: int) -> list[Schedule]:
    """Every system's step; ``parts`` are ours by layout."""
    atoms = next(iter(parts.values())).atoms
    numel = sum(atom.numel for atom in atoms)
    everything = tuple(tuple(atoms) for _ in range(ranks))
    flat = FlatPartition.build([atom.numel for atom in atoms], ranks)
    touched: list[list[Atom]] = [[] for _ in range(ranks)]
    for index, atom in enumerate(atoms):
        for fragment in flat.fragments(index):
            touched[fragment.rank].append(atom)
    owners = ping_pong([atom.numel for atom in atoms], ranks)
    dealt = [[atom for atom, owner in zip(atoms, owners) if owner == rank] for rank in range(ranks)]
    return [
        *(Schedule(f"ours, {layout}", "scatter", _buckets(part, ranks)) for layout, part in parts.items()),
        Schedule("Megatron padded", "scatter", _buckets(megatron_plan(atoms, ranks, BUCKET_NUMEL), ranks)),
        Schedule("Megatron compact", "all", _evenly(numel, max(1, numel // BUCKET_NUMEL), dealt)),
        Schedule("DeepSpeed Muon ZeRO-1", "all", (Bucket(numel, numel, tuple(map(tuple, touched))),)),
        Schedule("replicated", "all", (Bucket(numel, 0, everything),)),
    ]


def _buckets(plan: Part | BufferPlan, ranks: int) -> tuple[Bucket, ...]:
    work: list[list[list[Atom]]] = [[[] for _ in range(ranks)] for _ in plan.bucket_numels]
    for atom, owner, bucket in zip(plan.atoms, plan.owners, plan.buckets):
        work[bucket][owner].append(atom)
    return tuple(Bucket(n, n, tuple(map(tuple, here))) for n, here in zip(plan.bucket_numels, work))


def _evenly(numel: int, buckets: int, dealt: Sequence[Sequence[Atom]]) -> tuple[Bucket, ...]:
    """``numel`` in equal buckets; all work with the last one."""
    nothing: tuple[tuple[Atom, ...], ...] = tuple(() for _ in dealt)
    sizes = [numel * (i + 1) // buckets - numel * i // buckets for i in range(buckets)]
    last = tuple(map(tuple, dealt))
    return tuple(Bucket(n, n, last if i == buckets - 1 else nothing) for i, n in enumerate(sizes))


# What a rank does.

JORDAN = (3.4445, -4.7750, 2.0315)  # any coefficients take as long
STEPS = 5


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels together: elements to reduce and to return, padding included, and each rank's matrices."""

    reduced: int
    returned: int
    work: tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A system's step. ``reduce`` is "scatter" (to owners) or "all"; nothing returns where ``returned`` is 0."""

    system: str
    reduce: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in seconds: of each shape's Newton-Schulz, of gathering ``numels`` fp32 elements, of each schedule."""

    shapes: dict[tuple[int, int], float]
    numels: tuple[int, ...]
    gathers: tuple[float, ...]
    scatters: tuple[float, ...]
    steps: dict[str, float]


def run_trial(
    rank: int, world_size: int, meeting_point: str, schedules: Sequence[Schedule], numels: Sequence[int], repeats: int
) -> Measured:
    """Called on all ranks, each its own process. All ranks compute at once, as they would in training."""
    torch.set_num_threads(1)
    collectives = join(rank, world_size, meeting_point)
    try:
        atoms = {atom.shape: atom for s in schedules for b in s.buckets for work in b.work for atom in work}
        actions: dict[Hashable, Callable[[], None]] = {}
        actions |= {("shape", shape): partial(_work, [atom]) for shape, atom in sorted(atoms.items())}
        actions |= {("gather", numel): partial(_gather, collectives, numel) for numel in numels}
        actions |= {("scatter", numel): partial(_scatter, collectives, numel) for numel in numels}
        actions |= {("step", s.system): partial(_step, collectives, s) for s in schedules}
        medians = _medians(actions, collectives, repeats)
        return Measured(
            {shape: medians["shape", shape] for shape in atoms},
            tuple(numels),
            tuple(medians["gather", numel] for numel in numels),
            tuple(medians["scatter", numel] for numel in numels),
            {s.system: medians["step", s.system] for s in schedules},
        )
    finally:
        leave()


def _medians(
    actions: Mapping[Hashable, Callable[[], None]], collectives: TorchCollectives, repeats: int
) -> dict[Hashable, float]:
    """Medians of the slowest rank's seconds. In rounds of all actions: a machine that slows down does so for all."""
    seconds: dict[Hashable, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            collectives.barrier()
            start = time.perf_counter()
            action()
            seconds[name].append(max(collectives.gather_objects(time.perf_counter() - start)))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first round warms up


def _step(collectives: TorchCollectives, schedule: Schedule) -> None:
    """All reductions, all work, all returns: nothing overlaps, and no rank waits for another's share of a bucket."""
    for bucket in schedule.buckets:
        if schedule.reduce == "all":
            collectives.all_reduce(_buffer(bucket.reduced, collectives.world_size, torch.float32))
        else:
            _scatter(collectives, bucket.reduced)
    for bucket in schedule.buckets:
        _work(bucket.work[collectives.rank])
    for bucket in schedule.buckets:
        if bucket.returned:
            _gather(collectives, bucket.returned, torch.bfloat16)


def _work(atoms: Sequence[Atom]) -> None:
    for atom in atoms:
        newton_schulz(torch.ones(atom.shape), steps=STEPS, coefficients=JORDAN, eps=1e-7, dtype=torch.bfloat16)


def _scatter(collectives: TorchCollectives, numel: int) -> None:
    sent = _buffer(numel, collectives.world_size, torch.float32)
    mine = _buffer(sent.numel() // collectives.world_size, 1, torch.float32)
    collectives.reduce_scatter_parts(mine, sent.chunk(collectives.world_size), sent).wait()


def _gather(collectives: TorchCollectives, numel: int, dtype: torch.dtype = torch.float32) -> None:
    received = _buffer(numel, collectives.world_size, dtype)
    collectives.all_gather(received, _buffer(received.numel() // collectives.world_size, 1, dtype))


@cache
def _buffer(numel: int, parts: int, dtype: torch.dtype) -> Tensor:
    """Zeros that divide into ``parts``; kept, as an engine keeps its buffers."""
    return torch.zeros(-(-numel // parts) * parts, dtype=dtype)
