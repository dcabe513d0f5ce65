"""A step of all ranks of a planned world on one clock: a prediction, from what the engine's own code does.

    python -m benchmarks.timeline --hf llama-70b/config.json --world-size 512 --engine zero3 --cluster h100-8x-ib
    python -m benchmarks.timeline --hf config.json --world-size 64 --engine fsdp2 --attach
    python -m benchmarks.timeline --table          the cells of docs/performance.md; --table llama3.1-8b, of some models

Other options than those below are those of `lwopt plan`. One rank is rehearsed as in benchmarks/rehearsal; what the
others do is generated from the plan. Devices and wires are the cluster's; see benchmarks/clock/play.py.

With --passes (or --attach) the model's backward pass is before the step, and hooks start exchanges in it. On engine
owned the next forward pass follows, which waits for the parameters. Passes have --tokens tokens a rank, and no products
of attention; --active is the share of a layer's experts that a token passes. --json writes the table's rows to a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.clock.generate import records
from benchmarks.clock.passes import Given, GivenPasses, ShardedPasses
from benchmarks.clock.play import Played, Rates, play
from benchmarks.clock.record import Session, opened
from benchmarks.clock.shown import figures, sentences, waits
from benchmarks.public_models import study
from benchmarks.rehearsal.__main__ import with_plan
from benchmarks.rehearsal.engines import MeshEngine, Passes
from lwopt_backend.cli.plan import studied
from lwopt_backend.engines.report import standard_output
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Study


def predicted(study: Study, *, given: Given | None = None, attach: bool = False) -> Played:
    """The step of all ranks of the stage that takes longest, with the passes ``given``. Raises ValueError for a stage
    whose ranks share several sets of parameters, and where passes are not known."""
    stage = study.worst
    if len(stage.planned) > 1:
        raise ValueError("--ep is not played; leave it out")
    (planned,) = stage.planned
    with opened(planned, study.setting, recorded_rank(planned)) as session:
        passes = passes_of(session, planned, study.setting, given)
        session.record()
        if attach:
            if not isinstance(session.engine, MeshEngine) or given is None:
                raise ValueError("--attach is for engine fsdp2, with the model's passes")
            session.engine.attach()
        return play([*records(session, session.record(passes))], Rates.of(study.setting.machine))


def recorded_rank(planned: Planned) -> int:
    """The rank to record: the busiest; among those with local matrices, if there are any."""
    assert planned.part is not None
    placed, loads = planned.part.placed, planned.part.loads
    alone = {owner for owner, bucket in zip(placed.owners, placed.buckets) if bucket < 0}
    return max(alone or range(len(loads)), key=lambda rank: (loads[rank], -rank))


def passes_of(session: Session, planned: Planned, setting: Setting, given: Given | None) -> Passes | None:
    if given is None:
        return None
    names = session.engine.names
    if isinstance(session.engine, MeshEngine):
        return ShardedPasses(given, session.tracer, names, planned.ranks, setting.grad_dtype.itemsize)
    return GivenPasses(given, session.tracer, names)


# The cells of docs/performance.md: public models on clusters, by engine.

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


def rows(models: Sequence[str] = ()) -> Iterator[list[str]]:
    """The table's rows, of ``models`` if any are named."""
    for model, ranks in CELLS:
        for name, way in WAYS.items():
            if (models and model not in models) or name not in ONLY.get(model, WAYS):
                continue
            planned = study(model, way.engine, ranks, stack=model in ACTIVE, options=dict(way.options))
            if way.engine == "owned" and not _fits(planned):
                continue
            given = Given(TOKENS, ACTIVE.get(model, 1.0)) if way.passes else None
            found = figures(predicted(planned, given=given, attach=way.attach))
            buckets = sum(len(part.bucket_numels) for part in planned.worst.parts)
            step = (found["seconds"] - found["given"]) * 1e3
            ratios = [f"{found[key]:.2f}" for key in ("over_busiest", "over_mean", "over_bound")]
            wire = [f"{found['wire'] * 1e3:.1f}", f"{found['hidden']:.0%}"]
            yield [f"{model}, {ranks}", name, str(buckets), f"{step:.1f}", *ratios, *wire]


def _fits(planned: Study) -> bool:
    memory = max(each.backward for each in planned.worst.memory())
    return memory <= FITS * planned.setting.machine.memory_bytes


def show_table(models: Sequence[str], path: Path | None) -> None:
    """Print the table in Markdown, a line at a time, and write its rows to ``path``."""
    found = []
    for row in [[*HEADINGS], ["---"] * len(HEADINGS)]:
        print(f"| {' | '.join(row)} |")
    for row in rows(models):
        print(f"| {' | '.join(row)} |", flush=True)
        found.append(row)
    if path:
        record.write(path, found)


def run(words: Sequence[str]) -> None:
    """Play as the command line ``words`` say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--active", type=float, default=1.0)
    parser.add_argument("--table", nargs="*", choices=sorted({model for model, _ in CELLS}))
    parser.add_argument("--json", type=Path)
    own, of_plan = parser.parse_known_args(words)
    if own.table is not None:
        show_table(own.table, own.json)
        return

    def command(**options: Any) -> None:
        model, study = studied(options)
        played_with = Given(own.tokens, own.active) if own.passes or own.attach else None
        played = predicted(study, given=played_with, attach=own.attach)
        console = standard_output()
        console.print(f"Model: {model.source}")
        console.print(f"{study.deployment.world_size} ranks of {study.setting.machine.name}, {study.setting.engine}")
        for sentence in sentences(played):
            console.print(sentence)
        console.print(waits(played))

    with_plan(of_plan, command, __doc__)


if __name__ == "__main__":
    run(sys.argv[1:])
