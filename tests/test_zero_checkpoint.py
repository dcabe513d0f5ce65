"""DeepSpeed's own checkpoints carry the optimizer: a resumed run continues bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import MUON, Reference, config, engine_for, full_weights, train


def settings_for(stage: int, precision: str) -> dict[str, Any]:
    settings = config(stage, policy="balance", bucket_numel=2000)
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 8}}
    if precision != "fp32":
        settings["bf16"] = {"enabled": True}
    if precision == "bf16+fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def train_with_and_without_a_break(folder: str, stage: int, precision: str) -> dict[str, bool]:
    settings = settings_for(stage, precision)
    with engine_for(settings) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        losses = train(engine, range(3, 6))
        weights, rates = full_weights(engine), engine.get_lr()
    with engine_for(settings) as engine:
        _, client = engine.load_checkpoint(folder)
        resumed = train(engine, range(3, 6))
        again = full_weights(engine)
        return {
            "client state": client["rows"] == 3,
            "losses": resumed == losses,
            "weights": all(torch.equal(weights[name], again[name]) for name in weights),
            "rates": engine.get_lr() == rates,
        }


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (1, "bf16+fp32")])
def test_resumed_run_equals_uninterrupted_run(ranks: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    for equal in ranks.run(train_with_and_without_a_break, str(tmp_path), stage, precision):
        assert equal == dict.fromkeys(equal, True)


def save_then_load(folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    with engine_for(saved) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder)
    with engine_for(loaded) as engine:
        engine.load_checkpoint(folder)


def test_checkpoint_of_another_routing_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    saved, loaded = config(2, exclude=["layers.0.weight"]), config(2, exclude=["layers.2.weight"])
    for error in ranks.errors(save_then_load, str(tmp_path), saved, loaded):
        assert error.startswith("ValueError: param group 0 (muon) holds other parameters than in the checkpoint")


def load_from_adamw(folder: str) -> None:
    """AdamW's groups hold as many parameters as ours, or DeepSpeed itself would refuse to load them."""
    adamw = config(2)
    adamw["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    model = UnevenLM()
    named = dict(model.named_parameters())
    groups = [{"params": [named.pop(name) for name in MATRICES]}, {"params": list(named.values())}]
    with engine_for(adamw, model, model_parameters=groups) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder)
    with engine_for(config(2)) as engine:
        engine.load_checkpoint(folder)


def test_checkpoint_of_another_optimizer_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks.errors(load_from_adamw, str(tmp_path)):
        assert error == (
            "ValueError: the checkpoint's param groups follow the rules ['unknown', 'unknown'], "
            "this optimizer's follow ['muon', 'adamw']"
        )


def momentum_differs() -> float:
    reference = Reference()
    with engine_for(config(2, rows=8)) as engine:
        train(engine, 2, same_rows=True)
        reference.train(2)
        params = dict(engine.module.named_parameters())
        momentum = safe_get_full_optimizer_state(params["layers.2.weight"], "momentum_buffer")
        average = safe_get_full_optimizer_state(params["lm_head.weight"], "exp_avg")
    theirs = dict(reference.model.named_parameters())
    true_momentum = reference.muon.state[theirs["layers.2.weight"]]["momentum_buffer"]
    true_average = reference.adamw.state[theirs["lm_head.weight"]]["exp_avg"]
    return max(float((momentum - true_momentum).abs().max()), float((average - true_average).abs().max()))


def test_deepspeed_returns_whole_optimizer_states_by_parameter(ranks: RankPool) -> None:
    assert ranks.run(momentum_differs) == [0.0, 0.0]
