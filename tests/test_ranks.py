"""What one test does to the ranks is not seen by the next, and worlds of other sizes follow each other."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RankPool
from tests.zero import config, engine_for, full_weights, train


def linear_after_zero_init() -> str:
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        nn.Linear(2, 2)
    return linear_now()


def linear_now() -> str:
    return torch.nn.functional.linear.__name__


def test_the_linear_that_zero_init_puts_in_place_does_not_stay(ranks: RankPool) -> None:
    before = ranks.run(linear_now)
    assert all(name not in before for name in ranks.run(linear_after_zero_init))
    assert ranks.run(linear_now) == before


def two_steps_of_stage_3() -> tuple[int, dict[str, Any]]:
    with engine_for(config(3, rows=8)) as engine:
        train(engine, 2, same_rows=True)
        return dist.get_world_size(), full_weights(engine)


def test_stage_3_trains_in_a_world_of_two_then_of_four_then_of_two(rank_pools: dict[int, RankPool]) -> None:
    """All ranks train on all rows, and the mean of 2 or 4 equal gradients is that gradient."""
    found = [rank_pools[size].run(two_steps_of_stage_3) for size in (2, 4, 2)]
    assert [[size for size, _ in world] for world in found] == [[2] * 2, [4] * 4, [2] * 2]
    first = found[0][0][1]
    for _, weights in (result for world in found for result in world):
        assert all(torch.equal(weight, first[name]) for name, weight in weights.items())
