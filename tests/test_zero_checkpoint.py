"""DeepSpeed's own checkpoints carry the optimizer: a resumed run continues bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import MUON, batch_shares, config, engine_for, full_weights, train

FROZEN = "layers.4.weight"
SHARDED = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "bf16+fp32")]
EVERY = [(0, "fp32"), (0, "autocast"), *SHARDED]
SOME = [(0, "fp32"), (1, "bf16+fp32"), (2, "fp32"), (3, "bf16")]
some_settings = pytest.mark.parametrize(("stage", "precision"), SOME)


def settings_for(stage: int, precision: str, *, scheduler: bool = True, accumulation: int = 1) -> dict[str, Any]:
    settings = config(stage, accumulation=accumulation, policy="balance", bucket_numel=2000)
    if scheduler:
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 8}}
    if precision == "autocast":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision != "fp32":
        settings["bf16"] = {"enabled": True}
    if precision == "bf16+fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training goes on from: whole weights, this rank's optimizer states, counters, rates, the schedule."""
    schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    return {
        "master weights": full_weights(engine),
        "states": copy.deepcopy([dict(state) for state in engine.basic_optimizer.state.values()]),
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "rates": list(engine.get_lr()),
        "schedule": copy.deepcopy(schedule),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, bool]:
    return {key: equal(a[key], b[key]) for key in a}


def train_with_and_without_a_break(folder: str, stage: int, precision: str, first: int) -> dict[str, bool]:
    """The break is after ``first`` steps."""
    settings = settings_for(stage, precision)
    with engine_for(settings) as engine:
        train(engine, first)
        engine.save_checkpoint(folder, client_state={"rows": 3})
    with engine_for(settings) as engine:
        train(engine, first)
        before = snapshot(engine)
        losses = train(engine, range(first, first + 3))
        after = snapshot(engine)
    with engine_for(settings) as engine:
        _, client = engine.load_checkpoint(folder)
        loaded = snapshot(engine)
        resumed = train(engine, range(first, first + 3))
        return {
            "client state": client["rows"] == 3,
            "losses": resumed == losses,
            **{f"{key} loaded": same for key, same in compared(before, loaded).items()},
            **compared(after, snapshot(engine)),
        }


@pytest.mark.parametrize(
    ("stage", "precision", "first"), [*((*setting, 3) for setting in EVERY), *((*setting, 0) for setting in SOME)]
)
def test_resumed_run_equals_uninterrupted_run(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str, first: int
) -> None:
    for same in ranks.run(train_with_and_without_a_break, str(tmp_path), stage, precision, first):
        assert same == dict.fromkeys(same, True)


def save_inside_a_window(folder: str, stage: int, precision: str) -> dict[str, bool]:
    settings = settings_for(stage, precision, accumulation=2)
    with engine_for(settings) as engine:
        expected_losses = train(engine, 4)
        expected = snapshot(engine)
    with engine_for(settings) as engine:
        losses = train(engine, 2)
        for number, share in enumerate(batch_shares(2, 4)[torch.distributed.get_rank() :: 2]):
            loss = engine(*share)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number == 0:
                engine.save_checkpoint(folder)
        losses += train(engine, range(3, 4))
        undisturbed = compared(expected, snapshot(engine))
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder)
        resumed = train(engine, range(2, 4))
        return {
            **{f"{key} undisturbed": same for key, same in undisturbed.items()},
            "losses undisturbed": losses == expected_losses,
            **compared(expected, snapshot(engine)),
            "losses": resumed == expected_losses[4:],
        }


@some_settings
def test_a_checkpoint_from_inside_an_accumulation_window_resumes_at_its_start(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str
) -> None:
    for same in ranks.run(save_inside_a_window, str(tmp_path), stage, precision):
        assert same == dict.fromkeys(same, True)


def start_from_weights(folder: str, stage: int, precision: str, choice: dict[str, bool]) -> dict[str, bool]:
    """Weights alone are what a new engine would start from that is given the model's weights, in their own dtype."""
    settings = settings_for(stage, precision, scheduler=False)
    with engine_for(settings) as engine:
        train(engine, 2)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = {name: param.detach().float().clone() for name, param in engine.module.named_parameters()}
        engine.save_checkpoint(folder)
    model = UnevenLM(seed=1)
    model.load_state_dict(weights)
    with engine_for(settings, model) as engine:
        start = full_weights(engine)
        losses = train(engine, 2)
        expected = snapshot(engine)
    with engine_for(settings, UnevenLM(seed=2)) as engine:
        engine.load_checkpoint(folder, **choice)
        loaded = full_weights(engine)
        fresh = not any(engine.basic_optimizer.state.values())
        again = train(engine, 2)
        same = compared(expected, snapshot(engine))
        del same["steps"]  # load_optimizer_states=False goes on counting, load_module_only starts anew
        return {"weights loaded": equal(start, loaded), "no state loaded": fresh, "losses": again == losses, **same}


@some_settings
@pytest.mark.parametrize("choice", [{"load_optimizer_states": False}, {"load_module_only": True}], ids=str)
def test_weights_alone_are_loaded_with_fresh_optimizer_states(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str, choice: dict[str, bool]
) -> None:
    for same in ranks.run(start_from_weights, str(tmp_path), stage, precision, choice):
        assert same == dict.fromkeys(same, True)


def start_the_schedule_anew(folder: str, stage: int) -> tuple[list[list[float]], list[list[float]], dict[str, bool]]:
    settings = settings_for(stage, "fp32")
    rates: list[list[float]] = []
    with engine_for(settings) as engine:
        for step in range(3):
            train(engine, range(step, step + 1))
            rates.append(engine.get_lr())
        engine.save_checkpoint(folder)
        saved = snapshot(engine)
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        same = compared(saved, snapshot(engine))
        again = []
        for step in range(3):
            train(engine, range(step, step + 1))
            again.append(engine.get_lr())
        return rates, again, same


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_schedule_starts_anew_where_its_state_is_not_loaded(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for rates, again, same in ranks.run(start_the_schedule_anew, str(tmp_path), stage):
        assert again == rates
        assert not same.pop("schedule")
        assert same == dict.fromkeys(same, True)


def convert_to_fp32(folder: str, stage: int, precision: str, alignment: bool) -> tuple[bool, set[str]]:
    """Whether the weights are ours, and the names that are missing: with a tied head and a frozen parameter."""
    settings = settings_for(stage, precision)
    settings["zero_optimization"]["parameter_alignment"] = alignment
    model = UnevenLM(tied=True)
    model.get_parameter(FROZEN).requires_grad_(False)
    with engine_for(settings, model) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder)
        params = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
        weights = {name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in params.items()}
    weights["lm_head.weight"] = weights["embedding.weight"]
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    return all(torch.equal(found[name], weight) for name, weight in weights.items()), {*model.state_dict()} - {*found}


@pytest.mark.parametrize(
    ("stage", "precision", "alignment"),
    [(1, "bf16", False), (2, "fp32", False), (2, "bf16", True), (3, "fp32", False), (3, "bf16", False)],
)
def test_zero_to_fp32_gives_the_master_weights(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str, alignment: bool
) -> None:
    """At stage 1 DeepSpeed leaves out frozen parameters, with every optimizer."""
    missing = {FROZEN} if stage == 1 else set()
    assert ranks.run(convert_to_fp32, str(tmp_path), stage, precision, alignment) == [(True, missing)] * 2


def test_zero_to_fp32_does_not_know_the_bf16_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's class for bf16 with fp32 accumulation at stage 1 writes no stage, with every optimizer."""
    for error in ranks.errors(convert_to_fp32, str(tmp_path), 1, "bf16+fp32", False):
        assert error.endswith("is not a zero checkpoint")


def save_and_go_on(folder: str) -> dict[str, torch.Tensor]:
    with engine_for(settings_for(0, "fp32")) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder)
        train(engine, range(2, 4), same_rows=True)
        return full_weights(engine)


def load_and_go_on(folder: str) -> dict[str, torch.Tensor]:
    with engine_for(settings_for(0, "fp32")) as engine:
        engine.load_checkpoint(folder)
        train(engine, range(2, 4), same_rows=True)
        return full_weights(engine)


@pytest.mark.parametrize("here", [1, 4])
def test_without_zero_a_checkpoint_resumes_on_any_number_of_ranks(
    rank_pools: dict[int, RankPool], tmp_path: Path, here: int
) -> None:
    expected, *_ = rank_pools.setdefault(2, RankPool(2)).run(save_and_go_on, str(tmp_path))
    for weights in rank_pools.setdefault(here, RankPool(here)).run(load_and_go_on, str(tmp_path)):
        assert equal(weights, expected)
