"""``lwopt watch``: what a run writes into metrics.jsonl, in the terminal, as a page, or for TensorBoard."""

from __future__ import annotations

import html
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from lwopt_backend.config.options import install_command

METRICS = "metrics.jsonl"
Points = list[tuple[int, float]]  # steps and values
JOINED = {"validation_loss": ("loss", "validation"), "loss": ("loss", "training")}  # keys that share a panel
TITLES = {  # of panels, in their order: a key of a row, and what it is
    "loss": ("Loss", "training, and validation where there is one"),
    "lr": ("Learning rates", "by param group"),
    "grad_norm": ("Gradient norm", "before clipping, without clip groups"),
    "clip_group_norms": ("Norms of clip groups", "before clipping"),
    "update_rms": ("Update sizes", "root mean square of what a step changes, by rule"),
    "orthogonality": ("Orthogonality", "of a sampled update, by rule: 0 is orthogonal"),
    "seconds": ("Seconds", "of a step of the busiest rank, by part"),
    "exchange_bytes": ("Bytes sent", "in a step by the busiest rank"),
    "tokens_per_s": ("Tokens a second", "over all ranks"),
}
BARS, NOT_FINITE = "▁▂▃▄▅▆▇█", "×"
TREND = 32  # the last values that the terminal shows


def watch(
    run: Annotated[Path, typer.Argument(help=f"A run's folder, or its {METRICS}.")],
    once: Annotated[bool, typer.Option("--once", help="Print what there is, and end.")] = False,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page, and end.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write events for TensorBoard, and end.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Watch a training run: loss, rates, norms, update sizes by rule, orthogonality, seconds by part.

    A run is a folder with a metrics.jsonl, a JSON object per step; numbers, lists and objects of numbers are shown.
    """
    from lwopt_backend.report import standard_output

    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run writes a JSON object for each step there")
    if page is not None:
        write_page(read(path), path.resolve().parent.name, page)
    if tensorboard is not None:
        write_events(read(path), tensorboard)
    if once or page is not None or tensorboard is not None:
        if once:
            standard_output().print(table(read(path)))
        return
    with Live(table(read(path)), console=standard_output(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(table(read(path)), refresh=True)
        except KeyboardInterrupt:
            return


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Raises ValueError for anything else.

    A row that is being written, or was when a run was killed, is left out; so are the steps that a resumed run repeats.
    """
    rows = list[dict[str, Any]]()
    lines = path.read_text().splitlines() if path.exists() else []  # a new run removes it
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise TypeError("expected an object with a number 'step'")
        except (TypeError, ValueError) as error:
            if isinstance(error, ValueError) and (line.startswith("{") or number == len(lines)):
                continue
            raise ValueError(f"{path}, line {number}: {error}; found {line[:80]!r}") from None
        if rows and row["step"] < rows[-1]["step"]:
            rows = [earlier for earlier in rows if earlier["step"] < row["step"]]
        rows.append(row)
    return rows


def panels(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """By panel and label, the values at each step: known panels first, then those of other keys."""
    found: dict[str, dict[str, Points]] = {key: {} for key in TITLES}
    for row in rows:
        for key, value in row.items():
            panel, label = JOINED.get(key, (key, key))
            pairs: Iterable[tuple[Any, Any]] = ((label, value),)
            if isinstance(value, dict):
                pairs = value.items()
            elif isinstance(value, list):
                pairs = ((f"group {number}", each) for number, each in enumerate(value))
            for name, number in pairs if key != "step" else ():
                if isinstance(number, (int, float)):
                    found.setdefault(panel, {}).setdefault(str(name), []).append((row["step"], number))
    return {panel: series for panel, series in found.items() if series}


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each value: the last one, and how it has moved."""
    last = rows[-1]["step"] if rows else 0
    names = (Column(name, no_wrap=True) for name in ("what", "", f"step {last}", "least", "most"))
    shown = Table(*names, f"last {TREND}", caption=None if rows else "no step yet")  # the last column alone shrinks
    for panel, series in panels(rows).items():
        for number, (label, points) in enumerate(series.items()):
            values = [value for _, value in points]
            finite = list(filter(math.isfinite, values)) or [math.nan]
            title = TITLES.get(panel, (panel, ""))[0] if number == 0 else ""
            numbers = (f"{value:.4g}" for value in (values[-1], min(finite), max(finite)))
            shown.add_row(title, "" if label == panel else label, *numbers, Trend(values[-TREND:]))
    return shown


class Trend(list[float]):
    """A bar for each of the last values for which there is room, from the least to the most; NOT_FINITE for others."""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        values = self[-options.max_width :]
        finite = list(filter(math.isfinite, values)) or [0.0]
        low, span = min(finite), max(finite) - min(finite) or 1.0
        bars = (BARS[round((v - low) / span * (len(BARS) - 1))] if math.isfinite(v) else NOT_FINITE for v in values)
        yield Text("".join(bars))


def write_page(rows: Sequence[Mapping[str, Any]], name: str, path: Path) -> None:
    """Write one HTML file with a picture of each panel, which needs nothing else. Raises ImportError without
    matplotlib."""
    drawn = [
        f"<section><h2>{html.escape(title)}</h2><p>{html.escape(below)}</p>{_draw(panel, series)}</section>"
        for panel, series in panels(rows).items()
        for title, below in [TITLES.get(panel, (panel, ""))]
    ]
    last = rows[-1]["step"] if rows else 0
    from lwopt_backend.checkpoint.files.folders import write_whole

    write_whole(path, PAGE.format(name=html.escape(name), last=last, panels="\n".join(drawn)).encode())


def _draw(panel: str, series: Mapping[str, Points]) -> str:
    """An SVG of a panel's values over the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    from lwopt_backend.pictures.look import look

    with look():
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")  # so small that its numbers are legible on a phone
        axes = figure.add_subplot()
        for label, points in series.items():
            steps, values = zip(*points)
            axes.plot(steps, values, "o" if len(points) < 9 else "-", label=label, linewidth=1.4, markersize=4)
        if panel in ("update_rms", "seconds") and all(value > 0 for points in series.values() for _, value in points):
            axes.set_yscale("log")
            for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatted(LogFormatter())  # by default powers are mathematics, which ``look`` does not parse
        axes.grid(axis="y")
        axes.set_xlabel("step")
        if list(series) != [panel]:
            figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=9)  # above, where no line is
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>
body {{ font-family: system-ui, sans-serif; color: #1f2328; margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem 2rem }}
h2 {{ font-size: 1rem; margin: 0 }} p {{ color: #5f6771; font-size: .9rem; margin: 0 0 .3rem }}
svg {{ width: 100%; height: auto }}
</style></head><body><h1>{name}</h1><p>{last} steps</p><main>
{panels}
</main></body></html>
"""


def write_events(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write all values by torch's own writer. Raises ImportError without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        told = f"--tensorboard needs the package tensorboard ({missing}); run: {install_command('tensorboard', '>=2')}"
        raise ImportError(told) from missing
    with SummaryWriter(str(folder)) as writer:
        for panel, series in panels(rows).items():
            for label, points in series.items():
                for step, value in points:
                    writer.add_scalar(f"{panel}/{label}", value, step)
