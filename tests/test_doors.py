"""Every engine's optimizer answers a wrong argument alike: what was found, what it is called here, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lwopt_backend
from lwopt_backend import ModuleOptimizers
from lwopt_backend.config.choices import arguments_of, muon_settings
from lwopt_backend.config.hosts import FSDP2Config
from lwopt_backend.config.param_groups import split
from lwopt_backend.integrations import fsdp2
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon

Door = Callable[..., object]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def owned(**options: Any) -> object:
    return lwopt_backend.LayerWiseOptimizer(model(), report=False, **options)


def on_fsdp2(**options: Any) -> object:
    return fsdp2.LayerWiseOptimizer(model(), sharded_later=True, report=False, **options)


def layer_wise(**options: Any) -> object:
    return LayerWise(**{"params": model().parameters(), "report": False, **options})


def layer_wise_muon(**options: Any) -> object:
    return LayerWiseMuon(**{"params": model().parameters(), "report": False, **options})


RULES = (owned, on_fsdp2, layer_wise)
DOORS = (*RULES, layer_wise_muon)


def answer(door: Door, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        door(**options)
    return f"{type(caught.value).__name__}: {caught.value}"


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
        ("betas", "adamw={'betas': ...}", None, None),  # what ds_config translates
        ("muon_lr", "'lr'", None, None),
        ("adam_lr", "'elementwise_lr'", None, None),
    ],
)
def test_a_name_of_another_optimizer_is_answered_with_ours(
    foreign: str, as_arguments: str, in_an_entry: str | None, in_sections: str | None
) -> None:
    for door, ours in zip(DOORS, (as_arguments, as_arguments, in_sections, in_an_entry)):
        if ours is not None:
            assert f"unknown key '{foreign}'; did you mean {ours}?" in answer(door, **{foreign: 0.5}), door


OTHER_KIND = "matrix: unknown rule 'torch_adam'; 'adamw' is a rule of the other kind; known here:"
ENTRY = "ValueError: LayerWise: unknown key 'adamw'"
AUTO = "lr: input should be a valid number; found 'auto', which only Hugging Face's Trainer and Accel"
SECTION = "expected a section with 'params', a glob on names or several"
GLOBS = "expert_params: expected a glob on names, or a list of them"
GROUP = "expected None or a process group, such as torch.distributed.new_group(ranks) returns; found 5"
ANSWERS: list[tuple[tuple[Door, ...], dict[str, Any], str]] = [  # which an answer contains, or begins and goes on with
    (DOORS, {"torch_adam": True}, "unknown key 'torch_adam'; leave it out: what is not a matrix is trained by"),
    (DOORS, {"max_grad_norm": 1.0}, "unknown key 'max_grad_norm'; clip with gradient_clipping in ds"),
    (RULES, {"matrix": "torch_adam"}, OTHER_KIND),
    (RULES, {"matrix": "dist_muon"}, "matrix: unknown rule 'dist_muon'; did you mean 'muon'?"),
    (RULES, {"elementwise": "torch_adam"}, "elementwise: unknown rule 'torch_adam'; did you mean 'adamw'?"),
    (RULES, {"elementwise": "muon"}, "elementwise: unknown rule 'muon'; 'muon' is a rule of the other kind"),
    ((layer_wise,), {"adamw": {"lr": 0.1}}, f"{ENTRY}; write {{'elementwise': {{'name': 'adamw', ...}}}}"),
    (DOORS, {"lr": "auto"}, AUTO),
    (DOORS, {"include": 5}, "include: input should be a list; found 5"),
    (DOORS, {"exclude": {"1.*": True}}, "exclude: input should be a list; found {'1.*': True}"),
    (DOORS, {"atoms": "1.*"}, "atoms: expected a mapping of globs to divisions; found '1.*'"),
    (DOORS, {"overrides": "1.*"}, "overrides: expected a list of sections with 'params'; found '1.*'"),
    (DOORS, {"overrides": [5]}, f"overrides[0]: {SECTION}; found 5"),
    (DOORS, {"params": 5}, "TypeError: ... found 5; pass model.parameters() or a list of param groups"),
    (DOORS, {"params": set(model().parameters())}, "TypeError: ... in an order that all ranks share; found a set"),
    (DOORS, {"params": model()}, "TypeError: ... found a Sequential; pass model.parameters()"),
    (
        DOORS,
        {"params": [{"params": 5}]},
        "TypeError: ... param group 0: params: expected a list of parameters, found 5",
    ),
    ((owned,), {"expert_params": 5}, f"ValueError: {GLOBS}; found 5"),
    ((owned,), {"expert_params": [1]}, f"ValueError: {GLOBS}; found [1]"),
    ((owned,), {"process_group": 5}, f"TypeError: process_group: {GROUP}"),
    ((owned,), {"expert_params": "1.*", "expert_process_group": 5}, f"TypeError: expert_process_group: {GROUP}"),
    ((ModuleOptimizers,), {"optimizers": {}, "process_group": 5}, f"TypeError: process_group: {GROUP}"),
]


@pytest.mark.parametrize(("doors", "given", "found"), ANSWERS, ids=[str(list(given)) for _, given, _ in ANSWERS])
def test_a_wrong_value_is_answered_with_what_is_wanted(
    doors: tuple[Door, ...], given: dict[str, Any], found: str
) -> None:
    for door in doors:
        told, parts = answer(door, **given), found.split(" ... ")
        assert all(part in told for part in parts), (door, told)
        assert told.startswith(parts[0]) or not found.startswith(("TypeError", "ValueError")), (door, told)


def test_names_of_others_in_a_param_group_are_errors_too() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for key, hint in (("use_muon", "decides what is a matrix"), ("adam_lr", "did you mean 'adamw.lr'?")):
        with pytest.raises(ValueError, match=f"param group 0: unknown key '{key}'; .*{hint}"):
            split([{"params": [weight], key: True}], {id(weight): True}, muon_settings({}, "")[0])


def test_one_glob_need_not_be_in_a_list() -> None:
    one, several = ({"exclude": "1.*", "include": "2.*"}, {"exclude": ["1.*"], "include": ["2.*"]})
    assert muon_settings(one, "")[1] == muon_settings(several, "")[1]
    _, config = arguments_of(FSDP2Config, "muon", None, "adamw", None, (), {"exclude": "1.*"}, "")
    assert config.exclude == ("1.*",)


PASS_THE_MODEL, PASS_AS_PARAMS = (
    "Pass the model, not its parameters",
    "Pass the model, and param groups as params=[...]",
)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda: model().parameters(), f"of Parameter. {PASS_THE_MODEL}: its structure and"),
        (lambda: list(model().parameters()), f"found a list of Parameter. {PASS_THE_MODEL}"),
        (lambda: model().named_parameters(), f"of tuple. {PASS_THE_MODEL}"),
        (lambda: [{"params": list(model().parameters())}], f"of dict. {PASS_AS_PARAMS}"),
        (lambda: {"params": list(model().parameters())}, f"found a dict. {PASS_AS_PARAMS}"),
        (lambda: nn.Parameter(torch.zeros(2, 2)), f"found a Parameter. {PASS_THE_MODEL}"),
        (lambda: None, "found None"),
        (lambda: [], "found a list"),
        (lambda: 5, "found a int"),
    ],
)
def test_anything_but_a_model_is_answered_with_what_to_pass(given: Callable[[], Any], found: str) -> None:
    for optimizer in (lwopt_backend.LayerWiseOptimizer, fsdp2.LayerWiseOptimizer):
        with pytest.raises(TypeError, match="LayerWiseOptimizer: model: expected a torch.nn.Module") as caught:
            optimizer(given())
        assert found in str(caught.value)
