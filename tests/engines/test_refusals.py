"""What is wrong or cannot work is refused by name when an optimizer or an engine is made, on every rank."""

import copy
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_ep
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.config.versions import VERSIONS
from lwopt_backend.groups.choices import settings_of
from lwopt_backend.groups.param_groups import split
from lwopt_backend.groups.registry import arguments
from lwopt_backend.integrations import deepspeed_zero, fsdp2
from lwopt_backend.integrations.deepspeed import versions
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from tests.engines.zero.test_tensor_parallel import ModelParallel
from tests.support.models import VOCABULARY, UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.zero import ADAMW, BF16, MUON, OWNED, build, config, engine_for, train
from tests.unit.config.test_config import Demanding

# Arguments, options and entries
Door = Callable[..., object]
Wrong = tuple[dict[str, Any], str]  # what is given, and the answer


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def owned(**options: Any) -> object:
    return LayerWiseOptimizer(small(), **{"report": False, **options})


def in_a_group(**given: Any) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    split([{"params": [weight], **given}], {id(weight): True}, settings_of(ZeROConfig, {}, "")[0])


def overriding(params: str, **sections: Any) -> dict[str, Any]:
    return {"overrides": [{"params": params, **sections}]}


def nothing(name: str, param: object, module: object) -> bool:
    return False


def of_class(path: object, **options: Any) -> dict[str, Any]:
    return {"matrix": {"name": "torch_optimizer", "class": path, **options}}


def on_fsdp2(**options: Any) -> object:
    return fsdp2.LayerWiseOptimizer(small(), sharded_later=True, **{"report": False, **options})


def layer_wise(**options: Any) -> object:
    return LayerWise(**{"params": small().parameters(), "report": False, **options})


def layer_wise_muon(**options: Any) -> object:
    return LayerWiseMuon(**{"params": small().parameters(), "report": False, **options})


RULES = (owned, on_fsdp2, layer_wise)
DOORS = (*RULES, layer_wise_muon)
CLIPS = (owned, on_fsdp2)
MEANT = {  # what keys of other optimizers mean here
    **{"learning_rate": "matrix.lr", "muon_lr": "matrix.lr", "adam_lr": "elementwise.lr"},
    **{
        "scalar_lr": "elementwise.lr",
        "wd": "elementwise.weight_decay",
        "muon_wd": "matrix.weight_decay",
        "mu": "matrix.momentum",
    },
    **{"muon_momentum": "matrix.momentum", "betas": "elementwise.betas", "adamw_betas": "elementwise.betas"},
    **{"eps": "elementwise.eps", "adam_epsilon": "elementwise.eps"},
}


def answer(door: Door, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        door(**options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("foreign", "ours"), MEANT.items())
def test_foreign_key_is_answered_with_a_configuration(foreign: str, ours: str) -> None:
    """A key of another optimizer is answered with a configuration that is taken."""
    value: Any = (0.5, 0.25) if "betas" in foreign else 0.5
    half, _, option = ours.partition(".")
    for door in DOORS:
        told = answer(door, **{foreign: value, "exclude": ["1.*"]})
        assert f"{foreign!r} is a key of another optimizer" in told, (door, told)
        written = json.loads(told.splitlines()[-1])
        if door in (layer_wise, layer_wise_muon):
            assert told.startswith("ValueError: LayerWise") and written["type"] == "LayerWise"
            written, door = written["params"], layer_wise
        assert all({"lr", "weight_decay"} <= written[kind].keys() for kind in ("matrix", "elementwise")), written
        made: Any = door(**written)
        groups = {"matrix" if group["rule"] == "muon" else "elementwise": group for group in made.param_groups}
        assert arguments(groups[half])[option] == value, (door, written)
        assert made.config.exclude == ("1.*",)


def test_foreign_options_move_into_our_sections() -> None:
    """Options of another optimizer beside our sections move into them."""
    for door in (owned, layer_wise_muon):
        told = answer(door, lr=0.02, adamw={"lr": 1e-3}, betas=(0.5, 0.25))
        written = json.loads(told.splitlines()[-1])
        assert written.get("params", written)["elementwise"].items() >= {"lr": 1e-3, "betas": [0.5, 0.25]}.items()
    told = answer(layer_wise, matrix={"name": "normuon", "lr": 0.02}, elementwise="lion", mu=0.5, betas=(0.5, 0.25))
    assert json.loads(told.splitlines()[-1])["params"] == {
        "matrix": {"name": "normuon", "lr": 0.02, "momentum": 0.5},
        "elementwise": {"name": "lion", "betas": [0.5, 0.25]},
        "report": False,
    }


OTHER_KIND = "matrix: unknown rule 'adamw'; 'adamw' is a rule of the other kind; known here:"
AUTO = "lr: input should be a valid number; found 'auto': only Hugging Face's Trainer and Accel"
SECTION = "expected a section with 'params', a glob on names or several, or with 'attribute', one that parameters have"
GLOBS = "expert_params: expected a glob on names, or a list of them"
GROUP = "expected None or a process group, such as torch.distributed.new_group(ranks) returns; found 5"
ADAM = "torch.optim.Adam"
CLIPPED = {"params": "1.*", "max_norm": 1.0}
PATH = "class: expected an optimizer's class or its path"
ONLY_TRUE = "expected True, found False; "
WRONG_VALUES: dict[str, list[Any]] = {  # of options of LayerWiseMuon
    **{"lr": [math.nan, True, -0.1], "momentum": [1.0], "gram_aspect": [0.5], "nesterov": ["yes"]},
    **{"ns_steps": [2.5, 0], "policy": ["spread"]},
}
OF_ONE: dict[Door, list[Wrong]] = {
    layer_wise_muon: [
        ({"betas": [0.9, 0.9], "adam_w_mode": False}, f"adam_w_mode: {ONLY_TRUE}register torch.optim.Adam"),
        ({"muon_lr": 0.1, "per_head_muon": True}, '"per_head": true'),
        ({"betas": [0.9, 0.9], "fp32_optimizer_states": False}, f"fp32_optimizer_states: {ONLY_TRUE}"),
        ({"muon_lr": 0.1, "ns_method": "grim"}, "ns_method: input should be 'standard', 'gram', 'auto'"),
        ({"betas": "auto", "lr": "auto"}, "lr: input should be a valid number; found 'auto': only Hugging Face's"),
        ({"lr": "2e-2"}, "LayerWiseMuon: lr: input should be a valid number; found '2e-2'"),
        *(
            ({key: value}, f"LayerWiseMuon: {key}: input should be ... ; found {value!r}")
            for key, values in WRONG_VALUES.items()
            for value in values
        ),
        (
            {"momentum": 2, "Momentum": 1},
            "LayerWiseMuon: 2 wrong options\n  momentum: ... \n  unknown key 'Momentum'; did you mean 'momentum'?",
        ),
        ({"zzzz": 1}, "unknown key 'zzzz'; known: 'lr', 'weight_decay'"),
        (
            {"adamw": {"momentum": 1, "beta": []}},
            "unknown key 'adamw.momentum' ... unknown key 'adamw.beta'; did you mean 'adamw.betas'?",
        ),
        ({"foreach": True}, "unknown key 'foreach'; did you mean 'adamw.foreach'?"),
        (
            {"adamw": {"betas": [0.9]}},
            "LayerWiseMuon: adamw.betas: expected two numbers from 0 to below 1; found [0.9]",
        ),
        ({"adamw": {"foreach": True, "fused": True}}, "foreach and fused are both true, but torch supports one of"),
        ({"bucket_mb": 1.0}, "'bucket_mb': expected only with \"storage\": \"owned\", found 'zero'"),
        ({**OWNED, "policy": "stay"}, "'policy': expected only with \"storage\": \"zero\", found 'owned'"),
        ({**OWNED, "bucket_mb": 0.0}, "bucket_mb: input should be greater than 0; found 0.0"),
    ],
    layer_wise: [
        ({"matrix": {"name": "moun"}}, "matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"lr": 1.0}}, "matrix: expected a key 'name', one of muon"),
        ({"matrix": 3}, "matrix: expected a rule's name, or a section with a 'name'; found 3"),
        ({"lr": 0.1, "matrix": {"name": "muon", "lr": 0.2}}, "'lr' is given twice, as 0.1 and in 'matrix' as 0.2"),
        ({"overrides": [{"matrix": {"lr": 1.0}}]}, "overrides[0]: expected a section with 'params'"),
        (overriding("*"), "overrides[0]: expected options in 'matrix' or 'elementwise'; found none"),
        (overriding("*", matrx={}), "overrides[0]: unknown key 'matrx'; did you mean 'matrix'?"),
        (overriding("*", matrix={"lrr": 1}), "overrides[0]: matrix: unknown key 'lrr'"),
        ({"overrides": [{"params": 3, "matrix": {"lr": 1.0}}]}, "overrides[0]: params: expected a glob on names, or a"),
        ({"overrides": [{"params": ["*", 3], "matrix": {"lr": 1.0}}]}, "or a list of them; found ['*', 3]"),
        (of_class(ADAM) | overriding("*", matrix={"class": "torch.optim.Adm"}), "matrix: class 'torch.optim.Adm': "),
        (of_class(3), f"matrix: {PATH}, e.g. 'pytorch_optimizer.SOAP'; found 3"),
        (of_class("torch.optim.Adm"), "torch.optim has no 'Adm'; did you mean 'Adam'?"),
        (of_class("torch.optim.Xyz"), "torch.optim has no 'Xyz'; known: 'Adafactor', ... 'ASGD' and 7 more"),
        (of_class(ADAM, betas=3), "Adam refuses these arguments: betas is 3; expected a value like (0.9, 0.999)"),
        (of_class("no_such_package.X"), "cannot be imported: No module named"),
        (of_class("torch.nn.Linear"), "expected a torch.optim.Optimizer, found <class 'torch.nn.modules.linear."),
        (of_class("pytorch_optimizer.Muon", lr=0.02), "Muon cannot ... `use_muon` must be set.; write the rule 'muon'"),
        (of_class(ADAM, lr=0.1, eps=-1.0), "torch.optim.Adam refuses these arguments: Invalid epsilon value: -1.0"),
        (of_class("torch.optim.SGD", lr=math.nan), "SGD: lr: expected a finite number of at least 0, found nan"),
        (of_class("pytorch_optimizer.ScheduleFreeAdamW"), "matrix: ... found train() and eval(), which this optimizer"),
        (of_class("pytorch_optimizer.SPlus"), "matrix: ... found train() and eval(), which this optimizer does not"),
    ],
    owned: [
        (
            {"matrix": {"name": "torch_optimizer", "class": Demanding}},
            "expected 'momentum', found none; add it",
        ),
        ({"matrix": {"name": "torch_optimizer"}, "alpha": 0.9}, "matrix: expected 'class', the path of an"),
        ({"elementwise": {"name": ["adamw"]}}, "elementwise: name: expected one of adamw, "),
        ({"elementwise": "lion", "lion": None}, "lion: expected a section of options; found None"),
    ],
    in_a_group: [
        ({"use_muon": True}, "param group 0: unknown key 'use_muon'; ... decides what is a matrix"),
        ({"adam_lr": 0.1}, "param group 0: unknown key 'adam_lr'; did you mean 'adamw.lr'?"),
        ({"adamw": {"lrr": 1}}, "param group 0: adamw: unknown key 'lrr'; did you mean 'lr'?"),
        ({"betas": (0.9, 0.99)}, "param group 0: 'betas' is an option of 'adamw'; write it into the group's section '"),
        ({"exclude": ["*"]}, "param group 0: 'exclude' is an option of the whole optimizer, not of a param group"),
        ({"lr": 0.1, "matrix": {"lr": 0.2}}, "param group 0: 'lr' is given twice, as 0.1 and in 'matrix' as 0.2"),
        ({"rule": "adamw"}, "param group 0: 'rule' is a key that this optimizer writes itself"),
    ],
}
BEGIN = {
    **{owned: "ValueError: LayerWiseOptimizer", layer_wise: "ValueError: LayerWise:"},
    **{layer_wise_muon: "ValueError: LayerWiseMuon:", in_a_group: "ValueError: "},
}
OF_MEGATRON = {  # by docs/data/megatron_names.csv
    "use_distributed_optimizer": "leave it out: LayerWiseOptimizer",
    "no_use_layer_wise_param_layout": "write 'layout'",
    "ddp_bucket_size": "write 'bucket_mb'",
    "ddp_pad_buckets_for_high_nccl_busbw": "write 'pad_buckets_for_high_nccl_busbw'",
    "num_distributed_optimizer_instances": "write 'group_size'",
    "expert_data_parallel_world_size": "write 'expert_group_size'",
    "config_overrides": "write 'overrides'",
    "pg_collection": "write 'process_group'",
    "muon_split_qkv": "say it by name in 'atoms'",
    "muon_scale_mode": "write 'adjust_lr_fn'",
    "muon_extra_scale_factor": "write 'extra_scale_factor'",
    "muon_coefficient_type": "write 'ns_coefficients'",
    "muon_tp_mode": "leave it out: matrices are updated whole",
    "muon_scalar_optimizer": "write 'elementwise'",
    "fp8_param_gather": "leave it out: parameters that are stored in fp8",
    "log_num_zeros_in_grad": "call count_zeros(names)",
}
ANSWERS: list[tuple[tuple[Door, ...], dict[str, Any], str]] = [  # " ... " stands for anything
    *(((door,), given, f"{BEGIN[door]} ... {found}") for door, rows in OF_ONE.items() for given, found in rows),
    (DOORS, {"max_grad_norm": 1.0}, "unknown key 'max_grad_norm'; write gradient_clipping at the top level of"),
    (RULES, {"matrix": "adamw"}, OTHER_KIND),
    (RULES, {"elementwise": "muon"}, "elementwise: unknown rule 'muon'; 'muon' is a rule of the other kind"),
    (DOORS, {"lion": {"lr": 0.1}}, "unknown key 'lion'; write {'elementwise': {'name': 'lion', ...}}"),
    ((layer_wise_muon,), {"matrix": "soap"}, "LayerWiseMuon: 'matrix' names a rule, and these are Muon and AdamW; wri"),
    (DOORS, {"lr": "auto"}, AUTO),
    (DOORS, {"include": 5}, "include: input should be a list; found 5"),
    (DOORS, {"exclude": {"1.*": True}}, "exclude: input should be a list; found {'1.*': True}"),
    (CLIPS, {"clip_groups": 5}, "clip_groups: expected sections by name, with 'params' and 'max_norm'; found 5"),
    (CLIPS, {"clip_groups": {"a": {"params": "1.*", "max_norm": 0.0}}}, "clip_groups['a']: ... greater than 0; found"),
    (
        CLIPS,
        {"clip_groups": {"a": {"max_norm": 1.0}}},
        "clip_groups['a']: ... or 'kind', 'matrix' or 'elementwise'; found",
    ),
    (CLIPS, {"clip_groups": {"a": {"params": "1.*", "max_nrm": 1.0}}}, "unknown key 'max_nrm'; did you mean 'max_norm"),
    ((owned,), {"clip_groups": {"a": {"params": "2.*", "max_norm": 1.0}}}, "clip_groups['a']: '2.*' matches no"),
    ((owned,), {"clip_groups": {"a": {**CLIPPED, "params": "0.bias", "kind": "matrix"}}}, "of the kind 'elementwise'"),
    ((owned,), {"clip_groups": {"a": {"max_norm": 1.0, "kind": "vector"}}}, "clip_groups['a']: ... 'elementwise'"),
    ((owned,), {"clip_groups": {"a": CLIPPED, "b": CLIPPED}}, "is in clip_groups 'a' and 'b'; give it to one of them"),
    ((layer_wise, layer_wise_muon), {"clip_groups": {"a": CLIPPED}}, "'clip_groups' is for fully_shard models and for"),
    (DOORS, {"atoms": "1.*"}, "atoms: expected a mapping of globs to divisions; found '1.*'"),
    (DOORS, {"overrides": [5]}, f"overrides[0]: {SECTION}; found 5"),
    (DOORS, {"params": 5}, "TypeError: ... found 5; pass model.parameters() or a list of param groups"),
    (DOORS, {"params": set(small().parameters())}, "TypeError: ... in one order on all ranks; found a set"),
    (DOORS, {"params": small()}, "TypeError: ... found a Sequential; pass model.parameters()"),
    (DOORS, {"params": [{"params": 5}]}, "TypeError: ... group 0: params: expected a list of parameters, found 5"),
    (
        (owned,),
        overriding("*.wieght", matrix={"lr": 1.0}),
        "overrides[0]: '*.wieght' matches no parameter name; did",
    ),
    ((owned,), overriding("*.bias", matrix={"lr": 1.0}), "but only match parameters of 'elementwise'"),
    (DOORS, {"overrides": [{"attribute": "expert", "params": "*"}]}, f"overrides[0]: {SECTION}; found"),
    (DOORS, {"overrides": [{"attribute": 3, "matrix": {"lr": 1.0}}]}, "overrides[0]: attribute: expected a glob on"),
    (
        (owned,),
        {"overrides": [{"attribute": "expert", "matrix": {"lr": 1.0}}]},
        "overrides[0]: attribute 'expert' selects no trained parameter; fully_shard and to_empty drop attributes",
    ),
    ((owned,), {"overrides": [{"params": nothing, "matrix": {"lr": 1.0}}]}, "[0]: function nothing selects no trained"),
    ((owned,), {"expert_params": [1]}, f"ValueError: {GLOBS}; found [1]"),
    ((owned,), {"process_group": 5}, f"TypeError: process_group: {GROUP}"),
    ((owned,), {"expert_params": "1.*", "expert_process_group": 5}, f"TypeError: expert_process_group: {GROUP}"),
    ((ModuleOptimizers,), {"optimizers": {}, "process_group": 5}, f"TypeError: process_group: {GROUP}"),
    # Other algorithms are not other spellings
    *((RULES, {"matrix": name}, f"unknown rule {name!r}; known: 'muon', ") for name in ("newton_muon", "kl_shampoo")),
    (RULES, {"elementwise": "adam"}, "unknown rule 'adam'; Megatron's is 'adamw' here, an element-wise rule"),
    (RULES, {"matrix": "dist_muon"}, "unknown rule 'dist_muon'; write 'muon', which is layer-wise here"),
    (RULES, {"matrix": "adaptive_muon"}, "unknown rule 'adaptive_muon'; write 'adamuon' or 'normuon', or 'emerging_op"),
    (RULES, {"matrix": "spel"}, "unknown rule 'spel'; write 'emerging_optimizers.spel', NVIDIA's class"),
    *((RULES, {"matrix": name}, "did you mean 'normuon'?") for name in ("NorMuon", "nor_muon", "normoun")),
    *((DOORS, {name: True}, f"unknown key {name!r}; {answer}") for name, answer in OF_MEGATRON.items()),
]


@pytest.mark.parametrize(("doors", "given", "found"), ANSWERS, ids=[str(list(given)) for _, given, _ in ANSWERS])
def test_a_wrong_option_is_answered_with_what_to_do(doors: tuple[Door, ...], given: dict[str, Any], found: str) -> None:
    for door in doors:
        told, parts = answer(door, **given), found.split(" ... ")
        assert all(part in told for part in parts) and "pydantic" not in told, (door, told)
        assert told.startswith(parts[0]) or not found.startswith(("TypeError", "ValueError")), (door, told)


NO_MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: small().parameters(), "of Parameter. Pass the model, not its parameters: its structure and"),
    (lambda: [{"params": list(small().parameters())}], "of dict. Pass the model, and param groups as params=[...]"),
    (lambda: None, "found None"),
]


@pytest.mark.parametrize(("given", "found"), NO_MODELS)
def test_anything_but_a_model_is_answered_with_what_to_pass(given: Callable[[], Any], found: str) -> None:
    for optimizer in (LayerWiseOptimizer, fsdp2.LayerWiseOptimizer):
        with pytest.raises(TypeError, match="LayerWiseOptimizer: model: expected a torch.nn.Module") as caught:
            optimizer(given())
        assert found in str(caught.value)


# Settings of DeepSpeed
ZENFLOW = {"topk_ratio": 0.1, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False, "offload": False}
NVME = {"device": "nvme", "nvme_path": "there"}
OFFLOAD = "zero_optimization.offload_optimizer"
OFF = "is on; switch it off"
SUPPORTED, OLDEST = VERSIONS["deepspeed"].supported, VERSIONS["deepspeed"].tested[0]
AT_STAGE_0 = "zero_optimization.stage is 0 with a model trained in"


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **options}}


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


OF_SWITCHES: list[tuple[dict[str, Any], str]] = [
    (zero(round_robin_gradients=True), f"zero_optimization.round_robin_gradients {OFF}"),
    (zero(elastic_checkpoint=True), f"zero_optimization.elastic_checkpoint {OFF}"),
    (zero(zenflow=ZENFLOW), f"zero_optimization.zenflow {OFF}"),
    ({"compile": {"deepcompile": True}}, f"compile.deepcompile {OFF}"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, f"bf16.bf16_master_weights_and_grads {OFF}"),
]
OF_ZERO: list[tuple[dict[str, Any], str]] = [
    (zero(round_robin_gradients=True), f"zero_optimization.round_robin_gradients {OFF}"),  # by the same function
    *(
        (section | zero(stage=stage), f"{kind}.{kind}_master_weights_and_grads {OFF}")
        for kind, stage in (("bf16", 1), ("fp16", 3))
        for section in [{kind: {"enabled": True, f"{kind}_master_weights_and_grads": True}}]
    ),
    (zero(offload_optimizer=NVME), f"{OFFLOAD}.device is 'nvme'"),
    (zero(stage=3, offload_param=NVME), "zero_optimization.offload_param.device is 'nvme'"),
    (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}), f"{OFFLOAD}.ratio is 0.5"),
    (zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}), f"{OFFLOAD}.super_offload is on"),
    (zero(stage=0) | BF16, f"{AT_STAGE_0} bfloat16: DeepSpeed then keeps full"),
    (zero(stage=0) | BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, f"{AT_STAGE_0} bfloat16"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype is float16"),
    (scheduler("ReduceLROnPlateau", factor=0.5), "call engine.step(lr_kwargs={'metrics': loss})"),
]
OF_OWNED: list[tuple[dict[str, Any], str]] = [
    (zero(stage=3), "zero_optimization.stage is 3, and DeepSpeed then shards the parameters; use stage 0, 1 or 2"),
    (zero(offload_optimizer={"device": "cpu"}), f"{OFFLOAD}.device is 'cpu'"),
    (zero(parameter_alignment=True), f"zero_optimization.parameter_alignment {OFF}"),
    (zero(zero_quantized_gradients=True), f"zero_optimization.zero_quantized_gradients {OFF}"),
    (BF16 | {"communication_data_type": "fp32"}, "communication_data_type is float32, but gradients are sent as"),
    (BF16 | {"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype is float16 and the model is"),
]
SETTINGS = [*(("zero", *row) for row in OF_ZERO), *(("owned", *row) for row in (*OF_SWITCHES, *OF_OWNED))]


@pytest.mark.parametrize(("storage", "changes", "message"), SETTINGS)
@on_ranks(2)
def test_deepspeed_settings_that_cannot_work_are_refused(storage: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(config(2, **(OWNED if storage == "owned" else {})) | zero() | changes)
    error = str(caught.value)
    assert message in error
    if "scheduler" in changes:
        assert (
            f"without a metric, found {changes['scheduler']['type']!r}" in error
            and "lr_scheduler=lambda optim" in error
        )
    elif storage == "owned":
        assert 'LayerWiseMuon with "storage": "owned" does not support this configuration' in error


OPTIONS: list[tuple[dict[str, Any], str]] = [  # what needs DeepSpeed's device and ranks
    ({"ns_method": "gram-newton-schulz"}, "expected Hopper and Blackwell GPUs by NVIDIA for its kernels, found a de"),
    ({**OWNED, "ns_method": "quack-kernels"}, "ns_method is 'quack-kernels': expected Ampere and"),
    ({**OWNED, "group_size": 3}, "group_size: expected a divisor of the 2 data-parallel ranks, found 3"),
    ({**OWNED, "clip_groups": {}}, "for plain models, but this optimizer is for DeepSpeed; leave it out"),
    ({"exclude": ["*"]}, "none of the 11 trained parameters is a matrix"),
]


@on_ranks(2)
def test_options_that_do_not_fit_an_engine_are_refused() -> None:
    for options, message in OPTIONS:
        with pytest.raises(ValueError, match=re.escape(message)):
            build(config(2, **options))
    build(config(2, exclude=["*"], allow_no_matrix=True))


@pytest.mark.parametrize("storage", ["zero", "owned"])
@on_ranks(2)
def test_errors_of_layer_wise_say_layer_wise(storage: str) -> None:
    options = {"matrix": {"name": "muon", "lr": 0.02}, "elementwise": {"name": "adamw", "lr": 3e-3}}
    entry = {"type": "LayerWise", "params": {**options, "storage": storage, "report": False}}
    settings = config(2) | {"optimizer": entry} | zero()
    with pytest.raises(ValueError, match="^LayerWise .*does not support this configuration; change:"):
        build(settings | {"compile": {"deepcompile": True}})
    with pytest.raises(ValueError, match="^LayerWise: unknown key 'matrx'"):
        build(settings | {"optimizer": {**entry, "params": {"matrx": "muon"}}})
    says = "LayerWise: rank 0 failed with" if dist.get_rank() else "the checkpoint 'nowhere/none'"
    with engine_for(settings) as engine, pytest.raises((ValueError, RuntimeError), match=f"^{says}"):
        engine.load_checkpoint("nowhere", tag=None if dist.get_rank() else "none")


# Models and ranks
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHT = "'layers.0.weight' of shape (63, 24)"
ON_OWNED = config(2, **OWNED) | zero()


def shards(settings: dict[str, Any], vocabulary: int = 32) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, **SIZES))
    build(settings | {"tensor_parallel": {"autotp_size": 2}}, model)


def shards_by_an_mpu(settings: dict[str, Any], **marks: Any) -> None:
    model, mpu = UnevenLM(), ModelParallel(dist.get_world_size())
    vars(model.layers[0].weight).update(marks)
    mpu.get_tensor_model_parallel_world_size = lambda: marks.get("ranks", 2)
    build(settings, model, mpu=mpu)


def marked(**marks: Any) -> Callable[..., None]:
    return partial(shards_by_an_mpu, **marks)


def shards_marked_on_one_rank(settings: dict[str, Any]) -> None:
    model = UnevenLM(seed=dist.get_rank())
    shared = UnevenLM().state_dict()
    model.load_state_dict({**shared, "embedding.weight": model.embedding.weight})
    if dist.get_rank():
        vars(model.embedding.weight).update(tensor_model_parallel=True, partition_dim=0)
    build(settings, model, mpu=ModelParallel(dist.get_world_size()))


def experts_by_auto_ep(settings: dict[str, Any]) -> None:
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **SIZES))
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    # It moves transformers' recorders of router outputs, in a way that transformers 5 does not know.
    with mock.patch.object(auto_ep.AutoEP, "_retarget_transformers_output_recorders"):
        build(settings | {"expert_parallel": experts}, model)


def experts(settings: dict[str, Any]) -> None:
    model = nn.Sequential(MoE(hidden_size=8, expert=nn.Linear(8, 8), num_experts=2, ep_size=1))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    build(settings, model, model_parameters=groups)


def stages(settings: dict[str, Any]) -> None:
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.MSELoss())
    build(settings | {"zero_optimization": {"stage": 1}}, model)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (shards, config(3), "tensor parallelism of 2 at zero_optimization.stage 3; use stage 0, 1 or 2"),
        (shards, ON_OWNED, 'tensor parallelism of 2; use "storage": "zero"'),
        (partial(shards, vocabulary=33), config(2), "is an unequal shard of (33, 16) by AutoTP"),
        (marked(tensor_model_parallel=True), config(2), f"{WEIGHT} is marked as tensor-parallel"),
        (marked(sequence_parallel=True), config(2), f"{WEIGHT} is marked sequence"),
        (shards_marked_on_one_rank, config(2), "'embedding.weight': expected a mark of tensor parallelism"),
        (marked(ranks=1), config(2), "mpu.get_model_parallel_world_size() is 2, of which 1"),
        (experts_by_auto_ep, config(2), "expert_parallel.enabled is true (AutoEP), which is not tested"),
        (experts, ON_OWNED, "the model has DeepSpeed's expert layers"),
        (stages, ON_OWNED, "the model is a PipelineModule"),
    ],
)
def test_unsupported_model_parallelism_is_refused(
    ranks_to_spoil: RankPool, make: Callable[..., None], settings: dict[str, Any], message: str
) -> None:
    for error in ranks_to_spoil.errors(make, settings):
        assert message in error


def tags_for_deepspeeds_own_muon() -> None:
    model = UnevenLM()
    model.lm_head.weight.use_muon = False
    model.layers[0].weight.use_muon = True
    build(config(2), model)


def parameters_of_another_model() -> None:
    build(config(2), model_parameters=[*UnevenLM().parameters()])


def parameters_that_share_memory(settings: dict[str, Any]) -> None:
    """DeepSpeed copies parameters, so that they would be tied no longer."""
    model = UnevenLM()
    model.lm_head.weight.data = model.layers[0].weight.data[:VOCABULARY]
    build(settings, model)


def another_optimizer_on_our_param_groups() -> None:
    """As Accelerate does to an optimizer object where the configuration offloads."""
    settings = config(2)
    options = settings.pop("optimizer")["params"]
    model = UnevenLM()
    groups = LayerWiseMuon(model.parameters(), **options).param_groups
    own = [{"params": group["params"], "lr": group["lr"], "from_group": group["from_group"]} for group in groups]
    build(settings, model, optimizer=torch.optim.AdamW(own))


def offloading_states() -> None:
    with engine_for(ON_OWNED) as engine:
        engine.offload_states()


def state_of_other_partitions() -> None:
    with engine_for(config(2)) as engine:
        train(engine, 1)
        state = engine.basic_optimizer.state_dict()
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"][:-2]
        engine.basic_optimizer.load_state_dict(state)


def other_options_on_rank_1(settings: dict[str, Any], **changes: Any) -> None:
    settings = copy.deepcopy(settings)
    options = settings.pop("optimizer")["params"]
    if dist.get_rank() == 1:
        options |= changes
    model = UnevenLM()
    build(settings, model, optimizer=LayerWiseMuon(model.parameters(), **options))


def storage_other_than_planned_on_rank_1() -> None:
    with engine_for(config(2)) as engine:
        if dist.get_rank() == 1:
            engine.module.layers[5].weight._hp_mapping.hp_fragment_address.start += 1
        train(engine, 1)


def error_of(make: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        make(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


OF_ANOTHER_OPTIMIZER = (
    "^ValueError: AdamW: expected the engine's parameters, found the param groups of LayerWise or LayerWiseMuon, "
)
UNTRAINABLE: Any = [
    (tags_for_deepspeeds_own_muon, "1 parameters, the first is 'layers.0.weight', carry use_muon=True"),
    *[
        (partial(parameters_that_share_memory, each), "'layers.0.weight' and 'lm_head.weight' share memory")
        for each in (*map(config, range(4)), ON_OWNED)
    ],
    (parameters_of_another_model, r"group 0, position 0: the parameter of shape \(37, 24\) is not in the model"),
    (another_optimizer_on_our_param_groups, OF_ANOTHER_OPTIMIZER),
    (offloading_states, "offloading: expected .storage.: .zero., found .owned."),
    (state_of_other_partitions, "param group 0: expected number of elements of 'momentum_buffer' 2546, the ch"),
]


@pytest.mark.parametrize(("make", "message"), UNTRAINABLE)
@on_ranks(2)
def test_what_cannot_be_trained_is_an_error_on_every_rank(make: Callable[[], None], message: str) -> None:
    assert re.search(message, error_of(make))


@on_ranks(2)
def test_a_failure_on_one_rank_stops_the_others_with_its_message() -> None:
    """When an engine of either storage is built; and before the first exchange, where storage is not as planned."""
    for settings in (config(2), ON_OWNED):
        error = error_of(other_options_on_rank_1, settings, include=["nowhere"])
        if dist.get_rank() == 1:
            assert "include: 'nowhere' matches no parameter name" in error
        else:
            assert error.startswith("RuntimeError: LayerWiseMuon: rank 1 failed with ValueError(")
    planned = "RuntimeError: parameter 'layers.5.weight': expected Fragment(rank=1"
    assert ("rank 1 failed", planned)[dist.get_rank()] in error_of(storage_other_than_planned_on_rank_1)


def test_an_optimizer_belongs_to_its_engine() -> None:
    optimizer = LayerWiseMuon(UnevenLM().parameters(), **MUON, adamw=ADAMW)
    with pytest.raises(RuntimeError, match="LayerWiseMuon: expected an engine; pass it to deepspeed.initialize"):
        optimizer.step()
    with pytest.raises(TypeError, match="cannot be copied or pickled; use state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(
        (NotImplementedError, RuntimeError, ValueError), match="expected all param groups in the constructor"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


# Which DeepSpeed is supported, and what one that is not, or that lacks names, is told
def installed() -> tuple[str, str]:
    return deepspeed.__version__, str(Path(deepspeed.__file__).parent)


def test_ranks_run_the_deepspeed_that_was_asked_for(ranks: RankPool) -> None:
    """scripts/versions.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(installed) == [installed()] * 2


def test_names_that_are_missing_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()  # this one has them all
    versions.check.cache_clear()
    monkeypatch.delattr(DeepSpeedEngine, "zero_sub_group_size")
    monkeypatch.setitem(versions.NAMES, "deepspeed.gone", "anything")
    missing = "deepspeed.runtime.engine.DeepSpeedEngine.zero_sub_group_size, deepspeed.gone, "
    with pytest.raises(
        ImportError, match=f"DeepSpeed {deepspeed.__version__}: expected {missing}.*deepspeed{SUPPORTED}"
    ):
        deepspeed_zero.register()


OLDER, NEWER = "an older one lacks methods", "a newer one may have moved methods"
REASONS = {"0.18.9": OLDER, "0.19.6": OLDER, "0.20.0rc1": NEWER, "0.20.0+cuda": NEWER, "1.0": NEWER}
WRONG_ON_CPUS = {  # what 0.19.7 does there, by the settings that make it
    "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all": config(3),
    "zero_optimization.contiguous_gradients is false on a CPU, where DeepSpeed 0.19.7 does not reduce": config(1),
}


def test_other_deepspeed_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        versions.check.__wrapped__()
    for version, reason in REASONS.items():
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(ImportError) as raised:
            versions.check.__wrapped__()
        message = str(raised.value)
        assert f"expected DeepSpeed {SUPPORTED}, found {version}: {reason}" in message
        assert f"pip install 'deepspeed{SUPPORTED}'" in message
        assert ("a newer lwopt_backend" in message) == (reason == NEWER)


@pytest.mark.parametrize("message", WRONG_ON_CPUS)
@on_ranks(2)
def test_what_the_oldest_deepspeed_gets_wrong_is_refused(message: str) -> None:
    """What the oldest gets wrong on CPUs is refused with it only. What is refused depends on DeepSpeed's version."""
    settings = copy.deepcopy(WRONG_ON_CPUS[message])
    settings["zero_optimization"]["contiguous_gradients"] = False
    if deepspeed.__version__ != "0.19.7":
        build(settings)
    with mock.patch.object(deepspeed, "__version__", "0.19.7"), pytest.raises(Exception, match=re.escape(message)):
        build(settings)
