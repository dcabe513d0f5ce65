"""Going on with ours, on FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lwopt_backend.migration import from_checkpoint, load_named_state
from tests.fsdp2 import MATRIX_NAMES, Twin, backward, distribute_like, layer_wise, named, shard
from tests.migration import WRONG, both_sizes, forget, named_state, numbers_for, spoil, whole
from tests.ranks import RankPool


def twin_on_fsdp2(steps: int) -> tuple[Any, Twin]:
    """A sharded model after ``steps`` of torch's optimizers on whole parameters."""
    sharded = shard("rows", "fp32")
    twin = Twin(sharded.model)
    for step in range(steps):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        with torch.no_grad():
            for name, param in named(sharded.model):
                param.to_local().copy_(distribute_like(twin.params[name].detach(), param))
                param.grad = None
    return sharded, twin


def names_in(twin: Twin) -> list[str]:
    return list(twin.params)


def differ_on_fsdp2() -> tuple[float, bool]:
    sharded, twin = twin_on_fsdp2(3)
    optimizer = layer_wise(sharded.model)
    options = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    given = named_state(*twin.optimizers, names_in(twin))
    assert load_named_state(optimizer, given) == []
    forget(given)
    for state in optimizer.state.values():
        for key, tensor in state.items():
            assert isinstance(tensor, DTensor) == (key != "step")
            part = tensor if key == "step" else tensor.to_local()
            assert part.untyped_storage().nbytes() == part.nbytes, "the whole tensor is kept in memory"
    for step in range(3, 6):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        optimizer.step()
        optimizer.zero_grad()
    same = options == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return twin.difference(sharded.model), same


@both_sizes
def test_fsdp2_goes_on_bit_by_bit(ranks: RankPool) -> None:
    assert set(ranks.run(differ_on_fsdp2)) == {(0.0, True)}


def part_on_fsdp2() -> tuple[list[str], list[bool]]:
    sharded, twin = twin_on_fsdp2(2)
    optimizer = layer_wise(sharded.model)
    backward(sharded, 2)
    optimizer.step()
    states = {name: optimizer.state[param] for name, param in named(sharded.model)}
    before = copy.deepcopy({name: {k: whole(v) for k, v in state.items()} for name, state in states.items()})
    state = named_state(*twin.optimizers, names_in(twin))
    del state["gate.weight"]
    left = load_named_state(optimizer, state, strict=False)
    found = {name: {k: whole(v) for k, v in optimizer.state[p].items()} for name, p in named(sharded.model)}
    kept = all(torch.equal(found["gate.weight"][k], v) for k, v in before["gate.weight"].items())
    taken = all(torch.equal(found[name][k], v) for name, of in state.items() for k, v in of.items())
    return left, [kept, taken]


def test_a_part_is_loaded_on_fsdp2(ranks: RankPool) -> None:
    assert ranks.run(part_on_fsdp2) == [(["gate.weight"], [True, True])] * 2


def load_wrong_on_fsdp2(what: str, rank: int | None = None) -> None:
    sharded, twin = twin_on_fsdp2(1)
    options = {"matrix": "normuon"} if what == "rule" else {}
    optimizer = layer_wise(sharded.model) if not options else normuon_on_fsdp2(sharded.model)
    state = named_state(*twin.optimizers, names_in(twin))
    if rank in (None, dist.get_rank()):
        spoil(state, what)
    load_named_state(optimizer, state)


def normuon_on_fsdp2(model: nn.Module) -> Any:
    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer as OnFSDP2

    return OnFSDP2(model, "normuon", report=False)


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_on_fsdp2(ranks: RankPool, what: str) -> None:
    for error in ranks.errors(load_wrong_on_fsdp2, what):
        assert error.startswith("ValueError: load_named_state: ") and WRONG[what] in error


def test_what_one_rank_is_given_wrong_on_fsdp2(ranks: RankPool) -> None:
    first, second = ranks.errors(load_wrong_on_fsdp2, "shape", 1)
    assert WRONG["shape"] in second and "rank 1 failed with" in first


def load_into_bf16_on_fsdp2() -> list[bool]:
    """State that is kept in bfloat16 is rounded; the counter is not."""
    sharded = shard("rows", "bf16 parameters")
    optimizer = layer_wise(sharded.model)
    shapes = {name: tuple(param.shape) for name, param in named(sharded.model)}
    state = numbers_for(shapes, MATRIX_NAMES.__contains__)
    load_named_state(optimizer, state)
    found = {name: {k: whole(v) for k, v in optimizer.state[p].items()} for name, p in named(sharded.model)}
    return [
        torch.equal(found[name][key], value.to(torch.float32 if key == "step" else torch.bfloat16))
        for name, of_name in state.items()
        for key, value in of_name.items()
    ]


def test_state_on_fsdp2_keeps_its_dtype(ranks: RankPool) -> None:
    for right in ranks.run(load_into_bf16_on_fsdp2):
        assert len(right) == 4 + 3 * 7 and all(right)


def load_experts_on_fsdp2() -> None:
    sharded = shard("expert parallel", "fp32")
    optimizer = layer_wise(sharded.model)
    shapes = {name: tuple(param.shape) for name, param in named(sharded.model)}
    load_named_state(optimizer, numbers_for(shapes, MATRIX_NAMES.__contains__))


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_experts_under_one_name_are_refused_on_fsdp2(ranks: RankPool) -> None:
    for error in ranks.errors(load_experts_on_fsdp2):
        assert "ranks have different parameters (experts) under the same names" in error


def read_sharded_state() -> None:
    """torch.optim.Muon on FSDP2 has DTensors."""
    sharded = shard("rows", "fp32")
    params = dict(named(sharded.model))
    muon = torch.optim.Muon([("layers.0.weight", params["layers.0.weight"])])
    backward(sharded, 0)
    muon.step()
    from_checkpoint(muon.state_dict())


def test_sharded_state_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(read_sharded_state):
        assert "'momentum_buffer' is a DTensor, of which every rank has a part; save it whole" in error
