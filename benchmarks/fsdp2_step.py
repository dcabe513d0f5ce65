"""One optimizer step on FSDP2, ours beside what else there is: time, traffic, memory, and whether the result is right.

    python benchmarks/fsdp2_step.py                              everything, about four minutes on two cores
    python benchmarks/fsdp2_step.py --ranks 4 --stack 12x384     one cell
    python benchmarks/fsdp2_step.py --json step.json             write it down

Two stacks of a transformer's matrices, sharded by ``fully_shard`` over 2 and 4 ranks: gloo on one thread each, NCCL
where there are as many GPUs. All systems start from the same weights and take the same synthetic gradients; fp32
parameters, bf16 Newton-Schulz. A step is: barrier, ``optimizer.step()``, barrier. The systems take turns, so that a
machine that slows down does so for all of them; the first round warms up, medians are over the others. CPU time is
that of the busiest rank before the second barrier, its transport's threads included, and does not count waiting: on a
machine with fewer cores than ranks it is the figure to go by. That of Newton-Schulz is taken inside the same steps, so
its matrices, its caches and what competes for the cores are the step's. The difference is the largest over all
parameters after 3 steps, to torch.optim.Muon in a single process. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_systems import (
    COMPARED_AFTER,
    HIDDEN,
    OURS,
    STACKS,
    Stack,
    System,
    all_systems,
    around_newton_schulz,
    difference,
    fill,
    import_dion,
    new_gradients,
    reference,
    state_bytes,
)
from fsdp2_traffic import Traffic, count
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Row:
    """A system's figures: medians of the slowest rank, ratios to ours, traffic and state of the rank with most."""

    system: str
    cpu_ms: float
    cpu_ratio: float
    wall_ms: float
    wall_ratio: float
    traffic: Traffic | None
    state_bytes: int
    difference: float
    newton_schulz_ms: float | None  # of the CPU time, where it was found
    transport: float  # share of the CPU time: threads other than the one that steps

    @property
    def not_newton_schulz(self) -> float | None:
        return None if self.newton_schulz_ms is None else 1 - self.newton_schulz_ms / self.cpu_ms


def device_type(world_size: int) -> str:
    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


def run_rank(rank: int, world_size: int, stack: Stack, rounds: int, folder: str, messages: Any) -> None:
    """All systems on one rank, called on all of them."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DTensors on a CPU say that they replace a collective
    device = torch.device(device_type(world_size), rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    mesh = init_device_mesh(device.type, (world_size,))
    gradients = new_gradients(stack, device)
    systems = all_systems(stack, gradients, mesh, device)
    for number in range(1 + rounds):
        if number < COMPARED_AFTER:
            fill(gradients, number)
        for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
            if number == 0:
                system.traffic = count(system.optimizer, mesh) if system.countable else system.optimizer.step()
            else:
                measure(system, device)
            if number == COMPARED_AFTER - 1:
                system.difference = difference(system, torch.load(f"{folder}/reference.pt", mmap=True), mesh)
            if rank == 0:
                messages.put(system.name)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, [figures(system) for system in systems])
    if rank == 0:
        messages.put((torch.cuda.get_device_name() if device.type == "cuda" else "cpu", summarize(gathered)))
    dist.destroy_process_group()


def measure(system: System, device: torch.device) -> None:
    synchronize(device)
    dist.barrier()
    spent: list[float] = []

    def timed(function: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = function()
        spent.append(time.thread_time() - began)
        return result

    cpu, mine, wall = time.process_time(), time.thread_time(), time.perf_counter()
    with around_newton_schulz(timed) if device.type == "cpu" else nullcontext():
        system.optimizer.step()
    synchronize(device)
    system.newton_schulz.append(sum(spent))
    system.stepping.append(time.thread_time() - mine)
    system.cpu.append(time.process_time() - cpu)
    dist.barrier()
    system.wall.append(time.perf_counter() - wall)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def figures(system: System) -> dict[str, Any]:
    """What one rank tells the others of a system."""
    return {
        "name": system.name,
        "cpu": system.cpu,
        "wall": system.wall,
        "newton_schulz": system.newton_schulz,
        "stepping": system.stepping,
        "traffic": system.traffic,
        "state": state_bytes(system),
        "difference": system.difference,
    }


def summarize(gathered: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """``gathered[rank][system]``."""

    def slowest(ranks: Sequence[dict[str, Any]], key: str) -> float:
        return 1e3 * max(statistics.median(rank[key]) for rank in ranks)

    ours_cpu, ours_wall = (slowest([rank[0] for rank in gathered], key) for key in ("cpu", "wall"))
    rows = []
    for ranks in zip(*gathered):
        busiest = max(ranks, key=lambda rank: statistics.median(rank["cpu"]))
        cpu, inside, stepping = (1e3 * statistics.median(busiest[key]) for key in ("cpu", "newton_schulz", "stepping"))
        wall = slowest(ranks, "wall")
        traffics = [rank["traffic"] for rank in ranks]
        rows.append(
            Row(
                ranks[0]["name"],
                cpu,
                cpu / ours_cpu,
                wall,
                wall / ours_wall,
                None if None in traffics else max(traffics, key=lambda traffic: traffic.nbytes),
                max(rank["state"] for rank in ranks),
                max(rank["difference"] for rank in ranks),
                inside or None,
                1 - stepping / cpu,
            )
        )
    return rows


def run_cell(
    stack: Stack, world_size: int, rounds: int, weights: Sequence[Tensor], progress: Progress
) -> tuple[str, list[Row]]:
    """One stack on ``world_size`` new processes: the device's name, and a row per system."""
    messages = mp.get_context("spawn").SimpleQueue()
    systems = 4 + (not isinstance(import_dion(), str))
    task = progress.add_task("", total=systems * (1 + rounds))
    with tempfile.TemporaryDirectory() as folder:
        torch.save([weight.cpu() for weight in weights], f"{folder}/reference.pt")
        ranks = mp.spawn(run_rank, (world_size, stack, rounds, folder, messages), nprocs=world_size, join=False)
        result, over = None, False
        while not over:
            over = ranks.join(timeout=0.1)  # raises what a rank raised
            while not messages.empty():
                message = messages.get()
                if isinstance(message, str):
                    progress.update(task, advance=1, description=f"{world_size} ranks: {message}")
                else:
                    result = message
    progress.remove_task(task)
    assert result is not None
    return result


def table(name: str, world_size: int, device: str, rows: Sequence[Row]) -> Table:
    drawn = Table(title=f"{name} on {world_size} ranks, {device}", title_justify="left")
    drawn.add_column("system")
    for heading in (
        "CPU, ms",
        "to ours",
        "NS, ms",
        "not NS",
        "transport",
        "wall, ms",
        "to ours",
        "collectives",
        "sent, MB",
        "KB each",
        "state, MB",
    ):
        drawn.add_column(heading, justify="right")
    drawn.add_column("difference", justify="right")
    for row in rows:
        traffic = ["not counted", "", ""]
        if row.traffic is not None:
            each = f"{row.traffic.nbytes / row.traffic.count / 1e3:.0f}" if row.traffic.count else ""
            traffic = [str(row.traffic.count), f"{row.traffic.nbytes / 1e6:.1f}", each]
        drawn.add_row(
            row.system,
            f"{row.cpu_ms:.0f}",
            f"{row.cpu_ratio:.2f}",
            "" if row.newton_schulz_ms is None else f"{row.newton_schulz_ms:.0f}",
            "" if row.not_newton_schulz is None else f"{row.not_newton_schulz:.1%}",
            f"{row.transport:.1%}",
            f"{row.wall_ms:.0f}",
            f"{row.wall_ratio:.2f}",
            *traffic,
            f"{row.state_bytes / 1e6:.1f}",
            f"{row.difference:.1e}" if row.difference else "0.0",
        )
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    named = "{" + ",".join(STACKS) + "}"
    parser.add_argument("--stack", nargs="+", choices=[*STACKS, *HIDDEN], metavar=named, default=list(STACKS))
    parser.add_argument("--rounds", type=int, help="measured ones; default: 4, for the larger stack 3")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < COMPARED_AFTER - 1:
        parser.error(f"--rounds: expected at least {COMPARED_AFTER - 1}, found {options.rounds}")
    if min(options.ranks) < 1:
        parser.error(f"--ranks: expected at least 1, found {min(options.ranks)}")
    torch.set_num_threads(1)
    console = Console(width=150 if not Console().is_terminal else None, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cells = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in options.stack:
            stack = {**STACKS, **HIDDEN}[name]
            references = {kind: reference(stack, torch.device(kind)) for kind in set(map(device_type, options.ranks))}
            for world_size in options.ranks:
                weights = references[device_type(world_size)]
                device, rows = run_cell(stack, world_size, options.rounds or stack.rounds, weights, progress)
                console.print(table(name, world_size, device, rows))
                systems = [asdict(row) for row in rows]
                cells.append({"stack": name, "ranks": world_size, "device": device, "systems": systems})
    console.print("CPU: process time of the busiest rank; NS: in Newton-Schulz; transport: in threads of the backend.")
    console.print("Collectives and what is sent: a step, by the rank with most.")
    console.print(f"Difference: largest, after {COMPARED_AFTER} steps, to single-process torch.optim.Muon.")
    if isinstance(missing := import_dion(), str):
        console.print(missing)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "cells": cells}, indent=2) + "\n")
    wrong = [cell for cell in cells if cell["device"] == "cpu" and cell["systems"][0]["difference"] != 0.0]
    if wrong:
        raise SystemExit(f"{OURS} differs from single-process torch.optim.Muon")


if __name__ == "__main__":
    main()
