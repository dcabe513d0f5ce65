"""The benchmark of FSDP2 steps runs, on a stack too small to time anything, and what it says of exactness holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.launcher import ROOT, run_on_cpu

WEIGHTS = 2 * 12 * 20 * 20 * 4  # bytes: two layers of width 20, 12 width^2 elements each, in fp32


def test_the_benchmark_compares_all_systems_and_ours_is_exact(tmp_path: Path) -> None:
    figures = tmp_path / "step.json"
    command = f"python {ROOT}/benchmarks/fsdp2_step.py --ranks 3 --stack tiny --rounds 2 --json {figures}"
    finished = run_on_cpu(command, tmp_path)
    assert finished.returncode == 0, finished.stdout
    (cell,) = json.loads(figures.read_text())["cells"]
    systems = {system["system"]: system for system in cell["systems"]}
    ours, gram = systems["ours"], systems["ours, gram_aspect=1.5"]
    dtensors, replicated = systems["torch.optim.Muon on FSDP2"], systems["torch.optim.Muon, replicated (DDP)"]
    assert ours["difference"] == replicated["difference"] == 0.0
    assert 0 < gram["difference"] < 0.01 and 0 < dtensors["difference"] < 0.01
    assert ours["cpu_ratio"] == ours["wall_ratio"] == 1.0
    for system in systems.values():
        assert system["cpu_ms"] > 0 and system["wall_ms"] > 0
        assert math.isfinite(system["cpu_ratio"]) and math.isfinite(system["wall_ratio"])
    assert replicated["traffic"] == {"calls": {}, "sent": {}}
    calls, sent = (sum(dtensors["traffic"][key].values()) for key in ("calls", "sent"))
    for system in (ours, gram):  # that its calls and bytes are its plan's, the benchmark itself asserts
        assert system["traffic"]["calls"]["allreduce"] == 1  # who has gradients
        assert 0 < sum(system["traffic"]["calls"].values()) < calls
        assert 0 < sum(system["traffic"]["sent"].values()) < sent
    assert replicated["state_bytes"] == WEIGHTS
    assert WEIGHTS / 3 <= ours["state_bytes"] == dtensors["state_bytes"] < WEIGHTS / 2
