"""Entries of ds_config.json that were written for DeepSpeed's Muon or AdamW train the same with our type in them."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from lwopt_backend.integrations import deepspeed_engine
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from lwopt_backend.muon_config import layer_wise_settings, muon_settings
from tests.migration import rules_for
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import config, engine_for

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


def options(settings: Any, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    rules, _ = settings(entry, "LayerWise")
    (note,) = rules.notes
    return rules.matrix.options.model_dump(), rules.elementwise.options.model_dump(), note


@TYPES
@pytest.mark.parametrize("entry", MUON_ENTRIES)
def test_an_entry_of_deepspeeds_muon_means_what_deepspeed_makes_of_it(settings: Any, entry: dict[str, Any]) -> None:
    weight, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    weight.use_muon, bias.use_muon = True, False
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups([weight, bias], entry)).param_groups
    muon, adamw, note = options(settings, entry)
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
    muon, adamw, _ = options(settings, {"betas": [0.9, 0.99], "torch_adam": torch_adam})
    assert adamw["betas"] == (0.9, 0.99) and adamw["eps"] == theirs["eps"].default
    for key in SHARED:
        assert muon[key] == adamw[key] == theirs[key].default, key
    assert muon["adjust_lr_fn"] == "match_rms_adamw"


@TYPES
@pytest.mark.parametrize("entry", [ADAMW, MUON_ENTRIES[0]])
def test_the_line_has_the_entry_in_our_words(settings: Any, entry: dict[str, Any]) -> None:
    """With it in place of the entry nothing changes, and nothing is left to say."""
    *found, note = options(settings, entry)
    written = json.loads(note[note.index("{") : note.rindex("}") + 1])
    rules, _ = muon_settings(written, "LayerWiseMuon")
    assert [rules.matrix.options.model_dump(), rules.elementwise.options.model_dump()] == found and not rules.notes


def test_options_of_ours_stand_beside_theirs_and_win() -> None:
    rules, host = muon_settings({**ADAMW, "adjust_lr_fn": "original", "exclude": "gate.*", "policy": "stay"}, "")
    assert rules.matrix.options.model_dump()["adjust_lr_fn"] == "original" and "match_rms_adamw" not in rules.notes[0]
    assert (host.exclude, host.policy) == (("gate.*",), "stay")
    rules, _ = muon_settings({"muon_lr": 0.1, "ns_dtype": "bfloat16"}, "")
    assert rules.matrix.options.model_dump()["ns_dtype"] == "bfloat16"


@pytest.mark.parametrize("entry", [{"lr": 0.02, "momentum": 0.9, "eps": 1e-6}, {"lr": 0.02, "adamw": {"lr": 1e-3}}])
def test_our_own_entries_are_left_alone(entry: dict[str, Any]) -> None:
    assert muon_settings(entry, "")[0].notes == ()


@TYPES
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"betas": [0.9, 0.9], "adam_w_mode": False}, "adam_w_mode is False, which has no counterpart; with the type"),
        (
            {"muon_lr": 0.1, "per_head_muon": True},
            "per_head_muon is True, which has no counterpart; say how many heads",
        ),
        ({"betas": [0.9, 0.9], "fp32_optimizer_states": False}, "fp32_optimizer_states is False, which has no"),
        ({"muon_lr": 0.1, "ns_method": "grim"}, "ns_method: expected 'gram' or 'standard'; found 'grim'"),
        ({"betas": "auto", "lr": "auto"}, "lr, betas: found 'auto', which only Hugging Face's Trainer fills in"),
        ({"betas": [0.9, 0.9], "momentun": 0.9}, "unknown key 'momentun'; did you mean 'momentum'?"),
    ],
)
def test_what_cannot_be_meant_here_is_refused(settings: Any, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        settings(entry, "LayerWise")


def test_a_foreign_key_beside_our_sections_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key 'betas'; did you mean 'adamw.betas'?"):
        muon_settings({"betas": [0.9, 0.9], "adamw": {"lr": 0.1}}, "")
    with pytest.raises(ValueError, match="unknown key 'betas'; did you mean 'elementwise.betas'?"):
        layer_wise_settings({"betas": [0.9, 0.9], "matrix": "muon"}, "")


@pytest.mark.parametrize("optimizer", [LayerWise, LayerWiseMuon])
def test_what_the_trainer_fills_into_an_entry_of_adamw_is_understood(optimizer: Any, tmp_path: Any) -> None:
    entry = {"type": optimizer.name, "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    settings = HfTrainerDeepSpeedConfig({**config(2), "optimizer": entry})
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=3e-5, adam_beta2=0.98, report_to=[])
    settings.trainer_config_process(given)
    groups = optimizer(UnevenLM().parameters(), **settings.config["optimizer"]["params"]).param_groups
    assert [(group["rule"], group["lr"], group["weight_decay"]) for group in groups] == [
        ("muon", 3e-5, 0.0),
        ("adamw", 3e-5, 0.0),
    ]
    assert (groups[1]["betas"], groups[1]["eps"]) == ((0.9, 0.98), 1e-8)


def groups_and_notes(written_type: str, storage: str) -> tuple[list[dict[str, Any]], list[str]]:
    settings = config(1)
    settings["optimizer"] = {"type": written_type, "params": {**ADAMW, "report": False, "storage": storage}}
    notes: list[str] = []
    logger, warn = deepspeed_engine.logger, deepspeed_engine.logger.warning
    logger.warning = lambda message, *args: notes.append(message)
    try:
        with engine_for(settings) as engine:
            optimizer = engine.basic_optimizer
            groups = [{key: group[key] for key in ("rule", *SHARED)} for group in optimizer.param_groups]
            return groups, [note for note in notes if "an entry of" in note]
    finally:
        logger.warning = warn


@pytest.mark.parametrize(
    ("written_type", "storage"), [("layerwisemuon", "zero"), ("LAYERWISE", "zero"), ("layer_wise_muon", "owned")]
)
def test_an_engine_takes_the_entry_with_the_type_in_any_case_and_says_so_once(
    ranks: RankPool, written_type: str, storage: str
) -> None:
    (groups, first), (_, second) = ranks.run(groups_and_notes, written_type, storage)
    assert [(group["rule"], group["lr"]) for group in groups] == [("muon", 5e-5), ("adamw", 5e-5)]
    assert len(first) == 1 and "makes this an entry of AdamW" in first[0] and second == []


def build(written_type: str, registered: bool) -> None:
    settings, model = config(1), UnevenLM()
    settings["optimizer"]["type"] = written_type
    classes = {name: vars(torch.optim).pop(name) for name in ("LayerWise", "LayerWiseMuon")} if not registered else {}
    try:
        deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    finally:
        for name, optimizer in classes.items():
            setattr(torch.optim, name, optimizer)


@pytest.mark.parametrize(
    ("written_type", "registered", "message"),
    [
        (
            "LayerWiseMuon",
            False,
            "ValueError: optimizer.type is 'LayerWiseMuon', but it is not registered; call lwopt_",
        ),
        (
            "layerwise",
            False,
            "ValueError: optimizer.type is 'layerwise', but it is not registered; call lwopt_backend.",
        ),
        ("LayerWiseMoun", True, "which DeepSpeed does not know; did you mean 'LayerWiseMuon'?"),
        ("Nonsense", True, "AssertionError: Nonsense is not a supported DeepSpeed Optimizer"),
    ],
)
def test_a_type_that_is_not_known_is_an_error_that_says_what_to_do(
    ranks: RankPool, written_type: str, registered: bool, message: str
) -> None:
    for error in ranks.errors(build, written_type, registered):
        assert message in error
