"""Wrong arguments, options and entries: every engine answers with what was found, expected, and called here."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lwopt_backend
from lwopt_backend import ModuleOptimizers
from lwopt_backend.groups.choices import muon_settings
from lwopt_backend.groups.param_groups import split
from lwopt_backend.groups.registry import arguments
from lwopt_backend.integrations import fsdp2
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from tests.test_config import Demanding

Door = Callable[..., object]
Wrong = tuple[dict[str, Any], str]  # what is given, and the answer


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def owned(**options: Any) -> object:
    return lwopt_backend.LayerWiseOptimizer(model(), **{"report": False, **options})


def in_a_group(**given: Any) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    split([{"params": [weight], **given}], {id(weight): True}, muon_settings({}, "")[0])


def overriding(params: str, **sections: Any) -> dict[str, Any]:
    return {"overrides": [{"params": params, **sections}]}


def of_class(path: object, **options: Any) -> dict[str, Any]:
    return {"matrix": {"name": "torch_optimizer", "class": path, **options}}


def on_fsdp2(**options: Any) -> object:
    return fsdp2.LayerWiseOptimizer(model(), sharded_later=True, **{"report": False, **options})


def layer_wise(**options: Any) -> object:
    return LayerWise(**{"params": model().parameters(), "report": False, **options})


def layer_wise_muon(**options: Any) -> object:
    return LayerWiseMuon(**{"params": model().parameters(), "report": False, **options})


RULES = (owned, on_fsdp2, layer_wise)
DOORS = (*RULES, layer_wise_muon)
CLIPS = (owned, on_fsdp2)
MEANT = {  # what keys of other optimizers mean here
    **{
        "learning_rate": "matrix.lr",
        "muon_lr": "matrix.lr",
        "adam_lr": "elementwise.lr",
        "scalar_lr": "elementwise.lr",
    },
    **{"wd": "elementwise.weight_decay", "muon_wd": "matrix.weight_decay", "mu": "matrix.momentum"},
    **{"muon_momentum": "matrix.momentum", "betas": "elementwise.betas", "adamw_betas": "elementwise.betas"},
    **{"eps": "elementwise.eps", "adam_epsilon": "elementwise.eps"},
}


def answer(door: Door, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        door(**options)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(("foreign", "ours"), MEANT.items())
def test_a_key_of_another_optimizer_is_answered_with_a_configuration_that_is_taken(foreign: str, ours: str) -> None:
    value: Any = (0.5, 0.25) if "betas" in foreign else 0.5
    half, _, option = ours.partition(".")
    for door in DOORS:
        told = answer(door, **{foreign: value, "exclude": ["1.*"]})
        assert f"{foreign!r} is a key of another optimizer" in told, (door, told)
        written = json.loads(told.splitlines()[-1])
        if door in (layer_wise, layer_wise_muon):
            assert told.startswith(f"ValueError: {written['type']}: ")
            written = written["params"]
        matrix, elementwise = written.get("matrix", written), written.get("elementwise", written.get("adamw"))
        assert all({"lr", "weight_decay"} <= said.keys() for said in (matrix, elementwise)), written
        made: Any = door(**written)
        groups = {"matrix" if group["rule"] == "muon" else "elementwise": group for group in made.param_groups}
        assert arguments(groups[half])[option] == value, (door, written)
        assert made.config.exclude == ("1.*",)


def test_options_of_another_optimizer_beside_our_sections_move_into_them() -> None:
    for door, section in ((owned, "elementwise"), (layer_wise_muon, "adamw")):
        told = answer(door, lr=0.02, adamw={"lr": 1e-3}, betas=(0.5, 0.25))
        written = json.loads(told.splitlines()[-1])
        assert written.get("params", written)[section].items() >= {"lr": 1e-3, "betas": [0.5, 0.25]}.items()
    told = answer(layer_wise, matrix={"name": "normuon", "lr": 0.02}, elementwise="lion", mu=0.5, betas=(0.5, 0.25))
    assert json.loads(told.splitlines()[-1])["params"] == {
        "matrix": {"name": "normuon", "lr": 0.02, "momentum": 0.5},
        "elementwise": {"name": "lion", "betas": [0.5, 0.25]},
        "report": False,
    }


OTHER_KIND = "matrix: unknown rule 'adamw'; 'adamw' is a rule of the other kind; known here:"
ENTRY = "ValueError: LayerWise: unknown key 'adamw'"
AUTO = "lr: input should be a valid number; found 'auto': only Hugging Face's Trainer and Accel"
SECTION = "expected a section with 'params', a glob on names or several"
GLOBS = "expert_params: expected a glob on names, or a list of them"
GROUP = "expected None or a process group, such as torch.distributed.new_group(ranks) returns; found 5"
ADAM = "torch.optim.Adam"
OWNED = {"storage": "owned"}
CLIPPED = {"params": "1.*", "max_norm": 1.0}
PATH = "class: expected an optimizer's class or its path"
ONLY_TRUE = "expected True, found False; "
FOREIGN: list[Wrong] = [
    ({"betas": [0.9, 0.9], "adam_w_mode": False}, f"adam_w_mode: {ONLY_TRUE}register torch.optim.Adam"),
    ({"muon_lr": 0.1, "per_head_muon": True}, '"per_head": true'),
    ({"betas": [0.9, 0.9], "fp32_optimizer_states": False}, f"fp32_optimizer_states: {ONLY_TRUE}"),
    ({"muon_lr": 0.1, "ns_method": "grim"}, "ns_method: input should be 'standard', 'gram', 'auto'"),
    ({"betas": "auto", "lr": "auto"}, "lr: input should be a valid number; found 'auto': only Hugging Face's"),
]
WRONG_VALUES: dict[str, list[Any]] = {  # of options of LayerWiseMuon
    "lr": [float("nan"), True, -0.1],
    "momentum": [1.0, -0.5],
    "gram_aspect": [0.5, True],
    **{"nesterov": ["yes"], "ns_steps": [2.5, 0], "bucket_numel": [0], "policy": ["spread"], "storage": ["mine"]},
}
OF_ONE: dict[Door, list[Wrong]] = {
    layer_wise_muon: [
        *FOREIGN,
        ({"lr": "2e-2"}, "LayerWiseMuon: lr: input should be a valid number; found '2e-2'"),
        *(
            ({key: value}, f"LayerWiseMuon: {key}: input should be ... ; found {value!r}")
            for key, values in WRONG_VALUES.items()
            for value in values
        ),
        ({"adjust_lr_fn": "orignal"}, "adjust_lr_fn: input should be 'original', 'match_rms_adamw'"),
        (
            {"momentum": 2, "Momentum": 1},
            "LayerWiseMuon: 2 wrong options\n  momentum: ... \n  unknown key 'Momentum'; did you mean 'momentum'?",
        ),
        ({"zzzz": 1}, "unknown key 'zzzz'; known: 'lr', 'weight_decay'"),
        ({"adamw": {"momentum": 1, "beta": []}}, "'adamw.momentum' ... unknown key 'adamw.beta'; did you mean 'betas'"),
        ({"foreach": True}, "unknown key 'foreach'; did you mean 'adamw.foreach'?"),
        ({"betas": [0.9, 0.9], "momentun": 0.9}, "unknown key 'momentun'; did you mean 'momentum'?"),
        ({"adamw": {"foreach": True, "fused": True}}, "foreach and fused are both true, but torch supports one of"),
        ({"adamw": {"lr": "auto"}}, "adamw.lr: input should be a valid number; found 'auto': only Hugging Face"),
        ({"bucket_mb": 1.0}, "'bucket_mb': expected only with \"storage\": \"owned\", found 'zero'"),
        ({**OWNED, "policy": "stay"}, "'policy': expected only with \"storage\": \"zero\", found 'owned'"),
        ({**OWNED, "layout": "dense"}, "layout: input should be 'auto', 'padded' or 'compact'; found 'dense'"),
        ({**OWNED, "bucket_mb": 0.0}, "bucket_mb: input should be greater than 0; found 0.0"),
    ],
    layer_wise: [
        *FOREIGN,
        ({"matrix": {"name": "moun"}}, "matrix: unknown rule 'moun'; did you mean 'muon'?"),
        ({"matrix": {"lr": 1.0}}, "matrix: expected a key 'name', one of muon"),
        ({"matrix": 3}, "matrix: expected a rule's name, or a section with a 'name'; found 3"),
        ({"matrix": "muon", "matrx": 1}, "unknown key 'matrx'; did you mean 'matrix'?"),
        ({"momentum": 0.9}, "unknown key 'momentum'; did you mean 'matrix.momentum'?"),
        ({"lr": 0.1, "matrix": {"name": "muon", "lr": 0.2}}, "'lr' is given twice, as 0.2 and in 'matrix' as 0.1"),
        ({"overrides": {"params": "*"}}, "overrides: expected a list of sections with 'params'"),
        ({"overrides": [{"matrix": {"lr": 1.0}}]}, "overrides[0]: expected a section with 'params'"),
        (overriding("*"), "overrides[0]: expected options in 'matrix' or 'elementwise'; found none"),
        (overriding("*", matrx={}), "overrides[0]: unknown key 'matrx'; did you mean 'matrix'?"),
        (overriding("*", matrix={"lrr": 1}), "overrides[0]: matrix: unknown key 'lrr'"),
        (overriding("*", matrix={"name": "adamw"}), "overrides[0]: matrix: unknown rule 'adamw'"),
        (overriding("*", matrix=None), "[0]: matrix: expected a rule's name, or a section of options; found None"),
        ({"overrides": [{"params": 3, "matrix": {"lr": 1.0}}]}, "overrides[0]: params: expected a glob on names, or a"),
        ({"overrides": [{"params": ["*", 3], "matrix": {"lr": 1.0}}]}, "or a list of them; found ['*', 3]"),
        (overriding("*", **of_class(3)), f"overrides[0]: matrix: {PATH}"),
        (of_class(ADAM) | overriding("*", matrix={"class": "torch.optim.Adm"}), "matrix: class 'torch.optim.Adm': "),
        ({"matrix": {"name": ["muon"]}}, "matrix: name: expected one of muon, normuon, adamuon, "),
        (of_class(3), f"matrix: {PATH}, e.g. 'pytorch_optimizer.SOAP'; found 3"),
        (of_class("torch.optim.Adm"), "torch.optim has no 'Adm'; did you mean 'Adam'?"),
        (of_class(ADAM, betas=3), "Adam refuses these arguments: betas is 3; expected a value like (0.9, 0.999)"),
        (of_class(".a.Adam"), "class '.a.Adam' cannot be imported: "),
        (of_class("no_such_package.X"), "cannot be imported: No module named"),
        (of_class("torch.nn.Linear"), "expected a torch.optim.Optimizer, found <class 'torch.nn.modules.linear."),
        (of_class(ADAM, betaz=1), "unknown key 'betaz'; did you mean 'betas'?"),
        (of_class("pytorch_optimizer.Muon", lr=0.02), "Muon cannot be made with one matrix as its parameters: Runtime"),
        (of_class(ADAM, lr=0.1, eps=-1.0), "torch.optim.Adam refuses these arguments: Invalid epsilon value: -1.0"),
        (of_class("torch.optim.SGD", lr=math.nan), "SGD: lr: expected a finite number of at least 0, found nan"),
    ],
    owned: [
        ({"bucket_md": 1.0}, "unknown key 'bucket_md'; did you mean 'bucket_mb'?"),
        ({"matrix": {"name": "muon", "lr": 0.1}, "lr": 0.02}, "'lr' is given twice"),
        ({"matrix": {"name": "torch_optimizer", "class": Demanding}}, "Demanding: expected the argument 'momentum'"),
        ({"matrix": {"name": "torch_optimizer"}, "alpha": 0.9}, "matrix: expected 'class', the path of an"),
        ({"elementwise": {"name": ["adamw"]}}, "elementwise: name: expected one of adamw, "),
        ({"elementwise": "lion", "lion": None}, "lion: expected a section of options; found None"),
    ],
    in_a_group: [
        ({"weight_decy": 0.1}, "param group 0: unknown key 'weight_decy'; did you mean 'weight_decay'"),
        ({"use_muon": True}, "param group 0: unknown key 'use_muon'; ... decides what is a matrix"),
        ({"adam_lr": 0.1}, "param group 0: unknown key 'adam_lr'; did you mean 'adamw.lr'?"),
        ({"adamw": {"lrr": 1}}, "param group 0, 'adamw': "),
        ({"adamw": 3}, "param group 0: adamw: expected a section of options; found 3"),
        ({"betas": (0.9, 0.99)}, "param group 0: 'betas' is an option of 'adamw'; write it into the group's section '"),
        ({"exclude": ["*"]}, "param group 0: 'exclude' is an option of the whole optimizer, not of a param group"),
        ({"rule": "adamw"}, "param group 0: 'rule' is a key that this optimizer writes itself"),
    ],
}
BEGIN = {
    **{owned: "ValueError: LayerWiseOptimizer", layer_wise: "ValueError: LayerWise:"},
    **{layer_wise_muon: "ValueError: LayerWiseMuon:", in_a_group: "ValueError: "},
}
ANSWERS: list[tuple[tuple[Door, ...], dict[str, Any], str]] = [  # " ... " stands for anything
    *(((door,), given, f"{BEGIN[door]} ... {found}") for door, rows in OF_ONE.items() for given, found in rows),
    (DOORS, {"max_grad_norm": 1.0}, "unknown key 'max_grad_norm'; write gradient_clipping at the top level of"),
    (RULES, {"matrix": "adamw"}, OTHER_KIND),
    (RULES, {"elementwise": "muon"}, "elementwise: unknown rule 'muon'; 'muon' is a rule of the other kind"),
    ((layer_wise,), {"adamw": {"lr": 0.1}}, f"{ENTRY}; write {{'elementwise': {{'name': 'adamw', ...}}}}"),
    (DOORS, {"lr": "auto"}, AUTO),
    (DOORS, {"include": 5}, "include: input should be a list; found 5"),
    (DOORS, {"exclude": {"1.*": True}}, "exclude: input should be a list; found {'1.*': True}"),
    (CLIPS, {"clip_groups": 5}, "clip_groups: expected sections by name, with 'params' and 'max_norm'; found 5"),
    (CLIPS, {"clip_groups": {"a": {"params": "1.*", "max_norm": 0.0}}}, "clip_groups['a']: ... greater than 0; found"),
    (CLIPS, {"clip_groups": {"a": {"max_norm": 1.0}}}, "clip_groups['a']: ... params: field required"),
    (CLIPS, {"clip_groups": {"a": {"params": "1.*", "max_nrm": 1.0}}}, "unknown key 'max_nrm'; did you mean 'max_norm"),
    ((owned,), {"clip_groups": {"a": {"params": "2.*", "max_norm": 1.0}}}, "clip_groups['a']: '2.*' matches no"),
    ((owned,), {"clip_groups": {"a": CLIPPED, "b": CLIPPED}}, "is in clip_groups 'a' and 'b'; give it to one of them"),
    ((layer_wise, layer_wise_muon), {"clip_groups": {"a": CLIPPED}}, "'clip_groups' is for fully_shard models and for"),
    (DOORS, {"atoms": "1.*"}, "atoms: expected a mapping of globs to divisions; found '1.*'"),
    (DOORS, {"overrides": "1.*"}, "overrides: expected a list of sections with 'params'; found '1.*'"),
    (DOORS, {"overrides": [5]}, f"overrides[0]: {SECTION}; found 5"),
    (DOORS, {"params": 5}, "TypeError: ... found 5; pass model.parameters() or a list of param groups"),
    (DOORS, {"params": set(model().parameters())}, "TypeError: ... in one order on all ranks; found a set"),
    (DOORS, {"params": model()}, "TypeError: ... found a Sequential; pass model.parameters()"),
    (DOORS, {"params": [{"params": 5}]}, "TypeError: ... group 0: params: expected a list of parameters, found 5"),
    (
        (owned,),
        overriding("*.wieght", matrix={"lr": 1.0}),
        "overrides[0]: '*.wieght' matches no trained parameter; did",
    ),
    ((owned,), overriding("*.bias", matrix={"lr": 1.0}), "but only match parameters of 'elementwise'"),
    ((owned,), overriding("*.weight", elementwise={"lr": 1.0}), "but only match parameters of 'matrix'"),
    ((owned,), {"expert_params": [1]}, f"ValueError: {GLOBS}; found [1]"),
    ((owned,), {"process_group": 5}, f"TypeError: process_group: {GROUP}"),
    ((owned,), {"expert_params": "1.*", "expert_process_group": 5}, f"TypeError: expert_process_group: {GROUP}"),
    ((ModuleOptimizers,), {"optimizers": {}, "process_group": 5}, f"TypeError: process_group: {GROUP}"),
]


@pytest.mark.parametrize(("doors", "given", "found"), ANSWERS, ids=[str(list(given)) for _, given, _ in ANSWERS])
def test_a_wrong_value_is_answered_with_what_to_do(doors: tuple[Door, ...], given: dict[str, Any], found: str) -> None:
    for door in doors:
        told, parts = answer(door, **given), found.split(" ... ")
        assert all(part in told for part in parts) and "pydantic" not in told, (door, told)
        assert told.startswith(parts[0]) or not found.startswith(("TypeError", "ValueError")), (door, told)


PASS_THE_MODEL = "Pass the model, not its parameters"
PASS_AS_PARAMS = "Pass the model, and param groups as params=[...]"
NO_MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: model().parameters(), f"of Parameter. {PASS_THE_MODEL}: its structure and"),
    (lambda: list(model().parameters()), f"found a list of Parameter. {PASS_THE_MODEL}"),
    (lambda: model().named_parameters(), f"of tuple. {PASS_THE_MODEL}"),
    (lambda: [{"params": list(model().parameters())}], f"of dict. {PASS_AS_PARAMS}"),
    (lambda: {"params": list(model().parameters())}, f"found a dict. {PASS_AS_PARAMS}"),
    (lambda: nn.Parameter(torch.zeros(2, 2)), f"found a Parameter. {PASS_THE_MODEL}"),
    (lambda: None, "found None"),
    (lambda: [], "found a list"),
]


@pytest.mark.parametrize(("given", "found"), NO_MODELS)
def test_anything_but_a_model_is_answered_with_what_to_pass(given: Callable[[], Any], found: str) -> None:
    for optimizer in (lwopt_backend.LayerWiseOptimizer, fsdp2.LayerWiseOptimizer):
        with pytest.raises(TypeError, match="LayerWiseOptimizer: model: expected a torch.nn.Module") as caught:
            optimizer(given())
        assert found in str(caught.value)
