"""What a step asks of its host and of the wire, in numbers that no machine changes; side by side with another commit.

    python -m benchmarks.step_counts --row fsdp2 zero3
    python -m benchmarks.step_counts --against COMMIT

Rows rehearse the step of the busiest rank (benchmarks/rehearsal) on a GPU that is not there, and count its operations
on the GPU, the calls of torch's functions, collectives, the bytes that it sends, and what waits for the GPU. Nothing is
timed: on a rehearsed GPU, most of the time is that of tensors without values.

With ``--against``, a checkout of that commit runs in a temporary folder, with this file and the commit's own rehearsal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

from torch.overrides import TorchFunctionMode

import lwopt_backend
from benchmarks import public_models, record
from benchmarks.rehearsal.absent_gpu import Recorder, absent_gpu, pretended
from benchmarks.rehearsal.engines import ENGINES, Engine, ReplicatedEngine
from benchmarks.rehearsal.step import others_of
from lwopt_backend.planner.study import Study

MODEL, RANKS = "llama3.1-8b", 64
MATRICES = len(public_models.load(MODEL))  # 224
WARM_UP = 2  # steps, which make state and caches

Figures = dict[str, Any]  # by what they are


class Calls(TorchFunctionMode):
    """Counts the calls of torch's functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def rehearsed(wanted: Study, make: Callable[..., Engine]) -> Iterator[tuple[Recorder, Engine]]:
    """The rank with the most work, and what records it."""
    (planned,) = wanted.worst.planned
    assert planned.part is not None
    rank, recorder = planned.part.loads.index(max(planned.part.loads)), Recorder()
    with pretended(rank, planned.ranks, others_of(planned)), absent_gpu(recorder):
        yield recorder, make(planned, wanted.setting)


def step(wanted: Study, make: Callable[..., Engine]) -> Figures:
    """The counts of one step."""
    with rehearsed(wanted, make) as (recorder, engine):
        for _ in range(WARM_UP):
            engine.backward()
            engine.step()
        engine.backward()
        recorder.forget()
        with Calls() as calls:
            engine.step()
        rules = sum(number for part, number in recorder.operations.items() if part.startswith("rule "))
        every = sum(recorder.operations.values())
        return {
            "operations": every,
            "operations outside rules, a matrix": (every - rules) / MATRICES,
            "calls": calls.count,
            "collectives": {name: number for name, (number, _) in sorted(recorder.collectives.items())},
            "bytes": sum(nbytes for _, nbytes in recorder.collectives.values()),
            "waits": sum(recorder.waits.values()),
        }


def of_llama(engine: str, make: Callable[..., Engine] | None = None, **options: Any) -> Figures:
    """A step with the 224 matrices of Llama-8B on 64 ranks."""
    return step(public_models.study(MODEL, engine, RANKS, options=options), make or ENGINES[engine])


ROWS: Mapping[str, Callable[[], Figures]] = {
    **{engine: partial(of_llama, engine) for engine in ("plain", "fsdp2", "zero1", "zero2", "zero3")},
    "zero0": partial(of_llama, "zero1", ReplicatedEngine),
    "hsdp": partial(of_llama, "fsdp2", group_size=8),
    # Rules that use norms of whole matrices.
    "hyperball": partial(of_llama, "fsdp2", matrix={"name": "muon", "hyperball": True, "weight_decay": 0.0}),
    "uw_floor": partial(of_llama, "fsdp2", matrix={"name": "muon", "uw_floor": 0.35}),
    "adamh": partial(of_llama, "fsdp2", matrix={"name": "adamh"}),
}


# Two commits.


def counted(folder: Path, row: str) -> Figures:
    """A row in a new process, with the package in ``folder``."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.step_counts", "--row", row, "--json", str(file)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
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
            copyfile(__file__, folder / "benchmarks" / "step_counts.py")
            (folder / "lwopt_backend" / "integrations").symlink_to(folder / "integrations")  # where an install has it
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=record.ROOT, check=True)


def compare(commit: str, rows: Sequence[str]) -> Iterator[Figures]:
    """Per row and figure: before and after."""
    with checked_out(commit) as folder:
        for row in rows:
            before, after = (counted(each, row) for each in (folder, record.ROOT))
            for what in after:
                if what != "row":
                    yield {"row": row, "figure": what, "before": before[what], "after": after[what]}


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    assert Path(lwopt_backend.__file__).is_relative_to(record.ROOT), "the package is another checkout's"
    warnings.simplefilter("ignore")
    alone = ({"row": row, **ROWS[row]()} for row in options.row)
    figures = []
    for each in compare(options.against, options.row) if options.against else alone:
        figures.append(each)
        print(", ".join(f"{key} {shown(value)}" for key, value in each.items()), flush=True)
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
