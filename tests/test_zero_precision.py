"""Precisions: 16-bit parameters with fp32 masters, autocast, and a loss scale that overflows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ROWS, Reference, batch_shares, config, engine_for, full_weights, largest_difference, train

STEPS = 5


def train_masters(masters: Reference, low: nn.Module, step: int, accumulation: int = 1, scale: float = 1.0) -> None:
    """A step of fp32 masters beside a 16-bit model, as DeepSpeed keeps them; gradients accumulate in fp32."""
    sums = [torch.zeros_like(master) for master in masters.model.parameters()]
    for rows in batch_shares(step, accumulation):
        (low(*rows) * scale / accumulation).backward()
        for total, param in zip(sums, low.parameters()):
            total += param.grad.float()
            param.grad = None
    for master, total in zip(masters.model.parameters(), sums):
        master.grad = total / scale
    masters.muon.step()
    masters.adamw.step()
    with torch.no_grad():
        for master, param in zip(masters.model.parameters(), low.parameters()):
            param.copy_(master)


def settings_of(stage: int, precision: str, **changes: Any) -> dict[str, Any]:
    settings = config(stage, rows=ROWS, **changes) | {"bf16": {"enabled": True}}
    if precision == "bf16+fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def differ_in_bf16(stage: int, precision: str) -> tuple[str, float]:
    """The reference keeps fp32 masters beside a bf16 model, as DeepSpeed does."""
    settings = settings_of(stage, precision)
    settings["zero_optimization"]["parameter_alignment"] = True  # which BF16_Optimizer does not know
    # DeepSpeed rounds the model to bf16 first and takes the master weights from that.
    masters = Reference(UnevenLM().bfloat16().float())
    low = UnevenLM().bfloat16()
    with engine_for(settings) as engine:
        for step in range(STEPS):
            train(engine, range(step, step + 1), same_rows=True)
            train_masters(masters, low, step)
        kind = type(engine.optimizer).__name__
        return kind, largest_difference(full_weights(engine), masters.model)


@pytest.mark.parametrize(
    ("stage", "precision", "wrapper"),
    [
        (1, "bf16", "DeepSpeedZeroOptimizer"),
        (2, "bf16", "DeepSpeedZeroOptimizer"),
        (3, "bf16", "DeepSpeedZeroOptimizer_Stage3"),
        (1, "bf16+fp32", "BF16_Optimizer"),
        (2, "bf16+fp32", "DeepSpeedZeroOptimizer"),
        (3, "bf16+fp32", "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_bf16_training_equals_fp32_masters_on_one_process(
    ranks: RankPool, stage: int, precision: str, wrapper: str
) -> None:
    for kind, difference in ranks.run(differ_in_bf16, stage, precision):
        assert kind == wrapper
        assert difference == 0.0


def differ_when_accumulating(stage: int) -> float:
    """Micro-batches' bf16 gradients are summed in fp32, and one step is taken of the sum."""
    settings = settings_of(stage, "bf16+fp32", accumulation=2) | {"train_micro_batch_size_per_gpu": ROWS // 2}
    settings["communication_data_type"] = "fp32"  # BF16_Optimizer would round the sums to bf16 for the all-reduce
    masters, low = Reference(UnevenLM().bfloat16().float()), UnevenLM().bfloat16()
    with engine_for(settings) as engine:
        for step in range(STEPS):
            train(engine, range(step, step + 1), same_rows=True)
            train_masters(masters, low, step, accumulation=2)
        return largest_difference(full_weights(engine), masters.model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_accumulate_in_fp32(ranks: RankPool, stage: int) -> None:
    # Ranks average what each has summed; stages differ in when, so sums may be rounded in another order.
    assert max(ranks.run(differ_when_accumulating, stage)) <= 1e-6


@contextlib.contextmanager
def fp16_supported() -> Iterator[None]:
    """A CPU without fp16 units computes it all the same, so the accelerator is told otherwise."""
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def snapshot(engine: Any) -> list[torch.Tensor]:
    """Weights, optimizer state, counters among it, and learning rates."""
    states = [state for _, state in sorted(enumerate(engine.basic_optimizer.state.values()))]
    tensors = [value.clone() for state in states for value in state.values()]
    return [*full_weights(engine).values(), *tensors, torch.tensor(engine.get_lr())]


def overflow_then_train(stage: int) -> dict[str, Any]:
    """Two steps, one whose scaled loss overflows on one rank only, two more; beside a reference that takes four."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
    schedule = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
    settings = config(stage, rows=ROWS) | {"fp16": fp16, "scheduler": schedule}
    masters, low = Reference(UnevenLM().half().float()), UnevenLM().half()
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10) for o in (masters.muon, masters.adamw)]

    def reference_step(step: int, scale: float) -> None:
        train_masters(masters, low, step, scale=scale)
        for scheduler in schedulers:
            scheduler.step()

    with fp16_supported(), engine_for(settings) as engine:
        for step in range(2):
            train(engine, range(step, step + 1), same_rows=True)
            reference_step(step, 16.0)
        before = snapshot(engine)
        loss = engine(*batch_shares(9, 1)[0])
        engine.backward(loss * (float("inf") if torch.distributed.get_rank() == 1 else 1.0))
        engine.step()
        after = snapshot(engine)
        scale = float(engine.optimizer.cur_scale)
        for step in range(2, 4):
            train(engine, range(step, step + 1), same_rows=True)
            reference_step(step, 8.0)
        return {
            "untouched": all(torch.equal(old, new) for old, new in zip(before, after, strict=True)),
            "skipped": engine.skipped_steps,
            "scale": scale,
            "difference": largest_difference(full_weights(engine), masters.model),
        }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp16_overflow_skips_the_step_everywhere_and_the_next_is_exact(ranks: RankPool, stage: int) -> None:
    for found in ranks.run(overflow_then_train, stage):
        # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
        assert found.pop("difference") <= 1e-7
        assert found == {"untouched": True, "skipped": 1, "scale": 8.0}


def losses_in_fp16(stage: int) -> tuple[int, list[float]]:
    """A scale so high that the first steps overflow, all of them before the optimizer has any state."""
    settings = config(stage, clip=1.0) | {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    with fp16_supported(), engine_for(settings) as engine:
        train(engine, 1)
        assert not engine.basic_optimizer.state
        losses = train(engine, [0] * 40)
        return engine.skipped_steps, [losses[0], losses[-1]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_scale_that_is_too_high_comes_down_and_then_the_model_trains(ranks: RankPool, stage: int) -> None:
    for skipped, (first, last) in ranks.run(losses_in_fp16, stage):
        assert skipped > 1 and last < first


def differ_under_autocast(stage: int) -> tuple[list[str], float, float]:
    """Weights stay fp32, the forward pass is in bf16; the reference autocasts likewise."""
    settings = config(stage, rows=ROWS) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    reference, exact = Reference(), Reference()
    with engine_for(settings) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = reference.model(*batch_shares(step, 1)[0])
            loss.backward()
            for optimizer in (reference.muon, reference.adamw):
                optimizer.step()
                optimizer.zero_grad()
        exact.train(STEPS)
        ours = full_weights(engine)
        dtypes = sorted({str(p.dtype) for p in engine.module.parameters()})
        return dtypes, largest_difference(ours, reference.model), largest_difference(ours, exact.model)


def test_autocast_to_bf16_trains_fp32_weights(ranks_to_spoil: RankPool) -> None:
    # DeepSpeed keeps "autocast is on" in a global of the process. It reduces gradients in bf16, the reference does not;
    # tests/test_deepspeed_table.py takes its gradients and is exact, at every stage.
    for dtypes, difference, to_fp32 in ranks_to_spoil.run(differ_under_autocast, 2):
        assert dtypes == ["torch.float32"]
        assert difference <= 5e-3 and to_fp32 > 0.0


def build(settings: dict[str, Any]) -> None:
    with fp16_supported(), engine_for(settings):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bf16": {"enabled": True}},
            "stage is 0 and the model is trained in bfloat16, for which DeepSpeed keeps full",
        ),
        ({"fp16": {"enabled": True}}, "stage is 0 and the model is trained in float16, for which DeepSpeed keeps full"),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "stage is 0 and the model is trained in bfloat16",
        ),
    ],
    ids=["bf16", "fp16", "bf16+fp32"],
)
def test_16_bits_at_stage_0_are_refused_on_every_rank(ranks: RankPool, changes: dict[str, Any], message: str) -> None:
    for error in ranks.errors(build, config(0) | changes):
        assert message in error


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_masters_are_refused(ranks: RankPool, stage: int, precision: str) -> None:
    section = {"enabled": True, f"{precision}_master_weights_and_grads": True}
    for error in ranks.errors(build, config(stage) | {precision: section}):
        assert f"{precision}.{precision}_master_weights_and_grads is on; switch it off" in error


def test_autocast_to_fp16_is_refused_on_every_rank(ranks_to_spoil: RankPool) -> None:
    settings = config(2) | {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    for error in ranks_to_spoil.errors(build, settings):
        assert "torch_autocast.dtype is float16" in error


@pytest.mark.skipif(deepspeed.accelerator.get_accelerator().is_fp16_supported(), reason="for devices without fp16")
@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_on_a_device_without_it_is_refused_by_deepspeed(ranks: RankPool, stage: int) -> None:
    for error in ranks.errors(build_as_it_is, config(stage) | {"fp16": {"enabled": True}}):
        assert "Type fp16 is not supported on your device" in error


def build_as_it_is(settings: dict[str, Any]) -> None:
    with engine_for(settings):
        pass
