"""A plan in one picture: headline, work and memory per rank, buckets over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lwopt_backend.pictures.headline import deployment_words, key_numbers
from lwopt_backend.pictures.image_files import png, write_whole
from lwopt_backend.pictures.look import INK, MUTED, WARNING, look, panel
from lwopt_backend.pictures.rank_panels import draw_load, draw_memory
from lwopt_backend.pictures.timeline_panel import draw_timeline, timeline_inches, timeline_indent
from lwopt_backend.pictures.units import one_line

WIDTH = 12.0  # inches
LEFT = 0.85
HEADLINE = 1.35
GAP = 1.2
RANKS = 2.5  # height of the panels over ranks


def draw_plan(document: Mapping[str, Any]) -> Figure:
    """The picture of a study's document (``lwopt_backend.study.document``), three panels below a headline."""
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


def _headline(figure: Figure, document: Mapping[str, Any]) -> None:
    """Source, deployment, and the key numbers in a row."""
    down = figure.get_size_inches()[1]
    left = (LEFT - 0.45) / WIDTH
    figure.text(left, 1 - 0.38 / down, one_line(document["source"], 80), fontsize=15, weight="bold")
    figure.text(left, 1 - 0.64 / down, deployment_words(document), color=MUTED)
    for number, key in enumerate(key_numbers(document)):
        across = left + number * (WIDTH - 0.6) / 6 / WIDTH
        figure.text(
            across, 1 - 1.08 / down, key.value, fontsize=14, weight="bold", color=WARNING if key.is_bad else INK
        )
        figure.text(across, 1 - 1.27 / down, key.name, color=MUTED, fontsize=9)
