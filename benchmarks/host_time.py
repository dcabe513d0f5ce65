"""CPU time that a step costs its host, and what planning and construction take; side by side with another commit.

    python -m benchmarks.host_time --row fsdp2 zero3 --rounds 20
    python -m benchmarks.host_time --against COMMIT

Rows drive the package's public API, and the rehearsal of one rank (benchmarks/rehearsal) on a GPU that is not there.
All seconds are CPU time of one thread, in the median of ``--rounds``. A rehearsed step is counted without what is
inside functions of torch that Python calls, and without what it costs to see these calls, as measured at the beginning.
Python in torch around such functions counts: collectives, optimizers.

With ``--against``, a checkout of that commit runs in a temporary folder, with this file and the commit's own rehearsal.
Both take turns, ``--runs`` times, each time in a new process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lwopt_backend
from benchmarks import public_models, record
from benchmarks.rehearsal.absent_gpu import Recorder, absent_gpu, pretended, replaced
from benchmarks.rehearsal.engines import ENGINES, Engine, ReplicatedEngine
from benchmarks.rehearsal.step import others_of
from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import ModelShapes
from lwopt_backend.planner.study import Deployment, Study, plan_study
from lwopt_backend.routing.routing import Route, named_as_stack

MODEL, RANKS = "llama3.1-8b", 64
MATRICES = len(public_models.load(MODEL))  # 224
WARM_UP = 2  # steps, which make state and caches

T = TypeVar("T")
Shapes = Sequence[tuple[str, tuple[int, ...]]]  # of parameters, by name
Figures = dict[str, Any]  # by what they are
Row = Callable[[int], Figures]  # of a number of rounds


class Calls(TorchFunctionMode):
    """Adds up the nanoseconds inside torch's functions, and counts their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.count = 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time_ns()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.inside += time.thread_time_ns() - began
            self.count += 1


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this thread, and what ``run`` returned."""
    gc.collect()
    gc.disable()
    began = time.thread_time()
    found = run()
    took = time.thread_time() - began
    gc.enable()
    return took, found


def outside(step: Callable[[], object], each: float = 0.0) -> tuple[float, int]:
    """Seconds of ``step`` outside torch's functions, less ``each`` a call; and the calls."""
    with Calls() as calls:
        took, _ = timed(step)
    return took - calls.inside / 1e9 - each * calls.count, calls.count


# Rehearsed steps.


@contextmanager
def rehearsed(wanted: Study, make: Callable[..., Engine]) -> Iterator[tuple[Recorder, Callable[[], Engine]]]:
    """The rank with the most work: what records it, and what makes its engine."""
    (planned,) = wanted.worst.planned
    assert planned.part is not None
    rank, recorder = planned.part.loads.index(max(planned.part.loads)), Recorder()
    with pretended(rank, planned.ranks, others_of(planned)), absent_gpu(recorder):
        yield recorder, lambda: make(planned, wanted.setting)


def operations(wanted: Study, make: Callable[..., Engine]) -> Mapping[str, int]:
    """The operations of one step, by part."""
    with rehearsed(wanted, make) as (recorder, build):
        engine = build()
        for _ in range(WARM_UP):
            engine.backward()
            recorder.forget()
            engine.step()
        return dict(recorder.operations)


def step(wanted: Study, engine: str, rounds: int) -> Figures:
    """Milliseconds outside torch's functions, with calls and operations."""
    small, ms = torch.empty(1), []
    each = min(outside(lambda: [small.requires_grad for _ in range(1000)])[0] for _ in range(5)) / 1000
    with rehearsed(wanted, ENGINES[engine]) as (recorder, build):
        rank = build()
        for _ in range(WARM_UP + rounds):
            rank.backward()
            recorder.forget()
            took, calls = outside(rank.step, each)
            ms.append(took * 1e3)
        return {
            "ms": statistics.median(ms[WARM_UP:]),
            "calls": calls,
            "operations": sum(recorder.operations.values()),
        }


def of_llama(engine: str, rounds: int, options: Mapping[str, Any] | None = None) -> Figures:
    """A step with the 224 matrices of Llama-8B on 64 ranks."""
    return step(public_models.study(MODEL, engine, RANKS, options=options), engine, rounds)


def of_experts(rounds: int) -> Figures:
    """A step of FSDP2 with the stacked experts of Qwen3-30B-A3B on 8 ranks, each with an eighth of all slices."""
    found = step(public_models.study("qwen3-30b-a3b", "fsdp2", 8, stack=True), "fsdp2", rounds)
    slices = sum(".experts." in name for name, _ in public_models.load("qwen3-30b-a3b")) / 8
    return {"us a slice": found["ms"] * 1e3 / slices, **found}


def with_norms(matrix: Mapping[str, Any], rounds: int) -> Figures:
    """Operations of a step outside the rule's own on whole matrices, for each matrix; FSDP2 on 64 ranks."""
    wanted = public_models.study(MODEL, "fsdp2", RANKS, options={"matrix": matrix})
    found = operations(wanted, ENGINES["fsdp2"])
    outer = sum(number for part, number in found.items() if not part.startswith("rule "))
    return {"operations a matrix": outer / MATRICES, **step(wanted, "fsdp2", rounds)}


def of_all_engines(_: int) -> Figures:
    """The operations of a step on every engine."""
    engines: dict[str, tuple[str, Callable[..., Engine]]] = {name: (name, make) for name, make in ENGINES.items()}
    engines["zero0"] = ("zero1", ReplicatedEngine)
    return {
        name: sum(operations(public_models.study(MODEL, planned, RANKS), make).values())
        for name, (planned, make) in sorted(engines.items())
    }


# Owned storage, with real tensors: torch walks the lists of collectives inside its functions.

BUCKETS, OWNERS, WIDTH = 128, 2, 64  # of square matrices, each with its own owner


def of_buckets(ranks: int, rounds: int) -> Figures:
    """Milliseconds in which compact buckets leave for their owners and return, without the rule's step."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS * OWNERS))).to(torch.bfloat16)
    gather, ones = dist.all_gather, [torch.zeros(1) for _ in range(ranks)]

    def all_gather(parts: list[Tensor], mine: Tensor, **kwargs: Any) -> Any:
        """Of as many tensors: those of a group without other ranks are copied, and must have equal sizes."""
        return gather(ones[: len(parts)], ones[0], **kwargs)

    with pretended(0, ranks, lambda mine, count: [mine] * count), replaced(dist, "all_gather", all_gather):
        size = OWNERS * WIDTH**2 * 2 / 2**20
        optimizer = LayerWiseOptimizer(
            model, lr=0.02, report=False, layout="compact", bucket_mb=size, overlap_grad_reduce=False
        )
        buckets = optimizer.core.manager.buckets
        assert [len(bucket.bucket.slots) for bucket in buckets] == [OWNERS] * BUCKETS

        def exchange() -> None:
            for bucket in buckets:
                bucket.launch()
            for bucket in buckets:
                bucket.arrive()
                bucket.settle()
                bucket.send_values()
            for bucket in buckets:
                bucket.receive_values()

        found = []
        for _ in range(WARM_UP + 2 * rounds):
            model(torch.zeros(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
            with torch.no_grad():
                found.append(timed(exchange)[0] * 1e3)
            optimizer.zero_grad()
    return {"ms": statistics.median(found[WARM_UP:])}


# Planning and construction.


def study_of(shapes: Shapes, engine: str, ranks: int) -> Study:
    """The plan of matrices, and of stacks of matrices."""
    routes = [Route(name, shape, "matrix", "listed", stack=named_as_stack(name, shape)) for name, shape in shapes]
    setting = Setting.of(engine)
    return plan_study(ModelShapes("listed", *setting.training.of(routes)), Deployment(ranks), setting)


def digest_of(shapes: Shapes, engine: str, ranks: int) -> str:
    return study_of(shapes, engine, ranks).digest


def construction(_: int) -> Figures:
    """Seconds in which a rank of 1,024 makes its optimizer for two stacks of 256 experts on FSDP2."""
    stacks = [("layers.0.experts.up", (256, 4096, 7168)), ("layers.0.experts.down", (256, 7168, 2048))]
    with rehearsed(study_of(stacks, "fsdp2", 1024), ENGINES["fsdp2"]) as (_recorder, build):
        return {"s": timed(build)[0]}


def planning(_: int) -> Figures:
    """Seconds in which a trillion parameters are planned on 1,024 ranks, without imports; and the plans' digests."""
    shapes = public_models.load("kimi-k2-like", "mcore_grouped")
    study_of(shapes[:100], "plain", 8)  # imports
    found: Figures = {}
    for engine in ("plain", "zero1", "zero3", "fsdp2"):
        found[f"{engine} s"], found[f"{engine} digest"] = timed(partial(digest_of, shapes, engine, 1024))
    return found


ROWS: Mapping[str, Row] = {
    **{engine: partial(of_llama, engine) for engine in ("fsdp2", "zero3", "zero1")},
    "hsdp": partial(of_llama, "fsdp2", options={"group_size": 8}),
    "experts": of_experts,
    **{f"owned{ranks}": partial(of_buckets, ranks) for ranks in (8, 64, 256, 512)},
    "hyperball": partial(with_norms, {"name": "muon", "hyperball": True, "weight_decay": 0.0}),
    "uw_floor": partial(with_norms, {"name": "muon", "uw_floor": 0.35}),
    "adamh": partial(with_norms, {"name": "adamh"}),
    "construction": construction,
    "planning": planning,
    "operations": of_all_engines,
}


# Two commits.


def measured(folder: Path, row: str, rounds: int) -> Figures:
    """A row in a new process, with the package in ``folder``."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        command = ["-m", "benchmarks.host_time", "--row", row, "--rounds", str(rounds), "--json", str(file)]
        subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (found,) = json.loads(file.read_text())["figures"]
    assert isinstance(found, dict)
    return found


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A checkout of ``commit`` with this file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkout"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(folder), commit], cwd=record.ROOT, check=True)
        try:
            copyfile(__file__, folder / "benchmarks" / "host_time.py")
            (folder / "lwopt_backend" / "integrations").symlink_to(folder / "integrations")  # where an install has it
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=record.ROOT, check=True)


def compare(commit: str, rows: Sequence[str], rounds: int, runs: int) -> Iterator[Figures]:
    """Per row and figure: the medians before and after, and their ratio."""
    with checked_out(commit) as before:
        for row in rows:
            found: tuple[list[Figures], list[Figures]] = ([], [])
            for _ in range(runs):
                for folder, figures in zip((before, record.ROOT), found):
                    figures.append(measured(folder, row, rounds))
            for what in found[1][0]:
                if what != "row":
                    old, new = ([figures[what] for figures in some] for some in found)
                    yield {"row": row, "figure": what, **_both(old, new)}


def _both(old: Sequence[Any], new: Sequence[Any]) -> Figures:
    load = round(os.getloadavg()[0], 1)
    if isinstance(old[0], str):
        return {"before": old[0], "after": new[0], "equal": {*old} == {*new}, "load": load}
    before, after = statistics.median(old), statistics.median(new)
    return {"before": before, "after": after, "ratio": after / before if before else None, "load": load}


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--rounds", type=int, default=10, help="steps")
    parser.add_argument("--runs", type=int, default=3, help="processes of each commit")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    assert Path(lwopt_backend.__file__).is_relative_to(record.ROOT), "the package is another checkout's"
    warnings.simplefilter("ignore")
    figures = []
    if options.against:
        for each in compare(options.against, options.row, options.rounds, options.runs):
            figures.append(each)
            print(", ".join(f"{key} {shown(value)}" for key, value in each.items()), flush=True)
    else:
        for row in options.row:
            figures.append({"row": row, **ROWS[row](options.rounds)})
            print(", ".join(f"{key} {shown(value)}" for key, value in figures[-1].items()), flush=True)
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
