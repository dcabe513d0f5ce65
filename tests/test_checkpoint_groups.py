"""Param groups of other optimizers under the options of ours; that engines go on with them is in the chains."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint.contents import Checkpoint, Param
from lwopt_backend.checkpoint.groups import as_ours
from lwopt_backend.checkpoint.lazy import held
from lwopt_backend.registry import option_names

MOMENTUM, MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
MEGATRON = {
    "optimizer": "muon",
    "muon_nesterov": True,
    "muon_scale_mode": "unit_rms_norm",
    "muon_num_ns_steps": 5,
    "muon_extra_scale_factor": 0.2,
    "muon_coefficient_type": "simple",
    "muon_fp32_matmul_prec": "high",
}


def checkpoint(
    groups: list[dict[str, Any]], states: list[tuple[str, ...]], arguments: dict[str, Any] | None = None, **more: Any
) -> Checkpoint:
    """A parameter in every group, with these states."""
    tensor = held(torch.ones(2, 2), "a tensor")
    params = {f"p{n}": Param(tensor, dict.fromkeys(keys, tensor), group=n) for n, keys in enumerate(states)}
    return Checkpoint("any", "", "model", params, tuple(groups), arguments or {}, **more)


def of_one(group: dict[str, Any], states: tuple[str, ...], arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    found = as_ours(checkpoint([group], [states], arguments))
    assert found.notes == ()
    (one,) = found.groups
    assert set(option_names(one)) <= set(one)
    return dict(one)


@pytest.mark.parametrize("key", ["momentum", "momentum_beta"])
def test_megatrons_muon_has_most_options_among_its_arguments(key: str) -> None:
    group = {"lr": 0.1, "max_lr": 0.5, key: 0.9, "weight_decay": 0.3, "wd_mult": 1.0}
    found = of_one(group, MOMENTUM, MEGATRON)
    expected = {"rule": "muon", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True, "eps": 1e-15}
    scale = {"adjust_lr_fn": "unit_rms_norm", "extra_scale_factor": 0.2}
    iteration = {"ns_steps": 5, "ns_coefficients": "simple", "ns_dtype": "float32", "initial_lr": 0.5}
    assert found.items() >= {**expected, **scale, **iteration}.items()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {"gram_aspect": 1.0, "gram_restarts": (2,), "ns_dtype": "float32"}),
        ({"ns_method": "gram"}, {"gram_aspect": 1.0, "gram_restarts": (2,), "ns_dtype": "float32"}),
        ({"ns_method": "standard"}, {"gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}),
    ],
)
def test_deepspeeds_muon(params: dict[str, Any], expected: dict[str, Any]) -> None:
    group = {"use_muon": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    found = of_one(group, MOMENTUM, {"ds_config": {"optimizer": {"type": "Muon", "params": params}}})
    common = {"rule": "muon", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": True, "initial_lr": 0.1}
    assert found.items() >= {**common, **expected}.items()


def test_torchs_muon() -> None:
    group = torch.optim.Muon([torch.ones(2, 2)], lr=0.3, nesterov=False, adjust_lr_fn="match_rms_adamw").defaults
    assert of_one(group, MOMENTUM).items() >= {"rule": "muon", **group}.items()


def test_any_adam_has_the_options_of_torchs_too() -> None:
    found = of_one({**ADAM, "bias_correction": True}, MOMENTS)
    assert found.items() >= {"rule": "adamw", **ADAM}.items()
    assert found.keys() >= torch.optim.AdamW([torch.ones(1)]).defaults.keys()


def test_what_we_saved_stays_without_what_it_says_of_places() -> None:
    group = {"rule": "soap", "lr": 1.0, "members": "digest", "from_group": 1, "overrides": []}
    (found,) = as_ours(checkpoint([group], [()])).groups
    assert found.items() >= {"rule": "soap", "lr": 1.0}.items()
    assert not {"members", "from_group", "overrides"} & set(found)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_what_we_saved_gets_all_keys_that_a_group_of_any_engine_has(rule: str) -> None:
    """torch.distributed.checkpoint fails where one is missing, of an older checkpoint or one of DeepSpeed's."""
    (found,) = as_ours(checkpoint([{"rule": rule, "lr": 1.0, "weight_decay": 0.5}], [()])).groups
    torchs = torch.optim.AdamW([torch.ones(1)]).defaults if rule == "adamw" else {}
    assert set(found) >= {*option_names(found), *torchs, "own_rates"}
    assert (found["lr"], found["weight_decay"], found["own_rates"]) == (1.0, 0.5, False)


def test_a_rule_that_is_not_here_keeps_its_options() -> None:
    group = {"rule": "somebodys", "lr": 1.0}
    assert as_ours(checkpoint([group], [()])).groups == ({"own_rates": False, **group},)


def test_groups_of_matrices_are_first_and_parameters_follow_them() -> None:
    groups = [ADAM, {**ADAM, "lr": 0.3}, {"rule": "muon", "lr": 0.7}]
    found = as_ours(checkpoint(groups, [MOMENTS, MOMENTS, MOMENTUM]))
    assert [group["lr"] for group in found.groups] == [0.7, 0.1, 0.3]
    assert {name: param.group for name, param in found.params.items()} == {"p0": 1, "p1": 2, "p2": 0}


def test_without_a_schedule_the_rate_is_that_of_the_beginning() -> None:
    assert of_one(ADAM, MOMENTS)["initial_lr"] == 0.1
    assert of_one({**ADAM, "initial_lr": 0.5}, MOMENTS)["initial_lr"] == 0.5
    scheduled = as_ours(checkpoint([ADAM], [MOMENTS], scheduler={"last_batch_iteration": 3}))
    assert "initial_lr" not in scheduled.groups[0]


@pytest.mark.parametrize(("group", "states"), [(ADAM, MOMENTS), ({"rule": "muon", "lr": 0.1}, MOMENTUM)])
def test_with_deepspeeds_schedule_it_is_the_rate_after_the_warmup(
    group: dict[str, Any], states: tuple[str, ...]
) -> None:
    def first(group: dict[str, Any], scheduler: dict[str, Any], peak: Any = 0.4) -> Any:
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": peak, "warmup_num_steps": 8}}
        arguments = {"ds_config": {"scheduler": schedule}}
        return as_ours(checkpoint([group], [states], arguments, scheduler=scheduler)).groups[0].get("initial_lr")

    theirs = {"last_batch_iteration": 3}
    assert first(group, theirs) == 0.4
    assert first({**group, "initial_lr": 0.5}, theirs) == 0.5
    assert first(group, {"last_epoch": 3}) is None  # a schedule in place of the configured one
    assert first(group, theirs, peak=[0.1, 0.2]) is None


MUON = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
KEPT = [
    ({**ADAM, "decoupled_weight_decay": False}, MOMENTS, {}, "adds the weight decay to the gradient"),
    (ADAM, MOMENTS, {"ds_config": {"optimizer": {"params": {"adam_w_mode": False}}}}, "adds the weight decay"),
    ({**ADAM, "bias_correction": False}, MOMENTS, {}, "no bias correction"),
    (ADAM, ("exp_avg",), {}, r"none of our rules keeps \['exp_avg'\]"),
    (MUON, MOMENTUM, {}, "whose momentum it is cannot be told"),
    (MUON, MOMENTUM, {**MEGATRON, "muon_coefficient_type": "aol"}, "muon_coefficient_type='aol' has no counterpart"),
    (MUON, MOMENTUM, {"optimizer": "dist_muon"}, "arguments lack muon_nesterov"),
    (MUON, MOMENTUM, {**MEGATRON, "muon_scale_mode": "new"}, "adjust_lr_fn"),
    ({"lr": 0.1, "momentum": 0.9}, MOMENTUM, MEGATRON, "it has no weight_decay"),
    (
        {**MUON, "use_muon": True},
        MOMENTUM,
        {"ds_config": {"optimizer": {"params": {"per_head_muon": True}}}},
        "orthogonalized heads by themselves",
    ),
]


@pytest.mark.parametrize(("group", "states", "arguments", "words"), KEPT)
def test_what_has_no_counterpart_stays_as_it_is_and_is_said(
    group: dict[str, Any], states: tuple[str, ...], arguments: dict[str, Any], words: str
) -> None:
    found = as_ours(checkpoint([group], [states], arguments))
    assert found.groups == (group,)
    (note,) = found.notes
    assert re.search(words, note), note
