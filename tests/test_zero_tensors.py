"""deepspeed.utils.safe_get_* and safe_set_*: the right tensors, and a wrong key is an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import utils
from torch import Tensor

from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import Reference, batch_shares, config, engine_for, train

KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}  # of matrices, and of the rest
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SHARDED = pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16+fp32")])


def settings_for(stage: int, precision: str = "fp32") -> dict[str, Any]:
    settings = config(stage, rows=8, policy="balance", bucket_numel=2000)
    if precision == "bf16+fp32":
        settings.update({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    return settings


def backward(engine: Any, step: int) -> None:
    """All ranks on all rows, so that the mean of their gradients is the single process's, bit for bit."""
    engine.backward(engine(*batch_shares(step, 1)[0]))


def states_of(reference: Reference, name: str) -> dict[str, Tensor]:
    optimizer = reference.muon if name in MATRICES else reference.adamw
    return optimizer.state[reference.model.get_parameter(name)]


def differ_from_reference(stage: int) -> dict[str, float]:
    reference, found = Reference(), {"weights": 0.0, "states": 0.0, "gradients": 0.0}

    def note(what: str, ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape
        found[what] = max(found[what], float((ours - theirs).abs().max()))

    with engine_for(settings_for(stage)) as engine:
        train(engine, 2, same_rows=True)
        reference.train(2)
        for name, param in engine.module.named_parameters():
            note("weights", utils.safe_get_full_fp32_param(param), reference.model.get_parameter(name).detach())
            for key in KEYS[name in MATRICES]:
                note("states", utils.safe_get_full_optimizer_state(param, key), states_of(reference, name)[key])
        backward(engine, 2)
        reference.model(*batch_shares(2, 1)[0]).backward()
        for name, param in engine.module.named_parameters():
            note("gradients", utils.safe_get_full_grad(param), reference.model.get_parameter(name).grad)
    return found


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@STAGES
def test_whole_tensors_equal_those_of_a_single_process(ranks: RankPool, stage: int) -> None:
    for found in ranks.run(differ_from_reference, stage):
        assert found == {"weights": 0.0, "states": 0.0, "gradients": 0.0}


def parts_differ_from_whole() -> float:
    """At stage 3 every rank has an equal part of each parameter; the last part is padded."""
    rank, found = torch.distributed.get_rank(), 0.0
    with engine_for(settings_for(3)) as engine:
        train(engine, 2, same_rows=True)
        backward(engine, 2)
        for name, param in engine.module.named_parameters():
            pairs = [(utils.safe_get_full_fp32_param(param), utils.safe_get_local_fp32_param(param))]
            pairs += [(utils.safe_get_full_grad(param), utils.safe_get_local_grad(param))]
            for key in KEYS[name in MATRICES]:
                whole = utils.safe_get_full_optimizer_state(param, key)
                pairs.append((whole, utils.safe_get_local_optimizer_state(param, key)))
            for whole, part in pairs:
                mine = whole.detach().flatten()[rank * part.numel() : (rank + 1) * part.numel()]
                found = max([found, *(part[: mine.numel()] - mine).abs().tolist()])
    return found


def test_local_tensors_are_parts_of_the_whole_ones(ranks: RankPool) -> None:
    assert ranks.run(parts_differ_from_whole) == [0.0, 0.0]


def differ_after_setting(stage: int, local: bool) -> float:
    """Weights, gradients and states written from outside are those that the next step uses."""
    reference = Reference()
    generator = torch.Generator().manual_seed(7)
    with engine_for(settings_for(stage)) as engine:
        train(engine, 1, same_rows=True)
        reference.train(1)
        backward(engine, 1)
        reference.model(*batch_shares(1, 1)[0]).backward()
        for name, param in engine.module.named_parameters():
            theirs = reference.model.get_parameter(name)
            weight, grad = (torch.randn(theirs.shape, generator=generator) for _ in range(2))
            states = {key: torch.rand(theirs.shape, generator=generator) for key in KEYS[name in MATRICES]}
            write(param, weight, grad, states, local)
            theirs.data.copy_(weight)
            theirs.grad.copy_(grad)
            for key, value in states.items():
                states_of(reference, name)[key].copy_(value)
        engine.step()
        for optimizer in (reference.muon, reference.adamw):
            optimizer.step()
        params = dict(engine.module.named_parameters())
        return max(
            float((utils.safe_get_full_fp32_param(params[name]) - theirs.detach()).abs().max())
            for name, theirs in reference.model.named_parameters()
        )


def write(param: Tensor, weight: Tensor, grad: Tensor, states: dict[str, Tensor], local: bool) -> None:
    def part(value: Tensor) -> Tensor:
        numel, rank = param.ds_tensor.numel(), torch.distributed.get_rank()
        mine = value.flatten()[rank * numel : (rank + 1) * numel]
        return torch.nn.functional.pad(mine, (0, numel - mine.numel()))

    if local:
        utils.safe_set_local_fp32_param(param, part(weight))
        utils.safe_set_local_grad(param, part(grad))
        for key, value in states.items():
            utils.safe_set_local_optimizer_state(param, part(value), key)
        return
    utils.safe_set_full_fp32_param(param, weight)
    utils.safe_set_full_grad(param, grad)
    for key, value in states.items():
        utils.safe_set_full_optimizer_state(param, value, key)


@pytest.mark.parametrize(("stage", "local"), [(1, False), (2, False), (3, True)])
def test_tensors_that_were_set_are_stepped_with(ranks: RankPool, stage: int, local: bool) -> None:
    assert ranks.run(differ_after_setting, stage, local) == [0.0, 0.0]


def ask(stage: int, precision: str, name: str, key: str, steps: int) -> None:
    with engine_for(settings_for(stage, precision)) as engine:
        train(engine, steps, same_rows=True)
        utils.safe_get_full_optimizer_state(engine.module.get_parameter(name), key)


def write_zeros(stage: int, precision: str, name: str, key: str, steps: int) -> None:
    with engine_for(settings_for(stage, precision)) as engine:
        train(engine, steps, same_rows=True)
        shape = UnevenLM().get_parameter(name).shape
        utils.safe_set_full_optimizer_state(engine.module.get_parameter(name), torch.zeros(shape), key)


def ask_locally(stage: int, precision: str, name: str, key: str, steps: int) -> None:
    with engine_for(settings_for(3, precision)) as engine:
        train(engine, steps, same_rows=True)
        utils.safe_get_local_optimizer_state(engine.module.get_parameter(name), key)


OF_A_MATRIX = "parameter 'gate.weight' has no optimizer state {!r}; its rule, 'muon', keeps 'momentum_buffer'"
OF_THE_REST = "parameter 'lm_head.weight' has no optimizer state {!r}; its rule, 'adamw', keeps 'exp_avg', 'exp_avg_sq'"


@SHARDED
@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("gate.weight", "exp_avg", OF_A_MATRIX),  # ten elements, which one rank stores at stages 1 and 2
        ("lm_head.weight", "momentum_buffer", OF_THE_REST),
    ],
)
def test_a_wrong_key_is_an_error_on_all_ranks(
    ranks: RankPool, stage: int, precision: str, name: str, key: str, message: str
) -> None:
    for call in (ask, write_zeros):
        for error in ranks.errors(call, stage, precision, name, key, 1):
            assert error == f"ValueError: {message.format(key)}"


def test_a_wrong_key_of_a_local_state_is_an_error_too(ranks: RankPool) -> None:
    for error in ranks.errors(ask_locally, 3, "fp32", "lm_head.weight", "step", 1):
        assert error == f"ValueError: {OF_THE_REST.format('step')}"


@SHARDED
@pytest.mark.parametrize("call", [ask, write_zeros])
def test_a_state_that_no_step_has_made_is_an_error_on_all_ranks(
    ranks: RankPool, stage: int, precision: str, call: Callable[..., None]
) -> None:
    for error in ranks.errors(call, stage, precision, "gate.weight", "momentum_buffer", 0):
        assert error == "RuntimeError: parameter 'gate.weight' has no 'momentum_buffer' yet; the first step makes it"


def states_after_loading(folder: str, stage: int, precision: str) -> bool:
    """DeepSpeed itself loses sight of the states when an engine that has stepped loads a checkpoint."""
    with engine_for(settings_for(stage, precision)) as engine:
        train(engine, 2, same_rows=True)
        saved = all_states(engine)
        engine.save_checkpoint(folder)
    found = []
    for steps_before in (0, 1):
        with engine_for(settings_for(stage, precision)) as engine:
            train(engine, steps_before, same_rows=True)
            engine.load_checkpoint(folder)
            found.append(all_states(engine))
            train(engine, 1)
            assert all(torch.isfinite(state).all() for state in all_states(engine))
    return all(torch.equal(a, b) for states in found for a, b in zip(saved, states, strict=True))


def all_states(engine: Any) -> list[Tensor]:
    return [
        utils.safe_get_full_optimizer_state(param, key).clone()
        for name, param in engine.module.named_parameters()
        for key in KEYS[name in MATRICES]
    ]


@SHARDED
def test_states_are_found_after_loading(ranks: RankPool, tmp_path: Path, stage: int, precision: str) -> None:
    assert all(ranks.run(states_after_loading, str(tmp_path), stage, precision))


def ask_without_zero() -> tuple[list[Any], float]:
    with engine_for(settings_for(0)) as engine:
        train(engine, 2, same_rows=True)
        backward(engine, 2)
        param = engine.module.get_parameter("layers.2.weight")
        asked = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_optimizer_state(param, "momentum_buffer")]
        reference = Reference()
        reference.train(2)
        reference.model(*batch_shares(2, 1)[0]).backward()
        grad = reference.model.get_parameter("layers.2.weight").grad
        return asked, float((utils.safe_get_full_grad(param) - grad).abs().max())


def test_without_zero_deepspeed_returns_gradients_only(ranks: RankPool) -> None:
    """With every optimizer: the parameters themselves are whole and in fp32 there."""
    assert ranks.run(ask_without_zero) == [([None, None], 0.0)] * 2
