"""One training step on every engine, compared with other Muons: its time, its bytes, its launches, and the result.

    python -m benchmarks.step --engine fsdp2 --ranks 2 4
    python -m benchmarks.step --rounds 0 --engine zero2 --json bytes.json
    python -m benchmarks.step --launches --ranks 1 2 4 --layers 12 --width 64

All systems train a small GPT in fp32 from the same weights, with the same batches and options; matrices are Muon's, the
embedding, the head and the norms AdamW's. Ranks are processes on this machine: gloo on one thread each, or NCCL with
``--device cuda``. Two steps warm up, the third is counted; then the weights are compared with torch.optim in one
process, after as many steps.

Then the systems take turns, so that a machine that slows down does so for all. Milliseconds are medians of ``--rounds``
steps on the slowest rank, with their ratio to this package's: of CPU time with the transport's threads, or on a GPU on
the clock. The update is the optimizer's part of a step with the host's own work in it. Bytes are those of the rank that
sends most.

With ``--launches``, ranks step in batches of equal shapes and read nothing, as on an accelerator, and the model has
matrices alone. Every operation on a GPU costs a launch, and so does all for which a host waits: both are counted.
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
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import record
from benchmarks.step_systems import (
    COMPARED_AFTER,
    ENGINES,
    OURS,
    Hooks,
    Setting,
    System,
    built,
    difference,
    reference,
    systems,
)
from benchmarks.step_watch import Watch
from lwopt_backend.rules.newton_schulz import IMMEDIATE

Figures = dict[str, Any]  # of a system on one rank
Row = dict[str, Any]  # a system: its engine, ranks and name, and its figures by rank


# On each rank.


def run_rank(rank: int, setting: Setting, options: argparse.Namespace, folder: str) -> None:
    """All systems on one rank, called on all of them."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DTensors on a CPU say that they replace a collective
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives that DeepSpeed and DDP call
    torch._dynamo.config.disable = True  # DeepSpeed's Muon would compile for a minute
    if setting.matrices_only:
        IMMEDIATE.clear()
    ranks = str(setting.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_SIZE=ranks)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if setting.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=setting.ranks)
    expected = reference(setting)
    rows: list[Row] = []
    for engine in options.engine:
        found = measured(engine, setting, options.rounds, expected)
        gathered: list[Any] = [None] * setting.ranks
        dist.all_gather_object(gathered, found)
        for name in found:
            by_rank = [figures[name] for figures in gathered]
            rows.append({"engine": engine, "ranks": setting.ranks, "system": name, "by_rank": by_rank})
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # taking down gloo's groups, which DDP and DeepSpeed still hold, now and then waits for ranks that went


def measured(engine: str, setting: Setting, rounds: int, expected: Mapping[str, Tensor]) -> dict[str, Figures]:
    """The figures of an engine's systems; those that are timed are there at once."""
    makes = systems(engine, setting)
    figures: dict[str, Figures] = {}
    for some in [makes] if rounds else [{name: make} for name, make in makes.items()]:
        with built(some) as found:
            for system in found:
                figures[system.name] = {**counted(system, setting), "differ": difference(system, expected)}
            for turn in range(rounds):
                for system in found[turn % len(found) :] + found[: turn % len(found)]:
                    timed(system, setting, COMPARED_AFTER + turn, figures[system.name])
    return figures


def counted(system: System, setting: Setting) -> Figures:
    """Take three steps, and say what the third did. ZeRO-3 records the order of modules in the first step and checks it
    in the second."""
    for number in range(COMPARED_AFTER - 1):
        system.step(setting.batches(number), Hooks())
    watch = Watch(dist.get_rank(), setting.ranks)
    with watch.watching() as hooks:
        system.step(setting.batches(COMPARED_AFTER - 1), hooks)
    return {**watch.count.figures(), "update_seconds": [], "step_seconds": []}


def timed(system: System, setting: Setting, step: int, found: Figures) -> None:
    """Take a step, and add its seconds."""
    batches, updates = setting.batches(step), list[float]()

    def now() -> float:
        if setting.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def update(work: Any) -> Any:
        began = now()
        try:
            return work()
        finally:
            updates.append(now() - began)

    dist.barrier()
    began = now()
    system.step(batches, Hooks(update=update))
    found["step_seconds"].append(now() - began)
    found["update_seconds"].append(sum(updates))


# What is shown.


def slowest(row: Row, key: str) -> float:
    """The median of the slowest rank, in ms."""
    return 1e3 * max(statistics.median(figures[key]) for figures in row["by_rank"])


def most_sent(row: Row, part: str) -> float:
    """MB of the rank that sends most."""
    return max(sum(figures[part].values()) for figures in row["by_rank"]) / 1e6


def total(row: Row, key: str) -> int:
    return sum(figures[key] for figures in row["by_rank"])


def cells(row: Row, ours: Row, setting: Setting) -> dict[str, str]:
    """What the table says of a system, by heading."""
    by_rank = row["by_rank"]
    if setting.matrices_only:
        most = max(by_rank, key=lambda figures: figures["operations"] + figures["newton_schulz"])
        each = {key: f"{most[key] / setting.matrices:.1f}" for key in ("operations", "newton_schulz")}
        more = ("calls", "host_reads", "collectives")
        return {**each, "matrices, all ranks": str(total(row, "matrices")), **{key: str(most[key]) for key in more}}
    found = {}
    for part in ("update", "step") if by_rank[0]["step_seconds"] else ():
        ms, base = slowest(row, f"{part}_seconds"), slowest(ours, f"{part}_seconds")
        found[f"{part}, ms"] = f"{ms:.1f}  {ms / base:.2f}x"
    found |= {f"{part}, MB": f"{most_sent(row, part):.2f}" for part in ("update", "step")}
    matrices, others = map(max, zip(*(figures["differ"] for figures in by_rank)))
    return {**found, "differ: matrices": f"{matrices:.1e}", "others": f"{others:.1e}"}


def show(rows: list[Row], setting: Setting) -> None:
    ours = {row["engine"]: row for row in reversed(rows)}  # the first of each engine
    for row in rows:
        shown = ", ".join(f"{name} {value}" for name, value in cells(row, ours[row["engine"]], setting).items())
        print(f"{row['engine']} on {setting.ranks} ranks ({setting.device}), {row['system']}: {shown}", flush=True)


def problems(rows: list[Row], setting: Setting) -> list[str]:
    """The promises of this package that are not kept, in sentences."""
    found = []
    exact = setting.device == "cpu" and not setting.matrices_only  # which are batched, and so round otherwise
    exact = exact and setting.ranks & (setting.ranks - 1) == 0  # sums of equal gradients are exact
    for row in rows:
        if row["system"] != OURS:
            continue
        if exact and any(figures["differ"][0] for figures in row["by_rank"]):
            found.append(f"{row['engine']} differs from torch.optim in one process")
        if total(row, "matrices") != setting.matrices:
            found.append(f"{row['engine']} orthogonalizes {total(row, 'matrices')} of {setting.matrices} matrices")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help="of the model")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank's micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="of plain PyTorch")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps; 0: none")
    parser.add_argument("--launches", action="store_true", help="count launches as on an accelerator, and time nothing")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < max(options.ranks):
        parser.error(f"--device cuda: expected {max(options.ranks)} GPUs, found {torch.cuda.device_count()}")
    if options.device == "cpu":
        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    options.rounds *= not options.launches
    names = ("layers", "width", "tokens", "accumulation", "bucket_mb", "device")
    common = {name: getattr(options, name) for name in names}
    results, wrong = [], []
    for ranks in options.ranks:
        setting = Setting(ranks, **common, matrices_only=options.launches)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (setting, options, folder), nprocs=ranks)
            rows = torch.load(f"{folder}/rows.pt", weights_only=False)
        show(rows, setting)
        results += [{"setting": asdict(setting), **row} for row in rows]
        wrong += problems(rows, setting)
    if options.json:
        record.write(options.json, results)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
