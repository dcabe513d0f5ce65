"""Learning-rate schedules keep the ratio between Muon's rate and AdamW's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, Reference, config, engine_for, full_weights, largest_difference, train

RATIO = ADAMW["lr"] / MUON["lr"]
STEPS = 6


def rates_under(scheduler: dict[str, Any]) -> list[list[float]]:
    with engine_for(config(2) | {"scheduler": scheduler}) as engine:
        rates = []
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            rates.append(engine.get_lr())
        return rates


ONE_RATE = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
    "OneCycleLR": {"max_lr": 0.02, "total_steps": 10, "cycle_momentum": False},
}
OWN_RATES = {
    "WarmupLR": {"warmup_num_steps": 4},  # no warmup_max_lr: DeepSpeed takes each group's own
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "CosineAnnealingLR": {"T_max": 10},
    "ExponentialLR": {"gamma": 0.9},
}


@pytest.mark.parametrize(
    ("name", "params"), [*ONE_RATE.items(), *OWN_RATES.items()], ids=[*ONE_RATE, *(f"{n}-own" for n in OWN_RATES)]
)
def test_schedulers_by_config_keep_the_ratio(ranks: RankPool, name: str, params: dict[str, Any]) -> None:
    for rates in ranks.run(rates_under, {"type": name, "params": params}):
        assert len({rate for rate, _ in rates}) > 1, "the schedule must move to be tested"
        for matrix, elementwise in rates:
            assert elementwise == pytest.approx(matrix * RATIO)


def test_per_group_rates_are_taken_as_written(ranks: RankPool) -> None:
    params = {"warmup_max_lr": [0.02, 0.001], "warmup_min_lr": [0.01, 0.001], "warmup_num_steps": 4}
    for rates in ranks.run(rates_under, {"type": "WarmupLR", "params": params}):
        assert rates[-1] == [0.02, 0.001]


def differ_under_warmup() -> float:
    """The written rate is the trained one: compared with a reference whose two rates follow the same warm-up."""
    reference = Reference()
    schedulers = [
        WarmupLR(optimizer, warmup_max_lr=rate, warmup_num_steps=4)
        for optimizer, rate in ((reference.muon, MUON["lr"]), (reference.adamw, MUON["lr"] * RATIO))
    ]
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": MUON["lr"], "warmup_num_steps": 4}}
    with engine_for(config(2, rows=8) | {"scheduler": schedule}) as engine:
        for step in range(STEPS):
            train(engine, range(step, step + 1), same_rows=True)
            reference.train(range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
        return largest_difference(full_weights(engine), reference.model)


def test_one_rate_for_all_trains_like_two_rates_in_their_ratio(ranks: RankPool) -> None:
    assert max(ranks.run(differ_under_warmup)) <= 1e-7  # the ratio is applied after the schedule, not before: rounding


def rates_with_client_scheduler(how: str) -> list[float]:
    def half(step: int) -> float:
        return 0.5**step

    settings = config(2)
    options = settings.pop("optimizer")["params"]
    model = UnevenLM()
    optimizer: Any = LayerWiseMuon(model.parameters(), **options)
    scheduler: Any = LambdaLR(optimizer, half)
    if how == "callables":
        optimizer, scheduler = (lambda params: LayerWiseMuon(params, **options)), (lambda o: LambdaLR(o, half))
    with engine_for(settings, model, optimizer=optimizer, lr_scheduler=scheduler) as engine:
        train(engine, 2)
        return engine.get_lr()


@pytest.mark.parametrize("how", ["instances", "callables"])
def test_client_optimizer_and_scheduler(ranks: RankPool, how: str) -> None:
    for rates in ranks.run(rates_with_client_scheduler, how):
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
