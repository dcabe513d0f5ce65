"""Compact plans: nothing is padded, and the work is as even as whole matrices allow."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from lwopt_backend.plan import Atom
from lwopt_backend.plan.buffers.compact import plan_compact
from lwopt_backend.plan.buffers.layout import BufferPlan, imbalance
from lwopt_backend.plan.buffers.megatron import ping_pong
from lwopt_backend.plan.buffers.stream import Stream
from lwopt_backend.plan.buffers.weights import balanced_measures
from lwopt_backend.plan.cost import COSTS
from tests.planner_shapes import EXCERPT, Figures, atoms_of, figures, model
from tests.test_padded import assert_lawful, estimate, loads
from tests.test_patterns import optimum


def longest_first(amounts: Sequence[int], ranks: int) -> int:
    """The busiest rank's amount, the largest first to the least loaded (Graham 1969)."""
    heap = [0] * ranks
    for amount in sorted(amounts, reverse=True):
        heapq.heapreplace(heap, heap[0] + amount)
    return max(heap)


def lowest_possible(amounts: Sequence[int], ranks: int) -> int:
    return max(max(amounts), -(-sum(amounts) // ranks))


def measured(plan: BufferPlan) -> list[tuple[int, list[int]]]:
    """The busiest shard's load and all amounts, by cost and by Megatron's estimate."""
    amounts = {"cost": [a.cost for a in plan.atoms], "estimate": [estimate(a) for a in plan.atoms]}
    return [(max(loads(plan, name)), values) for name, values in amounts.items()]


@pytest.mark.parametrize("figure", figures(EXCERPT), ids=str)
def test_ping_pong_is_as_uneven_as_megatron_found_it(figure: Figures) -> None:
    atoms = model(figure.model, figure.flavour)
    sums = [0] * figure.ranks
    for atom, owner in zip(atoms, ping_pong([atom.numel for atom in atoms], figure.ranks)):
        sums[owner] += estimate(atom)
    assert round(imbalance(sums), 4) == figure.ping_pong


def test_ping_pong_deals_forth_and_back_by_size() -> None:
    assert ping_pong([50, 10, 40, 20, 30, 60, 70], 3) == [1, 0, 2, 1, 2, 0, 0]  # 10 20 30 | 60 50 40 | 70


@pytest.mark.parametrize("figure", figures(EXCERPT), ids=str)
def test_work_is_as_even_as_by_longest_first_in_either_measure(figure: Figures) -> None:
    plan = plan_compact(model(figure.model, figure.flavour), figure.ranks, bucket_numel=figure.bucket_numel)
    assert_lawful(plan)
    for busiest, amounts in measured(plan):
        assert lowest_possible(amounts, figure.ranks) <= busiest <= 1.01 * longest_first(amounts, figure.ranks)
    assert round(imbalance(loads(plan, "estimate")), 4) <= figure.ping_pong
    assert plan.buffer_numel == sum(atom.numel for atom in plan.atoms) and plan.padding == 0


def test_both_measures_are_even_where_either_alone_would_leave_the_other_uneven() -> None:
    """An aspect of 5 counts 5 by l s^2 and 3.67 by flops, a square one 1: what is even by one is not by the other."""
    atoms = model("qwen3-32b", "mcore_fused")[:40]
    for ranks in (3, 5, 6, 7):
        for busiest, amounts in measured(plan_compact(atoms, ranks, bucket_numel=None)):
            assert busiest <= longest_first(amounts, ranks)


def squares(seed: int) -> tuple[list[Atom], int]:
    """Up to nine square matrices, by which both measures weigh alike, and a number of ranks."""
    generator = random.Random(seed)
    sides = [64 * generator.randint(1, 8) for _ in range(generator.randint(1, 9))]
    return atoms_of([(side, side) for side in sides]), generator.randint(1, 4)


def test_small_buffers_are_owned_as_evenly_as_possible() -> None:
    exact = 0
    for seed in range(200):
        atoms, ranks = squares(seed)
        plan = plan_compact(atoms, ranks, bucket_numel=None)
        assert_lawful(plan)
        best = optimum([atom.cost for atom in atoms], ranks)
        assert best <= max(loads(plan, "cost")) <= 1.1 * best
        exact += max(loads(plan, "cost")) == best
    assert exact >= 198, "all of them when this was written"


def test_small_buffers_of_any_shapes_are_near_the_optimum_of_both_measures() -> None:
    for seed in range(200):
        generator = random.Random(seed)
        shapes = [(generator.randint(1, 99), generator.randint(1, 99)) for _ in range(generator.randint(1, 9))]
        atoms, ranks = atoms_of(shapes), generator.randint(1, 4)
        plan = plan_compact(atoms, ranks, bucket_numel=None)
        assert_lawful(plan)
        for busiest, amounts in measured(plan):
            assert optimum(amounts, ranks) <= busiest <= 1.05 * optimum(amounts, ranks)


def test_of_equally_even_plans_the_one_with_the_least_state_on_a_rank_is_taken() -> None:
    """Costs and l s^2 are all equal, but two matrices have 100 elements and two have 1000."""
    atoms = [Atom(str(i), shape, 10) for i, shape in enumerate([(10, 10), (10, 10), (1, 1000), (1, 1000)])]
    assert max(plan_compact(atoms, 2, bucket_numel=None).owned_numels()) == 1100


def test_in_the_sum_of_both_measures_either_counts_half() -> None:
    stream = Stream(atoms_of([(64, 64), (64, 640), (128, 64)]))
    measures = balanced_measures(stream)
    cost, estimate = sum(stream.costs), sum(stream.estimates)
    assert list(measures) == ["cost", "estimate", "both"]
    for both, c, e in zip(measures["both"], stream.costs, stream.estimates):
        assert both / (2 * cost * estimate) == pytest.approx((c / cost + e / estimate) / 2)
    assert list(balanced_measures(Stream(atoms_of([(64, 64), (128, 128)])))) == ["cost"], "squares: both are alike"


def test_buckets_hold_at_least_their_size_and_close_as_soon_as_they_do() -> None:
    atoms = atoms_of([(64, 64)] * 10 + [(64, 640)] + [(64, 64)] * 3)
    plan = plan_compact(atoms, 4, bucket_numel=3 * 64 * 64)
    sizes = plan.bucket_numels
    assert sum(sizes) == plan.numel
    backward = list(reversed(list(zip(plan.buckets, atoms))))
    filled = dict.fromkeys(range(len(sizes)), 0)
    for bucket, atom in backward:
        assert filled[bucket] < 3 * 64 * 64, "closed as soon as it held enough"
        filled[bucket] += atom.numel
    assert all(numel >= 3 * 64 * 64 for numel in list(filled.values())[:-1])
    assert len(plan_compact(atoms, 4, bucket_numel=None).shard_numels) == 1


def test_matrices_that_cost_nothing_are_planned_too() -> None:
    """As by a user's cost model; ours cost at least their element-wise work."""
    shapes = [(16384, 16384), (53248, 16384), (53248, 16384), (16384, 53248)]
    assert all(cost.of(shape) > 0 for cost in COSTS.values() for shape in shapes)
    atoms = [Atom(str(i), shape, 0) for i, shape in enumerate(shapes)]
    assert_lawful(plan_compact(atoms, 2, bucket_numel=None))
