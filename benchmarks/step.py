"""One training step on every engine, compared with other Muons: time, bytes, memory or launches, and the result.

    python -m benchmarks.step --metric time --engine fsdp2 --ranks 2 4
    python -m benchmarks.step --metric bytes --system dion
    python -m benchmarks.step --metric launches --ranks 1 2 4 --layers 12 --width 64
    python -m benchmarks.step --metric memory --engine zero2 owned --json memory.json

All systems train a small GPT in fp32 from the same weights, with the same batches and options; matrices are Muon's, the
embedding, the head and the norms AdamW's. Ranks are processes on this machine: gloo on one thread each, or NCCL with
``--device cuda``. Two steps warm up, the third is counted; then the weights are compared with torch.optim in one
process, after as many steps. Peers that are not installed are left out.

time      The systems take turns, so that a machine that slows down does so for all. Medians of ``--rounds`` steps on
          the slowest rank, with their ratio to this package's. A step is forward, backward and update between two
          barriers; the update is the optimizer's part with the host's own work in it, and what DeepSpeed's Muon
          orthogonalizes in backward. CPU time has the transport's threads in it and no waiting: with fewer cores than
          ranks, read that.
bytes     Collectives, as torch dispatches them, those of reductions and gathers as if they went around a ring, by the
          rank that sends most; and for comparison, the plan's figures for owned storage in plain PyTorch with one
          micro-batch, and of FSDP2's two exchanges.
memory    What the optimizer keeps between steps, by the fullest rank; and the process's memory above that before the
          system was made: between steps, and at most in one.
launches  Every operation on a GPU costs a launch, and so does all for which a host waits. Both are counted without one:
          ranks step in batches of equal shapes and read nothing, as on an accelerator. The model has matrices alone.
          Views cost nothing; a ``torch._foreach`` call that CUDA would run tensor by tensor counts for every tensor.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.step_systems import (
    COMPARED_AFTER,
    ENGINES,
    OURS,
    Hooks,
    Make,
    Setting,
    System,
    built,
    difference,
    imported,
    reference,
    systems,
)
from benchmarks.step_watch import (
    Clock,
    Watch,
    around_newton_schulz,
    kept_bytes,
    peak_bytes,
    resident_bytes,
    restart_peak,
    synchronize,
)
from lwopt_backend.rules.newton_schulz import IMMEDIATE

METRICS = ("time", "bytes", "memory", "launches")
WARM_UP = COMPARED_AFTER - 1  # ZeRO-3 records the order of modules in the first step and checks it in the second
TIMES = ("update_cpu", "update_wall", "step_cpu", "step_wall")
Figures = dict[str, Any]  # of a system on one rank
Row = dict[str, Any]  # a system: its engine, ranks and name, and its figures by rank


# On each rank.


def run_rank(rank: int, setting: Setting, options: argparse.Namespace, folder: str) -> None:
    """All systems on one rank, called on all of them."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DTensors on a CPU say that they replace a collective
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that DeepSpeed and DDP call
    torch._dynamo.config.disable = True  # DeepSpeed's Muon would compile for a minute
    if options.metric == "launches":
        IMMEDIATE.clear()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.ranks), LOCAL_SIZE=str(setting.ranks)
    )
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=setting.ranks)
    expected = {} if setting.matrices_only else {adamw: reference(setting, adamw) for adamw in (False, True)}
    rows: list[Row] = []
    for engine in options.engine:
        makes = {name: make for name, make in systems(engine, setting).items() if wanted(name, options.system)}
        if options.metric == "memory":
            measured(dict([*makes.items()][:1]), setting, options, expected)  # what a process needs once is no system's
        for some in [makes] if options.metric == "time" else [{name: make} for name, make in makes.items()]:
            found = measured(some, setting, options, expected)
            gathered: list[Any] = [None] * setting.ranks
            dist.all_gather_object(gathered, found)
            for name in found:
                by_rank = [figures[name] for figures in gathered]
                rows.append({"engine": engine, "ranks": setting.ranks, "system": name, "by_rank": by_rank})
        if rank == 0:
            print(f"{engine} on {setting.ranks} ranks: done", file=sys.stderr)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # taking down gloo's groups, which DDP and DeepSpeed still hold, now and then waits for ranks that went


def wanted(name: str, words: Sequence[str] | None) -> bool:
    return not words or any(name == word or word in name.split(", ") for word in words)


def measured(
    makes: Mapping[str, Make], setting: Setting, options: argparse.Namespace, expected: Mapping[bool, Any]
) -> dict[str, Figures]:
    """The figures of these systems, which are there at once."""
    device = torch.device(setting.device, torch.cuda.current_device() if setting.device == "cuda" else None)
    before = resident_bytes(device)
    with built(makes) as found:
        figures: dict[str, Figures] = {system.name: {} for system in found}
        for system in found:
            for step in range(WARM_UP):
                system.step(setting.batches(step), Hooks())
            figures[system.name] = counted(system, setting, options.metric, before)
            if expected:
                figures[system.name]["differ"] = difference(system, expected[system.name == "AdamW"])
        for turn in range(options.rounds if options.metric == "time" else 0):
            for system in found[turn % len(found) :] + found[: turn % len(found)]:
                timed(system, setting, COMPARED_AFTER + turn, figures[system.name], device)
    return figures


def counted(system: System, setting: Setting, metric: str, before: int) -> Figures:
    """Take the third step, and say what it did."""
    batches = setting.batches(WARM_UP)
    device = batches[0][0].device
    found: Figures = {}
    if metric == "memory":
        found = {"state": kept_bytes(system), "kept": resident_bytes(device) - before}
        restart_peak(device)
        system.step(batches, Hooks())
        return {**found, "peak": peak_bytes(device) - before}
    watch = Watch(dist.get_rank(), setting.ranks)
    if metric == "time":
        system.step(batches, Hooks())
        return {key: [] for key in (*TIMES, "newton_schulz")}
    with watch.watching() as hooks:
        system.step(batches, hooks)
    if metric == "launches":
        return watch.count.figures()
    sent = {"update": watch.update.figures(), "step": watch.step.figures()}
    return {**sent, "planned": system.promised, "padding": system.padding}


def timed(system: System, setting: Setting, step: int, found: Figures, device: torch.device) -> None:
    """Take a step, and add its seconds."""
    batches, clock = setting.batches(step), Clock(device)
    synchronize(device)
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    with around_newton_schulz(clock.around_newton_schulz):
        system.step(batches, Hooks(update=clock.around))
    synchronize(device)
    found["step_cpu"].append(time.process_time() - cpu)
    dist.barrier()
    found["step_wall"].append(time.perf_counter() - wall)
    found["update_cpu"].append(clock.cpu)
    found["update_wall"].append(clock.wall)
    found["newton_schulz"].append(clock.newton_schulz)


# What is shown.


def slowest(row: Row, key: str) -> float:
    """The median of the slowest rank, in ms."""
    return 1e3 * max(statistics.median(figures[key]) for figures in row["by_rank"])


def largest(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0.0"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f}"


def cells(row: Row, ours: Row, setting: Setting, metric: str) -> dict[str, str]:
    """What a table says of a system, by heading."""
    by_rank = row["by_rank"]
    if metric == "time":
        values = {key: (slowest(row, key), slowest(ours, key)) for key in TIMES}
        found = {key.replace("_", ", "): f"{ms:.1f}  {ms / base:.2f}x" for key, (ms, base) in values.items()}
        found["Newton-Schulz"] = f"{slowest(row, 'newton_schulz'):.1f}" if setting.device == "cpu" else ""
    elif metric == "bytes":
        found = {}
        for part in ("update", "step"):
            most = max((figures[part] for figures in by_rank), key=lambda traffic: sum(traffic["sent"].values()))
            found[f"{part}, calls"] = str(sum(most["calls"].values()))
            found[f"{part}, MB"] = megabytes(sum(most["sent"].values()))
        found["a rank, MB"] = megabytes(sent_in_all(row) / len(by_rank))
        planned = None if by_rank[0]["planned"] is None else sum(figures["planned"] for figures in by_rank)
        found["planned"] = "" if planned is None else megabytes(planned / len(by_rank))
        found["padding"] = "" if by_rank[0]["padding"] is None else str(by_rank[0]["padding"])
    elif metric == "memory":
        most = max((figures["state"] for figures in by_rank), key=lambda state: sum(state.values()))
        found = {kind: megabytes(nbytes) for kind, nbytes in most.items()}
        found["state in all"] = megabytes(sum(most.values()))
        found |= {key: f"{max(figures[key] for figures in by_rank) / 1e6:.0f}" for key in ("kept", "peak")}
    else:
        return launched(row, setting)
    matrices, others = map(max, zip(*(figures["differ"] for figures in by_rank)))
    return {**found, "differ: matrices": largest(matrices), "others": largest(others)}


def launched(row: Row, setting: Setting) -> dict[str, str]:
    """The operations of the rank with the most, and per matrix of the model."""
    most = max(row["by_rank"], key=operations)
    outside, inside = (sum(most[key].values()) / setting.matrices for key in ("operations", "newton_schulz"))
    return {
        "operations a matrix": f"{outside + inside:.1f}",
        "outside NS": f"{outside:.1f}",
        "in NS": f"{inside:.1f}",
        "batches": str(most["calls"]),
        "matrices, all ranks": str(orthogonalized(row)),
        "host reads": str(most["host_reads"]),
        "collectives": str(most["collectives"]),
        "allocations": str(most["allocations"]),
    }


def operations(figures: Figures) -> int:
    return sum(figures["operations"].values()) + sum(figures["newton_schulz"].values())


def orthogonalized(row: Row) -> int:
    return sum(figures["matrices"] for figures in row["by_rank"])


def sent_in_all(row: Row) -> int:
    return sum(sum(figures["step"]["sent"].values()) for figures in row["by_rank"])


def table(rows: Sequence[Row], setting: Setting, metric: str) -> Table:
    title = f"{metric}: {setting.ranks} ranks ({setting.device}), {setting.matrices} matrices of width {setting.width}"
    drawn = Table(title=title, title_justify="left")
    ours = {row["engine"]: row for row in reversed(rows)}  # the first of each engine
    shown = [cells(row, ours[row["engine"]], setting, metric) for row in rows]
    for heading in ("engine", "system", *shown[0]):
        drawn.add_column(heading, justify="left" if heading in ("engine", "system") else "right")
    for row, cell in zip(rows, shown):
        drawn.add_row(row["engine"], row["system"], *cell.values())
    return drawn


def problems(rows: Sequence[Row], setting: Setting, metric: str) -> list[str]:
    """The promises of this package that are not kept, in sentences."""
    found = []
    exact = setting.device == "cpu" and setting.ranks & (setting.ranks - 1) == 0  # sums of equal gradients are exact
    for row in rows:
        name, by_rank = f"{row['engine']}, {row['system']}", row["by_rank"]
        if row["system"] == OURS and metric != "launches" and exact and any(each["differ"][0] for each in by_rank):
            found.append(f"{name} differs from torch.optim in one process")
        if row["system"] == OURS and metric == "launches" and orthogonalized(row) != setting.matrices:
            found.append(f"{name} orthogonalizes {orthogonalized(row)} of {setting.matrices} matrices")
        if metric == "bytes" and by_rank[0]["planned"] is not None and setting.accumulation == 1:
            all_of_them = [figures["step"]["sent"] for figures in by_rank]
            flags = sum(sent.get("allreduce", 0) for sent in all_of_them)
            exchanged = sum(sent.get("alltoall_base", 0) for sent in all_of_them)
            said = exchanged if row["engine"] == "fsdp2" else sent_in_all(row) - flags
            planned = sum(figures["planned"] for figures in by_rank)
            if said != planned:
                found.append(f"{name} sent {said} bytes, its plan says {planned}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metric", choices=METRICS, required=True)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES, metavar="{" + ",".join(ENGINES) + "}")
    parser.add_argument("--system", nargs="+", help='names, or words of them: "ours"; default: all')
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help="of the model")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank's micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="of owned storage in plain PyTorch")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if min(*options.ranks, options.rounds, options.layers) < 1:
        parser.error("--ranks, --rounds and --layers: expected at least 1")
    if options.device == "cuda" and torch.cuda.device_count() < max(options.ranks):
        parser.error(f"--device cuda: expected {max(options.ranks)} GPUs, found {torch.cuda.device_count()}")
    if options.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    console = Console(width=170 if not Console().is_terminal else None, highlight=False)
    names = ("layers", "width", "tokens", "accumulation", "bucket_mb", "device")
    given = {name: getattr(options, name) for name in names}
    setting = Setting(0, **given, matrices_only=options.metric == "launches")
    results, wrong = [], []
    for ranks in options.ranks:
        setting = replace(setting, ranks=ranks)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (setting, options, folder), nprocs=ranks)
            rows = torch.load(f"{folder}/rows.pt", weights_only=False)
        if rows:
            console.print(table(rows, setting, options.metric))
        results += [{"metric": options.metric, "setting": asdict(setting), **row} for row in rows]
        wrong += problems(rows, setting, options.metric)
    for missing in map(imported, ("deepspeed", "dion")):
        if isinstance(missing, str):
            console.print(missing)
    if options.json:
        record.write(options.json, results)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
