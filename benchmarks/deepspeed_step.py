"""One training step under DeepSpeed, ours beside its own Muon and AdamW: time, Newton-Schulz, traffic, memory, result.

    python benchmarks/deepspeed_step.py                             ZeRO stages 0 to 3 on two ranks, two minutes
    python benchmarks/deepspeed_step.py --stages 2 --accumulation 2 --ranks 4
    python benchmarks/deepspeed_step.py --clip 1                    what gradient clipping does to each
    python benchmarks/deepspeed_step.py --json step.json            write it down

A small GPT in fp32 in real engines on gloo ranks of one thread each. All start from the same weights and take the same
batches and options, and take turns, so that a machine that slows down does so for all of them. Two steps warm up, what
the third sends and orthogonalizes is counted, medians are over the others.

``step`` is a whole training step: forward, backward, ``engine.step()``, between two barriers. ``update`` is the
optimizer's part of it: ``engine.step()``, and what DeepSpeed's Muon orthogonalizes in backward at stages 1 and 2. CPU
time is that of the busiest rank, its transport's threads included, and does not count waiting: on a machine with fewer
cores than ranks it is the figure to go by. DeepSpeed's Muon runs uncompiled, as ours does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed_systems import (
    COMPARED_AFTER,
    OURS,
    Setting,
    System,
    build,
    difference,
    matrix_names,
    optimizer_entries,
    reference,
)
from deepspeed_traffic import Work, kept_bytes, watch_work
from fsdp2_traffic import Traffic, Watch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lwopt_backend.integrations import deepspeed_zero

TIMES = ("update_cpu", "update_wall", "step_cpu", "step_wall")
COUNTED = 2  # the step; ZeRO-3 records the order of modules in the first and checks it in the second


@dataclass(frozen=True)
class Row:
    """A system's figures: medians in ms of the slowest rank, ratios to ours, what every rank did and keeps."""

    system: str
    ms: dict[str, float]
    to_ours: dict[str, float]
    newton_schulz: list[int]
    redundant: int
    traffic: list[Traffic]
    state: list[dict[str, int]]
    matrices_differ: float
    others_differ: float


def run_rank(rank: int, settings: Sequence[Setting], rounds: int, folder: str, messages: Any) -> None:
    """All settings on one rank, called on all of them."""
    world_size = settings[0].ranks
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that DeepSpeed calls
    torch._dynamo.config.disable = True  # DeepSpeed's Muon would compile for a minute
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    deepspeed_zero.register()
    deepspeed.init_distributed(
        "gloo", False, verbose=False, init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
    )
    deepspeed.utils.logger.setLevel(logging.ERROR)
    work = watch_work()
    for number, setting in enumerate(settings):
        systems = [build(setting, name, entry) for name, entry in optimizer_entries().items()]
        expected = torch.load(f"{folder}/references{number}.pt", mmap=True)
        for step in range(COUNTED + 1 + rounds):
            for system in systems[step % len(systems) :] + systems[: step % len(systems)]:
                take(system, setting, step, work)
                if step == COMPARED_AFTER - 1:
                    system.difference = difference(setting, system, expected[system.kind])
                if rank == 0:
                    messages.put(f"stage {setting.stage}: {system.name}")
        for system in systems:
            system.state = kept_bytes(system.engine)
            system.engine.destroy()
            system.engine = None
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, systems)
        if rank == 0:
            messages.put(summarize(gathered, len(matrix_names(setting.model()))))
    dist.destroy_process_group()


def take(system: System, setting: Setting, step: int, work: Work) -> None:
    """Step ``step`` of a system: warm-up, counted or measured."""
    batches = setting.batches(step)
    if step == COUNTED:
        before = work.matrices
        with Watch(dist.get_rank(), setting.ranks) as watch:
            train(system.engine, batches, work)
        system.traffic = watch.traffic
        system.newton_schulz = work.matrices - before
        return
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    update_cpu, update_wall = train(system.engine, batches, work)
    dist.barrier()
    if step > COUNTED:
        system.step_cpu.append(time.process_time() - cpu)
        system.step_wall.append(time.perf_counter() - wall)
        system.update_cpu.append(update_cpu)
        system.update_wall.append(update_wall)


def train(engine: Any, batches: Sequence[Any], work: Work) -> tuple[float, float]:
    """One optimizer step; the CPU and the wall seconds of the optimizer's part of it."""
    work.cpu = work.wall = 0.0
    for tokens, targets in batches:
        engine.backward(engine(tokens, targets))
        work.in_step = True
        cpu, wall = time.process_time(), time.perf_counter()
        engine.step()
        work.cpu += time.process_time() - cpu
        work.wall += time.perf_counter() - wall
        work.in_step = False
    return work.cpu, work.wall


def summarize(gathered: Sequence[Sequence[System]], matrices: int) -> list[Row]:
    """``gathered[rank][system]``."""
    medians = [
        {key: 1e3 * max(statistics.median(getattr(system, key)) for system in ranks) for key in TIMES}
        for ranks in zip(*gathered)
    ]
    rows = []
    for ranks, ms in zip(zip(*gathered), medians):
        calls = [system.newton_schulz for system in ranks]
        matrices_differ, others_differ = map(max, zip(*(system.difference for system in ranks)))
        rows.append(
            Row(
                ranks[0].name,
                ms,
                {key: ms[key] / medians[0][key] for key in TIMES},
                calls,
                max(0, sum(calls) - matrices),
                [system.traffic for system in ranks],
                [system.state for system in ranks],
                matrices_differ,
                others_differ,
            )
        )
    return rows


def table(setting: Setting, rows: Sequence[Row]) -> Table:
    matrices = len(matrix_names(setting.model()))
    accumulated = f", {setting.accumulation} micro-batches" if setting.accumulation > 1 else ""
    title = f"ZeRO-{setting.stage} on {setting.ranks} ranks{accumulated}, {matrices} matrices"
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("system", no_wrap=True)
    headings = ["update\nCPU, ms", "\nwall, ms", "step\nCPU, ms", "\nwall, ms", "Newton-\nSchulz", "redun-\ndant"]
    memory = ["kept, MB\nmomentum", "\nstaging", "\nAdam", "\nfp32", "\nin all"]
    for heading in [*headings, "sent,\nMB", *memory, "differ by\nmatrices", "\nothers"]:
        drawn.add_column(heading, justify="right")
    for row in rows:
        times = [f"{row.ms[key]:.0f}  {row.to_ours[key]:.2f}x" for key in TIMES]
        calls = [" ".join(map(str, row.newton_schulz)), str(row.redundant)] if any(row.newton_schulz) else ["", ""]
        sent = f"{max(traffic.nbytes for traffic in row.traffic) / 1e6:.1f}"
        most = max(row.state, key=lambda state: sum(state.values()))
        kept = [most["momentum"], most["staging"], most["adam"], most["masters"], sum(most.values())]
        megabytes = [f"{nbytes / 1e6:.1f}" for nbytes in kept]
        drawn.add_row(
            row.system, *times, *calls, sent, *megabytes, shown(row.matrices_differ), shown(row.others_differ)
        )
    return drawn


def shown(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0.0"


def traffic_table(settings: Sequence[Setting], results: Sequence[Sequence[Row]]) -> Table:
    """What a step sends by kind of collective, by the rank that sends most."""
    kinds = sorted({kind for rows in results for row in rows for traffic in row.traffic for kind in traffic.calls})
    drawn = Table(title="A step's collectives: MB sent by the rank that sends most (calls)", title_justify="left")
    for heading in ("stage", "micro-batches", "system", *kinds):
        drawn.add_column(heading, justify="left" if heading == "system" else "right")
    for setting, rows in zip(settings, results):
        for row in rows:
            most = max(row.traffic, key=lambda traffic: traffic.nbytes)
            cells = [f"{most.sent[k] / 1e6:.2f} ({most.calls[k]})" if k in most.calls else "" for k in kinds]
            drawn.add_row(str(setting.stage), str(setting.accumulation), row.system, *cells)
        drawn.add_section()
    return drawn


def run(settings: Sequence[Setting], rounds: int, console: Console) -> list[list[Row]]:
    """All settings on new processes; prints a table as each is done."""
    messages = mp.get_context("spawn").SimpleQueue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[list[Row]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting", total=len(settings) * len(optimizer_entries()) * (COUNTED + 1 + rounds))
        for number, setting in enumerate(settings):
            expected = {kind: reference(setting, kind) for kind in ("Muon", "AdamW")}
            torch.save(expected, f"{folder}/references{number}.pt")
        ranks = mp.spawn(run_rank, (settings, rounds, folder, messages), nprocs=settings[0].ranks, join=False)
        over = False
        while not over:
            over = ranks.join(timeout=0.1)  # raises what a rank raised
            while not messages.empty():
                message = messages.get()
                if isinstance(message, str):
                    progress.update(task, advance=1, description=message)
                else:
                    console.print(table(settings[len(results)], message))
                    results.append(message)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], help="micro-batches of a step; default: 1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank's micro-batch")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient_clipping; default: 0, off")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    for name in ("ranks", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(options, name)}")
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    model = options.ranks, options.layers, options.width, options.tokens, options.clip
    settings = [Setting(*cell, *model) for cell in product(options.stages, options.accumulation)]
    console = Console(width=180 if not Console().is_terminal else None, highlight=False)
    results = run(settings, options.rounds, console)
    console.print(traffic_table(settings, results))
    console.print("Newton-Schulz: matrices orthogonalized by each rank. Memory: MB kept by the rank with most.")
    console.print(f"Differ by: the largest of any weight, after {COMPARED_AFTER} steps, to torch.optim in one process.")
    cells = [{**asdict(setting), "systems": [asdict(row) for row in rows]} for setting, rows in zip(settings, results)]
    if options.json:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        options.json.write_text(json.dumps({**versions, "cells": cells}, indent=2) + "\n")
    ours = [rows[0] for rows in results]
    if any(row.redundant for row in ours) or (not options.clip and any(row.matrices_differ for row in ours)):
        raise SystemExit(f"{OURS} differs from single-process torch.optim, or orthogonalizes a matrix twice")


if __name__ == "__main__":
    main()
