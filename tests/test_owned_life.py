"""What users do between two steps, on owned storage as on one process, bit for bit.

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
a weight in several reentrant checkpoints               an error that names it, where its bucket has left already
======================================================  ==============================================================
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.owned_scenarios import Scenario, differences, loss_of, rows
from tests.ranks import RankPool

ONE_PASS = ("plain", "kept gradients", "lazy return", "step in backward", "no overlap")
SEVERAL_PASSES = ("plain", "kept gradients", "lazy return", "no overlap")  # step in backward takes one


def no_rank_uses_a_branch(model, no_sync, step, rank):
    loss_of(model(rows(step, rank), use="left" if step % 2 else "right")).backward()


def one_rank_uses_a_branch(model, no_sync, step, rank):
    loss_of(model(rows(step, rank), use="left" if rank else "right")).backward()


def one_rank_has_nothing_for_some_buckets(model, no_sync, step, rank):
    loss_of(model(rows(step, rank), use="neither" if rank else "both")).backward()


def one_rank_has_no_backward_pass(model, no_sync, step, rank):
    if rank != step % 2:
        loss_of(model(rows(step, rank))).backward()


def no_rank_has_a_backward_pass_in_one_step(model, no_sync, step, rank):
    if step != 1:
        loss_of(model(rows(step, rank))).backward()


def a_module_used_twice(model, no_sync, step, rank):
    x = rows(step, rank)
    loss_of(model(x) + model(x.flip(0), use="left")).backward()


def a_second_backward_adds(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()
    loss_of(model(rows(step, rank, 1), use="left")).backward()


def several_passes_through_one_graph(model, no_sync, step, rank):
    output = model(rows(step, rank))
    loss_of(output).backward(retain_graph=True)
    output.abs().mean().backward()


def two_forwards_then_two_backwards(model, no_sync, step, rank):
    first, second = (loss_of(model(rows(step, rank, part))) for part in range(2))
    second.backward()
    first.backward()


def a_gradient_penalty(model, no_sync, step, rank):
    x = rows(step, rank).requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (loss_of(output) + grad.square().mean()).backward()


def backward_creates_a_graph(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward(create_graph=True)


def autograd_grad_in_between_on_one_rank(model, no_sync, step, rank):
    def look() -> None:
        if rank == 0:
            torch.autograd.grad(loss_of(model(rows(step, rank, 7))), [model.first.weight, model.last.bias])

    look()
    loss_of(model(rows(step, rank))).backward()
    look()


def accumulation(model, no_sync, step, rank):
    with no_sync():
        loss_of(model(rows(step, rank))).backward()
        loss_of(model(rows(step, rank, 1), use="right")).backward()
    loss_of(model(rows(step, rank, 2), use="left")).backward()


def nested_no_sync(model, no_sync, step, rank):
    with no_sync():
        with no_sync():
            loss_of(model(rows(step, rank))).backward()
        loss_of(model(rows(step, rank, 1))).backward()
    loss_of(model(rows(step, rank, 2))).backward()


def the_last_micro_batch_in_no_sync(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()
    with no_sync():
        loss_of(model(rows(step, rank, 1))).backward()


def everything_in_no_sync(model, no_sync, step, rank):
    with no_sync():
        loss_of(model(rows(step, rank))).backward()


def the_model_is_evaluated_and_called_without_gradients(model, no_sync, step, rank):
    model.eval()
    with torch.no_grad():
        model(rows(step, rank, 5))
    model(rows(step, rank, 6))  # and one whose graph is dropped
    model.train()
    loss_of(model(rows(step, rank))).backward()


def a_hook_of_the_user(model, no_sync, step, rank):
    handle = model.left.weight.register_hook(lambda grad: grad * 2)
    loss_of(model(rows(step, rank))).backward()
    handle.remove()


ONE = [
    no_rank_uses_a_branch,
    one_rank_uses_a_branch,
    one_rank_has_nothing_for_some_buckets,
    one_rank_has_no_backward_pass,
    no_rank_has_a_backward_pass_in_one_step,
    a_module_used_twice,
    a_gradient_penalty,
    backward_creates_a_graph,
    autograd_grad_in_between_on_one_rank,
    accumulation,
    nested_no_sync,
    everything_in_no_sync,
    the_model_is_evaluated_and_called_without_gradients,
    a_hook_of_the_user,
]
SEVERAL = [
    a_second_backward_adds,
    several_passes_through_one_graph,
    two_forwards_then_two_backwards,
    the_last_micro_batch_in_no_sync,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("scenario", ONE, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("ranks", [2, 3], indirect=True)
def test_one_reduction_per_step_equals_one_process(ranks: RankPool, scenario: Scenario) -> None:
    assert ranks.run(differences, scenario, modes=ONE_PASS) == [dict.fromkeys(ONE_PASS, 0.0)] * ranks.world_size


@pytest.mark.parametrize("scenario", SEVERAL, ids=lambda scenario: scenario.__name__)
def test_several_reductions_per_step_equal_one_process(ranks: RankPool, scenario: Scenario) -> None:
    assert ranks.run(differences, scenario, modes=SEVERAL_PASSES) == [dict.fromkeys(SEVERAL_PASSES, 0.0)] * 2


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward; all of them share one layer."""

    MATRICES = ("first.weight", "blocks.0.weight", "blocks.1.weight", "blocks.2.weight", "last.weight")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant))
        return self.last(x)


def checkpointing(model, no_sync, step, rank):
    loss_of(model(rows(step, rank), reentrant=False)).backward()


def reentrant_checkpointing(model, no_sync, step, rank):
    loss_of(model(rows(step, rank), reentrant=True)).backward()


def reentrant_checkpointing_under_no_sync(model, no_sync, step, rank):
    with no_sync():
        loss_of(model(rows(step, rank), reentrant=True)).backward()
    loss_of(model(rows(step, rank, 1), reentrant=True)).backward()


def reentrant_checkpoints_of_modules_called_without_the_model(model, no_sync, step, rank):
    x = rows(step, rank).requires_grad_()
    for block in (model.first, *model.blocks):
        x = torch.tanh(checkpoint(block, x, use_reentrant=True))
    x.square().mean().backward()


CHECKPOINTING = [checkpointing, reentrant_checkpointing, reentrant_checkpointing_under_no_sync]


@pytest.mark.parametrize("scenario", CHECKPOINTING, ids=lambda scenario: scenario.__name__)
def test_activation_checkpointing_equals_one_process(ranks: RankPool, scenario: Scenario) -> None:
    assert ranks.run(differences, scenario, Checkpointed, modes=ONE_PASS) == [dict.fromkeys(ONE_PASS, 0.0)] * 2


def test_reentrant_checkpoints_without_the_models_forward_equal_one_process(ranks: RankPool) -> None:
    """Each block is a backward pass of its own then, and reduced by itself."""
    scenario = reentrant_checkpoints_of_modules_called_without_the_model
    assert (
        ranks.run(differences, scenario, Checkpointed, modes=SEVERAL_PASSES) == [dict.fromkeys(SEVERAL_PASSES, 0.0)] * 2
    )
