"""A panel of the buckets over time: gradients arrive, owners work, parameters return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lwopt_backend.pictures.look import GRADIENTS, MUTED, OUTDENT, PARAMETERS, WORK, EndLabel, caption, end_labels
from lwopt_backend.pictures.units import Unit, one_line, time_unit

MOST_LANES = 60  # of a buffer, one per bucket
SHARED_LANES = 24  # at most so many if there are more buckets
MOST_NUMBERED = 12  # lanes with a number each
SPANS = {"reduce": GRADIENTS, "work": WORK, "back": PARAMETERS}
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
    for number, name in enumerate(SPANS):
        _draw_spans(axes, rows, name, number, unit)
    axes.set_xlim(0, end / unit.size)
    axes.set_ylim(len(rows), 0)
    names = lane_names(rows)
    axes.set_yticks([index + 0.5 for index in names], list(names.values()))
    _label_ends(axes, rows, unit)
    axes.set_xlabel(f"{unit.name} after the last gradient is computed")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="x")
    axes.legend(handles=_legend(document), ncols=3, **LEGEND)
    caption(axes, "Buckets over time", _says(document, rows), outdent=OUTDENT + timeline_indent(document))


def _draw_spans(axes: Axes, rows: Sequence[Lane], name: str, number: int, unit: Unit) -> None:
    """One kind of span of all lanes. One bucket's spans follow each other; those of several have a third each."""
    left = [row.spans[name][0] / unit.size for row in rows]
    width = [(row.spans[name][1] - row.spans[name][0]) / unit.size for row in rows]
    thick = [0.72 if row.first == row.last else 0.28 for row in rows]
    middle = [index + (0.5 if row.first == row.last else 0.22 + 0.28 * number) for index, row in enumerate(rows)]
    color = SPANS[name]
    axes.barh(middle, width, thick, left, color=color, edgecolor=color, linewidth=0.4, label=name)


def lane_names(rows: Sequence[Lane]) -> dict[int, str]:
    """Bucket numbers of as many lanes as have room; where there are several buffers, their names before them."""
    step = -(-len(rows) // MOST_NUMBERED) or 1
    several = len({row.part for row in rows}) > 1
    shown = [i for i in range(len(rows)) if i % step == 0]
    return {i: f"{one_line(rows[i].part, 12)} {rows[i].numbers}" if several else rows[i].numbers for i in shown}


def _label_ends(axes: Axes, rows: Sequence[Lane], unit: Unit) -> None:
    """When each buffer is through."""
    labels, parts = [], list(dict.fromkeys(row.part for row in rows))
    for part in parts:
        mine = [index for index, row in enumerate(rows) if row.part == part]
        end = unit.named(max(rows[index].spans["back"][1] for index in mine))
        text = f"{one_line(part, 12)}: {end}" if len(parts) > 1 else f"done at {end}"
        labels.append(EndLabel(sum(mine) / len(mine) + 0.5, text, MUTED))
    end_labels(axes, labels)


def _legend(document: Mapping[str, Any]) -> list[Patch]:
    returns = "parameters return" if document["engine"] == "owned" else "updates return"
    return [Patch(color=c, label=name) for c, name in zip(SPANS.values(), ("gradients arrive", "owners work", returns))]


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
    buckets_of = [bucket for part in document["parts"] for bucket in part["bucket_of"]]
    travelling = sum(bucket >= 0 for bucket in buckets_of)
    engine, buckets = one_line(document["engine"], 20), document["buckets"]
    return (
        f"Under {engine} the host itself moves gradients and parameters, and decides when.\n"
        f"Of {len(buckets_of):,} matrices, {travelling:,} travel to an owner and back in the step, in {buckets:,} "
        f"bucket{'' if buckets == 1 else 's'}; seconds are modelled for all of it together."
    )
