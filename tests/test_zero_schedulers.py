"""Learning-rate schedules keep the ratio between Muon's rate and AdamW's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    MUON,
    ROWS,
    Reference,
    batch_shares,
    config,
    engine_for,
    full_weights,
    largest_difference,
    train,
)

RATIO = ADAMW["lr"] / MUON["lr"]
STEPS = 6


def rates_under(stage: int, scheduler: dict[str, Any]) -> list[list[float]]:
    with engine_for(config(stage) | {"scheduler": scheduler}) as engine:
        rates = []
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            rates.append(engine.get_lr())
        return rates


def rates_on_one_process(name: str, params: dict[str, Any]) -> list[float]:
    """What the scheduler makes of a single optimizer that has Muon's rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=MUON["lr"])
    scheduler = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    schedule = scheduler(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupLR-own": {"warmup_num_steps": 4},  # no warmup_max_lr: DeepSpeed takes each group's own
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
    "OneCycleLR": {"max_lr": 0.02, "total_steps": 10, "cycle_momentum": False},
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
AT_EVERY_STAGE = ("WarmupLR", "OneCycle", "CosineAnnealingLR")


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [*((2, name) for name in SCHEDULES), *((stage, name) for stage in (0, 1, 3) for name in AT_EVERY_STAGE)],
)
def test_schedulers_by_config_keep_the_ratio(ranks: RankPool, stage: int, schedule: str) -> None:
    name, params = schedule.removesuffix("-own"), SCHEDULES[schedule]
    expected = rates_on_one_process(name, params)
    assert len(set(expected)) > 1, "the schedule must move to be tested"
    for rates in ranks.run(rates_under, stage, {"type": name, "params": params}):
        assert [matrix for matrix, _ in rates] == pytest.approx(expected)
        assert [elementwise for _, elementwise in rates] == pytest.approx([rate * RATIO for rate in expected])


def momenta_under(scheduler: dict[str, Any], **options: Any) -> tuple[list[list[Any]], list[set[str]]]:
    with engine_for(config(1, **options) | {"scheduler": scheduler}) as engine:
        momenta = []
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            momenta.append([g["momentum"] if g["rule"] == "muon" else g["betas"] for g in groups_of(engine)])
        return momenta, [set(group) for group in groups_of(engine)]


def groups_of(engine: Any) -> list[dict[str, Any]]:
    return engine.basic_optimizer.param_groups


def momenta_on_one_process(name: str, params: dict[str, Any]) -> list[tuple[float, float]]:
    """What the scheduler makes of AdamW alone."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=ADAMW["betas"])
    scheduler = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    schedule = scheduler(optimizer, **params)
    momenta = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        momenta.append(optimizer.param_groups[0]["betas"])
    return momenta


@pytest.mark.parametrize("storage", ["zero", "owned"])
@pytest.mark.parametrize("name", ["OneCycle", "OneCycleLR"])
def test_a_cycled_momentum_reaches_both_rules(ranks: RankPool, name: str, storage: str) -> None:
    """DeepSpeed's OneCycle also sets every second beta to 0.99, as it does with Adam."""
    params = {key: value for key, value in SCHEDULES[name].items() if key != "cycle_momentum"}
    expected = momenta_on_one_process(name, params)
    assert len(set(expected)) > 1, "the schedule must move to be tested"
    for momenta, (muon, adamw) in ranks.run(momenta_under, {"type": name, "params": params}, storage=storage):
        assert [of_muon for of_muon, _ in momenta] == [beta1 for beta1, _ in expected]
        assert [tuple(of_adamw) for _, of_adamw in momenta] == expected
        assert "betas" not in muon and "momentum" not in adamw


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("LambdaLR", {}, "missing 1 required positional argument: 'lr_lambda'"),
        ("LambdaLR", {"lr_lambda": "lambda step: 0.5"}, "'str' object is not callable"),
        ("CosineAnnealingLR", {"T_maximum": 10}, "unexpected keyword argument 'T_maximum'"),
        ("ReduceLROnPlateau", {"factor": 0.5}, "call engine.step(lr_kwargs={'metrics': loss})"),
    ],
)
def test_schedulers_that_a_configuration_cannot_describe_are_refused(
    ranks: RankPool, name: str, params: dict[str, Any], message: str
) -> None:
    for error in ranks.errors(rates_under, 2, {"type": name, "params": params}):
        assert error.startswith(f"ValueError: scheduler.type is {name!r}")
        assert message in error and "deepspeed.initialize(lr_scheduler=lambda optimizer:" in error


def rates_on_a_plateau() -> list[list[float]]:
    settings = config(2)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    with engine_for(settings, lr_scheduler=schedule) as engine:
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
    for rates in ranks.run(rates_under, 2, {"type": "WarmupLR", "params": params}):
        assert rates[-1] == [0.02, 0.001]


def differ_under_warmup(stage: int) -> float:
    """The written rate is the trained one: compared with a reference whose two rates follow the same warm-up."""
    reference = Reference()
    schedulers = [
        WarmupLR(optimizer, warmup_max_lr=rate, warmup_num_steps=4)
        for optimizer, rate in ((reference.muon, MUON["lr"]), (reference.adamw, MUON["lr"] * RATIO))
    ]
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 4}}
    with engine_for(config(stage, rows=ROWS) | {"scheduler": schedule}) as engine:
        for step in range(STEPS):
            train(engine, range(step, step + 1), same_rows=True)
            reference.train(range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
        return largest_difference(full_weights(engine), reference.model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rate_for_all_trains_like_two_rates_in_their_ratio(ranks: RankPool, stage: int) -> None:
    assert (
        max(ranks.run(differ_under_warmup, stage)) <= 1e-7
    )  # the ratio is applied after the schedule, not before: rounding


def rates_with_client_scheduler(stage: int, how: str) -> list[float]:
    def half(step: int) -> float:
        return 0.5**step

    settings = config(stage)
    options = settings.pop("optimizer")["params"]
    model = UnevenLM()
    optimizer: Any = LayerWiseMuon(model.parameters(), **options)
    scheduler: Any = LambdaLR(optimizer, half)
    if how == "callables":
        optimizer, scheduler = (lambda params: LayerWiseMuon(params, **options)), (lambda o: LambdaLR(o, half))
    with engine_for(settings, model, optimizer=optimizer, lr_scheduler=scheduler) as engine:
        train(engine, 2)
        return engine.get_lr()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["instances", "callables"])
def test_client_optimizer_and_scheduler(ranks: RankPool, stage: int, how: str) -> None:
    for rates in ranks.run(rates_with_client_scheduler, stage, how):
        assert rates == pytest.approx([MUON["lr"] / 4, ADAMW["lr"] / 4])


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
