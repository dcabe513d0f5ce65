"""DeepSpeed's own checkpoints carry the optimizer, of either storage: a resumed run continues bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from tests.cells import cells
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import MUON, ROWS, batch_shares, engine_for, full_weights, settings_for, train

FROZEN = "layers.4.weight"
KINDS: dict[str, dict[str, Any]] = {
    "zero": {},
    "owned": {"storage": "owned"},
    "compact": {"storage": "owned", "layout": "compact"},
    "instances": {"storage": "owned", "group_size": 1},
    "pairs": {"storage": "owned", "group_size": 2, "layout": "compact"},
}


def settings_of(
    kind: str, stage: int, precision: str, *, schedule: bool = True, rows: int = ROWS // 2, **params: Any
) -> dict[str, Any]:
    options = KINDS[kind] | params
    settings = settings_for(options.pop("storage", "zero"), stage, precision, rows=rows, **options)
    if schedule:
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 8}}
    return settings


def is_owned(engine: Any) -> bool:
    return hasattr(engine.optimizer, "core")


def masters(engine: Any) -> dict[str, Tensor]:
    if not is_owned(engine):
        return full_weights(engine)
    return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training goes on from: weights, states (whole, where DeepSpeed can tell), counters, rates, schedule."""
    whole = {
        f"{name} {key}": deepspeed.utils.safe_get_full_optimizer_state(param, key)
        for name, param in engine.module.named_parameters()
        for key in (["momentum_buffer"] if name in MATRICES else ["exp_avg", "exp_avg_sq"])
        if is_owned(engine) or (engine.zero_optimization_stage() > 0 and any(engine.basic_optimizer.state.values()))
    }
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    return {
        "masters": masters(engine),
        "weights": weights,
        "states": whole,
        "this rank's states": copy.deepcopy([dict(state) for state in engine.basic_optimizer.state.values()]),
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scale": getattr(engine.optimizer, "loss_scale", None) if is_owned(engine) else None,
        "rates": list(engine.get_lr()),
        "schedule": copy.deepcopy(schedule),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def compared(a: dict[str, Any], b: dict[str, Any], when: str = "in the end") -> dict[str, bool]:
    return {f"{key} {when}": equal(a[key], b[key]) for key in a}


def assert_all(found: list[dict[str, bool]]) -> None:
    for same in found:
        assert same == dict.fromkeys(same, True)


def train_with_and_without_a_break(folder: str, kind: str, stage: int, precision: str, first: int) -> dict[str, bool]:
    """Save after ``first`` steps and go on; go back to there in the same engine, and in a new one."""
    settings, same = settings_of(kind, stage, precision, clip=0.5), {}
    with engine_for(settings) as engine:
        train(engine, first)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        before = snapshot(engine)
        losses = train(engine, range(first, first + 3))
        after = snapshot(engine)
        engine.load_checkpoint(folder)
        same["losses of the same engine"] = train(engine, range(first, first + 3)) == losses
        same |= compared(after, snapshot(engine), "in the same engine")
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        _, client = engine.load_checkpoint(folder)
        same |= compared(before, snapshot(engine), "loaded")
        same["losses"] = train(engine, range(first, first + 3)) == losses
        return same | compared(after, snapshot(engine)) | {"client state": client["rows"] == 3}


SOME = [(0, "fp32"), (1, "bf16+fp32"), (2, "fp32"), (3, "bf16")]


def is_saved(kind: str, stage: int, precision: str = "fp32") -> bool:
    if kind != "zero":
        return stage < 3 and precision != "autocast"
    return precision in (("fp32", "autocast") if stage == 0 else ("fp32", "bf16", "bf16+fp32"))


@cells(
    is_saved,
    kind=["zero", "owned", "instances"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32", "fp16", "autocast"],
)
def test_resumed_run_equals_uninterrupted_run(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, precision: str
) -> None:
    assert_all(ranks.run(train_with_and_without_a_break, str(tmp_path), kind, stage, precision, 3))


@pytest.mark.parametrize(
    ("ranks", "kind", "stage", "precision", "first"),
    [*((2, "zero", *some, 0) for some in SOME), (2, "owned", 1, "bf16", 0), (4, "pairs", 0, "bf16", 2)]
    + [(4, "pairs", 1, "bf16", 2), (4, "zero", 3, "fp32", 2)],
    indirect=["ranks"],
)
def test_a_run_resumes_from_before_the_first_step_and_on_four_ranks(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, precision: str, first: int
) -> None:
    assert_all(ranks.run(train_with_and_without_a_break, str(tmp_path), kind, stage, precision, first))


def save_inside_a_window(folder: str, stage: int, precision: str) -> dict[str, bool]:
    settings = settings_of("zero", stage, precision, accumulation=2)
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
        same = compared(expected, snapshot(engine), "undisturbed") | {"undisturbed": losses == expected_losses}
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder)
        same["losses"] = train(engine, range(2, 4)) == expected_losses[4:]
        return same | compared(expected, snapshot(engine))


@pytest.mark.parametrize(("stage", "precision"), SOME)
def test_a_checkpoint_from_inside_an_accumulation_window_resumes_at_its_start(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str
) -> None:
    assert_all(ranks.run(save_inside_a_window, str(tmp_path), stage, precision))


def start_from_weights(folder: str, kind: str, stage: int, precision: str, choice: str, used: int) -> dict[str, bool]:
    """Weights alone are what a new engine would start from that is given the model's weights, in their own dtype.

    Only owned storage takes them into an engine that has trained: its state stays, so one that learns nothing is seen.
    """
    settings = settings_of(kind, stage, precision, schedule=False)
    how = {choice: choice == "load_module_only"}
    with engine_for(settings) as engine:
        train(engine, 2)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = {name: param.detach().float().clone() for name, param in engine.module.named_parameters()}
        engine.save_checkpoint(folder)
    model = UnevenLM(seed=1)
    model.load_state_dict(weights)
    with engine_for(settings, model) as engine:
        start = snapshot(engine)
        losses = train(engine, 2)
        expected = snapshot(engine)
    with engine_for(settings, UnevenLM(seed=2)) as engine:
        train(engine, used)
        kept = snapshot(engine)["states"]
        engine.load_checkpoint(folder, **how)
        loaded = snapshot(engine)
        same = {"weights loaded": equal(start["weights"], loaded["weights"]), "state": equal(kept, loaded["states"])}
        if used:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            train(engine, 1)
            shown = {name: value.to(loaded["weights"][name].dtype) for name, value in masters(engine).items()}
            return same | {"masters": equal(start["weights"], shown)}
        if kind == "zero":
            same["masters loaded"] = equal(start["masters"], loaded["masters"])
            same["no state loaded"] = not any(engine.basic_optimizer.state.values())
        same["losses"] = train(engine, 2) == losses
        last = snapshot(engine)
        # load_optimizer_states=False goes on counting, load_module_only starts anew
        return same | {key: equal(expected[key], last[key]) for key in expected if key != "steps"}


@cells(
    lambda kind, stage, precision, choice: is_saved(kind, stage) and (kind == "owned" or (stage, precision) in SOME),
    kind=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    choice=["load_optimizer_states", "load_module_only"],
)
def test_weights_alone_are_loaded_with_fresh_optimizer_states(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, precision: str, choice: str
) -> None:
    assert_all(ranks.run(start_from_weights, str(tmp_path), kind, stage, precision, choice, 0))
    if kind == "owned":
        assert_all(ranks.run(start_from_weights, str(tmp_path), kind, stage, precision, choice, 1))


def start_the_schedule_anew(folder: str, stage: int) -> tuple[list[list[float]], list[list[float]], dict[str, bool]]:
    settings = settings_of("zero", stage, "fp32")

    def rates(engine: Any) -> list[list[float]]:
        return [list(engine.get_lr()) for step in range(3) if train(engine, range(step, step + 1))]

    with engine_for(settings) as engine:
        first = rates(engine)
        engine.save_checkpoint(folder)
        saved = snapshot(engine)
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        same = compared(saved, snapshot(engine), "loaded")
        return first, rates(engine), same


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_schedule_starts_anew_where_its_state_is_not_loaded(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for rates, again, same in ranks.run(start_the_schedule_anew, str(tmp_path), stage):
        assert again == rates
        assert not same.pop("schedule loaded")
        assert_all([same])


def convert_to_fp32(folder: str, kind: str, stage: int, precision: str, alignment: bool) -> tuple[bool, set[str]]:
    """Whether the weights are ours, and the names that are missing: with a tied head and a frozen parameter."""
    settings = settings_of(kind, stage, precision)
    if alignment:
        settings["zero_optimization"]["parameter_alignment"] = True
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
    ("ranks", "kind", "stage", "precision", "alignment"),
    [
        *((2, "zero", *some) for some in ((1, "bf16", False), (2, "fp32", False), (2, "bf16", True))),
        *((2, "zero", 3, precision, False) for precision in ("fp32", "bf16")),
        *((2, kind, 2, "bf16", False) for kind in ("compact", "instances")),
        *((4, kind, 1, "fp32", False) for kind in ("owned", "pairs", "instances")),
    ],
    indirect=["ranks"],
)
def test_zero_to_fp32_gives_the_master_weights(
    ranks: RankPool, tmp_path: Path, kind: str, stage: int, precision: str, alignment: bool
) -> None:
    """At stage 1 DeepSpeed leaves out frozen parameters, with every optimizer."""
    missing = {FROZEN} if stage == 1 else set()
    found = ranks.run(convert_to_fp32, str(tmp_path), kind, stage, precision, alignment)
    assert found == [(True, missing)] * ranks.world_size


def test_zero_to_fp32_does_not_know_the_bf16_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's class for bf16 with fp32 accumulation at stage 1 writes no stage, with every optimizer."""
    for error in ranks.errors(convert_to_fp32, str(tmp_path), "zero", 1, "bf16+fp32", False):
        assert error.endswith("is not a zero checkpoint")


def go_on(folder: str, kind: str, precision: str, saving: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """At stage 0, all ranks on all rows: what is saved or loaded, and what there is two steps later."""
    with engine_for(settings_of(kind, 0, precision, rows=ROWS), UnevenLM(seed=0 if saving else 1)) as engine:
        if saving:
            train(engine, 2, same_rows=True)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        before = {**snapshot(engine), "this rank's states": None, "steps": engine.global_steps}
        train(engine, range(2, 4), same_rows=True)
        return before, {**snapshot(engine), "this rank's states": None, "steps": engine.global_steps}


@pytest.mark.parametrize(("kind", "precision"), [("zero", "fp32"), ("owned", "fp32"), ("owned", "bf16")])
def test_without_zero_a_checkpoint_resumes_on_any_number_of_ranks(
    rank_pools: dict[int, RankPool], tmp_path: Path, kind: str, precision: str
) -> None:
    saved, *_ = rank_pools[2].run(go_on, str(tmp_path), kind, precision, True)
    for world_size, other in ((1, kind), (4, "pairs" if kind == "owned" else kind)):
        for there in rank_pools[world_size].run(go_on, str(tmp_path), other, precision, False):
            for ours, theirs, when in zip(there, saved, ("loaded", "later")):
                assert_all([compared(ours, theirs, when)])
