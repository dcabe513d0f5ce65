"""Every engine's optimizer answers a wrong argument alike: what was found, what it is called here, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lwopt_backend
from lwopt_backend import ModuleOptimizers
from lwopt_backend.chosen import arguments_of
from lwopt_backend.config import FSDP2Config
from lwopt_backend.integrations import fsdp2
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from lwopt_backend.muon_config import muon_settings
from lwopt_backend.param_groups import split


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def owned(**options: Any) -> None:
    lwopt_backend.LayerWiseOptimizer(model(), report=False, **options)


def on_fsdp2(**options: Any) -> None:
    fsdp2.LayerWiseOptimizer(model(), sharded_later=True, report=False, **options)


def layer_wise(**options: Any) -> None:
    LayerWise(options.pop("params", model().parameters()), report=False, **options)


def layer_wise_muon(**options: Any) -> None:
    LayerWiseMuon(options.pop("params", model().parameters()), report=False, **options)


ARGUMENTS = [owned, on_fsdp2]
DOORS = [*ARGUMENTS, layer_wise, layer_wise_muon]
Door = Callable[..., None]


def answer(door: Door, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        door(**options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("foreign", "as_arguments", "in_an_entry", "in_sections"),
    [
        ("learning_rate", "'lr'", "'lr'", "'matrix.lr'"),
        ("wd", "'weight_decay'", "'weight_decay'", "'matrix.weight_decay'"),
        ("mu", "'momentum'", "'momentum'", "'matrix.momentum'"),
        ("muon_momentum", "'momentum'", "'momentum'", "'matrix.momentum'"),
        ("adamw_betas", "adamw={'betas': ...}", "'adamw.betas'", "'elementwise.betas'"),
        ("adam_epsilon", "adamw={'eps': ...}", "'adamw.eps'", "'elementwise.eps'"),
        ("scalar_lr", "'elementwise_lr'", "'adamw.lr'", "'elementwise.lr'"),
    ],
)
def test_a_name_of_another_optimizer_is_answered_with_ours(
    door: Door, foreign: str, as_arguments: str, in_an_entry: str, in_sections: str
) -> None:
    ours = {layer_wise: in_sections, layer_wise_muon: in_an_entry}.get(door, as_arguments)
    assert f"unknown key '{foreign}'; did you mean {ours}?" in answer(door, **{foreign: 0.5})


@pytest.mark.parametrize("door", ARGUMENTS)
@pytest.mark.parametrize(
    ("foreign", "ours"), [("betas", "adamw={'betas': ...}"), ("muon_lr", "'lr'"), ("adam_lr", "'elementwise_lr'")]
)
def test_names_that_only_ds_config_translates_are_answered_with_ours(door: Door, foreign: str, ours: str) -> None:
    assert f"unknown key '{foreign}'; did you mean {ours}?" in answer(door, **{foreign: 0.5})


@pytest.mark.parametrize("door", DOORS)
def test_what_has_no_counterpart_is_answered_with_what_to_do(door: Door) -> None:
    assert "unknown key 'torch_adam'; leave it out: what is not a matrix is trained by" in answer(door, torch_adam=True)
    assert "unknown key 'max_grad_norm'; clip with gradient_clipping in ds" in answer(door, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"matrix": "torch_adam"},
            "matrix: unknown rule 'torch_adam'; 'adamw' is a rule of the other kind; known here:",
        ),
        ({"matrix": "dist_muon"}, "matrix: unknown rule 'dist_muon'; did you mean 'muon'?"),
        ({"elementwise": "torch_adam"}, "elementwise: unknown rule 'torch_adam'; did you mean 'adamw'?"),
        ({"elementwise": "muon"}, "elementwise: unknown rule 'muon'; 'muon' is a rule of the other kind"),
    ],
)
@pytest.mark.parametrize("door", [owned, on_fsdp2, layer_wise])
def test_an_unknown_rule_is_answered_with_ours(door: Door, given: dict[str, str], found: str) -> None:
    assert found in answer(door, **given)


def test_a_section_that_is_named_as_its_rule_is_answered_with_how_to_write_it() -> None:
    found = answer(layer_wise, adamw={"lr": 0.1})
    assert found == "ValueError: LayerWise: unknown key 'adamw'; write {'elementwise': {'name': 'adamw', ...}}"


def test_names_of_others_in_a_param_group_are_errors_too() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for key, hint in (("use_muon", "decides what is a matrix"), ("adam_lr", "did you mean 'adamw.lr'?")):
        with pytest.raises(ValueError, match=f"param group 0: unknown key '{key}'; .*{hint}"):
            split([{"params": [weight], key: True}], {id(weight): True}, muon_settings({}, "")[0])


@pytest.mark.parametrize("door", DOORS)
def test_auto_is_answered_with_who_replaces_it(door: Door) -> None:
    found = answer(door, lr="auto")
    assert "lr: input should be a valid number; found 'auto', which only Hugging Face's Trainer and Accel" in found


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"include": 5}, "include: input should be a list; found 5"),
        ({"exclude": {"1.*": True}}, "exclude: input should be a list; found {'1.*': True}"),
        ({"atoms": "1.*"}, "atoms: expected a mapping of globs to divisions; found '1.*'"),
        ({"overrides": "1.*"}, "overrides: expected a list of sections with 'params'; found '1.*'"),
        ({"overrides": [5]}, "overrides[0]: expected a section with 'params', a glob on names or several; found 5"),
    ],
)
def test_another_kind_of_value_is_answered_with_the_kind_that_is_wanted(
    door: Door, given: dict[str, Any], found: str
) -> None:
    assert found in answer(door, **given)


def test_one_glob_need_not_be_in_a_list() -> None:
    assert (
        muon_settings({"exclude": "1.*", "include": "2.*"}, "")[1]
        == muon_settings({"exclude": ["1.*"], "include": ["2.*"]}, "")[1]
    )
    _, config = arguments_of(FSDP2Config, "muon", None, "adamw", None, (), {"exclude": "1.*"}, "")
    assert config.exclude == ("1.*",)


@pytest.mark.parametrize("optimizer", [lwopt_backend.LayerWiseOptimizer, fsdp2.LayerWiseOptimizer])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda: model().parameters(), "of Parameter. Pass the model, not its parameters: its structure and"),
        (lambda: list(model().parameters()), "found a list of Parameter. Pass the model, not its parameters"),
        (lambda: model().named_parameters(), "of tuple. Pass the model, not its parameters"),
        (lambda: [{"params": list(model().parameters())}], "of dict. Pass the model, and param groups as params=[...]"),
        (lambda: {"params": list(model().parameters())}, "found a dict. Pass the model, and param groups as params="),
        (lambda: nn.Parameter(torch.zeros(2, 2)), "found a Parameter. Pass the model, not its parameters"),
        (lambda: None, "found None"),
        (lambda: [], "found a list"),
        (lambda: 5, "found a int"),
    ],
)
def test_anything_but_a_model_is_answered_with_what_to_pass(optimizer: Any, given: Any, found: str) -> None:
    with pytest.raises(TypeError, match="LayerWiseOptimizer: model: expected a torch.nn.Module") as caught:
        optimizer(given())
    assert found in str(caught.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("params", "found"),
    [
        (5, "found 5; pass model.parameters() or a list of param groups"),
        (set(model().parameters()), "in an order that all ranks share; found a set"),
        (model(), "found a Sequential; pass model.parameters()"),
        ([{"params": 5}], "param group 0: params: expected a list of parameters, found 5"),
    ],
)
def test_params_of_another_kind_are_answered_with_what_to_pass(door: Door, params: Any, found: str) -> None:
    told = answer(door, params=params)
    assert told.startswith("TypeError: ") and found in told


def test_what_is_no_process_group_is_named() -> None:
    group = "expected None or a process group, such as torch.distributed.new_group(ranks) returns; found 5"
    assert answer(owned, process_group=5) == f"TypeError: process_group: {group}"
    experts = {"expert_params": "1.*", "expert_process_group": 5}
    assert answer(owned, **experts) == f"TypeError: expert_process_group: {group}"
    assert answer(ModuleOptimizers, optimizers={}, process_group=5) == f"TypeError: process_group: {group}"


@pytest.mark.parametrize("globs", [5, [1]])
def test_expert_params_are_globs(globs: Any) -> None:
    found = f"ValueError: expert_params: expected a glob on names, or a list of them; found {globs}"
    assert answer(owned, expert_params=globs) == found
