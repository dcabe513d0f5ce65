"""Run an engine's own step as one rank of a planned world, on a GPU that is not there, and compare with the plan.

    python -m benchmarks.rehearsal --hf llama-70b/config.json --world-size 512 --engine fsdp2
    python -m benchmarks.rehearsal --shapes shapes.json --world-size 4 --rank 2 --steps 2 --json

Options other than --rank and --steps are those of `lwopt plan`. Nothing is allocated, and no other rank runs. The lines
compare with the plan: the memory of the step, its collectives with their bytes, and its waits for the GPU. The exit
code is 1 if they differ, if devices are mixed, if the step waits where it should not, or does not wait where a stream,
a collective or the host would come too early (streams.py).

Engines plain and fsdp2 run whole optimizers, without FSDP2's own gathers and reductions. For zero1 to zero3, only this
package's steppers run, on flat partitions, because DeepSpeed's engine needs a GPU. Plain PyTorch with --ep is refused.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer

from lwopt_backend.cli import main
from lwopt_backend.cli.plan import plan, studied
from lwopt_backend.planner.study import Study

from .step import Rehearsal, rehearse


def run(words: Sequence[str]) -> None:
    """Rehearse as the command line ``words`` say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rank", type=int)  # of all ranks; by default the busiest
    parser.add_argument("--steps", type=int, default=1)  # to rehearse; the last is shown
    own, of_plan = parser.parse_known_args(words)

    def command(**given: Any) -> None:
        model, study = studied(given)
        rank = busiest(study) if own.rank is None else own.rank
        found = rehearse(study, rank, steps=own.steps)
        if given["as_json"]:
            shown = [asdict(each) for each in found]
            typer.echo(json.dumps({"source": model.source, "digest": study.digest, "rank": rank, "rehearsals": shown}))
        else:
            typer.echo(f"Model: {model.source}\nPlan: {study.digest}\nRank {rank} of {study.deployment.world_size}")
            typer.echo("\n".join(line for each in found for line in lines(each)))
        problems = [f"{each.name}: {problem}" for each in found for problem in each.problems]
        for problem in problems:
            typer.secho(f"error: {problem}", fg="red", err=True)
        raise typer.Exit(bool(problems))

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(functools.wraps(plan)(command))  # with the options of `lwopt plan`
    main(functools.partial(app, of_plan))


def busiest(study: Study) -> int:
    """The busiest rank of the slowest stage."""
    loads = study.worst.loads()
    return study.worst.index * study.deployment.stage_ranks + loads.index(max(loads))


def lines(each: Rehearsal) -> Iterator[str]:
    yield f"The {each.name} parameters: rank {each.rank} of the {each.ranks} that share them"
    for figure in each.figures:
        planned = (
            "" if figure.planned is None else f", planned {figure.planned}{'' if figure.exact else ' (an estimate)'}"
        )
        yield f"  {figure.what}: {figure.rehearsed} {figure.unit}{planned}"
    yield f"  waits: {', '.join(f'{times} x {what}' for what, times in each.waits.items()) or 'none'}"


if __name__ == "__main__":
    run(sys.argv[1:])
