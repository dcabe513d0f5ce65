"""The report's tables as HTML: parameters, buffers, collectives, stages, and what else could be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lwopt_backend.pictures.units import byte_unit, count, digits, one_line, percent, ratio, time_unit

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
