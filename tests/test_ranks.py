"""What one test does to the ranks is not seen by the next. Worlds of other sizes follow each other wherever a table has
several numbers of ranks."""

import deepspeed
import torch
from torch import nn

from tests.ranks import RankPool
from tests.zero import config


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
