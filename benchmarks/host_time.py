"""Host time of a step outside torch's operations.

    python -m benchmarks.host_time --engine fsdp2 --rounds 20

The rank of llama3.1-8b (224 matrices) with the most work of 64 ranks is rehearsed: see benchmarks/rehearsal. The table
has the least milliseconds of ``--rounds`` steps. They are CPU seconds of the step without those inside functions of
torch that Python calls, and without what it costs to see these calls, as measured at the beginning. Python in torch
around such functions counts as outside: collectives, optimizers.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
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


def quickest(engine: str, rounds: int) -> dict[str, Any]:
    """The milliseconds outside torch's functions of the step that took least, with its calls and operations."""
    wanted = study(MODEL, engine, RANKS)
    (planned,) = wanted.worst.planned
    assert planned.part is not None
    rank = planned.part.loads.index(max(planned.part.loads))
    small = torch.empty(1)
    each = min(outside(lambda: [small.requires_grad for _ in range(1000)])[0] for _ in range(5)) / 1000
    recorder, steps = Recorder(), []
    with pretended(rank, RANKS, others_of(planned)), absent_gpu(recorder):
        rehearsed = ENGINES[engine](planned, wanted.setting)
        for _ in range(WARM_UP + rounds):
            recorder.forget()
            rehearsed.backward()
            nanoseconds, calls = outside(rehearsed.step, each)
            steps.append({"ms": nanoseconds / 1e6, "calls": calls, "operations": sum(recorder.operations.values())})
    return min(steps[WARM_UP:], key=lambda step: step["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=sorted(ENGINES), default=["fsdp2", "zero3", "zero1"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    figures = []
    for engine in options.engine:
        step = quickest(engine, options.rounds)
        figures.append({"engine": engine, **step})
        print(f"{engine:6} {step['ms']:6.1f} ms, {step['calls']} calls, {step['operations']} operations", flush=True)
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
