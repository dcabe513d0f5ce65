"""What one test does to the ranks is not seen by the next, and what fails on one is told."""

from datetime import timedelta
from weakref import WeakKeyDictionary

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lwopt_backend.runtime import collectives
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.ranks import RankFailed, RankPool
from tests.support.zero import config


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


def wrong_assertion() -> None:
    found = {"same": 1, "rank": dist.get_rank()}
    assert found == {"same": 1, "rank": 7}, "wrong"


def test_an_assertion_on_ranks_says_what_differs(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="AssertionError: wrong") as failed:
        ranks.run(wrong_assertion)
    assert "    found = {'rank': 0, 'same': 1}\n" in str(failed.value) and 'assert found == {"same"' in str(
        failed.value
    )


def parts_of_a_default_group_that_is_split() -> None:
    """As with NCCL, if init_process_group was given a device_id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_splits", lambda: True)
        pairs = TorchCollectives().part([[0, 1], [2, 3]])
        total = torch.full((1,), float(dist.get_rank()))
        pairs.all_reduce(total)
        assert pairs.ranks() == ([0, 1] if dist.get_rank() < 2 else [2, 3])
        assert total.item() == (1.0 if dist.get_rank() < 2 else 5.0)
        assert TorchCollectives().part([[0, 1], [2, 3]]).group is pairs.group
        with pytest.raises(ValueError, match="expected a communicator for ranks .*leave it out"):
            pairs.part([[0], [1]])


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_groups_of_some_ranks_where_all_make_groups(ranks_to_spoil: RankPool) -> None:
    """Groups of some ranks are made where only all ranks can make groups."""
    ranks_to_spoil.run(parts_of_a_default_group_that_is_split)


def timeouts_of_made_groups() -> None:
    world, timeout = dist.group.WORLD, timedelta(minutes=7)
    dist.distributed_c10d._set_pg_timeout(timeout, world)
    everyone, alone = (TorchCollectives.over(ranks, [world]) for ranks in ([0, 1], [dist.get_rank()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_splits", lambda: True)
        patch.setattr(collectives, "_OWN_GROUPS", WeakKeyDictionary())
        part = TorchCollectives().part([[0], [1]])
    for made in (everyone, alone, part):
        (backend,) = {made.process_group._get_backend(device) for device in made.process_group._device_types}
        assert backend.options._timeout == timeout
    assert not collectives._splits()
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) sets it
    assert collectives._splits()


@pytest.mark.on_gloo
def test_groups_made_have_the_timeout_of_theirs(ranks_to_spoil: RankPool) -> None:
    """Groups are split from theirs if that has a device."""
    ranks_to_spoil.run(timeouts_of_made_groups)
