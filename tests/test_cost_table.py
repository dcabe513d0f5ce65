"""Measured costs: what is timed, how it is looked up, and what a file of it must look like."""

from __future__ import annotations

import json
import math
import random
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from lwopt_backend.plan.cost import CostTable, newton_schulz_flops, read_cost_table
from lwopt_backend.planner import calibrate as calibration
from lwopt_backend.planner.calibrate import calibrate, default_path, device_name, write_cost_table
from lwopt_backend.rules import newton_schulz

Entry = tuple[tuple[int, int], int, float]
TIMES: tuple[Entry, ...] = (
    ((100, 100), 1, 3e-6),
    ((100, 100), 8, 2e-6),
    ((100, 400), 1, 8e-6),
    ((1000, 1000), 1, 1e-3),
)


def table_of(*entries: Entry) -> CostTable:
    return CostTable("some cpu", "bfloat16", "newton_schulz", 5, "2.13.0", entries)


def test_a_shape_costs_what_was_measured_or_is_scaled_by_flops_from_the_nearest() -> None:
    model = table_of(*TIMES).model()
    assert (model.name, model.unit, model.of((100, 400)), model.of((400, 100))) == ("table", "ns", 8000, 8000)
    assert table_of(((400, 100), 1, 8e-6), ((101, 400), 1, 1.0)).model().of((100, 400)) == 8000
    assert model.seconds(model.of((100, 400)), flops_per_second=1.0) == 8e-6
    for entries in (TIMES, TIMES[::-1]):  # the largest stack counts, and otherwise one alone
        assert [table_of(*entries).model(stacked=stacked).of((100, 100)) for stacked in (True, False)] == [2000, 3000]
    assert table_of(((2, 3), 8, 2e-6)).model(stacked=False).of((2, 3)) == 2000  # nothing else is known
    # 4 s^2 l + 2 s^3 in units of 100^3: (100, 200) has 10, and (100, 100) has 6 and 2000 ns; both neighbours are at
    # a factor of 2, and (100, 400) with 18 and 8000 ns would say 4444
    assert model.of((100, 200)) == model.of((200, 100)) == 2000 * 10 // 6
    assert model.of((100, 300)) == 8000 * 14 // 18
    # nearest by ratios: (100, 400) is closer in elements, but at 3.5 * 1.75 and (1000, 1000) at 2.9 * 1.4
    assert model.of((350, 700)) == 1_000_000 * newton_schulz_flops((350, 700)) // newton_schulz_flops((1000, 1000))
    least = table_of(((1000, 1000), 1, 1e-10)).model()
    assert least.of((1000, 1000)) == least.of((1, 1)) == least.of((0, 7)) == 1
    assert table_of(*TIMES).unmeasured([(9, 7), (400, 100), (7, 9), (8, 8)]) == [(7, 9), (8, 8)]


def test_costs_do_not_depend_on_the_order_of_entries_or_on_a_trip_through_json() -> None:
    rng, sides = random.Random(0), [64, 128, 256, 512, 1024]  # many ties: powers of two lie between each other
    entries = [((s, k), 1, rng.uniform(1e-6, 1e-3)) for s in sides for k in sides if s <= k and rng.random() < 0.5]
    wanted = [(rng.choice(sides), rng.choice(sides)) for _ in range(100)]
    costs = [table_of(*entries).model().of(shape) for shape in wanted]
    for _ in range(5):
        rng.shuffle(entries)
        shuffled = CostTable.from_json(table_of(*entries).to_json())
        assert shuffled == table_of(*entries) and [shuffled.model().of(shape) for shape in wanted] == costs
    assert len(set(costs)) > 5 and all(type(cost) is int for cost in costs)


def edited(change: dict[str, Any], entry: dict[str, Any]) -> bytes:
    """A valid table of two entries with other values, in the table or its second entry; None takes the key away."""
    data = json.loads(table_of(*TIMES[:2]).to_json())
    data["entries"][1] = {key: value for key, value in (data["entries"][1] | entry).items() if value is not None}
    return json.dumps({key: value for key, value in (data | change).items() if value is not None}).encode()


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # keys of the table, keys of its second entry
    ({"schema": 2}, {}, "schema: expected 1, found 2; .*lwopt calibrate"),
    ({"schema": True}, {}, "schema must be of type int, found True"),
    ({"device": None, "steps": None}, {}, r"table: missing key\(s\) device, steps"),
    ({"devices": "x"}, {}, r"table: unknown key\(s\) devices; known: schema, device"),
    ({"rule": "shampoo"}, {}, "rule: expected 'newton_schulz', found 'shampoo'"),
    ({"steps": 0}, {}, "steps: expected at least 1, found 0"),
    ({"entries": []}, {}, "entries: expected at least one measurement"),
    *(({}, {"seconds": s}, f"batch 8.: seconds must be positive and finite, found {s}") for s in (-1.0, 0.0, nan, inf)),
    ({}, {"seconds": "1"}, r"entries\[1\]: seconds must be of type float, found '1'"),
    ({}, {"rows": 0}, r"entries\[1\] \(0 x 100, batch 8\): rows, columns and batch must be at least 1"),
    ({}, {"batch": None}, r"entries\[1\]: missing key\(s\) batch"),
    ({}, {"batch": 1}, r"entries\[1\] \(100 x 100, batch 1\): measured twice"),
]
NO_TABLES = [(content, "cost.json is no valid cost table") for content in (b"{", b"", b"\xff\xfe", b"[1]", b"null")]


@pytest.mark.parametrize(
    ("content", "message"), [*((edited(*changes), message) for *changes, message in WRONG), *NO_TABLES]
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "cost.json"
    with pytest.raises(FileNotFoundError, match="cost.json: .*`lwopt calibrate` makes one"):
        read_cost_table(path)
    write_cost_table(table_of(*TIMES[:2]), path)
    assert read_cost_table(path) == table_of(*TIMES[:2])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_cost_table(path)
    assert str(path) in str(caught.value)


def test_the_default_path_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "device_name", lambda device: "NVIDIA H200 (SXM)")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache, folder in [(str(tmp_path / "cache"), "cache"), ("", "home/.cache"), ("relative", "home/.cache")]:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert default_path("cuda") == tmp_path / folder / "lwopt" / "cost-nvidia-h200-sxm.json"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_distinct_shape_is_timed_alone_and_in_a_stack(dtype: torch.dtype) -> None:
    lines: list[tuple[int, int, str]] = []
    shapes, before = [(48, 32), (16, 16), (32, 48), (1, 7)], torch.get_rng_state()
    table = calibrate(shapes, device="cpu", dtype=dtype, repeats=3, progress=lambda *line: lines.append(line))
    assert [entry[:2] for entry in table.seconds] == [(s, n) for s in [(1, 7), (16, 16), (32, 48)] for n in (1, 8)]
    assert all(seconds > 0 and math.isfinite(seconds) for _, _, seconds in table.seconds)
    assert (table.device, table.rule, table.steps) == (device_name("cpu"), "newton_schulz", 5)
    assert (table.dtype, table.torch_version) == (str(dtype).removeprefix("torch."), torch.__version__)
    assert [line[:2] for line in lines] == [(1, 3), (2, 3), (3, 3)] and lines[2][2].startswith("32 x 48: ")
    assert CostTable.from_json(table.to_json()) == table
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the user's random numbers"


def test_a_run_is_this_projects_newton_schulz_warm_up_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[int, ...], int, torch.dtype]] = []

    def spy(matrices: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((tuple(matrices.shape), options["steps"], options["dtype"]))
        return newton_schulz(matrices, **options)

    monkeypatch.setattr(calibration, "newton_schulz", spy)
    calibrate([(24, 16)], device="cpu", dtype=torch.bfloat16, steps=3, stack=4, repeats=5, max_seconds=60)
    assert seen == [(shape, 3, torch.bfloat16) for shape in [(16, 24)] * 6 + [(4, 16, 24)] * 6]
    seen.clear()
    table = calibrate([(16, 16)], device="cpu", dtype=torch.float32, max_seconds=1e-9)
    assert [shape for shape, *_ in seen] == [(16, 16)] * 2 and len(table.seconds) == 1, "one repeat, no stack"


def test_a_stack_is_as_large_as_memory_and_time_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "STACK_NUMEL", 3 * 16 * 16 + 1)
    monkeypatch.setattr(calibration._Bench, "_run", lambda bench, matrices: matrices.numel() / (16 * 16))  # seconds
    # half of the 8 s hold two runs of 4 matrices at 0.5 s
    allowed = [((16, 16), 1e6, [1, 3]), ((16, 8), 1e6, [1, 6]), ((16, 8), 8, [1, 4]), ((32, 32), 1e6, [1])]
    for shape, limit, batches in allowed:
        table = calibrate([shape], device="cpu", dtype=torch.float32, max_seconds=limit)
        assert [batch for _, batch, _ in table.seconds] == batches
        assert all(seconds == math.prod(side) / (16 * 16) for side, _, seconds in table.seconds), "per matrix"


def test_what_would_take_too_long_is_left_out_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    table = calibrate([(512, 512)], device="cpu", dtype=torch.bfloat16, max_seconds=1e-9)
    assert [entry[:2] for entry in table.seconds] == [((128, 128), 1)]  # 2^27 flops need no prediction
    assert table.unmeasured([(512, 512)]) == [(512, 512)]

    def seconds(bench: Any, matrices: torch.Tensor) -> float:
        """A device that does 1 GFLOP/s."""
        return newton_schulz_flops(tuple(matrices.shape[-2:]), bench.steps) / 1e9

    monkeypatch.setattr(calibration._Bench, "_run", seconds)
    lines: list[str] = []
    shapes, options = [(2048, 2048), (512, 640)], {"device": "cpu", "dtype": torch.float32, "stack": 1}
    table = calibrate(shapes, **options, max_seconds=10, progress=lambda *line: lines.append(line[2]))
    assert table.unmeasured(shapes) == [(2048, 2048)]
    assert lines[0] == "512 x 640: 4.7 s"
    assert lines[1] == "2048 x 2048: not measured, one would take about 258 s and the limit is 10 s"
    assert max(seconds for _, _, seconds in table.seconds) <= 10
    # 30 * 2048^3 flops at 1 GFLOP/s; the shape it is scaled from was rounded to a nanosecond
    assert table.model(stacked=False).of((2048, 2048)) == pytest.approx(30 * 2048**3, rel=1e-6)


def test_calibrate_refuses_what_it_cannot_time() -> None:
    for shapes, options, message in [
        ([], {}, "at least one element; found none"),
        ([(3, 4), (0, 5)], {}, r"at least one element; found .*\(0, 5\)"),
        ([(3, 4)], {"repeats": 0}, "repeats=0"),
        ([(3, 4)], {"max_seconds": nan}, "max_seconds=nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            calibrate(shapes, device="cpu", dtype=torch.float32, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_waited_for() -> None:
    """4096 x 4096 is 2.06 TFLOP, 0.5 ms even at 4 PFLOP/s; to queue the twenty kernels takes about 0.2 ms."""
    table = calibrate([(4096, 4096)], device="cuda", dtype=torch.bfloat16, repeats=3)
    assert table.device == torch.cuda.get_device_name()
    assert table.model(stacked=False).of((4096, 4096)) > 500_000
