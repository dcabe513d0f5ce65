"""Run an engine's own step as one rank of a planned world, on a GPU that is not there, and compare with the plan.

    python -m benchmarks.rehearsal --hf llama-70b/config.json --world-size 512 --engine fsdp2
    python -m benchmarks.rehearsal --shapes shapes.json --world-size 4 --rank 2 --steps 2 --json

Options other than --rank and --steps are those of `lwopt plan`. Nothing is allocated, and no other rank runs. The
tables compare with the plan: the memory of the step by kind, its collectives with their bytes, its operations, and its
waits for the GPU. The exit code is 1 if they differ, if devices are mixed, or if the step waits where it should not.

Engines owned and fsdp2 run whole optimizers, without FSDP2's own gathers and reductions. For zero1 to zero3, only this
package's steppers run, on flat partitions, because DeepSpeed's engine needs a GPU. Owned storage with --ep is refused.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from lwopt_backend.cli import main
from lwopt_backend.cli.plan import plan, studied
from lwopt_backend.cli.tables import NONE
from lwopt_backend.engines.report import nbytes, numbers, show_digest, standard_output
from lwopt_backend.planner.study import Study

from .step import Figure, Rehearsal, rehearse


def run(words: Sequence[str]) -> None:
    """Rehearse as the command line ``words`` say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rank", type=int)  # of all ranks; by default the busiest
    parser.add_argument("--steps", type=int, default=1)  # to rehearse; the last is shown
    own, of_plan = parser.parse_known_args(words)

    def command(**given: Any) -> None:
        model, study = studied(given)
        rank = _busiest(study) if own.rank is None else own.rank
        found = rehearse(study, rank, steps=own.steps)
        if given["as_json"]:
            shown = [asdict(each) for each in found]
            typer.echo(json.dumps({"source": model.source, "digest": study.digest, "rank": rank, "rehearsals": shown}))
        else:
            _print(model.source, study, rank, found)
        problems = [f"{each.name}: {problem}" for each in found for problem in each.problems]
        for problem in problems:
            typer.secho(f"error: {problem}", fg="red", err=True)
        raise typer.Exit(bool(problems))

    with_plan(of_plan, command, __doc__)


def with_plan(words: Sequence[str], command: Callable[..., None], about: str | None) -> None:
    """Call ``command`` with the options of `lwopt plan` in ``words``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(functools.wraps(plan)(command))
    main(functools.partial(app, words))


def _busiest(study: Study) -> int:
    """The busiest rank of the slowest stage."""
    loads = study.worst.loads()
    return study.worst.index * study.deployment.stage_ranks + loads.index(max(loads))


def _print(source: str, study: Study, rank: int, found: Sequence[Rehearsal]) -> None:
    console = standard_output()
    console.print(f"Model: {source}")
    console.print(f"Rehearsed: rank {rank} of {study.deployment.world_size}, engine {study.setting.engine}")
    for each in found:
        console.print(_table(each))
        for what, shown in (
            ("Memory at the peak", {kind: nbytes(n) for kind, n in each.memory.items()}),
            ("Operations", each.operations),
            ("Waits for the GPU", each.waits),
        ):
            console.print(f"{what}: {', '.join(f'{kind} {count}' for kind, count in shown.items()) or 'none'}")
    show_digest(console, study.digest)


def _table(each: Rehearsal) -> Table:
    """One row per figure, next to the plan's."""

    def shown(figure: Figure, value: int | None) -> str:
        if value is None:
            return NONE
        return f"{value} ({nbytes(value)})" if figure.unit == "bytes" else str(value)

    title = f"The {each.name} parameters: rank {each.rank} of the {each.ranks} that share them"
    table = Table("a step", *numbers("rehearsed", "planned"), "", title=title)
    for figure in each.figures:
        differs = "differs" if figure.difference else "" if figure.exact or figure.planned is None else "an estimate"
        table.add_row(figure.what, shown(figure, figure.rehearsed), shown(figure, figure.planned), differs)
    return table


if __name__ == "__main__":
    run(sys.argv[1:])
