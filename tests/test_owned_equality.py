"""Owned storage trains what torch.optim.Muon and AdamW train on one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models import UnevenLM
from tests.owned import difference, exact_sums, optimizer_for, reference, train
from tests.ranks import RankPool

LAYOUTS = ["padded", "compact", "auto"]
MODES = {
    "plain": {},
    "kept gradients": {"keep_full_grads": True},
    "lazy return": {"overlap_param_gather": True},
    "step in backward": {"step_in_backward": True},
    "no overlap": {"overlap_grad_reduce": False},
    "bus alignment": {"bus_alignment": True},
}


def difference_after_training(steps: int, accumulation: int, sync_each: bool = False, **options: Any) -> float:
    model = exact_sums(UnevenLM())
    train(model, optimizer_for(model, **options), steps, accumulation=accumulation, sync_each=sync_each)
    return difference(model, reference(dist.get_world_size(), steps, accumulation=accumulation))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
def test_ten_steps_with_accumulation_equal_one_process(ranks: RankPool, layout: str) -> None:
    assert set(ranks.run(difference_after_training, 10, 2, layout=layout)) == {0.0}


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_instances_equal_one_process(ranks: RankPool, layout: str, group_size: int) -> None:
    assert set(ranks.run(difference_after_training, 10, 2, layout=layout, group_size=group_size)) == {0.0}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mode_equals_one_process(ranks: RankPool, layout: str, mode: str) -> None:
    assert set(ranks.run(difference_after_training, 5, 2, layout=layout, **MODES[mode])) == {0.0}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_reducing_every_micro_batch_equals_reducing_their_sum(ranks: RankPool, layout: str) -> None:
    assert set(ranks.run(difference_after_training, 5, 2, sync_each=True, layout=layout)) == {0.0}


def clipped_difference(layout: str) -> float:
    model = exact_sums(UnevenLM())
    train(model, optimizer_for(model, layout=layout), 5, clip=0.3)
    return difference(model, reference(dist.get_world_size(), 5, clip=0.3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_clipping_equals_one_process_but_for_the_norms_last_bit(ranks: RankPool, layout: str) -> None:
    """The norm is summed in fp64 here and in fp32 by torch; Muon's bf16 iteration then differs in single elements."""
    assert max(ranks.run(clipped_difference, layout)) <= 2e-3


def weights_on_real_gradients(layout: str, **options: Any) -> dict[str, torch.Tensor]:
    model = UnevenLM()
    train(model, optimizer_for(model, layout=layout, **options), 5, accumulation=2, clip=0.3)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks", [3, 4], indirect=True)
def test_layouts_equal_each_other_on_gradients_as_they_are(ranks: RankPool) -> None:
    """Whatever the sums round to: owners of one instance add in rank order, wherever their part of a bucket lies."""
    size = {"group_size": ranks.world_size}
    padded, compact, auto = (ranks.run(weights_on_real_gradients, layout, **size)[0] for layout in LAYOUTS)
    for name, tensor in padded.items():
        assert torch.equal(tensor, compact[name]) and torch.equal(tensor, auto[name]), name


def test_a_run_repeats_itself(ranks: RankPool) -> None:
    first, second = (ranks.run(weights_on_real_gradients, "auto")[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
