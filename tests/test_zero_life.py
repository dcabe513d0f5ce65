"""What happens to an optimizer beside training: other engines, checkpoints from before the first step, copies."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.logging import logger
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, Reference, config, engine_for, full_weights, largest_difference, train

OPTIONS = {**MUON, "adamw": ADAMW, "report": False}


def without_optimizer(stage: int = 2) -> dict[str, Any]:
    settings = config(stage, rows=8)
    del settings["optimizer"]
    return settings


def go_back_to_the_start(stage: int, folder: str) -> bool:
    policy = "balance" if stage in (1, 2) else "auto"
    with engine_for(config(stage, policy=policy, bucket_numel=2000)) as engine:
        engine.save_checkpoint(folder)
        train(engine, 3)
        weights = full_weights(engine)
        engine.load_checkpoint(folder)
        train(engine, 3)
        again = full_weights(engine)
        return all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_from_before_the_first_step_is_loaded_later(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    assert all(ranks.run(go_back_to_the_start, stage, str(tmp_path)))


def train_in_two_engines(stage: int, folder: str) -> tuple[float, list[int]]:
    """The second engine starts from the weights the first one left, with fresh state."""
    model, reference = UnevenLM(), Reference()
    optimizer = LayerWiseMuon(model.parameters(), **OPTIONS)
    states = []
    for _ in range(2):
        with engine_for(without_optimizer(stage), model, optimizer=optimizer) as engine:
            train(engine, 2, same_rows=True)
            states.append(len(optimizer.state))
            engine.save_checkpoint(folder)
            difference = largest_difference(full_weights(engine), reference.model) if len(states) == 2 else 0.0
            weights = full_weights(engine)
        if len(states) == 1:
            reference = Reference()
            reference.model.load_state_dict(weights)
            reference.train(2)
    return difference, states


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_serves_a_second_engine_when_the_first_is_gone(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    for difference, states in ranks.run(train_in_two_engines, stage, str(tmp_path)):
        assert difference == 0.0
        assert states == [2, 2], "one per group: nothing of the first engine's is kept"


def copy_it() -> None:
    copy.deepcopy(LayerWiseMuon(UnevenLM().parameters(), **OPTIONS))


def test_an_optimizer_is_not_copied(ranks: RankPool) -> None:
    for error in ranks.errors(copy_it):
        assert "belongs to its engine and cannot be copied or pickled; use state_dict()" in error


def load_state_of_other_partitions() -> None:
    with engine_for(config(2)) as engine:
        train(engine, 1)
        state = engine.basic_optimizer.state_dict()
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"][:-2]
        engine.basic_optimizer.load_state_dict(state)


def test_state_of_other_partitions_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(load_state_of_other_partitions):
        assert "param group 0: the checkpoint's momentum_buffer has" in error


def rates_by_schedules_that_read_defaults(name: str) -> list[list[float]]:
    make = {
        "cosine_with_min_lr": lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 2, 6, min_lr=0.002),
        "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=8),
    }[name]
    model = UnevenLM()
    optimizer = LayerWiseMuon(model.parameters(), **OPTIONS)
    with engine_for(without_optimizer(), model, optimizer=optimizer, lr_scheduler=make) as engine:
        rates = []
        for step in range(6):
            train(engine, range(step, step + 1))
            rates.append(engine.get_lr())
        return rates


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "OneCycleLR"])
def test_schedules_that_read_the_optimizers_defaults(ranks: RankPool, name: str) -> None:
    for rates in ranks.run(rates_by_schedules_that_read_defaults, name):
        assert len({rate for rate, _ in rates}) > 3
        for matrix, elementwise in rates:
            assert elementwise == pytest.approx(matrix * ADAMW["lr"] / MUON["lr"])


def differ_under_one_rate_for_both(stage: int) -> tuple[float, float]:
    """A group's own ``lr`` holds for both halves, and a schedule on it is what a single process would do."""
    rate = 0.005
    reference = Reference(muon={**MUON, "lr": rate}, adamw={**ADAMW, "lr": rate})
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8) for o in (reference.muon, reference.adamw)]
    model = UnevenLM()
    optimizer = LayerWiseMuon([{"params": model.parameters(), "lr": rate}], **OPTIONS)

    def schedule(inner: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=8)

    with engine_for(without_optimizer(stage), model, optimizer=optimizer, lr_scheduler=schedule) as engine:
        for step in range(4):
            train(engine, range(step, step + 1), same_rows=True)
            reference.train(range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
        return largest_difference(full_weights(engine), reference.model), engine.get_lr()[0] / rate


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_rate_under_a_schedule_trains_like_a_single_process(ranks: RankPool, stage: int) -> None:
    for difference, factor in ranks.run(differ_under_one_rate_for_both, stage):
        assert difference == 0.0 and factor == pytest.approx(0.5)


class Said(logging.Handler):
    """What DeepSpeed's logger warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warnings_of_a_changed_model(stage: int) -> list[str]:
    """Two steps with a parameter that was frozen when the engine was built, then two with one replaced, too."""
    model, said = UnevenLM(), Said()
    model.layers[0].bias.requires_grad_(False)
    with engine_for(
        config(stage), model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    ) as engine:
        train(engine, 1)
        logger.addHandler(said)
        model.layers[0].bias.requires_grad_(True)
        train(engine, 2)
        if stage < 3:  # where modules hold DeepSpeed's own parameters
            model.layers[0].bias.requires_grad_(False)
            model.gate.weight = nn.Parameter(model.gate.weight.detach().clone())
            train(engine, 2)
        logger.removeHandler(said)
    return [text for text in said.texts if "LayerWise" in text]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_deepspeed_does_not_train_is_warned_of_once(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(warnings_of_a_changed_model, stage)
    assert second == []
    assert first[0].startswith(
        "LayerWiseMuon: parameter 'layers.0.bias' is trained now, but not when the optimizer was"
    )
    assert first[0].endswith("so no step uses the gradient; call deepspeed.initialize after the last such change")
    replaced = [
        "LayerWiseMuon: parameter 'gate.weight' is no longer in the model (replaced), and no step reaches what "
    ]
    assert [text[: len(replaced[0])] for text in first[1:]] == (replaced if stage < 3 else [])
