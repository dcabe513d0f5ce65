"""The stages and precisions of docs/deepspeed.md, one by one, for ZeRO's storage, and the files of tests of the
features. Owned storage: 16-bit parameters with fp32 masters, and autocast. Both: a loss scale that overflows."""

import contextlib
import re
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.support import zero
from tests.support.cells import cells
from tests.support.checkpoint_engines import changed, full_weights_of, snapshot
from tests.support.launcher import ROOT
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.pages import section, table
from tests.support.zero import (
    PRECISIONS,
    ROWS,
    Masters,
    Reference,
    batch_shares,
    build,
    config,
    engine_for,
    settings_for,
    train,
)

LOOKS_AT_THE_NORM = [] if deepspeed.__version__ == "0.19.7" else ["fp32"]  # ZeRO, for non-finite gradients
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ZeRO's storage
STAGES = (0, 1, 2, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": zero.BF16,
    "bf16, fp32 accumulation": PRECISIONS["bf16+fp32"],
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "autocast to bf16": PRECISIONS["autocast"],
    "autocast to fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "16-bit masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}


def stages_of(cell: str) -> set[int]:
    """Of ``stage 0``, ``stages 1 to 3`` or an empty cell."""
    ends = [int(number) for number in re.findall(r"\d", cell)]
    return set(range(ends[0], ends[-1] + 1)) if ends else set()


REFUSED = {name: [*map(stages_of, cells)] for name, *cells in table("deepspeed", "Stages and precisions")[1:]}


def test_the_page_has_every_precision() -> None:
    trained = section("deepspeed", "Stages and precisions").partition(" train at stages 0 to 3.")[0]
    named = re.split(", | and ", trained.strip().replace("bf16 with fp32 accumulation", "bf16+fp32"))
    assert [name.replace("bf16+fp32", "bf16, fp32 accumulation") for name in named] == list(SETTINGS)[:5]
    assert [name for name, (_, theirs) in REFUSED.items() if theirs] == ["16-bit masters"]
    assert REFUSED.keys() < SETTINGS.keys()


@cells(precision=SETTINGS, stage=STAGES, accumulation=[1, 2])
@on_ranks()
def test_the_page_says_what_happens(precision: str, stage: int, accumulation: int) -> None:
    """Fp32 weights are those of one process, after some steps on the gradients that DeepSpeed reduced, or who refuses.
    Every rank trains on its own rows."""
    (ours, theirs), rows = REFUSED.get(precision, [set(), set()]), ROWS // 2 // accumulation
    settings = config(stage, rows=rows, accumulation=accumulation, bucket_numel=2000) | SETTINGS[precision]
    if stage in ours | theirs:
        with pytest.raises(Exception) as caught:
            build(settings)
        by_us = "LayerWiseMuon does not support this configuration; change:"
        assert (caught.type is ValueError and str(caught.value).startswith(by_us)) == (stage in ours)
        return
    both = zero.Beside(Reference(), settings)
    with engine_for(settings) as engine:
        both.start(engine)
        both.train(engine, range(3))
        assert both.single.difference(engine) == 0.0


def test_every_feature_names_a_file_of_tests() -> None:
    everywhere = re.findall(r"^- `([\w/]+)`", section("deepspeed", "Features"), re.MULTILINE)
    (_, _, _, last), *rows = table("deepspeed", "Features")
    assert len(everywhere) > 5 and last == "tests" and len(rows) > 10
    of_rows = [re.findall(r"`([\w/]+/test_\w+)`", row[3]) for row in rows]
    assert all(of_rows) and all(stages_of(row[1]) < {*STAGES} for row in rows)
    names = {*everywhere}.union(*of_rows)
    assert [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []


# Owned storage
@on_ranks(2)
@cells(
    lambda precision, accumulation, **_: not precision.startswith("fp16") or accumulation == 2,
    layout=["padded", "compact"],
    precision=["bf16", "bf16+fp32", "fp16", "fp16+fp32"],
    accumulation=[1, 2],
    stage=[0, 1, 2],
    clip=[0.0, 0.3],
)
def test_16_bit_owned_training_equals_fp32_masters(
    layout: str, precision: str, accumulation: int, stage: int, clip: float
) -> None:
    dtype, _, accumulated = precision.partition("+")
    # At stage 2 micro-batches are reduced one by one, and add up at the owners, in fp32.
    masters = Masters(DTYPES[dtype], accumulated == "fp32" or stage == 2)
    masters.clip = clip
    settings = settings_for("owned", stage, precision, accumulation=accumulation, layout=layout, clip=clip)
    iteration = zero.newton_schulz_in_float32() if clip else contextlib.nullcontext()
    with iteration, engine_for(settings) as engine:
        for step in range(2 if clip else 4):
            scale = engine.optimizer.loss_scale
            train(engine, range(step, step + 1), same_rows=True)
            norm = masters.advance(step, accumulation, clips=zero.clips_of(engine), scale=scale)
            assert norm > clip and float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-3)
        weights = {name: param.detach() for name, param in engine.module.named_parameters()}
        assert engine.skipped_steps == 0 and {p.dtype for p in weights.values()} == {DTYPES[dtype]}
        # On a CPU torch rounds the ends of fp16 tensors otherwise than their middles, so alignment shows.
        rounding = {"bf16": 0.0, "fp16": 1e-6}[dtype]
        assert largest_difference(full_weights_of(engine), masters.model) <= rounding
        assert largest_difference(weights, masters.low) <= (1e-3 if rounding else 0.0)
        buckets = engine.optimizer.core.manager.buckets
        held, owned = (sum(b.masters.numel() for b in buckets), sum(p.numel for b in buckets for p in b.pieces))
        assert held == owned, "only owned pieces have masters"


# Overflows
@on_ranks(2)
@cells(
    lambda storage, stage, precision: (
        zero.there_is(storage, stage)
        and (storage == "owned" or precision in (["fp32"] if stage == 0 else ["fp16", *LOOKS_AT_THE_NORM]))
    ),
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "fp16"],
)
def test_nonfinite_gradients_skip_a_step(storage: str, stage: int, precision: str) -> None:
    """Fixed: One gradient that is not finite ruined all weights at stage 0. Gradients that are not finite skip the
    step, and the next is exact. One rank has them before the first and the third step; the reference takes four."""
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
@pytest.mark.parametrize("stage", [0, 2])
def test_autocast_to_bf16_trains_owned_fp32_weights(stage: int) -> None:
    """Autocast to bf16 trains fp32 weights that owned storage has. The reference autocasts likewise. With ZeRO's
    storage DeepSpeed reduces in bf16, as the table knows."""
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
