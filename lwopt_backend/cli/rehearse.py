"""``lwopt rehearse``: one rank's step, run by the engine's own code on a GPU that is not there."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lwopt_backend.cli import inputs
from lwopt_backend.cli.plan import plan, studied

if TYPE_CHECKING:
    from lwopt_backend.planner.rehearsal import Figure, Rehearsal
    from lwopt_backend.planner.study import Study

ONLY_OF_PLANS = ("what_if", "assignments", "html", "png")

Rank = Annotated[int | None, inputs.of_cluster(min=0, help="Of all ranks. Default: the one with most work.")]
Steps = Annotated[int, inputs.of_output(min=1, help="To rehearse; the last is shown.")]


def rehearse(rank: Rank = None, steps: Steps = 1, **given: Any) -> None:
    """Run the engine's own step as one rank of the planned world, on a GPU that is not there, and compare with the
    plan.

    The options are those of `lwopt plan`. Nothing is allocated, and no other rank runs. Shown are the memory of the
    step by kind, its collectives with their bytes, its operations, and where it waits for the GPU, beside what the plan
    says. Ends with exit code 1 if they differ, if devices are mixed, or if the step waits where it should not.

    Engines owned and fsdp2 run whole optimizers, without fsdp2's own gathers and reductions. Of zero1 to zero3, our
    steppers run on flat partitions: DeepSpeed's engine needs a GPU to begin with. Owned storage with --ep is refused.
    """
    from lwopt_backend.planner.rehearsal import rehearse as rehearsed

    model, study = studied(given)
    mine = _busiest(study) if rank is None else rank
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        found = rehearsed(study, mine, steps=steps, progress=lambda what: bar.update(task, description=what))
    if given["as_json"]:
        shown = [asdict(each) for each in found]
        typer.echo(json.dumps({"source": model.source, "digest": study.digest, "rank": mine, "rehearsals": shown}))
    else:
        _print(model.source, study, mine, found)
    problems = [f"{each.name}: {problem}" for each in found for problem in each.problems]
    for problem in problems:
        typer.secho(f"error: {problem}", fg="red", err=True)
    if problems:
        raise typer.Exit(1)


def _with_options_of_plan() -> None:
    """Give ``rehearse`` the options of ``plan`` in place of ``**given``, for typer."""
    hints = {name: hint for name, hint in get_type_hints(plan, include_extras=True).items() if name != "return"}
    options = inspect.signature(plan).parameters
    theirs = [each.replace(annotation=hints[name]) for name, each in options.items() if name not in ONLY_OF_PLANS]
    own = [
        inspect.Parameter("rank", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Rank),
        inspect.Parameter("steps", inspect.Parameter.KEYWORD_ONLY, default=1, annotation=Steps),
    ]
    all_of_them = [*theirs, *own]
    rehearse.__signature__ = inspect.Signature(all_of_them)  # type: ignore[attr-defined]
    rehearse.__annotations__ = {each.name: each.annotation for each in all_of_them}


_with_options_of_plan()


def _busiest(study: Study) -> int:
    """The rank with most work in the stage that takes longest."""
    loads = study.worst.loads()
    return study.worst.index * study.deployment.stage_ranks + loads.index(max(loads))


def _print(source: str, study: Study, rank: int, found: Sequence[Rehearsal]) -> None:
    from lwopt_backend.report import nbytes, show_digest, standard_output

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
    """One row per figure, beside the plan's."""
    from lwopt_backend.cli.tables import NONE
    from lwopt_backend.report import nbytes, numbers

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
