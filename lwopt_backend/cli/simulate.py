"""``lwopt simulate``: step time and memory of several systems from few ranks to many, by one cost model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, track

from lwopt_backend.cli import inputs

if TYPE_CHECKING:
    from lwopt_backend.planner.systems import Figure

WORLD_SIZES = "8,16,32,64,128,256,512,1024,2048,4096"


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
    ] = inputs.GradDtype.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Run small steps on this machine's cores, beside what the model says.")
    ] = False,
) -> None:
    """Compare ours, Megatron padded and compact, DeepSpeed's Muon, and replication, over the number of ranks."""
    from lwopt_backend.cli import tables
    from lwopt_backend.planner.setting import Setting, cluster_named
    from lwopt_backend.planner.study import Deployment, plan_study
    from lwopt_backend.planner.systems import compare

    if validate:
        _validate()
        if not (hf or checkpoint or shapes):
            return
    named = {"layout": layout and layout.value, "bucket_mb": bucket_mb}
    globs = {"include": tuple(include or ()), "exclude": tuple(exclude or ())}
    setting = Setting.of(
        "owned",
        cluster_named(cluster),
        inputs.cost_named(cost),
        {**globs, **{key: value for key, value in named.items() if value is not None}},
        grad_dtype=grad_dtype.value,
    )
    model = inputs.read_model(hf, checkpoint, shapes, setting.training)
    sizes = _world_sizes(world_sizes)
    figures: list[Figure] = []
    for size in track(sizes, description="simulating", console=Console(stderr=True), transient=True):
        (part,) = plan_study(model, Deployment(size), setting).worst.parts
        figures += compare(part, setting)
    if png:
        from lwopt_backend.pictures import save_systems_png  # matplotlib is an extra, and slow to import

        save_systems_png(figures, png)
    if as_json:
        typer.echo(json.dumps([asdict(figure) | {"seconds": figure.time.total} for figure in figures]))
        return
    console = tables.terminal()
    console.print(
        f"Model: {model.source}, {len(part.atoms)} matrices; cluster {setting.machine.name}; modelled, not run"
    )
    console.print(tables.simulate_table(figures))


def _validate() -> None:
    from lwopt_backend.cli import tables
    from lwopt_backend.planner.systems import LAYERS, WIDTH, validate  # starts processes that import torch again

    ranks = max(2, min(4, os.cpu_count() or 1))
    with Console(stderr=True).status(f"running steps on {ranks} processes"):
        machine, rows = validate(ranks)
    console = tables.terminal()
    console.print(
        f"A GPT of {LAYERS} layers, width {WIDTH}, on {ranks} processes of this machine; "
        f"measured {machine.bytes_per_second / 1e9:.2f} GB/s, {1e6 * machine.latency_seconds:.0f} us a round"
    )
    console.print(tables.validation_table(rows))


def _world_sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--world-sizes: expected numbers of ranks such as 8,64,512; found {text!r}")
    return sorted({int(part) for part in parts})


# ``lwopt calibrate``: how long Newton-Schulz takes on this device, for plans that go by it.


def calibrate(
    hf: inputs.HuggingFace = None,
    checkpoint: inputs.Checkpoint = None,
    shapes: inputs.Shapes = None,
    include: inputs.Include = None,
    exclude: inputs.Exclude = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, or the CPU.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    steps: Annotated[int, typer.Option(min=1, help="Newton-Schulz iterations.")] = 5,
    max_seconds: Annotated[float, typer.Option(min=0.01, help="For one shape; a slower one is not timed.")] = 10.0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: a file in the user's cache folder.")
    ] = None,
) -> None:
    """Time every shape of a model on this device, once, and keep the table for `lwopt plan --cost measured`."""
    import torch

    from lwopt_backend.planner import calibrate as timing
    from lwopt_backend.planner.models import Training

    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype: expected bfloat16 or float32, found {dtype!r}")
    training = Training.routed(include or (), exclude or ())
    model = inputs.read_model(hf, checkpoint, shapes, training)
    wanted = {block.shape for divided in model.divided.values() for block in divided.blocks}
    if not wanted:
        raise ValueError(f"{model.source}: there is no matrix to time")
    on = torch.device(device) if device else inputs.own_device()
    console = Console(highlight=False, markup=False)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("timing", total=None)

        def progress(done: int, total: int, line: str) -> None:
            console.print(line)
            bar.update(task, total=total, completed=done)

        table = timing.calibrate(
            wanted, device=on, dtype=getattr(torch, dtype), steps=steps, max_seconds=max_seconds, progress=progress
        )
    for short, long in table.unmeasured(wanted):
        console.print(f"{short} x {long}: too slow to time; a plan scales it by flops from the nearest that was timed")
    path = output or timing.default_path(on)
    timing.write_cost_table(table, path)
    console.print(f"{len(table.seconds)} measurements on {table.device} in {path}")
