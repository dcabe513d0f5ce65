"""Other systems on the same matrices and the same cost model, to be compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import BufferPlan, Stream, aligned_shard
from lwopt_backend.plan.buffers.padded import capped_shards, closing_rule, ping_pong
from lwopt_backend.plan.buffers.placement import Placement
from lwopt_backend.plan.buffers.step import buffer_step
from lwopt_backend.plan.cost import MACHINES, CostModel, Machine, StepTime, all_reduce_seconds, gather_seconds
from lwopt_backend.plan.layouts import FlatPartition
from lwopt_backend.planner.models import ModelShapes, Training
from lwopt_backend.planner.part import Part, owned_atoms, workspace
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route
from lwopt_backend.runtime.trial import Bucket, Measured, Schedule, run_trial

SYSTEMS = (
    "ours",
    "Megatron padded",
    "Megatron compact",
    "DeepSpeed Muon ZeRO-1",
    "DeepSpeed Muon ZeRO-2",
    "replicated",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One system on ``ranks`` ranks: modelled seconds of a step, and bytes at its peak, of the worst rank's matrices.

    ``work_ratio`` is all ranks' work over that of one process: what is orthogonalized more than once counts again.
    """

    system: str
    ranks: int
    time: StepTime
    memory: int
    work_ratio: float
    detail: str


def compare(part: Part, setting: Setting) -> list[Figure]:
    """Every system on the matrices of ``part``, which is ours, over its data-parallel ranks; ours first."""
    atoms, ranks = part.atoms, part.ranks
    return [
        _ours(part),
        _megatron_padded(atoms, ranks, setting),
        _megatron_compact(atoms, ranks, setting),
        _deepspeed(atoms, ranks, setting, stage=1),
        _deepspeed(atoms, ranks, setting, stage=2),
        _replicated(atoms, ranks, setting),
    ]


def _ours(part: Part) -> Figure:
    memory = max(memory.peak for memory in part.memory)
    how = f"{part.layout}, groups of {part.group_size}"
    return Figure("ours", part.ranks, part.time, memory, part.ranks // part.group_size, how)


def megatron_plan(atoms: Sequence[Atom], ranks: int, bucket_numel: int | None) -> BufferPlan:
    """The padded layout that Megatron-Core's own rules give."""
    stream = Stream(atoms)
    cuts = closing_rule(stream, ranks, bucket_numel)
    owners = capped_shards(stream, cuts, ranks)
    heights = Placement.of(stream, cuts, stream.costs, owners, ranks).heights
    bucket_of = [bucket for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])) for _ in range(start, stop)]
    shards = tuple(aligned_shard(height, ranks) for height in heights)
    return BufferPlan("padded", "megatron", tuple(atoms), ranks, tuple(owners[::-1]), tuple(bucket_of[::-1]), shards)


def _megatron_padded(atoms: Sequence[Atom], ranks: int, setting: Setting) -> Figure:
    plan = megatron_plan(atoms, ranks, setting.bucket_numel)
    time = buffer_step(plan, setting.machine, setting.work, elements=setting.elements)
    memory = (
        plan.buffer_numel * (setting.elements.parameter + setting.elements.gradient)
        + _owner_bytes(plan, setting)
        + workspace(atoms)
    )
    return Figure("Megatron padded", ranks, time, memory, 1.0, f"{plan.padding:.0%} padding")


def _megatron_compact(atoms: Sequence[Atom], ranks: int, setting: Setting) -> Figure:
    """No padding, owners by ping-pong; gradients are all-reduced, parameters return by a variable all-gather."""
    owners = ping_pong([atom.numel for atom in atoms], ranks)
    plan = BufferPlan(
        "compact", "ping-pong", tuple(atoms), ranks, tuple(owners), (0,) * len(atoms), (aligned_shard(1, ranks),)
    )
    buckets = max(1, plan.numel // setting.bucket_numel)
    wires = [
        all_reduce_seconds(setting.machine, plan.numel * setting.elements.gradient, ranks),
        gather_seconds(setting.machine, plan.numel * setting.elements.parameter, ranks),
    ]
    compute = setting.seconds(max(plan.loads()))
    time = StepTime(compute, sum(wire for wire, _ in wires), buckets * sum(latency for _, latency in wires))
    memory = (
        plan.numel * (setting.elements.parameter + setting.elements.gradient)
        + _owner_bytes(plan, setting)
        + workspace(atoms)
    )
    return Figure("Megatron compact", ranks, time, memory, 1.0, "ping-pong owners")


def _owner_bytes(plan: BufferPlan, setting: Setting) -> int:
    return max(plan.owned_numels()) * (setting.elements.master + setting.elements.state)


def _deepspeed(atoms: Sequence[Atom], ranks: int, setting: Setting, *, stage: int) -> Figure:
    """DeepSpeed's own Muon: a rank orthogonalizes every matrix that its partition touches, and keeps its momentum."""
    layout = FlatPartition.build([atom.numel for atom in atoms], ranks)
    loads, momenta = [0] * ranks, [0] * ranks
    for index, atom in enumerate(atoms):
        for fragment in layout.fragments(index):
            loads[fragment.rank] += atom.cost
            momenta[fragment.rank] += atom.numel
    numel, part, e = sum(layout.numels), layout.partition_numel, setting.elements
    wire = [
        all_reduce_seconds(setting.machine, e.gradient * numel, ranks),
        gather_seconds(setting.machine, e.parameter * numel, ranks),
    ]
    compute = setting.seconds(max(loads))
    time = StepTime(compute, sum(seconds for seconds, _ in wire), sum(latency for _, latency in wire))
    gradients = e.gradient * (numel if stage == 1 else part)
    fp32 = (e.master + 4) * part  # masters, and the step's copy of the gradients
    memory = e.parameter * numel + gradients + fp32 + e.state * max(momenta) + workspace(atoms)
    ratio = sum(loads) / max(1, sum(atom.cost for atom in atoms))
    return Figure(f"DeepSpeed Muon ZeRO-{stage}", ranks, time, memory, ratio, "cut matrices twice")


def _replicated(atoms: Sequence[Atom], ranks: int, setting: Setting) -> Figure:
    """Plain data parallelism: every rank does everything."""
    numel = sum(atom.numel for atom in atoms)
    wire, latency = all_reduce_seconds(setting.machine, setting.elements.gradient * numel, ranks)
    total = sum(atom.cost for atom in atoms)
    compute = setting.seconds(total)
    e = setting.elements
    memory = numel * (e.parameter + e.gradient + e.master + e.state) + workspace(atoms)
    return Figure("replicated", ranks, StepTime(compute, wire, latency), memory, float(ranks), "all everywhere")


# How far the model can be trusted: the systems' steps predicted, and run on this machine's own cores.

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
    dealt = owned_atoms(atoms, ping_pong([atom.numel for atom in atoms], ranks), ranks)
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
