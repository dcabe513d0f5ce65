"""Optimizer state in the CPU's memory changes no bit; where matrices are computed is the configuration's choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lwopt_backend.runtime.stepper import MatrixStepper
from tests.ranks import RankPool
from tests.zero import ROWS, config, engine_for, full_weights, train

STEPS = 4
CPU = {"device": "cpu"}


def weights_after_training(settings: dict[str, Any]) -> tuple[dict[str, Tensor], float, set[str]]:
    with engine_for(settings) as engine:
        train(engine, STEPS)
        states = engine.basic_optimizer.state
        devices = {tensor.device.type for state in states.values() for tensor in state.values()}
        return full_weights(engine), float(engine.get_global_grad_norm()), devices


def differ_from_no_offload(
    stage: int, offload: dict[str, Any], changes: dict[str, Any]
) -> tuple[bool, float, set[str]]:
    # At stage 3 DeepSpeed adds up the norm of offloaded gradients in another order, so a clip would round otherwise.
    settings = config(stage, rows=ROWS // 4, accumulation=2, clip=0.0 if stage == 3 else 0.5) | changes
    plain, plain_norm, _ = weights_after_training(settings)
    settings["zero_optimization"] = {**settings["zero_optimization"], **offload}
    offloaded, norm, devices = weights_after_training(settings)
    return all(torch.equal(plain[name], offloaded[name]) for name in plain), norm / plain_norm, devices


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "offload", "changes"),
    [
        *((stage, {"offload_optimizer": CPU}, changes) for stage in (1, 2, 3) for changes in ({}, BF16)),
        (2, {"offload_optimizer": {**CPU, "pin_memory": True}}, {}),
        (3, {"offload_param": CPU}, {}),
        (3, {"offload_param": CPU, "offload_optimizer": CPU, "sub_group_size": 1000}, BF16),
    ],
    ids=str,
)
def test_offload_changes_no_bit(ranks: RankPool, stage: int, offload: dict[str, Any], changes: dict[str, Any]) -> None:
    for equal, norms, devices in ranks.run(differ_from_no_offload, stage, offload, changes):
        assert equal and norms == pytest.approx(1.0, rel=1e-6) and devices == {"cpu"}


def devices_of_work(stage: int, ns_device: str) -> list[str]:
    """Where each stepper sends matrices and runs the rule, if the engine's device were an accelerator."""
    seen: list[str] = []
    original = MatrixStepper.__init__

    def note(self: MatrixStepper, *args: Any, **kwargs: Any) -> None:
        seen.append(f"{args[2]} {kwargs['rule_device']} {kwargs['batch_numel'] > 0}")
        original(self, *args, **kwargs)

    settings = config(stage, ns_device=ns_device)
    settings["zero_optimization"]["offload_optimizer"] = CPU
    with engine_for(settings) as engine:
        MatrixStepper.__init__ = note
        try:
            engine.device = torch.device("meta")
            engine.basic_optimizer._prepare(engine.basic_optimizer._binding)
        finally:
            MatrixStepper.__init__ = original
    return seen


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("ns_device", "expected"), [("auto", "meta meta True"), ("cpu", "meta cpu False")])
def test_matrices_are_computed_where_the_configuration_says(
    ranks: RankPool, stage: int, ns_device: str, expected: str
) -> None:
    assert ranks.run(devices_of_work, stage, ns_device) == [[expected]] * 2


def save_and_resume(folder: str, stage: int) -> tuple[bool, bool]:
    settings = config(stage, rows=ROWS // 2)
    settings["zero_optimization"]["offload_optimizer"] = CPU
    with engine_for(settings) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder)
        losses = train(engine, range(2, 4))
        weights = full_weights(engine)
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder)
        again = train(engine, range(2, 4))
        resumed = full_weights(engine)
    return losses == again, all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_state_resumes_bit_for_bit(ranks: RankPool, tmp_path: Any, stage: int) -> None:
    assert ranks.run(save_and_resume, str(tmp_path), stage) == [(True, True)] * 2


def build(settings: dict[str, Any]) -> None:
    with engine_for(settings):
        pass


@pytest.mark.parametrize(
    ("stage", "offload", "message"),
    [
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "there"}}, "offload_optimizer.device is 'nvme'"),
        (3, {"offload_optimizer": {"device": "nvme", "nvme_path": "there"}}, "offload_optimizer.device is 'nvme'"),
        (3, {"offload_param": {"device": "nvme", "nvme_path": "there"}}, "offload_param.device is 'nvme'"),
        (3, {"offload_optimizer": {**CPU, "ratio": 0.5}}, "offload_optimizer.ratio is 0.5"),
        (3, {"offload_optimizer": {**CPU, "super_offload": True}}, "offload_optimizer.super_offload is on"),
    ],
    ids=str,
)
def test_offload_that_does_not_work_is_refused_by_name(
    ranks: RankPool, stage: int, offload: dict[str, Any], message: str
) -> None:
    settings = config(stage)
    settings["zero_optimization"] |= offload
    for error in ranks.errors(build, settings):
        assert error.startswith("ValueError") and f"zero_optimization.{message}" in error
