"""Learning-rate schedules, DeepSpeed's own or torch's, by configuration, as instances or as callables. By configuration
they keep the ratio between Muon's rate and AdamW's where they would write one number over both."""

import copy
import itertools
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.utils.logging import logger
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests import zero
from tests.cells import with_full
from tests.checkpoint_contents import same
from tests.models import UnevenLM
from tests.on_ranks import on_ranks

BOTH = zero.MUON["lr"], zero.ADAMW["lr"]
RATIO = BOTH[1] / BOTH[0]
STEPS = 6
SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupLR-own": {"warmup_num_steps": 4},  # no warmup_max_lr: DeepSpeed takes each group's own
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_min_lr": 0.01, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupDecayLR-default": {"total_num_steps": 8, "warmup_num_steps": 4},  # of 0.001
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
    "OneCycle-lists": {"cycle_min_lr": [0.001, 1e-5], "cycle_max_lr": [0.02, 0.03], "cycle_first_step_size": 3},
    "OneCycleLR": {"max_lr": 0.02, "total_steps": 10, "cycle_momentum": False},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.02, "step_size_up": 3, "cycle_momentum": False},
    "LinearLR": {"start_factor": 0.1, "total_iters": 4},
    "CosineAnnealingLR": {"T_max": 10},
}
AT_EVERY_STAGE = ("WarmupLR", "OneCycle", "CosineAnnealingLR")
BY_CONFIG = [
    *((2, "zero", name) for name in SCHEDULES),
    *((stage, "zero", name) for stage, name in zip((0, 1, 3), AT_EVERY_STAGE)),
    *((1, "owned", name) for name in ("OneCycle", "OneCycleLR", "WarmupLR")),
]


def on_one_process(name: str, params: dict[str, Any], group: int) -> list[float]:
    """The rates that the scheduler makes of one optimizer alone, by step. Numbers are Muon's."""
    one = [torch.nn.Parameter(torch.zeros(1, 1))]
    optimizer = torch.optim.AdamW(one, lr=(zero.MUON, zero.ADAMW)[group]["lr"], betas=zero.ADAMW["betas"])
    scheduler: Any = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    if name == "WarmupDecayLR":
        params = {"warmup_max_lr": 0.001, **params}
    own = {key: value[group] for key, value in params.items() if isinstance(value, list)}
    shared = {key: value * (1, RATIO)[group] for key, value in params.items() if key.endswith("_lr") and key not in own}
    schedule = scheduler(optimizer, **{**params, **shared, **own})
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def rates_of(engine: Any) -> list[float]:
    return [group["lr"] for group in engine.basic_optimizer.param_groups]


@pytest.mark.parametrize(
    ("stage", "storage", "schedule"),
    with_full(BY_CONFIG, [(stage, "zero", name) for stage in (0, 1, 3) for name in AT_EVERY_STAGE]),
)
@on_ranks(2)
def test_schedulers_by_config_keep_the_ratio_and_cycle_no_momentum(stage: int, storage: str, schedule: str) -> None:
    """DeepSpeed's OneCycle warns that it cycles none, as no half has both."""
    name, params = schedule.partition("-")[0], SCHEDULES[schedule]
    expected = [*zip(*(on_one_process(name, params, group) for group in (0, 1)))]
    assert len(set(expected)) > 1, "the schedule must move to be tested"
    settings = zero.config(stage, **(zero.OWNED if storage == "owned" else {})) | {
        "scheduler": {"type": name, "params": params}
    }
    given = copy.deepcopy(settings)
    with zero.engine_for(settings) as engine, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*all param groups have")
        for step, rates in enumerate(expected):
            zero.train(engine, range(step, step + 1))
            assert engine.get_lr() == rates_of(engine) == pytest.approx(rates)
        muon, adamw = engine.basic_optimizer.param_groups
        assert (muon["momentum"], adamw["betas"]) == (0.95, zero.ADAMW["betas"])
        assert "betas" not in muon and "momentum" not in adamw
    assert settings == given, "the user's configuration stays as it was"


@on_ranks(2)
def test_a_schedule_on_a_metric_is_given_as_a_callable() -> None:
    with zero.engine_for(zero.config(2), lr_scheduler=partial(ReduceLROnPlateau, factor=0.5, patience=1)) as engine:
        for metric, factor in ((3.0, 1.0), (2.0, 1.0), (2.0, 1.0), (2.0, 0.5), (1.0, 0.5)):
            engine.backward(engine(*zero.batch_shares(0, 2)[0]))
            engine.step(lr_kwargs={"metrics": metric})
            assert rates_of(engine) == pytest.approx([zero.MUON["lr"] * factor, zero.ADAMW["lr"] * factor])


@on_ranks(2)
@pytest.mark.parametrize(("storage", "stage"), [("zero", 1), ("zero", 3), ("owned", 2)])
@pytest.mark.parametrize("how", ["factors, by a callable", "a group's rate, by an instance"])
def test_schedules_of_factors_and_of_a_groups_rate_move_both_rates(storage: str, stage: int, how: str) -> None:
    """A floor is a part of the rate in the optimizer's defaults, and a group's rate is for both its halves."""
    settings, model = zero.settings_for(storage, stage), UnevenLM()
    options = settings.pop("optimizer")["params"]
    make: Any = partial(get_cosine_with_min_lr_schedule_with_warmup, num_warmup_steps=2, num_training_steps=6)
    make, alone, rates = partial(make, min_lr=BOTH[0] / 2), partial(make, min_lr_rate=0.5), BOTH
    optimizer: Any = partial(LayerWiseMuon, **options)
    if how.startswith("a group"):
        make, rates = partial(CosineAnnealingLR, T_max=8), (0.005, 0.005)
        alone, optimizer = make, optimizer([{"params": model.parameters(), "lr": 0.005}])
    singles = [torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in rates]
    schedules = [alone(single) for single in singles]
    with zero.engine_for(settings, model, optimizer=optimizer, lr_scheduler=make) as engine:
        for step in range(4):
            zero.train(engine, range(step, step + 1))
            for single, schedule in zip(singles, schedules):
                single.step()
                schedule.step()
            assert rates_of(engine) == pytest.approx([single.param_groups[0]["lr"] for single in singles])


@on_ranks(2)
def test_scheduler_built_before_the_model_was_known_is_refused_where_groups_change() -> None:
    """A model of 2-D parameters only: one group until the embedding and the head are known for what they are."""
    settings = zero.config(2)
    options = settings.pop("optimizer")["params"]
    model = torch.nn.Sequential(torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6, bias=False))
    optimizer = LayerWiseMuon(model.parameters(), **options)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    told = "the lr_scheduler: expected 2 param groups, as the routed model has, found 1.*lr_scheduler=lambda optimizer"
    with pytest.raises(ValueError, match=told):
        zero.build(settings, model, optimizer=optimizer, lr_scheduler=schedule)


WARM_UPS: Any = [
    ("WarmupLR", {"warmup_num_steps": 4}, 2),
    ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 9}, 2),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_min_ratio": 0.1}, 1),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_min_lr": 1e-3}, 0),
    ("CosineAnnealingLR", {"T_max": 9}, 0),
]


@on_ranks(2)
@pytest.mark.parametrize(("kind", "params", "idle"), WARM_UPS, ids=str)
def test_a_warm_up_that_begins_with_idle_steps_is_announced(kind: str, params: dict[str, Any], idle: int) -> None:
    settings = zero.settings_for("zero", 2) | {"scheduler": {"type": kind, "params": params}}
    with mock.patch.object(logger, "warning") as said, zero.engine_for(settings) as engine:
        weights = [zero.full_weights(engine)]
        for step in range(3):
            zero.train(engine, range(step, step + 1))
            weights.append(zero.full_weights(engine))
        assert [same(*pair) for pair in itertools.pairwise(weights)] == [step < idle for step in range(3)]
        lines = [call.args[0] for call in said.call_args_list if call.args[0].startswith(f"{kind}: this step has a")]
        assert len(lines) == (idle > 0 and dist.get_rank() == 0)
