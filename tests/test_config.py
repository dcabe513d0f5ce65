"""Configurations: sections, options, entries written for DeepSpeed, param groups, a user's own rules; their errors."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer, MatrixRule, register_rule
from lwopt_backend.cli.rule_facts import rule_facts
from lwopt_backend.config.choices import arguments_of, layer_wise_settings, muon_settings, settings_of
from lwopt_backend.config.hosts import OwnedConfig, ZeROConfig
from lwopt_backend.config.options import Options
from lwopt_backend.config.param_groups import as_groups, split
from lwopt_backend.config.registry import (
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    AdamWOptions,
    MuonOptions,
    build_matrix_rule,
    cost_of,
    register_elementwise,
)
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.routing.fused import TABLE
from lwopt_backend.routing.grouping import group_parameters
from lwopt_backend.routing.routing import AtomSettings
from lwopt_backend.rules import option
from tests.cells import cells
from tests.launcher import ROOT, run_script
from tests.migration import rules_for
from tests.models import UnevenLM, batch
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.zero import config, engine_for, train

Message = tuple[dict[str, Any], str]


def fails(call: Callable[[], object], *messages: str) -> str:
    """What a call says that must raise ValueError; it has all of ``messages``."""
    with pytest.raises(ValueError) as caught:
        call()
    assert all(message in str(caught.value) for message in messages) and "pydantic" not in str(caught.value)
    return str(caught.value)


# Everything that can be written wrongly, by where it is written


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


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def settings(**options: Any) -> Any:
    return settings_of(ZeROConfig, options, "LayerWise")


def arguments(matrix: Any = "muon", lr: Any = None, elementwise: Any = "adamw", rate: Any = None, **given: Any) -> Any:
    return arguments_of(OwnedConfig, matrix, lr, elementwise, rate, (), given, "here")


def in_a_group(**given: Any) -> None:
    (weight,) = tensors((2, 2))
    split([{"params": [weight], **given}], {id(weight): True}, muon_settings({}, "")[0])


def overriding(**override: Any) -> None:
    LayerWiseOptimizer(Mixture(), report=False, overrides=[override])


def muon_entry(**entry: Any) -> Any:
    return muon_settings(entry, "LayerWiseMuon")


def layer_wise_entry(**entry: Any) -> Any:
    return layer_wise_settings(entry, "LayerWise")


class Demanding(torch.optim.SGD):
    """It has an argument without a default."""

    def __init__(self, params: Any, momentum: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


def override(**sections: Any) -> dict[str, Any]:
    return {"overrides": [{"params": "*", **sections}]}


def of_class(path: object, **options: Any) -> dict[str, Any]:
    return {"matrix": {"name": "torch_optimizer", "class": path, **options}}


ADAM = "torch.optim.Adam"
DEMANDING = {"name": "torch_optimizer", "class": Demanding}
OWNED = {"storage": "owned"}
PATH = "class: expected an optimizer's class or its path"
NO_COUNTERPART = "which has no counterpart; "
FOREIGN: list[Message] = [
    ({"betas": [0.9, 0.9], "adam_w_mode": False}, f"adam_w_mode is False, {NO_COUNTERPART}with the type"),
    ({"muon_lr": 0.1, "per_head_muon": True}, f"per_head_muon is True, {NO_COUNTERPART}say how many heads"),
    ({"betas": [0.9, 0.9], "fp32_optimizer_states": False}, "fp32_optimizer_states is False, which has no"),
    ({"muon_lr": 0.1, "ns_method": "grim"}, "ns_method: expected 'gram' or 'standard'; found 'grim'"),
    ({"betas": "auto", "lr": "auto"}, "lr, betas: found 'auto', which only Hugging Face's Trainer fills in"),
    ({"betas": [0.9, 0.9], "momentun": 0.9}, "unknown key 'momentun'; did you mean 'momentum'?"),
]
WRONG: dict[Callable[..., object], list[Message]] = {
    muon_entry: [
        *FOREIGN,
        ({"lr": "2e-2"}, "LayerWiseMuon: 1 wrong option(s)\n  lr: input should be a valid number; found '2e-2'"),
        ({"lr": float("nan")}, "lr: input should be a finite number; found nan"),
        ({"lr": True}, "lr: input should be a valid number; found True"),
        ({"lr": -0.1}, "lr: input should be greater than or equal to 0; found -0.1"),
        ({"momentum": 1.0}, "momentum: input should be less than 1; found 1.0"),
        ({"momentum": -0.5}, "momentum: input should be greater than or equal to 0; found -0.5"),
        ({"nesterov": "yes"}, "nesterov: input should be a valid boolean; found 'yes'"),
        ({"ns_steps": 2.5}, "ns_steps: input should be a valid integer"),
        ({"ns_steps": 0}, "ns_steps: input should be greater than or equal to 1; found 0"),
        ({"bucket_numel": 0}, "bucket_numel: input should be greater than or equal to 1; found 0"),
        ({"gram_aspect": 0.5}, "gram_aspect: input should be greater than or equal to 1; found 0.5"),
        ({"gram_aspect": True}, "gram_aspect: input should be a valid number; found True"),
        ({"adjust_lr_fn": "orignal"}, "adjust_lr_fn: input should be 'original', 'match_rms_adamw'"),
        ({"policy": "spread"}, "policy: input should be 'auto', 'stay' or 'balance'; found 'spread'"),
        ({"momentum": 2, "Momentum": 1}, "LayerWiseMuon: 2 wrong option(s)\n  momentum: input should be less than 1"),
        ({"momentum": 2, "Momentum": 1}, "\n  unknown key 'Momentum'; did you mean 'momentum'?"),
        ({"zzzz": 1}, "unknown key 'zzzz'; known: 'lr', 'weight_decay'"),
        ({"adamw": {"momentum": 1}}, "unknown key 'adamw.momentum'"),
        ({"adamw": {"beta": [0.9, 0.95]}}, "unknown key 'adamw.beta'; did you mean 'betas'?"),
        ({"amsgrad": True}, "unknown key 'amsgrad'; did you mean 'adamw.amsgrad'?"),
        ({"betas": [0.9, 0.9], "adamw": {"lr": 0.1}}, "unknown key 'betas'; did you mean 'adamw.betas'?"),
        ({"adamw": {"foreach": True, "fused": True}}, "foreach and fused are both true, but torch has them one at"),
        ({"adamw": {"lr": "auto"}}, "adamw.lr: input should be a valid number; found 'auto', which only Hugging Face"),
        ({"storage": "mine"}, "storage: input should be 'zero' or 'owned'; found 'mine'"),
        ({"bucket_mb": 1.0}, "'bucket_mb': only for \"storage\": \"owned\", but the storage is 'zero'"),
        ({**OWNED, "policy": "stay"}, "'policy': only for \"storage\": \"zero\", but the storage is 'owned'"),
        ({**OWNED, "layout": "dense"}, "layout: input should be 'auto', 'padded' or 'compact'; found 'dense'"),
        ({**OWNED, "bucket_mb": 0.0}, "bucket_mb: input should be greater than 0; found 0.0"),
    ],
    layer_wise_entry: [
        *FOREIGN,
        ({"betas": [0.9, 0.9], "matrix": "muon"}, "unknown key 'betas'; did you mean 'elementwise.betas'?"),
    ],
    settings: [
        ({"matrix": {"name": "moun"}}, "LayerWise: matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"lr": 1.0}}, "LayerWise: matrix: expected a key 'name', one of muon"),
        ({"matrix": 3}, "matrix: expected a rule's name, or a section with a 'name'; found 3"),
        ({"matrix": {"name": "muon", "momentun": 0.9}}, "unknown key 'momentun'; did you mean 'momentum'?"),
        ({"matrix": "muon", "matrx": 1}, "LayerWise: unknown key 'matrx'; did you mean 'matrix'?"),
        ({"momentum": 0.9}, "LayerWise: unknown key 'momentum'; did you mean 'matrix.momentum'?"),
        ({"lr": 0.1, "matrix": {"name": "muon", "lr": 0.2}}, "'lr' is given twice, as 0.2 and in 'matrix' as 0.1"),
        ({"elementwise": "adam"}, "LayerWise: elementwise: unknown rule 'adam'; did you mean 'adamw'?"),
        ({"overrides": {"params": "*"}}, "LayerWise: overrides: expected a list of sections with 'params'"),
        ({"overrides": [{"matrix": {"lr": 1.0}}]}, "LayerWise: overrides[0]: expected a section with 'params'"),
        (override(), "overrides[0]: expected options in 'matrix' or 'elementwise'; found none"),
        (override(matrx={}), "overrides[0]: unknown key 'matrx'; did you mean 'matrix'?"),
        (override(matrix={"lrr": 1}), "overrides[0]: matrix: 1 wrong option(s)"),
        (override(matrix={"name": "adamw"}), "overrides[0]: matrix: unknown rule 'adamw'"),
        (override(matrix=None), "[0]: matrix: expected a rule's name, or a section of options; found None"),
        (override(matrix="moun"), "overrides[0]: matrix: unknown rule 'moun'; did you mean"),
        ({"overrides": [{"params": 3, "matrix": {"lr": 1.0}}]}, "overrides[0]: params: expected a glob on names, or a"),
        ({"overrides": [{"params": ["*", 3], "matrix": {"lr": 1.0}}]}, "or a list of them; found ['*', 3]"),
        (override(elementwise={"name": ["lion"]}), "overrides[0]: elementwise: name: expec"),
        (override(**of_class(3)), f"overrides[0]: matrix: {PATH}"),
        ({"matrix": {"name": ["muon"]}}, "LayerWise: matrix: name: expected one of muon, normuon, adamuon, "),
        ({"elementwise": {"name": None}}, "LayerWise: elementwise: name: expected one of adamw, lion, sgd, torch_opt"),
        ({"matrix": {"name": "torch_optimizer"}}, "matrix: expected 'class', the path of an optimizer's class"),
        (of_class(3), f"matrix: {PATH}, e.g. 'pytorch_optimizer.SOAP'; found 3"),
        (of_class("torch.optim.Adm"), "torch.optim has no 'Adm'; did you mean 'Adam'?"),
        (of_class("no_such_package.X"), "cannot be imported: No module named"),
        (
            of_class("torch.nn.Linear"),
            "expected a torch.optim.Optimizer, found <class 'torch.nn.modules.linear.Linear'",
        ),
        (of_class(ADAM, betaz=1), "unknown key 'betaz'; did you mean 'betas'?"),
        (of_class(ADAM, lr=-1.0), "torch.optim.Adam refuses these arguments: Invalid learning rate: -1.0"),
        (of_class(ADAM, betas=3), "Adam refuses these arguments: betas is 3; expected a value like (0.9, 0.999)"),
        (of_class(".a.Adam"), "class '.a.Adam' cannot be imported: "),
    ],
    arguments: [
        ({"bucket_md": 1.0}, "here: unknown key 'bucket_md'; did you mean 'bucket_mb'?"),
        ({"matrix": {"name": "muon", "lr": 0.1}, "lr": 0.02}, "here: 'lr' is given twice"),
        ({"matrix": DEMANDING}, "Demanding refuses these arguments: 'momentum' is missing"),
        ({"matrix": "moun", "momentum": 0.9}, "here: matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"name": ["muon"]}, "momentum": 0.9}, "here: matrix: name: expected one of muon, "),
        ({"matrix": {"name": "torch_optimizer"}, "alpha": 0.9}, "here: matrix: expected 'class', the path of an"),
        ({"elementwise": {"name": ["adamw"]}}, "here: elementwise: name: expected one of adamw, "),
        ({"elementwise": "adamw", "adamw": 3}, "here: adamw: expected a section of options; found 3"),
        ({"elementwise": "lion", "lion": None}, "here: lion: expected a section of options; found None"),
    ],
    in_a_group: [
        ({"weight_decy": 0.1}, "param group 0: unknown key 'weight_decy'; did you mean 'weight_decay'"),
        ({"momentum": 1.5}, "momentum: input should be less than 1"),
        ({"adamw": {"lrr": 1}}, "param group 0, 'adamw': "),
        ({"adamw": 3}, "param group 0: adamw: expected a section of options; found 3"),
        ({"betas": (0.9, 0.99)}, "param group 0: 'betas' is an option of 'adamw'; write it into the group's section '"),
        ({"exclude": ["*"]}, "param group 0: 'exclude' is an option of the whole optimizer, not of a param group"),
        ({"policy": "stay"}, "param group 0: 'policy' is an option of the whole optimizer"),
        ({"rule": "adamw"}, "param group 0: 'rule' is a key that this optimizer writes itself"),
    ],
    overriding: [
        ({"params": "expert.*", "matrix": {"lr": 1.0}}, "overrides[0]: 'expert.*' matches no trained parameter; did"),
        ({"params": "q_norm.*", "matrix": {"lr": 1.0}}, "all that match are trained by 'elementwise'"),
        ({"params": "first.weight", "elementwise": {"lr": 1.0}}, "all that match are trained by 'matrix'"),
    ],
}


@pytest.mark.parametrize(("call", "given", "message"), [(call, *row) for call, rows in WRONG.items() for row in rows])
def test_what_is_written_wrongly_is_answered_with_what_was_expected_and_found(
    call: Callable[..., object], given: dict[str, Any], message: str
) -> None:
    answer = fails(lambda: call(**given), message)
    begins = {muon_entry: "LayerWiseMuon: ", layer_wise_entry: "LayerWise: ", settings: "LayerWise", arguments: "here"}
    assert answer.startswith(begins.get(call, ""))


# Options


@pytest.mark.parametrize(("options", "optimizer"), [(MuonOptions, torch.optim.Muon), (AdamWOptions, torch.optim.AdamW)])
def test_names_and_defaults_are_torchs(options: Any, optimizer: Any) -> None:
    theirs = inspect.signature(optimizer.__init__).parameters
    for name, field in options.model_fields.items():
        if name in theirs:  # the others are ours
            assert field.default == theirs[name].default, name
    assert optimizer is not torch.optim.Muon or set(options.model_fields) >= set(theirs) - {"self", "params"}


def test_what_travels_is_in_the_dtype_of_the_iteration_unless_told() -> None:
    def on_the_wire(**options: Any) -> torch.dtype:
        rules, host = muon_settings(options, "")
        (weight,) = tensors((2, 2))
        (group,) = split([{"params": [weight]}], {id(weight): True}, rules)
        return build_matrix_rule(group, host).exchange_dtype

    assert on_the_wire(ns_dtype="float32") == on_the_wire(exchange_dtype="float32") == torch.float32
    assert on_the_wire() == torch.bfloat16


# Sections and arguments


def test_sections_name_the_rules_their_options_and_those_of_some_parameters() -> None:
    overrides = [
        {"params": "*.experts.*", "matrix": {"lr": 0.01}},
        {"params": ["*.q_norm.*", "*.k_norm.*"], "elementwise": {"weight_decay": 0}},
        {"params": "*", "matrix": "soap", "elementwise": "lion"},
    ]
    sections = {"matrix": {"name": "muon", "lr": 0.02}, "elementwise": {"name": "adamw", "lr": 3e-4}}
    rules, host = settings(**sections, overrides=overrides, policy="stay")
    assert (rules.matrix.rule, rules.matrix.lr) == ("muon", 0.02) and host.policy == "stay"
    _, norms, everything = rules.overrides
    assert norms.params == ("*.q_norm.*", "*.k_norm.*")
    assert (everything.matrix, everything.elementwise) == ({"name": "soap"}, {"name": "lion"})
    assert rules.matrix.changed(everything.matrix, "here").rule == "soap"
    beside, _ = settings(lr=0.5, weight_decay=0.25)
    assert beside.matrix.options.weight_decay == 0.25, "beside the sections: the matrix's"
    assert settings(matrix={"name": "soap"}, lr=0.5)[0].matrix.lr == 0.5


def test_arguments_in_python_may_mix_the_rules_options_with_the_hosts() -> None:
    rules, host = arguments("muon", 0.02, "adamw", 3e-4, momentum=0.8, bucket_mb=1.0, adamw={"eps": 1e-6})
    assert (rules.matrix.options.momentum, rules.matrix.lr, host.bucket_mb) == (0.8, 0.02, 1.0)
    assert (rules.elementwise.options.eps, rules.elementwise.lr) == (1e-6, 3e-4)
    assert arguments(DEMANDING, momentum=0.5)[0].matrix.options.momentum == 0.5, "what a class requires, too"


RMSPROP = {"name": "torch_optimizer", "class": "torch.optim.RMSprop", "alpha": 0.5}


@cells(
    before=[torch.optim.RMSprop, "torch.optim.RMSprop"],
    cls=[torch.optim.RMSprop, "torch.optim.RMSprop", "torch.optim.rmsprop.RMSprop"],
)
def test_an_override_that_repeats_the_class_keeps_its_other_options(before: Any, cls: Any) -> None:
    rules, _ = settings(matrix={**RMSPROP, "class": before}, **override(matrix={"class": cls, "lr": 0.25}))
    changed = rules.matrix.changed(rules.overrides[0].matrix, "here")
    assert (changed.options.alpha, changed.options.lr) == (0.5, 0.25)


def test_an_override_with_another_class_begins_with_that_classs_defaults() -> None:
    rules, _ = settings(matrix=RMSPROP)
    changed = rules.matrix.changed({"class": torch.optim.Adadelta}, "here")
    assert changed.options.model_dump()["rho"] == 0.9 and not hasattr(changed.options, "alpha")
    fails(lambda: rules.matrix.changed({"class": "torch.optim.RMSprp"}, "here"), "here: class 'torch.optim.RMSprp': ")


def test_overrides_make_param_groups_of_their_own() -> None:
    model = Mixture()
    names = {id(param): name for name, param in model.named_parameters()}
    overrides = [
        {"params": "experts.*", "matrix": {"lr": 0.01}},
        {"params": "experts.1.*", "matrix": {"name": "normuon", "lr": 0.03}},
        {"params": "q_norm.*", "elementwise": {"weight_decay": 0.0}},
    ]
    groups = LayerWiseOptimizer(model, lr=0.02, weight_decay=0.1, report=False, overrides=overrides).param_groups
    found = [(g["rule"], g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in groups]
    assert found == [
        ("muon", 0.02, 0.1, ["first.weight"]),
        ("muon", 0.01, 0.1, ["experts.0.weight"]),
        ("normuon", 0.03, 0.1, ["experts.1.weight"]),
        ("adamw", 1e-3, 0.01, ["embedding.weight", "first.bias", "experts.0.bias", "experts.1.bias"]),
        ("adamw", 1e-3, 0.0, ["q_norm.weight", "q_norm.bias"]),
    ]


# Param groups


def test_parameters_may_have_names_and_are_given_once() -> None:
    model, (weight,) = nn.Linear(2, 3), tensors((2, 2))
    (group,) = as_groups(model.named_parameters())
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    twice = [{"params": [weight]}, {"params": weight}]
    fails(lambda: as_groups(twice), "param group 1, position 0: this parameter of shape")


def test_params_are_checked() -> None:
    for params, error, message in [
        (torch.zeros(2), TypeError, "found a single tensor"),
        ([], ValueError, "params is empty"),
        (["weight"], TypeError, "param group 0, position 0: expected a parameter, found a str"),
        ([{"lr": 1.0}], ValueError, "param group 0: expected a key 'params', found 'lr'"),
        ([{"params": []}, torch.zeros(2)], TypeError, "param group 1: expected a dictionary .* found a Tensor"),
        ([torch.zeros(2), {"params": []}], TypeError, "param group 0: expected a dictionary .* found a Tensor"),
    ]:
        with pytest.raises(error, match=message):
            as_groups(params)


def test_groups_are_split_in_halves_and_keep_extra_keys() -> None:
    weight, bias, lone = tensors((2, 3), (3,), (4,))
    own = {"eps": 1e-6, "lr": 0.1}
    groups = [{"params": [bias, weight], "name": "first", "lr": 0.5}, {"params": [lone], "lr": 0.5, "adamw": own}]
    halves = split(groups, {id(weight): True, id(bias): False, id(lone): False}, muon_settings({}, "")[0])
    assert [(h["rule"], h["from_group"], len(h["params"])) for h in halves] == [
        ("muon", 0, 1), ("adamw", 0, 1), ("adamw", 1, 1),
    ]  # fmt: skip
    assert [h["lr"] for h in halves] == [0.5, 0.5, 0.1], "a section in the group has the last word"
    assert [h.get("name") for h in halves] == ["first", "first", None]
    assert halves[2]["eps"] == 1e-6


def test_parameters_that_are_not_given_or_have_no_elements_are_not_trained() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["a"].empty = nn.Parameter(torch.empty(0, 3))
    grouping = group_parameters(model, as_groups(model["a"].parameters()), *muon_settings({}, ""))
    ungiven = [(r.kind, r.reason) for r in grouping.routes if r.name.startswith("b")]
    assert ungiven == [("frozen", "not given to the optimizer")] * 2
    trained = [(g["rule"], [tuple(p.shape) for p in g["params"]]) for g in grouping.groups]
    assert trained == [("muon", [(3, 3)]), ("adamw", [(3,)])]
    alone = nn.Module()
    alone.weight = nn.Parameter(torch.empty(0, 3))
    params = as_groups(alone.parameters())
    fails(lambda: group_parameters(alone, params, *muon_settings({}, "")), "none of the 0 trained parameters is a matr")


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
def own_rules() -> Any:
    register_rule("sign", Sign, cost=lambda shape, options: 3 * shape[0] * shape[1])
    register_rule("greedy", Sign, takes=lambda route: "first" not in route.name)
    yield
    del MATRIX_RULES["sign"], MATRIX_RULES["greedy"]


def test_a_dataclass_and_one_call_make_a_rule(own_rules: None) -> None:
    model = Mixture()
    optimizer = LayerWiseOptimizer(model, matrix={"name": "sign", "power": 1.0}, report=False)
    before = model.first.weight.detach().clone()
    model(torch.arange(5)).backward()
    optimizer.step()
    moved = (before - model.first.weight.detach()).abs()
    assert torch.allclose(moved[moved > 0], torch.tensor(0.1 / 8))
    assert cost_of((4, 5), {"rule": "sign", "lr": 0.1, "power": 0.5}) == 60
    fails(lambda: settings(matrix={"name": "sign", "powr": 1.0}), "unknown key 'powr'; did you mean 'power'?")
    fails(lambda: settings(matrix={"name": "sign", "lr": "fast"}), "lr: input should be a valid number")


@dataclass
class Bounded(Sign):
    power: float = option(0.5, "of the number of columns", "this test", ge=0, lt=1)
    parts: tuple[int, ...] = option((1,), "of a matrix", "this test", check=tuple)

    def __post_init__(self) -> None:
        if sum(self.parts) != 1 and not self.power:
            raise ValueError("parts: expected (1,) without a power")


def test_an_option_of_a_rule_has_what_its_field_says_of_it() -> None:
    with mock.patch.dict(MATRIX_RULES):
        register_rule("bounded", Bounded)
        (rule,) = rule_facts("bounded", None)["rules"]
        assert rule["options"][-2:] == [
            {"name": "power", "default": "0.5", "meaning": "of the number of columns", "source": "this test"},
            {"name": "parts", "default": "[1]", "meaning": "of a matrix", "source": "this test"},
        ]
        rules, _ = settings(matrix={"name": "bounded", "parts": [1, 2]})
        assert rules.matrix.options.model_dump()["parts"] == (1, 2)
        for wrong, found in (
            ({"power": 1.0}, "power: input should be less than 1; found 1.0"),
            ({"power": "0.5"}, "power: input should be a valid number; found '0.5'"),
            ({"power": 0.0, "parts": [1, 1]}, "parts: expected (1,) without a power"),
        ):
            fails(lambda: settings(matrix={"name": "bounded", **wrong}), found)  # noqa: B023


def test_names_are_taken_once_and_a_rule_has_options(own_rules: None) -> None:
    class Plain(MatrixRule):
        pass

    for name in ("sign", "adamw"):
        fails(partial(register_rule, name, Sign), f"a rule named '{name}' is registered already")
    fails(lambda: register_rule("plain", Plain), "rule 'plain': expected a dataclass, or the options' model")


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


def test_a_rule_has_a_default_routing_that_globs_overrule(own_rules: None) -> None:
    def reasons(**globs: Any) -> dict[str, tuple[str, str]]:
        optimizer = LayerWiseOptimizer(Mixture(), matrix="greedy", report=False, **globs)
        return {route.name: (route.kind, route.reason) for route in optimizer._grouping.routes}

    found = reasons()
    assert found["embedding.weight"] == ("matrix", "embedding; 'greedy' takes it")
    assert found["first.weight"] == ("elementwise", "2-D weight; 'greedy' leaves it")
    assert found["first.bias"][0] == "elementwise"
    found = reasons(include=["first.weight"], exclude=["embedding.*"])
    assert found["first.weight"][0] == "matrix" and found["embedding.weight"][0] == "elementwise"


# Entries of ds_config.json that were written for DeepSpeed's Muon or AdamW, with our type in them

TYPES = pytest.mark.parametrize("settings", [muon_settings, layer_wise_settings])
MUON_ENTRIES = [
    {"muon_lr": 0.05, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
    {"lr": 0.02, "adam_lr": 1e-3},
    {"lr": 0.02, "ns_method": "standard", "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.9, "betas": [0.8, 0.9], "torch_adam": True, "adam_w_mode": True},
    {"per_head_muon": False},
]
SHARED = ("lr", "weight_decay")
ADAMW = {"lr": 5e-5, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01}


def options_of(settings: Any, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    rules, _ = settings(entry, "LayerWise")
    (note,) = rules.notes
    return rules.matrix.options.model_dump(), rules.elementwise.options.model_dump(), note


@TYPES
@pytest.mark.parametrize("entry", MUON_ENTRIES)
def test_an_entry_of_deepspeeds_muon_means_what_deepspeed_makes_of_it(settings: Any, entry: dict[str, Any]) -> None:
    weight, bias = tensors((2, 2), (2,))
    weight.use_muon, bias.use_muon = True, False
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups([weight, bias], entry)).param_groups
    muon, adamw, note = options_of(settings, entry)
    for ours, group, keys in ((muon, theirs[0], (*SHARED, "momentum")), (adamw, theirs[1], (*SHARED, "betas", "eps"))):
        for key in keys:
            assert ours[key] == (tuple(group[key]) if key == "betas" else group[key]), key
    gram = {key: muon[key] for key in ("gram_aspect", "gram_restarts", "ns_dtype")}
    if theirs[0]["ns_method"] == "gram":
        assert gram == {key: getattr(rules_for("deepspeed").matrix.options, key) for key in gram}
    else:
        assert gram == {"gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}
    assert "an entry of DeepSpeed's Muon" in note and "gradient_clipping limits gradients here" in note


@TYPES
@pytest.mark.parametrize("torch_adam", [False, True])
def test_an_entry_of_adamw_has_its_defaults_and_one_rate_for_everything(settings: Any, torch_adam: bool) -> None:
    theirs = inspect.signature(torch.optim.AdamW if torch_adam else FusedAdam).parameters
    muon, adamw, _ = options_of(settings, {"betas": [0.9, 0.99], "torch_adam": torch_adam})
    assert adamw["betas"] == (0.9, 0.99) and adamw["eps"] == theirs["eps"].default
    for key in SHARED:
        assert muon[key] == adamw[key] == theirs[key].default, key
    assert muon["adjust_lr_fn"] == "match_rms_adamw"


@TYPES
@pytest.mark.parametrize("entry", [ADAMW, MUON_ENTRIES[0]])
def test_the_line_has_the_entry_in_our_words(settings: Any, entry: dict[str, Any]) -> None:
    """With it in place of the entry nothing changes, and nothing is left to say."""
    *found, note = options_of(settings, entry)
    written = json.loads(note[note.index("{") : note.rindex("}") + 1])
    rules, _ = muon_settings(written, "LayerWiseMuon")
    assert [rules.matrix.options.model_dump(), rules.elementwise.options.model_dump()] == found and not rules.notes


def test_options_of_ours_stand_beside_theirs_and_win_and_our_own_entries_are_left_alone() -> None:
    rules, host = muon_settings({**ADAMW, "adjust_lr_fn": "original", "exclude": "gate.*", "policy": "stay"}, "")
    assert rules.matrix.options.model_dump()["adjust_lr_fn"] == "original" and "match_rms_adamw" not in rules.notes[0]
    assert (host.exclude, host.policy) == (("gate.*",), "stay")
    rules, _ = muon_settings({"muon_lr": 0.1, "ns_dtype": "bfloat16"}, "")
    assert rules.matrix.options.model_dump()["ns_dtype"] == "bfloat16"
    for own in ({"lr": 0.02, "momentum": 0.9, "eps": 1e-6}, {"lr": 0.02, "adamw": {"lr": 1e-3}}):
        assert muon_settings(own, "")[0].notes == ()


@pytest.mark.parametrize(
    ("written_type", "storage"), [("layerwisemuon", "zero"), ("LAYERWISE", "zero"), ("layer_wise_muon", "owned")]
)
@on_ranks(2)
def test_an_engine_takes_the_entry_with_the_type_in_any_case_and_says_so_once(written_type: str, storage: str) -> None:
    given = config(1)
    given["optimizer"] = {"type": written_type, "params": {**ADAMW, "report": False, "storage": storage}}
    with mock.patch.object(deepspeed_engine.logger, "warning") as warning, engine_for(given) as engine:
        groups = [(group["rule"], group["lr"]) for group in engine.basic_optimizer.param_groups]
    assert groups == [("muon", 5e-5), ("adamw", 5e-5)]
    notes = [call.args[0] for call in warning.call_args_list if "an entry of" in call.args[0]]
    assert len(notes) == (1 if dist.get_rank() == 0 else 0)
    assert all("makes this an entry of AdamW" in note for note in notes)


UNREGISTERED = "ValueError: optimizer.type is {!r}, but it is not registered; call lwopt_backend."


@pytest.mark.parametrize(
    ("written_type", "registered", "message"),
    [
        ("LayerWiseMuon", False, UNREGISTERED.format("LayerWiseMuon")),
        ("layerwise", False, UNREGISTERED.format("layerwise")),
        ("LayerWiseMoun", True, "which DeepSpeed does not know; did you mean 'LayerWiseMuon'?"),
        ("Nonsense", True, "AssertionError: Nonsense is not a supported DeepSpeed Optimizer"),
    ],
)
@on_ranks(2)
def test_a_type_that_is_not_known_is_an_error_that_says_what_to_do(
    written_type: str, registered: bool, message: str
) -> None:
    given, model = config(1), UnevenLM()
    given["optimizer"]["type"] = written_type
    classes = {} if registered else {name: vars(torch.optim).pop(name) for name in ("LayerWise", "LayerWiseMuon")}
    try:
        with pytest.raises((ValueError, AssertionError)) as caught:
            deepspeed.initialize(model=model, config=given, model_parameters=model.parameters())
    finally:
        vars(torch.optim).update(classes)
    assert message in f"{type(caught.value).__name__}: {caught.value}"


# What is shipped: the configurations (test_train_gpt_fsdp2.py trains with FSDP2's), docs/optimizers.md

CONFIGS = sorted(path for kind in ("stage*.json", "zero*.json") for path in (ROOT / "configs").glob(kind))
PAGE = (ROOT / "docs" / "optimizers.md").read_text()
BLOCKS = dict(re.findall(r"^```json (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def losses_with(given: dict[str, Any]) -> list[float]:
    with engine_for(given) as engine:
        return train(engine, [0] * 8)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_train(request: pytest.FixtureRequest, path: Path) -> None:
    # DeepSpeed keeps "autocast is on" in a global of the process.
    pool: RankPool = request.getfixturevalue("ranks_to_spoil" if "autocast" in path.stem else "ranks")
    for losses in pool.run(losses_with, json.loads(path.read_text())):
        assert losses[-1] < losses[0]


def test_a_users_own_rule_runs_as_printed(tmp_path: Path) -> None:
    ((name, script),) = re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(script)
    torch.manual_seed(0)
    with mock.patch.dict(MATRIX_RULES):
        code, printed = run_script([str(tmp_path / name)], {}, joined=True)
    assert code == 0, printed
    assert float(re.findall(r"loss (\d\.\d+)", printed)[0]) < 0.1
    rule = script[script.index("@dataclass") : script.index("\n\nmodel")]
    assert len([line for line in rule.splitlines() if line.strip()]) <= 20


def test_the_entries_of_the_page_are_understood_and_every_rule_is_in_its_table() -> None:
    entry = json.loads(BLOCKS["entry"])
    rules, _ = settings_of(ZeROConfig, entry["params"], entry["type"])
    assert rules.overrides[0].matrix == {"lr": 0.01}
    rules, _ = settings_of(ZeROConfig, json.loads(BLOCKS["params"]), "LayerWise")
    assert rules.matrix.options.precondition_frequency == 10
    AtomSettings.parse(json.loads(BLOCKS["atoms"]))
    assert f"{len(TABLE)} classes of transformers" in PAGE
    table = PAGE[PAGE.index("## Which rules there are") : PAGE.index("## Other options")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == ({*MATRIX_RULES, *ELEMENTWISE_RULES} - {"torch_optimizer_elementwise"})
