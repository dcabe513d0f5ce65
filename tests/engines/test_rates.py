"""Learning rates of param groups: the ``lr`` of each is the rate that trains it, whatever schedule writes it."""

import contextlib
import copy
import io
import itertools
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime import lr_schedules
from deepspeed.utils.logging import logger
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.checkpoint import formats
from lwopt_backend.groups import registry
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.support import zero
from tests.support.cells import cells, with_full
from tests.support.checkpoint_contents import same
from tests.support.command_line import succeeds
from tests.support.engines import ENGINES, OWNED, ZERO, Cell, Engine, ExactLM, UnderDeepSpeed, running
from tests.support.models import UnevenLM, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import shares
from tests.support.references import Reference
from tests.support.schedules import OF_TORCH, RATES, SCHEDULES, TOTAL, all_of, alone, lr_scheduler, moved
from tests.support.schedules import rates as rates_of_steps

MUON, ADAMW = RATES


def optimizer_of_both(lr: Any = MUON, elementwise_lr: Any = ADAMW, **options: Any) -> LayerWiseOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 5, bias=False))
    return LayerWiseOptimizer(model, lr=lr, elementwise_lr=elementwise_lr, report=False, **options)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_makes_the_rates_of_torchs_optimizers(name: str) -> None:
    """The rates in use: of each group those that the schedule makes of torch.optim.Muon and AdamW alone."""
    ours = optimizer_of_both()
    (muon, adamw), truths = ([nn.Parameter(torch.ones(2, 2))] for _ in range(2)), list[Any]()
    for group, single in enumerate((torch.optim.Muon(muon, lr=MUON), torch.optim.AdamW(adamw, lr=ADAMW))):
        schedule = SCHEDULES[name](single, alone(group))
        truths.append([rate for (rate,) in rates_of_steps(single, schedule, range(TOTAL))])
    found = [*rates_of_steps(ours, SCHEDULES[name](ours, all_of), range(TOTAL))]
    assert found == [pytest.approx(truth, rel=1e-14) for truth in zip(*truths)]
    assert "constant" in name or len({rate for rate, _ in found}) > 1, "the schedule must move to be tested"


def test_the_table_has_every_scheduler_of_torch() -> None:
    assert {*lr_scheduler.__all__} - {LRScheduler.__name__} <= {*OF_TORCH}


SAVED = [*OF_TORCH, "transformers greedy", "DeepSpeed's WarmupLR"]  # others save the like


@pytest.mark.parametrize(
    "name", [name if name in SAVED else pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES]
)
def test_schedule_resumes_from_every_form(tmp_path: Path, name: str) -> None:
    """Fixed: A schedule went on from other rates after a conversion. A schedule goes on from a state dict, a folder and
    conversions. Ten more steps have the rates of the run that was not interrupted, whatever the new one was made
    with."""
    ours = optimizer_of_both()
    schedule = SCHEDULES[name](ours, all_of)
    [*rates_of_steps(ours, schedule, range(4))]
    saved, state = copy.deepcopy((ours.state_dict(), schedule.state_dict()))
    ours.save_state_dict(tmp_path / "own", scheduler=schedule.state_dict())
    truth = [*rates_of_steps(ours, schedule, range(4, 14))]
    succeeds("convert", tmp_path / "own", tmp_path / "u" / "tag", "--to", "universal", "--json")
    succeeds("convert", tmp_path / "u" / "tag", tmp_path / "dcp", "--to", "dcp", "--json")
    succeeds("diff", tmp_path / "own", tmp_path / "dcp")
    for folder, made_with in (("", (0.1, 0.05)), ("own", (0.005, 0.005)), ("dcp", RATES)):
        again = optimizer_of_both(*made_with)
        schedule = SCHEDULES[name](again, all_of)
        if folder:
            state = again.load_state_dict_from(tmp_path / folder)["scheduler"]
        else:
            again.load_state_dict(saved)
        schedule.load_state_dict(state)
        assert [*rates_of_steps(again, schedule, range(4, 14))] == truth, folder


def test_groups_have_their_own_rates() -> None:
    both = optimizer_of_both()
    assert rates(both) == [MUON, ADAMW] and both.defaults["lr"] == MUON
    overrides = [{"params": "layers.2.*", "matrix": {"lr": 0.01}}]
    optimizer = LayerWiseOptimizer(UnevenLM(), lr=MUON, elementwise_lr=ADAMW, overrides=overrides, report=False)
    assert rates(optimizer) == [MUON, 0.01, ADAMW] and optimizer.defaults["lr"] == MUON


@pytest.mark.parametrize(
    ("rates_given", "main", "expected"),
    [
        ((5e-3, 5e-3), 5e-3, [5e-3, 5e-3, 5e-3, 5e-3]),  # all groups have one: it is the optimizer's
        ((5e-3, None), MUON, [5e-3, 5e-3, MUON, ADAMW]),
        ((5e-3, 4e-3), MUON, [5e-3, 5e-3, 4e-3, 4e-3]),
    ],
)
def test_rates_of_the_users_groups_are_theirs(rates_given: Any, main: float, expected: list[float]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    groups: list[dict[str, Any]] = [
        {"params": list(layer.parameters()), **({} if rate is None else {"lr": rate})}
        for layer, rate in zip(model, rates_given)
    ]
    optimizer = LayerWiseOptimizer(model, lr=MUON, elementwise_lr=ADAMW, params=groups, include="*", report=False)
    assert optimizer.defaults["lr"] == main and rates(optimizer) == expected


def test_rates_without_matrices_are_torchs() -> None:
    """Without matrices groups have their own rates, as in torch."""
    model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6))
    first, second = (list(layer.parameters()) for layer in model)
    groups = [{"params": first}, {"params": second, "lr": 1e-3}]
    optimizer = LayerWiseOptimizer(model, elementwise_lr=2e-3, params=groups, allow_no_matrix=True, report=False)
    assert rates(optimizer) == [2e-3, 1e-3] and optimizer.defaults["lr"] == 2e-3


def test_metrics_tell_the_rates_in_use() -> None:
    optimizer = optimizer_of_both(torch.tensor(MUON, dtype=torch.float64))
    optimizer.record_metrics()
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()
    assert optimizer.metrics()["lr"] == [2 * MUON, ADAMW]


@pytest.mark.parametrize("scheduler", [OneCycleLR, CyclicLR])
def test_schedules_that_cycle_momentum_are_refused(scheduler: Any) -> None:
    """Schedules that cycle momentum are refused beside matrices. They would cycle Muon's or AdamW's: the other has its
    momentum under another name."""
    given: dict[str, Any] = {"max_lr": 0.1, **({"total_steps": 10} if scheduler is OneCycleLR else {"base_lr": 0.01})}
    with pytest.raises(ValueError, match="must support momentum"):
        scheduler(optimizer_of_both(), **given)
    optimizer = optimizer_of_both()
    scheduler(optimizer, **given, cycle_momentum=False)
    assert [group.get("momentum") for group in optimizer.param_groups] == [0.95, None]
    model = nn.LayerNorm(6)
    alone = LayerWiseOptimizer(model, elementwise_lr=1e-3, allow_no_matrix=True, report=False)
    OneCycleLR(alone, max_lr=0.1, total_steps=10)
    assert alone.param_groups[0]["betas"] == (0.95, 0.999)


def test_keys_of_torchs_adamw_are_asked_without_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = torch.optim.AdamW([torch.zeros(1)]).param_groups
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", None)  # which imports it
    assert {**registry.torchs_keys.__wrapped__(), "params": group["params"]} == group


CONTAINERS: dict[str, Any] = {
    "counter": Counter({4: 2, 6: 1}),
    "ordered": OrderedDict(b=1, a={}),
    "numbers": {4: 1, 0: {"x": ()}},
    "list": [1, (2, [3, {}]), None, "text", 0.5, []],
    "number": 3,
    "with a tensor": {"state": torch.arange(3), "of": [torch.ones(2), {"x": 1}]},
}


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    optimizer_of_both().save_state_dict(tmp_path / "own", **CONTAINERS)
    succeeds("convert", tmp_path / "own", tmp_path / "u" / "tag", "--to", "universal", "--json")
    succeeds("convert", tmp_path / "u" / "tag", tmp_path / "dcp", "--to", "dcp", "--json")
    for folder in ("own", "dcp"):
        found = optimizer_of_both().load_state_dict_from(tmp_path / folder)
        for key, value in CONTAINERS.items():
            assert (type(found[key]), repr(found[key])) == (type(value), repr(value)), (folder, key)


def test_schedules_that_torch_saved_are_read(tmp_path: Path) -> None:
    """Schedules in a folder that torch saved are read with their containers. torch.distributed.checkpoint makes text of
    the milestones."""
    optimizer = optimizer_of_both()
    state = SCHEDULES["SequentialLR"](optimizer, all_of).state_dict()
    dcp.save({"model": {"w": torch.ones(2)}, "scheduler": state}, checkpoint_id=tmp_path, no_dist=True)
    found = formats.read(tmp_path).scheduler
    assert found == state and isinstance(found["_schedulers"][1]["milestones"], Counter)


def test_timms_own_factor_of_a_group_is_kept_and_saved(tmp_path: Path) -> None:
    """timm's schedules multiply by the key ``lr_scale`` what they write."""
    made = []
    for _ in range(2):
        model = nn.Linear(6, 6, bias=False)
        groups = [{"params": [model.weight], "lr_scale": 0.5}]
        made.append(LayerWiseOptimizer(model, lr=MUON, params=groups, include="*", report=False))
    made[0].param_groups[0]["lr"] = MUON / 2  # as timm writes it
    made[0].save_state_dict(tmp_path)
    made[1].load_state_dict_from(tmp_path)
    assert [made[1].param_groups[0][key] for key in ("lr", "lr_scale")] == [MUON / 2, 0.5]


def warned(steps: Iterator[Any]) -> list[tuple[int, str]]:
    """The step of each warning, and what it said."""
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, _ in enumerate(steps):
            found += [(number, str(each.message)) for each in told]
            told.clear()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_of_unlike_rates_is_a_fault(name: str) -> None:
    """The start of a warm-up, a floor and a rate of zero are none; nor is a run that goes on in the decay."""
    for silent in (lambda o: LambdaLR(o, lambda step: 0.0), lambda o: CosineAnnealingLR(o, 2, eta_min=ADAMW)):
        for both in (optimizer_of_both(), optimizer_of_both(0.01, 0.01)):
            assert warned(rates_of_steps(both, silent(both), range(4))) == []
    ours = optimizer_of_both()
    schedule = SCHEDULES[name](ours, all_of)
    assert warned(rates_of_steps(ours, schedule, range(TOTAL - 3))) == []
    again = optimizer_of_both()
    again.load_state_dict(ours.state_dict())
    assert warned(rates_of_steps(again, schedule, range(3))) == []


def by_hand(optimizer: Any, rates_of: Callable[[int], list[float]]) -> Iterator[None]:
    for step in range(8):
        for group, rate in zip(optimizer.param_groups, rates_of(step)):
            group["lr"] = rate
        optimizer.step()
        yield


OF_ADAMW: dict[str, tuple[int, Callable[[Any], Iterator[Any]]]] = {  # in which step it is told; nanoGPT's loop first
    "constant": (1, lambda o: by_hand(o, lambda step: [6e-4, 6e-4])),
    "constant, larger than AdamW's": (0, lambda o: by_hand(o, lambda step: [1e-2, 1e-2])),
    "warm-up and cosine": (4, lambda o: by_hand(o, lambda step: 2 * [6e-4 * min(step + 1, 4) / 4])),
    # Which yields before it steps, and rises until the third.
    "OneCycleLR": (4, lambda o: rates_of_steps(o, OneCycleLR(o, 6e-4, 10, cycle_momentum=False), range(8))),
    "a share for each group": (3, lambda o: by_hand(o, lambda step: [3e-4 * min(step, 2) / 2, 4.5e-5])),
}


@pytest.mark.parametrize("name", OF_ADAMW)
def test_adamws_rate_for_matrices_is_told_after_warmup(name: str) -> None:
    """At 6e-4 Muon hardly trains: the commonest mistake was silent, because 6e-4 is below AdamW's own rate here."""
    step, run = OF_ADAMW[name]
    [(number, said)] = warned(run(optimizer_of_both(MUON, 3e-3)))
    assert number == step
    assert "0.02" in said and any(rate in said for rate in ("0.0006", "0.0003", "0.01")), said


def test_a_rate_with_adamws_factor_is_no_fault() -> None:
    ours = optimizer_of_both(MUON, 3e-3, adjust_lr_fn="match_rms_adamw")
    assert warned(by_hand(ours, lambda step: [6e-4, 6e-4])) == []


# On every engine


def optimizer_in(run: Engine) -> Any:
    return run.made.basic_optimizer if isinstance(run, UnderDeepSpeed) else run.optimizer


ON_ENGINES = ["OneCycleLR", "LambdaLR", "ReduceLROnPlateau", "SequentialLR", "DeepSpeed's OneCycle"]


@on_ranks(2)
@pytest.mark.parametrize(
    ("engine", "name"),
    with_full(
        [(engine, ON_ENGINES[n % len(ON_ENGINES)]) for n, engine in enumerate(ENGINES)],
        itertools.product(ENGINES, ON_ENGINES),
    ),
)
def test_a_schedule_trains_as_with_torchs_optimizers(engine: str, name: str) -> None:
    """Bit for bit: the weights show which rates were used."""
    single = Reference(ExactLM())
    schedules = [SCHEDULES[name](each, alone(group)) for group, each in enumerate(single.optimizers)]
    with running(Cell(engine), ExactLM()) as run:
        schedule = SCHEDULES[name](optimizer_in(run), all_of)
        for step in range(4):
            run.train(range(step, step + 1))
            single.step(shares(step, 2), 2)
            for each in (schedule, *schedules):
                moved(each, step)
        assert largest_difference(run.weights(), single.model) == 0.0


@on_ranks(2)
@cells(engine=ENGINES)
def test_a_rate_that_is_a_tensor_is_followed(engine: str) -> None:
    """Fixed: A rate that is a tensor was read once. Where its owner changes it in place, and after the state was
    loaded."""
    single = Reference(ExactLM())
    with running(Cell(engine), ExactLM()) as run:
        optimizer = optimizer_in(run)
        given = [torch.tensor(group["lr"], dtype=torch.float64) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, given):
            group["lr"] = rate
        for step in range(3):
            for number, rate in enumerate(given):
                rate.mul_(0.5 + number)
                single.optimizers[number].param_groups[0]["lr"] *= 0.5 + number
            run.train(range(step, step + 1))
            single.step(shares(step, 2), 2)
        assert largest_difference(run.weights(), single.model) == 0.0


def test_a_tensor_that_is_given_stays_the_rate(tmp_path: Path) -> None:
    """Also in overrides, and after a load of numbers; one that is no rate is refused."""
    rate, overrides = torch.tensor(0.02), [{"params": "layers.2.*", "matrix": {"lr": torch.tensor(0.01)}}]
    optimizer = LayerWiseOptimizer(UnevenLM(), lr=rate, elementwise_lr=rate, overrides=overrides, report=False)
    lone = LayerWiseMuon(UnevenLM().parameters(), lr=rate, adamw={"lr": rate})
    assert optimizer.param_groups[1]["lr"] is overrides[0]["matrix"]["lr"]
    assert all(group["lr"] is rate for group in (*optimizer.param_groups[::2], *lone.param_groups))
    numbers = [{"params": "layers.2.*", "matrix": {"lr": 0.5}}]
    LayerWiseOptimizer(UnevenLM(), lr=0.1, overrides=numbers, report=False).save_state_dict(tmp_path)
    optimizer.load_state_dict_from(tmp_path)
    assert [group["lr"] for group in optimizer.param_groups] == [torch.tensor(r) for r in (0.1, 0.5, 1e-3)]
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    for wrong in (torch.tensor([0.1, 0.2]), torch.tensor(-1.0), torch.tensor(float("nan"))):
        with pytest.raises(ValueError, match="lr: input should be"):
            optimizer_of_both(wrong)


TOLD = "all param groups have the learning rate 0.0006, also those that were made with 0.02"


@on_ranks(2)
@cells(engine=[*ENGINES, "modules"])
def test_one_rate_over_unlike_groups_is_told_once(engine: str) -> None:
    """Fixed: A schedule wrote one rate over those of Muon and AdamW. One rate over unlike groups is told once, on every
    engine."""
    with running_as(engine) as (run, optimizer):
        for step in range(3):
            for group in optimizer_in(run).param_groups:
                group["lr"] = 6e-4
            train = partial(run.train, range(step, step + 1)) if optimizer is None else optimizer.step
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                train()
            assert sum(TOLD in str(each.message) for each in told) == (step == 1)


@contextlib.contextmanager
def running_as(engine: str) -> Iterator[tuple[Engine, ModuleOptimizers | None]]:
    with running(Cell(engine.replace("modules", "plain")), ExactLM()) as run:
        yield run, ModuleOptimizers({"all": run.optimizer}) if engine == "modules" else None


@on_ranks(2)
@cells(engine=ENGINES)
def test_a_load_says_which_rates_are_others_than_the_table_says(engine: str, tmp_path: Path) -> None:
    """Fixed: A resumed run trained at its checkpoint's rates, and had printed the constructor's alone. Each change is
    said once. A load of what the optimizer has itself, as Accelerate does it, is none, whatever a schedule wrote."""
    with running(Cell(engine), ExactLM()) as run:
        for group, factor in zip(optimizer_in(run).param_groups, (0.5, 1.0)):
            group["lr"] *= factor
        run.train(range(1))
        run.save(str(tmp_path))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), running(Cell(engine, options={"report": True}), ExactLM()) as run:
        made = printed.getvalue()
        for group in optimizer_in(run).param_groups:  # as a schedule does
            group["lr"] *= 0.1
        optimizer = run.optimizer
        if engine in ("plain", "fsdp2"):
            optimizer.load_state_dict(optimizer.state_dict())
        assert printed.getvalue() == made
        for _ in range(2):
            run.load(str(tmp_path))
    told = " ".join(printed.getvalue().removeprefix(made).split())
    said = "Loaded: lr 0.01, not 0.02, for 4 parameter(s) of muon."
    assert (told.count("Loaded:"), said in told) == ((1, True) if dist.get_rank() == 0 else (0, False)), told


WRONG = r"param group 0 \(muon\).*adjust_lr_fn: input should be 'original', .*found 'spectral_unclamp'"


@on_ranks(2)
@cells(engine=[*ENGINES, "modules"])
def test_a_wrong_option_written_by_hand_changes_nothing(engine: str) -> None:
    """Fixed: A wrong option that code wrote into a param group was found after some weights had changed. On one rank it
    is told on all of those that report to each other in every step."""
    with running_as(engine) as (run, optimizer):
        run.train(range(1))
        before, group = run.weights(), optimizer_in(run).param_groups[0]
        if dist.get_rank() == 1 or engine.startswith(("zero", "fsdp2")):
            group["adjust_lr_fn"] = "spectral_unclamp"
        with pytest.raises((ValueError, RuntimeError), match=re.compile(WRONG, re.DOTALL)):
            if optimizer is None:
                run.train(range(1, 2))
            else:
                run.backward(shares(1, 2)[:1])
                optimizer.step()
        assert largest_difference(run.weights(), before) == 0.0


@on_ranks(2)
@cells(engine=["plain", "fsdp2", "modules"])
def test_a_wrong_option_in_a_state_dict_is_refused_on_all_ranks(engine: str) -> None:
    """Fixed: A wrong option in a state dict was found after some weights had changed, or never."""
    with running_as(engine) as (run, of_modules):
        optimizer = of_modules or run.optimizer
        run.train(range(1))
        saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(run.optimizer.param_groups[0])
        if dist.get_rank() == 1:
            (saved["all"] if engine == "modules" else saved)["param_groups"][0].update(
                lr=0.5, adjust_lr_fn="spectral_unclamp"
            )
        with pytest.raises((ValueError, RuntimeError), match="adjust_lr_fn: input should be 'original'"):
            optimizer.load_state_dict(saved)
        assert run.optimizer.param_groups[0]["lr"] == before["lr"]


@on_ranks(2)
@cells(engine=[*ZERO, *OWNED])
def test_wrong_option_in_deepspeeds_files_is_refused(engine: str, tmp_path: Path) -> None:
    """A wrong option in DeepSpeed's files is refused on all ranks."""
    with running(Cell(engine), ExactLM()) as run:
        run.train(range(1))
        run.save(str(tmp_path))
        stage = int(engine[-1])
        file = next(tmp_path.glob(f"*/{'*zero_pp_rank_0*optim' if stage else 'mp_rank_00_model'}_states.pt"))
        if dist.get_rank() == 0:
            saved = torch.load(file, weights_only=False)
            zero = saved["optimizer_state_dict" if stage else "optimizer"]
            inner = (
                zero if "param_groups" in zero else zero.get("base_optimizer_state", zero.get("optimizer_state_dict"))
            )
            inner["param_groups"][0]["adjust_lr_fn"] = "spectral_unclamp"
            torch.save(saved, file)
        dist.barrier()
        run.train(range(1, 2))
        before = run.weights()
        with pytest.raises((ValueError, RuntimeError), match="adjust_lr_fn: input should be 'original'"):
            run.load(str(tmp_path))
        assert largest_difference(run.weights(), before) == 0.0


# DeepSpeed's schedulers or torch's under DeepSpeed, by configuration, where they keep the ratio between Muon's rate and
# AdamW's in place of one number over both; as instances, or as callables
TRAINED, STEPS = (zero.MUON["lr"], zero.ADAMW["lr"]), 6
CONFIGURED = {
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
    *((2, "zero", name) for name in CONFIGURED),
    *((stage, "zero", name) for stage, name in zip((0, 1, 3), AT_EVERY_STAGE)),
    *((1, "owned", name) for name in ("OneCycle", "OneCycleLR", "WarmupLR")),
]


def on_one_process(name: str, params: dict[str, Any], group: int) -> list[float]:
    """The rates that the scheduler makes of one optimizer alone, by step. Numbers are Muon's."""
    one = [torch.nn.Parameter(torch.zeros(1, 1))]
    optimizer = torch.optim.AdamW(one, lr=TRAINED[group], betas=zero.ADAMW["betas"])
    scheduler: Any = getattr(lr_schedules, name, None) or getattr(lr_scheduler, name)
    if name == "WarmupDecayLR":
        params = {"warmup_max_lr": 0.001, **params}
    own = {key: value[group] for key, value in params.items() if isinstance(value, list)}
    scale = TRAINED[group] / TRAINED[0]
    shared = {key: value * scale for key, value in params.items() if key.endswith("_lr") and key not in own}
    schedule = scheduler(optimizer, **{**params, **shared, **own})
    return [rate for (rate,) in rates_of_steps(optimizer, schedule, range(STEPS + 1))][1:]


@pytest.mark.parametrize(
    ("stage", "storage", "schedule"),
    with_full(BY_CONFIG, [(stage, "zero", name) for stage in (0, 1, 3) for name in AT_EVERY_STAGE]),
)
@on_ranks(2)
def test_schedulers_by_config_keep_the_ratio(stage: int, storage: str, schedule: str) -> None:
    """Schedulers by config keep the ratio, and cycle no momentum. DeepSpeed's OneCycle warns that it cycles none, as no
    half has both."""
    name, params = schedule.partition("-")[0], CONFIGURED[schedule]
    expected = [*zip(*(on_one_process(name, params, group) for group in (0, 1)))]
    assert len(set(expected)) > 1, "the schedule must move to be tested"
    settings = zero.config(stage, **(zero.OWNED if storage == "owned" else {})) | {
        "scheduler": {"type": name, "params": params}
    }
    given = copy.deepcopy(settings)
    with zero.engine_for(settings) as engine, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*all param groups have")
        for step, both in enumerate(expected):
            zero.train(engine, range(step, step + 1))
            assert engine.get_lr() == rates(engine.basic_optimizer) == pytest.approx(both)
        muon, adamw = engine.basic_optimizer.param_groups
        assert (muon["momentum"], adamw["betas"]) == (0.95, zero.ADAMW["betas"])
        assert "betas" not in muon and "momentum" not in adamw
    assert settings == given, "the user's configuration stays as it was"


@pytest.mark.parametrize("storage", ["zero", "owned"])
@on_ranks(2)
def test_a_configured_rate_of_adamws_is_told(storage: str) -> None:
    """``warmup_max_lr`` is the matrices' here: one for AdamW left both at a share of it, without a word."""
    settings = zero.config(2, **(zero.OWNED if storage == "owned" else {}))
    params = {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 4, "warmup_type": "linear"}
    settings["scheduler"] = {"type": "WarmupLR", "params": params}
    with zero.engine_for(settings) as engine:
        told = warned(zero.train(engine, range(step, step + 1)) for step in range(8))
    [(step, said)] = [each for each in told if "hardly move" in each[1]]
    assert step == 7 and "made with the learning rate 0.02, has trained at 0.0003 at most" in said


@on_ranks(2)
def test_a_schedule_on_a_metric_is_given_as_a_callable() -> None:
    with zero.engine_for(zero.config(2), lr_scheduler=partial(ReduceLROnPlateau, factor=0.5, patience=1)) as engine:
        for metric, factor in ((3.0, 1.0), (2.0, 1.0), (2.0, 1.0), (2.0, 0.5), (1.0, 0.5)):
            engine.backward(engine(*zero.batch_shares(0, 2)[0]))
            engine.step(lr_kwargs={"metrics": metric})
            assert rates(engine.basic_optimizer) == pytest.approx([rate * factor for rate in TRAINED])


@on_ranks(2)
@pytest.mark.parametrize(("storage", "stage"), [("zero", 1), ("zero", 3), ("owned", 2)])
@pytest.mark.parametrize("how", ["factors, by a callable", "a group's rate, by an instance"])
def test_schedules_move_both_rates(storage: str, stage: int, how: str) -> None:
    """Schedules of factors and of a group's rate move both rates. A floor is a part of the rate in the optimizer's
    defaults, and a group's rate is for both its halves."""
    settings, model = zero.settings_for(storage, stage), UnevenLM()
    options = settings.pop("optimizer")["params"]
    make: Any = partial(get_cosine_with_min_lr_schedule_with_warmup, num_warmup_steps=2, num_training_steps=6)
    make, single_of, peaks = partial(make, min_lr=MUON / 2), partial(make, min_lr_rate=0.5), TRAINED
    optimizer: Any = partial(LayerWiseMuon, **options)
    if how.startswith("a group"):
        make, peaks = partial(CosineAnnealingLR, T_max=8), (0.005, 0.005)
        single_of, optimizer = make, optimizer([{"params": model.parameters(), "lr": 0.005}])
    singles = [torch.optim.SGD([torch.zeros(1)], lr=rate) for rate in peaks]
    schedules = [single_of(single) for single in singles]
    with zero.engine_for(settings, model, optimizer=optimizer, lr_scheduler=make) as engine:
        for step in range(4):
            zero.train(engine, range(step, step + 1))
            for single, schedule in zip(singles, schedules):
                single.step()
                schedule.step()
            assert rates(engine.basic_optimizer) == pytest.approx([single.param_groups[0]["lr"] for single in singles])


@on_ranks(2)
def test_scheduler_built_too_early_is_refused() -> None:
    """A scheduler built before the model was known is refused where groups change. A model of 2-D parameters only: one
    group until the embedding and the head are known for what they are."""
    settings = zero.config(2)
    options = settings.pop("optimizer")["params"]
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 5, bias=False))
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
    """Fixed: The first steps of a warm-up changed nothing, without a word."""
    settings = zero.settings_for("zero", 2) | {"scheduler": {"type": kind, "params": params}}
    with mock.patch.object(logger, "warning") as said, zero.engine_for(settings) as engine:
        weights = [zero.full_weights(engine)]
        for step in range(3):
            zero.train(engine, range(step, step + 1))
            weights.append(zero.full_weights(engine))
        assert [same(*pair) for pair in itertools.pairwise(weights)] == [step < idle for step in range(3)]
        lines = [call.args[0] for call in said.call_args_list if call.args[0].startswith(f"{kind}: this step has a")]
        assert len(lines) == (idle > 0 and dist.get_rank() == 0)
