"""Schedulers of torch, transformers and DeepSpeed, and the rates that they make of two param groups."""

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime import lr_schedules as of_deepspeed
from torch.optim import Optimizer, lr_scheduler, swa_utils
from transformers import SchedulerType, get_scheduler

RATES = (0.02, 3e-4)
TOTAL = 16
METRICS = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.4, 0.4, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]  # of the steps
Of = Callable[[list[Any]], Any]  # what an optimizer is given of values by param group
Make = Callable[[Optimizer, Of], Any]


class Falling:
    """A function with state, which schedulers save by param group."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


PEAKS, FLOORS, FACTORS = [0.04, 6e-4], [0.001, 2e-4], [0.9, 0.8]
OF_TORCH: dict[str, Make] = {
    "LambdaLR": lambda o, of: lr_scheduler.LambdaLR(o, of([*map(Falling, FACTORS)])),
    "MultiplicativeLR": lambda o, of: lr_scheduler.MultiplicativeLR(o, of([lambda step: 0.9, lambda step: 0.8])),
    "StepLR": lambda o, of: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o, of: lr_scheduler.MultiStepLR(o, [2, 6, 6, 9], gamma=0.5),
    "ConstantLR": lambda o, of: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=6),
    "LinearLR": lambda o, of: lr_scheduler.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o, of: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o, of: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5)], [6]
    ),
    "ChainedScheduler": lambda o, of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 6), lr_scheduler.LambdaLR(o, of([*map(Falling, FACTORS)]))]
    ),
    "PolynomialLR": lambda o, of: lr_scheduler.PolynomialLR(o, TOTAL, power=2.0),
    "CosineAnnealingLR": lambda o, of: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o, of: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o, of: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=of(FLOORS)),
    "CyclicLR": lambda o, of: lr_scheduler.CyclicLR(o, of(FLOORS), of(PEAKS), 3, cycle_momentum=False),
    "OneCycleLR": lambda o, of: lr_scheduler.OneCycleLR(o, of(PEAKS), TOTAL, cycle_momentum=False),
    "SWALR": lambda o, of: swa_utils.SWALR(o, of(FLOORS), anneal_epochs=6),
}
ARGUMENTS: dict[SchedulerType, dict[str, Any]] = {  # floors as factors: one number is of the first rate
    SchedulerType.POLYNOMIAL: {"lr_end": 0.0},
    SchedulerType.COSINE_WITH_MIN_LR: {"min_lr_rate": 0.1},
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: {"min_lr_rate": 0.1},
    SchedulerType.WARMUP_STABLE_DECAY: {"num_decay_steps": 4},
    SchedulerType.REDUCE_ON_PLATEAU: {"factor": 0.5, "patience": 0},
    SchedulerType.GREEDY: {"factor": 0.5, "patience": 0, "min_lr": FLOORS, "max_lr": PEAKS},
}


def _of_transformers(kind: SchedulerType) -> Make:
    def make(optimizer: Optimizer, of: Of) -> Any:
        given = {key: of(value) if isinstance(value, list) else value for key, value in ARGUMENTS.get(kind, {}).items()}
        return get_scheduler(kind, optimizer, 3, TOTAL, scheduler_specific_kwargs=given)

    return make


OF_TRANSFORMERS = {f"transformers {kind.value}": _of_transformers(kind) for kind in SchedulerType}
OF_DEEPSPEED: dict[str, Make] = {
    "DeepSpeed's WarmupLR": lambda o, of: of_deepspeed.WarmupLR(o, 0.0, of(PEAKS), 5),
    "DeepSpeed's WarmupDecayLR": lambda o, of: of_deepspeed.WarmupDecayLR(o, TOTAL, 0.0, of(PEAKS), 4),
    "DeepSpeed's WarmupCosineLR": lambda o, of: of_deepspeed.WarmupCosineLR(o, TOTAL, warmup_num_steps=3),
    "DeepSpeed's OneCycle": lambda o, of: of_deepspeed.OneCycle(o, of(FLOORS), of(PEAKS), 0.0, 5, cycle_momentum=False),
    "DeepSpeed's LRRangeTest": lambda o, of: of_deepspeed.LRRangeTest(o, of(FLOORS), lr_range_test_step_size=3),
}
SCHEDULES: dict[str, Make] = {**OF_TORCH, **OF_TRANSFORMERS, **OF_DEEPSPEED}


def all_of(values: list[Any]) -> list[Any]:
    return values


def alone(group: int) -> Of:
    """For an optimizer that has this param group only."""
    return lambda values: values[group]


def takes_metric(schedule: Any) -> bool:
    return isinstance(schedule, lr_scheduler.ReduceLROnPlateau) or hasattr(schedule, "num_good_epochs")


def moved(schedule: Any, step: int) -> None:
    """Move a schedule on, with a metric if it takes one."""
    schedule.step(*([METRICS[step]] if takes_metric(schedule) else []))


def rates(optimizer: Optimizer, schedule: Any, steps: range) -> Iterator[list[float]]:
    """The rates of the param groups in these steps."""
    for step in steps:
        yield [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()
        moved(schedule, step)
