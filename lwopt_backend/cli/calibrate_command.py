"""``lwopt calibrate``: how long Newton-Schulz takes on this device, for plans that go by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from lwopt_backend.cli import inputs


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

    from lwopt_backend import calibrate as timing
    from lwopt_backend.model_shapes import Training

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
