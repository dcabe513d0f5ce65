"""16-bit parameters with fp32 masters, a loss scale that overflows, autocast, and clipping: what is clipped is the true
gradient that Muon is given, never what it makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from lwopt_backend.integrations.deepspeed.owned import OwnedLayerWise
from tests.cells import cells
from tests.models import MATRICES
from tests.on_ranks import on_ranks
from tests.zero import (
    Masters,
    Reference,
    batch_shares,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
    settings_for,
    there_is,
    train,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def masters_of(engine: Any) -> dict[str, Tensor]:
    """Also of 16-bit parameters at stage 0, which owned storage trains."""
    if not isinstance(engine.optimizer, OwnedLayerWise):
        return full_weights(engine)
    return {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


@on_ranks(2)
@cells(
    lambda precision, accumulation, **_: not precision.startswith("fp16") or accumulation == 2,
    layout=["padded", "compact"],
    precision=["bf16", "bf16+fp32", "fp16", "fp16+fp32"],
    accumulation=[1, 2],
    stage=[0, 1, 2],
)
def test_16_bit_training_with_owned_storage_equals_fp32_masters_on_one_process(
    layout: str, precision: str, accumulation: int, stage: int
) -> None:
    """tests/test_deepspeed_table.py has ZeRO's storage."""
    dtype, _, accumulated = precision.partition("+")
    # At stage 2 micro-batches are reduced one by one, and add up at the owners, in fp32.
    masters = Masters(DTYPES[dtype], accumulated == "fp32" or stage == 2)
    with engine_for(settings_for("owned", stage, precision, accumulation=accumulation, layout=layout)) as engine:
        for step in range(4):
            scale = engine.optimizer.loss_scale
            train(engine, range(step, step + 1), same_rows=True)
            masters.advance(step, accumulation, scale=scale)
        weights = {name: param.detach() for name, param in engine.module.named_parameters()}
        assert engine.skipped_steps == 0 and {p.dtype for p in weights.values()} == {DTYPES[dtype]}
        # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
        assert largest_difference(masters_of(engine), masters.model) <= (1e-6 if dtype == "fp16" else 0.0)
        assert largest_difference(weights, masters.low) <= (1e-3 if dtype == "fp16" else 0.0)
        buckets = engine.optimizer.core.manager.buckets
        held, owned = (sum(b.masters.numel() for b in buckets), sum(p.numel for b in buckets for p in b.pieces))
        assert held == owned, "only owned pieces have masters"


# Overflows


def snapshot(engine: Any) -> list[Tensor]:
    """This rank's weights, masters, states and rates."""
    states = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
    weights = list(masters_of(engine).values())
    if engine.zero_optimization_stage() < 3:
        weights += engine.module.parameters()
    return [tensor.detach().clone() for tensor in [*weights, *states]] + [torch.tensor(engine.get_lr())]


@on_ranks(2)
@cells(
    lambda storage, stage, precision: (
        there_is(storage, stage) and (storage == "owned" or precision == "fp16" and stage > 0)
    ),
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "fp16"],
)
def test_gradients_that_are_not_finite_skip_the_step_everywhere_and_the_next_is_exact(
    storage: str, stage: int, precision: str
) -> None:
    """Two steps, one whose gradients overflow on one rank only, two more; beside a reference that takes four."""
    settings, is_fp16 = settings_for(storage, stage, precision), precision == "fp16"
    settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
    if is_fp16:
        settings["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
    masters = Masters(DTYPES[precision])
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10) for o in (masters.muon, masters.adamw)]
    with engine_for(settings) as engine:
        for step in range(4):
            if step == 2:
                before = snapshot(engine)
                loss = engine(*batch_shares(9, 1)[0])
                engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
                engine.step()
                assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))
                assert getattr(engine.optimizer, "cur_scale", 1.0) == (8.0 if is_fp16 else 1.0)
                assert storage == "zero" or engine.get_global_grad_norm() == float("inf")
            train(engine, range(step, step + 1), same_rows=True)
            truth = masters.advance(step, scale=(16.0 if step < 2 else 8.0) if is_fp16 else 1.0)
            assert float(engine.get_global_grad_norm()) == pytest.approx(truth, rel=1e-3)
            for scheduler in schedulers:
                scheduler.step()
        assert engine.skipped_steps == 1
        # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
        rounding = 0.0 if not is_fp16 else 1e-7 if storage == "zero" else 1e-6
        assert largest_difference(masters_of(engine), masters.model) <= rounding


@on_ranks(2)
@pytest.mark.parametrize(
    ("storage", "stage"),
    [
        *(("zero", 2), ("zero", 3), ("owned", 0), ("owned", 2)),
        *(pytest.param(storage, 1, marks=pytest.mark.full) for storage in ("zero", "owned")),
    ],
)
def test_a_loss_scale_that_is_too_high_comes_down_and_then_the_model_trains(storage: str, stage: int) -> None:
    settings = settings_for(storage, stage, "fp16")
    settings["fp16"] = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 100}}
    found = []
    with engine_for(settings) as engine:
        for _ in range(30):
            scale, rate, skipped = float(engine.optimizer.cur_scale), engine.get_lr()[0], engine.skipped_steps
            found.append((scale, rate, train(engine, [0], same_rows=True)[0]))
            assert storage == "owned" or engine.skipped_steps < len(found) or not engine.basic_optimizer.state
    halved = 0
    for (scale, rate, loss), (next_scale, next_rate, next_loss) in zip(found, found[1:]):
        if next_scale == scale / 2:
            assert (next_rate, next_loss) == (rate, loss)
            halved += 1
        else:
            assert next_scale == scale and next_rate < rate and next_loss != loss
    assert halved == skipped > 1 and found[-1][2] < found[0][2]


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp16_losses_are_to_be_scaled(stage: int) -> None:
    """``engine.scale(loss).backward()`` trains; a loss that was not scaled is DeepSpeed's error."""
    with engine_for(settings_for("owned", stage, "fp16")) as engine:
        engine.scale(engine(*batch_shares(0, 1)[0])).backward()
        engine.step()
        assert engine.skipped_steps == 0
        with pytest.raises(RuntimeError, match="Loss scaling is required for this configuration"):
            engine(*batch_shares(0, 1)[0]).backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_autocast_to_bf16_trains_fp32_weights_that_owned_storage_has(stage: int) -> None:
    """The reference autocasts likewise. DeepSpeed reduces in bf16 with ZeRO's storage: tests/test_deepspeed_table.py
    is exact there, given its gradients."""
    single = Reference()
    with engine_for(settings_for("owned", stage, "autocast")) as engine:
        train(engine, 4, same_rows=True)
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = single.model(*batch_shares(step, 1)[0])
            loss.backward()
            single.step()
        assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
        single.check(engine)


# Clipping


def moments_of(engine: Any) -> dict[str, float]:
    """Over all ranks, each of which has a part, the norm of Muon's momentum and of AdamW's first moment."""
    squares = {"momentum_buffer": torch.zeros(()), "exp_avg": torch.zeros(())}
    for state in engine.basic_optimizer.state.values():
        for key, total in squares.items():
            total += state[key].square().sum() if key in state else 0.0
    for total in squares.values():
        dist.all_reduce(total)
    return {key: float(total.sqrt()) for key, total in squares.items()}


class Clipped:
    """Some steps beside the reference's: norms before the clip, what Muon's update of each matrix was in the first if
    there is one, moments. The loss is so steep that gradients are far above DeepSpeed's default clip of 1."""

    def __init__(self, clip: float, storage: str, stage: int, precision: str, steps: int, **options: Any) -> None:
        steep, rel = 64.0, 1e-3 if precision == "fp16" else 1e-5
        masters, self.norms = Masters(DTYPES[precision.partition("+")[0]]), []
        start = {name: param.detach().clone() for name, param in masters.model.named_parameters()}
        with engine_for(settings_for(storage, stage, precision, clip=clip, **options)) as engine:
            for step in range(steps):
                scale = engine.optimizer.loss_scale if precision == "fp16" else 1.0
                engine.backward(steep * engine(*batch_shares(step, 1)[0]))
                engine.step()
                truth = masters.advance(step, clip=clip, scale=scale, factor=steep)
                self.norms.append(float(engine.get_global_grad_norm()))
                assert truth > 2.0 and (clip == 1e-6 or self.norms[-1] == pytest.approx(truth, rel=rel))
            ours, self.moments = masters_of(engine), moments_of(engine)
        lr, decay = (masters.muon.param_groups[0][key] for key in ("lr", "weight_decay"))
        self.updates = {n: float((ours[n] - start[n] * (1 - lr * decay)).norm()) / lr for n in MATRICES}
        self.difference = largest_difference(ours, masters.model)


@on_ranks(2)
@pytest.mark.parametrize(
    ("storage", "stage", "precision"),
    [*(("zero", s, "fp32") for s in range(4)), ("zero", 1, "bf16+fp32"), ("owned", 0, "fp32"), ("owned", 2, "fp32")]
    + [("owned", 1, "fp16")],
)
def test_the_gradient_is_clipped_and_not_the_orthogonalized_update(storage: str, stage: int, precision: str) -> None:
    """Newton-Schulz takes no notice of its input's scale; a clipped update would be a thousand times smaller. A clip of
    0 scales nothing.

    What is orthogonalized after a clip to 1e-6 has a norm below ``eps``, by which torch.optim.Muon divides it, so that
    the iteration starts from almost nothing; ours is as large as without, but for the rounding of the momentum.
    """
    exact = Clipped(0.0, storage, stage, precision, steps=3)
    with newton_schulz_in_float32():
        unclipped, clipped, tiny = (
            Clipped(clip, storage, stage, precision, steps=1, ns_dtype="float32") for clip in (0.0, 0.01, 1e-6)
        )
    (norm,) = clipped.norms
    assert [norm] == unclipped.norms and norm > 200 * 0.01  # reported as it was
    assert clipped.updates == pytest.approx(unclipped.updates, rel=1e-2)
    scaled = {key: moment * 0.01 / norm for key, moment in unclipped.moments.items()}
    assert clipped.moments == pytest.approx(scaled, rel=1e-4)
    if precision != "fp16":  # which torch rounds by a tensor's alignment
        assert exact.difference == 0.0 and clipped.difference <= 1e-6
    if precision == "fp32":
        assert tiny.moments["momentum_buffer"] < 1e-7
        assert tiny.updates == pytest.approx(unclipped.updates, rel=1e-3)
