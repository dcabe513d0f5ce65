"""Experts that only some ranks share, beside dense parameters that all do: four ranks, two sets of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.cells import cells
from tests.owned import difference, exact_sums
from tests.owned_scenarios import optimizer_for, rows, train_ours, truth
from tests.ranks import RankPool, kept_in_a_world

EXPERTS = 4  # ranks 0 and 2 have the first two, ranks 1 and 3 the others


def held_by(rank: int) -> range:
    return range(rank % 2 * 2, rank % 2 * 2 + 2)


class MoE(nn.Module):
    """Dense layers on this rank's rows, and experts, those of this rank, on those of its partner, too."""

    def __init__(self, held: range = range(EXPERTS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 48)
        self.experts = nn.ModuleDict()
        for number in range(EXPERTS):
            expert = nn.Sequential(nn.Linear(6, 63), nn.GELU(), nn.Linear(63, 24))
            if number in held:
                self.experts[str(number)] = expert
        matrices = ["first.weight", *(f"experts.{number}.{layer}.weight" for number in held for layer in (0, 2))]
        self.MATRICES = tuple(matrices)

    def forward(self, x: Tensor, of_partners: Tensor, held: range) -> Tensor:
        dense = self.last(self.first(x).tanh()).square().mean()
        return dense + sum(self.experts[str(n)](of_partners[n::EXPERTS]).square().mean() for n in held)


def one_pass(model, no_sync, step, rank):
    pair = rank // 2 * 2
    model(rows(step, rank), torch.cat([rows(step, pair), rows(step, pair + 1)]), held_by(rank)).backward()


@kept_in_a_world
def sharers_of_experts() -> Any:
    """The group of the ranks that have the same experts as this one."""
    return [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]


def sharded() -> tuple[MoE, Any]:
    """This rank's part of the model, and the ranks that share its experts."""
    return MoE(held_by(dist.get_rank())), sharers_of_experts()


def expert_optimizer(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    options = {"expert_params": ["experts.*"], "expert_process_group": sharers_of_experts(), **options}
    return optimizer_for(model, bucket_mb=0.004, exclude=("last.weight",), **options)


def compare(**options: Any) -> tuple[float, float]:
    """How far weights are from one process's that has all experts after three steps, and the norm of the next."""
    model = exact_sums(sharded()[0])
    optimizer = expert_optimizer(model, **options)
    train_ours(model, optimizer, 3, one_pass)
    off = difference(model, truth(3, MoE, one_pass))
    one_pass(model, None, 3, dist.get_rank())
    norms: list[float] = []
    truth(
        4,
        MoE,
        one_pass,
        lambda single: norms.append(float(nn.utils.get_total_norm([p.grad for p in single.parameters()]))),
    )
    return off, abs(float(optimizer.grad_norm()) / norms[-1] - 1)


OPTIONS: list[dict[str, Any]] = [{}, {"group_size": 2}, {"expert_group_size": 1}, {"overlap_param_gather": True}]


@cells(ranks=[4], layout=["padded", "compact", "auto"], options=OPTIONS)
def test_dense_and_expert_parameters_equal_one_process_and_all_count_in_the_norm(
    ranks: RankPool, layout: str, options: dict[str, Any]
) -> None:
    for weights, norm in ranks.run(compare, layout=layout, **options):
        assert weights == 0.0 and norm <= 1e-6


def loads_of_ranks() -> list[int]:
    """This rank's dense and its experts' work."""
    core = expert_optimizer(sharded()[0], group_size=4).core
    return [held.plan.loads[held.sharers.instance.rank] for held in core.holdings]


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_dense_matrices_go_where_experts_leave_room(ranks: RankPool) -> None:
    loads = ranks.run(loads_of_ranks)
    with_dense = [experts for dense, experts in loads if dense]
    assert min(experts for _, experts in loads) == max(with_dense)


def wrong(**options: Any) -> None:
    expert_optimizer(sharded()[0], **options)


def not_told_of_experts(**options: Any) -> None:
    """Ranks have parameters of other names, so they cannot share all of them."""
    optimizer_for(sharded()[0], **options)


def not_a_member() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    not_told_of_experts(process_group=groups[dist.get_rank() - 1])


def first_rank_outside_its_experts() -> None:
    group = sharers_of_experts()
    wrong(expert_process_group=group if dist.get_rank() else dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_experts_that_are_not_named_and_groups_of_others_are_errors_on_every_rank(ranks: RankPool) -> None:
    assert all("matches no parameter name" in error for error in ranks.errors(wrong, expert_params=("expert.*",)))
    assert all("belong together" in error for error in ranks.errors(wrong, expert_params=()))
    assert all("ranks differ" in error for error in ranks.errors(not_told_of_experts))
    assert all("no expert_params say" in error for error in ranks.errors(not_told_of_experts, expert_group_size=2))
    outside = "is not in the process group given; make the optimizer on the group's ranks only"
    assert all(f"rank {rank} {outside}" in error for rank, error in enumerate(ranks.errors(not_a_member)))
    first, *others = ranks.errors(first_rank_outside_its_experts)
    assert f"rank 0 {outside}" in first
    assert all("rank 0 failed with ValueError(" in error and outside in error for error in others)
