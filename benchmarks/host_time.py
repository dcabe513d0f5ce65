"""Host time of a step outside torch's operations, at another commit and this one.

    python -m benchmarks.host_time --against 3ed42a3
    python -m benchmarks.host_time --engine fsdp2 --rounds 20
    python -m benchmarks.host_time --engine owned --backward

The rank of llama3.1-8b (224 matrices) with the most work of 64 ranks is rehearsed: see benchmarks/rehearsal. Both
commits take steps in turn, each in a separate process; the table has the least milliseconds of ``--rounds`` steps. They
are CPU seconds of the step without those inside functions of torch that Python calls, and without what it costs to see
these calls, as measured at the beginning. Python in torch around such functions counts as outside: collectives,
optimizers. With ``--backward``, they are all CPU seconds of a backward pass, whose operations have no kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks import record
from benchmarks.public_models import study
from benchmarks.rehearsal.absent_gpu import Recorder, absent_gpu, pretended
from benchmarks.rehearsal.engines import ENGINES
from benchmarks.rehearsal.step import others_of

MODEL, RANKS = "llama3.1-8b", 64
WARM_UP = 2  # steps, which make state and caches
ROOT = Path(__file__).resolve().parents[1]


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


def outside(step: Callable[[], object], each: float = 0.0) -> tuple[float, int]:
    """Nanoseconds of ``step`` outside torch's functions, less ``each`` a call; and the calls."""
    gc.collect()
    gc.disable()
    with Calls() as calls:
        began = time.thread_time_ns()
        step()
        took = time.thread_time_ns() - began
    gc.enable()
    return took - calls.inside - each * calls.count, calls.count


def answer(engine: str, backward: bool) -> None:
    """For every line that is read, take a step, and write its milliseconds outside torch's functions, or those of its
    backward pass."""
    answers, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    wanted = study(MODEL, engine, RANKS)
    (planned,) = wanted.worst.planned
    assert planned.part is not None
    rank = planned.part.loads.index(max(planned.part.loads))
    small = torch.empty(1)
    each = min(outside(lambda: [small.requires_grad for _ in range(1000)])[0] for _ in range(5)) / 1000
    recorder = Recorder()
    with pretended(rank, RANKS, others_of(planned)), absent_gpu(recorder):
        rehearsed = ENGINES[engine](planned, wanted.setting)
        for number, _ in enumerate(chain(range(WARM_UP), sys.stdin)):
            recorder.forget()
            began = time.thread_time_ns()
            rehearsed.backward()
            passed = time.thread_time_ns() - began
            nanoseconds, calls = outside(rehearsed.step, each)
            if backward:
                nanoseconds = passed
            if number >= WARM_UP:
                found = {"ms": nanoseconds / 1e6, "calls": calls, "operations": sum(recorder.operations.values())}
                print(json.dumps(found), file=answers, flush=True)


def compared(engine: str, roots: dict[str, Path], rounds: int, *more: str) -> dict[str, dict[str, float]]:
    """By commit, the figures of the step that took least; the commits' code lies in ``roots``."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    with ExitStack() as stack:
        children = {}
        for name, root in roots.items():
            command = [sys.executable, "-P", __file__, "--answer", engine, *more]  # on that commit's modules
            env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            child = subprocess.Popen(
                command, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            children[name] = stack.enter_context(child)
        for name, child in [*children.items()] * rounds:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("step\n")
            child.stdin.flush()
            found[name].append(json.loads(child.stdout.readline()))
    return {name: min(steps, key=lambda step: step["ms"]) for name, steps in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=sorted(ENGINES), default=["fsdp2", "zero3", "zero1"])
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.backward)
        return
    roots, figures = {"this": ROOT}, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        if options.against:
            roots = {options.against: Path(folder) / "against", **roots}
            subprocess.run([*git, "add", "--quiet", "--detach", roots[options.against], options.against], check=True)
        try:
            for engine in options.engine:
                for name, step in compared(engine, roots, options.rounds, *["--backward"] * options.backward).items():
                    figures.append({"engine": engine, "commit": name, **step})
                    shown = f"{step['ms']:6.1f} ms, {step['calls']} calls, {step['operations']} operations"
                    print(f"{engine:6} {name:10} {shown}", flush=True)
        finally:
            if options.against:
                subprocess.run([*git, "remove", "--force", roots[options.against]], check=True)
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
