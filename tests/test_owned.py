"""Owned storage under what users do: their loops, models, norms and precisions, bit for bit as on one process.

======================================================  ==============================================================
what                                                    what happens
======================================================  ==============================================================
no gradient on any rank                                 left alone: parameter, state and AdamW's step count
a gradient on some ranks only, or none for a bucket     the others count as zero
a rank without a backward pass                          counts as zero; it calls step() like the others
a module used twice, a tied weight                      its gradients add up; a tied weight has a bucket of its own
several passes, losses, retain_graph, create_graph      gradients add up, as in torch
torch.autograd.grad, also on one rank only              disturbs nothing, sends nothing
no_sync, nested, around the last micro-batch            reduced with the next pass outside, or at the step
checkpoint, both use_reentrant                          as without; where the model's forward is bypassed, reentrant
                                                        blocks are reduced one by one
======================================================  ==============================================================
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.owned import difference, exact_sums
from tests.owned_scenarios import (
    MODES,
    SEVERAL_PASSES,
    Branches,
    Scenario,
    differences,
    loss_of,
    made,
    mean_gradients,
    one_pass,
    optimizer_for,
    optimizers_of,
    rows,
    step_all,
    train_ours,
    truth,
)
from tests.ranks import RankPool
from tests.zero import ADAMW

ALL = tuple(MODES)
FULL = pytest.mark.full
LAYOUTS = ("auto", "padded", "compact")


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    off = difference(ours, theirs)
    assert off == 0.0, off


# Loops: what a rank does in a step, by name


def back(model: nn.Module, step: int, rank: int, part: int = 0, **how: Any) -> None:
    loss_of(model(rows(step, rank, part), **how)).backward()


def used_twice(model, no_sync, step, rank):
    x = rows(step, rank)
    loss_of(model(x) + model(x.flip(0), use="left")).backward()


def gradient_penalty(model, no_sync, step, rank):
    x = rows(step, rank).requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (loss_of(output) + grad.square().mean()).backward()


def looks_in_between(model, no_sync, step, rank):
    def look() -> None:
        if rank == 0:
            torch.autograd.grad(loss_of(model(rows(step, rank, 7))), [model.first.weight, model.last.bias])

    look()
    back(model, step, rank)
    look()


def nested_no_sync(model, no_sync, step, rank):
    with no_sync():
        with no_sync():
            back(model, step, rank)
        back(model, step, rank, 1, use="right")
    back(model, step, rank, 2, use="left")


def in_no_sync(model, no_sync, step, rank):
    with no_sync():
        back(model, step, rank)


def last_in_no_sync(model, no_sync, step, rank):
    back(model, step, rank)
    with no_sync():
        back(model, step, rank, 1)


def evaluates_and_calls(model, no_sync, step, rank):
    with torch.no_grad():
        model.eval()(rows(step, rank, 5))
    model(rows(step, rank, 6))  # and one whose graph is dropped
    back(model.train(), step, rank)


def hook_of_the_user(model, no_sync, step, rank):
    handle = model.left.weight.register_hook(lambda grad: grad * 2)
    back(model, step, rank)
    handle.remove()


def frozen_for_a_step(model, no_sync, step, rank):
    model.left.requires_grad_(step != 1)
    back(model, step, rank)


def second_backward(model, no_sync, step, rank):
    back(model, step, rank)
    back(model, step, rank, 1, use="left")


def one_graph_twice(model, no_sync, step, rank):
    output = model(rows(step, rank))
    loss_of(output).backward(retain_graph=True)
    output.abs().mean().backward()


def forwards_then_backwards(model, no_sync, step, rank):
    first, second = (loss_of(model(rows(step, rank, part))) for part in range(2))
    second.backward()
    first.backward()


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    MATRICES = ("first.weight", "blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "last.weight")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
        return self.last(x)


def reentrant_under_no_sync(model, no_sync, step, rank):
    with no_sync():
        back(model, step, rank, reentrant=True)
    back(model, step, rank, 1, reentrant=True)


def without_the_model(model, no_sync, step, rank):
    x = rows(step, rank).requires_grad_()
    for block in (model.first, *model.blocks):
        x = torch.tanh(checkpoint(block, x, use_reentrant=True))
    x.square().mean().backward()


# Models


class Tied(nn.Module):
    """A token embedding that is the output head too."""

    MATRICES = ("middle.weight",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 6)
        self.middle = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.middle(self.embedding((x.abs() * 4).long().clamp(max=12)))))


class Attention(nn.Module):
    """nn.MultiheadAttention reads its output projection's weight without calling it."""

    MATRICES = ("attention.in_proj_weight", "attention.out_proj.weight", "last.weight")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(x[None], x[None], x[None])[0][0])


@dataclasses.dataclass
class Output:
    value: Tensor
    note: str


class Structured(Branches):
    """Returns a dictionary with a dataclass and a tuple."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"first": Output(y[:4], "note"), "rest": (y[4:], 3)}


def structured_pass(model, no_sync, step, rank):
    output = model(rows(step, rank))
    loss_of(torch.cat([output["first"].value, output["rest"][0]])).backward()


class Convolutions(nn.Module):
    """Convolutions and a batch norm in front of matrices, and a parameter without elements."""

    MATRICES = ("last.weight",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.convolution(x[:, None])).flatten(1)) + self.nothing.sum()


LOOPS: dict[str, tuple[Scenario, type[nn.Module], tuple[str, ...]]] = {
    "no rank uses a branch": (lambda m, _, s, r: back(m, s, r, use="left" if s % 2 else "right"), Branches, ALL),
    "one rank uses a branch": (lambda m, _, s, r: back(m, s, r, use="left" if r else "right"), Branches, ALL),
    "one rank has nothing for some": (lambda m, _, s, r: back(m, s, r, use="neither" if r else "both"), Branches, ALL),
    "one rank has no pass": (lambda m, _, s, r: back(m, s, r) if r != s % 2 else None, Branches, ALL),
    "no rank has a pass in one step": (lambda m, _, s, r: back(m, s, r) if s != 1 else None, Branches, ALL),
    "a module used twice": (used_twice, Branches, ALL),
    "a gradient penalty": (gradient_penalty, Branches, ALL),
    "backward creates a graph": (lambda m, _, s, r: loss_of(m(rows(s, r))).backward(create_graph=True), Branches, ALL),
    "autograd.grad in between on one rank": (looks_in_between, Branches, ALL),
    "nested no_sync": (nested_no_sync, Branches, ALL),
    "everything in no_sync": (in_no_sync, Branches, ALL),
    "evaluation, and calls without gradients": (evaluates_and_calls, Branches, ALL),
    "a hook of the user": (hook_of_the_user, Branches, ALL),
    "a layer is frozen for a step": (frozen_for_a_step, Branches, ("plain",)),
    "a second backward pass adds": (second_backward, Branches, SEVERAL_PASSES),
    "several passes through one graph": (one_graph_twice, Branches, SEVERAL_PASSES),
    "two forwards, then two backwards": (forwards_then_backwards, Branches, SEVERAL_PASSES),
    "the last micro-batch in no_sync": (last_in_no_sync, Branches, SEVERAL_PASSES),
    "checkpoints": (lambda m, _, s, r: back(m, s, r, reentrant=False), Checkpointed, ALL),
    "reentrant checkpoints": (lambda m, _, s, r: back(m, s, r, reentrant=True), Checkpointed, ALL),
    "reentrant checkpoints under no_sync": (reentrant_under_no_sync, Checkpointed, ALL),
    "reentrant checkpoints without the model": (without_the_model, Checkpointed, SEVERAL_PASSES),
    "a tied embedding": (one_pass, Tied, ALL),
    "attention": (one_pass, Attention, ALL),
    "a structured output": (structured_pass, Structured, ALL),
    "convolutions": (one_pass, Convolutions, ALL),
}


def differences_in(loop: str, first: int) -> dict[str, float]:
    """By mode, with a layout for each mode in turn, ``first`` for the first one."""
    scenario, build, modes = LOOPS[loop]
    return differences(scenario, build, modes, [LAYOUTS[(number + first) % 3] for number in range(len(modes))])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=FULL)])
def test_every_loop_and_model_equals_one_process_in_every_mode(
    rank_pools: dict[int, RankPool], loop: str, size: int, first: int
) -> None:
    modes = LOOPS[loop][2]
    size = size if modes == ALL else 2  # of several passes a third of the sum is not the sum of thirds
    assert rank_pools[size].run(differences_in, loop, first) == [dict.fromkeys(modes, 0.0)] * size


# What else goes on around a step: each function holds on two ranks


def schedulers_drive_both_rules() -> None:
    def sequence(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    for make in (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
        sequence,
    ):
        model, ours = made()
        expected = exact_sums(Branches())
        all_of_them = [ours, *optimizers_of(expected)]
        schedulers = [make(optimizer) for optimizer in all_of_them]
        for step in range(5):
            one_pass(model, None, step, dist.get_rank())
            mean_gradients(expected, one_pass, step)
            step_all(all_of_them)
            for scheduler in schedulers:
                scheduler.step()
        assert_same(model, expected)


def param_groups_have_their_own_rates() -> None:
    """A group's lr and weight decay are those of matrices and of the rest, where its section says nothing else."""

    def parts(net: nn.Module) -> list[list[nn.Parameter]]:
        first = list(net.first.parameters())
        return [first, [p for p in net.parameters() if all(p is not q for q in first)]]

    model, expected = exact_sums(Branches()), exact_sums(Branches())
    given = [{"lr": 0.05, "weight_decay": 0.0, "adamw": {"lr": 1e-3}}, {"lr": 0.01, "weight_decay": 0.3}]
    ours = optimizer_for(model, params=[{"params": params, **each} for params, each in zip(parts(model), given)])
    theirs: list[torch.optim.Optimizer] = []
    for params, lr, adamw_lr, decay in zip(parts(expected), (0.05, 0.01), (1e-3, 0.01), (0.0, 0.3)):
        theirs.append(torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr, weight_decay=decay))
        rates = {**ADAMW, "lr": adamw_lr, "weight_decay": decay}
        theirs.append(torch.optim.AdamW([p for p in params if p.ndim < 2], **rates))
    for step in range(3):
        one_pass(model, None, step, dist.get_rank())
        mean_gradients(expected, one_pass, step)
        step_all([ours, *theirs])
    assert_same(model, expected)


def a_closure_is_called_once_and_its_loss_returned() -> None:
    model, optimizer = made()
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(model(rows(len(losses), dist.get_rank()))))
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        assert optimizer.step(closure) is losses[-1]
    assert len(losses) == 3
    assert_same(model, truth(3))


def a_pass_after_the_norm_was_asked_for_counts() -> None:
    """What comes after it, even under no_sync, belongs to the step, too."""
    model, ours = made()
    expected = exact_sums(Branches())
    theirs = optimizers_of(expected)
    for step in range(0, 6, 2):
        one_pass(model, None, step, dist.get_rank())
        ours.grad_norm()
        if step:
            with ours.no_sync():
                one_pass(model, None, step + 1, dist.get_rank())
        else:
            one_pass(model, None, step + 1, dist.get_rank())
        ours.step()
        mean_gradients(expected, lambda m, _, s, r: [back(m, part, r) for part in (s, s + 1)], step)
        step_all(theirs)
    assert_same(model, expected)


def a_second_optimizer_may_follow_the_first() -> None:
    """Gradients are the model's own in between."""
    model, first = made(mode="step in backward")
    train_ours(model, first, 1)
    del first
    gc.collect()
    one_pass(model, None, 0, 0)
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    expected = exact_sums(Branches())
    expected.load_state_dict({name: param.detach().clone() for name, param in model.named_parameters()})
    train_ours(model, optimizer_for(model), 1)
    mean_gradients(expected, one_pass, 0)
    step_all(optimizers_of(expected))
    assert_same(model, expected)


def all_ranks_begin_with_the_first_ones_weights_and_buffers() -> None:
    model = exact_sums(Convolutions())
    rank = dist.get_rank()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean):
            tensor.add_(rank)
    optimizer = optimizer_for(model)
    assert float(model.norm.running_mean.abs().max()) == 0.0
    train_ours(model, optimizer, 3)
    assert_same(model, truth(3, Convolutions))


# Parameters that are still on their way


def lazily(build: type[nn.Module] = Branches) -> tuple[nn.Module, Any, nn.Module]:
    """A model just after a step, its parameters on their way here; its optimizer; what they must be."""
    model, optimizer = made(build, "lazy return")
    one_pass(model, None, 0, dist.get_rank())
    optimizer.step()
    return model, optimizer, truth(1, build)


def saved_and_read(state: dict[str, Any]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


def of_last(named: Any) -> dict[str, Tensor]:
    return {f"last.{name}": tensor for name, tensor in dict(named).items()}


def reading_a_model_right_after_a_step_gives_its_new_parameters() -> None:
    reads: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
        "state_dict": lambda model: model.state_dict(),
        "a submodule's": lambda model: of_last(model.last.state_dict()),
        "saved": lambda model: saved_and_read(model.state_dict()),
        "copied": lambda model: dict(copy.deepcopy(model).named_parameters()),
        "a submodule copied": lambda model: of_last(copy.deepcopy(model.last).named_parameters()),
        "copied twice": lambda model: dict(copy.deepcopy(copy.deepcopy(model)).named_parameters()),
        "pickled": lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
    }
    for way, read in reads.items():
        model, _optimizer, expected = lazily()
        named = dict(expected.named_parameters())
        assert all(torch.equal(tensor, named[name]) for name, tensor in read(model).items()), way


def evaluation_right_after_a_step_uses_the_new_parameters() -> None:
    for build in (Branches, Tied, Attention):
        model, _optimizer, expected = lazily(build)
        with torch.no_grad():
            assert torch.equal(model.eval()(rows(9, 0)), copy.deepcopy(expected).eval()(rows(9, 0))), build


def a_copy_of_the_model_is_trained_by_itself() -> None:
    model, optimizer, _ = lazily()
    other = copy.deepcopy(model)
    loss_of(other(rows(5, 0))).backward()
    assert other.first.weight.grad is not None
    other.zero_grad()
    optimizer_of_other = optimizer_for(other)
    for net, its in ((other, optimizer_of_other), (model, optimizer)):
        train_ours(net, its, (1, 2))
    assert_same(model, truth(3))
    assert difference(model, other) > 0.0


class ByHand(Branches):
    """Uses a layer's weight without calling the layer, though it was called before."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.first.weight, self.first.bias) if self.by_hand else self.first(x)
        x = self.middle(torch.tanh(x))
        return self.last(self.norm(self.left(x) + self.right(x)))


def weights_that_are_used_by_hand_are_there_after_synchronize() -> None:
    model, optimizer, expected = lazily(ByHand)
    optimizer.synchronize()
    model.by_hand = True
    with torch.no_grad():
        assert torch.equal(model(rows(1, 0)), expected(rows(1, 0)))


def training_with_a_weight_that_has_not_come_is_an_error_that_names_it() -> None:
    model, _optimizer, _ = lazily(ByHand)
    output = nn.functional.linear(rows(1, 0), model.first.weight)
    with pytest.raises(RuntimeError, match=r"'first.weight' was used before its new value had come.*synchronize\(\)"):
        output.sum().backward()


@pytest.mark.parametrize(
    "check",
    [
        schedulers_drive_both_rules,
        param_groups_have_their_own_rates,
        a_closure_is_called_once_and_its_loss_returned,
        a_pass_after_the_norm_was_asked_for_counts,
        a_second_optimizer_may_follow_the_first,
        all_ranks_begin_with_the_first_ones_weights_and_buffers,
        reading_a_model_right_after_a_step_gives_its_new_parameters,
        evaluation_right_after_a_step_uses_the_new_parameters,
        a_copy_of_the_model_is_trained_by_itself,
        weights_that_are_used_by_hand_are_there_after_synchronize,
        training_with_a_weight_that_has_not_come_is_an_error_that_names_it,
    ],
    ids=lambda check: check.__name__,
)
def test_on_all_ranks(ranks: RankPool, check: Callable[[], None]) -> None:
    ranks.run(check)


def compiled_difference(give_wrapper: bool, mode: str) -> float:
    torch._dynamo.reset()
    model = exact_sums(Branches())
    compiled = torch.compile(model, backend="eager")
    optimizer = optimizer_for(compiled if give_wrapper else model, mode)
    train_ours(compiled, optimizer, 3)
    return difference(model, truth(3))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plain", "lazy return", "kept gradients"])
@pytest.mark.parametrize("give_wrapper", [False, True])
def test_a_compiled_model_equals_one_process(ranks: RankPool, give_wrapper: bool, mode: str) -> None:
    assert ranks.run(compiled_difference, give_wrapper, mode) == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_one_process_without_torch_distributed_equals_torch(mode: str) -> None:
    assert not dist.is_initialized()
    model, expected = Branches(), Branches()
    ours, theirs = optimizer_for(model, mode), optimizers_of(expected)
    for step in range(3):
        for net, optimizers in ((model, [ours]), (expected, theirs)):
            one_pass(net, contextlib.nullcontext, step, 0)
            step_all(optimizers)
    ours.synchronize()
    assert difference(model, expected) == 0.0
