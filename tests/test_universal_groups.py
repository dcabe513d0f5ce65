"""Options of another optimizer's param groups in our engines: what is taken, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint
from lwopt_backend.checkpoint.deepspeed import universal_writer
from lwopt_backend.checkpoint.files.folders import write_folder
from lwopt_backend.integrations import deepspeed_universal_loading as loading
from tests.ranks import RankPool
from tests.test_checkpoint_chains import Named, groups_of, small_megatron
from tests.test_cli import run as lwopt
from tests.zero import engine_for

EXCLUDED = ["*word_embeddings.weight", "*output_layer.weight"]
AS_MEGATRON = {"nesterov": False, "ns_coefficients": "quintic", "eps": 1e-15, "adjust_lr_fn": "spectral"}


def loaded(
    folder: str, shapes: dict[str, tuple[int, ...]], muon: dict[str, Any], schedule: str = "none", **choice: Any
) -> dict[str, Any]:
    """The param groups of an engine after loading, and what this rank said."""
    said: list[str] = []
    warn = loading.logger.warning
    model = Named(shapes)
    matrix = {"name": "muon", "lr": 1.0, "momentum": 0.5, **muon}
    params = {"matrix": matrix, "elementwise": {"name": "adamw", "lr": 1.0}, "exclude": EXCLUDED, "report": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "LayerWise", "params": params | {"atoms": {"*": "whole"}}},
        "steps_per_print": 1_000_000,
        "checkpoint": {"load_universal": True},
    }
    kwargs: dict[str, Any] = {"model_parameters": groups_of(model)}
    if schedule == "torch":
        kwargs["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif schedule == "deepspeed":
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 20}}
    with engine_for(settings, model, **kwargs) as engine:
        loading.logger.warning = lambda message, *_: said.append(message)
        try:
            engine.load_checkpoint(folder, **choice)
        finally:
            loading.logger.warning = warn
        groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
        return {"groups": groups, "said": said}


def universal_of(checkpoint: Checkpoint, folder: Path) -> str:
    def fill(made: Path) -> None:
        universal_writer.write(checkpoint, made)

    write_folder(folder / "step", fill, pointers={"latest_universal": "step"})
    return str(folder)


def with_groups(checkpoint: Checkpoint, change: Any, **arguments: Any) -> Checkpoint:
    """``change`` gives what a group is instead; arguments that are None are left out."""
    told = {key: value for key, value in {**checkpoint.arguments, **arguments}.items() if value is not None}
    return dataclasses.replace(checkpoint, groups=tuple(map(change, checkpoint.groups)), arguments=told)


def momentum_under(key: str) -> Any:
    def change(group: Mapping[str, Any]) -> dict[str, Any]:
        rest = {k: v for k, v in group.items() if k not in ("momentum", "momentum_beta")}
        return {**rest, key: 0.75} if len(rest) < len(group) else rest

    return change


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("key", ["momentum", "momentum_beta"])
def test_momentum_is_the_checkpoints_under_either_name(ranks: RankPool, tmp_path: Path, key: str, known: bool) -> None:
    """Also where its other options cannot be translated, as an argument is missing."""
    source = small_megatron(tmp_path / "megatron")
    more = {} if known else {"muon_use_nesterov": None}
    checkpoint = with_groups(formats.read(source.folder), momentum_under(key), **more)
    assert sum(key in group for group in checkpoint.groups) == 1
    folder = universal_of(checkpoint, tmp_path / "universal")
    found = ranks.run(loaded, folder, source.shapes, AS_MEGATRON)
    for of_rank in found:
        by_rule = {group["rule"]: group for group in of_rank["groups"]}
        assert by_rule["muon"]["momentum"] == 0.75 and "momentum_beta" not in by_rule["muon"]
    said = found[0]["said"]
    if known:
        assert said == []
    else:
        assert len(said) == 1 and "has no options of ours: the checkpoint's arguments lack muon_nesterov" in said[0]


@pytest.mark.parametrize("renamed", [False, True])
def test_rank_0_says_what_is_configured_otherwise(ranks: RankPool, tmp_path: Path, renamed: bool) -> None:
    source = small_megatron(tmp_path / "megatron")
    names: tuple[Any, ...] = ()
    if renamed:
        rules = {"target": "mine", "rules": [{"source": "{*}", "target": "wrapped.{*}"}]}
        (tmp_path / "map.json").write_text(json.dumps(rules))
        names = ("--names", tmp_path / "map.json")
    folder = tmp_path / "universal"
    lwopt("convert", source.folder, folder, "--to", "universal", "--json", *names)
    shapes = {f"{'wrapped.' * renamed}{name}": shape for name, shape in source.shapes.items()}
    other = {**AS_MEGATRON, "nesterov": True, "extra_scale_factor": 0.5}
    first, second = ranks.run(loaded, str(folder), shapes, other)
    assert second["said"] == []
    (said,) = first["said"]
    options = "nesterov False (here True), extra_scale_factor 1.0 (here 0.5)"
    assert said == (
        f"{folder}/global_step7: param group 0 was trained with {options} where it comes from, and goes on with what "
        "is configured here"
    )
    muon = first["groups"][0]
    assert (muon["nesterov"], muon["extra_scale_factor"], muon["momentum"]) == (True, 0.5, 0.9)
    for of_rank in ranks.run(loaded, str(folder), shapes, AS_MEGATRON):
        assert of_rank["said"] == []


def test_an_adam_that_is_not_ours_is_said_once(ranks: RankPool, tmp_path: Path) -> None:
    """It is of both groups that Megatron has; each is named once, by one rank."""
    source = small_megatron(tmp_path / "megatron")

    def change(group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "decoupled_weight_decay": False, "weight_decay": 0.1} if "betas" in group else dict(group)

    checkpoint = with_groups(formats.read(source.folder), change)
    adam = [number for number, group in enumerate(checkpoint.groups) if "betas" in group]
    folder = universal_of(checkpoint, tmp_path / "universal")
    first, second = ranks.run(loaded, folder, source.shapes, AS_MEGATRON)
    assert second["said"] == [] and len(first["said"]) == len(adam) == 2
    for number, said in zip(adam, first["said"], strict=True):
        assert said.startswith(f"{folder}/step: param group {number} has no options of ours: its Adam adds")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("none", None),
        ("torch", "from its last_epoch 0, but the checkpoint was saved after 7 steps"),
        ("deepspeed", "set its last_batch_iteration to 6"),
    ],
)
def test_a_schedule_that_is_not_loaded_is_said_with_what_to_do(
    ranks: RankPool, tmp_path: Path, schedule: str, words: str | None
) -> None:
    source = small_megatron(tmp_path / "megatron")
    folder = tmp_path / "universal"
    lwopt("convert", source.folder, folder, "--to", "universal", "--json")
    given = (str(folder), source.shapes, AS_MEGATRON, schedule)
    first, second = ranks.run(loaded, *given, load_lr_scheduler_states=False)
    assert second["said"] == []
    assert [words in said for said in first["said"]] == ([] if words is None else [True])
    for of_rank in ranks.run(loaded, *given, load_module_only=True):
        assert of_rank["said"] == []
