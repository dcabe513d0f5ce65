"""How pictures look: numbers as text, colours, fonts, panels placed in inches, labels beside their lines, PNG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

NONE = "–"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit and what one of it is, in bytes or seconds."""

    name: str
    size: float

    def text(self, amount: float | None) -> str:
        """``amount`` in this unit, without its name."""
        return NONE if amount is None else digits(amount / self.size)

    def named(self, amount: float) -> str:
        return f"{self.text(amount)} {self.name}"


TIME_UNITS = (Unit("ms", 1e-3), Unit("µs", 1e-6), Unit("ns", 1e-9))
BYTE_UNITS = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))


def byte_unit(largest: float) -> Unit:
    """The unit of an axis or column whose largest amount this is, at most GiB."""
    return next((unit for unit in BYTE_UNITS if largest >= unit.size), BYTE_UNITS[-1])


def time_unit(largest: float) -> Unit:
    """The unit of an axis whose longest time this is: ms from 0.1 ms on, however long, so that steps share a unit."""
    return next((unit for unit in TIME_UNITS if largest >= unit.size / 10), TIME_UNITS[-1])


def digits(value: float | None) -> str:
    """Three significant digits, or all digits before the point: ``1,138``, ``27.5``, ``0.480``; None is a dash."""
    if value is None:
        return NONE
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}" if places < 7 else f"{value:.3g}"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def ratio(value: float | None) -> str:
    """A ratio, e.g. of the busiest rank to the mean, with three places: 1.004 is not 1."""
    return NONE if value is None else f"{value:.3f}" if value < 10 else digits(value)


def percent(value: float | None) -> str:
    """A percentage without its sign, one place."""
    return NONE if value is None else f"{value:,.1f}"


def one_line(text: object, most: int = 10_000) -> str:
    """Printable text on one line; what is longer than ``most`` loses its middle. Line breaks become spaces."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[: most // 3]}…{line[len(line) - (most - most // 3 - 1) :]}"


# Okabe and Ito's colours, which the colour-blind can tell apart. The same thing has the same colour in every panel:
# gradients in memory are those that arrive, work at a rank is what the owners do in the timeline.
PARAMETERS, GRADIENTS, WORK = "#0072b2", "#e69f00", "#009e73"
MASTERS, STATE, PADDING, WORKSPACE, EXCHANGE = "#56b4e9", "#cc79a7", "#a3a9b1", "#d55e00", "#f0e442"
KINDS = {  # of memory
    **{"parameters": PARAMETERS, "gradients": GRADIENTS, "masters": MASTERS, "state": STATE},
    **{"padding": PADDING, "workspace": WORKSPACE, "exchange": EXCHANGE},
}
SPANS = {"reduce": GRADIENTS, "work": WORK, "back": PARAMETERS}  # of a bucket
WARNING = "#d1242f"
INK, MUTED, RULE, PAPER = "#1f2328", "#5f6771", "#d0d7de", "#ffffff"

STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # names of models may hold dollars
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "figure.dpi": 100,
}
OUTDENT = 0.45  # inches from a caption to its axes, room for the scale
LINE_POINTS = 13.0  # from one label's line to the next


def look() -> AbstractContextManager[None]:
    """Our settings in place of the user's. All drawing and saving happens within it."""
    return matplotlib.style.context(["default", STYLE])


def panel(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place in inches, ``top`` counted from the figure's upper edge."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def caption(axes: Axes, title: str, below: str, *, outdent: float = OUTDENT) -> None:
    """A panel's title, and a muted line that says what is shown, beginning ``outdent`` inches left of the axes."""
    for text, up, size, weight, color in ((title, 23, 11, "bold", INK), (below, 9, 9, "normal", MUTED)):
        place = (-72 * outdent, up)
        axes.annotate(text, (0, 1), place, "axes fraction", "offset points", fontsize=size, weight=weight, color=color)


@dataclass(frozen=True, slots=True)
class EndLabel:
    """Text that belongs at height ``y`` of the right edge of some axes."""

    y: float
    text: str
    color: str
    bold: bool = False


def end_labels(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Write ``labels`` right of the axes, each as near to its height as the others allow, tied to it by a line.

    The axes' place and limits must be final.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    found = [(float(to_axes.transform((axes.get_xlim()[1], label.y))[1]), label) for label in labels]
    found.sort(key=lambda pair: pair[0])
    box = axes.get_window_extent()
    point = axes.figure.dpi / 72
    x1, x2, x3, text = (1 + points * point / box.width for points in (1.5, 6, 11, 14))
    places = spread([height for height, _ in found], LINE_POINTS * point / box.height)
    for (height, label), y in zip(found, places):
        weight, width = ("bold", 2.2) if label.bold else ("normal", 1.4)
        tie = Line2D([x1, x2, x3], [height, y, y], color=label.color, linewidth=width, clip_on=False)
        tie.set_transform(axes.transAxes)
        axes.add_line(tie)
        axes.annotate(label.text, (text, y), None, "axes fraction", va="center_baseline", fontsize=9, weight=weight)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Places for ascending ``heights`` in 0...1, at least ``gap`` apart: pushed up, then down from the top.

    Where there is no room for the gap it becomes smaller.
    """
    gap = min(gap, 1 / max(1, len(heights) - 1))
    places: list[float] = []
    for height in heights:
        places.append(max(height, places[-1] + gap if places else 0.0))
    for above, index in enumerate(reversed(range(len(places)))):
        places[index] = min(places[index], 1 - above * gap)
    return places


def png(figure: Figure) -> bytes:
    """The figure as a PNG. Letters of a name that the font lacks become boxes, without a warning."""
    buffer = io.BytesIO()
    with look(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png", dpi=140)
    return buffer.getvalue()
