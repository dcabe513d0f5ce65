"""What a review found: group names, gradients that ranks lack, wide state, edited groups, odd meshes, lenient loads."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.fsdp2 import Sharded, Twin, backward, fsdp, layer_wise, mesh_of, named, shard
from tests.models import UnevenLM, batch
from tests.ranks import RankPool


def knowing_different_numbers_of_groups() -> float:
    """torch names a group by how many groups its maker knows; ranks that know different numbers must still meet."""
    for _ in range(1 + dist.get_rank() % 2):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = mesh_of(2, 2, names=("outer", "inner"))["inner"]
    model = UnevenLM()
    fsdp(model, mesh)
    optimizer, twin = layer_wise(model), Twin(model)
    backward(Sharded(model, 4, dist.get_rank()), 0)
    twin.step_with_gradients_of(model)
    optimizer.step()
    return twin.difference(model)


def test_ranks_that_know_different_numbers_of_groups_meet(rank_pools: dict[int, RankPool]) -> None:
    pool = RankPool(4)  # of its own: the groups are to be made here
    try:
        assert pool.run(knowing_different_numbers_of_groups) == [0.0] * 4
    finally:
        pool.remove()


def norm_with_missing_gradients(names: tuple[str, ...]) -> tuple[float, float]:
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    backward(sharded, 0)
    squares = 0.0
    for name, param in named(sharded.model):
        if dist.get_rank() == 1 and (name in names or not names):
            param.grad.to_local().zero_()
        squares += float(param.grad.full_tensor().square().sum())
    for name, param in named(sharded.model):
        if dist.get_rank() == 1 and (name in names or not names):
            param.grad = None
    return float(optimizer.clip_grad_norm_(1.0)), squares**0.5


@pytest.mark.parametrize("names", [("layers.0.weight", "lm_head.weight"), ()], ids=["some", "all"])
def test_the_norm_counts_gradients_that_a_rank_lacks_as_zero(ranks: RankPool, names: tuple[str, ...]) -> None:
    for ours, expected in ranks.run(norm_with_missing_gradients, names):
        assert ours == pytest.approx(expected, rel=1e-6)


def wide_matrix_step() -> bool:
    """With fp32 state a bf16 matrix is what the fp32 step gives, rounded once."""
    sharded = shard("rows", "bf16 parameters")
    optimizer = layer_wise(sharded.model, state_dtype="float32")
    backward(sharded, 0)
    wide = {name: nn.Parameter(param.detach().full_tensor().float()) for name, param in named(sharded.model)}
    matrix = wide["layers.2.weight"]
    matrix.grad = sharded.model.layers[2].weight.grad.full_tensor().float()
    torch.optim.Muon([matrix], lr=0.02, weight_decay=0.1).step()
    optimizer.step()
    return torch.equal(sharded.model.layers[2].weight.detach().full_tensor(), matrix.detach().bfloat16())


def test_wide_state_rounds_a_matrix_once(ranks: RankPool) -> None:
    assert ranks.run(wide_matrix_step) == [True, True]


def edited_while_attached() -> list[str]:
    """A matrix is taken out of its group after attaching; the others go on, under their own names."""
    sharded = shard("rows", "fp32")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    optimizer.attach(sharded.model)
    for step in range(3):
        backward(sharded, step)
        if step == 1:
            taken = optimizer.param_groups[0]["params"].pop(0)
            assert taken is sharded.model.layers[0].weight
        if step >= 1:
            taken.grad = None
        twin.step_with_gradients_of(sharded.model)
        optimizer.step()
        optimizer.zero_grad()
    assert twin.difference(sharded.model) == 0.0
    return [member.name for stepper in optimizer._steppers for member in stepper.members]


def test_a_parameter_taken_out_of_its_group(ranks: RankPool) -> None:
    for names in ranks.run(edited_while_attached):
        assert "layers.0.weight" not in names and names.count("layers.2.weight") == 1 and len(names) == 10


def descending_mesh() -> None:
    model = UnevenLM(hidden=(64, 40))
    fsdp(model, DeviceMesh("cpu", [1, 0]))
    layer_wise(model)


def test_a_mesh_whose_ranks_do_not_ascend_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(descending_mesh):
        assert "the mesh's ranks do not ascend along dimension 0" in error or "rank" in error
    assert any("do not ascend" in error for error in ranks.errors(descending_mesh))


class WithScale(nn.Module):
    """A parameter without dimensions, which FSDP2 cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(8, 8)


def scalar_parameter(dtype: torch.dtype) -> bool:
    model = WithScale().to(dtype)
    fully_shard(model, mesh=mesh_of(2), ignored_params={model.scale})
    optimizer = LayerWiseOptimizer(model, elementwise_lr=0.1, report=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return bool(model.scale < 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_dimensions(ranks: RankPool, dtype: torch.dtype) -> None:
    assert ranks.run(scalar_parameter, dtype) == [True, True]


class Narrow(nn.Module):
    """Matrices of one column and of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.column = nn.Linear(1, 9, bias=False)
        self.row = nn.Linear(9, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.row(self.column(x))


def narrow(attach: bool) -> float:
    model = fully_shard(Narrow(), mesh=mesh_of(dist.get_world_size()))
    twin_params = [nn.Parameter(param.detach().full_tensor()) for param in model.parameters()]
    optimizer = LayerWiseOptimizer(model, lr=0.02, include=["column.weight", "row.weight"], report=False)
    twin = torch.optim.Muon(twin_params, lr=0.02)
    if attach:
        optimizer.attach(model)
    for step in range(3):
        model(torch.full((4, 1), step + 1.0)).square().sum().backward()
        for param, twin_param in zip(model.parameters(), twin_params):
            twin_param.grad = param.grad.full_tensor()
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
    return max(float((p.detach().full_tensor() - t).abs().max()) for p, t in zip(model.parameters(), twin_params))


@pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
@pytest.mark.parametrize("attach", [False, True])
def test_matrices_of_one_column_and_of_one_row(ranks: RankPool, attach: bool) -> None:
    assert ranks.run(narrow, attach) == [0.0] * ranks.world_size


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


def pickled() -> None:
    pickle.dumps(layer_wise(shard("rows", "fp32").model))


def test_it_is_not_pickled(ranks: RankPool) -> None:
    for error in ranks.errors(pickled):
        assert "cannot be copied or pickled; use state_dict()" in error


def replaces(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replaces_a_module(model: nn.Module) -> None:
    model.gate = nn.Linear(5, 2)


def unfreezes(model: nn.Module) -> None:
    model.layers[0].bias.requires_grad_(True)


CHANGES = {
    replaces: "parameters 'embedding.weight', 'layers.0.weight', 'layers.2.weight', 'layers.2.bias', 'layers.4.weight' "
    "and 4 more are no longer in the model (replaced)",
    replaces_a_module: "parameters 'gate.weight', 'gate.bias' are no longer in the model (replaced)",
    unfreezes: "parameter 'layers.0.bias' is trained now, but not when the optimizer was made",
}


def step_of_a_changed_model(change: Callable[[nn.Module], None], everywhere: bool, attach: bool) -> tuple[str, float]:
    """What the third step says, which changes no weight, and how far the first two are from a twin's.

    Before each of them a forward pass without gradients leaves the root's parameters unsharded.
    """
    sharded = shard("rows", "frozen")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    if attach:
        optimizer.attach(sharded.model)
    for step in range(2):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        with torch.no_grad():
            sharded.model(*batch(0, 4))
        optimizer.step()
        optimizer.zero_grad()
    difference = twin.difference(sharded.model)
    if everywhere or dist.get_rank() == 1:
        change(sharded.model)
    backward(sharded, 2)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.to_local().clone() for param in params]
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert all(torch.equal(param.to_local(), old) for param, old in zip(params, before))
    return str(caught.value), difference


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_parameter_that_would_no_longer_be_trained_is_an_error_on_every_rank(
    ranks: RankPool, change: Callable[[nn.Module], None]
) -> None:
    # On one rank alone other gradients than before would not get through FSDP2's own reduction.
    for everywhere, attach in ((True, False), (True, True), *([(False, False)] if change is replaces else [])):
        for said, difference in ranks.run(step_of_a_changed_model, change, everywhere, attach):
            assert said.startswith(f"LayerWiseOptimizer: {CHANGES[change]}"), said
            assert said.endswith(f"; make the optimizer after the last such change (rank {0 if everywhere else 1})")
            assert difference == 0.0


def frozen_for_a_step() -> float:
    """A parameter that is frozen after the optimizer was made, for the second of three steps, as under torch."""
    sharded = shard("rows", "fp32")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    for step in range(3):
        sharded.model.layers[2].weight.requires_grad_(step != 1)
        backward(sharded, step)
        assert (sharded.model.layers[2].weight.grad is None) == (step == 1)
        for name, param in named(sharded.model):
            twin.params[name].grad = None if param.grad is None else param.grad.full_tensor()
        for each in (*twin.optimizers, optimizer):
            each.step()
            each.zero_grad()
    return twin.difference(sharded.model)


def test_a_parameter_that_is_frozen_for_a_step_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(frozen_for_a_step) == [0.0, 0.0]
