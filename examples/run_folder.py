"""A run's folder: settings.json, metrics.jsonl, loss.png and the checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class RunFolder:
    """Written by one rank only; on the others every method that writes does nothing."""

    def __init__(self, path: Path, is_writer: bool) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self._metrics = path / "metrics.jsonl"
        self._settings = path / "settings.json"
        self._is_writer = is_writer

    def begin(self, settings: dict[str, Any]) -> None:
        """Begin a new run: an earlier run's metrics go, and its checkpoint can no longer be resumed by mistake.

        ``settings`` are what a run that resumes this one must share.
        """
        if self._is_writer:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.checkpoint / "latest").unlink(missing_ok=True)
            self._metrics.unlink(missing_ok=True)
            write_whole(self._settings, json.dumps(settings).encode())

    def settings(self) -> dict[str, Any] | None:
        """Those of the run that is there; None if there is none. On every rank."""
        return json.loads(self._settings.read_text()) if self._settings.exists() else None

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl."""
        if self._is_writer:
            with self._metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def keep_until(self, step: int) -> None:
        """Resume: drop the rows after the checkpoint's step, and the validation of a run that was to end there."""
        if self._is_writer:
            rows = [r for r in read_metrics(self._metrics) if r["step"] <= step and ("loss" in r or r["step"] == 0)]
            write_whole(self._metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def finish(self) -> None:
        """Draw loss.png and say what came out."""
        if not self._is_writer:
            return
        rows = read_metrics(self._metrics)
        write_picture(self.path / "loss.png", [(self.path.name, rows)])
        validation = [row for row in rows if "validation_loss" in row]
        before, after, saved = validation[0], validation[-1], self.checkpoint / (self.checkpoint / "latest").read_text()
        print(
            f"validation loss {before['validation_loss']:.4f} before, {after['validation_loss']:.4f} after "
            f"{after['step']} steps; metrics, loss.png and checkpoint are in {self.path}\n"
            f"look at it:      lwopt inspect {saved}\n"
            f"go on with it:   lwopt convert {saved} NEW_FOLDER --to safetensors"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that nobody sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


GREY = "#7b838d"  # can be read on a white page and on a dark one
INK = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
ON_ANY_PAGE = {**dict.fromkeys(INK, GREY), "savefig.transparent": True, "legend.framealpha": 0.0}  # for matplotlib


def write_picture(path: Path, runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    """Training loss (thin: every step; thick: its running mean) and validation loss (dots) of one or more runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(ON_ANY_PAGE):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        for number, (label, rows) in enumerate(runs):
            color = f"C{number}"
            train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
            if train:
                steps, losses = zip(*train)
                axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
                axes.plot(steps, running_mean(losses), color=color, linewidth=2, label=label)
            validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
            if validation:
                axes.plot(*zip(*validation), "o", color=color, label=f"{label}: validation {validation[-1][1]:.3f}")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level GPT")
        axes.grid(alpha=0.3)
        axes.legend()
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format="png", dpi=120)
        pyplot.close(figure)
    os.replace(temporary, path)


def running_mean(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Exponential mean, without the start-up bias."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed
