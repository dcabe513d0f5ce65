"""torch.distributed.checkpoint: saved on some ranks, loaded on others, and training goes on as if nothing happened."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.fsdp2 import Sharded, backward, distribute_like, layer_wise, named, shard, weights_of
from tests.ranks import RankPool

SAVED_AFTER, STEPS = 3, 2


def train(sharded: Sharded, optimizer: Any, steps: range) -> None:
    """From gradients that are the same however the model is sharded: no sum of any ranks' is rounded."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _, param in named(sharded.model):
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param.dtype)
            part = distribute_like(grad, param)
            param.grad = DTensor.from_local(
                part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        optimizer.step()
        optimizer.zero_grad()


def whole_state(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    names = [name for group in optimizer._names for name in group]
    state = optimizer.state_dict()["state"]
    return {
        name: {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state[index].items()}
        for index, name in enumerate(names)
    }


def results(sharded: Sharded, optimizer: Any) -> dict[str, Any]:
    return {"weights": weights_of(sharded.model), "state": whole_state(optimizer)}


def options_of(kind: str) -> StateDictOptions:
    return StateDictOptions(
        flatten_optimizer_state_dict="flat" in kind,
        full_state_dict="full" in kind,
        cpu_offload="full" in kind,
        broadcast_from_rank0="full" in kind,
    )


def save(folder: str, sharding: str, kind: str, make: Callable[[nn.Module], Any] = layer_wise) -> dict[str, Any]:
    """Train and save; then train on, for comparison."""
    sharded = shard(sharding, "fp32")
    optimizer = make(sharded.model)
    train(sharded, optimizer, range(SAVED_AFTER))
    options = options_of(kind)
    model_state = get_model_state_dict(sharded.model, options=options)
    optimizer_state = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    if "full" in kind:
        if dist.get_rank() == 0:
            torch.save(state, Path(folder) / "full.pt")
        dist.barrier()
    elif "async" in kind:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    train(sharded, optimizer, range(SAVED_AFTER, SAVED_AFTER + STEPS))
    return results(sharded, optimizer)


def load(folder: str, sharding: str, kind: str, make: Callable[[nn.Module], Any] = layer_wise) -> dict[str, Any]:
    """Load into a fresh model and optimizer, with other hyperparameters, and train on."""
    sharded = shard(sharding, "fp32")
    with torch.no_grad():
        for param in sharded.model.parameters():
            param.add_(1.0)
    optimizer = make(sharded.model)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    options = options_of(kind)
    if kind == "flat full":  # torch 2.13 cannot shard a flat one while loading, not for its own AdamW either
        state = torch.load(Path(folder) / "full.pt")
        set_model_state_dict(sharded.model, state["model"], options=options)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
    elif "full" in kind:
        state = torch.load(Path(folder) / "full.pt") if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
    else:
        state = {
            "model": get_model_state_dict(sharded.model, options=options),
            "optimizer": get_optimizer_state_dict(sharded.model, optimizer, options=options),
        }
        dcp.load(state, checkpoint_id=folder)
    if kind != "flat full":
        set_model_state_dict(sharded.model, state["model"], options=options)
    set_optimizer_state_dict(sharded.model, optimizer, state["optimizer"], options=options)
    assert optimizer.param_groups[0]["lr"] == rate
    train(sharded, optimizer, range(SAVED_AFTER, SAVED_AFTER + STEPS))
    return results(sharded, optimizer)


def assert_equal(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in expected["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name
    for name, state in expected["state"].items():
        assert ours["state"][name].keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(ours["state"][name][key], tensor), (name, key)
    assert float(expected["state"]["lm_head.weight"]["step"]) == SAVED_AFTER + STEPS


WAYS = [
    (2, "rows", 4, "rows"),
    (4, "rows", 3, "rows"),
    (3, "rows", 1, "rows"),
    (1, "rows", 2, "rows"),
    (4, "hybrid", 2, "rows"),
    (4, "hybrid", 3, "rows"),
    (2, "rows", 4, "hybrid"),
    (4, "tensor parallel", 2, "columns"),
    (2, "columns", 4, "tensor parallel"),
    (4, "several roots", 4, "hybrid"),
]


@pytest.mark.parametrize("kind", ["nested", "flat", "async", "full", "flat full"])
@pytest.mark.parametrize(("before", "sharding", "after", "other"), WAYS, ids=lambda value: str(value))
def test_training_goes_on_equally(
    rank_pools: dict[int, RankPool], before: int, sharding: str, after: int, other: str, kind: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = pool(rank_pools, before).run(save, folder, sharding, kind)[0]
        for answer in pool(rank_pools, after).run(load, folder, other, kind):
            assert_equal(answer, expected)


def pool(pools: dict[int, RankPool], world_size: int) -> RankPool:
    if world_size not in pools:
        pools[world_size] = RankPool(world_size)
    return pools[world_size]


def save_fresh() -> dict[str, Any]:
    """What an optimizer that has not stepped saves: complete, and with counters at zero."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    state = get_optimizer_state_dict(sharded.model, optimizer)["state"]
    return {
        name: {k: float(v.full_tensor().abs().sum() if isinstance(v, DTensor) else v) for k, v in s.items()}
        for name, s in state.items()
    }


def test_state_is_complete_before_the_first_step(ranks: RankPool) -> None:
    for state in ranks.run(save_fresh):
        assert len(state) == 11
        assert state["layers.0.weight"] == {"momentum_buffer": 0.0}
        assert state["lm_head.weight"] == {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}


def load_dtypes(state_dtype: str) -> set[tuple[str, str, str]]:
    """Parameter, state key and its dtype after a round trip, with bf16 parameters."""
    sharded = shard("rows", "bf16 parameters")
    optimizer = layer_wise(sharded.model, state_dtype=state_dtype)
    train(sharded, optimizer, range(2))
    before = whole_state(optimizer)
    saved = optimizer.state_dict()
    other = layer_wise(sharded.model, state_dtype=state_dtype)
    other.load_state_dict(saved)
    after = whole_state(other)
    for name, state in before.items():
        for key, tensor in state.items():
            assert torch.equal(tensor, after[name][key]), (name, key)
    train(sharded, other, range(2, 3))
    return {(key, str(tensor.dtype)) for state in after.values() for key, tensor in state.items()}


def test_state_keeps_its_dtype(ranks: RankPool) -> None:
    wide, narrow = (ranks.run(load_dtypes, dtype)[0] for dtype in ("float32", "parameter"))
    assert wide == {(key, "torch.float32") for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")}
    assert narrow == {(key, "torch.bfloat16") for key in ("momentum_buffer", "exp_avg", "exp_avg_sq")} | {
        ("step", "torch.float32")
    }


def wide_state_is_better() -> bool:
    """bf16 weights with fp32 state move as fp32 state says: unlike bf16 state, whose small changes are rounded away."""
    sharded = shard("rows", "bf16 parameters")
    optimizer = layer_wise(sharded.model, state_dtype="float32")
    backward(sharded, 0)
    param = sharded.model.lm_head.weight
    grad = param.grad.to_local().float()
    before = param.to_local().detach().float()
    optimizer.step()
    moved = before * (1 - 3e-3 * 0.1) - 3e-3 * grad / (grad.abs() + 1e-8)
    return torch.equal(param.to_local().detach(), moved.bfloat16())


def test_with_wide_state_the_step_is_computed_wide_and_rounded_once(ranks: RankPool) -> None:
    assert ranks.run(wide_state_is_better) == [True, True]


def load_wrong(case: str) -> None:
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    saved = optimizer.state_dict()
    saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
    if case == "key":
        saved["state"][0]["momentum"] = saved["state"][0].pop("momentum_buffer")
    if case == "a key less":
        del saved["state"][5]["step"]
    if case == "shape":
        saved["state"][0]["momentum_buffer"] = saved["state"][1]["momentum_buffer"]
    if case == "AdamW's":
        adamw = torch.optim.AdamW(sharded.model.parameters())
        for param in sharded.model.parameters():
            param.grad = torch.zeros_like(param)
        adamw.step()
        saved = adamw.state_dict()
    if case == "rules":
        saved["param_groups"].reverse()
        for group, theirs in zip(saved["param_groups"], optimizer.state_dict()["param_groups"]):
            group["params"] = theirs["params"]
    if case == "groups":
        saved["param_groups"][0]["params"].pop()
    before = whole_state(optimizer)
    try:
        optimizer.load_state_dict(saved)
    finally:
        after = whole_state(optimizer)
        assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


WRONG = {
    "AdamW's": "was written by another optimizer: its 1 param group(s) have no 'rule', and its state is ['exp_avg', "
    "'exp_avg_sq', 'step']; expected 2 groups and ['exp_avg', 'exp_avg_sq', 'momentum_buffer', 'step']. Load the model",
    "key": "placements (Shard(dim=0),) on a mesh of ranks 0-1, dimensions ('dp',): expected ['momentum_buffer'], "
    "found ['momentum']",
    "a key less": "expected ['exp_avg', 'exp_avg_sq', 'step'], found ['exp_avg', 'exp_avg_sq']",
    "shape": "'momentum_buffer': expected a DTensor of shape (63, 24), found a DTensor of shape (41, 63)",
    "rules": "follow the rules ['adamw', 'muon'], this optimizer's ['muon', 'adamw']",
    "groups": "hold [3, 7] parameters, this optimizer's hold [4, 7]",
}


@pytest.mark.parametrize("case", WRONG)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(ranks: RankPool, case: str) -> None:
    for error in ranks.errors(load_wrong, case):
        assert WRONG[case] in error


def load_structure() -> tuple[str, float, float]:
    """Hyperparameters come from the checkpoint; what trains which parameter does not, nor what is no group's."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    del saved["param_groups"][0]["rule"]
    optimizer.load_state_dict(saved)
    return optimizer.param_groups[0]["rule"], optimizer.param_groups[0]["lr"], optimizer._matrix_rules()[0].lr


def test_structure_is_not_loaded(ranks: RankPool) -> None:
    assert ranks.run(load_structure) == [("muon", 0.7, 0.7)] * 2
