"""The exchange that begins in backward: it really begins there, and gives the bits of a step without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fsdp2 import Sharded, Twin, backward, layer_wise, set_sync, shard
from tests.ranks import RankPool
from tests.test_fsdp2_exchange import Counted

Touch = Callable[[Sharded, Any], None]


def leave_alone(sharded: Sharded, optimizer: Any) -> None:
    pass


def clip_with_torch(sharded: Sharded, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 0.05)


def clip_with_ours(sharded: Sharded, optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.05)


def clip_at_a_large_norm(sharded: Sharded, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 1e6)


def unscale(sharded: Sharded, optimizer: Any) -> None:
    for param in sharded.model.parameters():
        param.grad.mul_(0.5)


def touch_one_element(sharded: Sharded, optimizer: Any) -> None:
    """Of one matrix, on one rank."""
    if torch.distributed.get_rank() == 1:
        sharded.model.layers[2].weight.grad.to_local()[0, 0] += 1.0


def change_the_momentum(sharded: Sharded, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def train(touch: Touch, steps: int = 3, micro: int = 1, sync: bool = True) -> tuple[float, list[int], list[int]]:
    """Difference to the twin; per step, the all-to-alls started in backward and in the step."""
    sharded = shard("rows", "fp32")
    optimizer, twin = layer_wise(sharded.model, bucket_matrices=1), Twin(sharded.model)
    optimizer.attach(sharded.model)
    in_backward, in_step = [], []
    for step in range(steps):
        with Counted() as counted:
            for number in range(micro):
                set_sync(sharded.model, sync or number == micro - 1)
                backward_once(sharded, step * micro + number)
            touch(sharded, optimizer)
        in_backward.append(sum(counted.calls.values()))
        if touch is change_the_momentum:
            for group in twin.optimizers[0].param_groups:
                group["momentum"] = 0.9
        twin.step_with_gradients_of(sharded.model)
        with Counted() as counted:
            optimizer.step()
        in_step.append(sum(counted.calls.values()))
        optimizer.zero_grad()
    return twin.difference(sharded.model), in_backward, in_step


def backward_once(sharded: Sharded, step: int) -> None:
    from tests.models import batch

    tokens, targets = batch(step, 8)
    sharded.model(tokens[sharded.part :: sharded.parts], targets[sharded.part :: sharded.parts]).backward()


TRAVELLING = 4  # matrices, each cut by rows


@pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
@pytest.mark.parametrize("touch", [leave_alone, clip_at_a_large_norm], ids=lambda f: f.__name__)
def test_all_buckets_leave_in_backward_and_only_return_in_the_step(ranks: RankPool, touch: Touch) -> None:
    for difference, in_backward, in_step in ranks.run(train, touch):
        assert difference == 0.0
        assert in_backward == [TRAVELLING] * 3
        assert in_step == [TRAVELLING] * 3


@pytest.mark.parametrize(
    "touch", [clip_with_torch, clip_with_ours, unscale, touch_one_element], ids=lambda f: f.__name__
)
def test_touched_gradients_are_exchanged_again_and_then_left_alone_for_a_while(ranks: RankPool, touch: Touch) -> None:
    for difference, in_backward, in_step in ranks.run(train, touch, 8):
        assert difference == 0.0
        assert in_backward == [TRAVELLING, 0, TRAVELLING, 0, 0, TRAVELLING, 0, 0], "pauses of 1, 2 and 4 steps"
        again = 1 if touch is touch_one_element else TRAVELLING
        assert in_step[0] == TRAVELLING + again
        assert in_step[1] == 2 * TRAVELLING


def test_hyperparameters_that_change_before_the_step_count(ranks: RankPool) -> None:
    for difference, in_backward, in_step in ranks.run(train, change_the_momentum, 2):
        assert difference == 0.0
        assert (in_backward[0], in_step[0]) == (TRAVELLING, 2 * TRAVELLING)


@pytest.mark.parametrize("sync", [True, False])
def test_micro_batches(ranks: RankPool, sync: bool) -> None:
    """With a reduction per micro-batch buckets leave each time, and the last counts; without, once."""
    for difference, in_backward, in_step in ranks.run(train, leave_alone, 3, 2, sync):
        assert difference == 0.0
        assert in_backward == [TRAVELLING * (2 if sync else 1)] * 3
        assert in_step == [TRAVELLING] * 3


def skip_steps(how: str) -> float:
    """A step that is not taken leaves no trace in the state."""
    sharded = shard("rows", "fp32")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    attachment = optimizer.attach(sharded.model)
    for step in range(4):
        backward(sharded, step)
        if step == 1:
            if how == "no gradient at the step":
                optimizer.zero_grad()
                optimizer.step()
            elif how == "removed":
                attachment.remove()
            if how != "removed":
                optimizer.zero_grad()
                continue
        twin.step_with_gradients_of(sharded.model)
        optimizer.step()
        optimizer.zero_grad()
    return twin.difference(sharded.model)


@pytest.mark.parametrize("how", ["skipped", "no gradient at the step", "removed"])
def test_what_has_left_is_dropped_without_a_trace(ranks: RankPool, how: str) -> None:
    assert ranks.run(skip_steps, how) == [0.0] * 2


def not_a_number() -> bool:
    """Gradients that are not numbers travel as they are: equal bits, nothing is exchanged again."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model, bucket_matrices=1)
    optimizer.attach(sharded.model)
    with torch.no_grad():
        sharded.model.lm_head.weight.to_local().fill_(float("nan"))
    with Counted() as counted:
        backward(sharded, 0)
        optimizer.step()
    return sum(counted.calls.values()) == 2 * TRAVELLING


def test_nan_is_no_difference(ranks: RankPool) -> None:
    assert ranks.run(not_a_number) == [True, True]


def attach_elsewhere() -> None:
    optimizer = layer_wise(shard("rows", "fp32").model)
    optimizer.attach(shard("rows", "fp32").model)


def test_another_model_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(attach_elsewhere):
        assert error == "ValueError: attach: parameter 'layers.0.weight' of this optimizer is not the model's"
