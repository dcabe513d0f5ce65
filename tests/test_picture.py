"""The picture of a plan shows the numbers of the plan's document, and its page is safe to open."""

import copy
import functools
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from lwopt_backend.cli.tables import recording
from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.planner import picture
from lwopt_backend.planner.document import document
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import ModelShapes, Training
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route

HOSTILE = "</title><img src=x onerror=alert(1)> $\\frac{$"


@functools.cache
def planned(engine: str, ranks: int) -> dict[str, Any]:
    """The document of a real plan; not to be changed."""
    shapes = {"qkv": (768, 256), "o": (256, 256), "up": (1024, 256), "down": (256, 1024)}
    routes = [Route(f"layers.{i}.{n}", shape, "matrix", "a test's") for i in range(5) for n, shape in shapes.items()]
    options = {"bucket_mb": 2.0, "layout": "padded"} if engine == "owned" else {}
    setting = Setting.of(engine, CLUSTERS["h100-8x-ib"], options, grad_dtype="float32")
    study = plan_study(ModelShapes("a model", *Training().of(routes)), Deployment(ranks), setting)
    return document(study, source="a model")


@pytest.mark.parametrize("ranks", [4, 48])
def test_the_picture_shows_work_and_memory_of_every_rank_and_every_bucket(ranks: int) -> None:
    data = planned("owned", ranks)
    work, memory, buckets = picture.draw(data).axes
    loads, per_rank = data["load_per_rank"], data["memory_per_rank"]
    totals = [sum(rank[kind] for kind in picture.MEMORY) for rank in per_rank]
    order = sorted(range(ranks), key=lambda rank: (-loads[rank], -totals[rank], rank))
    most = 1e3 * data["seconds_parts"]["compute"]
    assert drawn(work, 0) == pytest.approx([most * loads[rank] / max(loads) for rank in order])
    kinds = [kind for kind in picture.MEMORY if any(rank[kind] for rank in per_rank)]
    for number, kind in enumerate(kinds):
        assert drawn(memory, number) == pytest.approx([per_rank[rank][kind] / 2**30 for rank in order])
    spans = data["timeline"]
    assert [bar.get_x() for bar in buckets.containers[1]] == pytest.approx([1e3 * each["work"][0] for each in spans])
    assert len(buckets.containers) == 3 and spans[-1]["back"][1] == data["seconds_overlapped"]


def drawn(axes: Any, number: int) -> list[float]:
    """The heights of one kind of bars, or of the outline that stands for many."""
    if axes.containers:
        return [bar.get_height() for bar in axes.containers[number]]
    values, _, baseline = axes.patches[number].get_data()
    return [float(high - low) for high, low in zip(values, baseline)]


def test_markup_and_formulas_in_a_name_are_text_and_the_users_settings_do_not_matter(tmp_path: Path) -> None:
    data = {**copy.deepcopy(planned("zero2", 4)), "source": HOSTILE}
    console = recording()
    console.print(HOSTILE)
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    picture.write_html(data, console, pages[0])
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        picture.write_html(data, console, pages[1])
    text = pages[0].read_text()
    assert text == pages[1].read_text() and text.count("<img") == 1 and "<script" not in text
    assert "data:image/png;base64," in text and "&lt;img src=x onerror" in text


def test_a_picture_is_written_whole_or_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        os.ftruncate(file, 10)
        raise OSError("no space left on device")

    path = tmp_path / "plan.png"
    picture.write_png(planned("zero2", 4), path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        picture.write_png(planned("owned", 4), path)
    assert old.startswith(b"\x89PNG") and path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ImportError, match="pictures of plans need matplotlib .*pip install matplotlib"):
        picture.write_png(planned("zero2", 4), tmp_path / "plan.png")
