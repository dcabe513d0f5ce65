"""The planner for plain PyTorch compared with Megatron-Core's, on a cell of its figures: padding and balance.

``data/megatron_planner.csv`` holds what Megatron-Core's own code planned (August 2026): buckets, elements with padding,
cost imbalance (max over mean of l s^2 per rank), a longest-first deal of the whole model, and the lower bound of any.
Megatron's plan is made again here, has to have those figures, and is then also judged by Newton-Schulz's flops. Our
plans balance the measure by which both are judged: flops, as in training, or l s^2. Both plan over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.public_models import atoms
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.dealing import deal, ends_where_even
from lwopt_backend.plan.buffers.layout import BufferParam, aligned, aligned_shard, imbalance
from lwopt_backend.plan.buffers.plan import BufferPlan, plan_buffers
from lwopt_backend.plan.cost import Shape, max_min_squared, newton_schulz_flops, per_rank

MEASURES: dict[str, Callable[[Shape], int]] = {"flops": newton_schulz_flops, "l s^2": max_min_squared}


@dataclass(frozen=True)
class Cell:
    """Megatron's figures and this package's by one measure of work, rounded as in the file."""

    name: tuple[str, str, int, str]  # model, flavour, ranks, bucket size
    theirs: tuple[int, float, float]  # buckets, padding in %, imbalance
    ours: tuple[int, float, float]
    compact: float
    nearest: float  # the larger of the bound and a longest-first deal of all matrices

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
) -> tuple[BufferPlan, float]:
    """The plan whose owners have even work by ``measure``, and the seconds of CPU that planning took."""
    cost = MEASURES[measure]
    params = [BufferParam(a.name, a.numel, "bfloat16", Atom(a.name, a.shape, cost(a.shape))) for a in matrices]
    start = time.process_time()
    plan = plan_buffers(params, ranks, layout, bucket or sum(atom.numel for atom in matrices))
    return plan, time.process_time() - start


def figures(plan: BufferPlan) -> tuple[int, float, float]:
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
        plan, _ = planned(matrices, ranks, "padded", bucket, measure)
        compact, _ = planned(matrices, ranks, "compact", bucket, measure)
        theirs = (buckets, round(padding, 2), round(imbalance(per_rank(owners, costs, ranks)), 4))
        nearest = max(imbalance(longest_first), max(costs) * ranks / sum(costs))
        name = (row["model"], row["flavour"], ranks, row["bucket_size"])
        cells[measure] = Cell(name, theirs, figures(plan), imbalance(compact.loads), nearest)
    columns = ("megatron_buckets", "megatron_padding_pct", "megatron_cost_imbalance", "global_lpt_cost_imbalance")
    known, found = [float(row[column]) for column in columns], cells["l s^2"]
    if any(abs(a - b) > 1e-9 for a, b in zip(known, found.theirs)) or found.nearest < known[3] - 1e-4:
        raise ValueError(f"{found.name}: expected {known} of Megatron-Core, found {found.theirs}, {found.nearest}")
    return cells
