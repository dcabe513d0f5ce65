"""Options: torch's names and defaults, and errors that say what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from lwopt_backend.chosen import Rules
from lwopt_backend.grouping import group_parameters
from lwopt_backend.muon_config import LayerWiseMuonConfig, muon_settings
from lwopt_backend.options import parse
from lwopt_backend.param_groups import as_groups, split
from lwopt_backend.registry import build_matrix_rule, rule_named
from lwopt_backend.rule_options import AdamWOptions, MuonOptions


@pytest.mark.parametrize(("options", "optimizer"), [(MuonOptions, torch.optim.Muon), (AdamWOptions, torch.optim.AdamW)])
def test_names_and_defaults_are_torchs(options: Any, optimizer: Any) -> None:
    theirs = inspect.signature(optimizer.__init__).parameters
    for name, field in options.model_fields.items():
        if name in theirs:  # the others are ours
            assert field.default == theirs[name].default, name


def test_muon_takes_every_argument_of_torch() -> None:
    theirs = set(inspect.signature(torch.optim.Muon.__init__).parameters) - {"self", "params"}
    assert set(MuonOptions.model_fields) >= theirs


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
        ({"lr": "fast"}, "lr: input should be a valid number; found 'fast'"),
        ({"lr": float("nan")}, "lr: input should be a finite number; found nan"),
        ({"nesterov": "yes"}, "nesterov: input should be a valid boolean; found 'yes'"),
        ({"lr": "2e-2"}, "lr: input should be a valid number; found '2e-2'"),
        ({"lr": True}, "lr: input should be a valid number; found True"),
        ({"ns_steps": 2.5}, "ns_steps: input should be a valid integer"),
        ({"ns_steps": 0}, "ns_steps: input should be greater than or equal to 1; found 0"),
        ({"bucket_numel": 0}, "bucket_numel: input should be greater than or equal to 1; found 0"),
        ({"ns_coefficients": [1.0, 2.0]}, "ns_coefficients: expected three numbers"),
        ({"gram_aspect": 0.5}, "gram_aspect: input should be greater than or equal to 1; found 0.5"),
        ({"gram_aspect": True}, "gram_aspect: input should be a valid number; found True"),
        ({"adjust_lr_fn": "orignal"}, "adjust_lr_fn: input should be 'original', 'match_rms_adamw'"),
        ({"policy": "spread"}, "policy: input should be 'auto', 'stay' or 'balance'; found 'spread'"),
        ({"muon_lr": 0.1, "Momentum": 1}, "2 wrong option"),
        ({"Momentum": 0.9}, "unknown key 'Momentum'; did you mean 'momentum'?"),
        ({"zzzz": 1}, "unknown key 'zzzz'; known: 'lr', 'weight_decay'"),
        ({"adamw": {"momentum": 1}}, "unknown key 'adamw.momentum'"),
        ({"amsgrad": True}, "unknown key 'amsgrad'; did you mean 'adamw.amsgrad'?"),
        ({"adamw": {"foreach": True, "fused": True}}, "foreach and fused are both true, but torch has them one at"),
    ],
)
def test_wrong_options_say_what_was_expected_and_found(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(LayerWiseMuonConfig, options, "LayerWiseMuon")
    assert str(caught.value).startswith("LayerWiseMuon: ") and message in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_what_travels_is_in_the_dtype_of_the_iteration_unless_told() -> None:
    def on_the_wire(**options: Any) -> torch.dtype:
        rules, config = muon_settings(options, "")
        (group,) = split([{"params": tensors((2, 2))}], Everything(True), rules)
        return build_matrix_rule(group, config).exchange_dtype

    assert on_the_wire(ns_dtype="float32") == torch.float32
    assert on_the_wire(exchange_dtype="float32") == torch.float32
    assert on_the_wire() == torch.bfloat16


class Everything(dict):
    """The same for every parameter."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def get(self, key: int, default: Any = None) -> bool:
        return self.value


def muon() -> Rules:
    return muon_settings({}, "")[0]


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
        ([{"lr": 1.0}], ValueError, "param group 0: expected a key 'params', found 'lr'"),
        ([{"params": []}, torch.zeros(2)], TypeError, "param group 1: expected a dictionary .* found a Tensor"),
        ([torch.zeros(2), {"params": []}], TypeError, "param group 0: expected a dictionary .* found a Tensor"),
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
    own = {"eps": 1e-6, "lr": 0.1}
    groups = [{"params": [bias, weight], "name": "first", "lr": 0.5}, {"params": [lone], "lr": 0.5, "adamw": own}]
    halves = split(groups, {id(weight): True, id(bias): False, id(lone): False}, muon())
    assert [(h["rule"], h["from_group"], len(h["params"])) for h in halves] == [
        ("muon", 0, 1), ("adamw", 0, 1), ("adamw", 1, 1),
    ]  # fmt: skip
    assert [h["lr"] for h in halves] == [0.5, 0.5, 0.1], "a section in the group has the last word"
    assert [h.get("name") for h in halves] == ["first", "first", None]
    assert halves[2]["eps"] == 1e-6


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weight_decy": 0.1}, "param group 0: unknown key 'weight_decy'; did you mean 'weight_decay'"),
        ({"momentum": 1.5}, "momentum: input should be less than 1"),
        ({"adamw": {"lrr": 1}}, "param group 0, 'adamw': .*"),
        ({"adamw": 3}, "param group 0: adamw: expected a section of options; found 3"),
        (
            {"betas": (0.9, 0.99)},
            "param group 0: 'betas' is an option of 'adamw'; write it into the group's section 'adamw'",
        ),
        ({"exclude": ["*"]}, "param group 0: 'exclude' is an option of the whole optimizer, not of a param group"),
        ({"policy": "stay"}, "param group 0: 'policy' is an option of the whole optimizer"),
        ({"gram_aspect": 0.5}, "gram_aspect: input should be greater than or equal to 1"),
        ({"rule": "adamw"}, "param group 0: 'rule' is a key that this optimizer writes itself"),
    ],
)
def test_wrong_group_options_are_errors(group: dict[str, Any], message: str) -> None:
    (weight,) = tensors((2, 2))
    with pytest.raises(ValueError, match=message):
        split([{"params": [weight], **group}], {id(weight): True}, muon())


def test_parameters_that_are_not_given_or_have_no_elements_are_not_trained() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["a"].empty = torch.nn.Parameter(torch.empty(0, 3))
    grouping = group_parameters(model, as_groups(model["a"].parameters()), *muon_settings({}, ""))
    assert [(r.name, r.kind, r.reason) for r in grouping.routes if r.name.startswith("b")] == [
        ("b.weight", "frozen", "not given to the optimizer"),
        ("b.bias", "frozen", "not given to the optimizer"),
    ]
    assert [(g["rule"], [tuple(p.shape) for p in g["params"]]) for g in grouping.groups] == [
        ("muon", [(3, 3)]),
        ("adamw", [(3,)]),
    ]


def test_a_model_whose_only_matrix_is_empty_has_none() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(0, 3))
    with pytest.raises(ValueError, match="none of the 0 trained parameters is a matrix"):
        group_parameters(model, as_groups(model.parameters()), *muon_settings({}, ""))
