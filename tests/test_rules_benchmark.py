"""The benchmark of Newton-Schulz runs, on matrices too small to time, and knows what each variant computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.rules import measure, packaged
from tests.launcher import ROOT, run_on_cpu

VARIANTS = ["plain", "gram", "polar_express", "polar_express, gram", "fp32", "fp32, gram"]


def test_the_benchmark_times_every_variant_batched_and_one_by_one(tmp_path: Path) -> None:
    figures = tmp_path / "rules.json"
    finished = run_on_cpu(f"python {ROOT}/benchmarks/rules.py --quick --device cpu --json {figures}", tmp_path)
    assert finished.returncode == 0, finished.stdout
    assert "torch.optim.Muon" in finished.stdout and "112 x 32, Llama-3-8B, gate" in finished.stdout
    assert finished.stdout.count("gram-newton-schulz: not timed, its kernels need a GPU\n") == 1
    rows = json.loads(figures.read_text())["rows"]
    by_shape: dict[str, dict[tuple[str, bool], dict[str, float]]] = {}
    for row in rows:
        by_shape.setdefault(row["of"], {})[row["variant"], row["batched"]] = row
    assert len(by_shape) == 5
    for found in by_shape.values():
        assert list(found) == [
            ("torch.optim.Muon", False),
            *((v, batched) for v in VARIANTS for batched in (False, True)),
        ]
        peer = found["torch.optim.Muon", False]
        for (variant, batched), row in found.items():
            assert row["milliseconds"] > 0 and row["ratio"] == row["milliseconds"] / peer["milliseconds"]
            if (variant, batched) in (("torch.optim.Muon", False), ("plain", False)):
                assert row["difference"] == 0
            elif variant.startswith("polar_express"):
                assert 0.05 < row["difference"] < 0.6  # other polynomials
            else:
                assert row["difference"] < 0.1  # rounding


def test_a_package_that_cannot_be_timed_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not there, and there without its kernels, of which it asks when it is made."""
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", None)
    assert packaged(torch.device("cuda")) == (None, "not timed, it is not installed")
    (tmp_path / "gram_newton_schulz.py").write_text("def GramNewtonSchulz(**options):\n    import no_such_kernels\n")
    monkeypatch.delitem(sys.modules, "gram_newton_schulz")
    monkeypatch.syspath_prepend(tmp_path)
    expected = "not timed, what it needs is not installed: No module named 'no_such_kernels'"
    assert packaged(torch.device("cuda")) == (None, expected)
    sys.modules.pop("gram_newton_schulz")  # the one of this test


def test_the_package_is_timed_last_and_its_row_says_which_iteration_it_runs() -> None:
    """Any iteration stands in for it: its own runs on a GPU only."""
    shapes = {"square": (4, 4), "wide": (4, 6), "tall": (6, 4)}
    rows = measure(shapes, 2, 1, torch.device("cpu"), lambda matrices: matrices, lambda: None)
    last = {row.of: row.variant for row in rows}
    assert last == {
        "square": "gram-newton-schulz, standard",
        "wide": "gram-newton-schulz",
        "tall": "gram-newton-schulz",
    }
