"""Modules on ranks of their own train what one process that holds them all trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.modules import (
    EVERYWHERE,
    NAMES,
    ON_ONE,
    ONE_AND_THREE,
    OVERLAPPING,
    PIXELS,
    TWO_AND_TWO,
    OneProcess,
    Split,
    backward,
    factor_of,
    modules_of,
    optimizers_of,
    train,
)
from tests.ranks import RankPool

SPLITS = {
    "2 + 2": TWO_AND_TWO,
    "1 + 3": ONE_AND_THREE,
    "overlapping": OVERLAPPING,
    "everywhere": EVERYWHERE,
    "all on one": ON_ONE,
}
four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True)
each_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)


def trained_beside(split: Split, steps: int, accumulation: int, clip: float | None, **options: Any) -> dict[str, float]:
    """The largest difference of a weight, and of the norm, from one process that clips with our norm."""
    modules, single = modules_of(split), OneProcess()
    found = train(
        split, modules, optimizers_of(split, modules, **options), range(steps), accumulation=accumulation, clip=clip
    )
    worst = 0.0
    for step, (stepped, norm) in enumerate(found):
        assert stepped
        single.gradients(split, step, accumulation)
        if clip is not None:
            worst = max(worst, abs(norm / single.norm() - 1))
            assert norm > clip  # or nothing is clipped
            single.scale(factor_of(norm, clip))
        single.step()
    return {"weights": single.difference(modules), "norm": worst}


@four_ranks
@each_split
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_equal_one_process_that_holds_both_modules(ranks: RankPool, split: Split, accumulation: int) -> None:
    assert {found["weights"] for found in ranks.run(trained_beside, split, 5, accumulation, None)} == {0.0}


@four_ranks
@each_split
def test_one_norm_over_all_modules_clips_them(ranks: RankPool, split: Split) -> None:
    for found in ranks.run(trained_beside, split, 5, 2, 0.05):
        assert found["weights"] == 0.0 and found["norm"] <= 1e-6


@four_ranks
def test_layouts_and_instances_within_a_module(ranks: RankPool) -> None:
    for options in ({"layout": "padded"}, {"layout": "compact", "group_size": 1}, {"overlap_param_gather": True}):
        results = ranks.run(trained_beside, TWO_AND_TWO, 3, 2, 0.05, **options)
        assert {found["weights"] for found in results} == {0.0}


def measured(split: Split) -> list[float]:
    """How far norms and counts are from those of one process, of all modules and of each, on every rank."""
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    backward(split, modules, 0)
    single.gradients(split, 0)
    far = []
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        grads = {n: torch.cat([p.grad.flatten() for p in single.modules[n].parameters()]).double() for n in NAMES}
        expected = {n: torch.linalg.vector_norm(grad, norm_type) for n, grad in grads.items()}
        total = torch.linalg.vector_norm(torch.cat([*grads.values()]), norm_type)
        found = optimizers.grad_norms(norm_type)
        assert list(found) == list(NAMES) and found["vision"].dtype == torch.float32
        far += [float(abs(found[n] - expected[n]) / expected[n]) for n in NAMES]
        far.append(float(abs(optimizers.grad_norm(norm_type) - total) / total))
    zeros = {n: sum(int((p.grad == 0).sum()) for p in single.modules[n].parameters()) for n in NAMES}
    assert zeros["language"] > 0
    assert optimizers.zero_counts() == zeros and optimizers.count_zeros() == sum(zeros.values())
    return far


@four_ranks
@each_split
def test_norms_and_zeros_count_each_element_once(ranks: RankPool, split: Split) -> None:
    assert max(max(far) for far in ranks.run(measured, split)) <= 1e-6


def clipped_by_module(split: Split) -> float:
    limits = {"vision": 0.01, "language": 0.05}
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    for step in range(3):
        backward(split, modules, step)
        single.gradients(split, step)
        norm = optimizers.clip_grad_norm_(limits).item()
        for name in NAMES:
            single.scale(factor_of(norm, limits[name]), name)
        assert optimizers.step() is True
        single.step()
    return single.difference(modules)


@four_ranks
def test_a_limit_for_each_module_over_the_one_norm(ranks: RankPool) -> None:
    assert set(ranks.run(clipped_by_module, TWO_AND_TWO)) == {0.0}


def with_overflow(split: Split, module: str, value: float) -> tuple[list[bool], list[tuple[str, ...]], float]:
    """Five steps; in the third, one gradient element of one rank of ``module`` is ``value``, and one process skips."""
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    spoiled = dist.get_rank() == split.ranks(module)[-1]
    stepped, overflowed = [], []
    for step in range(5):
        handle = None
        if step == 2 and spoiled:
            param = next(modules[module].parameters())
            handle = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
        backward(split, modules, step)
        if handle is not None:
            handle.remove()
        norm = optimizers.clip_grad_norm_(0.05).item()
        stepped.append(optimizers.step())
        overflowed.append(optimizers.overflowed)
        single.gradients(split, step)
        if step != 2:
            single.scale(factor_of(norm, 0.05))
            single.step()
        single.zero_grad()  # ours has forgotten its own
    return stepped, overflowed, single.difference(modules)


@four_ranks
@pytest.mark.parametrize("split", [TWO_AND_TWO, ONE_AND_THREE, OVERLAPPING], ids=["2 + 2", "1 + 3", "overlapping"])
@pytest.mark.parametrize(("module", "value"), [("vision", float("inf")), ("language", float("nan"))])
def test_a_gradient_that_is_not_finite_anywhere_skips_the_step_everywhere(
    ranks: RankPool, split: Split, module: str, value: float
) -> None:
    for stepped, overflowed, difference in ranks.run(with_overflow, split, module, value):
        assert stepped == [True, True, False, True, True]
        assert overflowed == [(), (), (module,), (), ()]
        assert difference == 0.0


def nonfinite_norms() -> list[float]:
    modules = modules_of(TWO_AND_TWO)
    optimizers = optimizers_of(TWO_AND_TWO, modules)
    if dist.get_rank() == 3:
        next(modules["language"].parameters()).register_hook(lambda grad: grad * float("nan"))
    backward(TWO_AND_TWO, modules, 0)
    norms = [float(optimizers.grad_norm(norm_type)) for norm_type in (2.0, float("inf"))]
    before = float(optimizers.grad_norms()["vision"])
    optimizers.clip_grad_norm_(1e-3)
    assert float(optimizers.grad_norms()["vision"]) == before
    optimizers.clip_grad_norm_(1.0, error_if_nonfinite=True)
    return norms


@four_ranks
def test_a_norm_that_is_not_finite_is_said_on_all_ranks_and_clips_nothing(ranks: RankPool) -> None:
    errors = ranks.errors(nonfinite_norms)
    assert all("norm of order 2.0 of all modules' gradients is nan" in error for error in errors)


def infinity_norm_of_nan() -> list[float]:
    """gloo's MAX forgets a NaN."""
    modules = modules_of(ONE_AND_THREE)
    optimizers = optimizers_of(ONE_AND_THREE, modules)
    found = []
    for bad in ONE_AND_THREE.language:
        if dist.get_rank() == bad:
            handle = modules["language"].lm_head.weight.register_hook(lambda grad: grad * float("nan"))
        backward(ONE_AND_THREE, modules, 0)
        if dist.get_rank() == bad:
            handle.remove()
        found.append(optimizers.grad_norm(float("inf")).item())
        optimizers.zero_grad()
    return found


@four_ranks
def test_the_largest_gradient_is_nan_if_any_is(ranks: RankPool) -> None:
    for found in ranks.run(infinity_norm_of_nan):
        assert all(norm != norm for norm in found)


def alone(modules: dict[str, Any], idle: str) -> None:
    """A backward pass of the other module, on its own; the same rows on every rank, whose mean is that of one."""
    if idle == "language" and "vision" in modules:
        modules["vision"](torch.ones(2, PIXELS)).square().sum().backward()
    if idle == "vision" and "language" in modules:
        tokens = torch.arange(18).view(2, 9)
        modules["language"](tokens, tokens + 1, torch.zeros(2, 24)).backward()


def with_an_idle_module(split: Split, idle: str) -> float:
    """In the second step ``idle`` has no backward pass on any of its ranks."""
    modules, single = modules_of(split), OneProcess()
    optimizers = optimizers_of(split, modules)
    for step in range(3):
        if step == 1:
            alone(modules, idle)
            alone(single.modules, idle)
        else:
            backward(split, modules, step)
            single.gradients(split, step)
        if step == 1:
            assert optimizers.grad_norms()[idle] == 0 and optimizers.grad_norm() > 0
        assert optimizers.step() is True
        single.step()
    return single.difference(modules)


@four_ranks
@pytest.mark.parametrize("idle", NAMES)
@pytest.mark.parametrize("split", [TWO_AND_TWO, OVERLAPPING], ids=["2 + 2", "overlapping"])
def test_a_module_without_a_backward_pass_is_left_alone(ranks: RankPool, split: Split, idle: str) -> None:
    assert set(ranks.run(with_an_idle_module, split, idle)) == {0.0}


def scaled_loss(scale: float) -> float:
    """A scaled loss, and gradients scaled back: by a power of two, so that nothing rounds otherwise."""
    split = TWO_AND_TWO
    pairs = [modules_of(split, exact=False) for _ in range(2)]
    ours, expected = (optimizers_of(split, modules) for modules in pairs)
    for step in range(2):
        backward(split, pairs[0], step, scale=scale)
        backward(split, pairs[1], step)
        ours.scale_grads(1 / scale)
        assert ours.step() and expected.step()
    mine, theirs = ([p for m in modules.values() for p in m.parameters()] for modules in pairs)
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, theirs))


@four_ranks
def test_gradients_of_a_scaled_loss_are_scaled_back(ranks: RankPool) -> None:
    assert set(ranks.run(scaled_loss, 2.0**10)) == {0.0}
