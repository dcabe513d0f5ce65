"""The norm and the clip are those of the true gradient: what is clipped is what Muon is given, never what it makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import ROWS, Reference, batch_shares, config, engine_for, full_weights, newton_schulz_in_float32

STEEP = 64.0  # the loss is multiplied by it, so that gradients are far above DeepSpeed's default clip of 1
STEPS = 3

everywhere = pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16+fp32")]
)


def settings_of(stage: int, precision: str, clip: float, **params: Any) -> dict[str, Any]:
    settings = config(stage, clip=clip, rows=ROWS, **params)
    if precision == "bf16+fp32":  # at stage 1 DeepSpeed's BF16_Optimizer
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


class Masters(Reference):
    """The reference, whose gradients come from a model of the engine's precision beside it."""

    def __init__(self, precision: str) -> None:
        low = UnevenLM() if precision == "fp32" else UnevenLM().bfloat16()
        super().__init__(UnevenLM() if precision == "fp32" else UnevenLM().bfloat16().float())
        self.low = low

    def step(self, number: int, clip: float) -> float:
        """One step; the norm before clipping. A clip of 0 scales nothing."""
        (STEEP * self.low(*batch_shares(number, 1)[0])).backward()
        for master, param in zip(self.model.parameters(), self.low.parameters()):
            master.grad, param.grad = param.grad.float(), None
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for master, param in zip(self.model.parameters(), self.low.parameters()):
                param.copy_(master)
        return norm

    def state(self, key: str) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters() if (name in MATRICES) == (key == "momentum_buffer")]
        optimizer = self.muon if key == "momentum_buffer" else self.adamw
        return {name: optimizer.state[self.model.get_parameter(name)][key] for name in names}


def engine_step(engine: Any, number: int) -> float:
    """One step, all ranks on all rows; the norm DeepSpeed reports."""
    engine.backward(STEEP * engine(*batch_shares(number, 1)[0]))
    engine.step()
    return float(engine.get_global_grad_norm())


def norms_of_state(engine: Any) -> dict[str, float]:
    """Over all ranks, each of which has a part, the norm of Muon's momentum and of AdamW's first moment."""
    squares = {"momentum_buffer": torch.zeros(()), "exp_avg": torch.zeros(())}
    for state in engine.basic_optimizer.state.values():
        for key, total in squares.items():
            total += state[key].square().sum() if key in state else 0.0
    for total in squares.values():
        torch.distributed.all_reduce(total)
    return {key: float(total.sqrt()) for key, total in squares.items()}


def differ_without_clipping(stage: int, precision: str) -> tuple[float, list[tuple[float, float]]]:
    reference, norms = Masters(precision), []
    with engine_for(settings_of(stage, precision, 0.0)) as engine:
        for step in range(STEPS):
            norms.append((engine_step(engine, step), reference.step(step, 0.0)))
        ours = full_weights(engine)
    return max(float((ours[n] - p.detach()).abs().max()) for n, p in reference.model.named_parameters()), norms


@everywhere
def test_a_clip_of_zero_scales_nothing_and_the_norm_is_reported(ranks: RankPool, stage: int, precision: str) -> None:
    for difference, norms in ranks.run(differ_without_clipping, stage, precision):
        assert difference == 0.0
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert min(truth for _, truth in norms) > 2.0, "the default clip of 1 would bite"


def one_step(stage: int, precision: str, clip: float) -> dict[str, Any]:
    """The first step with a clip, beside the reference's."""
    reference = Masters(precision)
    start = {name: param.detach().clone() for name, param in reference.model.named_parameters()}
    settings = settings_of(stage, precision, clip, ns_dtype="float32")
    with newton_schulz_in_float32(), engine_for(settings) as engine:
        norm, true_norm = engine_step(engine, 0), reference.step(0, clip)
        ours, moments = full_weights(engine), norms_of_state(engine)
    theirs = dict(reference.model.named_parameters())
    lr, decay = (reference.muon.param_groups[0][key] for key in ("lr", "weight_decay"))
    updates = {name: ours[name] - start[name] * (1 - lr * decay) for name in MATRICES}
    return {
        "norm": (norm, true_norm),
        "updates": {name: float(update.norm()) / lr for name, update in updates.items()},
        "moments": moments,
        "true moments": {
            key: math.sqrt(sum(float(t.square().sum()) for t in reference.state(key).values())) for key in moments
        },
        "difference": max(float((ours[name] - theirs[name].detach()).abs().max()) for name in ours),
    }


def compare(stage: int, precision: str, clips: list[float]) -> list[dict[str, Any]]:
    return [one_step(stage, precision, clip) for clip in clips]


@everywhere
def test_the_gradient_is_clipped_and_not_the_orthogonalized_update(ranks: RankPool, stage: int, precision: str) -> None:
    """Newton-Schulz takes no notice of its input's scale; a clipped update would be a thousand times smaller."""
    clip = 0.01
    for unclipped, clipped in ranks.run(compare, stage, precision, [0.0, clip]):
        norm, truth = clipped["norm"]
        assert norm == pytest.approx(truth, rel=1e-5) and norm == unclipped["norm"][0]  # reported as it was
        assert norm > 200 * clip
        assert clipped["updates"] == pytest.approx(unclipped["updates"], rel=1e-2)
        for key, moment in clipped["moments"].items():
            assert moment == pytest.approx(unclipped["moments"][key] * clip / norm, rel=1e-4)
            assert moment == pytest.approx(clipped["true moments"][key], rel=1e-4)
        assert clipped["difference"] <= 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_of_norm_1e_6_is_orthogonalized_all_the_same(ranks: RankPool, stage: int) -> None:
    """What is orthogonalized then has a norm below ``eps``, by which torch.optim.Muon divides it, so that the iteration
    starts from almost nothing; ours is as large as without clipping, but for the rounding of the momentum."""
    for unclipped, clipped in ranks.run(compare, stage, "fp32", [0.0, 1e-6]):
        assert clipped["moments"]["momentum_buffer"] < 1e-7
        for name, size in clipped["updates"].items():
            assert size == pytest.approx(unclipped["updates"][name], rel=1e-3)
