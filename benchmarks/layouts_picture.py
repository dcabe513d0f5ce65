"""The picture of docs/owned.md: one bucket in both layouts, and when which of them is faster.

    python benchmarks/layouts_picture.py layouts.png

Everything in it is planned, nothing measured: GPT-2's last layers on four ranks, and steps of two models on clusters of
H100s by the planner's model of time, in which an uneven collective takes one more latency than a fixed-size one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from public_models import load

from lwopt_backend.checkpoint.files.folders import write_whole
from lwopt_backend.pictures.look import (
    GRADIENTS,
    INK,
    MASTERS,
    MUTED,
    PADDING,
    PARAMETERS,
    STATE,
    WORK,
    look,
    panel,
    png,
)
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import Bucket, OwnedParam, Setting
from lwopt_backend.plan.buffers.owned import LAYOUTS, OwnedPlan, plan_owned
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import CLUSTERS, COSTS, newton_schulz_flops

RANK_COLORS = (PARAMETERS, GRADIENTS, WORK, STATE)
COLORS = {"padded": GRADIENTS, "compact": PARAMETERS, "auto": MASTERS}
WORLD_SIZES = (8, 16, 32, 64, 128, 256)
BUCKET_NUMEL = 40_000_000  # Megatron-Core's least
ELEMENTS = Elements(parameter=2, gradient=2, master=4, state=4)
WIDTH, HEIGHT = 12.4, 5.6  # inches


def params_of(matrices: Sequence[tuple[str, tuple[int, int]]]) -> list[OwnedParam]:
    return [
        OwnedParam(name, rows * columns, "bfloat16", Atom(name, (rows, columns), newton_schulz_flops((rows, columns))))
        for name, (rows, columns) in matrices
    ]


def plan(matrices: Sequence[tuple[str, tuple[int, int]]], ranks: int, layout: str, bucket_numel: int) -> OwnedPlan:
    machine = CLUSTERS["h100-8x-ib"]
    setting = Setting(layout, bucket_numel, machine, COSTS["newton_schulz"], ELEMENTS)
    return plan_owned(params_of(matrices), ranks, setting, ranks)


def draw_bucket(axes: Axes, bucket: Bucket, names: Sequence[str], widest: int, title: str) -> None:
    """A buffer as a bar: a colour per owner, grey where nothing is."""
    axes.add_patch(Rectangle((0, 0), bucket.numel, 1, facecolor=PADDING, hatch="///", edgecolor="white", linewidth=0))
    for rank in range(len(bucket.parts)):
        for piece in bucket.pieces(rank):
            box = (piece.offset, 0), piece.numel, 1
            axes.add_patch(Rectangle(*box, facecolor=RANK_COLORS[rank], edgecolor="white", linewidth=1.5))
            short = names[piece.param].replace("h.", "").replace("attn.c_", "").replace("mlp.c_", "mlp ")
            if piece.numel > 0.03 * widest:
                middle = piece.offset + piece.numel / 2
                axes.text(middle, 0.5, short, ha="center", va="center", fontsize=7.5, color="white", rotation=90)
    for rank, (start, stop) in enumerate(bucket.parts):
        axes.plot([start, start], [-0.12, 1.12], color=INK, linewidth=1)
        axes.text((start + stop) / 2, -0.3, f"rank {rank}", ha="center", fontsize=8.5, color=MUTED)
    axes.plot([bucket.numel] * 2, [-0.12, 1.12], color=INK, linewidth=1)
    axes.set_xlim(-0.01 * widest, 1.01 * widest)
    axes.set_ylim(-0.45, 1.3)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=10)


def draw_when(axes: Axes, model: str) -> None:
    """Modelled seconds of a step over the number of ranks, with the padding of the padded layout."""
    matrices = load(model)
    for layout in LAYOUTS:
        plans = [plan(matrices, ranks, layout, BUCKET_NUMEL) for ranks in WORLD_SIZES]
        seconds = [1e3 * planned.modelled.total for planned in plans]
        width = 5.0 if layout == "auto" else 1.6
        axes.plot(WORLD_SIZES, seconds, "o-", label=layout, color=COLORS[layout], linewidth=width, markersize=width + 1)
        for ranks, planned, height in zip(WORLD_SIZES, plans, seconds):
            padding = planned.padding / sum(bucket.numel - bucket.padding for bucket in planned.buckets)
            if layout == "padded" and padding >= 0.005:
                place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 7.5}
                axes.annotate(f"+{padding:.0%}", (ranks, height), color=MUTED, **place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(WORLD_SIZES, [str(ranks) for ranks in WORLD_SIZES])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ms"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("data-parallel ranks")
    axes.grid(axis="y")
    axes.set_title(f"{model}, modelled step", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5)


def draw() -> Figure:
    gpt2 = load("gpt2-124m")
    last = gpt2[-8:]
    padded, compact = (plan(last, 4, layout, 10**9).buckets[0] for layout in ("padded", "compact"))
    names = [name for name, _ in last]
    with look():
        figure = Figure(figsize=(WIDTH, HEIGHT))
        figure.text(
            0.4 / WIDTH, 1 - 0.38 / HEIGHT, "A bucket in both layouts, and which is faster", fontsize=15, weight="bold"
        )
        share = f"{padded.padding / (padded.numel - padded.padding):.0%}"
        titles = f"padded: equal parts, {share} padding (grey)", "compact: parts as long as what they hold"
        for top, bucket, title in zip((1.0, 3.35), (padded, compact), titles):
            draw_bucket(panel(figure, 0.4, top, 5.0, 1.75), bucket, names, padded.numel, title)
        for left, model in ((6.2, "gpt2-124m"), (9.6, "llama3.1-8b")):
            draw_when(panel(figure, left, 1.05, 2.6, 3.7), model)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    write_whole(parser.parse_args().path, png(draw()))


if __name__ == "__main__":
    main()
