"""Matrices of four public models, and what Megatron-Core's own planner gave for them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lwopt_backend.plan import Atom
from lwopt_backend.plan.cost import newton_schulz_flops

EXCERPT = Path(__file__).parent / "data" / "megatron_planner.csv"
ALL_FIGURES = Path(__file__).parents[1] / "benchmarks" / "megatron_planner.csv"  # not where only tests are installed

Named = tuple[str, tuple[int, int]]


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
    """A model's matrices in model order: "hf" q, k, v, gate, up apart; "mcore_fused" qkv and fc1 fused."""
    if flavour not in ("hf", "mcore_fused"):
        raise ValueError(f"unknown flavour {flavour!r}; expected 'hf' or 'mcore_fused'")
    named = list(MODELS[name](flavour == "mcore_fused"))
    return tuple(Atom(name, shape, newton_schulz_flops(shape)) for name, shape in named)


def atoms_of(shapes: list[tuple[int, int]]) -> list[Atom]:
    """Three matrices a layer."""
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]


def _gpt2(fused: bool) -> Iterator[Named]:
    for i in range(12):
        shapes = {"qkv": (2304, 768), "o": (768, 768), "up": (3072, 768), "down": (768, 3072)}
        yield from ((f"h.{i}.{part}", shape) for part, shape in shapes.items())


def _glu(prefix: str, width: int, hidden: int, fused: bool) -> Iterator[Named]:
    first = {"fc1": 2 * hidden} if fused else {"gate": hidden, "up": hidden}
    yield from ((prefix + part, (rows, width)) for part, rows in first.items())
    yield prefix + "down", (width, hidden)


def _dense(layers: int, width: int, heads: int, hidden: int, fused: bool) -> Iterator[Named]:
    """Grouped-query attention with 8 key and value heads of 128, and a gated MLP."""
    q, kv = heads * 128, 8 * 128
    for i in range(layers):
        rows = {"qkv": q + 2 * kv} if fused else {"q": q, "k": kv, "v": kv}
        yield from ((f"layers.{i}.{part}", (r, width)) for part, r in rows.items())
        yield f"layers.{i}.o", (width, q)
        yield from _glu(f"layers.{i}.", width, hidden, fused)


def _deepseek(fused: bool) -> Iterator[Named]:
    attention = {"q_a": (1536, 7168), "q_b": (24576, 1536), "kv_a": (576, 7168), "kv_b": (32768, 512)}
    attention["o"] = (7168, 16384)
    for i in range(61):
        yield from ((f"layers.{i}.{part}", shape) for part, shape in attention.items())
        if i < 3:
            yield from _glu(f"layers.{i}.", 7168, 18432, fused)
            continue
        yield f"layers.{i}.router", (256, 7168)
        for expert in [*range(256), "shared"]:
            yield from _glu(f"layers.{i}.{expert}.", 7168, 2048, fused)


MODELS = {
    "gpt2-124m": _gpt2,
    "llama3.1-8b": lambda fused: _dense(32, 4096, 32, 14336, fused),
    "qwen3-32b": lambda fused: _dense(64, 5120, 64, 25600, fused),
    "deepseek-v3": _deepseek,
}
