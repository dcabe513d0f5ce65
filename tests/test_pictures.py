"""Pictures show the document's numbers, the report what was printed; both are the same bytes every time."""

from __future__ import annotations

import base64
import copy
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console
from rich.table import Table

from lwopt_backend import pictures
from lwopt_backend.cli.tables import recording
from lwopt_backend.pictures.look import byte_unit, digits, one_line, png, time_unit
from lwopt_backend.pictures.panels import draw_plan, html_report, key_numbers, save_html, save_plan_png
from lwopt_backend.plan.cost import CLUSTERS, COSTS, CostTable
from lwopt_backend.planner.calibrate import write_cost_table
from lwopt_backend.planner.document import alternatives, document
from lwopt_backend.planner.models import ModelShapes, Training
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route

GIB = 2**30
KINDS = ("parameters", "gradients", "masters", "state", "padding", "workspace", "exchange")
CASES = ["few", "many", "stages", "buckets", "zero2", "fsdp2", "one"]
HOSTILE = """<img src=x onerror=alert(1)>"'&amp; $\\frac{$"""


def layers(count: int, width: int, experts: int = 0) -> list[Route]:
    shapes = {"q": (width, width), "k": (width // 4, width), "up": (3 * width, width), "down": (width, 3 * width)}
    shapes |= {f"experts.{number}.up": (width, width) for number in range(experts)}
    return [Route(f"layers.{i}.{n}", shape, "matrix", "a test's") for i in range(count) for n, shape in shapes.items()]


def setting_of(engine: str, **options: Any) -> Setting:
    options |= {"layout": "padded"} if engine == "owned" else {}
    return Setting.of(engine, CLUSTERS["h100-8x-ib"], COSTS["newton_schulz"], options, grad_dtype="float32")


@functools.cache
def planned(case: str) -> dict[str, Any]:
    """Documents of real plans; not to be changed."""
    routes, deployment, setting = {
        "few": (layers(5, 2048), Deployment(8), setting_of("owned", bucket_mb=160.0)),
        "many": (layers(12, 1024), Deployment(48), setting_of("owned", bucket_mb=40.0)),
        "stages": (layers(6, 512, experts=8), Deployment(32, pp=2, ep=4), setting_of("owned", bucket_mb=4.0)),
        "buckets": (layers(160, 256), Deployment(4), setting_of("owned", bucket_mb=2.8)),
        "zero2": (layers(5, 1024), Deployment(8), setting_of("zero2")),
        "fsdp2": (layers(5, 1024), Deployment(8), setting_of("fsdp2", bucket_numel=4_000_000)),
        "one": (layers(1, 64), Deployment(1), setting_of("owned", bucket_mb=1e6)),
    }[case]
    study = plan_study(ModelShapes(f"test/{case}", *Training().of(routes)), deployment, setting)
    rows = [] if case == "buckets" else list(alternatives(study.worst.planned[0], setting))
    return document(study, source=f"test/{case}", rows=rows)


@functools.cache
def plan_figure(case: str) -> Figure:
    return draw_plan(planned(case))


def printed(*lines: object) -> Console:
    """A console that has printed ``lines``."""
    console = recording()
    console.print(*lines, sep="\n")
    return console


def changed(case: str, **entries: Any) -> dict[str, Any]:
    return copy.deepcopy(planned(case)) | entries


def spans(axes: Axes, label: str) -> list[tuple[float, float]]:
    """What is drawn under a label, from the left: (bottom, top) of every rank."""
    for bars in axes.containers:
        if bars.get_label() == label:
            return [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in bars]
    steps = next(patch for patch in axes.patches if patch.get_label() == label)
    values, edges, baseline = steps.get_data()
    runs = zip(baseline, values, edges[1:] - edges[:-1])
    return [(bottom, top) for bottom, top, width in runs for _ in range(int(width))]


def heights(axes: Axes, label: str) -> list[float]:
    return [top - bottom for bottom, top in spans(axes, label)]


def level(axes: Axes, label: str) -> float | None:
    """The height of a horizontal line."""
    return next((float(line.get_ydata()[0]) for line in axes.lines if line.get_label() == label), None)


def texts(figure: Figure) -> list[Text]:
    """What can be read. Matplotlib also keeps labels of ticks beyond the ends of a scale, which it does not draw."""
    figure.draw_without_rendering()
    unseen = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        unseen |= {tick.label1 for tick in ticks if not (axis.axes.axison and low <= tick.get_loc() <= high)}
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in shown if text not in unseen]


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in texts(figure))


def assert_apart(figure: Figure) -> None:
    """No text covers another one or leaves the picture."""
    boxes, inside = [(text.get_text(), text.get_window_extent()) for text in texts(figure)], figure.bbox
    for name, box in boxes:
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1, name
    for (one, box), (other, place) in combinations(boxes, 2):
        width = min(box.x1, place.x1) - max(box.x0, place.x0)
        height = min(box.y1, place.y1) - max(box.y0, place.y0)
        assert width <= 1 or height <= 2.5, f"{one!r} covers {other!r}"


@pytest.mark.parametrize("case", ["few", "many", "stages", "zero2", "fsdp2"])
def test_panels_show_every_ranks_load_and_kinds_of_memory_busiest_first(case: str) -> None:
    data, (work, memory, *_) = planned(case), plan_figure(case).axes
    loads, held = data["load_per_rank"], data["memory_per_rank"]
    second, byte = time_unit(data["seconds_parts"]["compute"]).size, byte_unit(data["peak_bytes"]).size
    busiest = data["seconds_parts"]["compute"] / second
    totals = [sum(rank[kind] for kind in KINDS) for rank in held]
    order = sorted(range(len(loads)), key=lambda rank: (-loads[rank], -totals[rank], rank))
    assert heights(work, "work") == pytest.approx([busiest * loads[rank] / max(loads) for rank in order], rel=1e-12)
    assert len(set(loads)) > 1 or case == "fsdp2", "the case must not be flat"
    assert level(work, "busiest") == pytest.approx(busiest)
    assert level(work, "mean") == pytest.approx(busiest * sum(loads) / len(loads) / max(loads))
    below = [0.0] * len(held)
    for kind in (kind for kind in KINDS if any(rank[kind] for rank in held)):
        above = [end + held[rank][kind] / byte for end, rank in zip(below, order)]
        assert spans(memory, kind) == [pytest.approx(pair) for pair in zip(below, above)]
        below = above
    assert max(below) == pytest.approx(data["peak_bytes"] / byte)
    if case == "few":
        assert order != list(range(8))
        for axes in (work, memory):
            assert [int(label.get_text()) for label in axes.get_xticklabels()] == order
        color = {drawn.get_label(): drawn[0].get_facecolor() for drawn in plan_figure(case).axes[2].containers}
        same = {drawn.get_label(): drawn[0].get_facecolor() for drawn in (*work.containers, *memory.containers)}
        assert [same["work"], same["gradients"], same["parameters"]] == [color[of] for of in ("work", "reduce", "back")]


def test_the_machines_memory_is_a_line_where_it_is_near_and_exceeding_it_is_a_warning() -> None:
    peak = planned("few")["peak_bytes"]
    for owned, drawn in ((0, None), (0.5 * peak, 0.5 * peak), (2 * peak, 2 * peak), (9 * peak, None)):
        data = changed("few")
        data["cluster"]["memory_bytes"] = owned
        found = level(draw_plan(data).axes[1], "machine")
        assert found == (drawn and pytest.approx(drawn / byte_unit(peak).size))
        assert [key.name for key in key_numbers(data) if key.is_bad] == ["peak memory"] * (0 < owned < peak)


@pytest.mark.parametrize("case", ["few", "stages", "fsdp2", "one", "buckets"])
def test_timeline_has_a_lane_per_bucket_or_per_few_with_its_three_spans(case: str) -> None:
    data, axes = planned(case), plan_figure(case).axes[2]
    buckets = [bucket for part in data["parts"] for bucket in part["timeline"]]
    unit = time_unit(max(bucket["back"][1] for bucket in buckets)).size
    share = -(-len(buckets) // 24) if case == "buckets" else 1
    lanes = [buckets[start : start + share] for start in range(0, len(buckets), share)]
    assert [container.get_label() for container in axes.containers] == ["reduce", "work", "back"]
    for container in axes.containers:
        name = container.get_label()
        drawn = [edge for bar in container for edge in (bar.get_x(), bar.get_x() + bar.get_width())]
        ends = [(min(b[name][0] for b in lane), max(b[name][1] for b in lane)) for lane in lanes]
        assert drawn == pytest.approx([edge / unit for pair in ends for edge in pair])
        if share == 1:
            assert [bar.get_y() + bar.get_height() / 2 for bar in container] == [i + 0.5 for i in range(len(lanes))]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first bucket is on top"
    if case == "buckets":
        boxes = [spans(axes, name) for name in ("reduce", "work", "back")]
        assert all(a[1] <= b[0] + 1e-9 for above, below in zip(boxes, boxes[1:]) for a, b in zip(above, below))
        assert len(buckets) > 60 and f"{share} buckets a lane" in words(plan_figure(case))


def test_without_a_timeline_the_panel_says_why() -> None:
    travelling = planned("zero2")["parts"][0]["exchanged"]
    assert 0 < travelling < 20 and not plan_figure("zero2").axes[2].containers
    assert f"Of 20 matrices, {travelling} travel to an owner and back" in words(plan_figure("zero2"))


@pytest.mark.parametrize("case", CASES)
def test_headline_holds_the_key_numbers_and_no_text_covers_another(case: str) -> None:
    data, shown = planned(case), words(plan_figure(case)).split("\n")
    assert data["source"] in shown
    assert f"{data['flops_imbalance']:.3f}" in shown and f"{data['padding_pct']:.1f} %" in shown
    assert time_unit(data["seconds"]).named(data["seconds"]) in shown
    assert byte_unit(data["peak_bytes"]).named(data["peak_bytes"]) in shown
    assert_apart(plan_figure(case))


class Page(HTMLParser):
    """The elements of a page; complains about tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}  # by the tag that they stand in
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in ("meta", "img") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> in {self.open}"

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag] = self.texts.get(tag, "") + data


def test_the_report_is_the_picture_above_what_was_printed_and_needs_nothing_else() -> None:
    table = Table("parameter", "why", title="Routing")
    table.add_row("layers.*.up", "2-D weight & more")
    html = html_report(planned("few"), printed("Model: test", table))
    page = Page(html)
    assert "width=device-width" in html and "overflow-x: auto" in html  # on a phone its parts scroll, not the page
    assert not re.findall(r"https?:", html) and {"script", "link", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    (source,) = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    kind, _, content = (source or "").partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(content) == png(draw_plan(planned("few")))
    assert page.texts["title"] == "test/few: plan" and page.texts["pre"].startswith("Model: test\n")
    assert "│ layers.*.up │ 2-D weight & more │" in page.texts["pre"] and "Routing" in page.texts["pre"]


def hostile(data: Any) -> Any:
    """The same document with markup in every one of its strings, and in the names of buffers."""
    if isinstance(data, dict):
        names = ("dense", "experts")
        return {(key + HOSTILE if key in names else key): hostile(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [hostile(each) for each in data]
    return data + HOSTILE if isinstance(data, str) else data


def test_markup_and_formulas_in_names_are_text(tmp_path: Path) -> None:
    data = hostile(planned("stages"))
    names = [f"{HOSTILE} {number}" for number in range(2)]
    page = Page(html_report(data, printed(*names, "{braces} [red]")))
    assert [tag for tag, _ in page.tags].count("img") == 1
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert page.texts["title"] == data["source"] + ": plan"
    assert page.texts["pre"].split("\n")[:3] == [*names, "{braces} [red]"]
    save_plan_png(data, tmp_path / "plan.png")
    assert data["source"] in words(draw_plan(data))


def test_names_of_any_length_and_letters_are_one_printable_line(tmp_path: Path, recwarn: Any) -> None:
    name = "模型/" + "long" * 100 + "\n\x00\ud800 .json"
    shown = one_line(name, 80)
    assert len(shown) == 80 and shown.isprintable() and shown.startswith("模型/long") and shown.endswith(" .json")
    data = changed("few", source=name)
    assert_apart(draw_plan(data))
    recwarn.clear()
    save_plan_png(data, tmp_path / "plan.png")
    save_html(data, printed(name), tmp_path / "plan.html")
    written = (tmp_path / "plan.html").read_text()
    assert "<title>模型/long" in written and "long \ufffd\ufffd .json: plan</title>" in written
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_equal_documents_give_equal_bytes_whatever_the_users_settings() -> None:
    """In another process too: test_cli.py."""
    data = json.loads(json.dumps(planned("stages")))
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
        again = html_report(data, printed("Model"))
        assert matplotlib.rcParams["font.size"] == 30
    assert again == html_report(planned("stages"), printed("Model"))


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        os.ftruncate(file, 10)
        raise OSError("no space left on device")

    path = tmp_path / "folder" / "file"
    kinds: list[tuple[Callable[..., None], Any, bytes]] = [
        (save_plan_png, planned("few"), b"\x89PNG"),
        (lambda shown, place: save_html(shown, printed(), place), planned("few"), b"<!doctype html>"),
        (write_cost_table, CostTable("a cpu", "bfloat16", "newton_schulz", 5, "2", (((2, 3), 1, 1.0),)), b"{"),
    ]
    for save, shown, start in kinds:
        for place in (path, str(path)):
            save(shown, place)
            assert path.read_bytes().startswith(start)
            path.write_bytes(b"old")
            with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
                patch.setattr(os, "fsync", full)
                save(shown, place)
            assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pictures and HTML reports need matplotlib .*pip install matplotlib"):
        importlib.reload(pictures)


def test_numbers_are_spelled_in_three_digits_and_one_unit() -> None:
    spelled = {1137.8: "1,138", 27.487: "27.5", 3: "3.00", 0.48: "0.480", 0: "0", 0.00048: "0.000480", 2e-9: "2e-09"}
    assert {value: digits(value) for value in spelled} == spelled and digits(None) == "–"
    assert byte_unit(1.5 * GIB).named(1.5 * GIB) == "1.50 GiB"
    assert byte_unit(GIB - 1).name == "MiB" and byte_unit(GIB).name == "GiB" and byte_unit(0).name == "KiB"
    assert [time_unit(seconds).name for seconds in (70, 1e-4, 9e-5, 2e-8)] == ["ms", "ms", "µs", "ns"]
