"""The benchmark of conversion runs, on checkpoints too small to time, and both programs make the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launcher import ROOT, run_on_cpu

OURS = ("ZeRO-2, AdamW", "Megatron torch_dist")


def test_the_benchmark_converts_both_sources_and_compares_what_was_made(tmp_path: Path) -> None:
    figures = tmp_path / "convert.json"
    finished = run_on_cpu(
        f"python {ROOT}/benchmarks/convert.py --mb 1 --width 32 --rounds 1 --folder {tmp_path} --json {figures}",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout
    rows = {(row["source"], row["program"]): row for row in json.loads(figures.read_text())}
    programs = ("copy", "ds_to_universal", "lwopt convert")
    assert list(rows) == [*((OURS[0], name) for name in programs), (OURS[1], "copy"), (OURS[1], "lwopt convert")]
    for (_, program), row in rows.items():
        assert 1e6 < row["source_bytes"] < 3e6 and row["largest"] == 4 * 16 * 32 * 32 and row["seconds"][0] > 0
        assert row["peak"] > 1e8 if program != "copy" else row["peak"] == 0  # an interpreter with torch
        assert program in finished.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["convert.json"]
