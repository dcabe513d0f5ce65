"""Ours beside Megatron-Core's layouts, DeepSpeed's Muon and replication: step and memory from few ranks to many.

    python benchmarks/simulate.py --shapes shapes.json                        on 8 to 4,096 ranks of a known cluster
    python benchmarks/simulate.py --hf config.json --cluster mine.yaml --png systems.png
    python benchmarks/simulate.py --validate                                  small steps on this machine's cores

All systems are modelled by the planner's model of time, on the same matrices. ``--validate`` runs them beside that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulate_systems import Figure, compare
from simulate_validation import LAYERS, WIDTH, Validated, validate

from lwopt_backend.cli import inputs, main
from lwopt_backend.planner.setting import Setting, cluster_named
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.report import nbytes, standard_output

WORLD_SIZES = "8,16,32,64,128,256,512,1024,2048,4096"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(no_args_is_help=True)
def simulate(
    hf: inputs.HuggingFace = None,
    checkpoint: inputs.Checkpoint = None,
    shapes: inputs.Shapes = None,
    include: inputs.Include = None,
    exclude: inputs.Exclude = None,
    world_sizes: Annotated[str, typer.Option(metavar="W,W,...", help="Data-parallel ranks.")] = WORLD_SIZES,
    cluster: inputs.Cluster = "h100-8x-ib",
    cost: inputs.Cost = None,
    bucket_mb: inputs.BucketMb = None,
    layout: Annotated[inputs.Layout | None, typer.Option(help="Of ours.")] = None,
    grad_dtype: Annotated[
        inputs.GradDtype, typer.Option(help="Of all systems: of the parameters, or float32.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Run small steps on this machine's cores, beside what the model says.")
    ] = False,
) -> None:
    """Compare ours, Megatron padded and compact, DeepSpeed's Muon, and replication, over the number of ranks."""
    if validate:
        show_validation()
        if not (hf or checkpoint or shapes):
            return
    named = {"layout": layout, "bucket_mb": bucket_mb}
    globs = {"include": tuple(include or ()), "exclude": tuple(exclude or ())}
    setting = Setting.of(
        "owned",
        cluster_named(cluster),
        inputs.cost_named(cost),
        {**globs, **{key: value for key, value in named.items() if value is not None}},
        grad_dtype=grad_dtype,
    )
    model = inputs.read_model(hf, checkpoint, shapes, setting.training)
    sizes = numbers_of_ranks(world_sizes)
    figures: list[Figure] = []
    for size in track(sizes, description="simulating", console=Console(stderr=True), transient=True):
        (part,) = plan_study(model, Deployment(size), setting).worst.parts
        figures += compare(part, setting)
    if png:
        from simulate_picture import save_systems_png

        from lwopt_backend import pictures  # noqa: F401  says what to install where matplotlib is missing

        save_systems_png(figures, png)
    if as_json:
        typer.echo(json.dumps([asdict(figure) | {"seconds": figure.time.total} for figure in figures]))
        return
    console = standard_output()
    console.print(
        f"Model: {model.source}, {len(part.atoms)} matrices; cluster {setting.machine.name}; modelled, not run"
    )
    console.print(systems_table(figures))


def show_validation() -> None:
    ranks = max(2, min(4, os.cpu_count() or 1))
    with Console(stderr=True).status(f"running steps on {ranks} processes"):
        machine, rows = validate(ranks)
    console = standard_output()
    console.print(
        f"A GPT of {LAYERS} layers, width {WIDTH}, on {ranks} processes of this machine; "
        f"measured {machine.bytes_per_second / 1e9:.2f} GB/s, {1e6 * machine.latency_seconds:.0f} us a round"
    )
    console.print(validation_table(rows))


def numbers_of_ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--world-sizes: expected numbers of ranks such as 8,64,512; found {text!r}")
    return sorted({int(part) for part in parts})


def systems_table(figures: Sequence[Figure]) -> Table:
    """One row per system and number of ranks."""
    table = Table()
    table.add_column("ranks", justify="right")
    table.add_column("system")
    for heading in ("work ms", "wire ms", "latency ms", "step ms", "peak", "work done / needed"):
        table.add_column(heading, justify="right")
    table.add_column("how")
    last = None
    for figure in figures:
        if last is not None and last != figure.ranks:
            table.add_section()
        time = figure.time
        cells = (f"{1e3 * seconds:.4g}" for seconds in (time.compute, time.wire, time.latency, time.total))
        ranks = str(figure.ranks) if last != figure.ranks else ""
        table.add_row(ranks, figure.system, *cells, nbytes(figure.memory), f"{figure.work_ratio:.3g}", figure.detail)
        last = figure.ranks
    return table


def validation_table(rows: Sequence[Validated]) -> Table:
    """Modelled beside measured."""
    table = Table()
    table.add_column("system")
    for heading in ("work ms", "wire ms", "latency ms", "modelled ms", "measured ms", "modelled / measured"):
        table.add_column(heading, justify="right")
    for row in rows:
        time = row.modelled
        seconds = (time.compute, time.wire, time.latency, time.total, row.measured)
        table.add_row(row.system, *(f"{1e3 * each:.4g}" for each in seconds), f"{row.ratio:.2f}")
    return table


if __name__ == "__main__":
    main(app)
