"""The benchmark of layouts runs, on a model too small to time, and its bytes are those that formulas give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher import ROOT, run_on_cpu

OWNED = ["owned, padded", "owned, compact", "owned, auto"]
OTHERS = ["DDP, Muon", "ZeRO-1, AdamW", "ZeRO-2, AdamW"]
RANKS = [2, 3]


def test_the_benchmark_counts_what_every_system_sends_and_pads(tmp_path: Path) -> None:
    figures = tmp_path / "layouts.json"
    finished = run_on_cpu(
        f"python {ROOT}/benchmarks/layouts.py --ranks {' '.join(map(str, RANKS))} --layers 2 --width 48 --tokens 8 "
        f"--rounds 1 --bucket-mb 0.05 --json {figures}",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout
    runs = json.loads(figures.read_text())["runs"]
    assert [run["shapes"]["ranks"] for run in runs] == RANKS
    for ranks, run in zip(RANKS, runs):
        systems = {system["system"]: system for system in run["systems"]}
        assert list(systems) == [*OWNED, *OTHERS]
        once = (ranks - 1) * 4 * run["numel"]  # every rank's part to every other rank, fp32
        for name, system in systems.items():
            assert system["cpu_ms"] > 0 and system["wall_ms"] > 0 and system["kept"] and system["peak"]
            flags = ranks * system["sent"].get("allreduce", 0) if name in OWNED else 0
            sent = system["sent_in_all"] - flags
            padded = (ranks - 1) * 8 * system["padding"] if name in OWNED else 0
            if name.startswith("ZeRO"):
                assert sent == pytest.approx(3 * once, rel=0.01)  # (2g + p) P, and a few bytes of norms and flags
            else:
                assert sent == pytest.approx(2 * once + padded, rel=1e-4)
        assert systems["owned, compact"]["padding"] == 0
        assert systems["owned, compact"]["promised"] == 2 * once
        assert systems["owned, auto"]["promised"] <= min(systems[name]["promised"] for name in OWNED[:2])
        assert systems["owned, padded"]["padding"] > 0
        # The same batches and optimizers: DDP's loss, but for the order in which gradients are added.
        for name in OWNED:
            assert systems[name]["loss"] == pytest.approx(systems["DDP, Muon"]["loss"], abs=1e-3)
