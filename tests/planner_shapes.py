"""Matrices of four public models, Megatron-Core's own plans for them, and what every plan of a buffer must be."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import public_models
from lwopt_backend.plan import Atom
from lwopt_backend.plan.buffers.layout import BufferPlan, imbalance
from lwopt_backend.plan.buffers.megatron import capped_shards, closing_rule
from lwopt_backend.plan.buffers.padded import plan_padded
from lwopt_backend.plan.buffers.step import buffer_step
from lwopt_backend.plan.buffers.stream import Stream
from lwopt_backend.plan.cost import COSTS, newton_schulz_flops
from lwopt_backend.plan.machine import CLUSTERS


@dataclass(frozen=True)
class Figures:
    """What Megatron-Core planned for a model, measured by its own code."""

    model: str
    flavour: str
    ranks: int
    bucket_numel: int | None
    buckets: int
    buffer_numel: int
    imbalance: float  # of l s^2, four decimals
    ping_pong: float  # imbalance of its compact layout

    def __str__(self) -> str:
        return f"{self.model}-{self.flavour}-{self.ranks}-{self.bucket_numel}"


@cache
def figures() -> list[Figures]:
    numbers = (
        "megatron_buckets",
        "megatron_buffer_numel",
        "megatron_cost_imbalance",
        "compact_pingpong_cost_imbalance",
    )
    with Path(public_models.__file__).with_name("megatron_planner.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        Figures(
            *(row["model"], row["flavour"], int(row["world_size"])),
            None if row["bucket_size"] == "None" else int(row["bucket_size"]),
            *(kind(row[number]) for kind, number in zip((int, int, float, float), numbers)),
        )
        for row in rows
    ]


@cache
def model(name: str, flavour: str = "hf") -> tuple[Atom, ...]:
    """A public model's matrices in model order, as the benchmark has them."""
    return tuple(public_models.atoms(name, flavour))


def atoms_of(shapes: Sequence[tuple[int, int]]) -> list[Atom]:
    """Three matrices a layer."""
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]


def seconds(plan: BufferPlan) -> float:
    return buffer_step(plan, CLUSTERS["h100-8x-ib"], COSTS["newton_schulz"]).total


def planned(atoms: Sequence[Atom], ranks: int, bucket_numel: int | None) -> BufferPlan:
    return plan_padded(atoms, ranks, bucket_numel=bucket_numel, seconds=seconds)


def aligned(numel: int, multiple: int = 64) -> int:
    return -(-numel // multiple) * multiple


def of_megatron(atoms: Sequence[Atom], ranks: int, bucket_numel: int | None) -> BufferPlan:
    """Megatron-Core's plan, its sizes summed up anew. A bucket ends on a multiple of its ranks and of 128 elements."""
    stream = Stream(atoms)
    cuts = closing_rule(stream, ranks, bucket_numel)
    owners = capped_shards(stream, cuts, ranks)
    backward = list(reversed(atoms))
    buckets = [bucket for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])) for _ in range(start, stop)]
    sizes = []
    for start, stop in zip(cuts, cuts[1:]):
        filled = [0] * ranks
        for atom, owner in zip(backward[start:stop], owners[start:stop]):
            filled[owner] += aligned(atom.numel)
        sizes.append(aligned(max(filled) * ranks, math.lcm(ranks, 128)) // ranks)
    forward = tuple(reversed(owners)), tuple(reversed(buckets))
    return BufferPlan("padded", "by hand", tuple(atoms), ranks, *forward, tuple(sizes))


def amounts(atoms: Sequence[Atom], measure: str) -> list[int]:
    """By cost, or by Megatron-Core's estimate: the long side times the square of the short one."""
    return [atom.cost if measure == "cost" else max(atom.shape) * min(atom.shape) ** 2 for atom in atoms]


def loads(plan: BufferPlan, measure: str) -> list[int]:
    sums = [0] * plan.shards
    for amount, owner in zip(amounts(plan.atoms, measure), plan.owners):
        sums[owner] += amount
    return sums


def unevenness(plan: BufferPlan) -> float:
    """As Megatron-Core counts it, in four decimals."""
    return round(imbalance(loads(plan, "estimate")), 4)


def assert_lawful(plan: BufferPlan) -> None:
    """Every matrix in one shard of one bucket, buckets in backward order, and room for aligned matrices."""
    assert plan.problems() == []
    assert len(plan.owners) == len(plan.buckets) == len(plan.atoms)
    assert all(0 <= owner < plan.shards for owner in plan.owners)
    assert plan.buckets[-1] == 0, "the last matrix has the first gradient"
    steps = [earlier - later for earlier, later in zip(plan.buckets, plan.buckets[1:])]
    assert set(steps) <= {0, 1}, "contiguous, none empty"
    assert plan.buckets[0] == len(plan.shard_numels) - 1
    ends: dict[tuple[int, int], int] = {}
    for atom, bucket, owner in zip(plan.atoms, plan.buckets, plan.owners):
        ends[bucket, owner] = aligned(ends.get((bucket, owner), 0)) + atom.numel
    for bucket, numel in enumerate(plan.shard_numels):
        assert numel * plan.shards % math.lcm(plan.shards, 128) == 0 and numel % 64 == 0
        fullest = max(end for (b, _), end in ends.items() if b == bucket)
        assert fullest <= numel < aligned(fullest) + math.lcm(64, 128), "and no more room than that"


def assert_no_worse(plan: BufferPlan, reference: BufferPlan) -> None:
    assert plan.shards * sum(plan.shard_numels) <= reference.shards * sum(reference.shard_numels)
    for measure in ("cost", "estimate"):
        assert max(loads(plan, measure)) <= max(loads(reference, measure))
    finer = len(plan.shard_numels) >= len(reference.shard_numels)
    assert finer or max(plan.shard_numels) <= max(reference.shard_numels)
