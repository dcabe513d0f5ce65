"""State of FSDP2's optimizer as torch saves and loads it: in its dtype, and refused where it does not fit.

That training goes on from it, with every sharding and rule, is in test_checkpoints.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lwopt_backend.engines.fsdp2 import state as mesh_state
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.support.cells import cells
from tests.support.checkpoint_contents import same
from tests.support.counted import Counted
from tests.support.fsdp2 import BesideTwin, backward, layer_wise, mesh_of, shard, whole
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.references import SECTIONS


def whole_state(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    names = [name for group in optimizer._names for name in group]
    state = optimizer.state_dict()["state"]
    return {name: {k: whole(v) for k, v in state[index].items()} for index, name in enumerate(names)}


@pytest.mark.parametrize(("state_dtype", "dtype"), [("float32", torch.float32), ("parameter", torch.bfloat16)])
@on_ranks(2)
def test_state_keeps_its_dtype(state_dtype: str, dtype: torch.dtype) -> None:
    """With bf16 parameters."""
    run = BesideTwin("rows", "bf16 parameters", state_dtype=state_dtype)
    run.train(2)
    other = layer_wise(run.model, state_dtype=state_dtype)
    other.load_state_dict(run.optimizer.state_dict())
    found = whole_state(other)
    assert same(found, whole_state(run.optimizer))
    dtypes = {key: tensor.dtype for state in found.values() for key, tensor in state.items()}
    assert dtypes == {"momentum_buffer": dtype, "exp_avg": dtype, "exp_avg_sq": dtype, "step": torch.float32}


def spoiled(case: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    saved = optimizer.state_dict()
    saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
    if case == "key":
        saved["state"][0]["momentum"] = saved["state"][0].pop("momentum_buffer")
    if case == "a key less":
        del saved["state"][5]["step"]
    if case == "shape":
        saved["state"][0]["momentum_buffer"] = saved["state"][1]["momentum_buffer"]
    if case == "AdamW's":
        adamw = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        adamw.step()
        return adamw.state_dict()
    if case == "rules":
        saved["param_groups"].reverse()
        for group, theirs in zip(saved["param_groups"], optimizer.state_dict()["param_groups"]):
            group["params"] = theirs["params"]
    if case == "groups":
        saved["param_groups"][0]["params"].pop()
    return saved


WRONG = {
    "AdamW's": "was written by another optimizer: its param groups have no 'rule'; load the model's weights alone",
    "key": "parameter 'layers.0.weight': expected state ['momentum_buffer'], the checkpoint has ['momentum']; train it",
    "a key less": "expected state ['exp_avg', 'exp_avg_sq', 'step'], the checkpoint has ['exp_avg', 'exp_avg_sq']",
    "shape": "'layers.0.weight': expected 'momentum_buffer' as a DTensor of shape (63, 24) placed as (Shard(dim=0),), "
    "the checkpoint has a DTensor of shape (41, 63)",
    "rules": "param group 0: expected rule muon, the checkpoint has adamw",
    "groups": "param group 0: expected number of parameters 4, the checkpoint has 3",
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(2)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    model = shard("rows", "fp32").model
    optimizer = layer_wise(model)
    saved, before = spoiled(case, model, optimizer), whole_state(optimizer)
    with pytest.raises(Exception) as error:
        optimizer.load_state_dict(saved)
    assert WRONG[case] in str(error.value)
    assert same(whole_state(optimizer), before)


@on_ranks(2)
def test_structure_is_not_loaded() -> None:
    """Hyperparameters come from the checkpoint; what trains which parameter does not, nor what is no group's."""
    optimizer = layer_wise(shard("rows", "fp32").model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    del saved["param_groups"][0]["rule"]
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["rule"], optimizer.param_groups[0]["lr"]) == ("muon", 0.7)
    assert optimizer._matrix_rules()[0].lr == 0.7


@on_ranks(4)
@cells(sharding=["rows", "hybrid", "columns"], most=[100, 1000])
def test_owner_state_travels_in_rounds_that_cut_its_tensors(sharding: str, most: int) -> None:
    """No rank sends more at once, nor receives more than that and what rounding to whole bytes adds.

    Nor does it copy more at once than the rows of that, from tensors that are not contiguous.
    """
    options = {"matrix": SECTIONS["soap"], "elementwise": "adamw", "report": False}
    sharded = shard(sharding, "fp32")
    optimizer = LayerWiseOptimizer(sharded.model, **options)
    for step in range(2):  # after which SOAP's eigenvectors are not contiguous
        backward(sharded, step, "fp32")
        optimizer.step()
    expected = whole_state(optimizer)
    assert max(tensor.nbytes for state in expected.values() for tensor in state.values()) > 10 * most
    other = LayerWiseOptimizer(sharded.model, **options)
    copied, as_bytes = [0], mesh_state._bytes

    def watched(tensor: Tensor) -> Tensor:
        copied.append(0 if tensor.is_contiguous() else tensor.nbytes)
        return as_bytes(tensor)

    with Counted() as counted, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_state, "BUCKET_BYTES", most)
        patch.setattr(mesh_state, "_bytes", watched)
        assert same(whole_state(optimizer), expected)
        other.load_state_dict(optimizer.state_dict())
    tensors = sum(len(state) for state in expected.values())
    assert counted.most_bytes <= 2 * most + 4 * tensors and counted.most_in_flight == 1
    assert same(whole_state(other), expected)
    row = max(tensor.nbytes // len(tensor) for state in expected.values() for tensor in state.values() if tensor.ndim)
    assert 0 < max(copied) <= most + 2 * row


class Weighted(nn.Linear):
    def forward(self, step: int) -> Tensor:
        """Linear in the parameters, with multiples of 3 / 8: means over 2 and 3 ranks are exact."""
        values = torch.Generator().manual_seed(step)
        sums = [(p * torch.randint(-9, 9, p.shape, generator=values)).sum() for p in self.parameters()]
        return torch.stack(sums).sum() * 3 / 8


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Weighted(6, 9), Weighted(9, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, step: int) -> Tensor:
        return self.first(step) + self.second(step + 1) + self.scale.sum()


ANOTHER = {"params": "first.weight", "matrix": {"name": "torch_optimizer", "class": "torch.optim.Adagrad", "lr": 0.01}}
LACKING = {"ignored parameter": {}, "two rules": {"overrides": [ANOTHER]}, "two meshes": {}, "one matrix": {}}


def of_two(rule: str, lacking: str) -> tuple[nn.Module, Any]:
    model, world = Two(), mesh_of()
    if lacking == "one matrix":  # with three ranks, one owns it and two own nothing
        model.second.requires_grad_(False)
    if lacking == "two meshes":
        fully_shard(model.second, mesh=mesh_of(1, dist.get_world_size(), names=("replicate", "shard")))
    fully_shard(model, mesh=world, ignored_params={model.scale} if lacking == "ignored parameter" else None)
    options = {**LACKING[lacking], "exclude": ["scale"], "report": False}
    return model, LayerWiseOptimizer(model, SECTIONS[rule], **options)


def train_two(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param.detach()) for name, param in model.named_parameters()}


def tours_of(rule: str, folder: str, steps_of: Callable[..., Any]) -> dict[tuple[str, int], dict[str, Tensor]]:
    """By what lacks and the number of steps before the save, the weights of runs that go on after it."""
    found = {}
    for lacking, steps in itertools.product(LACKING, (0, 2)):
        model, optimizer = of_two(rule, lacking)
        steps_of(model, optimizer, steps, f"{folder}/{lacking} {steps}")
        found[lacking, steps] = train_two(model, optimizer, range(steps, steps + 2))
    return found


def save_two(model: nn.Module, optimizer: Any, steps: int, folder: str) -> None:
    train_two(model, optimizer, range(steps))
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=folder)


def load_two(model: nn.Module, optimizer: Any, steps: int, folder: str) -> None:
    train_two(model, optimizer, range(7, 8))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.parametrize("rule", ["normuon", "adamuon", "soap", "shampoo", "a class"])
def test_owner_state_is_saved_where_a_mesh_has_none(rank_pools: dict[int, RankPool], tmp_path: Path, rule: str) -> None:
    """``state_dict`` raised AttributeError, so that a run of days could not be saved, if one of its meshes, or its
    plain parameters, had no matrix with owner state."""
    expected = rank_pools[2].run(tours_of, rule, str(tmp_path), save_two)[0]
    for ranks in (2, 3):
        for found in rank_pools[ranks].run(tours_of, rule, str(tmp_path), load_two):
            apart = {tour: largest_difference(found[tour], weights) for tour, weights in expected.items()}
            assert set(apart.values()) == {0.0}, (ranks, apart)


@on_ranks(2)
def test_optimizer_state_says_where_owner_state_is() -> None:
    """Loops that move state pass it, as Lightning's do when a run begins. What reads it or changes it raises."""
    model, optimizer = of_two("soap", "ignored parameter")
    train_two(model, optimizer, range(2))
    before = whole_state(optimizer)
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to("cpu")
    assert same(whole_state(optimizer), before)
    state = optimizer.state[model.second.weight]
    key = next(key for key, value in state.items() if value.is_meta)
    told = f"{key!r} of 'second.weight' is at the owner of a matrix; optimizer.state_dict"
    for wrong in (state[key].sum, state[key].zero_, lambda: state.update({key: torch.empty(state[key].shape)})):
        with pytest.raises(RuntimeError, match=re.escape(told)):
            wrong()
    with pytest.raises(RuntimeError, match="cannot be taken out; reset_state"):
        del state[key]
    assert same(whole_state(optimizer), before)


@on_ranks(2)
def test_a_state_dict_without_state_starts_fresh() -> None:
    """What owners keep stayed, beside momentum that was reset."""
    model, optimizer = of_two("normuon", "two meshes")
    train_two(model, optimizer, range(2))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert same(whole_state(optimizer), whole_state(of_two("normuon", "two meshes")[1]))
