"""The report's style sheet. Light and dark are the same rules over other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lwopt_backend.pictures.look import (
    byte_unit,
    count,
    digits,
    inline_svg,
    look,
    one_line,
    panel,
    percent,
    rate,
    ratio,
    time_unit,
    write_whole,
)
from lwopt_backend.pictures.panels import (
    KeyNumber,
    deployment_words,
    draw_load,
    draw_memory,
    draw_timeline,
    key_numbers,
    timeline_inches,
    timeline_indent,
)

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f8fa; --card: #ffffff; --ink: #1f2328; --muted: #5f6771; --rule: #d0d7de; --strong: #dff5ec;
  --work: #009e73; --wire: #5b6b7f; --latency: #b4bfcc; --warning: #d1242f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #161b22; --ink: #e6edf3; --muted: #9aa4af; --rule: #30363d; --strong: #12362b;
    --wire: #8494a7; --latency: #465262; --warning: #ff7b72;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1180px; padding: 32px 20px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 0 0 10px; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.muted, figcaption, caption { color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 22px 0; }
.card, figure, .table {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
}
.card { padding: 14px 16px; }
.card b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { display: block; font-size: 13px; }
.card small { display: block; color: var(--muted); font-size: 12px; overflow-wrap: anywhere; }
.bad b { color: var(--warning); }
.pictures { display: grid; grid-template-columns: repeat(2, 1fr); gap: 12px; }
figure { margin: 0; padding: 14px 16px; overflow-x: auto; }
figure.wide { grid-column: 1 / -1; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
figure.wide svg { min-width: 760px; }
.table { overflow-x: auto; margin: 8px 0 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-top: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 600; font-size: 12px; border-top: 0; }
th { vertical-align: bottom; white-space: normal; }
th.text, td.text { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 8em; }
tr.chosen td { background: var(--strong); font-weight: 600; }
.bar { display: flex; width: 160px; height: 10px; }
.bar i { display: block; height: 10px; }
.work { background: var(--work); } .wire { background: var(--wire); } .latency { background: var(--latency); }
.key i { display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 12px; }
footer { margin-top: 40px; padding-top: 16px; border-top: 1px solid var(--rule); font-size: 14px; }
@media (max-width: 820px) { .pictures { grid-template-columns: 1fr; } }
@media print { body { background: none; max-width: none; } .card, figure, .table { break-inside: avoid; } }
""".strip()


# The report's tables as HTML: parameters, buffers, collectives, stages, and what else could be chosen.

PARTS_OF_A_STEP = {"work": "compute", "wire": "wire", "latency": "latency"}


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe as it is. Everything else that is put into a page is escaped."""

    html: str


Cell = str | Markup


def text(content: object) -> str:
    """Any text as HTML: on one line, printable, escaped."""
    return escape(one_line(content))


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: int = 1, chosen: int | None = None) -> str:
    """The first ``left`` columns hold text, the others numbers; row ``chosen`` is emphasised."""
    lines = ["<tr>" + "".join(_cell("th", heading, i < left) for i, heading in enumerate(headings)) + "</tr>"]
    for number, row in enumerate(rows):
        mark = ' class="chosen"' if number == chosen else ""
        lines.append(f"<tr{mark}>" + "".join(_cell("td", cell, i < left) for i, cell in enumerate(row)) + "</tr>")
    body = "\n".join(lines[1:])
    return f'<div class="table"><table>\n<thead>{lines[0]}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _cell(tag: str, content: Cell, is_text: bool) -> str:
    inner = content.html if isinstance(content, Markup) else text(content)
    mark = ' class="text"' if is_text else ""
    return f"<{tag}{mark}>{inner}</{tag}>"


def routing_table(routing: Sequence[Mapping[str, Any]]) -> str:
    """What is a matrix, what is not, and why."""
    rows = [[each["kind"], each["reason"], count(each["parameters"]), digits(each["numel"] / 1e6)] for each in routing]
    return table(["rule", "why", "parameters", "M elements"], rows, left=2)


def parts_table(document: Mapping[str, Any]) -> str:
    """The buffers of the stage that is shown."""
    parts = document["parts"]
    time = time_unit(max(part["seconds"] for part in parts))
    headings = ["buffer", "layout", "planned by", "matrices", "ranks", "group size", "instances", "buckets"]
    headings += ["M elements", "padding, %", "work: busiest / mean", "elements: most / mean", f"step, {time.name}"]
    rows = [
        [
            *(part["name"], part["layout"], part["strategy"]),
            *(count(part[key]) for key in ("matrices", "ranks", "group_size", "instances", "buckets")),
            *(digits(part["numel"] / 1e6), percent(part["padding_pct"])),
            *(ratio(part["flops_imbalance"]), ratio(part["numel_imbalance"]), time.text(part["seconds"])),
        ]
        for part in parts
    ]
    return table(headings, rows, left=3)


def collectives_table(document: Mapping[str, Any]) -> str:
    """What travels in a step, per buffer."""
    found = [(part["name"], each) for part in document["parts"] for each in part["collectives"]]
    unit = byte_unit(max((each["nbytes"] for _, each in found), default=0))
    rows = [[each["what"], name, count(each["count"]), unit.text(each["nbytes"])] for name, each in found]
    headings = ["collective", "buffer", "a step", f"sent by the busiest rank, {unit.name} a step"]
    return table(headings, rows, left=2)


def stages_table(document: Mapping[str, Any]) -> str:
    """Every pipeline stage; the one that is shown is emphasised."""
    stages = document["stages"]
    time, size = time_unit(max(s["seconds"] for s in stages)), byte_unit(max(s["peak_bytes"] for s in stages))
    headings = ["stage", "matrices", "group size", "padding, %", "work: busiest / mean"]
    headings += [f"step, {time.name}", f"peak memory, {size.name}"]
    rows = [
        [
            *(str(stage["stage"]), count(stage["matrices"])),
            *(_per_part(stage["group_size"], count), _per_part(stage["padding_pct"], percent)),
            *(ratio(stage["flops_imbalance"]), time.text(stage["seconds"]), size.text(stage["peak_bytes"])),
        ]
        for stage in stages
    ]
    shown = next((i for i, stage in enumerate(stages) if stage["stage"] == document["stage"]), None)
    return table(headings, rows, chosen=shown)


def _per_part(amounts: Mapping[str, Any], spell: Callable[[Any], str]) -> str:
    """One amount, or one per buffer with its name."""
    if len(amounts) == 1:
        return spell(next(iter(amounts.values())))
    return ", ".join(f"{name} {spell(amount)}" for name, amount in amounts.items())


def what_if_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Alternatives with their seconds as numbers and as bars; the chosen plan is the first row that says so."""
    longest = max(row["seconds"] for row in rows)
    time, size = time_unit(longest), byte_unit(max(row["memory"] or 0 for row in rows))
    headings = ["plan", "buckets", "padding, %", "work: busiest / mean", f"peak memory, {size.name}"]
    headings += [f"{name}, {time.name}" for name in (*PARTS_OF_A_STEP, "step")] + [""]
    cells = [
        [
            *(row["what"], count(row["buckets"])),
            percent(None if row["padding"] is None else 100 * row["padding"]),
            *(ratio(row["flops_imbalance"]), size.text(row["memory"])),
            *(time.text(row["time"][key]) for key in PARTS_OF_A_STEP.values()),
            *(time.text(row["seconds"]), _bar(row["time"], longest)),
        ]
        for row in rows
    ]
    chosen = next((i for i, row in enumerate(rows) if row["what"].startswith("chosen")), None)
    return table(headings, cells, chosen=chosen)


def _bar(time: Mapping[str, float], longest: float) -> Markup:
    """Work, wire and latency as shares of the longest row."""
    scale = 100 / longest if longest else 0
    shares = [(name, time[key] * scale) for name, key in PARTS_OF_A_STEP.items()]
    return Markup(
        '<div class="bar">' + "".join(f'<i class="{n}" style="width:{w:.2f}%"></i>' for n, w in shares) + "</div>"
    )


# A study as one HTML file that needs nothing else: key numbers, pictures, tables, and how seconds are modelled.

LEGEND = (
    '<p class="muted key">A bar is <i class="work"></i>work <i class="wire"></i>wire <i class="latency"></i>latency</p>'
)


def html_report(document: Mapping[str, Any]) -> str:
    """The report of a study's document (``lwopt_backend.planner.document``). Equal documents give equal strings."""
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
