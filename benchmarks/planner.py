"""The planner for owned storage compared with Megatron-Core's, on every cell of its figures: padding and balance.

    python -m benchmarks.planner                       all 216 cells by both measures of work, some minutes
    python -m benchmarks.planner --models gpt2-124m    some models
    python -m benchmarks.planner --time                only what planning takes, for every public model on 1,024 ranks
    python -m benchmarks.planner --exchange            when the last rank is done, where matrices travel to their owners

``megatron_planner.csv`` holds what Megatron-Core's own code planned (August 2026): buckets, elements with padding, cost
imbalance (max over mean of l s^2 per rank), a longest-first deal of the whole model, and the lower bound of any.
Megatron's plan is made again here, has to have those figures, and is then also judged by Newton-Schulz's flops. Our
plans balance the measure by which both are judged: flops, as in training, or l s^2. Both plan over all ranks.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.public_models import FLAVOURS, MODELS, atoms, study
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.dealing import deal, ends_where_even
from lwopt_backend.plan.buffers.layout import LAYOUTS, OwnedParam, aligned, aligned_shard, imbalance
from lwopt_backend.plan.buffers.owned import OwnedPlan, plan_owned
from lwopt_backend.plan.cost import Shape, max_min_squared, newton_schulz_flops, per_rank

FIGURES = Path(__file__).with_name("megatron_planner.csv")
MOST_RANKS, LEAST_BUCKET = 1024, 40_000_000
ALLOWED = (3.0, 0.03)  # points of padding, and of balance, that a cell may be worse
LATEST = 1.15  # times the busiest rank's work, if matrices were dealt longest first, or the wire's seconds
NEAR = 1.05  # times the larger of the bound and longest-first, which no compact plan may exceed


MEASURES: dict[str, Callable[[Shape], int]] = {"flops": newton_schulz_flops, "l s^2": max_min_squared}


@dataclass(frozen=True)
class Cell:
    """Megatron's figures and this package's by one measure of work, rounded as in the file."""

    name: tuple[str, str, int, str]  # model, flavour, ranks, bucket size
    theirs: tuple[int, float, float]  # buckets, padding in %, imbalance
    ours: tuple[int, float, float]
    compact: float
    nearest: float  # the larger of the bound and a longest-first deal of all matrices
    seconds: float  # of CPU, of the padded plan

    @property
    def worse(self) -> tuple[float, float]:
        """The points of padding, and the balance, by which this package is worse; 0 where it is not."""
        return max(0.0, self.ours[1] - self.theirs[1]), max(0.0, self.ours[2] - self.theirs[2])

    @property
    def better(self) -> bool:
        return not any(self.worse) and self.ours[1:] != self.theirs[1:]

    @property
    def excess(self) -> float:
        return self.compact / self.nearest


def megatron(matrices: Sequence[Atom], ranks: int, bucket: int | None) -> tuple[int, float, list[int]]:
    """Buckets, padding in %, and owners of ``matrices`` by Megatron-Core's rules: the costliest by l s^2 first, to the
    rank with the least work that has less than 1.3 times the mean part."""
    numels = [aligned(matrix.numel) for matrix in reversed(matrices)]
    costs = [max_min_squared(matrix.shape) for matrix in reversed(matrices)]
    ends = ends_where_even(numels, ranks, bucket or sum(numels))
    owners, loads, numel = [], [0] * ranks, 0
    for start, end in zip([0, *ends], ends):
        some = numels[start:end]
        owners += deal(some, costs[start:end], loads, int(sum(some) / ranks * 1.3))
        numel += ranks * aligned_shard(max(per_rank(owners[start:], some, ranks)), ranks)
    return len(ends), 100 * (numel / sum(matrix.numel for matrix in matrices) - 1), owners[::-1]


def planned(
    matrices: Sequence[Atom], ranks: int, layout: str, bucket: int | None, measure: str = "flops"
) -> tuple[OwnedPlan, float]:
    """The plan whose owners have even work by ``measure``, and the seconds of CPU that planning took."""
    cost = MEASURES[measure]
    params = [OwnedParam(a.name, a.numel, "bfloat16", Atom(a.name, a.shape, cost(a.shape))) for a in matrices]
    start = time.process_time()
    plan = plan_owned(params, ranks, layout, bucket or sum(atom.numel for atom in matrices))
    return plan, time.process_time() - start


def figures(plan: OwnedPlan) -> tuple[int, float, float]:
    """Buckets, padding in %, and imbalance."""
    numel = sum(bucket.numel for bucket in plan.buckets)
    padding = 100 * plan.padding / (numel - plan.padding)
    return len(plan.buckets), round(padding, 2), round(imbalance(plan.loads), 4)


def plan_cell(row: dict[str, str]) -> dict[str, Cell]:
    """A cell by every measure. Raises ValueError if Megatron's plan as made here is not the one in ``row``."""
    matrices, ranks = atoms(row["model"], row["flavour"]), int(row["world_size"])
    bucket = None if row["bucket_size"] == "None" else int(row["bucket_size"])
    buckets, padding, owners = megatron(matrices, ranks, bucket)
    cells = {}
    for measure, cost in MEASURES.items():
        costs = [cost(matrix.shape) for matrix in matrices]
        longest_first = [0] * ranks
        deal([1] * len(costs), costs, longest_first, len(costs))
        plan, seconds = planned(matrices, ranks, "padded", bucket, measure)
        compact, _ = planned(matrices, ranks, "compact", bucket, measure)
        theirs = (buckets, round(padding, 2), round(imbalance(per_rank(owners, costs, ranks)), 4))
        nearest = max(imbalance(longest_first), max(costs) * ranks / sum(costs))
        name = (row["model"], row["flavour"], ranks, row["bucket_size"])
        cells[measure] = Cell(name, theirs, figures(plan), imbalance(compact.loads), nearest, seconds)
    columns = ("megatron_buckets", "megatron_padding_pct", "megatron_cost_imbalance", "global_lpt_cost_imbalance")
    known, found = [float(row[column]) for column in columns], cells["l s^2"]
    if any(abs(a - b) > 1e-9 for a, b in zip(known, found.theirs)) or found.nearest < known[3] - 1e-4:
        raise ValueError(f"{found.name}: expected {known} of Megatron-Core, found {found.theirs}, {found.nearest}")
    return cells


def time_model(cell: tuple[str, str, str]) -> tuple[int, float]:
    """The number of a model's matrices, and the seconds of CPU that planning them takes."""
    model, flavour, layout = cell
    matrices = atoms(model, flavour)
    return len(matrices), planned(matrices, MOST_RANKS, layout, LEAST_BUCKET)[1]


def time_models(pool: ProcessPoolExecutor, models: Sequence[str], console: Console) -> None:
    """Print the time of planning for every public model, also for those without Megatron's figures."""
    cells = [(model, flavour, layout) for model in models for flavour in FLAVOURS for layout in LAYOUTS]
    table = Table(title=f"Plans for {MOST_RANKS} ranks, buckets from {LEAST_BUCKET // 10**6} M elements")
    for heading in ("model", "flavour", "layout", "matrices", "seconds of CPU"):
        table.add_column(heading)
    slowest = (0.0, "")
    for cell, (matrices, seconds) in zip(cells, pool.map(time_model, cells)):
        table.add_row(*cell, f"{matrices:,}", f"{seconds:.2f}")
        slowest = max(slowest, (seconds, " ".join(cell)))
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
    path = stage.setting.seconds(part.path)
    wire, _ = stage.setting.machine.collective(part.collectives[0].nbytes, ranks, direct=True)
    late = path / max(path / part.path_over_longest_first, wire)
    figures = (f"{late:.3f}", f"{part.flops_imbalance:.3f}", f"{len(part.bucket_numels):,}")
    memory = max(each.exchange for each in stage.memory())
    return name, engine, str(ranks), f"{len(part.atoms):,}", *figures, f"{memory / 1e9:.2f}", f"{seconds:.1f}"


def exchanges(pool: ProcessPoolExecutor, console: Console) -> None:
    """Print what each engine plans by default, and fail where a rank is late."""
    cells = [(*model, engine, ranks) for model in EXCHANGED for engine in ENGINES for ranks in RANKS]
    table = Table(title="When the last rank is done, over the larger of a longest-first deal's busiest and the wire")
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


def summary(cells: Sequence[Cell], measure: str) -> Table:
    table = Table(title=f"Cells, by model; work is {measure}")
    headings = ("better", "equal", "worse", "most padding worse, points", "most balance worse", "compact, most excess")
    table.add_column("model")
    for heading in headings:
        table.add_column(heading, justify="right")
    for model in [*dict.fromkeys(cell.name[0] for cell in cells), "all"]:
        some = [cell for cell in cells if model in (cell.name[0], "all")]
        worse = sum(any(cell.worse) for cell in some)
        better = sum(cell.better for cell in some)
        padding, balance = (max(cell.worse[i] for cell in some) for i in (0, 1))
        excess = max(cell.excess for cell in some)
        counts = (better, len(some) - better - worse, worse, f"{padding:.2f}", f"{balance:.4f}", f"{excess:.3f}")
        table.add_row(model, *map(str, counts))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), help="default: all that the figures have")
    parser.add_argument("--time", action="store_true", help="only time the planning of models on 1,024 ranks")
    parser.add_argument("--exchange", action="store_true", help="only when the last rank is done, by model and engine")
    options = parser.parse_args()
    console = Console(width=150 if not Console().is_terminal else None, highlight=False)
    with ProcessPoolExecutor() as pool:
        if options.exchange:
            exchanges(pool, console)
            return
        if options.time:
            time_models(pool, options.models or list(MODELS), console)
            return
        rows = [row for row in csv.DictReader(FIGURES.open()) if not options.models or row["model"] in options.models]
        if not rows:
            parser.error(f"the figures have no cell of {', '.join(options.models)}")
        found = list(track(pool.map(plan_cell, rows), "planning", len(rows), console=Console(stderr=True)))
    enough = [report([cells[measure] for cells in found], measure, console) for measure in MEASURES]
    if not all(enough):
        raise SystemExit("not good enough compared with Megatron-Core")


def report(cells: Sequence[Cell], measure: str, console: Console) -> bool:
    """Print the cells that are worse, and a summary. Returns whether they are good enough."""
    for cell in [cell for cell in cells if any(cell.worse)]:
        console.print(f"{' '.join(map(str, cell.name))}: Megatron {cell.theirs}, this package {cell.ours}")
    console.print(summary(cells, measure))
    console.print(f"slowest padded plan: {max(cell.seconds for cell in cells):.1f} s of CPU")
    worse = [cell.worse for cell in cells if any(cell.worse)]
    beyond = any(padding > ALLOWED[0] or balance > ALLOWED[1] for padding, balance in worse)
    return not beyond and 10 * len(worse) <= len(cells) and all(cell.excess <= NEAR for cell in cells)


if __name__ == "__main__":
    main()
