"""A plan as one picture: headline, ranks, timeline."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console

from lwopt_backend.checkpoint.files.folders import write_whole
from lwopt_backend.pictures.look import (
    INK,
    KINDS,
    MUTED,
    OUTDENT,
    SPANS,
    WARNING,
    WORK,
    EndLabel,
    Unit,
    byte_unit,
    caption,
    count,
    end_labels,
    look,
    one_line,
    panel,
    percent,
    png,
    ratio,
    time_unit,
)


@dataclass(frozen=True, slots=True)
class KeyNumber:
    """A number, and what it is."""

    name: str
    value: str
    is_bad: bool = False


def deployment_words(document: Mapping[str, Any]) -> str:
    """The ranks and how they are divided, the engine and the cluster; one line."""
    d = document["deployment"]
    factors = [f"{name} {d[name]:,}" for name in ("dp", "tp", "pp") if d[name] > 1]
    ranks = f"{d['world_size']:,} rank{'s' if d['world_size'] > 1 else ''}"
    words = [ranks if len(factors) < 2 else f"{ranks} = {' × '.join(factors)}"]
    if d["ep"] > 1:
        words.append(f"experts over ep {d['ep']:,} × dp {d['expert_dp']:,}")
    if len(document["stages"]) > 1:
        words.append(f"stage {document['stage']}, the slowest of {len(document['stages'])}")
    engine = f"engine {one_line(document['engine'], 20)}, {one_line(document['layout'], 20)} storage"
    return " · ".join([*words, engine, one_line(document["cluster"]["name"], 30)])


def key_numbers(document: Mapping[str, Any]) -> list[KeyNumber]:
    """Busiest rank over mean, padding, modelled step, peak memory, buckets, groups."""
    peak, memory = document["peak_bytes"], document["cluster"]["memory_bytes"]
    return [
        KeyNumber("busiest rank / mean", ratio(document["flops_imbalance"])),
        KeyNumber("padding", f"{percent(document['padding_pct'])} %"),
        KeyNumber("modelled step", time_unit(document["seconds"]).named(document["seconds"])),
        KeyNumber("peak memory", byte_unit(peak).named(peak), 0 < memory < peak),
        KeyNumber("buckets", count(document["buckets"])),
        KeyNumber("group size", count(document["group_size"])),
    ]


# Two panels over the ranks of a stage, busiest rank first in both: modelled work, and memory by kind
MOST_BARS = 32  # beyond, one outline per kind
MOST_NUMBERED = 16  # ranks whose numbers fit below their bars
DASHES = (0, (4, 2))
NEAR = 2.5  # a machine's memory is drawn if it is at most so many times the peak


def rank_order(document: Mapping[str, Any]) -> list[int]:
    """Ranks as both panels show them: the busiest first, of equals the one with more memory."""
    loads, memory = document["load_per_rank"], [_peak(rank) for rank in document["memory_per_rank"]]
    return sorted(range(len(loads)), key=lambda rank: (-loads[rank], -memory[rank], rank))


def _peak(memory: Mapping[str, int]) -> int:
    return sum(memory[kind] for kind in KINDS)


def draw_load(axes: Axes, document: Mapping[str, Any]) -> None:
    """Work per rank in ms, with the mean and the maximum as lines."""
    order = rank_order(document)
    loads, busiest = document["load_per_rank"], document["seconds_parts"]["compute"]
    seconds = [busiest * load / max(1, *loads) for load in loads]  # the others' in proportion to the busiest rank's
    unit = time_unit(max(seconds))
    draw_heights(axes, [seconds[rank] / unit.size for rank in order], WORK, "work")
    axes.set_ylim(0, 1.12 * max(seconds) / unit.size or 1)
    lines = _reference_lines(seconds, unit)
    for name, line in lines.items():
        axes.axhline(line.y, color=INK, linewidth=1.1, linestyle="-" if name == "busiest" else DASHES, label=name)
    _finish(axes, order)
    end_labels(axes, list(lines.values()))
    caption(axes, "Work per rank", f"{unit.name} of work ({one_line(document['cost'], 24)}), busiest rank first")


def _reference_lines(seconds: Sequence[float], unit: Unit) -> dict[str, EndLabel]:
    """The busiest ranks' work and the mean; one line where they read the same."""
    highest, mean = max(seconds), sum(seconds) / len(seconds)
    busiest = [rank for rank, one in enumerate(seconds) if one == highest]
    if unit.text(highest) == unit.text(mean):
        return {"mean": EndLabel(mean / unit.size, f"each {unit.named(mean)}", INK)}
    who = f"rank {busiest[0]}" if len(busiest) == 1 else f"{len(busiest):,} ranks"
    return {
        "busiest": EndLabel(highest / unit.size, f"busiest {unit.named(highest)} ({who})", INK),
        "mean": EndLabel(mean / unit.size, f"mean {unit.named(mean)}", MUTED),
    }


def draw_memory(axes: Axes, document: Mapping[str, Any]) -> None:
    """Memory per rank at a step's peak, by kind, in the order of ``draw_load``; the machine's as a line if near."""
    order, memory, machine = rank_order(document), document["memory_per_rank"], document["cluster"]["memory_bytes"]
    peak = max(map(_peak, memory))
    unit = byte_unit(peak)
    bottom = [0.0] * len(order)
    labels = []
    for kind in (kind for kind in KINDS if any(rank[kind] for rank in memory)):
        heights = [memory[rank][kind] / unit.size for rank in order]
        draw_heights(axes, heights, KINDS[kind], kind, bottom)
        low, high = (unit.text(amount(rank[kind] for rank in memory)) for amount in (min, max))
        said = high if low == high else f"{low}–{high}"
        labels.append(EndLabel(bottom[-1] + heights[-1] / 2, f"{kind} {said}", KINDS[kind]))
        bottom = [below + height for below, height in zip(bottom, heights)]
    near = 0 < machine <= NEAR * peak
    axes.set_ylim(0, max(1.06 * peak, 1.04 * machine if near else 0) / unit.size or 1)
    if near:
        axes.axhline(machine / unit.size, color=INK, linewidth=1.1, linestyle=DASHES, label="machine")
        labels.append(EndLabel(machine / unit.size, f"machine {unit.text(machine)}", INK))
    _finish(axes, order)
    end_labels(axes, labels)
    caption(axes, "Memory per rank", f"{unit.name} at the peak of a step, ranks in the same order")


def draw_heights(
    axes: Axes, heights: Sequence[float], color: str, label: str, bottom: Sequence[float] | None = None
) -> None:
    """One bar per rank while they can be told apart, else one outline; rank i of the order spans i...i+1."""
    base = list(bottom or [0.0] * len(heights))
    if len(heights) <= MOST_BARS:
        places = [index + 0.5 for index in range(len(heights))]
        axes.bar(places, heights, 0.86, base, color=color, label=label)
        return
    runs = [(pair, len(list(run))) for pair, run in groupby(zip(base, heights))]
    edges = [0]
    for _, length in runs:
        edges.append(edges[-1] + length)
    tops = [below + height for (below, height), _ in runs]
    axes.stairs(tops, edges, baseline=[below for (below, _), _ in runs], fill=True, color=color, label=label)


def _finish(axes: Axes, order: Sequence[int]) -> None:
    """Scales: rank numbers below few bars, counts of ranks below many."""
    ranks = len(order)
    axes.set_xlim(0, ranks)
    if ranks <= MOST_NUMBERED:
        axes.set_xticks([index + 0.5 for index in range(ranks)], [str(rank) for rank in order])
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel("rank")
    else:
        ticks = sorted({round(ranks * quarter / 4) for quarter in range(5)})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel("ranks, busiest first")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y")


# A panel of the buckets over time: gradients arrive, owners work, parameters return
MOST_LANES = 60  # of a buffer, one per bucket
SHARED_LANES = 24  # at most so many if there are more buckets
MOST_NUMBERED_LANES = 12  # lanes with a number each
LEGEND: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "frameon": False,
    "handlelength": 0.9,
    "handleheight": 0.9,
    "columnspacing": 1.4,
    "borderaxespad": 1.9,  # in the title's row
}


@dataclass(frozen=True, slots=True)
class Lane:
    """Consecutive buckets of one buffer, usually one, and from when to when (seconds) each span of theirs lasts."""

    part: str
    first: int
    last: int
    spans: Mapping[str, tuple[float, float]]

    @property
    def numbers(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"


def lanes(document: Mapping[str, Any]) -> list[Lane]:
    """One lane per bucket, from top to bottom; a buffer of more than 60 buckets shares them out over 24 at most.

    A shared lane's spans last from the first bucket's start to the last one's end.
    """
    found = []
    for part in document["parts"]:
        timeline = part["timeline"]
        step = 1 if len(timeline) <= MOST_LANES else -(-len(timeline) // SHARED_LANES)
        for start in range(0, len(timeline), step):
            some = timeline[start : start + step]
            spans = {name: (min(b[name][0] for b in some), max(b[name][1] for b in some)) for name in SPANS}
            found.append(Lane(part["name"], some[0]["bucket"], some[-1]["bucket"], spans))
    return found


def timeline_inches(document: Mapping[str, Any]) -> float:
    """A fitting height for the panel: thick lanes if they are few."""
    rows = lanes(document)
    shared = sum(row.first != row.last for row in rows)
    return min(max(0.6, 0.3 * len(rows)), 1.5 + 0.045 * len(rows) + 0.03 * shared) if rows else 0.5


def timeline_indent(document: Mapping[str, Any]) -> float:
    """Inches by which the lanes' names are longer than the scales of other panels."""
    longest = max((len(name) for name in lane_names(lanes(document)).values()), default=0)
    return max(0.0, 0.08 * longest - OUTDENT + 0.1)


def draw_timeline(axes: Axes, document: Mapping[str, Any]) -> None:
    """The buckets' spans, or in words why there are none."""
    rows = lanes(document)
    if not rows:
        axes.set_axis_off()
        caption(axes, "Buckets over time", "no timeline is modelled for this engine")
        why, place = why_no_timeline(document), (-72 * OUTDENT, -6)
        axes.annotate(why, (0, 1), place, "axes fraction", "offset points", va="top", linespacing=1.5)
        return
    end = max(row.spans["back"][1] for row in rows)
    unit = time_unit(end)
    for number, (name, color) in enumerate(SPANS.items()):
        # One bucket's spans follow each other; those of several, in a shared lane, have a third each.
        left = [row.spans[name][0] / unit.size for row in rows]
        width = [(row.spans[name][1] - row.spans[name][0]) / unit.size for row in rows]
        thick = [0.72 if row.first == row.last else 0.28 for row in rows]
        middle = [index + (0.5 if row.first == row.last else 0.22 + 0.28 * number) for index, row in enumerate(rows)]
        axes.barh(middle, width, thick, left, color=color, edgecolor=color, linewidth=0.4, label=name)
    axes.set_xlim(0, end / unit.size)
    axes.set_ylim(len(rows), 0)
    names = lane_names(rows)
    axes.set_yticks([index + 0.5 for index in names], list(names.values()))
    _label_ends(axes, rows, unit)
    axes.set_xlabel(f"{unit.name} after the last gradient is computed")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="x")
    returning = "parameters return" if document["engine"] == "owned" else "updates return"
    words = ("gradients arrive", "owners work", returning)
    patches = [Patch(color=color, label=word) for color, word in zip(SPANS.values(), words)]
    axes.legend(handles=patches, ncols=3, **LEGEND)
    caption(axes, "Buckets over time", _says(document, rows), outdent=OUTDENT + timeline_indent(document))


def lane_names(rows: Sequence[Lane]) -> dict[int, str]:
    """Bucket numbers of as many lanes as have room; where there are several buffers, their names before them."""
    step = -(-len(rows) // MOST_NUMBERED_LANES) or 1
    several = len({row.part for row in rows}) > 1
    shown = [i for i in range(len(rows)) if i % step == 0]
    return {i: f"{one_line(rows[i].part, 12)} {rows[i].numbers}" if several else rows[i].numbers for i in shown}


def _label_ends(axes: Axes, rows: Sequence[Lane], unit: Unit) -> None:
    """Label the end of each buffer with its time."""
    labels, parts = [], list(dict.fromkeys(row.part for row in rows))
    for part in parts:
        mine = [index for index, row in enumerate(rows) if row.part == part]
        end = unit.named(max(rows[index].spans["back"][1] for index in mine))
        text = f"{one_line(part, 12)}: {end}" if len(parts) > 1 else f"done at {end}"
        labels.append(EndLabel(sum(mine) / len(mine) + 0.5, text, MUTED))
    end_labels(axes, labels)


def _says(document: Mapping[str, Any], rows: Sequence[Lane]) -> str:
    """What the lanes are, and what is left out."""
    most, several = max(row.last - row.first + 1 for row in rows), len({row.part for row in rows}) > 1
    words = [f"{most:,} buckets a lane, first start to last end" if most > 1 else "a lane is a bucket"]
    words.append("each buffer by itself" if several else "one collective at a time")
    if document["engine"] != "owned":
        words.append("our exchange only")
    elif not several:
        words.append(f"without overlap {time_unit(document['seconds']).named(document['seconds'])}")
    return "; ".join(words)


def why_no_timeline(document: Mapping[str, Any]) -> str:
    """Two lines for engines whose host moves the gradients and the parameters itself."""
    matrices, travelling = (sum(part[key] for part in document["parts"]) for key in ("matrices", "exchanged"))
    engine, buckets = one_line(document["engine"], 20), document["buckets"]
    return (
        f"Under {engine} the host itself moves gradients and parameters, and decides when.\n"
        f"Of {matrices:,} matrices, {travelling:,} travel to an owner and back in the step, in {buckets:,} "
        f"bucket{'' if buckets == 1 else 's'}; seconds are modelled for all of it together."
    )


WIDTH = 12.0  # inches
LEFT = 0.85
HEADLINE = 1.35
GAP = 1.2
RANKS = 2.5  # height of the panels over ranks


def draw_plan(document: Mapping[str, Any]) -> Figure:
    """The picture of a study's document (``lwopt_backend.planner.document``), three panels below a headline."""
    buckets = timeline_inches(document)
    with look():
        figure = Figure(figsize=(WIDTH, HEADLINE + 0.6 + RANKS + GAP + buckets + 0.65))
        _headline(figure, document)
        top = HEADLINE + 0.6
        draw_load(panel(figure, LEFT, top, 3.3, RANKS), document)
        draw_memory(panel(figure, 6.9, top, 3.3, RANKS), document)
        indent = timeline_indent(document)
        draw_timeline(panel(figure, LEFT + indent, top + RANKS + GAP, 9.35 - indent, buckets), document)
    return figure


def save_plan_png(document: Mapping[str, Any], path: str | Path) -> None:
    """Write ``draw_plan`` as a PNG, whole or not at all."""
    write_whole(path, png(draw_plan(document)))


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: plan</title>
<style>
body {{ margin: 24px; color: #1f2328; background: #ffffff; }}
img {{ max-width: 1180px; min-width: 720px; width: 100%; }}
figure, pre {{ margin: 0 0 1rem; overflow-x: auto; }}  /* on a phone these scroll, not the page */
pre {{ font: 13px/1.3 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
</style>
</head>
<body>
<figure><img alt="The plan in one picture" src="data:image/png;base64,{picture}"></figure>
<pre>{printed}</pre>
</body>
</html>
"""


def html_report(document: Mapping[str, Any], console: Console) -> str:
    """A page that needs nothing else: the plan's picture, and below it what the recording ``console`` has printed."""
    picture = base64.b64encode(png(draw_plan(document))).decode()
    printed = console.export_html(code_format="{code}", inline_styles=True, clear=False)
    return PAGE.format(title=escape(one_line(document["source"])), picture=picture, printed=printed)


def save_html(document: Mapping[str, Any], console: Console, path: str | Path) -> None:
    """Write the page, whole or not at all. What UTF-8 cannot encode becomes a question mark."""
    write_whole(path, html_report(document, console).encode(errors="replace"))


def _headline(figure: Figure, document: Mapping[str, Any]) -> None:
    """Source, deployment, and the key numbers in a row."""
    down = figure.get_size_inches()[1]
    left = (LEFT - 0.45) / WIDTH
    figure.text(left, 1 - 0.38 / down, one_line(document["source"], 80), fontsize=15, weight="bold")
    figure.text(left, 1 - 0.64 / down, deployment_words(document), color=MUTED)
    for number, key in enumerate(key_numbers(document)):
        across = left + number * (WIDTH - 0.6) / 6 / WIDTH
        color = WARNING if key.is_bad else INK
        figure.text(across, 1 - 1.08 / down, key.value, fontsize=14, weight="bold", color=color)
        figure.text(across, 1 - 1.27 / down, key.name, color=MUTED, fontsize=9)
