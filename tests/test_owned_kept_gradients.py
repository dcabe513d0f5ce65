"""``keep_full_grads``: mean gradients in ``param.grad`` on all ranks, to look at and to change, as under DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.owned import difference, exact_sums, optimizer_for
from tests.owned_scenarios import BUCKET_MB, Branches, loss_of, optimizers_of, rows, train_ours, truth
from tests.ranks import RankPool

USES = {
    "both branches": lambda rank: "both",
    "a branch per rank": lambda rank: "left" if rank else "right",
    "one branch on no rank": lambda rank: "left",
}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> bool:
    pairs = [(ours[name], theirs[name]) for name in theirs]
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def as_under_ddp(use: str, layout: str) -> list[bool]:
    """On gradients as they are; accumulated locally, then reduced, then another pass on top of the reduced ones."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    model = Branches()
    optimizer = optimizer_for(model, keep_full_grads=True, layout=layout, bucket_mb=BUCKET_MB)
    found = []
    for part, apart in enumerate([True, False, False]):
        for trained, no_sync in ((model, optimizer.no_sync), (wrapped, wrapped.no_sync)):
            with no_sync() if apart else contextlib.nullcontext():
                loss_of(trained(rows(0, rank, part), use=USES[use](rank))).backward()
        found.append(same(gradients(model), gradients(wrapped.module)))
    return found


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("use", USES)
def test_gradients_on_all_ranks_are_those_of_ddp(ranks: RankPool, use: str, layout: str) -> None:
    assert ranks.run(as_under_ddp, use, layout) == [[True] * 3] * 2


def one_pass(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()


def halve_in_place(model: nn.Module) -> None:
    model.left.weight.grad.mul_(0.5)
    model.last.bias.grad.zero_()


def assign(model: nn.Module) -> None:
    model.left.weight.grad = model.left.weight.grad * 0.5
    model.last.bias.grad = torch.ones_like(model.last.bias)


def take_away(model: nn.Module) -> None:
    model.left.weight.grad = model.last.bias.grad = None


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def changed_difference(change: Callable[[nn.Module], object]) -> float:
    model = exact_sums(Branches())
    train_ours(model, optimizer_for(model, keep_full_grads=True, bucket_mb=BUCKET_MB), one_pass, 3, change)
    return difference(model, truth(Branches, one_pass, 3, dist.get_world_size(), change))


@pytest.mark.parametrize("change", [halve_in_place, assign, take_away, clip], ids=lambda change: change.__name__)
@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_what_the_user_does_to_gradients_is_stepped_on(ranks: RankPool, change: Callable[[nn.Module], object]) -> None:
    assert set(ranks.run(changed_difference, change)) == {0.0}


def forget_all(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def set_to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def forgotten_difference(forget: Callable[[nn.Module], object], keep_full: bool) -> float:
    model = exact_sums(Branches())
    optimizer = optimizer_for(model, keep_full_grads=keep_full, bucket_mb=BUCKET_MB)
    train_ours(model, optimizer, one_pass, 3, forget=forget)
    return difference(model, truth(Branches, one_pass, 3, dist.get_world_size()))


@pytest.mark.parametrize("keep_full", [False, True])
@pytest.mark.parametrize("forget", [forget_all, set_to_zero], ids=lambda forget: forget.__name__)
def test_the_models_zero_grad_does_as_well(
    ranks: RankPool, forget: Callable[[nn.Module], object], keep_full: bool
) -> None:
    assert set(ranks.run(forgotten_difference, forget, keep_full)) == {0.0}


def zeros_then_no_gradient(set_to_none: bool) -> tuple[bool, bool]:
    """A step that only ``left`` takes part in: is ``right``, whose gradient is forgotten or zero, changed?"""
    model, expected = Branches(), Branches()
    ours = optimizer_for(model, keep_full_grads=True, bucket_mb=BUCKET_MB)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1)
    moved = []
    for net, optimizer in ((model, ours), (expected, theirs)):
        for step, use in enumerate(["both", "left"]):
            net.zero_grad(set_to_none=set_to_none)
            before = net.right.weight.detach().clone()
            loss_of(net(rows(step, 0), use=use)).backward()
            optimizer.step()
        moved.append(not torch.equal(before, net.right.weight))
    return tuple(moved)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zero_gradient_is_stepped_on_and_none_is_not(ranks: RankPool, set_to_none: bool) -> None:
    assert ranks.run(zeros_then_no_gradient, set_to_none) == [(not set_to_none, not set_to_none)] * 2


def scaled_difference(keep_full: bool) -> tuple[float, float]:
    """With torch.amp.GradScaler, whose second step overflows on one rank; the truth is a loop without that step.

    Scales are powers of two and sums of two commute, so not a bit may differ. Also returns the scale in the end.
    """
    model, expected = Branches(), Branches()
    optimizer = optimizer_for(model, keep_full_grads=keep_full, bucket_mb=BUCKET_MB)
    truth_of_two = optimizers_of(expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1000)
    for step in range(4):
        loss = loss_of(model(rows(step, dist.get_rank())))
        scaler.scale(loss * float("inf") if step == 1 and dist.get_rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            for rank in range(2):
                (loss_of(expected(rows(step, rank))) / 2).backward()
            for each in truth_of_two:
                each.step()
                each.zero_grad()
    return difference(model, expected), scaler.get_scale()


def test_grad_scaler_works_on_kept_gradients(ranks: RankPool) -> None:
    assert ranks.run(scaled_difference, True) == [(0.0, 2.0**3)] * 2


def test_grad_scaler_on_gradients_that_are_not_kept_is_an_error(ranks: RankPool) -> None:
    """It finds none to unscale; going on with scaled ones would be silent."""
    assert all("set keep_full_grads" in error for error in ranks.errors(scaled_difference, False))
