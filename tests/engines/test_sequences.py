"""Random sequences of what training loops do, on every engine, beside one process of torch.optim.

The loss is linear in the weights, so a gradient is a rank's factor times whole numbers. Factors are multiples of 24:
their means over 1 to 4 ranks and 2 micro-batches are whole numbers as well. No sum rounds in any order, and the right
difference is 0.0. A failure prints the shortest of its sequences that still fails; ``replay`` runs one.
"""

import contextlib
import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ExponentialLR

from tests.support import fsdp2, references
from tests.support.cells import with_full
from tests.support.models import largest_difference, signed_sum
from tests.support.on_ranks import on_ranks
from tests.support.ranks import gathered
from tests.support.references import full_weights, torchs
from tests.support.zero import engine_for, settings_for

NAMES = ("first.weight", "last.weight", "last.bias", "spare.weight")
SIZES = dict(zip(NAMES, (8.0, 4.0, 16.0, 2.0)))
Event = tuple[Any, ...]
Passes = list[tuple[list[float], list[str]]]  # of each backward pass, the ranks' factors and the parameters used


def is_of_deepspeed(engine: str) -> bool:
    return engine.partition(" ")[2].isdigit()


class Summed(nn.Linear):
    def forward(self, sizes: dict[str, float]) -> Tensor:
        """Sums of its parameters, with signs and ``sizes``."""
        return torch.stack([signed_sum(self.get_parameter(name), size) for name, size in sizes.items()]).sum()


class Net(nn.Module):
    """Its loss is ``factor`` times sums of the parameters that a pass ``uses``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.spare = Summed(12, 12, bias=False), Summed(9, 4), Summed(5, 7, bias=False)

    def forward(self, factor: float, uses: list[str]) -> Tensor:
        sums = []
        for module, layer in self.named_children():
            sizes = {name.partition(".")[2]: SIZES[name] for name in uses if name.startswith(module)}
            if sizes:
                sums.append(layer(sizes))
        return torch.stack(sums).sum() * factor


class One:
    """The truth. Under DeepSpeed passes end in a step; in its own storage, missing gradients are then zeros."""

    def __init__(self, engine: str) -> None:
        self.steps, self.fills = is_of_deepspeed(engine), engine.startswith("zero")
        self.model, self.saved = Net(), list[Any]()
        self.optimizers = torchs(self.weights(), [name for name in NAMES if name != "last.bias"])
        self.schedulers = [ExponentialLR(each, 0.5) for each in self.optimizers]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def passes(self, passes: Passes) -> None:
        for factors, uses in passes:
            self.model(sum(factors) / len(factors), uses).backward()
        if self.steps:
            self.step()
            self.clear("both", True)

    def norm(self) -> float:
        grads = [p.grad for group in self.groups for p in group["params"] if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def step(self) -> None:
        params = [p for group in self.groups for p in group["params"]]
        for param in params if self.fills else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if all(bool(param.grad.isfinite().all()) for param in params if param.grad is not None):
            for optimizer in self.optimizers:
                optimizer.step()

    def clear(self, whose: str, set_to_none: bool) -> None:
        for each in (*self.optimizers, self.model) if whose == "both" else [self.model]:
            each.zero_grad(set_to_none=set_to_none)

    def save(self, folder: str) -> None:
        self.saved = copy.deepcopy([each.state_dict() for each in (self.model, *self.optimizers)])

    def load(self, folder: str, anew: bool) -> None:
        for each, state in zip((self.model, *self.optimizers), copy.deepcopy(self.saved)):
            each.load_state_dict(state)

    def end(self) -> None:
        """Nothing is held."""


class Ranked(One):
    """Plain PyTorch or FSDP2."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.make()

    def make(self) -> None:
        self.model, on_fsdp2 = Net(), self.engine.startswith("fsdp2")
        if on_fsdp2:
            fully_shard(self.model, mesh=fsdp2.mesh_of())
        lazy = {"overlap_param_gather": True} if self.engine == "plain, lazy" else {}
        lazy |= {"keep_full_grads": True} if self.engine == "plain, kept" else {}
        made: Any = fsdp2.layer_wise(self.model, on_nonfinite="skip", **lazy)
        if self.engine == "fsdp2, attached":
            made.attach(self.model)
        self.optimizers, self.schedulers = [made], [ExponentialLR(made, 0.5)]

    def weights(self) -> dict[str, Tensor]:
        self.optimizers[0].synchronize()
        return fsdp2.weights_of(self.model)

    def passes(self, passes: Passes) -> None:
        for number, (factors, uses) in enumerate(passes):
            last = number == len(passes) - 1
            if self.engine.startswith("fsdp2"):
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            apart = not last and self.engine.startswith("plain")
            with self.optimizers[0].no_sync() if apart else contextlib.nullcontext():
                self.model(factors[dist.get_rank()], uses).backward()

    def norm(self) -> float:
        return float(self.optimizers[0].grad_norm())

    def step(self) -> None:
        self.optimizers[0].step()

    def save(self, folder: str) -> None:
        if self.engine.startswith("plain"):
            self.optimizers[0].save_state_dict(folder)
        else:
            super().save(folder)

    def load(self, folder: str, anew: bool) -> None:
        if anew:
            self.end()
            self.make()
        if self.engine.startswith("plain"):
            self.optimizers[0].load_state_dict_from(folder)
        else:
            super().load(folder, anew)

    def end(self) -> None:
        del self.optimizers, self.schedulers, self.model
        gc.collect()


class OnDeepSpeed(One):
    def __init__(self, engine: str, accumulation: int) -> None:
        storage, stage = engine.split()
        settings = settings_for(storage, int(stage), accumulation=accumulation)
        settings["optimizer"] = references.layer_wise("muon", storage=storage)
        self.ends = contextlib.ExitStack()
        self.made = self.ends.enter_context(engine_for(settings, Net()))
        self.model = self.made.module

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.made.optimizer.param_groups
        return groups

    def weights(self) -> dict[str, Tensor]:
        return full_weights(self.made)

    def passes(self, passes: Passes) -> None:
        for factors, uses in passes:
            self.made.backward(self.made(factors[dist.get_rank()] * len(passes), uses))  # it divides by their number
            self.made.step()

    def save(self, folder: str) -> None:
        self.made.save_checkpoint(folder)

    def load(self, folder: str, anew: bool) -> None:
        self.made.load_checkpoint(folder)

    def end(self) -> None:
        self.ends.close()


# What may happen


def scale(side: One, name: str) -> None:
    param = dict(side.model.named_parameters())[name]
    if param.grad is not None:
        param.grad.mul_(0.5)


def drop(side: One, name: str) -> None:
    dict(side.model.named_parameters())[name].grad = None


def freeze(side: One, name: str, on: bool) -> None:
    dict(side.model.named_parameters())[name].requires_grad_(not on)


def take_out(side: One, group: int) -> None:
    side.taken = side.groups[group]["params"].pop(0)  # type: ignore[attr-defined]


def put_back(side: One, group: int) -> None:
    side.groups[group]["params"].append(side.taken)  # type: ignore[attr-defined]


def write(side: One, key: str, factor: float) -> None:
    for group in side.groups:
        group[key] *= factor


def schedule(side: One) -> None:
    for scheduler in side.schedulers:
        scheduler.step()


def evaluate(side: One) -> None:
    made = side.made if isinstance(side, OnDeepSpeed) else side.model
    with torch.no_grad():
        made(1.0, [*NAMES])
    if hasattr(made, "reshard"):  # or FSDP2 would show its gathered copies as parameters: a thaw would be theirs
        made.reshard()


def clip_value(side: One, most: float) -> None:
    torch.nn.utils.clip_grad_value_(side.model.parameters(), most)


def clip(side: One) -> None:
    """At a norm that no gradient reaches, which multiplies by 1."""
    if isinstance(side, Ranked):
        side.optimizers[0].clip_grad_norm_(1e6)


EDITS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (scale, drop, freeze, take_out, put_back, write, schedule, evaluate, clip_value, clip)
}


def drawn(engine: str, ranks: int, seed: int) -> list[Event]:
    """A sequence that the pages allow. Under DeepSpeed a step follows its passes."""
    draw, events = random.Random(f"{engine} {ranks} {seed}"), list[Event]()
    of_deepspeed = is_of_deepspeed(engine)
    accumulation, is_saved, frozen, taken = draw.choice([1, 2]), False, False, None
    between = ["write", "evaluate", "save", "load"]
    if not of_deepspeed:
        between += ["schedule", "freeze", "take out"]
    for number in range(draw.randint(3, 7)):
        for what in draw.choices(between, k=draw.randint(0, 2)):
            if what == "write":
                events.append(("write", draw.choice(["lr", "weight_decay"]), draw.choice([0.5, 2.0])))
            elif what == "freeze":
                frozen = not frozen
                events.append(("freeze", "spare.weight", frozen))
            elif what == "take out":
                events.append(("take_out", draw.randint(0, 1)) if taken is None else ("put_back", taken))
                taken = events[-1][1] if taken is None else None
            elif what == "save" and taken is None:
                is_saved = True
                events.append(("save",))
            elif what == "load" and is_saved and taken is None:
                events += [("load", draw.random() < 0.5), ("freeze", "spare.weight", frozen)]
            elif what in ("schedule", "evaluate"):
                events.append((what,))
        uses = [name for name in NAMES if draw.random() < 0.75] or [NAMES[0]]
        uses = [NAMES[0], *uses] if uses == [NAMES[3]] else uses  # which may be frozen
        for _ in range(1 if of_deepspeed else draw.randint(1, 2)):
            factors = [[24.0 * draw.randint(-4, 4) for _ in range(ranks)] for _ in range(accumulation)]
            events.append(("passes", [(each, uses) for each in factors]))
            some = draw.choices(["norm", "scale", "drop", "clip_value", "clip"], k=draw.randint(0, 2))
            for what in () if of_deepspeed else some:
                more: Event = (draw.choice(uses),) if what in ("scale", "drop") else ()
                events.append((what, *(more or ((64.0,) if what == "clip_value" else ()))))
        if not of_deepspeed and draw.random() < 0.15:
            factors = [[float("nan") if rank == number % ranks else 24.0 for rank in range(ranks)]]
            events.append(("passes", [(factors[0], uses)]))
        if not of_deepspeed:
            events += [("step",), ("clear", "model" if draw.random() < 0.3 and taken is None else "both", True)]
    return events


def replay(engine: str, events: list[Event], folder: Path) -> str:
    """What is wrong after which event; nothing if nothing is. The same on all ranks."""
    passes = [event[1] for event in events if event[0] == "passes"]
    truth, accumulation = One(engine), len(passes[0]) if passes else 1
    side = OnDeepSpeed(engine, accumulation) if truth.steps else Ranked(engine)
    wrong = ""
    try:
        for number, (what, *given) in enumerate(events):
            try:
                found = [happen(each, what, given, folder) for each in (truth, side)]
                stepped = what == "step" or truth.steps
                if stepped and (difference := largest_difference(side.weights(), truth.weights())) != 0.0:
                    wrong = f"event {number}, {what}: weights differ by {difference}"
                if what == "norm" and found[1] != pytest.approx(found[0], rel=1e-6, nan_ok=True):
                    wrong = f"event {number}, norm: expected {found[0]}, found {found[1]}"
            except Exception as error:
                wrong = f"event {number}, {what}: {type(error).__name__}: {error}"
            if wrong := next(filter(None, gathered(wrong)), ""):
                break
    finally:
        side.end()
    return wrong


def happen(side: One, what: str, given: list[Any], folder: Path) -> Any:
    if what in EDITS:
        return EDITS[what](side, *given)
    return getattr(side, what)(*([str(folder)] if what in ("save", "load") else []), *given)


def shortened(events: list[Event], fails: Callable[[list[Event]], bool]) -> list[Event]:
    """Without every event that a failure does not need."""
    for number in reversed(range(len(events))):
        fewer = events[:number] + events[number + 1 :]
        if fails(fewer):
            events = fewer
    return events


ENGINES = ["plain", "plain, lazy", "plain, kept", "fsdp2", "fsdp2, attached"]
DEEPSPEED = [*(f"zero {stage}" for stage in range(4)), "owned 0", "owned 2"]
SEEDS, MORE = 4, 40  # of each engine in `make test`, and in `make test-full`


@pytest.mark.parametrize("engine", ENGINES + DEEPSPEED)
@pytest.mark.parametrize(("seed",), with_full([(seed,) for seed in range(SEEDS)], [(seed,) for seed in range(MORE)]))
@on_ranks(2)
def test_a_random_loop_trains_the_weights_of_one_process(engine: str, seed: int, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(10**6))
    events = drawn(engine, dist.get_world_size(), seed)
    if wrong := replay(engine, events, next(folders)):
        short = shortened(events, lambda fewer: bool(replay(engine, fewer, next(folders))))
        lines = "\n".join(f"    {event}," for event in short)
        pytest.fail(f"{wrong}\nreplay({engine!r}, [\n{lines}\n], folder) on {dist.get_world_size()} ranks")
