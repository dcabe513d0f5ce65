"""Learning-rate schedules keep the ratio between Muon's rate and AdamW's, whatever they write, and are DeepSpeed's own
or torch's, by configuration, as instances or as callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.cells import cells
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    MUON,
    OWNED,
    Reference,
    batch_shares,
    config,
    engine_for,
    full_weights,
    largest_difference,
    settings_for,
    there_is,
    train,
)

RATIO = ADAMW["lr"] / MUON["lr"]
STEPS = 6
Rates = list[list[float]]
SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupLR-own": {"warmup_num_steps": 4},  # no warmup_max_lr: DeepSpeed takes each group's own
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
    "OneCycleLR": {"max_lr": 0.02, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.02, "step_size_up": 3, "cycle_momentum": False},
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "LinearLR": {"start_factor": 0.1, "total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
}


def followed(
    settings: dict[str, Any], **kwargs: Any
) -> tuple[Rates, list[tuple[float, tuple[float, ...]]], list[set[str]]]:
    """By step, the groups' rates, and Muon's momentum and AdamW's betas; in the end, the keys that groups have."""
    with engine_for(settings, **kwargs) as engine:
        rates, momenta = [], []
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            rates.append(list(engine.get_lr()))
            muon, adamw = engine.basic_optimizer.param_groups
            momenta.append((muon["momentum"], tuple(adamw["betas"])))
        return rates, momenta, [set(group) for group in engine.basic_optimizer.param_groups]


def on_one_process(name: str, params: dict[str, Any]) -> tuple[list[float], list[tuple[float, float]]]:
    """What the scheduler makes of AdamW alone that has Muon's rate."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=MUON["lr"], betas=ADAMW["betas"])
    scheduler = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    schedule = scheduler(optimizer, **params)
    rates, betas = [], []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(tuple(optimizer.param_groups[0]["betas"]))
    return rates, betas


AT_EVERY_STAGE = ("WarmupLR", "OneCycle", "CosineAnnealingLR")


@pytest.mark.parametrize(
    ("stage", "storage", "schedule"),
    [
        *((2, "zero", name) for name in SCHEDULES),
        *((stage, "zero", name) for stage, name in zip((0, 1, 3), AT_EVERY_STAGE)),
        *((1, "owned", name) for name in ("OneCycle", "OneCycleLR", "WarmupLR")),
        *(
            pytest.param(stage, "zero", name, marks=pytest.mark.full)
            for stage in (0, 1, 3)
            for name in AT_EVERY_STAGE
            if (stage, name) not in zip((0, 1, 3), AT_EVERY_STAGE)
        ),
    ],
)
def test_schedulers_by_config_keep_the_ratio_and_cycle_both_momenta(
    ranks: RankPool, stage: int, storage: str, schedule: str
) -> None:
    """DeepSpeed's OneCycle also sets every second beta to 0.99, as it does with Adam."""
    name, params = schedule.removesuffix("-own"), SCHEDULES[schedule]
    expected, betas = on_one_process(name, params)
    assert len(set(expected)) > 1, "the schedule must move to be tested"
    assert len(set(betas)) > 1 or not schedule.startswith("OneCycle")
    settings = config(stage, **(OWNED if storage == "owned" else {})) | {"scheduler": {"type": name, "params": params}}
    for rates, momenta, (muon, adamw) in ranks.run(followed, settings):
        assert [matrix for matrix, _ in rates] == pytest.approx(expected)
        assert [elementwise for _, elementwise in rates] == pytest.approx([rate * RATIO for rate in expected])
        if len(set(betas)) > 1:
            assert momenta == [(beta1, (beta1, beta2)) for beta1, beta2 in betas]
        assert "betas" not in muon and "momentum" not in adamw


def rates_on_a_plateau() -> Rates:
    def schedule(optimizer: Any) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    with engine_for(config(2), lr_scheduler=schedule) as engine:
        rates = []
        for metric in (3.0, 2.0, 2.0, 2.0, 1.0):
            engine.backward(engine(*batch_shares(0, 2)[0]))
            engine.step(lr_kwargs={"metrics": metric})
            rates.append(engine.get_lr())
        return rates


def test_a_schedule_on_a_metric_is_given_as_a_callable(ranks: RankPool) -> None:
    for rates in ranks.run(rates_on_a_plateau):
        assert rates == [pytest.approx([MUON["lr"] * f, ADAMW["lr"] * f]) for f in (1.0, 1.0, 1.0, 0.5, 0.5)]


def test_per_group_rates_are_taken_as_written(ranks: RankPool) -> None:
    params = {"warmup_max_lr": [0.02, 0.001], "warmup_min_lr": [0.01, 0.001], "warmup_num_steps": 4}
    for rates, *_ in ranks.run(followed, config(2) | {"scheduler": {"type": "WarmupLR", "params": params}}):
        assert rates[-1] == [0.02, 0.001]


def half(step: int) -> float:
    return 0.5**step


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=8)


def warmup(optimizer: torch.optim.Optimizer, rate: float) -> Any:
    return lr_schedules.WarmupLR(optimizer, warmup_max_lr=rate, warmup_num_steps=4)


def differ_on_schedule(storage: str, stage: int, how: str) -> tuple[float, list[float]]:
    """From two optimizers on one process that are each given the schedule; and the rates in the end.

    One rate for all groups by configuration; each group's own rate, by a schedule of factors; a rate that was given for
    both halves of a group.
    """
    settings, model = settings_for(storage, stage), UnevenLM()
    options, kwargs, rates = settings["optimizer"]["params"], {}, (MUON["lr"], ADAMW["lr"])
    make: Callable[[Any], Any] = cosine
    if how == "one rate, by configuration":
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": rates[0], "warmup_num_steps": 4}}
    elif how == "factors, by callables":
        make = lambda optimizer: LambdaLR(optimizer, half)  # noqa: E731
        kwargs = {"optimizer": lambda params: LayerWiseMuon(params, **options), "lr_scheduler": make}
    else:
        params: Any = model.parameters()
        if how == "a group's rate, by instances":
            rates, params = (0.005, 0.005), [{"params": params, "lr": 0.005}]
        kwargs["optimizer"] = LayerWiseMuon(params, **options)
        kwargs["lr_scheduler"] = make if rates[0] == rates[1] else make(kwargs["optimizer"])
    if kwargs:
        del settings["optimizer"]
    single = Reference(muon={**MUON, "lr": rates[0]}, adamw={**ADAMW, "lr": rates[1]})
    pairs = zip((single.muon, single.adamw), rates)
    schedules = [make(optimizer) if kwargs else warmup(optimizer, rate) for optimizer, rate in pairs]
    with engine_for(settings, model, **kwargs) as engine:
        for step in range(4):
            train(engine, range(step, step + 1), same_rows=True)
            single.train(range(step, step + 1))
            for schedule in schedules:
                schedule.step()
        assert engine.get_lr() == pytest.approx([o.param_groups[0]["lr"] for o in (single.muon, single.adamw)])
        return largest_difference(full_weights(engine), single.model), list(engine.get_lr())


@cells(
    there_is,
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    how=["one rate, by configuration", "factors, by callables", "its own rates, by instances"]
    + ["a group's rate, by instances"],
)
def test_a_schedule_trains_like_one_on_each_of_two_optimizers(
    ranks: RankPool, storage: str, stage: int, how: str
) -> None:
    for difference, rates in ranks.run(differ_on_schedule, storage, stage, how):
        # A single rate is multiplied by the ratio after the schedule, not before: rounding.
        assert difference <= (1e-7 if how == "one rate, by configuration" else 0.0)
        assert how != "a group's rate, by instances" or rates == pytest.approx([0.0025, 0.0025])


def rates_of_a_schedule_that_reads_defaults() -> Rates:
    def schedule(optimizer: Any) -> Any:
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, 6, min_lr=0.002)

    return followed(config(2), lr_scheduler=schedule)[0]


def test_a_schedule_that_reads_the_optimizers_defaults(ranks: RankPool) -> None:
    for rates in ranks.run(rates_of_a_schedule_that_reads_defaults):
        assert len({rate for rate, _ in rates}) > 3
        assert all(elementwise == pytest.approx(matrix * RATIO) for matrix, elementwise in rates)


def scheduler_of_too_few_groups() -> None:
    """A model of 2-D parameters only: one group until the embedding and the head are known for what they are."""
    settings = config(2)
    options = settings.pop("optimizer")["params"]
    model = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6, bias=False))
    optimizer = LayerWiseMuon(model.parameters(), **options)
    with engine_for(settings, model, optimizer=optimizer, lr_scheduler=LambdaLR(optimizer, lambda step: 1.0)):
        pass


def test_scheduler_built_before_the_model_was_known_is_refused_where_groups_change(ranks: RankPool) -> None:
    for error in ranks.errors(scheduler_of_too_few_groups):
        assert "the lr_scheduler was built on 1 param groups, but routing the model makes 2" in error
        assert "lr_scheduler=lambda optimizer" in error
