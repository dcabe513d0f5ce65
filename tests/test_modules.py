"""Modules on ranks of their own train what one process that holds them all trains, whatever each one's optimizer."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lwopt_backend import ModuleOptimizers
from tests.cells import cells
from tests.fsdp2 import SHARDINGS, distribute_like, layer_wise, named, shard, whole
from tests.fsdp2 import backward as fsdp2_backward
from tests.modules import (
    EVERYWHERE,
    NAMES,
    ON_ONE,
    ONE_AND_THREE,
    ONE_AND_TWO,
    OVERLAPPING,
    PIXELS,
    TWO_AND_TWO,
    Beside,
    Kind,
    Language,
    Split,
    Vision,
    alone,
    backward,
    copies,
    group_of,
    make,
    owned,
    owns,
    shards,
    shards_early,
)
from tests.ranks import RankPool

SPLITS = {
    "2 + 2": TWO_AND_TWO,
    "1 + 3": ONE_AND_THREE,
    "overlapping": OVERLAPPING,
    "everywhere": EVERYWHERE,
    "all on one": ON_ONE,
}
KINDS: dict[str, tuple[Split, Kind, Kind]] = {
    "FSDP2 and owned": (TWO_AND_TWO, shards, owns),
    "owned and FSDP2": (TWO_AND_TWO, owns, shards),
    "two on FSDP2": (TWO_AND_TWO, shards, shards),
    "DDP and owned": (TWO_AND_TWO, copies, owns),
    "DDP and FSDP2": (TWO_AND_TWO, copies, shards),
    "any on one rank, one rank without a module": (ONE_AND_TWO, alone, shards),
}


@pytest.fixture
def ranks(rank_pools: dict[int, RankPool]) -> RankPool:
    return rank_pools[4]


def trained_beside(split: Split, *kinds: Kind, steps: int = 3, options: Mapping[str, Any] = {}, **how: Any) -> float:
    run = Beside(split, kinds or (owns, owns), **options)
    for step in range(steps):
        run.step(step, **how)
    return run.difference()


@cells(split=SPLITS, accumulation=[1, 2], clip=[None, 0.05, {"vision": 0.01, "language": 0.05}])
def test_parameters_equal_one_process_that_holds_both_modules(
    ranks: RankPool, split: str, accumulation: int, clip: Any
) -> None:
    """Clipped by the one norm over both, which counts each element once, with one limit or one for each."""
    found = ranks.run(trained_beside, SPLITS[split], steps=4, accumulation=accumulation, clip=clip)
    assert set(found) == {0.0}


def test_layouts_and_instances_within_a_module(ranks: RankPool) -> None:
    for options in ({"layout": "padded"}, {"layout": "compact", "group_size": 1}, {"overlap_param_gather": True}):
        assert set(ranks.run(trained_beside, TWO_AND_TWO, accumulation=2, clip=0.05, options=options)) == {0.0}


@pytest.mark.parametrize("kinds", KINDS)
def test_kinds_mix(ranks: RankPool, kinds: str) -> None:
    assert set(ranks.run(trained_beside, *KINDS[kinds], clip=0.05)) == {0.0}


# Norms


def measured(split: Split) -> float:
    """How far norms of every order, of each module and of all, are from those of one process."""
    run = Beside(split)
    backward(split, run.modules, 0)
    run.single.gradients(split, 0)
    far = 0.0
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        norms = run.optimizers.grad_norms(norm_type)
        assert list(norms) == list(NAMES) and norms["vision"].dtype == torch.float32
        for found, expected in zip((*norms.values(), run.optimizers.grad_norm(norm_type)), run.single.norms(norm_type)):
            far = max(far, abs(found.item() / expected - 1))
    zeros = run.single.zeros()
    assert zeros["language"] > 0 and run.optimizers.zero_counts() == zeros
    assert run.optimizers.count_zeros() == sum(zeros.values())
    return far


@pytest.mark.parametrize("split", SPLITS)
def test_norms_and_zeros_count_each_element_once(ranks: RankPool, split: str) -> None:
    assert max(ranks.run(measured, SPLITS[split])) <= 1e-6


def with_nan() -> list[float]:
    """Norms where one rank's gradients are NaN, of each of the language's in turn: gloo's MAX forgets a NaN."""
    modules, optimizers = make(ONE_AND_THREE)
    found = []
    for bad in ONE_AND_THREE.language:
        if dist.get_rank() == bad:
            handle = modules["language"].lm_head.weight.register_hook(lambda grad: grad * float("nan"))
        backward(ONE_AND_THREE, modules, 0)
        if dist.get_rank() == bad:
            handle.remove()
        found += [optimizers.grad_norm(norm_type).item() for norm_type in (2.0, float("inf"))]
        before = optimizers.grad_norms()["vision"]
        optimizers.clip_grad_norm_(1e-3)
        assert optimizers.grad_norms()["vision"] == before
        with pytest.raises(RuntimeError, match="norm of order 2.0 of all modules' gradients is nan"):
            optimizers.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizers.zero_grad()
    return found


def test_a_norm_that_is_not_finite_is_said_on_all_ranks_and_clips_nothing(ranks: RankPool) -> None:
    assert all(norm != norm for norms in ranks.run(with_nan) for norm in norms)


def overflowing(split: Split, kinds: tuple[Kind, Kind], module: str, place: int, value: float) -> float:
    """In the second of three steps one gradient element of one rank of ``module`` is ``value``; nobody steps."""
    run = Beside(split, kinds)
    spoils = dist.get_rank() == split.ranks(module)[place]
    for step in range(3):
        if step != 1:
            run.step(step, clip=0.05)
            assert run.optimizers.overflowed == ()
            continue
        param = next(run.modules[module].parameters()) if spoils else None
        in_backward = spoils and kinds[NAMES.index(module)] is owns  # which takes gradients away as they come
        if in_backward:
            handle = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
        backward(split, run.modules, step)
        if in_backward:
            handle.remove()
        elif spoils:
            local = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            local.view(-1)[0] = value
        run.optimizers.clip_grad_norm_(0.05)
        assert run.optimizers.step() is False and run.optimizers.overflowed == (module,)
        assert all(p.grad is None for m in run.modules.values() for p in m.parameters())
    return run.difference()


INF, NAN = float("inf"), float("nan")
OVERFLOWS: list[tuple[str, tuple[Kind, Kind], str, int, float]] = [
    *((split, (owns, owns), "vision", -1, INF) for split in ("2 + 2", "1 + 3", "overlapping")),
    *((split, (owns, owns), "language", -1, NAN) for split in ("2 + 2", "1 + 3", "overlapping")),
    ("2 + 2", (shards, owns), "vision", 0, INF),
    ("2 + 2", (copies, shards), "vision", 1, INF),
    ("2 + 2", (copies, shards), "language", 0, INF),
    ("2 + 2", (owns, shards_early), "language", 1, INF),
]


@pytest.mark.parametrize(("split", "kinds", "module", "place", "value"), OVERFLOWS)
def test_a_gradient_that_is_not_finite_anywhere_skips_the_step_everywhere(
    ranks: RankPool, split: str, kinds: tuple[Kind, Kind], module: str, place: int, value: float
) -> None:
    assert set(ranks.run(overflowing, SPLITS[split], kinds, module, place, value)) == {0.0}


def with_an_idle_module(split: Split, idle: str) -> float:
    """In the second step ``idle`` has no backward pass on any of its ranks; the other one has its own."""
    run = Beside(split)
    for step in (0, 2):
        run.step(step)
        for modules in (run.modules, run.single.modules) if step == 0 else ():
            if idle == "language" and "vision" in modules:
                modules["vision"](torch.ones(2, PIXELS)).square().sum().backward()
            if idle == "vision" and "language" in modules:
                tokens = torch.arange(18).view(2, 9)
                modules["language"](tokens, tokens + 1, torch.zeros(2, 24)).backward()
        if step == 0:
            assert run.optimizers.grad_norms()[idle] == 0 and run.optimizers.grad_norm() > 0
            assert run.optimizers.step() is True
            run.single.step()
    return run.difference()


@pytest.mark.parametrize("idle", NAMES)
@pytest.mark.parametrize("split", ["2 + 2", "overlapping"])
def test_a_module_without_a_backward_pass_is_left_alone(ranks: RankPool, split: str, idle: str) -> None:
    assert set(ranks.run(with_an_idle_module, SPLITS[split], idle)) == {0.0}


def scaled_loss(scale: float) -> float:
    """A scaled loss, and gradients scaled back: by a power of two, so that nothing rounds otherwise."""
    (modules, optimizers), (expected, by) = (make(TWO_AND_TWO, exact=False) for _ in range(2))
    for step in range(2):
        backward(TWO_AND_TWO, modules, step, scale=scale)
        backward(TWO_AND_TWO, expected, step)
        optimizers.scale_grads(1 / scale)
        assert optimizers.step() and by.step()
    mine, theirs = ([p for module in of.values() for p in module.parameters()] for of in (modules, expected))
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs))


def test_gradients_of_a_scaled_loss_are_scaled_back(ranks: RankPool) -> None:
    assert set(ranks.run(scaled_loss, 2.0**10)) == {0.0}


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


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_of_every_sharding_are_counted_and_scaled(ranks: RankPool, sharding: str) -> None:
    ranks.run(gradients_beside_whole_ones, sharding)


# Schedulers, groups and hooks


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
    run = Beside(split)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (run.optimizers, *run.single.optimizers)]
    for step in range(5):
        run.step(step)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
    return run.difference()


@pytest.mark.parametrize(
    ("split", "name"), [*((TWO_AND_TWO, name) for name in SCHEDULERS), (ONE_AND_TWO, "lambda")], ids=str
)
def test_torchs_schedulers_work_on_all_modules(ranks: RankPool, split: Split, name: str) -> None:
    """Also on a rank without a module."""
    assert set(ranks.run(scheduled_difference, split, name)) == {0.0}


def test_param_groups_are_the_modules_own_and_hooks_are_torchs() -> None:
    """In one process without torch.distributed."""
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


# What is refused


def test_what_it_cannot_be_used_for_says_so() -> None:
    module = nn.Linear(2, 2)
    optimizers = ModuleOptimizers({"a": torch.optim.SGD(module.parameters(), lr=0.1)})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    for error, words, use in (
        (TypeError, "takes no closure", lambda: optimizers.step(lambda: 1.0)),
        (RuntimeError, "add this one to a module's", lambda: optimizers.add_param_group({"params": []})),
        (TypeError, "cannot be copied or pickled", lambda: pickle.dumps(optimizers)),
        (RuntimeError, r"use scale_grads\(\)", lambda: scaler.step(optimizers)),
        (ValueError, "unknown module 'aa'; did you mean 'a'", lambda: optimizers.clip_grad_norm_({"aa": 1.0})),
        (ValueError, "max_norm lacks module 'a'", lambda: optimizers.clip_grad_norm_({})),
        (ValueError, "norm_type: expected a number above 0", lambda: optimizers.grad_norm(0)),
    ):
        with pytest.raises(error, match=words):
            use()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


def refused(case: str) -> None:
    rank = dist.get_rank()
    vision, language = Vision(), Language()
    everyone = {name: group_of(EVERYWHERE.ranks(name), name) for name in NAMES}
    half = [group_of((0, 1), "half"), group_of((2, 3), "half")][rank // 2]
    given: dict[str, Any] = {"vision": adam(vision)}
    if case == "order":
        both = {"vision": adam(vision), "language": adam(language)}
        given = {name: both[name] for name in (NAMES if rank != 2 else NAMES[::-1])}
    elif case == "left out" and rank != 1 or case == "nobody":
        given["language"] = None
    elif case == "name":
        given = {"vision/encoder": adam(vision)}
    elif case == "no optimizer" and rank == 3:
        given = {"vision": vision}
    elif case == "empty":
        given = {}
    elif case == "shared":
        given["language"] = adam(nn.ModuleList([language, vision.layers[0]]) if rank == 1 else language)
    elif case == "one process group":
        given = {"vision": owned(vision, None), "language": owned(language, None)}
    elif case == "a rank lacks it":
        optimizer = owned(vision, everyone["vision"])
        given = {"vision": None if rank == 2 else optimizer}
    elif case == "two groups" or case == "kinds" and rank < 2:
        given = {"vision": owned(vision, half)}
    elif case == "no copies":
        with torch.no_grad():
            vision.layers[2].bias[0] += rank == 1
    elif case == "step in backward":
        given = {"vision": owned(vision, everyone["vision"], step_in_backward=True)}
    elif case == "DTensor":
        given = {"vision": adam(shards(vision, everyone["vision"])[0])}
    ModuleOptimizers(given)


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


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_be_trained_together_are_refused_on_all_ranks(ranks: RankPool, case: str) -> None:
    for error in ranks.errors(refused, case):
        assert REFUSED[case] in error.replace("\\'", "'"), error


def without_ddp() -> None:
    """Copies whose gradients nobody has reduced."""
    modules, optimizers = make(TWO_AND_TWO, (alone, owns), exact=False)
    backward(TWO_AND_TWO, modules, 0)
    optimizers.step()


def failing_step(where: int) -> None:
    """A step that fails on one rank; the others do not wait for it."""
    _, optimizers = make(TWO_AND_TWO, (alone, alone))
    if dist.get_rank() == where:
        optimizers.modules["language"].register_step_pre_hook(lambda *_: 1 / 0)
    optimizers.step()


def failing_step_in_owned_storage(where: int, seconds: float) -> None:
    """The other rank of the module waits for new parameters, until its process group's time is over."""
    groups = {n: dist.new_group(list(TWO_AND_TWO.ranks(n)), timeout=timedelta(seconds=seconds)) for n in NAMES}
    modules, _ = make(TWO_AND_TWO, (alone, alone))
    optimizers = ModuleOptimizers({n: owned(modules[n], groups[n]) if n in modules else None for n in NAMES})
    backward(TWO_AND_TWO, modules, 0)
    if dist.get_rank() == where:
        optimizers.modules["language"].register_step_pre_hook(lambda *_: 1 / 0)
    optimizers.step()


def test_what_goes_wrong_in_a_step_on_one_rank_is_an_error_on_all(ranks: RankPool) -> None:
    for error in ranks.errors(without_ddp):
        assert "of module 'vision' is" in error and "reduce their gradients before (DDP does)" in error
    for error in ranks.errors(failing_step, 3):
        assert "step: module 'language' failed on rank 3 with ZeroDivisionError" in error
    for error in ranks.errors(failing_step_in_owned_storage, 2, 3.0):
        assert "step: module 'language' failed on rank 2 with ZeroDivisionError" in error


def interrupted_backward() -> float:
    """In the second step vision's backward pass fails on rank 1, which catches it; all drop their gradients."""
    run = Beside(TWO_AND_TWO)
    run.step(0)
    if dist.get_rank() == 1:
        handle = run.modules["vision"].layers[0].weight.register_hook(lambda grad: grad.view(-1, 7, 7))
        with pytest.raises(RuntimeError):
            backward(run.split, run.modules, 1)
        handle.remove()
    else:
        backward(run.split, run.modules, 1)
    with pytest.raises(RuntimeError, match="module 'vision' failed on rank.*backward pass ended in an exception"):
        run.optimizers.step()
    assert run.difference() == 0.0  # language has not stepped either
    run.optimizers.zero_grad()
    run.step(2)
    return run.difference()


def test_an_interrupted_backward_pass_of_one_module_stops_all_before_they_step(ranks: RankPool) -> None:
    assert set(ranks.run(interrupted_backward)) == {0.0}


# State


def halve_rates(run: Beside) -> None:
    for optimizer in (run.optimizers, *run.single.optimizers):
        for group in optimizer.param_groups:
            group["lr"] /= 2


def take_weights(run: Beside) -> None:
    """Those of the one process."""
    with torch.no_grad():
        for name, module in run.modules.items():
            theirs = dict(run.single.modules[name].named_parameters())
            for of_param, param in module.named_parameters():
                value = theirs[of_param.removeprefix("module.")]
                if hasattr(param, "to_local"):
                    param.to_local().copy_(distribute_like(value, param))
                else:
                    param.copy_(value)


def go_on(run: Beside, split: Split, folder: Path, steps: range) -> float:
    """New modules on another split, from the one process's weights and what was saved."""
    after = Beside(split, run.kinds)
    after.single = run.single
    take_weights(after)
    after.optimizers.load_state_dict_from(folder)
    for step in steps:
        after.step(step)
    return after.difference()


def resumed(before: Split, after: Split, kinds: tuple[Kind, Kind], folder: Path) -> float:
    """Two steps on one split, then two on the other from what was saved, with the learning rates that it had."""
    run = Beside(before, kinds)
    for step in range(2):
        run.step(step)
    halve_rates(run)
    run.optimizers.save_state_dict(folder)
    return go_on(run, after, folder, range(2, 4))


OWNED = (owns, owns)
RESUMED: dict[str, tuple[Split, Split, tuple[Kind, Kind]]] = {
    "2 + 2 to 1 + 3": (TWO_AND_TWO, ONE_AND_THREE, OWNED),
    "2 + 2 to everywhere": (TWO_AND_TWO, EVERYWHERE, OWNED),
    "1 + 3 to one": (ONE_AND_THREE, ON_ONE, OWNED),
    "one to overlapping": (ON_ONE, OVERLAPPING, OWNED),
    "overlapping to 2 + 2": (OVERLAPPING, TWO_AND_TWO, OWNED),
    "FSDP2 and owned to other ranks": (TWO_AND_TWO, Split((2, 3), (0, 1)), (shards, owns)),
    "FSDP2 and owned to fewer": (TWO_AND_TWO, Split((3,), (1, 2)), (shards, owns)),
    "DDP and FSDP2 to other ranks": (TWO_AND_TWO, Split((2, 3), (0, 1)), (copies, shards)),
    "DDP and FSDP2 to fewer": (TWO_AND_TWO, Split((3,), (1, 2)), (copies, shards)),
}


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on_when_the_split_changed(ranks: RankPool, tmp_path: Path, case: str) -> None:
    assert set(ranks.run(resumed, *RESUMED[case], tmp_path)) == {0.0}


def save_after_two_steps(folder: Path) -> None:
    run = Beside(TWO_AND_TWO)
    for step in range(2):
        run.step(step)
    run.optimizers.save_state_dict(folder)


def go_on_alone(folder: Path) -> float:
    """One process that has both modules, after two steps of another split."""
    run = Beside(ON_ONE)
    for step in range(2):
        run.single.gradients(TWO_AND_TWO, step)
        run.single.step()
    return go_on(run, ON_ONE, folder, range(2, 4))


def test_four_ranks_state_loads_on_a_single_process(
    ranks: RankPool, rank_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    ranks.run(save_after_two_steps, tmp_path)
    assert rank_pools[1].run(go_on_alone, tmp_path) == [0.0]


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(entry) for key, entry in value.items()}
    return [clone(entry) for entry in value] if isinstance(value, list) else value


def state_dicts_round_trip(split: Split) -> float:
    """``state_dict`` keyed by module, taken after two more steps, undoes these."""
    run = Beside(split)
    for step in range(2):
        run.step(step)
    told: list[str] = []
    run.optimizers.register_state_dict_pre_hook(lambda optimizer: told.append("saved"))
    run.optimizers.register_load_state_dict_post_hook(lambda optimizer: told.append("loaded"))
    saved = clone(run.optimizers.state_dict())
    assert list(saved) == list(run.modules)
    for step in (2, 3):
        backward(split, run.modules, step)
        assert run.optimizers.step()
    take_weights(run)
    run.optimizers.load_state_dict({**saved, **{name: None for name in NAMES if name not in run.modules}})
    assert told == ["saved", "loaded"]
    for step in (2, 3):
        run.step(step)
    return run.difference()


@pytest.mark.parametrize("split", ["2 + 2", "overlapping"])
def test_state_dicts_are_keyed_by_module(ranks: RankPool, split: str) -> None:
    assert set(ranks.run(state_dicts_round_trip, SPLITS[split])) == {0.0}


def load_other_names(keys: tuple[str, ...]) -> None:
    make(TWO_AND_TWO)[1].load_state_dict({key: None for key in keys})


def test_a_state_dict_with_other_modules_is_refused_on_all_ranks(ranks: RankPool) -> None:
    for error in ranks.errors(load_other_names, ("vision", "langauge")):
        assert "unknown module 'langauge'; did you mean 'language'?" in error.replace('\\"', '"').replace("\\'", "'")
    for error in ranks.errors(load_other_names, ("vision",)):
        assert "lacks module" in error and "language" in error


def load_as(folder: Path, vision: Kind = owns, names: tuple[str, str] = NAMES) -> None:
    _, optimizers = make(TWO_AND_TWO, (vision, owns), exact=False)
    if names != NAMES:
        optimizers = ModuleOptimizers({new: optimizers.modules.get(name) for name, new in zip(NAMES, names)})
    optimizers.load_state_dict_from(folder)


def test_folders_that_hold_no_whole_save_are_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def said(*arguments: Any) -> set[str]:
        return set(ranks.errors(load_as, folder, *arguments))

    assert all("holds no modules' state" in error for error in said())
    ranks.run(save_after_two_steps, folder)
    assert all("did you mean" in error and "langauge" in error for error in said(owns, ("vision", "langauge")))
    (save,) = folder.glob("save-*")
    pointer = (folder / "modules.json").read_text()
    elsewhere = json.dumps({**json.loads(pointer), "save": "../../elsewhere"})
    for text, words in (
        (pointer.replace('"pieces"', '"whole"'), "was saved by FSDP2's or a plain optimizer"),
        (pointer[:-20], "is damaged or not of modules' state"),
        (elsewhere, "is damaged or not of modules' state"),
    ):
        (folder / "modules.json").write_text(text)
        assert all(words in error for error in said())
    (folder / "modules.json").write_text(pointer)
    ranks.run(load_as, folder)
    (save / "language" / "optimizer.json").rename(tmp_path / "index")
    assert all("module 'language' failed on rank" in e and "holds no optimizer state" in e for e in said())
    shutil.rmtree(save / "language")
    assert all("is missing" in error for error in said())


def save_sharded(folder: Path) -> None:
    make(TWO_AND_TWO, (shards, owns), exact=False)[1].save_state_dict(folder)


def test_another_kinds_state_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_sharded, tmp_path)
    assert all("which this optimizer cannot read" in error for error in ranks.errors(load_as, tmp_path, owns))
    assert all("expected parameter" in error for error in ranks.errors(load_as, tmp_path, copies))
    (path,) = tmp_path.glob("save-*/vision/whole.pt")
    path.write_bytes(path.read_bytes()[:-100])
    assert all("module 'vision' failed on" in error for error in ranks.errors(load_as, tmp_path, shards))


def saves_in_vain(folder: Path) -> float:
    """A second save, of a param group of one module that no checkpoint can hold; then what the first save says."""
    run = Beside(TWO_AND_TWO)
    for step in range(2):
        run.step(step)
    run.optimizers.save_state_dict(folder)
    before = list(folder.glob("save-*"))
    for group in run.optimizers.param_groups:
        if group["module"] == "language":
            group["note"] = lambda: None
    with pytest.raises(RuntimeError, match="module 'language' failed on rank 2 with.*cannot be read back"):
        run.optimizers.save_state_dict(folder)
    dist.barrier()
    assert list(folder.glob("save-*")) == before  # vision's part of the new one is gone
    return go_on(run, ONE_AND_THREE, folder, range(2, 3))


def test_a_save_that_fails_leaves_the_one_before_and_the_next_removes_it(ranks: RankPool, tmp_path: Path) -> None:
    assert set(ranks.run(saves_in_vain, tmp_path)) == {0.0}
    (before,) = tmp_path.glob("save-*")
    (tmp_path / "save-0123456789abcdef").mkdir()  # as a crash leaves one
    ranks.run(save_after_two_steps, tmp_path)
    (after,) = tmp_path.glob("save-*")
    assert after != before and json.loads((tmp_path / "modules.json").read_text())["save"] in after.name
