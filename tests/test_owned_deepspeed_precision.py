"""Precisions of owned storage under DeepSpeed: 16-bit parameters with fp32 masters, and a loss scale that overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend.integrations.deepspeed_owned import OwnedLayerWiseMuon
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import UnevenLM
from tests.owned_deepspeed import BUCKET_MB, engine_on_any_cpu, in_precision
from tests.ranks import RankPool
from tests.test_owned_deepspeed_checkpoint import masters as whole_masters
from tests.zero import ROWS, Reference, batch_shares, config, largest_difference, train

STEPS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
each_stage = pytest.mark.parametrize("stage", [0, 1, 2])


def settings_for(stage: int, precision: str, accumulation: int = 1, **options: Any) -> dict[str, Any]:
    """All ranks train on all rows: means over them are exact."""
    owned = {"storage": "owned", "bucket_mb": BUCKET_MB, **options}
    return in_precision(precision, config(stage, accumulation=accumulation, rows=ROWS // accumulation, **owned))


class Masters(Reference):
    """fp32 masters of a 16-bit model on one process. DeepSpeed rounds the model first and takes the masters from that.

    Gradients of micro-batches add up in fp32, or in the model's dtype.
    """

    def __init__(self, dtype: torch.dtype, in_fp32: bool) -> None:
        super().__init__(UnevenLM().to(dtype).float())
        self.low = UnevenLM().to(dtype)
        self.in_fp32 = in_fp32

    def step(self, step: int, accumulation: int, scale: float = 1.0) -> None:
        sums: dict[Tensor, Tensor] = {}
        for rows in batch_shares(step, accumulation):
            (self.low(*rows) / accumulation * scale).backward()
            for param in self.low.parameters():
                grad = param.grad.float() if self.in_fp32 else param.grad
                sums[param] = sums[param] + grad if param in sums else grad
                param.grad = None
        for master, param in zip(self.model.parameters(), self.low.parameters()):
            master.grad = sums[param].float() / scale
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for master, param in zip(self.model.parameters(), self.low.parameters()):
                param.copy_(master)


def differ_in_16_bits(stage: int, precision: str, accumulation: int, layout: str) -> tuple[float, float, bool]:
    """The largest differences of masters and of weights; whether only owned pieces have masters."""
    kind, _, accumulated = precision.partition("+")
    reference = Masters(DTYPES[kind], accumulated == "fp32" or stage == 2)
    with engine_on_any_cpu(settings_for(stage, precision, accumulation, layout=layout)) as engine:
        for step in range(STEPS):
            scale = engine.optimizer.loss_scale
            train(engine, range(step, step + 1), same_rows=True)
            reference.step(step, accumulation, scale)
        weights = dict(engine.module.named_parameters())
        buckets = engine.optimizer.core.manager.buckets
        held = sum(bucket.masters.numel() for bucket in buckets)
        owned = sum(piece.numel for bucket in buckets for piece in bucket.pieces)
        return (
            largest_difference(whole_masters(engine), reference.model),
            largest_difference({name: p.detach() for name, p in weights.items()}, reference.low),
            held == owned and engine.skipped_steps == 0 and {p.dtype for p in weights.values()} == {DTYPES[kind]},
        )


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "bf16+fp32"])
@each_stage
def test_bf16_training_equals_fp32_masters_on_one_process(
    ranks: RankPool, stage: int, precision: str, accumulation: int, layout: str
) -> None:
    """At stage 2 micro-batches are reduced one by one, and add up at the owners, in fp32."""
    assert set(ranks.run(differ_in_16_bits, stage, precision, accumulation, layout)) == {(0.0, 0.0, True)}


@pytest.mark.parametrize("precision", ["fp16", "fp16+fp32"])
@each_stage
def test_fp16_training_equals_fp32_masters_on_one_process(ranks: RankPool, stage: int, precision: str) -> None:
    # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
    for masters, weights, rest in ranks.run(differ_in_16_bits, stage, precision, 2, "padded"):
        assert masters <= 1e-6 and weights <= 1e-3 and rest


def snapshot(engine: Any) -> list[Tensor]:
    """This rank's weights, masters and states, and the rates."""
    core = engine.optimizer.core
    values = [value for bucket in core.manager.buckets for value in [bucket.values, *bucket.owned_values()]]
    states = [tensor for state in core.stepper.state.values() for tensor in state.values()]
    return [tensor.clone() for tensor in [*values, *states]] + [torch.tensor(engine.get_lr())]


def overflow_then_train(stage: int, precision: str) -> dict[str, Any]:
    """Two steps, one whose gradients overflow on one rank only, two more; beside a reference that takes four."""
    settings = settings_for(stage, precision)
    if precision == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
    with engine_on_any_cpu(settings) as engine:
        train(engine, 2, same_rows=True)
        before, scale = snapshot(engine), engine.optimizer.cur_scale
        loss = engine(*batch_shares(9, 1)[0])
        engine.backward(loss * (float("inf") if torch.distributed.get_rank() == 1 else 1.0))
        engine.step()
        after = snapshot(engine)
        found = {
            "untouched": all(torch.equal(old, new) for old, new in zip(before, after, strict=True)),
            "skipped": engine.skipped_steps,
            "scale": engine.optimizer.cur_scale / scale,
            "norm": engine.get_global_grad_norm(),
        }
        train(engine, range(2, 4), same_rows=True)
        ours = whole_masters(engine)
    reference = Masters(DTYPES.get(precision, torch.float32), True)
    for step, scale in enumerate([16.0, 16.0, 8.0, 8.0] if precision == "fp16" else [1.0] * 4):
        reference.step(step, 1, scale)
    return {**found, "goes on": largest_difference(ours, reference.model) <= (1e-6 if precision == "fp16" else 0.0)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@each_stage
def test_gradients_that_are_not_finite_skip_the_step_everywhere(ranks: RankPool, stage: int, precision: str) -> None:
    expected = {"untouched": True, "skipped": 1, "scale": 0.5 if precision == "fp16" else 1.0, "norm": float("inf")}
    for found in ranks.run(overflow_then_train, stage, precision):
        assert found == {**expected, "goes on": True}


def scale_comes_down(stage: int) -> tuple[int, list[tuple[float, float, float]]]:
    """How many steps were skipped; scale, rate and loss of every step."""
    settings = settings_for(stage, "fp16")
    settings["fp16"] = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 100}}
    with engine_on_any_cpu(settings) as engine:
        found = []
        for _ in range(30):
            scale, rate = engine.optimizer.cur_scale, engine.get_lr()[0]
            skipped = engine.skipped_steps
            found.append((scale, rate, train(engine, [0], same_rows=True)[0]))
        return skipped, found


@each_stage
def test_a_loss_scale_that_is_too_high_comes_down_and_then_the_model_trains(ranks: RankPool, stage: int) -> None:
    for skipped, found in ranks.run(scale_comes_down, stage):
        halved = 0
        for (scale, rate, loss), (next_scale, next_rate, next_loss) in zip(found, found[1:]):
            if next_scale == scale / 2:
                assert (next_rate, next_loss) == (rate, loss)
                halved += 1
            else:
                assert next_scale == scale and next_rate < rate and next_loss != loss
        assert halved == skipped > 1 and found[-1][2] < found[0][2]


def unscaled_backward(stage: int) -> str:
    """``engine.scale(loss).backward()`` trains; a loss that was not scaled is DeepSpeed's error."""
    with engine_on_any_cpu(settings_for(stage, "fp16")) as engine:
        engine.scale(engine(*batch_shares(0, 1)[0])).backward()
        engine.step()
        assert engine.skipped_steps == 0
        engine(*batch_shares(0, 1)[0]).backward()
    return "went on"


@each_stage
def test_fp16_losses_are_to_be_scaled(ranks: RankPool, stage: int) -> None:
    for error in ranks.errors(unscaled_backward, stage):
        assert "Loss scaling is required for this configuration" in error


def differ_under_autocast(stage: int) -> tuple[float, bool]:
    """Weights stay fp32, the forward pass is in bf16; the reference autocasts likewise."""
    settings = settings_for(stage, "fp32") | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    reference = Reference()
    with engine_on_any_cpu(settings) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = reference.model(*batch_shares(step, 1)[0])
            loss.backward()
            for optimizer in (reference.muon, reference.adamw):
                optimizer.step()
                optimizer.zero_grad()
        weights = {name: param.detach() for name, param in engine.module.named_parameters()}
        exact = all(param.dtype == torch.float32 for param in weights.values())
        return largest_difference(weights, reference.model), exact


def test_autocast_to_bf16_trains_fp32_weights(ranks_to_spoil: RankPool) -> None:
    """DeepSpeed keeps "autocast is on" in a global of the process."""
    for stage in (0, 2):
        assert set(ranks_to_spoil.run(differ_under_autocast, stage)) == {(0.0, True)}


def built_as(storage: str) -> bool:
    return isinstance(LayerWiseMuon(nn.Linear(3, 3).parameters(), storage=storage), OwnedLayerWiseMuon)


def test_the_storage_says_which_optimizer_is_built() -> None:
    assert built_as("owned") and not built_as("zero")
