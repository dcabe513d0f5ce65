"""timm's schedulers, which multiply what they write by a group's ``lr_scale``, on our optimizer and on torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lwopt_backend import LayerWiseOptimizer
from tests.support.schedules import RATES


def schedulers() -> Any:
    """``timm.scheduler`` without timm's models, which need torchvision."""
    if "timm" not in sys.modules:
        found = find_spec("timm")
        assert found is not None and found.submodule_search_locations is not None
        sys.modules["timm"] = ModuleType("timm")
        sys.modules["timm"].__path__ = list(found.submodule_search_locations)
    return import_module("timm.scheduler")


SCHEDULES: dict[str, Callable[[Any], Any]] = {  # without PlateauLRScheduler, deprecated, which saves too little
    "cosine": lambda o: schedulers().CosineLRScheduler(o, 8, lr_min=1e-5, warmup_t=3, warmup_lr_init=1e-6),
    "multistep": lambda o: schedulers().MultiStepLRScheduler(o, [4, 6], 0.1, warmup_t=2),
    "poly": lambda o: schedulers().PolyLRScheduler(o, 12, warmup_t=2),
    "step": lambda o: schedulers().StepLRScheduler(o, 3, 0.5),
    "tanh": lambda o: schedulers().TanhLRScheduler(o, 12, warmup_t=2),
    "wsd": lambda o: schedulers().WSDLRScheduler(o, 10, warmup_t=2, decay_t=3),
}


def ours(factors: tuple[float, ...]) -> LayerWiseOptimizer:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    groups = [
        {"params": [*layer.parameters()], **({"lr_scale": f} if f < 1 else {})} for layer, f in zip(model, factors)
    ]
    return LayerWiseOptimizer(model, lr=RATES[0], elementwise_lr=RATES[1], params=groups, include="*", report=False)


def rates(optimizer: Any, schedule: Any, steps: range) -> list[list[float]]:
    found = []
    for step in steps:
        optimizer.step()
        schedule.step(step)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 1.0)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_timm_rates_are_torchs_and_resume(name: str, factors: tuple[float, ...], tmp_path: Path) -> None:
    """Rates are those of torch's optimizers, and go on from a folder."""
    optimizer = ours(factors)
    of_groups = []
    for group in optimizer.param_groups:
        own = {key: group[key] for key in ("lr", "lr_scale") if key in group}
        single = torch.optim.SGD([{"params": [torch.zeros(1)], **own}])
        of_groups.append([rate for (rate,) in rates(single, SCHEDULES[name](single), range(12))])
    truth = [[*of_step] for of_step in zip(*of_groups)]
    schedule = SCHEDULES[name](optimizer)
    assert rates(optimizer, schedule, range(4)) == truth[:4]
    optimizer.save_state_dict(tmp_path, schedule=schedule.state_dict())
    again = ours(factors)
    schedule = SCHEDULES[name](again)
    schedule.load_state_dict(again.load_state_dict_from(tmp_path)["schedule"])
    assert rates(again, schedule, range(4, 12)) == truth[4:]
