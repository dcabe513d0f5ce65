"""Systems compared over world sizes: modelled step and peak memory, one line each; the picture of ``simulate.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from simulate_systems import Figure as SystemFigure

from lwopt_backend.checkpoint.files.folders import write_whole
from lwopt_backend.pictures.look import (
    GRADIENTS,
    MASTERS,
    PADDING,
    PARAMETERS,
    STATE,
    WORK,
    WORKSPACE,
    EndLabel,
    Unit,
    byte_unit,
    caption,
    end_labels,
    look,
    one_line,
    panel,
    png,
    time_unit,
)

SYSTEMS_WIDTH, HEIGHT = 12.4, 4.55  # inches
OURS = "ours"
COLORS = (WORKSPACE, GRADIENTS, PARAMETERS, MASTERS, STATE, PADDING)  # of the others, in their order; again if more
SYSTEM_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), "-", (0, (5, 1.5)), (0, (1, 1.2)))
Lines = dict[str, list[tuple[int, float]]]


def draw_systems(figures: Sequence[SystemFigure], *, headline: str = "One optimizer step, modelled") -> Figure:
    """Step time and peak memory over ranks, both scales logarithmic; ours is the broad line. Raises without figures."""
    if not figures:
        raise ValueError("there is no system to draw: expected at least one figure")
    seconds = _lines([(f.system, f.ranks, f.time.total) for f in figures])
    memory = _lines([(f.system, f.ranks, float(f.memory)) for f in figures])
    time, size = time_unit(max(f.time.total for f in figures)), byte_unit(max(f.memory for f in figures))
    with look():
        figure = Figure(figsize=(SYSTEMS_WIDTH, HEIGHT))
        figure.text(0.4 / SYSTEMS_WIDTH, 1 - 0.38 / HEIGHT, one_line(headline, 80), fontsize=15, weight="bold")
        _draw(panel(figure, 0.85, 1.15, 3.05, 2.75), seconds, time, "Step", "work + wire + latency, not overlapped")
        _draw(panel(figure, 6.9, 1.15, 3.05, 2.75), memory, size, "Peak memory per rank", "matrices only")
    return figure


def save_systems_png(
    figures: Sequence[SystemFigure], path: str | Path, *, headline: str = "One optimizer step, modelled"
) -> None:
    """Write ``draw_systems`` as a PNG, whole or not at all."""
    write_whole(path, png(draw_systems(figures, headline=headline)))


def _lines(points: Sequence[tuple[str, int, float]]) -> Lines:
    """Per system, (ranks, amount) by ranks."""
    lines: Lines = {}
    for system, ranks, amount in points:
        lines.setdefault(system, []).append((ranks, amount))
    return {system: sorted(line) for system, line in lines.items()}


def _draw(axes: Axes, lines: Lines, unit: Unit, title: str, below: str) -> None:
    """All lines of one panel, their names at their ends; of lines that coincide all stay visible."""
    others = [system for system in lines if system != OURS]
    labels = []
    for system, line in lines.items():
        ours = system == OURS
        number = 0 if ours else others.index(system)
        color, dashes = (
            (WORK, "-") if ours else (COLORS[number % len(COLORS)], SYSTEM_DASHES[number % len(SYSTEM_DASHES)])
        )
        ranks, amounts = zip(*((ranks, amount / unit.size) for ranks, amount in line))
        width, order = (5.0, 2) if ours else (1.5, 3 if dashes == "-" else 4)
        axes.plot(ranks, amounts, "o", ls=dashes, lw=width, ms=width + 1.5, color=color, label=system, zorder=order)
        labels.append(EndLabel(amounts[-1], f"{one_line(system, 24)}  {unit.text(line[-1][1])}", color, ours))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks(axes, sorted({ranks for line in lines.values() for ranks, _ in line}))
    end_labels(axes, labels)
    caption(axes, title, f"{unit.name}, {below}")


def _ticks(axes: Axes, ranks: Sequence[int]) -> None:
    """Plain numbers on both scales."""
    axes.set_xlim(ranks[0] / 1.12, ranks[-1] * 1.12)
    shown = ranks[:: -(-len(ranks) // 10)]
    axes.set_xticks(shown, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 300 else (1,), numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("data-parallel ranks")
    axes.grid()
