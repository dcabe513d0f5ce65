"""One rate and one momentum for groups that differ: the ratio is kept where there is one to keep, no key is left."""

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.config import linked_rates
from lwopt_backend.config.linked_rates import OWN_RATES, LinkedRates, ParamGroup
from lwopt_backend.config.registry import options_of


def linked(*rates: float, lr: float | None = None) -> list[Any]:
    groups = [{"lr": rate} for rate in rates]
    return LinkedRates.of(groups, rates[0] if lr is None else lr).link(groups)


def write(groups: list[Any], *rates: float) -> list[float]:
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return [group["lr"] for group in groups]


def close(*rates: float) -> Any:
    return pytest.approx(list(rates))


def test_one_rate_for_all_groups_keeps_the_ratio() -> None:
    assert write(linked(0.02, 0.001, 0.01), 0.2, 0.2, 0.2) == close(0.2, 0.01, 0.1)
    for first in ((0.01, 1.5e-4), (0.0, 0.0)):  # scaled together; a schedule that starts at zero says nothing
        groups = linked(0.02, 3e-4)
        assert write(groups, *first) == list(first)
        assert write(groups, 0.02, 0.02) == close(0.02, 3e-4)


def test_options_of_torchs_adamw_are_asked_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = torch.optim.AdamW([torch.zeros(1)]).param_groups
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", None)  # which imports it
    assert {**linked_rates.torchs.__wrapped__(), "params": group["params"]} == group


def test_rates_of_their_own_are_taken_as_they_are_for_good() -> None:
    """So that a cosine to one floor ends in equal rates."""
    groups = linked(0.02, 0.001)
    for own in ([0.012, 0.0024], [0.004, 0.004]):
        assert write(groups, *own) == own


def test_what_has_no_ratio_takes_rates_as_written() -> None:
    """Whatever the optimizer's own rate is: a schedule that reads rates back would shrink them step by step."""
    assert write(linked(0.0, 3e-4), 0.1, 0.1) == [0.1, 0.1]
    of_one_rate, single = linked(0.005, 0.005, lr=0.02), linked(3e-4, lr=0.02)
    for rate in (0.005, 0.0025):
        assert write(of_one_rate, rate, rate) == [rate, rate]
        assert write(single, rate) == [rate]


def test_a_rate_written_to_one_group_changes_that_group_only_and_ends_no_round() -> None:
    for number in range(2):
        groups, expected = linked(0.02, 0.001), [0.02, 0.001]
        for _ in range(2):
            groups[number]["lr"] = expected[number] = 0.5
        assert [group["lr"] for group in groups] == expected
        assert write(groups, 0.2, 0.2) == close(0.2, 0.01)
    rates = LinkedRates([1.0, 0.015])  # a new link begins a new one
    rates.link([{"lr": 0.02}, {"lr": 3e-4}])[0]["lr"] = 0.5
    groups = rates.link([{"lr": 0.02}, {"lr": 3e-4}])
    groups[1].update(lr=0.5)  # like an assignment
    assert [group["lr"] for group in groups] == [0.02, 0.5]


def test_own_rates_outlast_a_checkpoint() -> None:
    """The end of a cosine, resumed: both rates have reached the same floor and must not be taken for one rate. A
    flattened checkpoint is read by the keys that the groups have; they are saved as plain dictionaries."""
    groups = linked(0.02, 3e-4)
    assert [group[OWN_RATES] for group in groups] == [False, False]
    write(groups, 0.012, 2.4e-4)
    assert [group[OWN_RATES] for group in groups] == [True, True]
    assert type(pickle.loads(pickle.dumps(groups[0]))) is dict and type(copy.deepcopy(groups[0])) is dict
    fresh = LinkedRates([1.0, 0.015])
    assert write(fresh.link([dict(group) for group in groups]), 1e-5, 1e-5) == [1e-5, 1e-5]
    again = fresh.link([{"lr": 0.02}, {"lr": 3e-4}])
    assert write(again, 1e-5, 1e-5) == [1e-5, 1e-5], "nor does a checkpoint of a linked run forget what was seen here"
    assert OWN_RATES not in linked(3e-4)[0]


def of_rule(rule: str, **given: Any) -> ParamGroup:
    group = {"params": [], "rule": rule, **options_of(rule, given, "test").model_dump()}
    return LinkedRates([1.0]).link([group])[0]


MOMENTA: list[tuple[str, dict[str, Any], str, Any, Any]] = [  # a rule's options, its key, the value before and after
    ("muon", {"momentum": 0.95}, "momentum", 0.95, 0.8),
    ("adamw", {"betas": (0.9, 0.95)}, "betas", (0.9, 0.95), (0.8, 0.95)),
    ("lion", {"betas": (0.9, 0.99)}, "betas", (0.9, 0.99), (0.8, 0.99)),
    ("sgd", {"momentum": 0.9}, "momentum", 0.9, 0.8),
    ("sgd", {}, "momentum", 0, 0),  # its state has no momentum
    ("torch_optimizer_elementwise", {"class": "torch.optim.Adagrad"}, "rule", "torch_optimizer_elementwise", ANY),
]


@pytest.mark.parametrize(("rule", "given", "key", "before", "after"), MOMENTA)
def test_a_momentum_has_the_rules_name(rule: str, given: dict[str, Any], key: str, before: Any, after: Any) -> None:
    for written in ("momentum", "betas"):
        group = of_rule(rule, **given)
        keys = set(group)
        assert group[key] == before
        # As torch's schedulers do it.
        group[written] = 0.8 if written == "momentum" else (0.8, *group["betas"][1:])
        assert group[key] == after and set(group) == keys


def test_a_momentum_that_an_older_checkpoint_left_in_a_group_of_betas_is_dropped() -> None:
    group = LinkedRates([1.0]).link([{**of_rule("adamw"), "momentum": 0.85}])[0]
    assert "momentum" not in group and group["betas"] == (0.9, 0.999)


# torch's schedulers, in plain PyTorch
def optimizer_of_both(**options: Any) -> LayerWiseOptimizer:
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6))
    settings = {"lr": 0.02, "elementwise": {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.95)}, **options}
    return LayerWiseOptimizer(model, **settings, report=False)


def test_a_schedule_that_cycles_momentum_needs_a_rule_that_has_one() -> None:
    plain = {"name": "torch_optimizer", "class": "torch.optim.Adagrad"}
    model = nn.Sequential(nn.LayerNorm(6))
    optimizer = LayerWiseOptimizer(model, elementwise=plain, allow_no_matrix=True, report=False)
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def test_rates_stay_linked_after_a_checkpoint_is_loaded_and_a_cosine_keeps_its_floor(tmp_path: Path) -> None:
    saved, fresh, resumed = optimizer_of_both(), optimizer_of_both(), optimizer_of_both()
    fresh.load_state_dict(saved.state_dict())
    assert write(fresh.param_groups, 0.1, 0.1) == close(0.1, 0.005)
    schedule = CosineAnnealingLR(saved, T_max=2, eta_min=1e-4)
    for _ in range(2):
        saved.step()
        schedule.step()
    saved.save_state_dict(tmp_path)
    resumed.load_state_dict_from(tmp_path)
    assert write(resumed.param_groups, 1e-4, 1e-4) == [1e-4, 1e-4]


def test_without_matrices_the_rate_is_the_other_rules() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    first, second = (list(layer.parameters()) for layer in model)
    groups = [{"params": first}, {"params": second, "lr": 1e-3}]
    optimizer = LayerWiseOptimizer(model, elementwise_lr=2e-3, params=groups, allow_no_matrix=True, report=False)
    assert write(optimizer.param_groups, 0.1, 0.1) == close(0.1, 0.05)


def test_module_optimizers_keep_the_ratio_of_every_module() -> None:
    optimizers = ModuleOptimizers({"vision": optimizer_of_both(), "language": optimizer_of_both(lr=0.01)})
    OneCycleLR(optimizers, max_lr=0.1, total_steps=10)
    assert [group["lr"] for group in optimizers.param_groups] == close(0.004, 0.0002, 0.004, 0.0004)
    assert [group["betas"][0] for group in optimizers.param_groups if "betas" in group] == [0.95, 0.95]
