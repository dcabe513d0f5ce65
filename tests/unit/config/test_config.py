"""Configurations: sections, options, entries of other optimizers, param groups, a user's own rules; their errors."""

import contextlib
import inspect
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
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
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer, MatrixRule, register_rule
from lwopt_backend.cli.rule_facts import rule_facts
from lwopt_backend.config.hosts import PlainConfig, ZeROConfig
from lwopt_backend.config.options import options_in
from lwopt_backend.groups import registry
from lwopt_backend.groups.choices import changed, settings_of
from lwopt_backend.groups.grouping import group_parameters
from lwopt_backend.groups.param_groups import as_groups, split
from lwopt_backend.integrations import deepspeed_zero
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.integrations.deepspeed.optimizer import ZeROLayerWise
from lwopt_backend.rules import Muon, option
from tests.support.cells import cells
from tests.support.fsdp2 import mesh_of
from tests.support.launcher import ROOT
from tests.support.models import UnevenLM, batch
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.zero import config, engine_for, train


def fails(call: Callable[[], object], *messages: str) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    answer = str(caught.value)
    assert all(message in answer for message in messages) and "pydantic" not in answer, answer
    return answer


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def settings(**options: Any) -> Any:
    return settings_of(ZeROConfig, options, "LayerWise")


def muon_settings(given: Mapping[str, Any], where: str = "here") -> Any:
    return settings_of(ZeROConfig, given, where)


def arguments(matrix: Any = "muon", **given: Any) -> Any:
    return settings_of(PlainConfig, {"matrix": matrix, **given}, "here")


class Demanding(torch.optim.SGD):
    """It has an argument without a default."""

    def __init__(self, params: Any, momentum: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


DEMANDING = {"name": "torch_optimizer", "class": Demanding}


# Options
@pytest.mark.parametrize(("options", "optimizer"), [(Muon, torch.optim.Muon), (registry.AdamW, torch.optim.AdamW)])
def test_names_and_defaults_are_torchs(options: Any, optimizer: Any) -> None:
    theirs = inspect.signature(optimizer.__init__).parameters
    for name, of_ours in options_in(options).items():
        if name in theirs:  # the others are this package's
            assert of_ours.default == theirs[name].default or (name, of_ours.default) == ("lr", None), name
    assert optimizer is not torch.optim.Muon or set(options_in(options)) >= set(theirs) - {"self", "params"}


@pytest.mark.parametrize("given", [{"ns_dtype": "float32"}, {"exchange_dtype": "float32"}, {}])
def test_exchange_dtype_is_the_iterations(given: dict[str, Any]) -> None:
    """What travels is in the dtype of the iteration, unless told."""
    rules, host = muon_settings(given)
    rule = registry.build_matrix_rule(rules.matrix, host)
    assert rule.exchange_dtype == (torch.float32 if given else torch.bfloat16)


# Sections and arguments
def test_sections_name_rules_options_and_overrides() -> None:
    """Sections name the rules, their options, and those of some parameters."""
    overrides = [
        {"params": "*.experts.*", "matrix": {"lr": 0.01}},
        {"params": ["*.q_norm.*", "*.k_norm.*"], "elementwise": {"weight_decay": 0}},
        {"params": "*", "matrix": "soap", "elementwise": "lion"},
    ]
    sections = {"matrix": {"name": "muon", "lr": 0.02}, "elementwise": {"name": "adamw", "lr": 3e-4}}
    rules, host = settings(**sections, overrides=overrides, policy="stay")
    assert (rules.matrix["rule"], rules.matrix["lr"]) == ("muon", 0.02) and host.policy == "stay"
    _, norms, everything = rules.overrides
    assert norms.params == ("*.q_norm.*", "*.k_norm.*")
    assert (everything.matrix, everything.elementwise) == ({"name": "soap"}, {"name": "lion"})
    assert changed(rules.matrix, everything.matrix)["rule"] == "soap"
    beside, _ = settings(lr=0.5, weight_decay=0.25, momentum=0.5, adamw={"lr": 0.125}, nesterov=False)
    assert (beside.matrix["momentum"], beside.elementwise["lr"]) == (0.5, 0.125), "as in Python"
    assert beside.matrix["weight_decay"] == 0.25, "in addition to the sections: the matrix's"
    assert settings(matrix={"name": "soap"}, lr=0.5)[0].matrix["lr"] == 0.5


def test_python_arguments_mix_rule_and_host_options() -> None:
    """Arguments in Python may mix the rule's options with the host's."""
    given = {"momentum": 0.8, "bucket_mb": 1.0, "exclude": "1.*", "adamw": {"eps": 1e-6}}
    rules, host = arguments(lr=0.02, elementwise_lr=3e-4, **given)
    matrix, elementwise = rules.matrix, rules.elementwise
    assert (matrix["momentum"], matrix["lr"], host.bucket_mb) == (0.8, 0.02, 1.0)
    assert host.exclude == ("1.*",), "one glob need not be in a list"
    assert (elementwise["eps"], elementwise["lr"]) == (1e-6, 3e-4)
    assert arguments(DEMANDING, momentum=0.5)[0].matrix["momentum"] == 0.5, "also what a class requires"


RMSPROP = {"name": "torch_optimizer", "class": "torch.optim.RMSprop", "alpha": 0.5}


@cells(
    before=[torch.optim.RMSprop, "torch.optim.RMSprop"],
    cls=[torch.optim.RMSprop, "torch.optim.RMSprop", "torch.optim.rmsprop.RMSprop"],
)
def test_override_of_the_same_class_keeps_its_options(before: Any, cls: Any) -> None:
    """An override that repeats the class keeps its other options."""
    rules, _ = settings(
        matrix={**RMSPROP, "class": before}, overrides=[{"params": "*", "matrix": {"class": cls, "lr": 0.25}}]
    )
    found = changed(rules.matrix, rules.overrides[0].matrix)
    assert (found["alpha"], found["lr"]) == (0.5, 0.25)


def test_override_of_another_class_has_its_defaults() -> None:
    """An override with another class begins with that class's defaults."""
    found = changed(settings(matrix=RMSPROP)[0].matrix, {"class": torch.optim.Adadelta})
    assert found["rho"] == 0.9 and "alpha" not in found


def test_overrides_make_param_groups_of_their_own() -> None:
    model = UnevenLM()
    names = {id(param): name for name, param in model.named_parameters()}
    overrides = [
        {"params": "layers.[25].*", "matrix": {"lr": 0.01}},
        {"params": "layers.5.*", "matrix": {"name": "normuon", "lr": 0.03}},
        {"params": "layers.4.*", "elementwise": {"weight_decay": 0.0}},
    ]
    groups = LayerWiseOptimizer(model, lr=0.02, weight_decay=0.1, report=False, overrides=overrides).param_groups
    found = [(g["rule"], g["lr"], g["weight_decay"], [names[id(p)] for p in g["params"]]) for g in groups]
    others = ["embedding.weight", "layers.0.bias", "layers.2.bias", "gate.bias", "lm_head.weight"]
    *matrices, first, second = found
    assert matrices[:1] == [("muon", 0.02, 0.1, ["layers.0.weight", "gate.weight"])]
    assert matrices[1:] == [("muon", 0.01, 0.1, ["layers.2.weight"]), ("normuon", 0.03, 0.1, ["layers.5.weight"])]
    assert first == ("adamw", 1e-3, 0.01, others)
    assert second == ("adamw", 1e-3, 0.0, ["layers.4.weight", "layers.4.bias"])


# Param groups
def test_params_may_have_names_and_are_checked() -> None:
    model, (weight,) = nn.Linear(2, 3), tensors((2, 2))
    (group,) = as_groups(model.named_parameters())
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    for params, error, message in [
        (torch.zeros(2), TypeError, "found a single tensor"),
        ([], ValueError, "expected at least one parameter, found none"),
        (["weight"], TypeError, "param group 0, position 0 of 'params': expected a parameter, found a str"),
        ([{"lr": 1.0}], ValueError, "param group 0: expected a key 'params', found 'lr'"),
        ([{"params": []}, torch.zeros(2)], TypeError, "param group 1: expected a dictionary .* found a Tensor"),
        ([torch.zeros(2), {"params": []}], TypeError, "param group 0: expected a dictionary .* found a Tensor"),
        (
            [{"params": [weight]}, {"params": weight}],
            ValueError,
            "param group 1, position 0 of 'params': the parameter of shape",
        ),
    ]:
        with pytest.raises(error, match=message):
            as_groups(params)


def test_groups_are_split_in_halves_and_keep_extra_keys() -> None:
    weight, bias, lone = tensors((2, 3), (3,), (4,))
    own = {"eps": 1e-6, "lr": 0.1}
    groups = [{"params": [bias, weight], "name": "first", "lr": 0.5}, {"params": [lone], "lr": 0.5, "adamw": own}]
    halves = split(groups, {id(weight): True, id(bias): False, id(lone): False}, muon_settings({})[0])
    assert [(h["rule"], h["from_group"], len(h["params"])) for h in halves] == [
        ("muon", 0, 1), ("adamw", 0, 1), ("adamw", 1, 1),
    ]  # fmt: skip
    assert [h["lr"] for h in halves] == [0.5, 0.5, 0.1], "a section in the group has the last word"
    assert [h.get("name") for h in halves] == ["first", "first", None]
    assert halves[2]["eps"] == 1e-6


def test_parameters_not_given_or_empty_are_not_trained() -> None:
    """Parameters that are not given or have no elements are not trained."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["a"].empty = nn.Parameter(torch.empty(0, 3))
    grouping = group_parameters(model, as_groups(model["a"].parameters()), *muon_settings({}))
    ungiven = [(r.kind, r.reason) for r in grouping.routes if r.name.startswith("b")]
    assert ungiven == [("frozen", "not given to the optimizer")] * 2
    trained = [(g["rule"], [tuple(p.shape) for p in g["params"]]) for g in grouping.groups]
    assert trained == [("muon", [(3, 3)]), ("adamw", [(3,)])]
    alone = nn.Module()
    alone.weight = nn.Parameter(torch.empty(0, 3))
    params = as_groups(alone.parameters())
    fails(lambda: group_parameters(alone, params, *muon_settings({})), "none of the 0 trained parameters is a matr")


# A user's own rules
@dataclass
class Sign(MatrixRule):
    lr: float = 0.01
    momentum: float = option(0.9, "of the average of gradients", "Keller Jordan 2024", ge=0, lt=1)
    state_keys = ("average",)

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        state["average"].lerp_(grad, 1 - self.momentum)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return state["average"]

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices.sign()

    def scale(self, shape: tuple[int, int]) -> float:
        return 1 / max(shape)


@dataclass
class PlainSGD:
    lr: float = 0.1


def sgd_state(flat: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
    return {}


def flops(shape: tuple[int, int], options: Mapping[str, Any]) -> int:
    return 3 * shape[0] * shape[1]


@pytest.fixture
def own_rules() -> Any:
    with mock.patch.dict(registry.MATRIX_RULES), mock.patch.dict(registry.ELEMENTWISE_RULES):
        register_rule("sign", Sign, cost=flops)
        register_rule("greedy", Sign, takes=lambda route: "gate" not in route.name)
        registry.register_elementwise("own_sgd", torch.optim.SGD, options=PlainSGD, new_state=sgd_state)
        yield


def test_registering_a_dataclass_makes_a_rule(own_rules: None) -> None:
    """A dataclass and one call make a rule; so it is with element-wise ones."""
    model, twin = UnevenLM(), UnevenLM()
    sections = {"matrix": {"name": "sign", "lr": 0.1}, "elementwise": {"name": "own_sgd", "lr": 0.3}}
    optimizer = LayerWiseOptimizer(model, **sections, report=False)
    for each in (model, twin):
        each(*batch(0, 4)).backward()
    optimizer.step()
    moved = (twin.gate.weight - model.gate.weight).detach().abs()
    assert torch.allclose(moved[moved > 0], torch.tensor(0.1 / 5))
    expected = twin.embedding.weight.detach().add(twin.embedding.weight.grad, alpha=-0.3)
    assert torch.equal(model.embedding.weight.detach(), expected)
    assert registry.cost_of((4, 5), {"rule": "sign", "lr": 0.1}) == 60


@dataclass
class Bounded(Sign):
    power: float = option(0.5, "of the number of columns", "this test", ge=0, lt=1)
    parts: tuple[int, ...] = option((1,), "of a matrix", "this test", check=tuple)

    def __post_init__(self) -> None:
        if sum(self.parts) != 1 and not self.power:
            raise ValueError("parts: expected (1,) without a power")


def test_an_option_of_a_rule_has_what_its_field_says_of_it() -> None:
    with mock.patch.dict(registry.MATRIX_RULES):
        register_rule("bounded", Bounded)
        (rule,) = rule_facts("bounded")["rules"]
        assert rule["options"][-2:] == [
            {"name": "power", "default": "0.5", "meaning": "of the number of columns", "source": "this test"},
            {"name": "parts", "default": "[1]", "meaning": "of a matrix", "source": "this test"},
        ]
        rules, _ = settings(matrix={"name": "bounded", "parts": [1, 2]})
        assert rules.matrix["parts"] == (1, 2)
        for wrong, found in (
            ({"power": 1.0}, "power: input should be less than 1; found 1.0"),
            ({"powr": "0.5"}, "unknown key 'powr'; did you mean 'power'?"),
            ({"lr": "fast"}, "lr: input should be a valid number"),
            ({"power": 0.0, "parts": [1, 1]}, "parts: expected (1,) without a power"),
        ):
            fails(lambda: settings(matrix={"name": "bounded", **wrong}), found)  # noqa: B023


def test_names_are_taken_once_and_a_rule_has_options(own_rules: None) -> None:
    class Plain(MatrixRule):
        pass

    for name in ("sign", "adamw"):
        fails(partial(register_rule, name, Sign), f"a rule named '{name}' is registered already")
    fails(lambda: register_rule("plain", Plain), "rule 'plain': expected a dataclass, whose fields are the options")


def test_a_rule_has_a_default_routing_that_globs_overrule(own_rules: None) -> None:
    def reasons(**globs: Any) -> dict[str, tuple[str, str]]:
        optimizer = LayerWiseOptimizer(UnevenLM(), matrix="greedy", report=False, **globs)
        return {route.name: (route.kind, route.reason) for route in optimizer._grouping.routes}

    found = reasons()
    assert found["embedding.weight"] == ("matrix", "embedding; 'greedy' takes it")
    assert found["gate.weight"] == ("elementwise", "2-D weight; 'greedy' leaves it")
    assert found["gate.bias"][0] == "elementwise"
    found = reasons(include=["gate.weight"], exclude=["embedding.*"])
    assert found["gate.weight"][0] == "matrix" and found["embedding.weight"][0] == "elementwise"


# Entries of ds_config.json that were written for DeepSpeed's Muon or AdamW, with our type in them
layer_wise_settings = partial(settings_of, ZeROConfig)
TYPES = pytest.mark.parametrize("settings", [muon_settings, layer_wise_settings])
MUON_ENTRIES = [
    {"muon_lr": 0.05, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
    {"lr": 0.02, "adam_lr": 1e-3},
    {"muon_lr": 0.01, "ns_method": "standard", "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.9, "betas": [0.8, 0.9], "torch_adam": True, "adam_w_mode": True},
]
SHARED = ("lr", "weight_decay")
ADAMW = {"lr": 5e-5, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.01}


def told_instead(settings: Any, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of both halves, of the entry that the error for this one prints."""
    with pytest.raises(ValueError, match="of another optimizer") as caught:
        settings(entry, "here")
    written = json.loads(str(caught.value).splitlines()[-1])
    assert written["type"] == "LayerWise"
    rules, _ = layer_wise_settings(written["params"], "here")
    return dict(rules.matrix), dict(rules.elementwise)


@TYPES
@pytest.mark.parametrize("entry", MUON_ENTRIES)
def test_entry_of_deepspeeds_muon_is_answered_with_ours(settings: Any, entry: dict[str, Any]) -> None:
    """Instead of an entry of DeepSpeed's Muon one is told that means the same."""
    weight, bias = tensors((2, 2), (2,))
    weight.use_muon, bias.use_muon = True, False
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups([weight, bias], entry)).param_groups
    muon, adamw = told_instead(settings, entry)
    for ours, group, keys in ((muon, theirs[0], (*SHARED, "momentum")), (adamw, theirs[1], (*SHARED, "betas", "eps"))):
        for key in keys:
            assert ours[key] == (tuple(group[key]) if key == "betas" else group[key]), key
    assert muon["adjust_lr_fn"] is None


@TYPES
@pytest.mark.parametrize("torch_adam", [False, True])
def test_entry_of_adamw_is_answered_with_ours(settings: Any, torch_adam: bool) -> None:
    """An entry of AdamW is answered with one of its defaults and step sizes."""
    theirs = inspect.signature(torch.optim.AdamW if torch_adam else FusedAdam).parameters
    muon, adamw = told_instead(settings, {"betas": [0.9, 0.99], "torch_adam": torch_adam})
    assert adamw["betas"] == (0.9, 0.99) and adamw["eps"] == theirs["eps"].default
    for key in SHARED:
        assert muon[key] == adamw[key] == theirs[key].default, key
    assert muon["adjust_lr_fn"] == "match_rms_adamw"
    muon, adamw = told_instead(settings, ADAMW)
    assert [(half["lr"], half["weight_decay"]) for half in (muon, adamw)] == [(5e-5, 0.01)] * 2
    assert adamw["eps"] == 1e-6 and muon["eps"] == Muon().eps  # that of Newton-Schulz


def engine_of(params: dict[str, Any], stage: int = 1) -> Any:
    return engine_for(config(stage) | {"optimizer": {"type": "LayerWiseMuon", "params": params}})


def row_of(printed: str, rule: str) -> list[str]:
    """The cells of the rule's only row in the table of rates."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line[:1] == "│"]
    (found,) = [row[1:] for row in rows if len(row) == 4 and row[0] == rule]
    return found


@pytest.mark.parametrize("storage", ["zero", "owned"])
@on_ranks(2)
def test_an_override_of_all_matrices_holds_in_an_engine(storage: str) -> None:
    """Before the engine knows names, the optimizer has as many groups, without overrides."""
    overrides = [{"params": "*", "matrix": {"weight_decay": 0.3}}]
    with engine_of({"storage": storage, "report": False, "lr": 0.02, "overrides": overrides}) as engine:
        assert [group["weight_decay"] for group in engine.basic_optimizer.param_groups] == [0.3, 0.01]


def test_override_prints_how_many_parameters_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """The number of parameters that an override changes is printed."""
    model = UnevenLM()
    model.gate.weight.expert = True  # type: ignore[assignment]
    overrides = [
        {"params": "layers.*", "matrix": {"lr": 0.01}},
        {"params": lambda name, param, module: param.ndim == 1, "elementwise": {"weight_decay": 0.0}},
        {"attribute": "expert", "matrix": {"lr": 0.01}},
    ]
    LayerWiseOptimizer(model, lr=0.02, overrides=overrides)
    vectors, printed = sum(param.ndim == 1 for param in model.parameters()), capsys.readouterr().out
    counts = re.findall(r"^overrides\[(\d)\]: (\d+) parameter", printed, re.MULTILINE)
    assert counts == [("0", "3"), ("1", str(vectors)), ("2", "1")]


RATES: list[tuple[dict[str, Any], bool]] = [  # and whether matrices hardly move
    ({"lr": 1e-3}, True),
    ({"lr": 2e-3}, False),
    ({"lr": 1e-3, "adjust_lr_fn": "spectral_norm"}, True),
    ({"lr": 1e-3, "adjust_lr_fn": "spectral"}, False),
    ({"lr": 1e-3, "adjust_lr_fn": "rms_norm"}, False),
    ({"lr": 1e-3, "extra_scale_factor": 10.0}, False),
    ({"matrix": {"name": "normuon", "lr": 1e-3}}, False),
    ({"matrix": {"name": "adamuon", "lr": 1e-3, "update_norm": "preserve"}}, True),
    ({"matrix": {"name": "torch_optimizer", "class": "torch.optim.Muon"}}, True),
    ({"matrix": {"name": "torch_optimizer", "class": "torch.optim.SGD"}}, False),
    ({"lr": 0.02, "overrides": [{"params": "gate.weight", "matrix": {"lr": 1e-3}}]}, True),
]


def step_sharded_later(model: nn.Module, optimizer: LayerWiseOptimizer) -> None:
    """As Accelerate does; a schedule has begun meanwhile."""
    names = {id(param): name for name, param in model.named_parameters()}
    fully_shard(model, mesh=mesh_of())
    for group in optimizer.param_groups:
        group["params"] = [model.get_parameter(names[id(param)]) for param in group["params"]]
        group["lr"] *= 1e-6
    optimizer.step()


def told_of_rates(engine: str, given: dict[str, Any]) -> tuple[list[str], str, str]:
    """What is warned of matrices that hardly move, what is printed, and what is logged."""
    told: list[str] = []
    logged, records = logging.getLogger("lwopt_backend"), logging.StreamHandler(io.StringIO())
    warning = mock.patch.object(deepspeed_engine.logger, "warning", lambda message, *_: told.append(str(message)))
    printing = contextlib.redirect_stdout(io.StringIO())
    with warnings.catch_warnings(record=True) as caught, warning, printing as printed, contextlib.ExitStack() as ends:
        warnings.simplefilter("always")
        logged.addHandler(records)
        ends.callback(logged.removeHandler, records)
        ends.callback(logged.setLevel, logged.level)
        logged.setLevel(logging.INFO)
        if engine in ("zero", "owned"):
            with engine_of({"storage": engine, **given}):
                pass
        else:
            model = UnevenLM()
            if engine == "fsdp2":
                fully_shard(model, mesh=mesh_of())
            optimizer = LayerWiseOptimizer(model, sharded_later=engine == "sharded later", **given)
            if engine == "sharded later":
                step_sharded_later(model, optimizer)
    told += [str(each.message) for each in caught]
    return [each for each in told if "hardly move" in each], printed.getvalue(), records.stream.getvalue()


@on_ranks(2)
def test_every_engine_shows_rates_and_decays() -> None:
    """Every engine warns once of a rate that is AdamW's."""
    engines = ("plain", "fsdp2", "sharded later", "zero", "owned")
    low = {"lr": 1e-3, "report": False}
    rows = [("plain", {**given, "report": False}, small) for given, small in RATES]
    rows += [(engine, given, given is low) for engine in engines for given in (low, {"lr": 0.03})]
    for engine, given, small in rows:
        told, printed, logged = told_of_rates(engine, given)
        assert printed.split() == logged.split(), engine
        assert len(told) == (small and dist.get_rank() == 0), (engine, given, told)
        assert all("such as 0.02" in each and "'match_rms_adamw'" in each for each in told)
        if dist.get_rank() == 0 and given == {"lr": 0.03} and engine != "sharded later":
            assert row_of(printed, "muon")[1:] == ["0.03", "0.1, the default"], engine
            assert row_of(printed, "adamw")[1:] == ["0.001, the default", "0.01, the default"], engine


@on_ranks(2)
def test_a_rate_for_muon_has_to_be_written_on_every_engine() -> None:
    """Fixed: Matrices hardly moved if no rate was written."""
    asked = "expected 'lr' of rule 'muon'.*: 0.02 for adjust_lr_fn 'original', AdamW's rate for 'match_rms_adamw'"
    for engine in ("plain", "fsdp2", "sharded later", "zero", "owned"):
        for given in ({}, {"adjust_lr_fn": "match_rms_adamw"}):
            with pytest.raises(ValueError, match=asked):
                told_of_rates(engine, given)


def test_groups_or_overrides_may_have_the_rates_of_muon() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters()), "lr": lr} for layer, lr in zip(model, (0.1, 0.2))]
    for made in (LayerWiseOptimizer(model, params=groups, report=False), deepspeed_zero.LayerWiseMuon(groups)):
        assert [group["lr"] for group in made.param_groups] == [0.1, 0.1, 0.2, 0.2]
    override = {"params": "*", "matrix": {"lr": 0.3}}
    made = LayerWiseOptimizer(model, overrides=[override], report=False)
    assert [group["lr"] for group in made.param_groups] == [0.3, 1e-3]
    with pytest.raises(ValueError, match="rule 'normuon'.*AdamW's rate for update_norm 'match_rms'"):
        LayerWiseOptimizer(nn.Linear(3, 2), lr=0.02, overrides=[{"params": "*", "matrix": "normuon"}], report=False)


@on_ranks(2)
def test_a_type_may_be_in_lower_case() -> None:
    """Fixed: `"type": "layerwisemuon"` was unknown."""
    given = config(1)
    given["optimizer"]["type"] = "layerwisemuon"
    with engine_for(given) as engine:
        assert isinstance(engine.basic_optimizer, ZeROLayerWise)


@pytest.mark.parametrize("written", ["LayerWiseMuon", "layerwise", "LayerWiseMoun"])
@on_ranks(2)
def test_a_type_that_is_not_registered_is_an_error_of_deepspeeds(written: str) -> None:
    given, model = config(1), UnevenLM()
    given["optimizer"]["type"] = written
    names = ("LayerWise", "LayerWiseMuon", "layerwise", "layerwisemuon")
    classes = {name: vars(torch.optim).pop(name) for name in names}
    try:
        with pytest.raises(AssertionError, match=f"^{written} is not a supported DeepSpeed Optimizer$"):
            deepspeed.initialize(model=model, config=given, model_parameters=model.parameters())
    finally:
        vars(torch.optim).update(classes)


# The shipped configurations of DeepSpeed; test_examples.py trains with FSDP2's
CONFIGS = sorted(path for kind in ("stage*.json", "zero*.json") for path in (ROOT / "configs").glob(kind))


def losses_with(given: dict[str, Any]) -> list[float]:
    with engine_for(given) as engine:
        return train(engine, [0] * 8)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_train(request: pytest.FixtureRequest, path: Path) -> None:
    # DeepSpeed keeps "autocast is on" in a global of the process.
    pool: RankPool = request.getfixturevalue("ranks_to_spoil" if "autocast" in path.stem else "ranks")
    for losses in pool.run(losses_with, json.loads(path.read_text())):
        assert losses[-1] < losses[0]
