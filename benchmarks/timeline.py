"""A step of all ranks of a planned world on one clock: a prediction, from what the engine's own code does.

    python -m benchmarks.timeline                  the table of docs/cost.md, some minutes
    python -m benchmarks.timeline llama3.1-8b      some models

One rank is rehearsed as in benchmarks/rehearsal; what the others do is generated from the plan. Devices and wires are
the cluster's; see benchmarks/clock/play.py. Where the model's passes are played, the backward pass is before the step;
in plain PyTorch, hooks start reductions in it, and the next forward pass follows, which waits for the parameters.
Passes have no products of attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.clock.generate import records
from benchmarks.clock.passes import Given, GivenPasses, ShardedPasses
from benchmarks.clock.play import Played, Rates, play
from benchmarks.clock.record import Session, opened
from benchmarks.public_models import study
from benchmarks.rehearsal.engines import MeshEngine, Passes
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Study


def predicted(study: Study, *, given: Given | None = None) -> Played:
    """The step of all ranks of the stage that takes longest, with the passes ``given``. Raises ValueError for a stage
    whose ranks share several sets of parameters, and where passes are not known."""
    stage = study.worst
    if len(stage.planned) > 1:
        raise ValueError("--ep is not played; leave it out")
    (planned,) = stage.planned
    with opened(planned, study.setting, recorded_rank(planned)) as session:
        passes = passes_of(session, planned, study.setting, given)
        session.record()
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


# The cells of docs/cost.md: public models on clusters, by engine.

WITHIN = "FSDP2, experts by Shard(1)"
TOKENS = 8192  # of a rank and step, where passes are played
ACTIVE = {"qwen3-30b-a3b": 8 / 128, "deepseek-v3": 8 / 256}  # the experts that a token passes
CELLS: tuple[tuple[str, int, int], ...] = (  # models on copies of shards
    ("llama3.1-8b", 1, 8),
    ("llama3.1-8b", 1, 64),
    ("llama3.1-8b", 8, 8),
    ("llama3.1-70b", 1, 64),
    ("llama3.1-70b", 1, 512),
    ("qwen3-30b-a3b", 1, 64),
    ("qwen3-30b-a3b", 4, 64),
    ("deepseek-v3", 1, 1024),
)
ONLY = {"deepseek-v3": ("FSDP2", WITHIN)}
FITS = 0.75  # of a device's memory, which leaves room for the model's activations


WAYS: dict[str, dict[str, Any]] = {  # engines with options, and whether the model's passes are played; of one copy
    "ZeRO 1, 2": {"engine": "zero1"},
    "ZeRO 3": {"engine": "zero3"},
    "FSDP2": {"engine": "fsdp2"},
    "FSDP2, `ns_method` `auto`": {"engine": "fsdp2", "options": {"matrix": {"name": "muon", "ns_method": "auto"}}},
    "FSDP2, `ns_method` `quack-kernels`": {
        "engine": "fsdp2",
        "options": {"matrix": {"name": "muon", "ns_method": "quack-kernels"}},
    },
    WITHIN: {"engine": "fsdp2", "stack_dim": 1},
    "FSDP2, with passes": {"engine": "fsdp2", "passes": True},
    "plain, with passes": {"engine": "plain", "passes": True},
    "plain, overlap_param_gather, with passes": {
        "engine": "plain",
        "passes": True,
        "options": {"overlap_param_gather": True},
    },
}
HYBRID: dict[str, dict[str, Any]] = {  # HSDP, as the plan chooses, and both ways
    "FSDP2": {"engine": "fsdp2"},
    "FSDP2, share_copies": {"engine": "fsdp2", "options": {"share_copies": True}},
    "FSDP2, share_copies: false": {"engine": "fsdp2", "options": {"share_copies": False}},
}
ALL = {*WAYS, *HYBRID} - {WITHIN}


def rows(models: Sequence[str] = ()) -> Iterator[list[str]]:
    """The table's rows, of ``models`` if any are named: the model and its ranks, the engine, buckets, milliseconds of
    the step; the step over the busiest rank's own work, over the mean work, and with the passes over their bound; the
    wire's milliseconds, and the share that is hidden."""
    for model, copies, shards in CELLS:
        for name, way in (WAYS if copies == 1 else HYBRID).items():
            if (models and model not in models) or name not in ONLY.get(model, ALL):
                continue
            options = {**way.get("options", {}), **({"group_size": shards} if copies > 1 else {})}
            more = {"stack": model in ACTIVE, "stack_dim": way.get("stack_dim", 0)}
            planned = study(model, way["engine"], copies * shards, options=options, **more)
            if way["engine"] == "plain" and not _fits(planned):
                continue
            given = Given(TOKENS, ACTIVE.get(model, 1.0)) if "passes" in way else None
            played = predicted(planned, given=given)
            buckets = sum(len(part.bucket_numels) for part in planned.worst.parts)
            step = played.seconds - played.given
            ratios = (step / played.works[played.busiest], step / played.mean_work, played.seconds / played.bound)
            wire = [f"{played.wire * 1e3:.1f}", f"{played.hidden:.0%}"]
            ranks = f"{copies} x {shards}" if copies > 1 else str(shards)
            yield [f"{model}, {ranks}", name, str(buckets), f"{step * 1e3:.1f}", *(f"{r:.2f}" for r in ratios), *wire]


def _fits(planned: Study) -> bool:
    memory = max(each.backward for each in planned.worst.memory())
    return memory <= FITS * planned.setting.machine.memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(dict.fromkeys(model for model, *_ in CELLS))}")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    found = []
    for row in rows(options.model):
        print(f"| {' | '.join(row)} |", flush=True)
        found.append(row)
    if options.json:
        record.write(options.json, found)


if __name__ == "__main__":
    main()
