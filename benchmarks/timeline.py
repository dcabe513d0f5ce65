"""A step of all ranks of a planned world on one clock: a prediction, from what the engine's own code does.

    python -m benchmarks.timeline --hf llama-70b/config.json --world-size 512 --engine zero3 --cluster h100-8x-ib
    python -m benchmarks.timeline --hf config.json --world-size 64 --engine fsdp2 --attach --trace step.json
    python -m benchmarks.timeline --table          the cells of docs/performance.md; --table llama3.1-8b, of some models

Other options than those below are those of `lwopt plan`. One rank is rehearsed as in benchmarks/rehearsal; what the
others do is generated from the plan. Devices and wires are the cluster's; see benchmarks/clock/play.py.

With --passes (or --attach) the model's backward pass is before the step, and hooks start exchanges in it. On engine
owned the next forward pass follows, which waits for the parameters. Passes have --tokens tokens a rank, and no products
of attention; --active is the share of a layer's experts that a token passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clock.cells import CELLS, rows
from benchmarks.clock.generate import records
from benchmarks.clock.passes import Given, GivenPasses, ShardedPasses
from benchmarks.clock.play import Played, Rates, play
from benchmarks.clock.record import Record, Session, opened
from benchmarks.clock.shown import sentences, waits, write_trace
from benchmarks.rehearsal.__main__ import with_plan
from benchmarks.rehearsal.engines import MeshEngine, Passes
from lwopt_backend.cli.plan import studied
from lwopt_backend.engines.report import standard_output
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Study


def predicted(study: Study, *, given: Given | None = None, attach: bool = False, rates: Rates | None = None) -> Played:
    """The step of all ranks of the stage that takes longest, as ``recorded``."""
    return play(recorded(study, given=given, attach=attach), rates or Rates.of(study.setting.machine))


def recorded(study: Study, *, given: Given | None = None, attach: bool = False) -> list[tuple[Record, int]]:
    """The records of all ranks of the stage that takes longest, with the passes ``given``. Raises ValueError for a
    stage whose ranks share several sets of parameters, and where passes are not known."""
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
        return list(records(session, session.record(passes)))


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


@dataclass(frozen=True)
class Own:
    """The command's own options."""

    passes: bool
    attach: bool
    tokens: int
    active: float
    trace: Path | None

    @property
    def given(self) -> Given | None:
        return Given(self.tokens, self.active) if self.passes or self.attach else None


def run(words: Sequence[str]) -> None:
    """Play as the command line ``words`` say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--active", type=float, default=1.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--table", nargs="*", choices=sorted({model for model, _ in CELLS}))
    own, of_plan = parser.parse_known_args(words)
    if own.table is not None:
        for row in rows(predicted, own.table):
            print(row, flush=True)
        return
    del own.table
    options = Own(**vars(own))

    def command(**given: Any) -> None:
        model, study = studied(given)
        played = predicted(study, given=options.given, attach=options.attach)
        console = standard_output()
        console.print(f"Model: {model.source}")
        console.print(f"{study.deployment.world_size} ranks of {study.setting.machine.name}, {study.setting.engine}")
        for sentence in sentences(played):
            console.print(sentence)
        console.print(waits(played))
        if options.trace:
            write_trace(played, options.trace)

    with_plan(of_plan, command, __doc__)


if __name__ == "__main__":
    run(sys.argv[1:])
