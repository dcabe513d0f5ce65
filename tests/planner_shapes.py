"""Matrices of four public models, and what Megatron-Core's own planner gave for them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import public_models
from lwopt_backend.plan import Atom
from lwopt_backend.plan.cost import newton_schulz_flops

EXCERPT = Path(__file__).parent / "data" / "megatron_planner.csv"
ALL_FIGURES = Path(public_models.__file__).with_name("megatron_planner.csv")


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


def figures(path: Path) -> list[Figures]:
    with path.open() as file:
        return [
            Figures(
                row["model"],
                row["flavour"],
                int(row["world_size"]),
                None if row["bucket_size"] == "None" else int(row["bucket_size"]),
                int(row["megatron_buckets"]),
                int(row["megatron_buffer_numel"]),
                float(row["megatron_cost_imbalance"]),
                float(row["compact_pingpong_cost_imbalance"]),
            )
            for row in csv.DictReader(file)
        ]


@cache
def model(name: str, flavour: str = "hf") -> tuple[Atom, ...]:
    """A public model's matrices in model order, as the benchmark has them."""
    return tuple(public_models.atoms(name, flavour))


def atoms_of(shapes: list[tuple[int, int]]) -> list[Atom]:
    """Three matrices a layer."""
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]
