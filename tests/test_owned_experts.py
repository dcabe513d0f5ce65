"""Experts that only some ranks share, beside dense parameters that all do: four ranks, two sets of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON

EXPERTS = 4  # two on each half of the ranks
ROWS = 16
WIDTH = 24
_GROUPS: dict[str, Any] = {}


class Experts(nn.Module):
    """Rows go to expert ``row % EXPERTS``. A rank that has only some of them sees the rows of all its partners."""

    def __init__(self, held: range) -> None:
        super().__init__()
        self.held = held
        self.experts = nn.ModuleDict()
        for number in range(EXPERTS):
            torch.manual_seed(100 + number)
            expert = nn.Sequential(nn.Linear(WIDTH, 63), nn.GELU(), nn.Linear(63, WIDTH))
            if number in held:
                self.experts[str(number)] = expert

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in self.held:
            mine = numbers == number
            out[mine] = self.experts[str(number)](x[mine])
        return out


class MoE(nn.Module):
    """A dense layer, experts, a dense layer; ``exchange`` brings rows to the ranks of their experts and back."""

    def __init__(self, held: range = range(EXPERTS), exchange: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.experts = Experts(held)
        self._exchange = exchange or (lambda experts, x, numbers: experts(x, numbers))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self._exchange(self.experts, hidden, numbers)).square().mean(-1).sum()


class AllRows(torch.autograd.Function):
    """All-gather of rows; its gradient is the sum of what every rank's experts send back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        rows = grad.shape[0] // dist.get_world_size(ctx.group)
        return grad.narrow(0, dist.get_rank(ctx.group) * rows, rows), None


class MyRows(torch.autograd.Function):
    """The sum over ranks, of which this rank keeps its rows; its gradient goes to all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        rows = x.shape[0] // dist.get_world_size(group)
        return x.narrow(0, dist.get_rank(group) * rows, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def groups() -> tuple[Any, Any]:
    """(expert-parallel ranks, ranks that share experts) of this rank, made once: 0, 1 | 2, 3 and 0, 2 | 1, 3."""
    if not _GROUPS:
        for ranks in ([0, 1], [2, 3]):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                _GROUPS["parallel"] = group
        for ranks in ([0, 2], [1, 3]):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                _GROUPS["shared"] = group
    return _GROUPS["parallel"], _GROUPS["shared"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.arange(ROWS) % EXPERTS


def sharded() -> tuple[MoE, Any]:
    parallel, shared = groups()
    place = dist.get_rank() % 2

    def exchange(experts: nn.Module, x: Tensor, numbers: Tensor) -> Tensor:
        everyones = [torch.empty_like(numbers) for _ in range(2)]
        dist.all_gather(everyones, numbers, group=parallel)
        return MyRows.apply(experts(AllRows.apply(x, parallel), torch.cat(everyones)), parallel)

    return MoE(range(2 * place, 2 * place + 2), exchange), shared


def optimizer_for(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(
        model, **MUON, elementwise={"name": "adamw", **ADAMW}, bucket_mb=0.004, report=False, **options
    )


def mean_gradients(optimizer: LayerWiseOptimizer) -> dict[str, Tensor]:
    """All owners' gradients, whole, by name; those of copies must be equal."""
    optimizer.grad_norm()
    mine = [
        (optimizer.core.members[piece.param].name, piece.start, grad.clone())
        for bucket in optimizer.core.manager.settled()
        for piece, grad in zip(bucket.pieces, bucket.owned_grads())
    ]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    parts: dict[str, dict[int, Tensor]] = {}
    for name, start, grad in (piece for pieces in everyones for piece in pieces):
        assert torch.equal(parts.setdefault(name, {}).setdefault(start, grad), grad)
    return {name: torch.cat([of_name[start] for start in sorted(of_name)]) for name, of_name in parts.items()}


def compare(clip: float | None, **options: Any) -> dict[str, float]:
    """Five steps beside one process that has all experts: the largest relative difference of a mean gradient and of the
    norm, and the largest difference of a weight if that process steps with our gradients."""
    model, shared = sharded()
    optimizer = optimizer_for(
        model, expert_params=["experts.*"], expert_process_group=shared, exclude=("last.weight",), **options
    )
    single = MoE()
    matrices = [p for p in single.parameters() if p.ndim == 2 and p is not single.last.weight]
    others = [p for p in single.parameters() if all(p is not m for m in matrices)]
    optimizers = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)
    found = {"gradients": 0.0, "norms": 0.0, "weights": 0.0}
    for step in range(5):
        rows, numbers = batch(step)
        model(rows.chunk(4)[dist.get_rank()], numbers.chunk(4)[dist.get_rank()]).backward()
        (single(rows, numbers) / 4).backward()
        ours = mean_gradients(optimizer)
        norm = optimizer.grad_norm() if clip is None else optimizer.clip_grad_norm_(clip)
        theirs = torch.nn.utils.get_total_norm([param.grad for param in single.parameters()])
        found["norms"] = max(found["norms"], float(abs(norm - theirs) / theirs))
        for name, param in single.named_parameters():
            off = (ours[name].view(param.shape) - param.grad).abs().max() / param.grad.abs().max()
            found["gradients"] = max(found["gradients"], float(off))
            param.grad.copy_(ours[name].view(param.shape))
            if clip is not None:
                param.grad.mul_(torch.clamp(clip / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.synchronize()
        for each in optimizers:
            each.step()
            each.zero_grad()
        other = dict(single.named_parameters())
        worst = max(float((p - other[name]).detach().abs().max()) for name, p in model.named_parameters())
        found["weights"] = max(found["weights"], worst)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"group_size": 2}, {"expert_group_size": 1}, {"overlap_param_gather": True}], ids=str
)
@pytest.mark.parametrize("layout", ["padded", "compact", "auto"])
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_dense_and_expert_parameters_equal_one_process(ranks: RankPool, layout: str, options: dict[str, Any]) -> None:
    for found in ranks.run(compare, None, layout=layout, **options):
        assert found["weights"] == 0.0 and found["gradients"] <= 1e-5 and found["norms"] <= 1e-6


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_all_experts_count_in_the_norm_that_clips(ranks: RankPool) -> None:
    for found in ranks.run(compare, 0.5):
        assert found["weights"] == 0.0 and found["norms"] <= 1e-6


def loads_of_ranks(**options: Any) -> list[list[int]]:
    """Per rank, its dense and its experts' work."""
    model, shared = sharded()
    core = optimizer_for(model, expert_params=["experts.*"], expert_process_group=shared, **options).core
    return [held.plan.loads[held.sharers.instance.rank] for held in core.holdings]


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_dense_matrices_go_where_experts_leave_room(ranks: RankPool) -> None:
    """One owner for each pair of experts: with one instance of one rank all ranks have all; with two, one has them."""
    loads = ranks.run(loads_of_ranks, group_size=4)
    with_dense = [experts for dense, experts in loads if dense]
    assert min(experts for _, experts in loads) == max(with_dense)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_experts_that_are_not_named_are_an_error_on_every_rank(ranks: RankPool) -> None:
    def named(error: str) -> bool:
        return "ranks differ" in error or "matches no parameter name" in error or "belong together" in error

    assert all(map(named, ranks.errors(wrong_experts, ("expert.*",))))
    assert all(map(named, ranks.errors(wrong_experts, ())))
    assert all(map(named, ranks.errors(not_told_of_experts)))
    assert all("no expert_params say whose" in error for error in ranks.errors(size_of_no_experts))
    outside = "is not in the process group given; make the optimizer on the group's ranks only"
    assert all(f"rank {rank} {outside}" in error for rank, error in enumerate(ranks.errors(not_a_member)))
    first, *others = ranks.errors(first_rank_outside_its_experts)
    assert f"rank 0 {outside}" in first
    assert all("rank 0 failed with ValueError(" in error and outside in error for error in others)


def wrong_experts(globs: tuple[str, ...]) -> None:
    model, shared = sharded()
    optimizer_for(model, expert_params=globs, expert_process_group=shared)


def not_told_of_experts() -> None:
    """Ranks have parameters of other names, so they cannot share all of them."""
    optimizer_for(sharded()[0])


def size_of_no_experts() -> None:
    optimizer_for(sharded()[0], expert_group_size=2)


def not_a_member() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    optimizer_for(sharded()[0], process_group=groups[dist.get_rank() - 1])


def first_rank_outside_its_experts() -> None:
    model, shared = sharded()
    if dist.get_rank() == 0:
        shared = dist.GroupMember.NON_GROUP_MEMBER
    optimizer_for(model, expert_params=["experts.*"], expert_process_group=shared)
