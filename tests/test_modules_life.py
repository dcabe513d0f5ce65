"""Schedulers, hooks and mistakes with several modules; errors come on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from lwopt_backend import ModuleOptimizers
from tests.modules import (
    EVERYWHERE,
    NAMES,
    ONE_AND_TWO,
    TWO_AND_TWO,
    Language,
    OneProcess,
    Split,
    Vision,
    backward,
    group_of,
    modules_of,
    optimizers_of,
    owned,
)
from tests.ranks import RankPool

four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [2 * group["lr"] for group in optimizer.param_groups], total_steps=9, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def scheduled_difference(split: Split, name: str) -> float:
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (optimizers, *single.optimizers)]
    for step in range(5):
        backward(split, modules, step)
        single.gradients(split, step)
        assert optimizers.step()
        single.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
    return single.difference(modules)


@four_ranks
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_work_on_all_modules(ranks: RankPool, name: str) -> None:
    assert set(ranks.run(scheduled_difference, TWO_AND_TWO, name)) == {0.0}


@four_ranks
def test_schedulers_work_on_ranks_without_a_module(ranks: RankPool) -> None:
    assert set(ranks.run(scheduled_difference, ONE_AND_TWO, "lambda")) == {0.0}


def groups_and_hooks() -> None:
    modules = {name: nn.Linear(4, 4) for name in ("a", "b")}
    inner = {name: torch.optim.Adam(module.parameters(), lr=0.1) for name, module in modules.items()}
    optimizers = ModuleOptimizers(inner)
    assert isinstance(optimizers, torch.optim.Optimizer) and "betas" in optimizers.defaults
    assert [group["module"] for group in optimizers.param_groups] == ["a", "b"]
    optimizers.load_state_dict(optimizers.state_dict())  # torch makes new groups then
    inner["b"].load_state_dict(inner["b"].state_dict())
    for number, group in enumerate(optimizers.param_groups):
        group["lr"] = float(number)
    assert [inner[name].param_groups[0]["lr"] for name in inner] == [0.0, 1.0]
    inner["a"].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert [group["module"] for group in optimizers.param_groups] == ["a", "a", "b"]
    told: list[str] = []
    optimizers.register_step_pre_hook(lambda *_: told.append("before"))
    optimizers.register_step_post_hook(lambda *_: told.append("after"))
    inner["b"].register_step_post_hook(lambda *_: told.append("b"))
    modules["b"](torch.ones(1, 4)).sum().backward()
    before = modules["b"].weight.detach().clone()
    assert optimizers.step() is True
    assert told == ["before", "b", "after"] and not torch.equal(before, modules["b"].weight)
    assert set(optimizers.state) == set(modules["b"].parameters())
    optimizers.zero_grad()
    assert modules["b"].weight.grad is None


def test_param_groups_are_the_modules_own_and_hooks_are_torchs() -> None:
    """In one process without torch.distributed."""
    groups_and_hooks()


def test_what_it_cannot_be_used_for_says_so() -> None:
    module = nn.Linear(2, 2)
    optimizers = ModuleOptimizers({"a": torch.optim.SGD(module.parameters(), lr=0.1)})
    with pytest.raises(TypeError, match="takes no closure"):
        optimizers.step(lambda: 1.0)
    with pytest.raises(RuntimeError, match=r"add this one to a module's"):
        optimizers.add_param_group({"params": []})
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(optimizers)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"use scale_grads\(\)"):
        scaler.step(optimizers)
    with pytest.raises(ValueError, match="max_norm has an unknown module 'aa'; did you mean 'a'"):
        optimizers.clip_grad_norm_({"aa": 1.0})
    with pytest.raises(ValueError, match="max_norm lacks module 'a'"):
        optimizers.clip_grad_norm_({})
    with pytest.raises(ValueError, match="norm_type: expected a number above 0"):
        optimizers.grad_norm(0)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


def refused(case: str) -> None:
    rank = dist.get_rank()
    vision, language = Vision(), Language()
    groups = {name: group_of(EVERYWHERE.ranks(name), name) for name in NAMES}
    if case == "order":
        names = NAMES if rank != 2 else NAMES[::-1]
        ModuleOptimizers({name: adam(vision) if name == "vision" else adam(language) for name in names})
    if case == "left out":
        ModuleOptimizers({"vision": adam(vision)} if rank == 1 else {"vision": adam(vision), "language": None})
    if case == "nobody":
        ModuleOptimizers({"vision": adam(vision), "language": None})
    if case == "name":
        ModuleOptimizers({"vision/encoder": adam(vision)})
    if case == "no optimizer":
        ModuleOptimizers({"vision": vision if rank == 3 else adam(vision)})
    if case == "empty":
        ModuleOptimizers({})
    if case == "shared":
        other = adam(nn.ModuleList([language, vision.layers[0]]) if rank == 1 else language)
        ModuleOptimizers({"vision": adam(vision), "language": other})
    if case == "one process group":
        ModuleOptimizers({"vision": owned(vision, None), "language": owned(language, None)})
    if case == "a rank lacks it":
        optimizer = owned(vision, groups["vision"])
        ModuleOptimizers({"vision": None if rank == 2 else optimizer})
    if case == "two groups":
        halves = [group_of((0, 1), "half"), group_of((2, 3), "half")]
        ModuleOptimizers({"vision": owned(vision, halves[rank // 2])})
    if case == "no copies":
        with torch.no_grad():
            vision.layers[2].bias[0] += rank == 1
        ModuleOptimizers({"vision": adam(vision)})
    if case == "kinds":
        half = group_of((0, 1), "half"), group_of((2, 3), "half")
        ModuleOptimizers({"vision": owned(vision, half[0]) if rank < 2 else adam(vision)})
    if case == "step in backward":
        ModuleOptimizers({"vision": owned(vision, groups["vision"], step_in_backward=True)})
    if case == "DTensor":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(vision, mesh=DeviceMesh.from_group(groups["vision"], "cpu"))
        ModuleOptimizers({"vision": adam(vision)})


REFUSED = {
    "order": "all ranks name all modules in one order, with None for those that they do not have: ranks differ",
    "left out": "all ranks name all modules in one order, with None for those that they do not have: ranks differ",
    "nobody": "no rank has an optimizer of module 'language'",
    "name": "the module's name 'vision/encoder' cannot name a folder",
    "no optimizer": "module 'vision': expected a torch.optim.Optimizer, or None on ranks without it",
    "empty": "expected a mapping from modules' names to optimizers, found {}",
    "shared": "modules 'vision' and 'language' share a parameter, '0 of group 0' of 'vision' is ",
    "one process group": "modules 'vision' and 'language' reduce gradients over one process group",
    "a rank lacks it": "ranks [0, 1, 3] have an optimizer of module 'vision', but those work on so many: {0: 4,",
    "two groups": "ranks [0, 1, 2, 3] have an optimizer of module 'vision', but those work on so many: {0: 2,",
    "no copies": "module 'vision' is not the same on ranks 0 and 1: parameter '3 of group 0",
    "kinds": "module 'vision' has optimizers of different kinds on ranks 0 and 2",
    "step in backward": "module 'vision': step_in_backward uses gradients before all ranks know",
    "DTensor": "module 'vision': '0 of group 0' is a DTensor, whose norm Adam cannot tell",
}


@four_ranks
@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_be_trained_together_are_refused_on_all_ranks(ranks: RankPool, case: str) -> None:
    for error in ranks.errors(refused, case):
        assert REFUSED[case] in error.replace("\\'", "'"), error


def failing_step(where: int) -> None:
    """A step of copies that fails on one rank; nobody waits for anybody."""
    split = TWO_AND_TWO
    modules = modules_of(split)
    inner = {n: adam(modules[n]) if n in modules else None for n in NAMES}
    if dist.get_rank() == where:
        inner["language"].register_step_pre_hook(lambda *_: 1 / 0)
    ModuleOptimizers(inner).step()


@four_ranks
def test_a_step_that_fails_on_one_rank_is_an_error_on_all(ranks: RankPool) -> None:
    for error in ranks.errors(failing_step, 3):
        assert "step: module 'language' failed on rank 3 with ZeroDivisionError" in error


def interrupted_backward() -> float:
    """In the second step vision's backward pass fails on rank 1, which catches it; all drop their gradients."""
    split = TWO_AND_TWO
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    for step in range(4):
        if step == 1 and dist.get_rank() == 1:
            handle = modules["vision"].layers[0].weight.register_hook(lambda grad: grad.view(-1, 7, 7))
            with pytest.raises(RuntimeError):
                backward(split, modules, step)
            handle.remove()
        else:
            backward(split, modules, step)
        if step == 1:
            before = [param.detach().clone() for module in modules.values() for param in module.parameters()]
            with pytest.raises(
                RuntimeError, match="module 'vision' failed on rank.*backward pass ended in an exception"
            ):
                optimizers.step()
            after = [param for module in modules.values() for param in module.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after))  # language has not stepped either
            optimizers.zero_grad()
        else:
            single.gradients(split, step)
            assert optimizers.step()
            single.step()
    return single.difference(modules)


@four_ranks
def test_an_interrupted_backward_pass_of_one_module_stops_all_before_they_step(ranks: RankPool) -> None:
    assert set(ranks.run(interrupted_backward)) == {0.0}


def failing_step_in_owned_storage(seconds: float) -> None:
    """The other rank of the module waits for new parameters, until its process group's time is over."""
    split = TWO_AND_TWO
    modules, inner = modules_of(split), dict.fromkeys(NAMES)
    for name in NAMES:
        group = dist.new_group(list(split.ranks(name)), timeout=timedelta(seconds=seconds))
        if name in modules:
            inner[name] = owned(modules[name], group)
    optimizers = ModuleOptimizers(inner)
    backward(split, modules, 0)
    if dist.get_rank() == 2:
        inner["language"].register_step_pre_hook(lambda *_: 1 / 0)
    optimizers.step()


@four_ranks
def test_ranks_that_wait_for_one_that_failed_are_told_when_their_groups_time_is_over(ranks: RankPool) -> None:
    errors = ranks.errors(failing_step_in_owned_storage, 3.0)
    for error in errors:
        assert "step: module 'language' failed on rank 2 with ZeroDivisionError" in error
