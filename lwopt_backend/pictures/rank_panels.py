"""Two panels over the ranks of a stage, busiest rank first in both: modelled work, and memory by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from lwopt_backend.pictures.look import (
    GRADIENTS,
    INK,
    MASTERS,
    MUTED,
    PADDING,
    PARAMETERS,
    STATE,
    WORK,
    WORKSPACE,
    EndLabel,
    caption,
    end_labels,
)
from lwopt_backend.pictures.units import Unit, byte_unit, one_line, time_unit

MOST_BARS = 32  # beyond, one outline per kind
MOST_NUMBERED = 16  # ranks whose numbers fit below their bars
DASHES = (0, (4, 2))
NEAR = 2.5  # a machine's memory is drawn if it is at most so many times the peak
KINDS = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "masters": MASTERS,
    "state": STATE,
    "padding": PADDING,
    "workspace": WORKSPACE,
}


def rank_order(document: Mapping[str, Any]) -> list[int]:
    """Ranks as both panels show them: the busiest first, of equals the one with more memory."""
    loads, memory = document["load_per_rank"], [_peak(rank) for rank in document["memory_per_rank"]]
    return sorted(range(len(loads)), key=lambda rank: (-loads[rank], -memory[rank], rank))


def _peak(memory: Mapping[str, int]) -> int:
    return sum(memory[kind] for kind in KINDS)


def work_seconds(document: Mapping[str, Any]) -> list[float]:
    """Modelled seconds of work per rank: the busiest one's are known, the others' are in proportion."""
    loads = document["load_per_rank"]
    return [document["seconds_parts"]["compute"] * load / max(1, *loads) for load in loads]


def draw_load(axes: Axes, document: Mapping[str, Any]) -> None:
    """Work per rank in ms, with the mean and the maximum as lines."""
    order = rank_order(document)
    seconds = work_seconds(document)
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
        labels.append(EndLabel(bottom[-1] + heights[-1] / 2, f"{kind} {_range(kind, memory, unit)}", KINDS[kind]))
        bottom = [below + height for below, height in zip(bottom, heights)]
    near = 0 < machine <= NEAR * peak
    axes.set_ylim(0, max(1.06 * peak, 1.04 * machine if near else 0) / unit.size or 1)
    if near:
        axes.axhline(machine / unit.size, color=INK, linewidth=1.1, linestyle=DASHES, label="machine")
        labels.append(EndLabel(machine / unit.size, f"machine {unit.text(machine)}", INK))
    _finish(axes, order)
    end_labels(axes, labels)
    caption(axes, "Memory per rank", f"{unit.name} at the peak of a step, ranks in the same order")


def _range(kind: str, memory: Sequence[Mapping[str, int]], unit: Unit) -> str:
    """A kind's amount, or its least and most over the ranks."""
    low, high = (unit.text(amount(rank[kind] for rank in memory)) for amount in (min, max))
    return high if low == high else f"{low}–{high}"


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
