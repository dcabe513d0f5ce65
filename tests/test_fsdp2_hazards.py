"""What a checkpoint lacks, and parameters that are frozen after the optimizer was made."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.fsdp2 import backward, layer_wise, shard
from tests.ranks import RankPool


def lenient_load(case: str) -> tuple[list[str], bool]:
    """The warnings, and whether a step follows."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    backward(sharded, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
    if case == "a parameter without state":
        del saved["state"][1]
    if case == "an option less":
        saved["param_groups"] = [{k: v for k, v in g.items() if k != "ns_steps"} for g in saved["param_groups"]]
    if case == "no state at all":
        saved["state"] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    momentum = optimizer.state[sharded.model.layers[0].weight]["momentum_buffer"].to_local()
    fresh = bool((momentum == 0).all()) and float(optimizer.state[sharded.model.lm_head.weight]["step"]) == 0
    backward(sharded, 1)
    optimizer.step()
    return [str(warning.message) for warning in caught if "checkpoint" in str(warning.message)], fresh


def test_loading_what_lacks_something(ranks: RankPool) -> None:
    expected = "the checkpoint has no state of ['layers.2.weight']; theirs is left as it is"
    assert ranks.run(lenient_load, "a parameter without state") == [([expected], False)] * 2
    assert ranks.run(lenient_load, "an option less") == [([], False)] * 2
    assert ranks.run(lenient_load, "no state at all") == [([], True)] * 2


def froze_later() -> bool:
    """A parameter that is frozen after the optimizer was made keeps its state, in a checkpoint as well."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    sharded.model.layers[2].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved: Any = get_optimizer_state_dict(sharded.model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
    return len(saved["state"]) >= 10


def test_freezing_later(ranks: RankPool) -> None:
    assert ranks.run(froze_later) == [True, True]
