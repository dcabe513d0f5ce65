"""Other systems on the same matrices and the same cost model: what ``simulate.py`` compares with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans import ping_pong

from lwopt_backend.config.hosts import OwnedConfig
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import BufferPlan, Stream, aligned_shard
from lwopt_backend.plan.buffers.packing import capped_shards, closing_rule
from lwopt_backend.plan.buffers.placement import Placement
from lwopt_backend.plan.buffers.step import buffer_step
from lwopt_backend.plan.cost import StepTime, all_reduce_seconds, gather_seconds
from lwopt_backend.plan.layouts import FlatPartition
from lwopt_backend.planner.part import Part, workspace
from lwopt_backend.planner.setting import Setting

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


def bucket_numel(setting: Setting) -> int:
    """The least elements of a bucket: as many as of owned storage."""
    config = setting.owned().config
    assert isinstance(config, OwnedConfig)
    return max(1, int(config.bucket_mb * 2**20 / setting.grad_dtype.itemsize))


def _megatron_padded(atoms: Sequence[Atom], ranks: int, setting: Setting) -> Figure:
    plan = megatron_plan(atoms, ranks, bucket_numel(setting))
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
    buckets = max(1, plan.numel // bucket_numel(setting))
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
