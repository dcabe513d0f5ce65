"""16-bit parameters with fp32 masters, a loss scale that overflows, autocast, and clipping: what is clipped is the true
gradient that Muon is given, never what it makes of it."""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import zero
from tests.cells import cells
from tests.checkpoint_engines import changed, full_weights_of, snapshot
from tests.models import largest_difference
from tests.on_ranks import on_ranks
from tests.zero import Masters, batch_shares, engine_for, settings_for, there_is, train

LOOKS_AT_THE_NORM = [] if deepspeed.__version__ == "0.19.7" else ["fp32"]  # ZeRO, for non-finite gradients
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@on_ranks(2)
@cells(
    lambda precision, accumulation, **_: not precision.startswith("fp16") or accumulation == 2,
    layout=["padded", "compact"],
    precision=["bf16", "bf16+fp32", "fp16", "fp16+fp32"],
    accumulation=[1, 2],
    stage=[0, 1, 2],
)
def test_16_bit_owned_training_equals_fp32_masters(layout: str, precision: str, accumulation: int, stage: int) -> None:
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
        assert largest_difference(full_weights_of(engine), masters.model) <= (1e-6 if dtype == "fp16" else 0.0)
        assert largest_difference(weights, masters.low) <= (1e-3 if dtype == "fp16" else 0.0)
        buckets = engine.optimizer.core.manager.buckets
        held, owned = (sum(b.masters.numel() for b in buckets), sum(p.numel for b in buckets for p in b.pieces))
        assert held == owned, "only owned pieces have masters"


# Overflows
@on_ranks(2)
@cells(
    lambda storage, stage, precision: (
        there_is(storage, stage)
        and (storage == "owned" or precision in (["fp32"] if stage == 0 else ["fp16", *LOOKS_AT_THE_NORM]))
    ),
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "fp16"],
)
def test_gradients_not_finite_skip_the_step_and_the_next_is_exact(storage: str, stage: int, precision: str) -> None:
    """One rank has them before the first and the third step; the reference takes four."""
    settings, is_fp16, scale = settings_for(storage, stage, precision), precision == "fp16", 1.0
    settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
    if is_fp16:
        scale = 64.0
        settings["fp16"] = {"enabled": True, "initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 100}
    masters = Masters(DTYPES[precision])
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10) for o in masters.optimizers]
    with engine_for(settings) as engine:
        for step in range(4):
            if step in (0, 2):
                before = snapshot(engine)
                loss = engine(*batch_shares(9, 1)[0])
                bad = torch.tensor(float("inf") if dist.get_rank() == 1 else 1.0)
                hook = engine.module.gate.weight.register_hook(lambda grad, bad=bad: grad * bad)
                engine.backward(loss * (bad if step == 0 else 1.0))
                hook.remove()
                engine.step()
                after = snapshot(engine)
                assert changed(after, before) == {"steps", "samples", *(["scale"] if is_fp16 else [])}
                scale = scale / 2 if is_fp16 else 1.0
                assert after["scale"] == scale
                assert (storage == "zero" and stage > 0) or engine.get_global_grad_norm() == float("inf")
            train(engine, range(step, step + 1), same_rows=True)
            norm = float(engine.get_global_grad_norm())
            assert norm == pytest.approx(masters.advance(step, scale=scale), rel=1e-3)
            for scheduler in schedulers:
                scheduler.step()
        assert engine.skipped_steps == 2
        # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
        rounding = 0.0 if not is_fp16 else 1e-7 if storage == "zero" else 1e-6
        assert largest_difference(full_weights_of(engine), masters.model) <= rounding


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
    single = zero.Reference()
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
def norms_of(states: Any) -> dict[str, Tensor]:
    """Squared norms of what all ranks, or one process, have of Muon's momentum and of AdamW's first moment."""
    squares = {"momentum_buffer": torch.zeros(()), "exp_avg": torch.zeros(())}
    for state in states:
        for key, total in squares.items():
            total += state[key].square().sum() if key in state else 0.0
    return squares


@on_ranks(2)
@pytest.mark.parametrize(
    ("storage", "stage", "precision"),
    [*(("zero", s, "fp32") for s in range(4)), ("zero", 1, "bf16+fp32"), ("owned", 0, "fp32"), ("owned", 2, "fp32")]
    + [("owned", 1, "fp16")],
)
def test_the_gradient_is_clipped_and_not_the_orthogonalized_update(storage: str, stage: int, precision: str) -> None:
    """Newton-Schulz takes no notice of its input's scale; a clipped update would be a thousand times smaller. The loss
    is so steep that gradients are far above DeepSpeed's default clip of 1."""
    clip, steep, masters = 0.01, 64.0, Masters(DTYPES[precision.partition("+")[0]])
    settings = settings_for(storage, stage, precision, clip=clip)
    with zero.newton_schulz_in_float32(), engine_for(settings) as engine:
        scale = engine.optimizer.loss_scale if precision == "fp16" else 1.0
        engine.backward(steep * engine(*batch_shares(0, 1)[0]))
        engine.step()
        truth = masters.advance(0, clip=clip, scale=scale, factor=steep)
        norm = engine.get_global_grad_norm()
        assert truth > 200 * clip and float(norm) == pytest.approx(truth, rel=1e-3 if precision == "fp16" else 1e-5)
        ours = norms_of(engine.basic_optimizer.state.values())
        theirs = norms_of(state for one in masters.optimizers for state in one.state.values())
        for key, total in ours.items():
            dist.all_reduce(total)
            torch.testing.assert_close(total, theirs[key], rtol=2e-3 if precision == "fp16" else 1e-4, atol=0)
        if precision != "fp16":  # which torch rounds by a tensor's alignment
            assert largest_difference(full_weights_of(engine), masters.model) <= 1e-6
