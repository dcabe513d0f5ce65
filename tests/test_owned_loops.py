"""Schedulers, closures, groups, compiled models and single processes with owned storage."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.owned import difference, exact_sums, optimizer_for
from tests.owned_scenarios import BUCKET_MB, MODES, Branches, loss_of, optimizers_of, rows, train_ours, truth
from tests.ranks import RankPool
from tests.zero import ADAMW

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    ),
}


def one_pass(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()


def mean_gradients(model: nn.Module, step: int) -> None:
    for rank in range(dist.get_world_size()):
        one_pass(model, None, step, rank)
    for param in model.parameters():
        param.grad /= dist.get_world_size()


def scheduled_difference(name: str) -> float:
    model, expected = exact_sums(Branches()), exact_sums(Branches())
    ours = optimizer_for(model, bucket_mb=BUCKET_MB)
    theirs = optimizers_of(expected)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, *theirs)]
    for step in range(5):
        one_pass(model, None, step, dist.get_rank())
        mean_gradients(expected, step)
        for optimizer in (ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return difference(model, expected)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_drive_both_rules(ranks: RankPool, name: str) -> None:
    assert ranks.run(scheduled_difference, name) == [0.0, 0.0]


def grouped_difference() -> float:
    """A group's lr and weight decay are those of matrices and of the rest, where its section says nothing else."""
    model, expected = exact_sums(Branches()), exact_sums(Branches())

    def parts(net: Branches) -> list[list[nn.Parameter]]:
        first = list(net.first.parameters())
        return [first, [p for p in net.parameters() if all(p is not q for q in first)]]

    given = [{"lr": 0.05, "weight_decay": 0.0, "adamw": {"lr": 1e-3}}, {"lr": 0.01, "weight_decay": 0.3}]
    groups = [{"params": params, **options} for params, options in zip(parts(model), given)]
    ours = optimizer_for(model, bucket_mb=BUCKET_MB, params=groups)
    theirs: list[torch.optim.Optimizer] = []
    for params, lr, adamw_lr, decay in zip(parts(expected), (0.05, 0.01), (1e-3, 0.01), (0.0, 0.3)):
        theirs.append(torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr, weight_decay=decay))
        rates = {**ADAMW, "lr": adamw_lr, "weight_decay": decay}
        theirs.append(torch.optim.AdamW([p for p in params if p.ndim < 2], **rates))
    for step in range(3):
        one_pass(model, None, step, dist.get_rank())
        mean_gradients(expected, step)
        for optimizer in (ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    return difference(model, expected)


def test_param_groups_have_their_own_rates(ranks: RankPool) -> None:
    assert ranks.run(grouped_difference) == [0.0, 0.0]


def closure_difference() -> tuple[float, bool]:
    model = exact_sums(Branches())
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(rows(step, dist.get_rank())))
            loss.backward()
            losses.append(loss)
            return loss

        assert optimizer.step(closure) is losses[-1]
    return difference(model, truth(Branches, one_pass, 3, 2)), len(losses) == 3


def test_a_closure_is_called_once_and_its_loss_returned(ranks: RankPool) -> None:
    assert ranks.run(closure_difference) == [(0.0, True)] * 2


def compiled_difference(give_wrapper: bool, **options: Any) -> float:
    torch._dynamo.reset()
    model = exact_sums(Branches())
    compiled = torch.compile(model, backend="eager")
    optimizer = optimizer_for(compiled if give_wrapper else model, bucket_mb=BUCKET_MB, **options)
    train_ours(compiled, optimizer, one_pass, 3)
    return difference(model, truth(Branches, one_pass, 3, 2))


@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": True}, {"keep_full_grads": True}], ids=str)
@pytest.mark.parametrize("give_wrapper", [False, True])
def test_a_compiled_model_equals_one_process(ranks: RankPool, give_wrapper: bool, options: dict[str, Any]) -> None:
    assert ranks.run(compiled_difference, give_wrapper, **options) == [0.0, 0.0]


def measured_in_between() -> float:
    """The norm is asked for between passes; what comes after it, even under no_sync, belongs to the step, too."""
    model, expected = exact_sums(Branches()), exact_sums(Branches())
    ours, theirs = optimizer_for(model, bucket_mb=BUCKET_MB), optimizers_of(expected)
    for step in range(0, 6, 2):
        one_pass(model, None, step, dist.get_rank())
        ours.grad_norm()
        with ours.no_sync():
            one_pass(model, None, step + 1, dist.get_rank())
        ours.step()
        for rank in range(dist.get_world_size()):
            for part in (step, step + 1):
                one_pass(expected, None, part, rank)
        for param in expected.parameters():
            param.grad /= dist.get_world_size()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    return difference(model, expected)


def test_a_pass_after_the_norm_was_asked_for_counts(ranks: RankPool) -> None:
    assert ranks.run(measured_in_between) == [0.0, 0.0]


ALONE = """
import torch
from tests.owned import difference, exact_sums, optimizer_for
from tests.owned_scenarios import BUCKET_MB, MODES, Branches, loss_of, optimizers_of, rows
assert not torch.distributed.is_initialized()
for mode, options in MODES.items():
    model, expected = Branches(), Branches()
    ours, theirs = optimizer_for(model, bucket_mb=BUCKET_MB, **options), optimizers_of(expected)
    for step in range(3):
        for net, optimizers in ((model, [ours]), (expected, theirs)):
            loss_of(net(rows(step, 0))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ours.synchronize()
    print(mode, difference(model, expected))
"""


def test_one_process_without_torch_distributed_equals_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(tuple(MODES))]
    assert len(lines) == len(MODES) and all(line.endswith(" 0.0") for line in lines), ended.stdout + ended.stderr


def an_optimizer_that_is_gone() -> list[float]:
    """Another may follow it on the same model; gradients are the model's own in between."""
    model = exact_sums(Branches())
    train_ours(model, optimizer_for(model, bucket_mb=BUCKET_MB, step_in_backward=True), one_pass, 1)
    gc.collect()
    one_pass(model, None, 0, 0)
    kept = float(sum(param.grad is not None for param in model.parameters()))
    model.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    second = optimizer_for(model, bucket_mb=BUCKET_MB)
    expected = exact_sums(Branches())
    expected.load_state_dict(before)
    train_ours(model, second, one_pass, 1)
    mean_gradients(expected, 0)
    for optimizer in optimizers_of(expected):
        optimizer.step()
    return [kept, difference(model, expected)]


def test_a_second_optimizer_may_follow_the_first(ranks: RankPool) -> None:
    assert ranks.run(an_optimizer_that_is_gone) == [[19.0, 0.0]] * 2
