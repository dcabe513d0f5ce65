"""deepspeed.utils.safe_get_* and safe_set_* on owned storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed import utils
from torch import Tensor

from tests.models import MATRICES
from tests.owned_deepspeed import BUCKET_MB
from tests.ranks import RankPool
from tests.zero import ROWS, Reference, batch_shares, config, engine_for, train

KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}  # of matrices, and of the rest
each_stage = pytest.mark.parametrize("stage", [0, 1, 2])


def settings_for(stage: int, **options: Any) -> dict[str, Any]:
    return config(stage, rows=ROWS, storage="owned", bucket_mb=BUCKET_MB, **options)


def backward(engine: Any, step: int) -> None:
    """All ranks on all rows, so that the mean of their gradients is the single process's, bit for bit."""
    engine.backward(engine(*batch_shares(step, 1)[0]))


def states_of(reference: Reference, name: str) -> dict[str, Tensor]:
    optimizer = reference.muon if name in MATRICES else reference.adamw
    return optimizer.state[reference.model.get_parameter(name)]


def differ_from_reference(stage: int, options: dict[str, Any]) -> float:
    reference, pairs = Reference(), []
    with engine_for(settings_for(stage, **options)) as engine:
        train(engine, 2, same_rows=True)
        reference.train(2)
        for name, param in engine.module.named_parameters():
            pairs.append((utils.safe_get_full_fp32_param(param), reference.model.get_parameter(name).detach()))
            for key in KEYS[name in MATRICES]:
                pairs.append((utils.safe_get_full_optimizer_state(param, key), states_of(reference, name)[key]))
        backward(engine, 2)
        reference.model(*batch_shares(2, 1)[0]).backward()
        for name, param in engine.module.named_parameters():
            pairs.append((utils.safe_get_full_grad(param), reference.model.get_parameter(name).grad))
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.shape == theirs.shape)


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"layout": "compact"}, {"group_size": 1}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@each_stage
def test_whole_tensors_equal_those_of_a_single_process(ranks: RankPool, stage: int, options: dict[str, Any]) -> None:
    assert set(ranks.run(differ_from_reference, stage, options)) == {0.0}


def differ_after_setting(stage: int, options: dict[str, Any]) -> float:
    """Weights, gradients and states written from outside are those that the next step uses."""
    reference, generator = Reference(), torch.Generator().manual_seed(7)
    with engine_for(settings_for(stage, **options)) as engine:
        train(engine, 1, same_rows=True)
        reference.train(1)
        backward(engine, 1)
        reference.model(*batch_shares(1, 1)[0]).backward()
        for name, param in engine.module.named_parameters():
            theirs = reference.model.get_parameter(name)
            weight, grad = (torch.randn(theirs.shape, generator=generator) for _ in range(2))
            utils.safe_set_full_fp32_param(param, weight)
            utils.safe_set_full_grad(param, grad)
            assert torch.equal(param, weight)
            theirs.data.copy_(weight)
            theirs.grad.copy_(grad)
            for key in KEYS[name in MATRICES]:
                value = torch.rand(theirs.shape, generator=generator)
                utils.safe_set_full_optimizer_state(param, value, key)
                states_of(reference, name)[key].copy_(value)
        engine.step()
        for optimizer in (reference.muon, reference.adamw):
            optimizer.step()
        theirs = dict(reference.model.named_parameters())
        return max(float((p - theirs[name]).detach().abs().max()) for name, p in engine.module.named_parameters())


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"group_size": 1}], ids=str)
@each_stage
def test_what_is_written_is_what_the_next_step_uses(ranks: RankPool, stage: int, options: dict[str, Any]) -> None:
    assert set(ranks.run(differ_after_setting, stage, options)) == {0.0}


def ask(stage: int, what: str) -> None:
    with engine_for(settings_for(stage)) as engine:
        param = engine.module.get_parameter(MATRICES[0])
        if what == "gradient":
            utils.safe_get_full_grad(param)
        utils.safe_get_full_optimizer_state(param, what)


@each_stage
def test_what_is_not_there_is_an_error_on_every_rank(ranks: RankPool, stage: int) -> None:
    for error in ranks.errors(ask, stage, "exp_avg"):
        assert "'layers.0.weight' has no optimizer state 'exp_avg'; its rule, 'muon', keeps 'momentum_buffer'" in error
    for error in ranks.errors(ask, stage, "gradient"):
        assert "'layers.0.weight' has no gradient at its owner; ask after the backward pass" in error
