"""Experts that only some ranks share, and dense parameters that all do: four ranks, two sets of experts."""

import functools
import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.support.cells import cells
from tests.support.on_ranks import on_ranks
from tests.support.plain import Turn, assert_same, exact_sums, optimizer_in, rows, train_ours, truth
from tests.support.ranks import gathered

EXPERTS = 4  # ranks 0 and 2 have the first two, ranks 1 and 3 the others
OPTIONS: list[dict[str, Any]] = [{}, {"group_size": 2}, {"expert_group_size": 1}, {"overlap_param_gather": True}]


def held_by(rank: int) -> range:
    return range(rank % 2 * 2, rank % 2 * 2 + 2)


class MoE(nn.Module):
    """Dense layers on this rank's rows, and experts, those of this rank, also on those of its partner."""

    NO_MATRIX = "last.weight"

    def __init__(self, held: range = range(EXPERTS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 48)
        experts = {str(n): nn.Sequential(nn.Linear(6, 63), nn.GELU(), nn.Linear(63, 24)) for n in range(EXPERTS)}
        self.experts = nn.ModuleDict({number: experts[number] for number in map(str, held)})

    def forward(self, x: Tensor, of_partners: Tensor, held: range) -> Tensor:
        dense = self.last(self.first(x).tanh()).square().mean()
        return dense + sum(self.experts[str(n)](of_partners[n::EXPERTS]).square().mean() for n in held)


def one_pass(turn: Turn) -> None:
    pair = turn.rank // 2 * 2
    of_partners = torch.cat([rows(turn.step, pair), rows(turn.step, pair + 1)])
    turn.model(turn.rows(), of_partners, held_by(turn.rank)).backward()


@functools.cache
def sharers_of_experts() -> Any:
    return [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]


def sharded() -> tuple[MoE, Any]:
    """This rank's part of the model, and the ranks that share its experts."""
    return MoE(held_by(dist.get_rank())), sharers_of_experts()


def expert_optimizer(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    options = {"expert_params": ["experts.*"], "expert_process_group": sharers_of_experts(), **options}
    return optimizer_in(model, bucket_mb=0.004, exclude=("last.weight",), **options)


@on_ranks()
@cells(ranks=[4], layout=["padded", "compact", "auto"], options=OPTIONS)
def test_experts_equal_one_process_and_count_in_the_norm(layout: str, options: dict[str, Any]) -> None:
    """Experts and the rest equal one process, and count in the norm."""

    def note_norm(single: nn.Module) -> None:
        norms.append(float(nn.utils.get_total_norm([param.grad for param in single.parameters()])))

    norms: list[float] = []
    model = exact_sums(sharded()[0])
    optimizer = expert_optimizer(model, layout=layout, **options)
    train_ours(model, optimizer, 3, one_pass)
    assert_same(model, truth(3, MoE, one_pass))
    one_pass(Turn(model, 3, dist.get_rank()))
    truth(4, MoE, one_pass, note_norm)
    assert float(optimizer.grad_norm()) == pytest.approx(norms[-1], rel=1e-6)


@on_ranks(4)
def test_dense_matrices_go_where_experts_leave_room() -> None:
    core = expert_optimizer(sharded()[0], group_size=4).core
    loads = gathered([held.plan.loads[held.rank_groups.instance.rank] for held in core.planned_sets])
    with_dense = [experts for dense, experts in loads if dense]
    assert min(experts for _, experts in loads) == max(with_dense)


@on_ranks(4)
def test_unnamed_experts_and_foreign_groups_are_refused() -> None:
    """Experts that are not named, and groups of others, are errors on every rank."""
    rank, model = dist.get_rank(), sharded()[0]
    of_neighbour = [dist.new_group([other]) for other in range(4)][rank - 1]
    of_others = sharers_of_experts() if rank else dist.GroupMember.NON_GROUP_MEMBER
    outside = "in it, found it outside; make the optimizer on the group's ranks only"
    told = "rank 0 failed with ValueError(" if rank else ""
    for make, options, message in (
        (expert_optimizer, {"expert_params": ("expert.*",)}, "matches no parameter name"),
        (expert_optimizer, {"expert_params": ()}, "together, found one"),
        (optimizer_in, {}, "ranks differ"),
        (optimizer_in, {"expert_group_size": 2}, "expected expert_params with expert_group_size 2, found none"),
        (optimizer_in, {"process_group": of_neighbour}, f"rank {rank} {outside}"),
        (expert_optimizer, {"expert_process_group": of_others}, f"{re.escape(told)}.*rank 0 {outside}"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            make(model, **options)


@on_ranks(4)
def test_frozen_experts_begin_as_their_first_ranks() -> None:
    """Frozen weights of experts begin as those of the first rank that shares them."""
    model, sharers = sharded()
    for name, param in model.named_parameters():
        frozen = name.endswith(".bias")
        param.requires_grad_(not frozen)
        if frozen:
            param.data.fill_(dist.get_rank())
    expert_optimizer(model)
    first = {True: dist.get_process_group_ranks(sharers)[0], False: 0}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert set(param.tolist()) == {first[name.startswith("experts")]}, name


@on_ranks(4)
def test_expert_without_a_gradient_is_told_by_its_rank() -> None:
    """The first rank of an expert says that it had no gradient. Ranks 1 and 3 do not use theirs."""
    rank = dist.get_rank()
    with redirect_stdout(io.StringIO()) as printed:
        model = sharded()[0]
        optimizer = expert_optimizer(model, report=True)
        model(rows(0, rank), rows(0, rank), () if rank % 2 else held_by(rank)).backward()
        optimizer.step()
    said = " ".join(printed.getvalue().partition("every rank and machine.")[2 if rank == 0 else 0].split())
    names = ", ".join(f"experts.{e}.{i}.{kind}" for e in (2, 3) for i in (0, 2) for kind in ("weight", "bias"))
    told = f"Rank 1: 8 of 8 trained parameters had no gradient on any rank in the first step: {names}"
    assert said == (told if rank == 1 else "")
