"""The cells of docs/performance.md: public models on clusters, by engine, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.clock.passes import Given
from benchmarks.clock.play import Played
from benchmarks.clock.shown import figures
from benchmarks.public_models import study
from lwopt_backend.planner.study import Study

TOKENS = 8192  # of a rank and step, where passes are played
ACTIVE = {"qwen3-30b-a3b": 8 / 128, "deepseek-v3": 8 / 256}  # the experts that a token passes
CELLS = (
    ("llama3.1-8b", 8),
    ("llama3.1-8b", 64),
    ("llama3.1-70b", 64),
    ("llama3.1-70b", 512),
    ("qwen3-30b-a3b", 64),
    ("deepseek-v3", 1024),
)
ONLY = {"deepseek-v3": ("FSDP2",)}
FITS = 0.75  # of a device's memory, which leaves room for the model's activations
HEADINGS = ("model, ranks", "engine", "buckets", "ms", "over own work", "over mean", "over bound", "wire ms", "hidden")


@dataclass(frozen=True)
class Way:
    """An engine with options, with the model's passes or without."""

    engine: str
    passes: bool = False
    attach: bool = False
    options: tuple[tuple[str, Any], ...] = ()


WAYS = {
    "ZeRO 1, 2": Way("zero1"),
    "ZeRO 3": Way("zero3"),
    "FSDP2": Way("fsdp2"),
    "FSDP2, with passes": Way("fsdp2", passes=True),
    "FSDP2, attached, with passes": Way("fsdp2", passes=True, attach=True),
    "owned, with passes": Way("owned", passes=True),
    "owned, overlap_param_gather, with passes": Way("owned", passes=True, options=(("overlap_param_gather", True),)),
}


def rows(predicted: Callable[..., Played], models: Sequence[str] = ()) -> Iterator[str]:
    """The table in Markdown, a line at a time; of ``models``, if any are named. ``predicted`` plays a study."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{' --- |' * len(HEADINGS)}"
    for model, ranks in CELLS:
        for name, way in WAYS.items():
            if (models and model not in models) or name not in ONLY.get(model, WAYS):
                continue
            planned = study(model, way.engine, ranks, stack=model in ACTIVE, options=dict(way.options))
            if way.engine != "owned" or _fits(planned):
                given = Given(TOKENS, ACTIVE.get(model, 1.0)) if way.passes else None
                yield _row(f"{model}, {ranks}", name, planned, predicted(planned, given=given, attach=way.attach))


def _fits(planned: Study) -> bool:
    memory = max(each.backward for each in planned.worst.memory())
    return memory <= FITS * planned.setting.machine.memory_bytes


def _row(cell: str, name: str, planned: Study, played: Played) -> str:
    found = figures(played)
    buckets = sum(len(part.bucket_numels) for part in planned.worst.parts)
    step = (found["seconds"] - found["given"]) * 1e3
    ratios = (f"{found[key]:.2f}" for key in ("over_busiest", "over_mean", "over_bound"))
    shown = (cell, name, buckets, f"{step:.1f}", *ratios, f"{found['wire'] * 1e3:.1f}", f"{found['hidden']:.0%}")
    return f"| {' | '.join(map(str, shown))} |"
