"""Optimizers by their class: what is accepted, and that nothing they keep is lost."""

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.cli.rule_facts import rule_facts
from lwopt_backend.groups.optimizer_classes import EMERGING
from lwopt_backend.groups.param_groups import ElementwiseGroups
from lwopt_backend.groups.registry import new_state, options_of
from lwopt_backend.rules.protocol import TorchOptimizer
from lwopt_backend.runtime import elementwise as cautious_decay
from lwopt_backend.runtime.elementwise import Counters, ElementwiseStepper
from lwopt_backend.runtime.pieces import Slices
from tests.support import zero
from tests.support.on_ranks import on_ranks
from tests.support.references import ELEMENTWISE, SECTIONS, gradients, random, state_of


class Own(torch.optim.SGD):
    """What the classes here have in common: they scale the gradient by something that grows."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None, factor: float = 1.0) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] * factor)

    def state_of_first(self) -> dict[str, Any]:
        return self.state[self.param_groups[0]["params"][0]]


class Forgetful(Own):
    """Keeps a tensor where no checkpoint looks."""

    def step(self, closure: Any = None) -> None:
        self.velocity = self.param_groups[0]["params"][0].grad.clone()
        super().step()


class Opaque(Own):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state_of_first()["helper"] = object()


class History(Own):
    """Changes an attribute in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.history: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.history.append(1)
        super().step(factor=len(self.history))


class OwnSchedule(Own):
    """Changes its rate, at once or in a later step."""

    changes_in = 1

    def step(self, closure: Any = None) -> None:
        state = self.state_of_first()
        state["step"] = state.get("step", 0) + 1
        super().step()
        if state["step"] == self.changes_in:
            self.param_groups[0]["lr"] *= 0.9


class LaterSchedule(OwnSchedule):
    changes_in = 3


class Communicates(Own):
    """As Keller Jordan's Muon on several ranks: every rank must call it."""

    def step(self, closure: Any = None) -> None:
        dist.all_reduce(self.param_groups[0]["params"][0].grad)
        super().step()


class FailsLater(Own):
    """Cannot be made with the state that it had."""

    def step(self, closure: Any = None) -> None:
        if self.state_of_first():
            raise RuntimeError("a second step")
        self.state_of_first()["step"] = 1


KINDS = ("plain", "fsdp2", "zero")
REFUSED = [
    ("plain", Forgetful, "which checkpoints save; found more in its attribute 'velocity'"),
    ("plain", Opaque, "found a object at 'state.helper', which checkpoints do not hold"),
    ("plain", History, "which checkpoints save; found more in its attribute 'history'"),
    ("plain", OwnSchedule, "expected an unchanged argument 'lr', found a class that changes it"),
    *((engine, FailsLater, "a second step") for engine in KINDS),
    *((engine, Communicates, "of one rank alone, found the collective c10d.allreduce_") for engine in KINDS),
]


@contextlib.contextmanager
def made(engine: str, section: dict[str, Any]) -> Iterator[Any]:
    """The optimizer of a model with one matrix."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    if engine == "zero":
        settings = {**zero.config(1), "optimizer": {"type": "LayerWise", "params": {"matrix": section, "include": "*"}}}
        with zero.engine_for(settings, model) as engine_of_deepspeed:
            yield engine_of_deepspeed
        return
    if engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    yield LayerWiseOptimizer(model, section, include="*", report=False)


@pytest.mark.on_gloo  # that transport's own operations would be seen
@on_ranks(2)
@pytest.mark.parametrize(("engine", "cls", "message"), REFUSED)
def test_class_that_cannot_be_run_is_refused(engine: str, cls: Any, message: str) -> None:
    """A class that cannot be run is refused when the optimizer is made. On all ranks, of which one would step the
    matrix."""
    section = {"name": "torch_optimizer", "class": f"{__name__}.{cls.__name__}", "lr": 0.1}
    with pytest.raises((ValueError, RuntimeError)) as caught, made(engine, section):
        pass
    assert f"{__name__}.{cls.__name__} cannot train matrix '0.weight': " in str(caught.value)
    assert message in str(caught.value)


def step(optimizer: Any, model: nn.Module) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_a_rate_that_a_class_changes_later_is_an_error_then() -> None:
    """A schedule would write it without effect."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    section = {"name": "torch_optimizer", "class": LaterSchedule, "lr": 0.1}
    optimizer = LayerWiseOptimizer(model, section, include="*", report=False)
    for _ in range(2):
        step(optimizer, model)
    with pytest.raises(ValueError, match="LaterSchedule cannot train matrix '0.weight': expected an unchanged .* 'lr'"):
        step(optimizer, model)


class OfOthers(Own):
    """A base class with an argument of its subclasses' authors."""

    def __init__(self, params: Any, lr: float = 0.1, factor: float = 1.0, hidden: Any = None) -> None:
        super().__init__(params, lr)
        self.factor = factor

    def step(self, closure: Any = None) -> None:
        super().step(factor=self.factor)


UNSET = object()


NAMED = "emerging_optimizers.mine"


class Strict(OfOthers):
    """As heavyball 3.2.1: it checks its keywords, and a default is a value that no copy equals."""

    def __init__(self, params: Any, lr: float = 0.1, palm: Any = UNSET, **keywords: Any) -> None:
        if not keywords.keys() <= {"factor"}:
            raise TypeError(f"unknown keyword arguments: {sorted(keywords)}")
        super().__init__(params, lr, hidden=1, **{"factor": 3.0 if palm is UNSET else 5.0, **keywords})


class OwnDefault(Own):
    """Has another default than its base class."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **{"lr": 0.3, **keywords})


class NeedsNorm(Own):
    """As Emerging-Optimizers' MuonHyperball."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if any(not param.norm() for param in self.param_groups[0]["params"]):
            raise ValueError("every weight must have a norm")


class TensorInGroup(Own):
    """Changes a tensor in its group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["count"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] += 1
        super().step(factor=float(self.param_groups[0]["count"]))


CALLED: list[tuple[type[Own], dict[str, Any]]] = [
    *((Strict, given) for given in ({}, {"factor": 2.0}, {"palm": True})),
    *((OwnDefault, given) for given in ({}, {"lr": 0.2})),
    *((cls, dict[str, Any]()) for cls in (NeedsNorm, TensorInGroup)),
]


@pytest.mark.parametrize(("cls", "given"), CALLED)
def test_class_is_called_with_what_it_takes(cls: Any, given: Any) -> None:
    """A class is called with what was written and what its own constructor takes. And goes on from all that it has
    kept."""
    model, twin = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    twin.load_state_dict(model.state_dict())
    section = {"name": "torch_optimizer", "class": cls, **given}
    ours, theirs = LayerWiseOptimizer(model, section, include="*", report=False), cls(twin.parameters(), **given)
    for _ in range(3):
        step(ours, model)
        step(theirs, twin)
        assert torch.equal(model.weight, twin.weight)
        ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert {"factor", "palm", "hidden"} & ours.param_groups[0].keys() == {*given} - {"lr"}


class Rescales(Own):
    """As Emerging-Optimizers' MuonHyperball with a radius."""

    def __init__(self, params: Any, lr: float = 0.1, radius: float | None = None) -> None:
        super().__init__(params, lr)
        if radius is not None:
            self.param_groups[0]["params"][0].data.mul_(radius)


def test_a_class_that_changes_weights_as_it_is_made_is_refused() -> None:
    """It would change them in every step."""
    options_of("torch_optimizer", {"class": Rescales})
    with pytest.raises(ValueError, match="Rescales refuses these arguments: weights change as it is made"):
        options_of("torch_optimizer", {"class": Rescales, "radius": 2.0})


def test_nvidias_registry_names_classes() -> None:
    """A class has its name in NVIDIA's registry wherever a rule is named. `make test-peers` trains NVIDIA's own."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    params = [{"params": model[0].weight, "matrix": {"name": NAMED}}, {"params": [model[1].weight, model[2].weight]}]
    with mock.patch.dict(EMERGING, {NAMED: f"{__name__}.OwnDefault"}):
        overrides = [{"params": "2.*", "matrix": {"name": "adamh"}}]
        made = LayerWiseOptimizer(model, NAMED, params=params, overrides=overrides, include="*", report=False)
        (listed,) = rule_facts(NAMED)["rules"]
        with pytest.raises(ValueError, match="is the name of a class, and 'torch.optim.SGD' another; leave one out"):
            LayerWiseOptimizer(model, {"name": NAMED, "class": "torch.optim.SGD"}, report=False)
    of_class, overridden = {"rule": "torch_optimizer", "class": f"{__name__}.OwnDefault", "lr": 0.3}, {"rule": "adamh"}
    for group, expected in zip(made.param_groups, (of_class, of_class, overridden), strict=True):
        assert group.items() >= expected.items()
    assert (listed["name"], [option["name"] for option in listed["options"]]) == (NAMED, ["lr"])


@pytest.mark.parametrize(("missing", "told"), [("emerging_optimizers", "'emerging-opt"), ("triton.language", "triton")])
def test_names_that_nvidias_registry_lacks_are_told(missing: str, told: str) -> None:
    """A name that the registry lacks, and a package that is not there, are told."""
    with pytest.raises(
        ValueError, match="unknown rule 'emerging_optimizers.saop'; did you mean 'emerging_optimizers.soap"
    ):
        LayerWiseOptimizer(nn.Linear(3, 2), "emerging_optimizers.saop", report=False)
    absent = mock.patch.object(importlib, "import_module", side_effect=ModuleNotFoundError(name=missing))
    with absent, pytest.raises(ValueError, match=f"cannot be imported: .*; run: pip install {told}"):
        LayerWiseOptimizer(nn.Linear(3, 2), {"name": "emerging_optimizers.soap", "lr": 0.1}, report=False)


class OnTheDevice(Own):
    """Its group has tensors where a host would wait to read them: a rate, and in a list a count of the steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0].update(rate=torch.zeros((), device="meta"), counts=[torch.zeros((), device="meta")])

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["counts"][0].add_(1)
        super().step()


def test_tensors_of_a_group_are_not_read_by_the_host() -> None:
    """Tensors of a group are not read to see whether they change."""
    rule, state = TorchOptimizer(OnTheDevice), dict[str, Any]()
    with mock.patch.object(Tensor, "__repr__", side_effect=AssertionError("a host would wait")):
        for _ in range(2):
            rule.step(torch.ones(2, 2), torch.ones(2, 2), state)
    assert [*state["group"]] == ["counts"]


def test_a_registered_class_has_the_defaults_of_its_constructor() -> None:
    assert options_of("rmsprop", {"alpha": 0.5})["centered"] is False


class Keywords(torch.optim.AdamW):
    def __init__(self, params: Any, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_class_with_keywords_takes_arguments_of_its_base() -> None:
    """A class with keywords has its own arguments, and those of its base."""

    class Inside(torch.optim.SGD):
        pass

    given = {"class": Keywords, "lr": 0.5, "scale": 2.0, "weight_decay": 0.0}
    options = options_of("torch_optimizer", given)
    assert options == {"class": f"{__name__}.Keywords", "scale": 2.0, "lr": 0.5, "weight_decay": 0.0}
    for wrong, message in (
        ({**given, "amsgrat": True}, "unknown key 'amsgrat'; did you mean 'amsgrad'"),
        ({"class": WithoutRate}, "'torch_optimizer' has no option 'lr', which schedules write to every"),
        ({"class": Inside}, "expected one at the top of a module, .* found .*Inside, defined inside a"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of("torch_optimizer", wrong)


CALLS = [  # the parts that are stepped together, call by call, and how many steps each part then has made
    ([[0, 1, 2]] * 4, [4, 4, 4]),
    ([[2], [0, 1]] * 4, [4, 4, 4]),
    ([[0], [0, 1], [0, 1]], [3, 2, 0]),  # what had no gradient in some steps is younger than the others
]


class CountsForOne(Own):
    """Counts steps in the state of the last parameter only, as DeepSpeed's FusedAdam; and in its group."""

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["calls"] = group.get("calls", 0) + 1
        for param in group["params"]:
            state = self.state[param]
            state.setdefault("step", 0)
        state["step"] += 1
        super().step(factor=state["step"] + group["calls"])


@pytest.mark.parametrize(("calls", "counts"), CALLS)
def test_every_part_goes_by_its_own_count_however_it_is_stepped(calls: list[list[int]], counts: list[int]) -> None:
    value, new = torch.zeros(3), state_of(step=torch.int64, calls=torch.int64)
    states = [new(value[i : i + 1], {}) for i in range(3)]
    stepper = ElementwiseStepper(CountsForOne, Counters({"step": int}, {"calls": ("calls", int)}))
    for together in calls:
        stepper.step({"lr": 1.0}, [Slices(value[i : i + 1], torch.ones(1), states[i]) for i in together])
    assert [(int(state["step"]), int(state["calls"])) for state in states] == [(n, n) for n in counts]
    assert value.tolist() == [-sum(range(2, 2 * n + 1, 2)) for n in counts]


class PutsAnother(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                before = self.state[param].get("total", torch.zeros_like(param))
                self.state[param]["total"] = before + param.grad
                param.sub_(self.state[param]["total"], alpha=group["lr"])


def test_replaced_state_tensors_reach_the_stored_state() -> None:
    """Tensors that are put in place of others reach where state is stored."""
    stored = torch.zeros(4)
    stepper = ElementwiseStepper(PutsAnother, Counters())
    for _ in range(3):
        stepper.step({"lr": 0.1}, [Slices(torch.zeros(2), torch.ones(2), {"total": stored[1:3]})])
    assert stored.tolist() == [0.0, 3.0, 3.0, 0.0]


# Steps of chunks, and cautious weight decay
SHAPE = (13, 7)
GRADS = gradients(SHAPE, 20)


def group_of(rule: str, **given: Any) -> dict[str, Any]:
    options = {"weight_decay": 0.1, "weight_decay_form": "cautious", **given}
    return {"rule": rule, **options_of(rule, options)}


def trained(group: dict[str, Any], start: Tensor) -> Tensor:
    value, optimizers = start.clone(), ElementwiseGroups()
    state = new_state(value, group)
    for grad in GRADS:
        optimizers.step(0, group, [Slices(value, grad.clone(), state)])
    return value


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_a_parameter_that_is_stepped_in_chunks_has_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters advance once. A chunk has several parts and no more than its elements."""
    group, start = group_of(rule, lr=1e-2), random(SHAPE, 1)
    whole = trained(group, start)
    monkeypatch.setattr(cautious_decay, "CHUNK", 20)
    assert torch.equal(trained(group, start), whole)
    parts = [Slices(random((n,), n), random((n,), n), {}) for n in (8, 8, 8, 50)]
    chunks = [[piece.value.numel() for piece in some] for some in cautious_decay._chunks(parts)]
    assert chunks == [[8, 8], [8], [20], [20], [10]]


def test_an_update_too_small_to_change_a_weight_still_has_a_sign() -> None:
    value = torch.tensor([1e6, 1e6])
    group = group_of("lion", lr=1e-4, weight_decay=100.0)
    ElementwiseGroups().step(0, group, [Slices(value, torch.tensor([1.0, -1.0]), new_state(value, group))])
    assert value.tolist() == [pytest.approx(0.99e6), 1e6]


WRONG = [
    ("rmsprop", {"weight_decay_form": "cautious"}, "unknown key 'rmsprop.weight_decay_form'"),
    ("adamw", {"weight_decay_form": "cautius"}, "input should be 'decoupled' or 'cautious'; found 'cautius'"),
    ("lion", {"weight_decay_form": "cautius"}, "input should be 'own' or 'cautious'; found 'cautius'"),
    ("sgd", {"momentum": 0.9, "dampening": 0.5}, "expected 0, because momentum starts with zeros here .* found 0.5;"),
    ("torch_optimizer", {}, "a rule of the other kind; .*; register_elementwise adds a class"),
]


@pytest.mark.parametrize(("rule", "given", "message"), WRONG)
def test_wrong_element_wise_options_are_refused(rule: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerWiseOptimizer(nn.Linear(3, 2), elementwise={"name": rule, **given}, report=False)


@on_ranks(2)
@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
@pytest.mark.parametrize("rule", ["soap", "shampoo", "a class", "lion", "sgd"])
def test_making_an_optimizer_draws_and_seeds_nothing(engine: str, rule: str) -> None:
    """torch.manual_seed also seeds every accelerator: dropout would then be the same on all ranks."""
    torch.manual_seed(5 + dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    if engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    before = torch.get_rng_state()
    matrix = SECTIONS.get(rule, {"name": "muon", "lr": 0.02})
    with mock.patch("torch.manual_seed") as seeded, mock.patch("torch.random.manual_seed") as also_seeded:
        optimizer = LayerWiseOptimizer(model, matrix=matrix, elementwise=ELEMENTWISE.get(rule, "adamw"), report=False)
        optimizer.state_dict()
    assert torch.equal(torch.get_rng_state(), before) and not seeded.called and not also_seeded.called
