"""Modules of different kinds trained as one: owned storage, FSDP2, and torch's optimizers under DDP or on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import ModuleOptimizers
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import SHARDINGS, distribute_like, layer_wise, named, shard, whole
from tests.fsdp2 import backward as fsdp2_backward
from tests.modules import (
    NAMES,
    ONE_AND_TWO,
    TWO_AND_TWO,
    OneProcess,
    Split,
    backward,
    factor_of,
    group_of,
    modules_of,
    owned,
)
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON

four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True)
_MESHES: dict[Any, DeviceMesh] = {}


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def owns(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    return module, owned(module, group)


def shards(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    if group not in _MESHES:
        _MESHES[group] = DeviceMesh.from_group(group, "cpu")
    mesh = _MESHES[group]
    for layer in module.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    elementwise = {"name": "adamw", **ADAMW}
    return module, fsdp2.LayerWiseOptimizer(module, **MUON, elementwise=elementwise, report=False)


def copies(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    optimizer = sgd(list(module.parameters()))
    return DistributedDataParallel(module, process_group=group), optimizer


def alone(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    return module, sgd(list(module.parameters()))


Made = tuple[dict[str, nn.Module], ModuleOptimizers]


def make(split: Split, vision: Callable[..., Any], language: Callable[..., Any]) -> Made:
    modules, made = modules_of(split, exact=False), {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for name, how in zip(NAMES, (vision, language)):
        group = group_of(split.ranks(name), name)
        if name in modules:
            made[name], optimizers[name] = how(modules[name], group)
    return made, ModuleOptimizers(optimizers)


def steps(split: Split, made: Made, single: OneProcess, numbers: range) -> float:
    """Clipped steps beside one process, and how far the norms are apart; with two ranks of each sums are exact."""
    modules, optimizers = made
    worst = 0.0
    for step in numbers:
        backward(split, modules, step)
        single.gradients(split, step)
        zeros = {n: sum(int((p.grad == 0).sum()) for p in single.modules[n].parameters()) for n in NAMES}
        assert optimizers.zero_counts() == zeros
        norm = optimizers.clip_grad_norm_(0.05).item()
        worst = max(worst, abs(norm / single.norm() - 1))
        single.scale(factor_of(norm, 0.05))
        assert optimizers.step() is True
        optimizers.zero_grad()
        single.step()
    return worst


def difference(modules: dict[str, nn.Module], single: OneProcess) -> float:
    worst = 0.0
    for name, module in modules.items():
        theirs = dict(single.modules[name].named_parameters())
        for of_param, param in module.named_parameters():
            expected = theirs[of_param.removeprefix("module.")]
            worst = max(worst, float((whole(param) - expected).detach().abs().max()))
    return worst


KINDS = {
    "FSDP2 and owned": (shards, owns),
    "owned and FSDP2": (owns, shards),
    "two on FSDP2": (shards, shards),
    "DDP and owned": (copies, owns),
    "DDP and FSDP2": (copies, shards),
}


def trained_beside(split: Split, vision: Callable[..., Any], language: Callable[..., Any]) -> tuple[float, float]:
    made = make(split, vision, language)
    single = OneProcess(exact=False, vision=sgd if vision in (copies, alone) else None)
    norms = steps(split, made, single, range(3))
    return difference(made[0], single), norms


@four_ranks
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_kinds_mix(ranks: RankPool, kinds: tuple[Any, Any]) -> None:
    for weights, norms in ranks.run(trained_beside, TWO_AND_TWO, *kinds):
        assert weights == 0.0 and norms <= 1e-6


@four_ranks
def test_a_module_on_one_rank_has_any_optimizer(ranks: RankPool) -> None:
    """And one rank has no module at all."""
    for weights, norms in ranks.run(trained_beside, ONE_AND_TWO, alone, shards):
        assert weights == 0.0 and norms <= 1e-6


def shards_early(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    """The exchange begins in backward, so it is under way when the step is skipped."""
    module, optimizer = shards(module, group)
    optimizer.attach(module)
    return module, optimizer


def with_overflow(vision: Callable[..., Any], language: Callable[..., Any], bad: int) -> None:
    """In the second of three steps rank ``bad`` has an infinite gradient."""
    split = TWO_AND_TWO
    modules, optimizers = make(split, vision, language)
    single = OneProcess(exact=False, vision=sgd if vision is copies else None)
    for step in range(3):
        backward(split, modules, step)
        single.gradients(split, step)
        if step == 1 and dist.get_rank() == bad:
            for module in modules.values():
                param = next(module.parameters())
                local = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
                local.view(-1)[0] = float("inf")
        assert optimizers.step() is (step != 1)
        assert optimizers.overflowed == (() if step != 1 else ("vision" if bad < 2 else "language",))
        if step == 1:
            assert all(p.grad is None for m in modules.values() for p in m.parameters())
            single.zero_grad()
        else:
            single.step()
            optimizers.zero_grad()
    assert difference(modules, single) == 0.0


@four_ranks
@pytest.mark.parametrize(
    ("kinds", "bad"),
    [((shards, owns), 0), ((copies, shards), 1), ((copies, shards), 2), ((owns, shards_early), 3)],
    ids=["FSDP2 beside owned", "DDP beside FSDP2", "FSDP2 beside DDP", "FSDP2 with attach beside owned"],
)
def test_overflow_on_one_rank_of_any_kind_skips_the_step(ranks: RankPool, kinds: tuple[Any, Any], bad: int) -> None:
    ranks.run(with_overflow, *kinds, bad, timeout=60)


def without_ddp() -> None:
    """Copies whose gradients nobody has reduced."""
    modules, optimizers = make(TWO_AND_TWO, alone, owns)
    backward(TWO_AND_TWO, modules, 0)
    optimizers.step()


@four_ranks
def test_copies_with_different_gradients_are_an_error_on_all_ranks(ranks: RankPool) -> None:
    for error in ranks.errors(without_ddp):
        assert "of module 'vision' is" in error and "reduce their gradients before (DDP does)" in error


def save_and_go_on(
    vision: Callable[..., Any], language: Callable[..., Any], before: Split, after: Split, folder: Path
) -> tuple[float, list[float]]:
    """Two steps on one split, then on the other two from what was saved; beside one process."""
    single = OneProcess(exact=False, vision=sgd if vision in (copies, alone) else None)
    modules, optimizers = made = make(before, vision, language)
    steps(before, made, single, range(2))
    optimizers.save_state_dict(folder)
    modules, optimizers = made = make(after, vision, language)
    with torch.no_grad():
        for name, module in modules.items():
            theirs = dict(single.modules[name].named_parameters())
            for of_param, param in module.named_parameters():
                fill(param, theirs[of_param.removeprefix("module.")])
    optimizers.load_state_dict_from(folder)
    norms = steps(after, made, single, range(2, 4))
    return difference(modules, single), norms


def fill(param: Tensor, value: Tensor) -> None:
    if hasattr(param, "to_local"):
        param.to_local().copy_(distribute_like(value, param))
    else:
        param.copy_(value)


@four_ranks
@pytest.mark.parametrize("kinds", [(shards, owns), (copies, shards)], ids=["FSDP2 and owned", "DDP and FSDP2"])
def test_state_of_every_kind_is_saved_and_loaded(ranks: RankPool, tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    """On other ranks, and on fewer."""
    for number, after in enumerate((Split((2, 3), (0, 1)), Split((3,), (1, 2)))):
        for weights, norms in ranks.run(save_and_go_on, *kinds, TWO_AND_TWO, after, tmp_path / str(number)):
            assert weights == 0.0 and norms <= 1e-6


def save_with(vision: Callable[..., Any], folder: Path) -> None:
    make(TWO_AND_TWO, vision, owns)[1].save_state_dict(folder)


def load_with(vision: Callable[..., Any], folder: Path) -> None:
    make(TWO_AND_TWO, vision, owns)[1].load_state_dict_from(folder)


@four_ranks
def test_another_kinds_state_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_with, shards, tmp_path)
    assert all("which this optimizer cannot read" in error for error in ranks.errors(load_with, owns, tmp_path))
    assert all("expected parameter" in error for error in ranks.errors(load_with, copies, tmp_path))
    (path,) = tmp_path.glob("save-*/vision/whole.pt")
    path.write_bytes(path.read_bytes()[:-100])
    assert all("module 'vision' failed on" in error for error in ranks.errors(load_with, shards, tmp_path))


def gradients_beside_whole_ones(sharding: str) -> None:
    """Zeros and scaled gradients of every sharding, against gradients that torch has put together."""
    sharded = shard(sharding, "fp32")
    optimizer = layer_wise(sharded.model)
    fsdp2_backward(sharded, 0)
    params = dict(named(sharded.model))
    params["gate.bias"].grad = None  # counts as zeros
    local = params["layers.2.weight"].grad
    (local.to_local() if hasattr(local, "to_local") else local)[:1] = 0
    before = {name: whole(p.grad) if p.grad is not None else torch.zeros(p.shape) for name, p in params.items()}
    zeros = {name: int((grad == 0).sum()) for name, grad in before.items()}
    expected = sum(zeros.values())
    if sharding == "expert parallel":  # every second rank has another expert, under the same names
        other: list[Any] = [None] * 4
        dist.all_gather_object(other, zeros)
        expected += sum(other[1 - dist.get_rank() % 2][name] for name in ("layers.2.weight", "layers.2.bias"))
    assert optimizer.gradients.count_zeros() == expected > 1
    optimizer.gradients.scale(0.25)
    for name, param in params.items():
        assert param.grad is None or torch.equal(whole(param.grad), before[name] * 0.25), name


@four_ranks
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_of_every_sharding_are_counted_and_scaled(ranks: RankPool, sharding: str) -> None:
    ranks.run(gradients_beside_whole_ones, sharding)
