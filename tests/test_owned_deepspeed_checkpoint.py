"""Owned storage in DeepSpeed's checkpoints: a resumed run continues bit for bit, and DeepSpeed's tools read them."""

from __future__ import annotations

import argparse
import copy
import itertools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from lwopt_backend.checkpoint import convert as conversion
from lwopt_backend.checkpoint import formats
from tests.models import UnevenLM
from tests.owned_deepspeed import config, engine_on_any_cpu, in_precision, train
from tests.ranks import RankPool
from tests.zero import MUON

PRECISIONS = ("fp32", "bf16", "bf16+fp32", "fp16")


def settings_for(stage: int, precision: str, *, clip: float = 0.5, **options: Any) -> dict[str, Any]:
    settings = in_precision(precision, config(stage, accumulation=2, clip=clip, **options))
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 8}}
    return settings


def masters(engine: Any) -> dict[str, Tensor]:
    get = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(param) for name, param in engine.module.named_parameters()}


def states(engine: Any) -> dict[str, Tensor]:
    get = deepspeed.utils.safe_get_full_optimizer_state
    return {
        f"{name}.{key}": get(engine_param(engine, name), key)
        for member in engine.optimizer.core.members
        for name in [member.name]
        for key in (["momentum_buffer"] if member.is_matrix else ["exp_avg", "exp_avg_sq"])
    }


def engine_param(engine: Any, name: str) -> Tensor:
    return dict(engine.module.named_parameters())[name]


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training goes on from, whole, whatever the layout."""
    return {
        "masters": masters(engine),
        "weights": {name: param.detach().clone() for name, param in engine.module.named_parameters()},
        "states": states(engine),
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.optimizer.loss_scale),
        "rates": list(engine.get_lr()),
        "schedule": copy.deepcopy(engine.lr_scheduler.state_dict()),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, bool]:
    return {key: equal(a[key], b[key]) for key in a}


def continued(folder: str, stage: int, precision: str, first: int, options: dict[str, Any]) -> dict[str, bool]:
    """Save after ``first`` steps and go on; load into a fresh engine and go on as well."""
    settings = settings_for(stage, precision, **options)
    with engine_on_any_cpu(settings) as engine:
        train(engine, first)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        before = snapshot(engine)
        losses = train(engine, range(first, first + 3))
        after = snapshot(engine)
    with engine_on_any_cpu(settings, UnevenLM(seed=1)) as engine:
        _, client = engine.load_checkpoint(folder)
        loaded = snapshot(engine)
        resumed = train(engine, range(first, first + 3))
        return {
            "client state": client["rows"] == 3,
            "losses": resumed == losses,
            **{f"{key} loaded": same for key, same in compared(before, loaded).items()},
            **compared(after, snapshot(engine)),
        }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(ranks: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    for same in ranks.run(continued, str(tmp_path), stage, precision, 3, {}):
        assert same == dict.fromkeys(same, True)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_resumed_run_in_instances_equals_an_uninterrupted_one(
    ranks: RankPool, tmp_path: Path, stage: int, group_size: int
) -> None:
    for same in ranks.run(continued, str(tmp_path), stage, "bf16", 2, {"group_size": group_size}):
        assert same == dict.fromkeys(same, True)


def save_and_go_on(folder: str, stage: int, precision: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """All ranks train on the same rows, so that no step depends on how many ranks there are."""
    with engine_on_any_cpu(settings_for(stage, precision, clip=0.0, **options)) as engine:
        train(engine, 3, same_rows=True)
        engine.save_checkpoint(folder, tag="step3")
        before = snapshot(engine)
        train(engine, range(3, 5), same_rows=True)
        return before, snapshot(engine)


def load_and_go_on(
    folder: str, stage: int, precision: str, options: dict[str, Any], universal: bool
) -> tuple[dict[str, Any], ...]:
    settings = settings_for(stage, precision, clip=0.0, **options)
    settings["checkpoint"] = {"load_universal": universal}
    with engine_on_any_cpu(settings, UnevenLM(seed=1)) as engine:
        engine.load_checkpoint(folder, tag="step3")
        before = snapshot(engine)
        train(engine, range(3, 5), same_rows=True)
        return before, snapshot(engine)


def without_samples(of: dict[str, Any]) -> dict[str, Any]:
    """How many samples were seen is counted for all ranks; here each rank trains on the same."""
    steps, _, skipped, scale = of["steps"]
    return {**of, "steps": (steps, skipped, scale)}


def pool_of(rank_pools: dict[int, RankPool], world_size: int) -> RankPool:
    if world_size not in rank_pools:
        rank_pools[world_size] = RankPool(world_size)
    return rank_pools[world_size]


def convert(folder: Path) -> str:
    """With our converter; the folder of the result."""
    into = folder / "ours"
    checkpoint = formats.read(folder / "step3")
    conversion.write(checkpoint, "universal", conversion.Place(into / "step3", {"latest_universal": "step3"}))
    return str(into)


def convert_as_deepspeed_does(folder: Path) -> str:
    """With DeepSpeed's own converter; the folder of the result."""
    into = folder / "universal"
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "step3"),
            output_folder=str(into / "step3"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return str(into)


TARGETS = [
    (1, 0, "padded", None),
    (2, 2, "compact", None),
    (2, 0, "auto", 1),
    (4, 1, "auto", 2),
    (4, 2, "padded", None),
]


@pytest.mark.parametrize(("precision", "saved_at"), [("fp32", 1), ("bf16+fp32", 2), ("fp16+fp32", 1)])
@pytest.mark.parametrize("saved_in", [{"layout": "padded"}, {"layout": "compact", "group_size": 1}], ids=["one", "two"])
def test_universal_checkpoints_go_anywhere(
    rank_pools: dict[int, RankPool], tmp_path: Path, precision: str, saved_at: int, saved_in: dict[str, Any]
) -> None:
    """To other numbers of ranks, stages, layouts and instances. Added up in fp32, micro-batches are alike at all."""
    before, after = pool_of(rank_pools, 2).run(save_and_go_on, str(tmp_path), saved_at, precision, saved_in)[0]
    for (world_size, stage, layout, group_size), folder in itertools.product(
        TARGETS, (convert(tmp_path), convert_as_deepspeed_does(tmp_path))
    ):
        options = {"layout": layout, "group_size": group_size}
        there = pool_of(rank_pools, world_size).run(load_and_go_on, folder, stage, precision, options, True)[0]
        for ours, theirs in zip((before, after), there):
            same = compared(without_samples(ours), without_samples(theirs))
            assert same == dict.fromkeys(same, True), (world_size, stage, layout, group_size, folder)


class WithMore(UnevenLM):
    """A frozen parameter and a buffer that training changes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.layers[4].weight.requires_grad_(False)
        self.layers[4].weight.data.fill_(1.0 + seed)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens, targets)


def save_with_more(folder: str) -> None:
    with engine_on_any_cpu(settings_for(2, "fp32"), WithMore()) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder, tag="step3")


def load_with_more(folder: str) -> tuple[float, float]:
    settings = settings_for(1, "fp32") | {"checkpoint": {"load_universal": True}}
    with engine_on_any_cpu(settings, WithMore(seed=1)) as engine:
        engine.load_checkpoint(folder)
        return float(engine.module.calls), float(engine.module.layers[4].weight.detach().mean())


def test_universal_checkpoints_bring_frozen_parameters_and_buffers(
    rank_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    pool_of(rank_pools, 2).run(save_with_more, str(tmp_path))
    for folder in (convert(tmp_path), convert_as_deepspeed_does(tmp_path)):
        assert pool_of(rank_pools, 1).run(load_with_more, folder) == [(4.0, 1.0)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_0_checkpoints_go_to_any_number_of_ranks_as_they_are(
    rank_pools: dict[int, RankPool], tmp_path: Path, precision: str
) -> None:
    before, after = pool_of(rank_pools, 2).run(save_and_go_on, str(tmp_path), 0, precision, {"layout": "padded"})[0]
    for world_size, group_size in ((1, None), (4, 2)):
        options = {"layout": "compact", "group_size": group_size}
        there = pool_of(rank_pools, world_size).run(load_and_go_on, str(tmp_path), 0, precision, options, False)[0]
        for ours, theirs in zip((before, after), there):
            same = compared(without_samples(ours), without_samples(theirs))
            assert same == dict.fromkeys(same, True), world_size


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"layout": "compact"}, {"group_size": 1}], ids=str)
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16")])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_zero_to_fp32_puts_the_masters_together(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str, options: dict[str, Any]
) -> None:
    before, _ = ranks.run(save_and_go_on, str(tmp_path), stage, precision, options)[0]
    assert equal(dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="step3")), before["masters"])


def weights_alone(folder: str, stage: int, precision: str, how: dict[str, bool]) -> dict[str, bool]:
    """Load weights into a trained engine, and take a step that changes nothing from there."""
    settings = settings_for(stage, precision)
    with engine_on_any_cpu(settings) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder)
        saved = snapshot(engine)["weights"]
    with engine_on_any_cpu(settings, UnevenLM(seed=1)) as engine:
        train(engine, 1)
        fresh = states(engine)
        engine.load_checkpoint(folder, **how)
        loaded = snapshot(engine)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, 1)
        stepped = snapshot(engine)
        return {
            "weights": equal(saved, loaded["weights"]),
            "weights after a step": equal(saved, stepped["weights"]),
            "masters": equal(saved, {name: x.to(saved[name].dtype) for name, x in stepped["masters"].items()}),
            "states": equal(fresh, loaded["states"]),
        }


@pytest.mark.parametrize("how", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_alone_are_loaded_into_the_masters_too(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str, how: dict[str, bool]
) -> None:
    for same in ranks.run(weights_alone, str(tmp_path), stage, precision, how):
        assert same == dict.fromkeys(same, True)
