"""deepspeed.utils.safe_get_* and safe_set_*: the right tensors, and what is not there is an error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed import utils
from torch import Tensor

from tests.cells import cells
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import Reference, batch_shares, engine_for, settings_for, train

KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}  # of matrices, and of the rest
STORAGES: dict[str, dict[str, Any]] = {
    "zero": {},
    "padded": {"storage": "owned", "layout": "padded"},
    "compact": {"storage": "owned", "layout": "compact"},
    "instances": {"storage": "owned", "group_size": 1},
}


def settings_of(kind: str, stage: int, precision: str = "fp32") -> dict[str, Any]:
    options = dict(STORAGES[kind])
    return settings_for(options.pop("storage", "zero"), stage, precision, **options)


def backward(engine: Any, step: int) -> None:
    """All ranks on all rows, so that the mean of their gradients is the single process's, bit for bit."""
    engine.backward(engine(*batch_shares(step, 1)[0]))


def part(param: Tensor, whole: Tensor) -> Tensor:
    """What this rank has of it at stage 3: an equal part, but for the last."""
    numel = param.ds_tensor.numel()
    return whole.detach().flatten()[torch.distributed.get_rank() * numel :][:numel]


def differ(kind: str, stage: int, local: bool) -> dict[str, float]:
    """What is read after two steps and in a third, and the weights after it, of tensors that were all written there."""
    single, generator = Reference(), torch.Generator().manual_seed(7)
    found = dict.fromkeys(("weights", "states", "gradients", "weights after"), 0.0)

    def note(what: str, ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape
        found[what] = max(found[what], float((ours - theirs).detach().abs().max()))

    def note_local(what: str, ours: Tensor, theirs: Tensor) -> None:
        if theirs.numel():
            note(what, ours[: theirs.numel()], theirs)  # the rest is padding

    with engine_for(settings_of(kind, stage)) as engine:
        train(engine, 2, same_rows=True)
        single.train(2)
        params = {name: (p, single.model.get_parameter(name)) for name, p in engine.module.named_parameters()}
        for name, (param, theirs) in params.items():
            note("weights", utils.safe_get_full_fp32_param(param), theirs)
            for key in KEYS[name in MATRICES]:
                state = single.state_of(name)[key]
                note("states", utils.safe_get_full_optimizer_state(param, key), state)
                if local:
                    note_local("states", utils.safe_get_local_optimizer_state(param, key), part(param, state))
            if local:
                note_local("weights", utils.safe_get_local_fp32_param(param), part(param, theirs))
        backward(engine, 2)
        single.model(*batch_shares(2, 1)[0]).backward()
        for param, theirs in params.values():
            note("gradients", utils.safe_get_full_grad(param), theirs.grad)
            if local:
                note_local("gradients", utils.safe_get_local_grad(param), part(param, theirs.grad))
        for name, (param, theirs) in params.items():
            weight, grad = (torch.randn(theirs.shape, generator=generator) for _ in range(2))
            states = {key: torch.rand(theirs.shape, generator=generator) for key in KEYS[name in MATRICES]}
            write(param, weight, grad, states, local)
            if kind != "zero":
                assert torch.equal(param, weight)
            theirs.data.copy_(weight)
            theirs.grad.copy_(grad)
            for key, value in states.items():
                single.state_of(name)[key].copy_(value)
        engine.step()
        single.step()
        for param, theirs in params.values():
            note("weights after", utils.safe_get_full_fp32_param(param), theirs)
    return found


def write(param: Tensor, weight: Tensor, grad: Tensor, states: dict[str, Tensor], local: bool) -> None:
    def padded(whole: Tensor) -> Tensor:
        mine = part(param, whole)
        return torch.nn.functional.pad(mine, (0, param.ds_tensor.numel() - mine.numel()))

    if local:
        utils.safe_set_local_fp32_param(param, padded(weight))
        utils.safe_set_local_grad(param, padded(grad))
        for key, value in states.items():
            utils.safe_set_local_optimizer_state(param, padded(value), key)
        return
    utils.safe_set_full_fp32_param(param, weight)
    utils.safe_set_full_grad(param, grad)
    for key, value in states.items():
        utils.safe_set_full_optimizer_state(param, value, key)


@cells(
    lambda kind, stage, **_: stage in ((1, 2, 3) if kind == "zero" else (0, 1, 2)),
    ranks=[2, 4],
    kind=STORAGES,
    stage=[0, 1, 2, 3],
)
def test_tensors_are_those_of_a_single_process_and_what_is_written_is_stepped_with(
    ranks: RankPool, kind: str, stage: int
) -> None:
    for found in ranks.run(differ, kind, stage, local=stage == 3):
        assert found == dict.fromkeys(found, 0.0)


def errors_of(storage: str, stage: int, precision: str) -> dict[str, str]:
    """What is said of each tensor that is not there."""
    found = {}

    def note(what: str, function: Any, name: str, *args: Any) -> None:
        try:
            function(engine.module.get_parameter(name), *args)
        except (ValueError, RuntimeError) as error:
            found[what] = f"{type(error).__name__}: {error}"

    with engine_for(settings_for(storage, stage, precision)) as engine:
        shapes = {name: p.shape for name, p in UnevenLM().named_parameters()}
        if storage == "zero":
            note("read early", utils.safe_get_full_optimizer_state, "gate.weight", "momentum_buffer")
            zeros = torch.zeros(shapes["gate.weight"])
            note("written early", utils.safe_set_full_optimizer_state, "gate.weight", zeros, "momentum_buffer")
        else:
            note("gradient", utils.safe_get_full_grad, "gate.weight")
        train(engine, 1, same_rows=True)
        for name, key in (("gate.weight", "exp_avg"), ("lm_head.weight", "momentum_buffer")):
            note(f"read {name}", utils.safe_get_full_optimizer_state, name, key)
            note(f"written {name}", utils.safe_set_full_optimizer_state, name, torch.zeros(shapes[name]), key)
        if stage == 3:
            note("local", utils.safe_get_local_optimizer_state, "lm_head.weight", "step")
    return found


OF_A_MATRIX = "ValueError: parameter 'gate.weight' has no optimizer state {!r}; its rule, 'muon', keeps"
OF_THE_REST = "ValueError: parameter 'lm_head.weight' has no optimizer state {!r}; its rule, 'adamw', keeps 'exp_avg',"
EARLY = "RuntimeError: parameter 'gate.weight' has no 'momentum_buffer' yet; the first step makes it"
NO_GRADIENT = "RuntimeError: parameter 'gate.weight' has no gradient at its owner; ask after the backward pass that"


@pytest.mark.parametrize(
    ("storage", "stage", "precision"),
    [*(("zero", s, "fp32") for s in (1, 2, 3)), ("zero", 1, "bf16+fp32"), *(("owned", s, "fp32") for s in (0, 1, 2))],
)
def test_what_is_not_there_is_an_error_on_all_ranks(ranks: RankPool, storage: str, stage: int, precision: str) -> None:
    """Also of ten elements, which one rank stores at stages 1 and 2."""
    first, second = ranks.run(errors_of, storage, stage, precision)
    assert first == second
    early = {"read early": EARLY, "written early": EARLY} if storage == "zero" else {"gradient": NO_GRADIENT}
    ways = ("read", "written")
    expected = early | {f"{way} gate.weight": f"{OF_A_MATRIX.format('exp_avg')} 'momentum_buffer'" for way in ways}
    expected |= {f"{way} lm_head.weight": f"{OF_THE_REST.format('momentum_buffer')} 'exp_avg_sq'" for way in ways}
    if stage == 3:
        expected["local"] = f"{OF_THE_REST.format('step')} 'exp_avg_sq'"
    assert first.keys() == expected.keys()
    assert all(first[what].startswith(expected[what]) for what in first), first


def ask_without_zero() -> tuple[list[Any], float]:
    single = Reference()
    with engine_for(settings_for("zero", 0)) as engine:
        train(engine, 2, same_rows=True)
        backward(engine, 2)
        param = engine.module.get_parameter("layers.2.weight")
        asked = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_optimizer_state(param, "momentum_buffer")]
        single.train(2)
        single.model(*batch_shares(2, 1)[0]).backward()
        grad = single.model.get_parameter("layers.2.weight").grad
        return asked, float((utils.safe_get_full_grad(param) - grad).abs().max())


def test_without_zero_deepspeed_returns_gradients_only(ranks: RankPool) -> None:
    """With every optimizer: the parameters themselves are whole and in fp32 there."""
    assert ranks.run(ask_without_zero) == [([None, None], 0.0)] * 2
