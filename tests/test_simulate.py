"""Other systems beside ours, from few ranks to many: modelled by hand, drawn, and run."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from lwopt_backend.plan.cost import StepTime
from lwopt_backend.planner.part import Part
from tests.launcher import ROOT, run_script
from tests.ranks import forkserver
from tests.test_pictures import assert_apart, words
from tests.test_study import NS, OWNED, matrix, of_stage

sys.path.append(str(ROOT / "benchmarks"))  # where its programs find each other, and the processes that they start

import simulate_systems as systems  # noqa: E402
import simulate_validation as validation  # noqa: E402
from simulate_picture import draw_systems  # noqa: E402


def planned(matrices: int, width: int, ranks: int) -> Part:
    part = of_stage([matrix(f"l.{i}.w", width, width) for i in range(matrices)], ranks).part
    assert part is not None
    return part


def test_other_systems_by_hand() -> None:
    one, numel = NS.of((128, 128)), 3 * 128 * 128
    figures = {figure.system: figure for figure in systems.compare(planned(3, 128, 2), OWNED)}
    assert figures["replicated"].time.compute == pytest.approx(3 * one / 1e12)
    assert figures["replicated"].work_ratio == 2
    # The second of three matrices lies across the cut of two partitions: both ranks orthogonalize it.
    assert figures["DeepSpeed Muon ZeRO-1"].time.compute == pytest.approx(2 * one / 1e12)
    assert figures["DeepSpeed Muon ZeRO-1"].work_ratio == pytest.approx(4 / 3)
    assert figures["Megatron compact"].time.wire == pytest.approx((2 * 4 + 2) * numel / 2 / 1e10)
    assert figures["DeepSpeed Muon ZeRO-2"].memory < figures["DeepSpeed Muon ZeRO-1"].memory
    assert figures["ours"].time.total <= figures["Megatron padded"].time.total


def test_the_model_is_put_beside_steps_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LAYERS", 2), ("WIDTH", 64), ("REPEATS", 2), ("PROBES", (1000, 100_000))):
        monkeypatch.setattr(validation, name, value)
    monkeypatch.setattr(validation, "get_context", lambda method: forkserver())
    machine, rows = validation.validate(2)
    systems = ["ours, padded", "ours, compact", "Megatron padded", "Megatron compact", "DeepSpeed Muon ZeRO-1"]
    assert [row.system for row in rows] == [*systems, "replicated"]
    assert machine.bytes_per_second > 0 and all(row.measured > 0 and row.ratio > 0 for row in rows)
    ours, replicated = rows[0].modelled, rows[-1].modelled
    # Two equal layers on two ranks: half of the flops each, by which owners are chosen, and of the time at least half.
    assert replicated.compute / 2 * (1 - 1e-9) <= ours.compute < replicated.compute
    # All-reduce and no return, 2 x 4 bytes an element; reduce-scatter and all-gather, 4 + 2 bytes.
    assert replicated.wire == pytest.approx(ours.wire * 8 / 6, rel=0.2)


def test_systems_are_lines_of_their_seconds_and_bytes() -> None:
    compared = [figure for ranks in (512, 8, 64) for figure in systems.compare(planned(24, 1024, ranks), OWNED)]
    figure = draw_systems(compared)
    time, memory = figure.axes
    lines = {line.get_label(): line for line in time.lines if not line.get_label().startswith("_")}
    assert set(lines) == set(systems.SYSTEMS)
    for system in systems.SYSTEMS:
        mine = sorted((each.ranks, each.time.total, each.memory) for each in compared if each.system == system)
        sizes = next(line for line in memory.lines if line.get_label() == system)
        assert list(lines[system].get_xdata()) == list(sizes.get_xdata()) == [8, 64, 512]
        assert list(lines[system].get_ydata()) == pytest.approx([1e3 * seconds for _, seconds, _ in mine])
        assert list(sizes.get_ydata()) == pytest.approx([nbytes / 2**30 for *_, nbytes in mine])
    assert max(lines.values(), key=lambda line: line.get_linewidth()).get_label() == "ours"
    # Lines that end together, whose names do not cover each other either
    same = [systems.Figure(f"system {i}", n, StepTime(1, 1, 1), 2**30, 1, "") for i in range(9) for n in (8, 16)]
    for drawn in (figure, draw_systems(same)):
        assert {axis.get_xscale() for axis in drawn.axes} | {axis.get_yscale() for axis in drawn.axes} == {"log"}
        assert_apart(drawn)
    assert all(words(drawn).count(f"system {number} ") == 2 for number in range(9))
    with pytest.raises(ValueError, match="at least one figure"):
        draw_systems([])


def simulate(arguments: str) -> tuple[Any, str]:
    return run_script([f"{ROOT}/benchmarks/simulate.py", *arguments.split()], {}, joined=True)


def test_every_system_is_printed_as_a_table_and_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shapes.json").write_text(json.dumps([[f"l.{i}.w", [256, 256 * (1 + i % 4)]] for i in range(24)]))
    code, printed = simulate("--shapes shapes.json --world-sizes 8,64 --json --png systems.png")
    figures = json.loads(printed)
    assert code == 0 and [figure["system"] for figure in figures] == [*systems.SYSTEMS] * 2
    assert [figure["ranks"] for figure in figures] == [8] * 6 + [64] * 6
    assert next(f for f in figures if f["system"] == "replicated" and f["ranks"] == 64)["work_ratio"] == 64
    assert all(math.isclose(figure["seconds"], sum(figure["time"].values())) for figure in figures)
    assert Path("systems.png").read_bytes().startswith(b"\x89PNG")
    code, printed = simulate("--shapes shapes.json --world-sizes 8 --layout compact")
    assert code == 0 and all(system in printed for system in systems.SYSTEMS) and "ours" in printed
    code, printed = simulate("--shapes shapes.json --world-sizes 8,x")
    assert code == 2 and printed.startswith("error: --world-sizes: expected numbers of ranks")
    code, printed = simulate("--help")
    assert code == 0 and "--validate" in printed
