"""Our planner beside Megatron-Core's, on every cell of its figures: padding, balance, buckets.

    python benchmarks/planner.py                       all 216 cells, about three minutes on two cores
    python benchmarks/planner.py --models gpt2-124m    some models
    python benchmarks/planner.py --time                only what planning takes, for every public model on 1,024 ranks
    python benchmarks/planner.py --exchange            when the last rank is done, where matrices travel to their owners
    python benchmarks/planner.py --png docs/planner.png

``megatron_planner.csv`` holds what Megatron-Core's own code planned (August 2026): buckets, elements with padding, cost
imbalance (max over mean of l s^2 per rank), its compact layout's ping-pong owners, a longest-first assignment over the
whole model, and the lower bound of any. Both layouts are planned over all ranks, as Megatron does: no groups.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from plans import estimated_loads, problems
from public_models import FLAVOURS, MODELS, atoms, study
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.instances import plan_buffer
from lwopt_backend.plan.buffers.layout import BufferPlan, imbalance
from lwopt_backend.plan.buffers.packing import plan_compact
from lwopt_backend.plan.cost import CLUSTERS, COSTS

FIGURES = Path(__file__).with_name("megatron_planner.csv")
MOST_RANKS, LEAST_BUCKET = 1024, 40_000_000
LATEST = 1.15  # times the busiest rank's work, if matrices were dealt longest first
LOSS, TIE, ONE, BOTH = "loss", "tie", "better on one", "better on both"


@dataclass(frozen=True)
class Cell:
    """Megatron's figures and ours. Percentages and imbalances are rounded as in the file."""

    model: str
    flavour: str
    ranks: int
    bucket: str
    theirs: tuple[int, float, float]  # buckets, padding %, imbalance
    ours: tuple[int, float, float]
    ping_pong: float
    longest_first: float
    bound: float
    compact: float
    seconds: float

    @property
    def verdict(self) -> str:
        """A loss is more padding or less balance, or fewer buckets."""
        (buckets, padding, uneven), (our_buckets, our_padding, our_uneven) = self.theirs, self.ours
        if our_padding > padding or our_uneven > uneven or our_buckets < buckets:
            return LOSS
        return (TIE, ONE, BOTH)[(our_padding < padding) + (our_uneven < uneven)]

    @property
    def compact_verdict(self) -> str:
        """Within 1 % of the bound or of longest-first, or a loss; better than ping-pong or not."""
        if self.compact > 1.01 * max(self.bound, min(self.longest_first, self.compact)) + 5e-5:
            return LOSS
        return BOTH if self.compact < self.ping_pong else TIE


def planned(matrices: Sequence[Atom], ranks: int, bucket: int | None) -> tuple[BufferPlan, float]:
    """The padded plan, and the seconds of CPU that it took."""
    start = time.process_time()
    grouped = plan_buffer(
        matrices,
        ranks,
        layout="padded",
        bucket_numel=bucket,
        machine=CLUSTERS["h100-8x-ib"],
        cost=COSTS["newton_schulz"],
        group_size=ranks,
    )
    return grouped.plan, time.process_time() - start


def time_cell(cell: tuple[str, str, int, int]) -> float:
    model, flavour, ranks, bucket = cell
    return planned(atoms(model, flavour), ranks, bucket)[1]


def time_models(pool: ProcessPoolExecutor, models: Sequence[str], console: Console) -> None:
    """Print what planning takes for every public model, those without Megatron's figures, too."""
    cells = [(model, flavour, MOST_RANKS, LEAST_BUCKET) for model in models for flavour in FLAVOURS]
    table = Table(title=f"Padded plans for {MOST_RANKS} ranks, buckets from {LEAST_BUCKET // 10**6} M elements")
    for heading in ("model", "flavour", "matrices", "seconds of CPU"):
        table.add_column(heading, justify="left" if heading in ("model", "flavour") else "right")
    slowest = (0.0, "")
    for (model, flavour, *_), seconds in zip(cells, pool.map(time_cell, cells)):
        table.add_row(model, flavour, f"{len(atoms(model, flavour)):,}", f"{seconds:.1f}")
        slowest = max(slowest, (seconds, f"{model} {flavour}"))
    console.print(table)
    console.print(f"slowest: {slowest[0]:.1f} s of CPU ({slowest[1]})")


EXCHANGED = (("llama-7b", False), ("llama3.1-70b", False), ("qwen3-30b-a3b", False), ("qwen3-30b-a3b", True))
EXCHANGED += (("deepseek-v3", False),)
ENGINES, RANKS = ("zero1", "zero2", "zero3", "fsdp2"), (8, 64, 512)


def exchange_cell(cell: tuple[str, bool, str, int]) -> tuple[str, ...]:
    model, stack, engine, ranks = cell
    start = time.process_time()
    stage = study(model, engine, ranks, stack=stack).worst
    seconds = time.process_time() - start
    (part,) = stage.parts
    name = f"{model}, stacked" if stack else model
    figures = (f"{part.path_over_longest_first:.3f}", f"{part.flops_imbalance:.3f}", f"{len(part.bucket_numels):,}")
    memory = max(each.exchange for each in stage.memory())
    return name, engine, str(ranks), f"{len(part.atoms):,}", *figures, f"{memory / 1e9:.2f}", f"{seconds:.1f}"


def exchanges(pool: ProcessPoolExecutor, console: Console) -> None:
    """Print what each engine plans by default, and fail where a rank is late."""
    cells = [(*model, engine, ranks) for model in EXCHANGED for engine in ENGINES for ranks in RANKS]
    table = Table(title="The time until the last rank is done, over the busiest rank's of one longest-first deal")
    headings = ("model", "engine", "ranks", "matrices", "path", "busiest / mean", "buckets", "exchange GB", "CPU s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("model", "engine") else "right")
    rows = list(pool.map(exchange_cell, cells))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    slowest = max(float(row[4]) for row in rows)
    console.print(f"the largest: {slowest:.3f}")
    if slowest > LATEST:
        raise SystemExit(f"a rank is done after more than {LATEST}")


def plan_cell(row: dict[str, str]) -> Cell:
    matrices = atoms(row["model"], row["flavour"])
    ranks = int(row["world_size"])
    bucket = None if row["bucket_size"] == "None" else int(row["bucket_size"])
    padded, seconds = planned(matrices, ranks, bucket)
    compact = plan_compact(matrices, ranks, bucket_numel=bucket)
    assert not problems(padded) and not problems(compact)
    return Cell(
        row["model"],
        row["flavour"],
        ranks,
        row["bucket_size"],
        (
            int(row["megatron_buckets"]),
            float(row["megatron_padding_pct"]),
            float(row["megatron_cost_imbalance"]),
        ),
        (len(padded.shard_numels), round(100 * padded.padding, 2), round(imbalance(estimated_loads(padded)), 4)),
        float(row["compact_pingpong_cost_imbalance"]),
        float(row["global_lpt_cost_imbalance"]),
        float(row["cost_lower_bound"]),
        round(imbalance(estimated_loads(compact)), 4),
        seconds,
    )


def summary(cells: Sequence[Cell]) -> Table:
    table = Table(title="Cells, by model")
    table.add_column("model")
    for heading in (BOTH, ONE, TIE, LOSS, "compact: better than ping-pong", "equal", "loss"):
        table.add_column(heading, justify="right")
    for model in dict.fromkeys(cell.model for cell in cells):
        some = [cell for cell in cells if cell.model == model]
        padded, compact = Counter(c.verdict for c in some), Counter(c.compact_verdict for c in some)
        counts = [padded[v] for v in (BOTH, ONE, TIE, LOSS)] + [compact[v] for v in (BOTH, TIE, LOSS)]
        table.add_row(model, *map(str, counts))
    padded, compact = Counter(c.verdict for c in cells), Counter(c.compact_verdict for c in cells)
    table.add_section()
    counts = [padded[v] for v in (BOTH, ONE, TIE, LOSS)] + [compact[v] for v in (BOTH, TIE, LOSS)]
    table.add_row("all", *map(str, counts))
    return table


HEADINGS = ("model", "flavour", "ranks", "bucket", "Megatron", "ours", "verdict", "ping-pong", "ours, compact", "bound")


def cells_of(cell: Cell) -> tuple[str, ...]:
    def spell(figures: tuple[int, float, float]) -> str:
        return f"{figures[0]} / {figures[1]:.2f} % / {figures[2]:.4f}"

    size = "one" if cell.bucket == "None" else f"{int(cell.bucket) // 10**6} M"
    compared = (spell(cell.theirs), spell(cell.ours), cell.verdict)
    compact = (f"{cell.ping_pong:.4f}", f"{cell.compact:.4f}", f"{cell.bound:.4f}")
    return (cell.model, cell.flavour, str(cell.ranks), size, *compared, *compact)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Megatron's figures against ours; a point below the diagonal is a win."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = (("padding, %", 1, "symlog"), ("busiest rank over mean, minus 1, %", 2, "symlog"))
    for axes, (name, index, scale) in zip(figure.subplots(1, 2), panels):
        for model in dict.fromkeys(cell.model for cell in cells):
            some = [cell for cell in cells if cell.model == model]
            points = [(c.theirs[index], c.ours[index]) for c in some]
            if index == 2:
                points = [(100 * (x - 1), 100 * (y - 1)) for x, y in points]
            axes.plot(*zip(*points), "o", markersize=5, alpha=0.55, markeredgewidth=0, label=model)
        top = max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([0, top], [0, top], color="0.6", linewidth=0.8, zorder=0)
        axes.set(title=name, xlabel="Megatron-Core", ylabel="lwopt", xscale=scale, yscale=scale)
        axes.set(xlim=(-0.5, top), ylim=(-0.5, top))
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_axes()[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        "Padding and balance on public models, 8 to 1024 ranks: below the line is better than Megatron-Core"
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), help="default: all that the figures have")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--all-cells", action="store_true", help="print every cell")
    parser.add_argument("--png", type=Path, help="draw every cell")
    parser.add_argument("--time", action="store_true", help="only time the planning of models on 1,024 ranks")
    parser.add_argument("--exchange", action="store_true", help="only when the last rank is done, by model and engine")
    options = parser.parse_args()
    console = Console(width=150 if not Console().is_terminal else None, highlight=False)
    if options.exchange:
        with ProcessPoolExecutor(options.processes) as pool:
            exchanges(pool, console)
        return
    if options.time:
        with ProcessPoolExecutor(options.processes) as pool:
            time_models(pool, options.models or list(MODELS), console)
        return
    rows = [row for row in csv.DictReader(FIGURES.open()) if not options.models or row["model"] in options.models]
    if not rows:
        parser.error(f"the figures have no cell of {', '.join(options.models)}")
    with ProcessPoolExecutor(options.processes) as pool:
        cells = list(track(pool.map(plan_cell, rows), "planning", len(rows), console=Console(stderr=True)))
    if options.all_cells:
        table = Table(*HEADINGS)
        for cell in cells:
            table.add_row(*cells_of(cell))
        console.print(table)
    console.print(summary(cells))
    slowest = max(cells, key=lambda cell: cell.seconds)
    size = f"buckets of {int(slowest.bucket) // 10**6} M" if slowest.bucket != "None" else "one bucket"
    where = f"{slowest.model} {slowest.flavour}, {slowest.ranks} ranks, {size}"
    console.print(f"slowest padded plan: {slowest.seconds:.1f} s of CPU ({where})")
    if options.png:
        draw(cells, options.png)
    if any(LOSS in (cell.verdict, cell.compact_verdict) for cell in cells):
        raise SystemExit("there is a losing cell")


if __name__ == "__main__":
    main()
