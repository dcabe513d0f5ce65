"""The table of rules, and configurations that name them: sections, overrides, a user's own rule, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer, MatrixRule, register_rule
from lwopt_backend.chosen import arguments_of, settings_of
from lwopt_backend.config import OwnedConfig, ZeROConfig
from lwopt_backend.options import Options
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES, cost_of, register_elementwise
from tests.models import UnevenLM, batch


def settings(**options: Any) -> Any:
    return settings_of(ZeROConfig, options, "LayerWise")


def test_the_sections_of_the_issue_are_understood() -> None:
    rules, config = settings(
        matrix={"name": "muon", "lr": 0.02},
        elementwise={"name": "adamw", "lr": 3e-4},
        overrides=[
            {"params": "*.experts.*", "matrix": {"lr": 0.01}},
            {"params": ["*.q_norm.*", "*.k_norm.*"], "elementwise": {"weight_decay": 0}},
        ],
        policy="stay",
    )
    assert (rules.matrix.rule, rules.matrix.lr) == ("muon", 0.02)
    assert rules.overrides[1].params == ("*.q_norm.*", "*.k_norm.*") and config.policy == "stay"


def test_a_rate_beside_the_sections_is_the_matrix_rules() -> None:
    assert settings(lr=0.5, weight_decay=0.25)[0].matrix.options.weight_decay == 0.25
    assert settings(matrix={"name": "soap"}, lr=0.5)[0].matrix.lr == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrix": {"name": "moun"}}, "LayerWise: matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"lr": 1.0}}, "LayerWise: matrix: expected a key 'name', one of muon"),
        ({"matrix": 3}, "matrix: expected a rule's name, or a section with a 'name'; found 3"),
        ({"matrix": {"name": "muon", "momentun": 0.9}}, "unknown key 'momentun'; did you mean 'momentum'?"),
        ({"matrix": "muon", "matrx": 1}, "LayerWise: unknown key 'matrx'; did you mean 'matrix'?"),
        ({"momentum": 0.9}, "unknown key 'momentum'; did you mean 'matrix.momentum'?"),
        ({"lr": 0.1, "matrix": {"name": "muon", "lr": 0.2}}, "'lr' is given twice, as 0.2 and in 'matrix' as 0.1"),
        ({"elementwise": "adam"}, "elementwise: unknown rule 'adam'; did you mean 'adamw'?"),
        ({"overrides": {"params": "*"}}, "overrides: expected a list of sections with 'params'"),
        ({"overrides": [{"matrix": {"lr": 1.0}}]}, "overrides[0]: expected a section with 'params'"),
        ({"overrides": [{"params": "*"}]}, "overrides[0]: expected options in 'matrix' or 'elementwise'; found none"),
        ({"overrides": [{"params": "*", "matrx": {}}]}, "overrides[0]: unknown key 'matrx'; did you mean 'matrix'?"),
        ({"overrides": [{"params": "*", "matrix": {"lrr": 1}}]}, "overrides[0]: matrix: 1 wrong option(s)"),
        ({"overrides": [{"params": "*", "matrix": {"name": "adamw"}}]}, "overrides[0]: matrix: unknown rule 'adamw'"),
        (
            {"overrides": [{"params": "*", "matrix": None}]},
            "overrides[0]: matrix: expected a rule's name, or a section of options; found None",
        ),
        ({"overrides": [{"params": "*", "matrix": "moun"}]}, "overrides[0]: matrix: unknown rule 'moun'; did you mean"),
        ({"overrides": [{"params": 3, "matrix": {"lr": 1.0}}]}, "overrides[0]: params: expected a glob on names, or a"),
        ({"overrides": [{"params": ["*", 3], "matrix": {"lr": 1.0}}]}, "or a list of them; found ['*', 3]"),
        ({"overrides": [{"params": "*", "elementwise": {"name": ["lion"]}}]}, "overrides[0]: elementwise: name: expec"),
        ({"matrix": {"name": ["muon"]}}, "LayerWise: matrix: name: expected one of muon, normuon, adamuon, "),
        ({"elementwise": {"name": None}}, "LayerWise: elementwise: name: expected one of adamw, lion, sgd, torch_opt"),
        (
            {"matrix": {"name": "torch_optimizer", "class": 3}},
            "matrix: class: expected an optimizer's class or its path, e.g. 'pytorch_optimizer.SOAP'; found 3",
        ),
        (
            {"overrides": [{"params": "*", "matrix": {"name": "torch_optimizer", "class": 3}}]},
            "overrides[0]: matrix: class: expected an optimizer's class or its path",
        ),
        (
            {"matrix": {"name": "torch_optimizer"}},
            "matrix: expected 'class', the path of an optimizer's class",
        ),
        (
            {"matrix": {"name": "torch_optimizer", "class": "torch.optim.Adm"}},
            "torch.optim has no 'Adm'; did you mean 'Adam'?",
        ),
        ({"matrix": {"name": "torch_optimizer", "class": "no_such_package.X"}}, "cannot be imported: No module named"),
        (
            {"matrix": {"name": "torch_optimizer", "class": "torch.nn.Linear"}},
            "expected a torch.optim.Optimizer, found <class 'torch.nn.modules.linear.Linear'>",
        ),
        (
            {"matrix": {"name": "torch_optimizer", "class": "torch.optim.Adam", "betaz": 1}},
            "unknown key 'betaz'; did you mean 'betas'?",
        ),
        (
            {"matrix": {"name": "torch_optimizer", "class": "torch.optim.Adam", "lr": -1.0}},
            "torch.optim.Adam refuses these arguments: Invalid learning rate: -1.0",
        ),
    ],
)
def test_wrong_sections_say_what_was_expected_and_found(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings(**options)
    assert message in str(caught.value) and str(caught.value).startswith("LayerWise")


def test_arguments_in_python_may_mix_the_rules_options_with_the_hosts() -> None:
    given = {"momentum": 0.8, "bucket_mb": 1.0, "adamw": {"eps": 1e-6}}
    rules, config = arguments_of(OwnedConfig, "muon", 0.02, "adamw", 3e-4, (), given, "here")
    assert (rules.matrix.options.momentum, rules.matrix.lr, config.bucket_mb) == (0.8, 0.02, 1.0)
    assert (rules.elementwise.options.eps, rules.elementwise.lr) == (1e-6, 3e-4)
    with pytest.raises(ValueError, match="here: unknown key 'bucket_md'; did you mean 'bucket_mb'?"):
        arguments_of(OwnedConfig, "muon", None, "adamw", None, (), {"bucket_md": 1.0}, "here")
    with pytest.raises(ValueError, match="here: 'lr' is given twice"):
        arguments_of(OwnedConfig, {"name": "muon", "lr": 0.1}, 0.02, "adamw", None, (), {}, "here")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"matrix": "moun", "momentum": 0.9}, "here: matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"name": ["muon"]}, "momentum": 0.9}, "here: matrix: name: expected one of muon, "),
        ({"matrix": {"name": "torch_optimizer"}, "alpha": 0.9}, "here: matrix: expected 'class', the path of an"),
        ({"elementwise": {"name": ["adamw"]}}, "here: elementwise: name: expected one of adamw, "),
        ({"elementwise": "adamw", "adamw": 3}, "here: adamw: expected a section of options; found 3"),
        ({"elementwise": "lion", "lion": None}, "here: lion: expected a section of options; found None"),
    ],
)
def test_wrong_arguments_in_python_say_what_was_expected_and_found(given: dict[str, Any], message: str) -> None:
    given = dict(given)
    matrix, elementwise = given.pop("matrix", "muon"), given.pop("elementwise", "adamw")
    with pytest.raises(ValueError) as caught:
        arguments_of(OwnedConfig, matrix, None, elementwise, None, (), given, "here")
    assert message in str(caught.value) and str(caught.value).startswith("here")


class Demanding(torch.optim.SGD):
    """It has an argument without a default."""

    def __init__(self, params: Any, momentum: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


def test_arguments_that_a_class_requires_may_stand_beside_its_name() -> None:
    matrix = {"name": "torch_optimizer", "class": Demanding}
    rules, _ = arguments_of(OwnedConfig, matrix, None, "adamw", None, (), {"momentum": 0.5}, "here")
    assert rules.matrix.options.momentum == 0.5
    with pytest.raises(ValueError, match="here: matrix: .*Demanding refuses these arguments: .*'momentum'"):
        arguments_of(OwnedConfig, matrix, None, "adamw", None, (), {}, "here")


# Overrides


def test_an_overrides_section_may_be_a_rules_name() -> None:
    rules, _ = settings(overrides=[{"params": "*", "matrix": "soap", "elementwise": "lion"}])
    (override,) = rules.overrides
    assert (override.matrix, override.elementwise) == ({"name": "soap"}, {"name": "lion"})
    assert rules.matrix.changed(override.matrix, "here").rule == "soap"


RMSPROP = {"name": "torch_optimizer", "class": "torch.optim.RMSprop", "alpha": 0.5}


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, "torch.optim.RMSprop", "torch.optim.rmsprop.RMSprop"], ids=str)
@pytest.mark.parametrize("before", [torch.optim.RMSprop, "torch.optim.RMSprop"], ids=str)
def test_an_override_that_repeats_the_class_keeps_its_other_options(before: Any, cls: Any) -> None:
    rules, _ = settings(
        matrix={**RMSPROP, "class": before}, overrides=[{"params": "*", "matrix": {"class": cls, "lr": 0.25}}]
    )
    changed = rules.matrix.changed(rules.overrides[0].matrix, "here")
    assert (changed.options.alpha, changed.options.lr) == (0.5, 0.25)


def test_an_override_with_another_class_begins_with_that_classs_defaults() -> None:
    rules, _ = settings(matrix=RMSPROP)
    changed = rules.matrix.changed({"class": torch.optim.Adadelta}, "here")
    assert changed.options.model_dump()["rho"] == 0.9 and not hasattr(changed.options, "alpha")
    with pytest.raises(ValueError, match="here: class 'torch.optim.RMSprp': torch.optim has no"):
        rules.matrix.changed({"class": "torch.optim.RMSprp"}, "here")


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.q_norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        return self.q_norm(sum(expert(x) for expert in self.experts)).square().mean()


def test_overrides_make_param_groups_of_their_own() -> None:
    optimizer = LayerWiseOptimizer(
        Mixture(),
        lr=0.02,
        weight_decay=0.1,
        report=False,
        overrides=[
            {"params": "experts.*", "matrix": {"lr": 0.01}},
            {"params": "experts.1.*", "matrix": {"name": "normuon", "lr": 0.03}},
            {"params": "q_norm.*", "elementwise": {"weight_decay": 0.0}},
        ],
    )
    names = {id(p): name for name, p in optimizer._model.named_parameters()}
    found = [
        (g["rule"], g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in optimizer.param_groups
    ]
    assert found == [
        ("muon", 0.02, 0.1, ["first.weight"]),
        ("muon", 0.01, 0.1, ["experts.0.weight"]),
        ("normuon", 0.03, 0.1, ["experts.1.weight"]),
        ("adamw", 1e-3, 0.01, ["embedding.weight", "first.bias", "experts.0.bias", "experts.1.bias"]),
        ("adamw", 1e-3, 0.0, ["q_norm.weight", "q_norm.bias"]),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"params": "expert.*", "matrix": {"lr": 1.0}}, "overrides[0]: 'expert.*' matches no trained parameter; did"),
        ({"params": "q_norm.*", "matrix": {"lr": 1.0}}, "all that match are trained by 'elementwise'"),
        ({"params": "first.weight", "elementwise": {"lr": 1.0}}, "all that match are trained by 'matrix'"),
    ],
)
def test_overrides_that_change_nothing_are_errors(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        LayerWiseOptimizer(Mixture(), report=False, overrides=[override])
    assert message in str(caught.value)


# A user's own rules


@dataclass
class Sign(MatrixRule):
    """W <- W - lr sign(G), scaled by the matrix's width."""

    lr: float = 0.1
    power: float = 0.5

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices.sign()

    def scale(self, shape: tuple[int, int]) -> float:
        return shape[1] ** -self.power


@pytest.fixture
def own_rule() -> Any:
    register_rule("sign", Sign, cost=lambda shape, options: 3 * shape[0] * shape[1])
    yield
    del MATRIX_RULES["sign"]


def test_a_dataclass_and_one_call_make_a_rule(own_rule: None) -> None:
    model = Mixture()
    optimizer = LayerWiseOptimizer(model, matrix={"name": "sign", "power": 1.0}, report=False)
    before = model.first.weight.detach().clone()
    model(torch.arange(5)).backward()
    optimizer.step()
    moved = (before - model.first.weight.detach()).abs()
    assert torch.allclose(moved[moved > 0], torch.tensor(0.1 / 8))
    assert cost_of((4, 5), {"rule": "sign", "lr": 0.1, "power": 0.5}) == 60


def test_its_options_are_checked_like_all_others(own_rule: None) -> None:
    with pytest.raises(ValueError, match="unknown key 'powr'; did you mean 'power'?"):
        settings(matrix={"name": "sign", "powr": 1.0})
    with pytest.raises(ValueError, match="lr: input should be a valid number"):
        settings(matrix={"name": "sign", "lr": "fast"})


def test_names_are_taken_once(own_rule: None) -> None:
    for name in ("sign", "adamw"):
        with pytest.raises(ValueError, match=f"a rule named '{name}' is registered already"):
            register_rule(name, Sign)

    class Plain(MatrixRule):
        pass

    with pytest.raises(ValueError, match="rule 'plain': expected a dataclass, or the options' model"):
        register_rule("plain", Plain)


class SGDOptions(Options):
    lr: float = 0.1


def test_an_elementwise_rule_is_registered_with_its_state() -> None:
    register_elementwise("own_sgd", torch.optim.SGD, options=SGDOptions, new_state=lambda flat, options: {})
    try:
        model, twin = UnevenLM(), UnevenLM()
        ours = LayerWiseOptimizer(model, elementwise={"name": "own_sgd", "lr": 0.3}, report=False)
        model(*batch(0, 4)).backward()
        twin(*batch(0, 4)).backward()
        ours.step()
        expected = twin.embedding.weight.detach().add(twin.embedding.weight.grad, alpha=-0.3)
        assert torch.equal(model.embedding.weight.detach(), expected)
    finally:
        del ELEMENTWISE_RULES["own_sgd"]


# Which parameters a rule takes


@pytest.fixture
def greedy_rule() -> Any:
    register_rule("greedy", Sign, takes=lambda route: "first" not in route.name)
    yield
    del MATRIX_RULES["greedy"]


def test_a_rule_has_a_default_routing_that_globs_overrule(greedy_rule: None) -> None:
    def reasons(**globs: Any) -> dict[str, tuple[str, str]]:
        optimizer = LayerWiseOptimizer(Mixture(), matrix="greedy", report=False, **globs)
        return {route.name: (route.kind, route.reason) for route in optimizer._grouping.routes}

    found = reasons()
    assert found["embedding.weight"] == ("matrix", "embedding; 'greedy' takes it")
    assert found["first.weight"] == ("elementwise", "2-D weight; 'greedy' leaves it")
    assert found["first.bias"][0] == "elementwise"
    found = reasons(include=["first.weight"], exclude=["embedding.*"])
    assert found["first.weight"][0] == "matrix" and found["embedding.weight"][0] == "elementwise"
