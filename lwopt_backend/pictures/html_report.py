"""A study as one HTML file that needs nothing else: key numbers, pictures, tables, and how seconds are modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lwopt_backend.pictures.headline import KeyNumber, deployment_words, key_numbers
from lwopt_backend.pictures.html_style import STYLE
from lwopt_backend.pictures.html_tables import (
    collectives_table,
    parts_table,
    routing_table,
    stages_table,
    text,
    what_if_table,
)
from lwopt_backend.pictures.image_files import inline_svg, write_whole
from lwopt_backend.pictures.look import look, panel
from lwopt_backend.pictures.rank_panels import draw_load, draw_memory
from lwopt_backend.pictures.timeline_panel import draw_timeline, timeline_inches, timeline_indent
from lwopt_backend.pictures.units import byte_unit, rate, time_unit

LEGEND = (
    '<p class="muted key">A bar is <i class="work"></i>work <i class="wire"></i>wire <i class="latency"></i>latency</p>'
)


def html_report(document: Mapping[str, Any]) -> str:
    """The report of a study's document (``lwopt_backend.study.document``). Equal documents give equal strings."""
    title = text(document["source"])
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}: plan</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>",
            f'<header>\n<h1>{title}</h1>\n<p class="muted">{text(deployment_words(document))}</p>\n</header>',
            _cards(document),
            _pictures(document),
            *_tables(document),
            _footer(document),
            "</body>\n</html>\n",
        ]
    )


def save_html(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the report, whole or not at all."""
    write_whole(path, html_report(document).encode())


def _cards(document: Mapping[str, Any]) -> str:
    return '<section class="cards">\n' + "\n".join(_card(key) for key in key_numbers(document)) + "\n</section>"


def _card(key: KeyNumber) -> str:
    mark = " bad" if key.is_bad else ""
    words = f"<b>{text(key.value)}</b><span>{text(key.name)}</span><small>{text(key.note)}</small>"
    return f'<div class="card{mark}">{words}</div>'


def _pictures(document: Mapping[str, Any]) -> str:
    """The three panels of the plan's picture, each a picture of its own."""
    indent, buckets = timeline_indent(document), timeline_inches(document)
    figures = [
        _picture(document, "load", draw_load, size=(5.6, 3.55), axes=(0.55, 2.9, 2.4)),
        _picture(document, "memory", draw_memory, size=(5.6, 3.55), axes=(0.55, 2.9, 2.4)),
        _picture(
            document, "buckets", draw_timeline, size=(11.4, 1.2 + buckets), axes=(0.55 + indent, 9.1 - indent, buckets)
        ),
    ]
    return '<section class="pictures">\n' + "\n".join(figures) + "\n</section>"


Draw = Callable[[Axes, Mapping[str, Any]], None]


def _picture(
    document: Mapping[str, Any],
    name: str,
    draw: Draw,
    *,
    size: tuple[float, float],
    axes: tuple[float, float, float],
) -> str:
    """One panel in a figure of ``size`` inches, its axes at (left, width, height)."""
    left, width, height = axes
    with look():
        figure = Figure(figsize=size)
        draw(panel(figure, left, 0.55, width, height), document)
    wide = ' class="wide"' if width > 5 else ""
    return f'<figure{wide} id="{name}">\n{inline_svg(figure, name)}\n</figure>'


def _tables(document: Mapping[str, Any]) -> list[str]:
    """Headings and tables; those that would say nothing are left out."""
    several = len(document["stages"]) > 1
    of_stage = f" of stage {document['stage']}" if several else ""
    routing = document.get("routing")
    found = ["<h2>Parameters</h2>", routing_table(routing)] if routing else []
    found += [f"<h2>Buffers{of_stage}</h2>", parts_table(document)]
    found += [f"<h2>Collectives of a step{of_stage}</h2>", collectives_table(document)]
    if several:
        found += ["<h2>Pipeline stages</h2>", stages_table(document)]
    if document["what_if"]:
        parts = document["parts"]
        buffer = f" for the buffer {text(parts[0]['name'])}" if len(parts) > 1 else ""  # the rows are the first one's
        found += [f"<h2>What else could be chosen{buffer}</h2>", LEGEND, what_if_table(document["what_if"])]
    return found


def _footer(document: Mapping[str, Any]) -> str:
    """How seconds were modelled."""
    cluster, parts, unit = document["cluster"], document["seconds_parts"], time_unit(document["seconds"])
    work, wire, latency = (unit.text(parts[key]) for key in ("compute", "wire", "latency"))
    sum_in_words = f"{unit.named(document['seconds'])} = {work} work + {wire} wire + {latency} latency"
    inside = cluster["node_bytes_per_second"]
    figures = [
        f"{rate(cluster['flops_per_second'], 'FLOP/s')} of matrix work per rank",
        f"{rate(cluster['bytes_per_second'], 'B/s')} per rank between nodes",
        f"{rate(inside, 'B/s')} within a node of {cluster['node_size']}" if inside else "",
        f"{rate(cluster['latency_seconds'], 's')} of latency a round",
        f"{byte_unit(memory).named(memory)} of memory" if (memory := cluster["memory_bytes"]) else "",
    ]
    return (
        "<footer>\n<h2>How seconds are modelled</h2>\n"
        f"<p>A step is <b>work + wire + latency, not overlapped</b>: {text(sum_in_words)}, of the busiest rank. "
        "The timeline overlaps them as far as one wire and the owners allow.</p>\n"
        f"<p>Cluster <code>{text(cluster['name'])}</code>: {text(', '.join(filter(None, figures)))}. "
        f"Work is counted by <code>{text(document['cost'])}</code>.</p>\n"
        f'<p class="muted">Plan <code>{text(document["digest"])}</code></p>\n</footer>'
    )
