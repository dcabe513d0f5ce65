"""Owned storage beside what it replaces: bytes, padding, memory and time of a training step, in one run.

    python benchmarks/layouts.py                      on 2 and on 3 ranks, GPT-2's shapes at a quarter of its width
    python benchmarks/layouts.py --ranks 4 --width 96 --layers 6
    python benchmarks/layouts.py --json layouts.json  write it down

Systems: ``LayerWiseOptimizer`` with its three layouts, DDP with torch.optim.Muon + AdamW on every rank, and DeepSpeed's
ZeRO-1 and 2 with AdamW. All train the same GPT-2-like model in fp32 on gloo ranks of one thread each, start from the
same weights, take the same batches, and take turns, so that a machine that slows down does so for all of them.

A step is forward, backward and update, between two barriers; CPU time is that of the busiest rank, its transport's
threads included, and does not count waiting. What a rank sends is counted at torch's collectives, those of reductions
and gathers as if they went around a ring; ``wire`` is what the loopback interface carried per rank, headers included,
which other programs disturb. ``kept`` and ``peak`` are resident memory: between steps, and at most in one, above that
of the process before the system was made. The program fails if a promise about bytes or padding is not kept.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_traffic import Watch
from layouts_memory import peak_bytes, resident_bytes, restart_peak, wire_bytes
from layouts_systems import OWNED, SYSTEMS, Shapes, System, build
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lwopt_backend.integrations.deepspeed import engine

TIMES = ("step\nCPU, ms", "\nwall, ms")
BYTES = ("sent a rank\nMB", "wire\nMB", "padding\nelements", "kept\nMB", "peak\nMB")
WARM_UP = 2


@dataclass
class Figures:
    """What one rank found of one system: bytes, and seconds of each measured step."""

    system: str
    sent: dict[str, int] = field(default_factory=dict)
    wire: int = 0
    kept: int = 0
    peak: int = 0
    padding: int = 0
    promised: int = 0  # what the plan says that this rank sends
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    loss: float = 0.0


@dataclass(frozen=True)
class Row:
    """A system over all ranks: medians in ms of the slowest, ratios to ``auto``, bytes of the rank with most."""

    system: str
    cpu_ms: float
    wall_ms: float
    cpu_ratio: float
    wall_ratio: float
    sent: dict[str, int]
    sent_in_all: int
    promised: int
    wire: int
    padding: int
    kept: int
    peak: int
    loss: float


def run_rank(rank: int, shapes: Shapes, rounds: int, folder: str, messages: Any) -> None:
    """All systems on one rank, called on all of them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch renames collectives that DeepSpeed and DDP call
    engine.compile_nothing()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(shapes.ranks), LOCAL_SIZE=str(shapes.ranks))
    deepspeed.init_distributed(
        "gloo", False, verbose=False, init_method=f"file://{folder}/meeting", rank=rank, world_size=shapes.ranks
    )
    deepspeed.utils.logger.setLevel(logging.ERROR)
    build("owned, auto", shapes).step(*shapes.batch(0))  # what a process needs once is no system's
    systems, figures = [], []
    for name in SYSTEMS:
        before = resident_bytes()
        system = build(name, shapes)
        found = Figures(name, padding=system.padding, promised=system.promised)
        for step in range(WARM_UP):
            system.step(*shapes.batch(step))
            if rank == 0:
                messages.put(f"{name}: memory and traffic")
        found.kept = resident_bytes() - before
        restart_peak()
        system.step(*shapes.batch(WARM_UP))
        found.peak = peak_bytes() - before
        count_traffic(system, shapes, found)
        systems.append(system)
        figures.append(found)
    for turn in range(rounds):
        for number in [*range(turn % len(systems), len(systems)), *range(turn % len(systems))]:
            measure(systems[number], figures[number], shapes, WARM_UP + 2 + turn)
            if rank == 0:
                messages.put(f"{SYSTEMS[number]}: time")
    gathered: list[Any] = [None] * shapes.ranks
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        messages.put(summarize(gathered))
    dist.barrier()
    os._exit(0)  # taking down gloo's groups, which DDP and DeepSpeed still hold, now and then waits for ranks that went


def count_traffic(system: System, shapes: Shapes, found: Figures) -> None:
    dist.barrier()
    before = wire_bytes()
    with Watch(dist.get_rank(), shapes.ranks) as watch:
        system.step(*shapes.batch(WARM_UP + 1))
    dist.barrier()
    found.wire = (wire_bytes() - before) // shapes.ranks
    found.sent = dict(watch.traffic.sent)


def measure(system: System, found: Figures, shapes: Shapes, step: int) -> None:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    found.loss = system.step(*shapes.batch(step))
    dist.barrier()
    found.cpu.append(time.process_time() - cpu)
    found.wall.append(time.perf_counter() - wall)


def summarize(gathered: Sequence[Sequence[Figures]]) -> list[Row]:
    """``gathered[rank][system]``."""
    medians = {
        ranks[0].system: [1e3 * max(statistics.median(getattr(f, key)) for f in ranks) for key in ("cpu", "wall")]
        for ranks in zip(*gathered)
    }
    rows = []
    for ranks in zip(*gathered):
        name = ranks[0].system
        most = max(ranks, key=lambda found: sum(found.sent.values()))
        rows.append(
            Row(
                name,
                *medians[name],
                *(mine / auto for mine, auto in zip(medians[name], medians["owned, auto"])),
                most.sent,
                sum(sum(found.sent.values()) for found in ranks),
                sum(found.promised for found in ranks),
                ranks[0].wire,
                ranks[0].padding,
                max(found.kept for found in ranks),
                max(found.peak for found in ranks),
                statistics.mean(found.loss for found in ranks),
            )
        )
    return rows


def table(shapes: Shapes, rows: Sequence[Row]) -> Table:
    drawn = Table(title=f"{shapes.ranks} ranks, {shapes}", title_justify="left")
    drawn.add_column("system", no_wrap=True)
    for heading in (*TIMES, *BYTES, "loss"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        pairs = (row.cpu_ms, row.cpu_ratio), (row.wall_ms, row.wall_ratio)
        times = [f"{ms:.0f}  {ratio:.2f}x" for ms, ratio in pairs]
        sent = [f"{row.sent_in_all / shapes.ranks / 1e6:.2f}", f"{row.wire / 1e6:.2f}"]
        padding = str(row.padding) if row.system in OWNED else ""
        memory = [f"{row.kept / 1e6:.0f}", f"{row.peak / 1e6:.0f}"]
        drawn.add_row(row.system, *times, *sent, padding, *memory, f"{row.loss:.4f}")
    return drawn


def problems(shapes: Shapes, rows: Sequence[Row]) -> list[str]:
    """What the promises of owned storage are not kept in, in sentences."""
    by_name = {row.system: row for row in rows}
    found = []
    for row in rows:
        if row.system in OWNED and row.sent_in_all - row.sent.get("allreduce", 0) * shapes.ranks != row.promised:
            found.append(f"{row.system} sent {row.sent_in_all} bytes, its plan says {row.promised}")
    padded, compact, auto = (by_name[name] for name in OWNED)
    both = (shapes.ranks - 1) * 2 * 4 * shapes.numel()
    if compact.padding or compact.promised != both:
        found.append(f"compact pads {compact.padding} elements and sends {compact.promised} bytes, expected {both}")
    if auto.promised > min(padded.promised, compact.promised) or auto.padding > min(padded.padding, compact.padding):
        found.append("auto sends or pads more than the better of padded and compact")
    return found


def run(shapes: Shapes, rounds: int) -> list[Row]:
    """All systems on new processes."""
    messages = mp.get_context("spawn").SimpleQueue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(SYSTEMS) * (WARM_UP + rounds))
        ranks = mp.spawn(run_rank, (shapes, rounds, folder, messages), nprocs=shapes.ranks, join=False)
        rows, over = [], False
        while not over:
            over = ranks.join(timeout=0.1)  # raises what a rank raised
            while not messages.empty():
                message = messages.get()
                if isinstance(message, str):
                    progress.update(task, advance=1, description=message)
                else:
                    rows = message
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=192, help="of the model; GPT-2's is 768")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank's batch")
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=7, help="measured steps")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    console = Console(width=150 if not Console().is_terminal else None, highlight=False)
    results = {}
    for ranks in options.ranks:
        shapes = Shapes(ranks, options.layers, options.width, options.tokens, options.bucket_mb)
        results[shapes] = run(shapes, options.rounds)
        console.print(table(shapes, results[shapes]))
        console.print(sentence(shapes, results[shapes]))
    if options.json:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        runs = [
            {"shapes": asdict(s), "numel": s.numel(), "systems": [asdict(r) for r in rows]}
            for s, rows in results.items()
        ]
        options.json.write_text(json.dumps({**versions, "runs": runs}, indent=2) + "\n")
    wrong = [problem for shapes, rows in results.items() for problem in problems(shapes, rows)]
    if wrong:
        raise SystemExit("\n".join(wrong))


def sentence(shapes: Shapes, rows: Sequence[Row]) -> str:
    sent = {row.system: row.sent_in_all / shapes.ranks for row in rows}
    ideal = (shapes.ranks - 1) / shapes.ranks * 8 * shapes.numel()
    return (
        f"(g+p)P (W-1)/W of {shapes.numel()} fp32 parameters on {shapes.ranks} ranks is {ideal / 1e6:.2f} MB a rank; "
        f"ZeRO-2 sends {sent['ZeRO-2, AdamW'] / sent[OWNED[1]]:.2f} times what compact does."
    )


if __name__ == "__main__":
    main()
