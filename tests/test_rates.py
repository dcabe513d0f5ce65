"""Learning rates of param groups: with matrices, one ``lr`` for all, which schedules write, times ``lr_scale``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, OneCycleLR

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.groups import registry
from lwopt_backend.groups.registry import LR_SCALE, effective_lr
from tests.models import UnevenLM

MUON, ADAMW = 0.02, 3e-4


def optimizer_of_both(lr: float = MUON, elementwise_lr: float = ADAMW, **options: Any) -> LayerWiseOptimizer:
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6))
    return LayerWiseOptimizer(model, lr=lr, elementwise_lr=elementwise_lr, report=False, **options)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [effective_lr(group) for group in optimizer.param_groups]


def written(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_groups_have_the_matrices_rate_and_factors() -> None:
    both = optimizer_of_both()
    assert written(both) == [MUON, MUON] and both.defaults["lr"] == MUON
    assert rates(both) == [MUON, ADAMW]
    alike = optimizer_of_both(0.01, 0.01)
    assert written(alike) == [0.01, 0.01] and [group[LR_SCALE] for group in alike.param_groups] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rates_given", "base", "expected"),
    [
        ((5e-3, 5e-3), 5e-3, [5e-3, 5e-3, 5e-3, 5e-3]),  # all groups have one: it is the optimizer's
        ((5e-3, None), MUON, [5e-3, 5e-3, MUON, ADAMW]),
        ((5e-3, 4e-3), MUON, [5e-3, 5e-3, 4e-3, 4e-3]),
    ],
)
def test_rates_of_the_users_groups_are_theirs(rates_given: Any, base: float, expected: list[float]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    groups: list[dict[str, Any]] = [
        {"params": list(layer.parameters()), **({} if rate is None else {"lr": rate})}
        for layer, rate in zip(model, rates_given)
    ]
    optimizer = LayerWiseOptimizer(model, lr=MUON, elementwise_lr=ADAMW, params=groups, include="*", report=False)
    assert set(written(optimizer)) == {base} and rates(optimizer) == pytest.approx(expected)


def test_a_rate_of_zero_has_no_multiples_so_that_groups_keep_their_own() -> None:
    optimizer = optimizer_of_both(lr=0.0)
    assert written(optimizer) == [0.0, ADAMW] and [group[LR_SCALE] for group in optimizer.param_groups] == [1.0, 1.0]


def test_without_matrices_groups_have_their_own_rates_as_in_torch() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    first, second = (list(layer.parameters()) for layer in model)
    groups = [{"params": first}, {"params": second, "lr": 1e-3}]
    optimizer = LayerWiseOptimizer(model, elementwise_lr=2e-3, params=groups, allow_no_matrix=True, report=False)
    assert written(optimizer) == [2e-3, 1e-3] and not any(LR_SCALE in group for group in optimizer.param_groups)
    assert optimizer.defaults["lr"] == 2e-3


def test_a_groups_own_lr_scale_is_refused_by_name() -> None:
    """As timm's groups have it, whose schedules multiply by it themselves."""
    model = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="param group 0: 'lr_scale' is a key that this optimizer writes itself"):
        LayerWiseOptimizer(model, params=[{"params": list(model.parameters()), LR_SCALE: 0.5}], report=False)


def test_a_user_may_change_factors_and_metrics_tell_the_rates_in_use() -> None:
    optimizer = optimizer_of_both()
    optimizer.record_metrics()
    optimizer.param_groups[1][LR_SCALE] *= 2
    optimizer.step()
    assert optimizer.metrics()["lr"] == [MUON, 2 * ADAMW]


@pytest.mark.parametrize("scheduler", [OneCycleLR, CyclicLR])
def test_schedules_that_cycle_momentum_are_refused_beside_matrices(scheduler: Any) -> None:
    """They would cycle Muon's or AdamW's: the other has its momentum under another name."""
    given: dict[str, Any] = {"max_lr": 0.1, **({"total_steps": 10} if scheduler is OneCycleLR else {"base_lr": 0.01})}
    with pytest.raises(ValueError, match="must support momentum"):
        scheduler(optimizer_of_both(), **given)
    optimizer = optimizer_of_both()
    scheduler(optimizer, **given, cycle_momentum=False)
    assert [group.get("momentum") for group in optimizer.param_groups] == [0.95, None]
    model = nn.LayerNorm(6)
    alone = LayerWiseOptimizer(model, elementwise_lr=1e-3, allow_no_matrix=True, report=False)
    OneCycleLR(alone, max_lr=0.1, total_steps=10)
    assert alone.param_groups[0]["betas"] == (0.95, 0.999)


@pytest.mark.parametrize("way", ["state_dict", "folder"])
@pytest.mark.parametrize("before", [(MUON, ADAMW), (0.01, 0.01)])
@pytest.mark.parametrize("after", [(0.1, 0.05), (0.005, 0.005)])
def test_a_resumed_run_has_the_rates_in_use(
    tmp_path: Path, before: tuple[float, float], after: tuple[float, float], way: str
) -> None:
    """Whatever the fresh optimizer was configured with; a schedule then goes on as in the run that was saved."""
    saved, resumed = optimizer_of_both(*before), optimizer_of_both(*after)
    schedule = CosineAnnealingLR(saved, T_max=4, eta_min=1e-4)
    for _ in range(3):
        saved.step()
        schedule.step()
    if way == "folder":
        saved.save_state_dict(tmp_path, schedule=schedule.state_dict())
        state = resumed.load_state_dict_from(tmp_path)["schedule"]
    else:
        resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
        state = schedule.state_dict()
    assert rates(resumed) == rates(saved)
    again = CosineAnnealingLR(resumed, T_max=4, eta_min=1e-4)
    again.load_state_dict(state)
    for one in (saved, resumed):
        one.step()
    for one in (schedule, again):
        one.step()
    assert rates(resumed) == rates(saved)


def test_keys_of_torchs_adamw_are_asked_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = torch.optim.AdamW([torch.zeros(1)]).param_groups
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", None)  # which imports it
    assert {**registry.torchs_keys.__wrapped__(), "params": group["params"]} == group


def test_overrides_have_factors_of_the_same_rate() -> None:
    overrides = [{"params": "layers.2.*", "matrix": {"lr": 0.01}}]
    given: dict[str, Any] = {"lr": MUON, "elementwise_lr": ADAMW, "overrides": overrides}
    optimizer = LayerWiseOptimizer(UnevenLM(), **given, report=False)
    assert [(group["rule"], group["lr"], group[LR_SCALE]) for group in optimizer.param_groups] == [
        ("muon", MUON, 1.0), ("muon", MUON, 0.5), ("adamw", MUON, ADAMW / MUON),
    ]  # fmt: skip
