"""The benchmarks run, on models too small to time, and what they say of exactness, bytes and work holds."""

import importlib
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.rules import measure, packaged
from lwopt_backend.rules.newton_schulz import IMMEDIATE, KERNELS, PACKAGES
from tests.launcher import ROOT, succeeds
from tests.on_ranks import on_ranks
from tests.ranks import gathered

WIDTH = 32  # whose parts over the ranks fill vector registers: AdamW then rounds as on whole parameters
MATRICES = 4  # of the one layer
MATRIX_BYTES = 12 * WIDTH**2 * 4
ALL_BYTES = MATRIX_BYTES + (2 * 256 * WIDTH + 3 * WIDTH) * 4  # embedding, head, and three norms
RANKS, PARTS = 2, 2  # the micro-batches of a step
OURS, GRAM = "LayerWiseMuon", "LayerWiseMuon, gram_aspect=1.5"
THEIRS, THEIR_GRAM, ADAMW = "DeepSpeed Muon, standard", "DeepSpeed Muon, gram", "DeepSpeed AdamW"


def figures(tmp_path: Path, benchmark: str, arguments: str) -> tuple[Any, str]:
    command = f"python {ROOT}/benchmarks/{benchmark}.py {arguments} --json {tmp_path}/figures.json"
    printed = succeeds(command, tmp_path)
    return json.loads((tmp_path / "figures.json").read_text()), printed


@pytest.mark.full
def test_deepspeed_steps(tmp_path: Path) -> None:
    arguments = f"--ranks {RANKS} --layers 1 --width {WIDTH} --tokens 8 --rounds 1 --stages 0 1 2 3"
    found, _ = figures(tmp_path, "deepspeed_step", f"{arguments} --accumulation {PARTS}")
    assert [(cell["stage"], cell["accumulation"]) for cell in found["cells"]] == [(stage, PARTS) for stage in range(4)]
    for stage, cell in enumerate(found["cells"]):
        systems = {system["system"]: system for system in cell["systems"]}
        assert list(systems) == [OURS, GRAM, THEIRS, THEIR_GRAM, ADAMW]
        assert set(systems[OURS]["to_ours"].values()) == {1.0}
        for system in systems.values():
            assert all(ms > 0 for ms in system["ms"].values())
            assert all(math.isfinite(ratio) for ratio in system["to_ours"].values())
        check_work(stage, systems)
        check_memory(stage, systems)
        check_traffic(stage, systems)


def check_work(stage: int, systems: dict[str, Any]) -> None:
    """One Newton-Schulz per matrix and optimizer step with ours, however many micro-batches it has."""
    for name in (OURS, GRAM):
        assert sum(systems[name]["newton_schulz"]) == MATRICES and systems[name]["redundant"] == 0
        assert max(systems[name]["newton_schulz"]) < MATRICES  # shared out
    twice = {0: MATRICES * (RANKS - 1), 1: 1, 2: 1, 3: 0}[stage]  # all; the one that the partition boundary cuts; none
    for name in (THEIRS, THEIR_GRAM):
        assert sum(systems[name]["newton_schulz"]) == MATRICES + twice and systems[name]["redundant"] == twice
    assert systems[ADAMW]["newton_schulz"] == [0] * RANKS and systems[ADAMW]["redundant"] == 0
    assert systems[OURS]["matrices_differ"] == 0.0
    assert all(0 < systems[name]["matrices_differ"] < 0.02 for name in (GRAM, THEIRS, THEIR_GRAM))
    assert max(systems[name]["others_differ"] for name in (OURS, ADAMW)) < 1e-6


def check_memory(stage: int, systems: dict[str, Any]) -> None:
    """That ours is what the planner says: test_planned.py. DeepSpeed's Muon gathers momentum, or keeps it twice."""
    ours, theirs = (
        {kind: [state[kind] for state in systems[name]["state"]] for kind in ("momentum", "staging", "masters")}
        for name in (OURS, THEIRS)
    )
    assert sum(ours["momentum"]) == MATRIX_BYTES and sum(ours["masters"]) == (ALL_BYTES if stage else 0)
    assert sum(theirs["masters"]) == sum(ours["masters"])
    if stage in (1, 2):
        assert theirs["momentum"] == theirs["staging"]
        assert sum(ours["momentum"]) < sum(theirs["momentum"])  # whole matrices, the cut one twice
    else:
        assert sum(theirs["momentum"]) == MATRIX_BYTES * (RANKS if stage == 0 else 1)
        assert (sum(theirs["staging"]) > 0) == (stage == 3)


def check_traffic(stage: int, systems: dict[str, Any]) -> None:
    """Weights and gradients travel as with DeepSpeed's AdamW; ours adds its all-to-alls, the same on both ways."""
    ours, theirs, adamw = (
        dict(sum((Counter(traffic["sent"]) for traffic in systems[name]["traffic"]), Counter()))
        for name in (OURS, THEIRS, ADAMW)
    )
    small = 200  # bytes: norms, flags
    assert 0 < ours.pop("alltoall_base") <= 2 * (MATRIX_BYTES // 2)  # there and back, in bf16
    if stage == 0:
        ours.pop("allgather_base")  # what AdamW's share of the ranks has updated
    if stage == 3:
        assert sum(theirs.values()) > sum(adamw.values()) + MATRIX_BYTES  # gradients and momentum, gathered
    else:
        assert set(theirs) == set(adamw)
    assert set(ours) == set(adamw)
    assert all(abs(ours[kind] - adamw[kind]) < small for kind in adamw), (ours, adamw)


@pytest.mark.full
def test_fsdp2_steps(tmp_path: Path) -> None:
    weights = 2 * 12 * 20 * 20 * 4  # bytes: two layers of width 20, 12 width^2 elements each, in fp32
    found, _ = figures(tmp_path, "fsdp2_step", "--ranks 3 --stack tiny --rounds 2")
    systems = {system["system"]: system for system in found["cells"][0]["systems"]}
    ours, gram = systems["ours"], systems["ours, gram_aspect=1.5"]
    dtensors, replicated = systems["torch.optim.Muon on FSDP2"], systems["torch.optim.Muon, replicated (DDP)"]
    assert ours["difference"] == replicated["difference"] == 0.0
    assert 0 < gram["difference"] < 0.01 and 0 < dtensors["difference"] < 0.01
    assert ours["cpu_ratio"] == ours["wall_ratio"] == 1.0
    for system in systems.values():
        assert system["cpu_ms"] > 0 and system["wall_ms"] > 0
        assert math.isfinite(system["cpu_ratio"]) and math.isfinite(system["wall_ratio"])
    for system in (ours, gram, dtensors, replicated):
        assert 0 < system["newton_schulz_ms"] < system["cpu_ms"] * (1 - system["transport"])
    assert replicated["traffic"] == {"calls": {}, "sent": {}}
    calls, sent = (sum(dtensors["traffic"][key].values()) for key in ("calls", "sent"))
    for system in (ours, gram):  # that its calls and bytes are its plan's, the benchmark itself asserts
        assert system["traffic"]["calls"]["allreduce"] == 1  # who has gradients
        assert 0 < sum(system["traffic"]["calls"].values()) < calls
        assert 0 < sum(system["traffic"]["sent"].values()) < sent
    assert replicated["state_bytes"] == weights
    assert weights / 3 <= ours["state_bytes"] == dtensors["state_bytes"] < weights / 2


@pytest.mark.full
def test_layouts(tmp_path: Path) -> None:
    owned = ["owned, padded", "owned, compact", "owned, auto"]
    arguments = "--ranks 2 3 --layers 2 --width 48 --tokens 8 --rounds 1 --bucket-mb 0.05"
    found, _ = figures(tmp_path, "layouts", arguments)
    assert [run["shapes"]["ranks"] for run in found["runs"]] == [2, 3]
    for ranks, run in zip((2, 3), found["runs"]):
        systems = {system["system"]: system for system in run["systems"]}
        assert list(systems) == [*owned, "DDP, Muon", "ZeRO-1, AdamW", "ZeRO-2, AdamW"]
        once = (ranks - 1) * 4 * run["numel"]  # every rank's part to every other rank, fp32
        for name, system in systems.items():
            assert system["cpu_ms"] > 0 and system["wall_ms"] > 0 and system["kept"] and system["peak"]
            flags = ranks * system["sent"].get("allreduce", 0) if name in owned else 0
            sent = system["sent_in_all"] - flags
            padded = (ranks - 1) * 8 * system["padding"] if name in owned else 0
            if name.startswith("ZeRO"):
                assert sent == pytest.approx(3 * once, rel=0.01)  # (2g + p) P, and a few bytes of norms and flags
            else:
                assert sent == pytest.approx(2 * once + padded, rel=1e-4)
        assert systems["owned, compact"]["padding"] == 0 < systems["owned, padded"]["padding"]
        assert systems["owned, compact"]["promised"] == 2 * once
        assert systems["owned, auto"]["promised"] <= min(systems[name]["promised"] for name in owned[:2])
        # The same batches and optimizers: DDP's loss, but for the order in which gradients are added.
        for name in owned:
            assert systems[name]["loss"] == pytest.approx(systems["DDP, Muon"]["loss"], abs=1e-3)


@pytest.mark.full
def test_rules(tmp_path: Path) -> None:
    variants = ["plain", "gram", "polar_express", "polar_express, gram", "fp32", "fp32, gram"]
    found, printed = figures(tmp_path, "rules", "--quick --device cpu")
    assert "torch.optim.Muon" in printed and "112 x 32, Llama-3-8B, gate" in printed
    for name in PACKAGES:
        told = re.findall(f"^not timed: ns_method is '{name}', .* not for a device of type 'cpu'", printed, re.M)
        assert len(told) == 1
    by_shape: dict[str, dict[tuple[str, bool], dict[str, float]]] = {}
    for row in found["rows"]:
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


# What the rank with most launches does in a step of 12 matrices of 4 shapes on 2 ranks: operations outside
# Newton-Schulz, batches in it, reads by the host, collectives.
LAUNCHES = {
    "plain": (20, 3, 1, 2),
    "modules": (35, 3, 10, 7),
    "fsdp2": (40, 6, 2, 7),
    "zero0": (43, 6, 1, 3),
    "zero1": (30, 5, 1, 2),
    "zero2": (30, 5, 1, 2),
    "zero3": (41, 6, 1, 6),
    "owned": (35, 3, 2, 3),  # one of them stacks the norms of clip groups, so that the host reads once
}


@pytest.mark.parametrize("engine", LAUNCHES)
@on_ranks(2)
def test_a_step_launches_so_much(engine: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        launches = importlib.import_module("launches")
        shape = launches.Shape(3, 16, 2)
        IMMEDIATE.clear()
        try:
            count = launches.count_step(launches.systems(shape)[engine]["ours"], shape)
        finally:
            IMMEDIATE.add("cpu")
    most = max(gathered(count), key=lambda count: count.launches)
    products = sum(most.newton_schulz[name] for name in launches.PRODUCTS)
    assert products == 15 * most.calls
    found = most.operations.total(), most.calls, most.host_reads, most.collectives
    assert found == LAUNCHES[engine] and found[0] <= 4 * shape.matrices, most


def test_a_package_that_cannot_be_timed_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there, or there without its kernels: see test_ns_packages.py."""
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
