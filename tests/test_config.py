"""Options: torch's names and defaults, and errors that say what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from lwopt_backend.config import AdamWOptions, LayerWiseMuonConfig, MuonOptions, parse
from lwopt_backend.linked_rates import LinkedRates
from lwopt_backend.param_groups import as_groups, split
from lwopt_backend.registry import rule_named


@pytest.mark.parametrize(("options", "optimizer"), [(MuonOptions, torch.optim.Muon), (AdamWOptions, torch.optim.AdamW)])
def test_names_and_defaults_are_torchs(options: Any, optimizer: Any) -> None:
    theirs = inspect.signature(optimizer.__init__).parameters
    for name, field in options.model_fields.items():
        assert field.default == theirs[name].default, name


def test_muon_takes_every_argument_of_torch() -> None:
    theirs = set(inspect.signature(torch.optim.Muon.__init__).parameters) - {"self", "params"}
    assert set(MuonOptions.model_fields) == theirs


def test_the_entry_of_the_readme_is_understood() -> None:
    config = parse(
        LayerWiseMuonConfig,
        {
            "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
            "adjust_lr_fn": "original", "include": [], "exclude": ["*.router.*"],
            "adamw": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "LayerWiseMuon",
    )  # fmt: skip
    assert config.adamw.betas == (0.9, 0.95) and config.exclude == ("*.router.*",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "fast"}, "lr: input should be a valid number, unable to parse string as a number; found 'fast'"),
        ({"lr": float("nan")}, "lr: input should be a finite number; found nan"),
        ({"nesterov": "yes"}, "nesterov: input should be a valid boolean; found 'yes'"),
        ({"ns_steps": 2.5}, "ns_steps: input should be a valid integer"),
        ({"ns_coefficients": [1.0, 2.0]}, "ns_coefficients.2: field required"),
        ({"adjust_lr_fn": "orignal"}, "adjust_lr_fn: input should be 'original' or 'match_rms_adamw'; found 'orignal'"),
        ({"policy": "spread"}, "policy: input should be 'auto', 'stay' or 'balance'; found 'spread'"),
        ({"muon_lr": 0.1, "Momentum": 1}, "2 wrong option"),
        ({"Momentum": 0.9}, "unknown key 'Momentum'; did you mean 'momentum'?"),
        ({"zzzz": 1}, "unknown key 'zzzz'; known: 'lr', 'weight_decay'"),
        ({"adamw": {"momentum": 1}}, "unknown key 'adamw.momentum'"),
        ({"amsgrad": True}, "unknown key 'amsgrad'; did you mean 'adamw.amsgrad'?"),
    ],
)
def test_wrong_options_say_what_was_expected_and_found(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(LayerWiseMuonConfig, options, "LayerWiseMuon")
    assert str(caught.value).startswith("LayerWiseMuon: ") and message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        parse(LayerWiseMuonConfig, {"lr": -1, "momentum": 2}, "here")
    first, *problems = str(caught.value).splitlines()
    assert first == "here: 2 wrong option(s)" and len(problems) == 2


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown rule 'moun'; did you mean 'muon'"):
        rule_named("moun")


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (torch.zeros(2), TypeError, "found a single tensor"),
        ([], ValueError, "params is empty"),
        (["weight"], TypeError, "param group 0, position 0: expected a parameter, found a str"),
    ],
)
def test_params_are_checked(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_groups(params)


def test_named_parameters_are_taken_like_parameters() -> None:
    model = torch.nn.Linear(2, 3)
    (group,) = as_groups(model.named_parameters())
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_a_parameter_given_twice_is_an_error() -> None:
    (weight,) = tensors((2, 2))
    with pytest.raises(ValueError, match="param group 1, position 0: this parameter of shape"):
        as_groups([{"params": [weight]}, {"params": weight}])


def test_groups_are_split_in_halves_and_keep_extra_keys() -> None:
    weight, bias, lone = tensors((2, 3), (3,), (4,))
    groups = [{"params": [bias, weight], "name": "first", "lr": 0.5}, {"params": [lone], "adamw": {"eps": 1e-6}}]
    halves = split(groups, {id(weight): True, id(bias): False, id(lone): False}, LayerWiseMuonConfig())
    assert [(h["rule"], h["from_group"], len(h["params"])) for h in halves] == [
        ("muon", 0, 1), ("adamw", 0, 1), ("adamw", 1, 1),
    ]  # fmt: skip
    assert [h["lr"] for h in halves] == [0.5, 0.5, 1e-3]
    assert [h.get("name") for h in halves] == ["first", "first", None]
    assert halves[2]["eps"] == 1e-6


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weight_decy": 0.1}, "param group 0: unknown key 'weight_decy'; did you mean 'weight_decay'"),
        ({"momentum": 1.5}, "momentum: input should be less than 1"),
        ({"adamw": {"lrr": 1}}, "param group 0, 'adamw': .*"),
    ],
)
def test_wrong_group_options_are_errors(group: dict[str, Any], message: str) -> None:
    (weight,) = tensors((2, 2))
    with pytest.raises(ValueError, match=message):
        split([{"params": [weight], **group}], {id(weight): True}, LayerWiseMuonConfig())


def linked(*rates: float) -> list[Any]:
    groups = [{"lr": rate} for rate in rates]
    return LinkedRates.of(groups, rates[0]).link(groups)


def test_one_rate_written_to_all_keeps_the_ratio() -> None:
    groups = linked(0.02, 0.001, 0.01)
    for group in groups:
        group["lr"] = 0.2
    assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.01, 0.1])


def test_rates_written_group_by_group_are_taken_as_they_are_and_for_good() -> None:
    groups = linked(0.02, 0.001)
    for rates in ([0.01, 0.0005], [0.004, 0.004]):  # a cosine to the same floor ends in equal rates
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        assert [group["lr"] for group in groups] == rates


def test_a_rate_written_to_one_group_changes_that_group_only() -> None:
    groups = linked(0.02, 0.001)
    groups[0]["lr"] = 0.5
    assert [group["lr"] for group in groups] == [0.5, 0.001]
    for group in groups:
        group["lr"] = 0.2
    assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.01])


def test_param_groups_are_saved_as_plain_dictionaries() -> None:
    import copy
    import pickle

    (group, _) = linked(0.02, 0.001)
    assert type(pickle.loads(pickle.dumps(group))) is dict and type(copy.deepcopy(group)) is dict
