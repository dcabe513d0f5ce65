"""The benchmarks run, on models too small to time, and what they say of exactness, bytes and work holds."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import conformance
from benchmarks.rules import measure, packaged
from benchmarks.step_systems import OURS, Hooks, Setting, built, systems
from benchmarks.step_watch import Watch
from lwopt_backend.rules.newton_schulz import IMMEDIATE, KERNELS, PACKAGES
from tests.launcher import ROOT, succeeds
from tests.on_ranks import on_ranks
from tests.pages import PAGES
from tests.ranks import gathered

WIDTH = 32  # whose parts over the ranks fill vector registers: AdamW then rounds as on whole parameters
MATRIX_BYTES = 12 * WIDTH**2 * 4  # of the one layer
ALL_BYTES = MATRIX_BYTES + (2 * 256 * WIDTH + 3 * WIDTH) * 4  # embedding, head, and three norms
THEIRS = "DeepSpeed's Muon"


def figures(tmp_path: Path, benchmark: str, arguments: str) -> tuple[Any, str]:
    command = f"python -m benchmarks.{benchmark} {arguments} --json {tmp_path}/figures.json"
    printed = succeeds(command, ROOT)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["command"].startswith(f"python -m benchmarks.{benchmark} ")
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] and len(found["commit"].rstrip("+")) == 40
    return found["figures"], printed


def results(name: str) -> Any:
    """The figures of a file that pages quote."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]


def steps(tmp_path: Path, metric: str, arguments: str = "") -> dict[str, dict[str, list[Any]]]:
    """By engine and system, what every rank found. The program fails where our result is not torch.optim's."""
    arguments = f"--metric {metric} --layers 1 --width {WIDTH} --tokens 8 {arguments}"
    rows, _ = figures(tmp_path, "step", arguments)
    found: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        found.setdefault(row["engine"], {})[row["system"]] = row["by_rank"]
        assert len(row["by_rank"]) == row["setting"]["ranks"] == 2
    return found


@pytest.mark.full
def test_host_time_is_that_of_two_commits_in_turn(tmp_path: Path) -> None:
    printed = succeeds("python -m benchmarks.host_time --against HEAD --engine zero1 --rounds 1", ROOT)
    rows = re.findall(r"zero1 +(\w+) +([\d.]+) ms, (\d+) calls, (\d+) operations", printed)
    assert [name for name, *_ in rows] == ["HEAD", "this"]
    assert all(float(ms) > 0 and int(calls) > int(operations) > 0 for _, ms, calls, operations in rows)
    assert "/against" not in succeeds("git worktree list", ROOT)


@pytest.mark.full
def test_a_step_sends_what_its_host_would_and_two_exchanges(tmp_path: Path) -> None:
    """Under DeepSpeed with two micro-batches. Plans' bytes: the program asserts them."""
    stages = ("zero0", "zero1", "zero2", "zero3")
    found = steps(tmp_path, "bytes", f"--accumulation 2 --engine {' '.join(stages)}")
    for engine in stages:
        check_traffic(int(engine[-1]), {name: total(by_rank) for name, by_rank in found[engine].items()})
        for name, by_rank in found[engine].items():
            differs = max(figures["differ"][0] for figures in by_rank)
            assert (differs == 0) == (name in (OURS, "AdamW")) and differs < 0.02
    found = steps(tmp_path, "bytes", "--engine plain fsdp2")
    plain = found["plain"]
    padding = {name: plain[name][0]["padding"] for name in ("ours, padded", "ours, compact")}
    assert padding["ours, compact"] == 0 < padding["ours, padded"]
    once = ALL_BYTES  # of both ranks: a half of the gradients to each other's owner; and the parameters back
    assert sum(figures["planned"] for figures in plain["ours, compact"]) == 2 * once
    assert sum(total(plain["torch.optim.Muon"]).values()) == 2 * once
    ours, dtensors = (total(found["fsdp2"][name], "update") for name in (OURS, "torch.optim.Muon"))
    assert 0 < sum(ours.values()) < sum(dtensors.values())


def total(by_rank: list[Any], part: str = "step") -> Counter[str]:
    """The bytes that all ranks send, by collective."""
    return sum((Counter(figures[part]["sent"]) for figures in by_rank), Counter())


def check_traffic(stage: int, systems: dict[str, Counter[str]]) -> None:
    """Weights and gradients travel as with DeepSpeed's AdamW; this package adds all-to-alls, alike on both ways."""
    ours, theirs, adamw = (systems[name] for name in (OURS, THEIRS, "AdamW"))
    small = 200  # bytes: norms, flags
    assert 0 < ours.pop("alltoall_base") <= 2 * (MATRIX_BYTES // 2)  # there and back, in bf16
    if stage == 0:
        ours.pop("allgather_base")  # what AdamW's share of the ranks has updated
    if stage == 3:
        assert theirs.total() > adamw.total() + MATRIX_BYTES  # gradients and momentum, gathered
    else:
        assert set(theirs) == set(adamw)
    assert set(ours) == set(adamw)
    assert all(abs(ours[kind] - adamw[kind]) < small for kind in adamw), (ours, adamw)


@pytest.mark.full
def test_momentum_is_kept_once_over_all_ranks(tmp_path: Path) -> None:
    """What this package keeps is planned: test_planned.py. DeepSpeed's Muon gathers momentum, or keeps it twice."""
    found = steps(tmp_path, "memory", f'--system {OURS} torch.optim.Muon "{THEIRS}"')
    for engine in ("plain", "modules", "fsdp2", "zero0", "zero1", "zero2", "zero3", "owned"):
        for name, by_rank in found[engine].items():
            momentum = sum(figures["state"]["momentum"] for figures in by_rank)
            if name.startswith(OURS):
                assert momentum == MATRIX_BYTES, engine
            assert all(figures["kept"] <= figures["peak"] for figures in by_rank)
    assert sum(figures["state"]["momentum"] for figures in found["plain"]["torch.optim.Muon"]) == 2 * MATRIX_BYTES
    for stage in range(4):
        ours, theirs = ([figures["state"] for figures in found[f"zero{stage}"][name]] for name in (OURS, THEIRS))
        for states in (ours, theirs):
            assert sum(state["masters"] for state in states) == (ALL_BYTES if stage else 0)
        if stage in (1, 2):
            assert [state["momentum"] for state in theirs] == [state["staging"] for state in theirs]


@pytest.mark.full
def test_every_system_is_timed_beside_ours(tmp_path: Path) -> None:
    found = steps(tmp_path, "time", "--engine plain fsdp2 zero2 --rounds 2")
    for of_engine in found.values():
        assert list(of_engine)[0] == OURS and len(of_engine) > 2
        for figures in (figures for by_rank in of_engine.values() for figures in by_rank):
            seconds = [figures[key] for key in ("newton_schulz", "update_cpu", "step_cpu", "step_wall")]
            assert all(len(some) == 2 and min(some) >= 0 for some in seconds)
            assert all(update <= step for update, step in zip(*seconds[1:3]))


def test_a_stack_of_experts_is_exact_here_and_refused_by_torch(tmp_path: Path) -> None:
    found, printed = figures(tmp_path, "conformance", "--peer ours-fsdp2 torch --case experts")
    ours, theirs = found
    assert (ours["verdict"], ours["difference"]) == ("a number", 0)
    assert theirs["verdict"] == "refused" and "only supports 2D" in theirs["said"]
    assert "benchmarks.conformance --peer torch --case experts  ValueError" in printed


def test_the_table_of_peers_is_that_of_the_results() -> None:
    rows = {(row["peer"], row["case"]): row for row in results("conformance")}
    assert conformance.with_table(PAGES["peers"], rows) == PAGES["peers"]
    assert {peer for peer, _ in rows} == {*conformance.PEERS} and {case for _, case in rows} == {*conformance.CASES}


@pytest.mark.full
def test_rules(tmp_path: Path) -> None:
    variants = ["plain", "gram", "polar_express", "polar_express, gram", "fp32", "fp32, gram"]
    found, printed = figures(tmp_path, "rules", "--quick --device cpu")
    assert "torch.optim.Muon" in printed and "112 x 32, Llama-3-8B, gate" in printed
    for name in PACKAGES:
        told = re.findall(f"^not timed: ns_method is '{name}': expected .* found a device of type 'cpu'", printed, re.M)
        assert len(told) == 1
    by_shape: dict[str, dict[tuple[str, bool], dict[str, float]]] = {}
    for row in found:
        by_shape.setdefault(row["of"], {})[row["variant"], row["batched"]] = row
    assert len(by_shape) == 5
    for rows in by_shape.values():
        peer = rows["torch.optim.Muon", False]
        assert list(rows) == [("torch.optim.Muon", False), *((v, many) for v in variants for many in (False, True))]
        for (variant, batched), row in rows.items():
            assert row["milliseconds"] > 0 and row["ratio"] == row["milliseconds"] / peer["milliseconds"]
            if (variant, batched) in (("torch.optim.Muon", False), ("plain", False)):
                assert row["difference"] == 0
            elif variant.startswith("polar_express"):
                assert 0.05 < row["difference"] < 0.6  # other polynomials
            else:
                assert row["difference"] < 0.1  # rounding


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
    found = most.operations.total(), most.calls, most.host_reads, most.collectives
    assert all(value <= bound for value, bound in zip(found, LAUNCHES[engine], strict=True)), (found, most)


def test_a_package_that_cannot_be_timed_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there, or there without its kernels: see test_newton_schulz.py."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", None)
    monkeypatch.setitem(sys.modules, KERNELS, ModuleType(KERNELS))
    found, why_not = packaged(torch.device("cuda"))
    assert list(found) == ["quack-kernels"] and "gram_newton_schulz" in why_not["gram-newton-schulz"]
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", ModuleType("gram_newton_schulz"))
    monkeypatch.setitem(sys.modules, KERNELS, None)
    found, why_not = packaged(torch.device("cuda"))
    assert not found and all(KERNELS in reason for reason in why_not.values()) and list(why_not) == list(PACKAGES)


def test_the_package_is_timed_last_and_its_row_says_which_iteration_it_runs() -> None:
    """Any iteration stands in for it: its kernels run on a GPU only."""
    shapes = {"square": (4, 4), "wide": (4, 6), "tall": (6, 4)}
    name = "gram-newton-schulz"
    rows = measure(shapes, 2, 1, torch.device("cpu"), {name: lambda matrices: matrices}, lambda: None)
    assert {row.of: row.variant for row in rows} == {"square": f"{name}, standard", "wide": name, "tall": name}


def test_without_a_gpu_the_tests_on_one_say_so() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py")]
    ended = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("no GPU: torch")
