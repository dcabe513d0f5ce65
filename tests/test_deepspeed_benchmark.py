"""The benchmark of steps under DeepSpeed runs, on a model too small to time, and what it says of exactness holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.launcher import ROOT, run_on_cpu

WIDTH = 32  # whose parts over the ranks fill vector registers: AdamW then rounds as on whole parameters
MATRICES = 4  # of the one layer
MATRIX_BYTES = 12 * WIDTH**2 * 4
ALL_BYTES = MATRIX_BYTES + (2 * 256 * WIDTH + 3 * WIDTH) * 4  # embedding, head, and three norms
RANKS, PARTS = 2, 2  # the micro-batches of a step
OURS, GRAM = "LayerWiseMuon", "LayerWiseMuon, gram_aspect=1.5"
THEIRS, THEIR_GRAM, ADAMW = "DeepSpeed Muon, standard", "DeepSpeed Muon, gram", "DeepSpeed AdamW"


def test_the_benchmark_counts_what_every_system_does_at_every_stage(tmp_path: Path) -> None:
    figures = tmp_path / "step.json"
    finished = run_on_cpu(
        f"python {ROOT}/benchmarks/deepspeed_step.py --ranks {RANKS} --layers 1 --width {WIDTH} --tokens 8 --rounds 1 "
        f"--stages 0 1 2 3 --accumulation {PARTS} --json {figures}",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout
    cells = json.loads(figures.read_text())["cells"]
    assert [(cell["stage"], cell["accumulation"]) for cell in cells] == [(stage, PARTS) for stage in range(4)]
    for cell in cells:
        systems = {system["system"]: system for system in cell["systems"]}
        check_times(systems)
        check_work(cell["stage"], systems)
        check_memory(cell["stage"], systems)
        check_traffic(cell["stage"], systems)


def check_times(systems: dict[str, Any]) -> None:
    assert list(systems) == [OURS, GRAM, THEIRS, THEIR_GRAM, ADAMW]
    assert set(systems[OURS]["to_ours"].values()) == {1.0}
    for system in systems.values():
        assert all(ms > 0 for ms in system["ms"].values())
        assert all(math.isfinite(ratio) for ratio in system["to_ours"].values())


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
    def kept(name: str, kind: str) -> list[int]:
        return [state[kind] for state in systems[name]["state"]]

    def total(name: str, kind: str) -> int:
        return sum(kept(name, kind))

    for name in (OURS, GRAM):
        assert total(name, "momentum") == MATRIX_BYTES and kept(name, "staging") == [0] * RANKS
        assert total(name, "masters") == (ALL_BYTES if stage else 0)
    if stage == 0:
        assert kept(THEIRS, "momentum") == [MATRIX_BYTES] * RANKS and kept(THEIRS, "staging") == [0] * RANKS
        assert kept(ADAMW, "adam")[0] > 2 * ALL_BYTES
    elif stage < 3:
        assert kept(THEIRS, "momentum") == kept(THEIRS, "staging")
        for ours, theirs in zip(kept(OURS, "momentum"), kept(THEIRS, "momentum")):
            assert ours <= theirs  # and there it is kept twice
        assert total(OURS, "momentum") < total(THEIRS, "momentum")  # whole matrices, the cut one twice
    else:
        assert total(THEIRS, "momentum") == MATRIX_BYTES and total(THEIRS, "staging") > 0
    for name in (THEIRS, ADAMW):
        assert total(name, "masters") == total(OURS, "masters")


def check_traffic(stage: int, systems: dict[str, Any]) -> None:
    """Weights and gradients travel as with DeepSpeed's AdamW; ours adds its all-to-alls, the same on both ways."""

    def sent(name: str) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for traffic in systems[name]["traffic"]:
            for kind, nbytes in traffic["sent"].items():
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds

    ours, theirs, adamw = sent(OURS), sent(THEIRS), sent(ADAMW)
    small = 200  # bytes: norms, flags
    assert 0 < ours.pop("alltoall_base") <= 2 * (MATRIX_BYTES // 2)  # there and back, in bf16
    if stage == 0:
        # whole gradients in an all-reduce, twice the bytes of a ring's reduce-scatter over two ranks
        assert adamw == theirs == {"allreduce": RANKS * ALL_BYTES}
        ours.pop("allgather_base")  # what AdamW's share of the ranks has updated
    if stage in (1, 2):
        repeats = PARTS if stage == 2 else 1
        for found in (theirs, adamw):
            assert set(found) == {"allreduce", "allgather_base"} and found["allgather_base"] == ALL_BYTES
            assert 0 <= found["allreduce"] - repeats * RANKS * ALL_BYTES < small
    if stage == 3:
        assert sum(theirs.values()) > sum(adamw.values()) + MATRIX_BYTES  # gradients and momentum, gathered
    assert set(ours) == set(adamw)
    assert all(abs(ours[kind] - adamw[kind]) < small for kind in adamw), (ours, adamw)
