"""The benchmarks run, and what they say of exactness, bytes and work holds."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import conformance
from benchmarks.step_systems import DEEPSPEEDS, OURS, TORCHS, Hooks, Setting, built, systems
from benchmarks.step_watch import Watch
from lwopt_backend.rules.newton_schulz import IMMEDIATE
from tests.launcher import ROOT, succeeds
from tests.on_ranks import on_ranks
from tests.pages import PAGES
from tests.ranks import gathered

RESULTS = ROOT / "benchmarks" / "results"
GRAM, BUCKETS, COMPACT = "ours, gram_aspect=1.5", "ours, bucket_matrices=16", "ours, compact"


def results(name: str) -> list[Any]:
    """The figures of a file that pages quote."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


# Pages.


def test_the_table_of_peers_is_that_of_the_results() -> None:
    rows = {(row["peer"], row["case"]): row for row in results("conformance")}
    assert conformance.with_table(PAGES["peers"], rows) == PAGES["peers"]
    assert {peer for peer, _ in rows} == {*conformance.PEERS} and {case for _, case in rows} == {*conformance.CASES}


# Programs.


def figures(tmp_path: Path, benchmark: str, arguments: str) -> tuple[Any, str]:
    command = f"python -m benchmarks.{benchmark} {arguments} --json {tmp_path}/figures.json"
    printed = succeeds(command, ROOT)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["command"].startswith(f"python -m benchmarks.{benchmark} ")
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] and len(found["commit"].rstrip("+")) == 40
    return found["figures"], printed


@pytest.mark.full
def test_host_time_is_that_of_two_commits_in_turn(tmp_path: Path) -> None:
    found, _ = figures(tmp_path, "host_time", "--against HEAD --engine zero1 --rounds 1")
    assert [row["commit"] for row in found] == ["HEAD", "this"]
    assert all(row["ms"] > 0 and row["calls"] > row["operations"] > 0 for row in found)
    assert "/against" not in succeeds("git worktree list", ROOT)


@pytest.mark.full
def test_a_step_sends_what_its_host_would_and_two_exchanges(tmp_path: Path) -> None:
    """Under DeepSpeed with two micro-batches, weights and gradients travel as with DeepSpeed's AdamW; this package adds
    all-to-alls. The program asserts the plans' bytes, the result, and one Newton-Schulz a matrix."""
    width = 32  # whose parts over the ranks fill vector registers: AdamW then rounds as on whole parameters
    matrix_bytes, small = 12 * width**2 * 4, 200  # of the one layer; norms and flags
    rows, _ = figures(tmp_path, "step", f"--layers 1 --width {width} --tokens 8 --rounds 1 --accumulation 2")
    traffic = {
        (row["engine"], row["system"]): sum((Counter(f["step"]) for f in row["by_rank"]), Counter()) for row in rows
    }
    for stage in range(4):
        ours, theirs, adamw = (traffic[f"zero{stage}", name] for name in (OURS, DEEPSPEEDS, "AdamW"))
        assert 0 < ours.pop("alltoall_base") <= 2 * (matrix_bytes // 2)  # there and back, in bf16
        if stage == 0:
            ours.pop("allgather_base")  # what AdamW's share of the ranks has updated
        assert theirs.total() > adamw.total() + matrix_bytes if stage == 3 else set(theirs) == set(adamw)
        assert set(ours) == set(adamw) and all(abs(ours[kind] - adamw[kind]) < small for kind in adamw)
    every = matrix_bytes + (2 * 256 * width + 3 * width) * 4  # embedding, head, and three norms
    assert traffic["plain", TORCHS].total() == 2 * 2 * every  # DDP reduces all gradients in each micro-batch
    assert all(len(f["step_seconds"]) == 1 for row in rows for f in row["by_rank"])


def test_a_stack_of_experts_is_exact_here_and_refused_by_torch(tmp_path: Path) -> None:
    found, printed = figures(tmp_path, "conformance", "--peer ours-fsdp2 torch --case experts")
    ours, theirs = found
    assert (ours["verdict"], ours["difference"]) == ("a number", 0)
    assert theirs["verdict"] == "refused" and "only supports 2D" in theirs["said"]
    assert "benchmarks.conformance --peer torch --case experts  ValueError" in printed


@pytest.mark.full
def test_newton_schulz_is_timed_in_every_variant(tmp_path: Path) -> None:
    """The program fails if the plain one has other bits than torch's."""
    found, printed = figures(tmp_path, "rules", "--scale 0.0078 --rounds 1")
    assert len(found) == 5 * (1 + 2 * 6) and len(re.findall("^not timed: ns_method is ", printed, re.M)) == 2


# What the rank with the most launches does at most in a step of 12 matrices of 4 shapes on 2 ranks:
# operations outside Newton-Schulz, batches in it, reads by the host, collectives.
LAUNCHES = {
    "plain": (22, 4, 1, 2),
    "modules": (39, 4, 2, 4),
    "fsdp2": (38, 6, 0, 7),
    "zero0": (43, 6, 1, 3),
    "zero1": (28, 5, 0, 2),
    "zero2": (28, 5, 0, 2),
    "zero3": (38, 6, 0, 6),
    "owned": (32, 4, 2, 3),
}


@pytest.mark.parametrize("engine", LAUNCHES)
@on_ranks(2)
def test_a_step_launches_at_most_so_much(engine: str) -> None:
    setting = Setting(2, 3, 16, 8, 1, 4.0, "cpu", matrices_only=True)
    IMMEDIATE.clear()
    try:
        with built({OURS: systems(engine, setting)[OURS]}) as (system,):
            system.step(setting.batches(0), Hooks())
            watch = Watch(torch.distributed.get_rank(), 2)
            with watch.watching() as hooks:
                system.step(setting.batches(1), hooks)
    finally:
        IMMEDIATE.add("cpu")
    counts = gathered(watch.count)
    assert sum(count.matrices for count in counts) == setting.matrices
    most = max(counts, key=lambda count: count.launches())
    found = most.operations, most.calls, most.host_reads, most.collectives
    assert all(value <= bound for value, bound in zip(found, LAUNCHES[engine], strict=True)), (found, most)


def test_without_a_gpu_the_tests_on_one_say_so() -> None:
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "--device", "cuda"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert ended.returncode == 4 and "no GPU: torch" in ended.stderr
