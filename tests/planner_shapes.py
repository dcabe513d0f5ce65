"""Matrices of four public models, Megatron-Core's own plans for them, and what every plan of a buffer must be."""

import ast
import csv
import hashlib
import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks import public_models
from benchmarks.plans import estimated_loads, problems
from lwopt_backend.plan import Atom, FlatPartition, MatrixPlan, MeshLayout, Sharding, plan_matrices, plan_spread
from lwopt_backend.plan.buffers.layout import BufferPlan, imbalance
from lwopt_backend.plan.buffers.packing import plan_compact, plan_padded
from lwopt_backend.plan.buffers.step import buffer_step
from lwopt_backend.plan.cost import CLUSTERS, COSTS, MACHINES, newton_schulz_flops


class Figures(NamedTuple):
    """What Megatron-Core planned for a model, measured by its own code."""

    model: str
    flavour: str
    ranks: int
    bucket_numel: int | None
    buckets: int
    buffer_numel: int
    imbalance: float  # of l s^2, four decimals
    ping_pong: float  # imbalance of its compact layout

    @property
    def name(self) -> str:
        return "-".join(map(str, self[:4]))


COLUMNS = ("world_size", "bucket_size", "megatron_buckets", "megatron_buffer_numel", "megatron_cost_imbalance")


@cache
def figures() -> list[Figures]:
    numbers = (*COLUMNS, "compact_pingpong_cost_imbalance")
    with Path(public_models.__file__).with_name("megatron_planner.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [Figures(row["model"], row["flavour"], *(ast.literal_eval(row[n]) for n in numbers)) for row in rows]


@cache
def model(name: str, flavour: str = "hf") -> tuple[Atom, ...]:
    """A public model's matrices in model order, as the benchmark has them."""
    return tuple(public_models.atoms(name, flavour))


def atoms_of(shapes: Sequence[tuple[int, int]]) -> list[Atom]:
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]


def seconds(plan: BufferPlan) -> float:
    return buffer_step(plan, CLUSTERS["h100-8x-ib"], COSTS["newton_schulz"]).total


def planned(atoms: Sequence[Atom], ranks: int, bucket_numel: int | None) -> BufferPlan:
    return plan_padded(atoms, ranks, bucket_numel=bucket_numel, seconds=seconds)


def aligned(numel: int, multiple: int = 64) -> int:
    return -(-numel // multiple) * multiple


def unevenness(plan: BufferPlan) -> float:
    """As Megatron-Core counts it, in four decimals."""
    return round(imbalance(estimated_loads(plan)), 4)


def assert_lawful(plan: BufferPlan) -> None:
    """Every matrix in one shard of one bucket, no bucket empty, and room for aligned matrices but no more."""
    assert problems(plan) == []
    assert set(plan.buckets) == set(range(len(plan.shard_numels)))
    ends: dict[tuple[int, int], int] = {}
    for atom, bucket, owner in zip(plan.atoms, plan.buckets, plan.owners):
        ends[bucket, owner] = aligned(ends.get((bucket, owner), 0)) + atom.numel
    for bucket, numel in enumerate(plan.shard_numels):
        assert numel * plan.shards % math.lcm(plan.shards, 128) == 0 and numel % 64 == 0
        fullest = max(end for (b, _), end in ends.items() if b == bucket)
        assert fullest <= numel < aligned(fullest) + math.lcm(64, 128)


# Plans of every kind
UNEVEN_SHAPES = [(63, 24), (41, 63), (24, 41), (1, 5), (5, 1), (96, 96), (7, 300), (300, 7), (2, 2), (64, 64)]


def plan_of(shapes: list[tuple[int, int]], world_size: int, policy: str, bucket_numel: int = 3000) -> MatrixPlan:
    atoms = atoms_of(shapes)
    layout = FlatPartition.build([atom.numel for atom in atoms], world_size)
    machine = MACHINES["cpu"]
    return plan_matrices(atoms, layout, policy=policy, machine=machine, bucket_numel=bucket_numel, element_bytes=2)


def rows_over(shapes: Sequence[tuple[int, int]], ranks: int, sharding: type[Sharding] = Sharding) -> MeshLayout:
    kinds = {shape: sharding(shape, (ranks,), (0,), (False,)) for shape in set(shapes)}
    return MeshLayout(tuple((rank,) for rank in range(ranks)), tuple(kinds[shape] for shape in shapes))


def everything() -> str:
    """Plans of every kind, of which none may hang on the order of a set."""
    draw = random.Random(0)
    kinds = [(64 * draw.randint(1, 64), 64 * draw.randint(1, 64)) for _ in range(20)]
    kinds += [(128, 1024), (256, 512), (64, 2048), (2048, 1024), (4096, 512)]  # equal sizes, other costs
    atoms, many = atoms_of([draw.choice(kinds) for _ in range(500)]), UNEVEN_SHAPES * 20
    buffers = [planned(atoms, 24, None), planned(atoms[:80], 8, 20_000_000), plan_compact(atoms, 24, bucket_numel=None)]
    found = [repr((plan.strategy, plan.owners, plan.buckets, plan.shard_numels)) for plan in buffers]
    spread = plan_spread(atoms_of(many), rows_over(many, 16))
    lines = [*plan_of(many, 16, "balance").lines(), *spread.lines(), *found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
