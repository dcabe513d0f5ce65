"""A plan as a picture: work and memory of each rank, and the buckets over time. matplotlib is an extra."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwopt_backend.checkpoint.files.folders import write_whole
from lwopt_backend.config.options import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

# Okabe and Ito's colours, distinct for the colour-blind.
MEMORY = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "masters": "#56b4e9",
    "state": "#cc79a7",
    "padding": "#a3a9b1",
    "workspace": "#d55e00",
    "exchange": "#f0e442",
}
SPANS = {"out": ("to the owners", "#e69f00"), "work": ("owners work", "#009e73"), "back": ("updates", "#0072b2")}
WORK, INK, GREY = "#009e73", "#1f2328", "#7b838d"  # grey can be read on a white page and on a dark one
TEXT = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
MAX_BARS = 32  # more ranks are drawn as one outline
NEAR = 2.5  # the machine's memory is drawn if it is at most 2.5 times the peak


def write_png(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a plan's document (``planner.document``), whole or not at all."""
    write_whole(path, png(document))


def write_html(document: Mapping[str, Any], printed: Console, path: Path) -> None:
    """Write rich's page of what the recording console ``printed``, below the picture, whole or not at all."""
    picture = base64.b64encode(png(document)).decode()
    shown = f'<title>{html.escape(document["source"])}: plan</title><img style="width: 100%; max-width: 36rem" '
    page = printed.export_html(inline_styles=True, clear=False)
    page = page.replace("<body>", f'<body>{shown} alt="The plan in one picture" src="data:image/png;base64,{picture}">')
    write_whole(path, page.encode(errors="replace"))  # a name may have letters outside UTF-8


def png(document: Mapping[str, Any]) -> bytes:
    """The picture as a PNG. Equal documents give equal bytes."""
    buffer = io.BytesIO()
    with _style():
        told = {"Description": f"lwopt plan, digest {document['digest']}"}  # of which plan it is
        draw(document).savefig(buffer, format="png", dpi=200, metadata=told)
    return buffer.getvalue()


def draw(document: Mapping[str, Any]) -> Figure:
    """Work and memory per rank, both with the busiest rank first, and the buckets over time: readable on a phone."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.4, 8.2), layout="constrained")
        panels: Any = figure.subplot_mosaic([["work"], ["memory"], ["buckets"]])
        deployment, worst = document["deployment"], document["flops_imbalance"]
        figure.suptitle(
            f"{document['source'][:40]}: {deployment['world_size']:,} ranks, engine {document['engine']}\n"
            f"busiest rank / mean {worst:.3f}, padding {document['padding_pct']:.1f} %,\n"
            f"modelled step {1e3 * document['seconds_overlapped']:.4g} ms",
            fontsize=10,
        )
        loads, memory = document["load_per_rank"], document["memory_per_rank"]
        order = sorted(range(len(loads)), key=lambda rank: (-loads[rank], -sum(memory[rank][k] for k in MEMORY), rank))
        _draw_work(panels["work"], document, order)
        _draw_memory(panels["memory"], document, order)
        _draw_buckets(panels["buckets"], document)
    return figure


def _draw_work(axes: Axes, document: Mapping[str, Any], order: Sequence[int]) -> None:
    loads = document["load_per_rank"]
    milliseconds = 1e3 * document["seconds_parts"]["compute"] / max(1, *loads)  # of a unit of load
    heights = [milliseconds * loads[rank] for rank in order]
    _bars(axes, heights, [0.0] * len(heights), "work", WORK)
    _line(axes, sum(heights) / len(heights), "mean")
    _finish(axes, f"Work per rank, ms ({document['options']['matrix']})", order)


def _draw_memory(axes: Axes, document: Mapping[str, Any], order: Sequence[int]) -> None:
    memory, limit = document["memory_per_rank"], document["cluster"]["memory_bytes"]
    bottom = [0.0] * len(order)
    for kind, color in MEMORY.items():
        heights = [memory[rank][kind] / 2**30 for rank in order]
        if any(heights):
            _bars(axes, heights, bottom, kind, color)
            bottom = [low + height for low, height in zip(bottom, heights)]
    if 0 < limit <= NEAR * document["peak_bytes"]:
        _line(axes, limit / 2**30, "machine")
    _finish(axes, "Memory per rank at the peak of a step, GiB", order)


def _bars(axes: Axes, heights: Sequence[float], bottom: Sequence[float], label: str, color: str) -> None:
    """Rank i of the order spans i to i + 1."""
    if len(heights) <= MAX_BARS:
        axes.bar([i + 0.5 for i in range(len(heights))], heights, 0.86, bottom, color=color, label=label)
    else:
        tops = [low + height for low, height in zip(bottom, heights)]
        axes.stairs(tops, range(len(heights) + 1), baseline=bottom, fill=True, color=color, label=label)


def _line(axes: Axes, height: float, label: str) -> None:
    """A dashed line with a white rim: over bars and over a dark page."""
    from matplotlib.patheffects import withStroke

    rim = [withStroke(linewidth=2.5, foreground="white")]
    axes.axhline(height, color=INK, linestyle="--", linewidth=1, label=label, path_effects=rim)


def _finish(axes: Axes, title: str, order: Sequence[int]) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, len(order))
    if len(order) <= MAX_BARS:
        axes.set_xticks([i + 0.5 for i in range(len(order))], [str(rank) for rank in order])
    axes.set_xlabel("rank" if len(order) <= MAX_BARS else "ranks, busiest first")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(fontsize=8, loc="lower left")


def _draw_buckets(axes: Axes, document: Mapping[str, Any]) -> None:
    """A line for each bucket, from top to bottom, with its three spans over time."""
    buckets = document["timeline"]
    axes.set_title("Buckets over time" if buckets else "Buckets over time: nothing travels", fontsize=10)
    for span, (label, color) in SPANS.items():
        starts, ends = ([1e3 * bucket[span][side] for bucket in buckets] for side in (0, 1))
        widths = [end - start for start, end in zip(starts, ends)]
        axes.barh(range(len(buckets)), widths, 0.9, starts, color=color, label=label)
    axes.set(xlabel="ms", ylabel="bucket", ylim=(max(0.5, len(buckets) - 0.5), -0.5))
    axes.locator_params(axis="y", integer=True)
    if buckets:
        axes.legend(fontsize=8)


def _style() -> Any:
    """matplotlib's own settings in place of the user's, without a background; a model's name may contain dollars."""
    try:
        import matplotlib.style
    except ImportError as missing:
        told = f"pictures of plans need matplotlib ({missing}); run: {install_command('matplotlib')}"
        raise ImportError(told) from missing
    own = {"text.parse_math": False, "font.size": 9.0, "savefig.transparent": True, "legend.labelcolor": INK}
    return matplotlib.style.context(["default", own | dict.fromkeys(TEXT, GREY)])
