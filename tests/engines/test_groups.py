"""Param groups that a loop edits after the optimizer was made: as torch's take it, or an error in that step."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from tests.support import fsdp2, references
from tests.support.cells import cells
from tests.support.models import LinearLoss, largest_difference, signed_sum
from tests.support.on_ranks import on_ranks
from tests.support.references import full_weights, torchs
from tests.support.zero import engine_for, settings_for

ENGINES = ("plain", "plain, lazy", "fsdp2", "modules", "zero 0", "owned 0", "owned 2")


class Loop:
    """A step with the gradient times ``factor``, the param groups, the weights, and all norms of the gradient."""

    def __init__(
        self,
        step: Callable[[float], Any],
        groups: Any,
        weights: Callable[[], dict[str, Tensor]],
        norms: Callable[[], list[float]] = list,
    ) -> None:
        self.step, self.of_groups, self.weights, self.norms = step, groups, weights, norms

    def params(self, number: int) -> list[Any]:
        found: list[Any] = self.of_groups()[number]["params"]
        return found


def alone() -> Loop:
    model = LinearLoss()
    muon, adamw = torchs(dict(model.named_parameters()), ("first.weight", "last.weight"))

    def step(factor: float) -> None:
        model(factor).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
        model.zero_grad()

    return Loop(step, lambda: [*muon.param_groups, *adamw.param_groups], lambda: dict(model.named_parameters()))


@contextlib.contextmanager
def on(engine: str) -> Iterator[Loop]:
    model, (storage, _, stage) = LinearLoss(), engine.partition(" ")
    if stage.isdigit():
        settings = settings_for(storage, int(stage)) | {"optimizer": references.layer_wise("muon", storage=storage)}
        with engine_for(settings, model) as made:

            def step_engine(factor: float) -> None:
                made.backward(made(factor))
                made.step()

            def norms_of_engine() -> list[float]:
                made.backward(made(1.0))
                norm = float(made.optimizer.grad_norm())
                made.step()
                return [norm, float(made.get_global_grad_norm())]

            yield Loop(step_engine, lambda: made.optimizer.param_groups, lambda: full_weights(made), norms_of_engine)
        return
    if engine == "fsdp2":
        fully_shard(model, mesh=fsdp2.mesh_of())
    lazy = {"overlap_param_gather": True} if engine == "plain, lazy" else {}
    one: Any = fsdp2.layer_wise(model, **lazy)
    optimizer: Any = ModuleOptimizers({"all": one}) if engine == "modules" else one

    def step(factor: float) -> None:
        try:
            model(factor).backward()
            optimizer.step()
        finally:
            optimizer.zero_grad()
            model.zero_grad()  # also of what is in no group

    def weights() -> dict[str, Tensor]:
        one.synchronize()
        return fsdp2.weights_of(model)

    def norms() -> list[float]:
        model(1.0).backward()
        return [float(optimizer.grad_norm()), float(optimizer.clip_grad_norm_(1.0))]

    yield Loop(step, lambda: optimizer.param_groups, weights, norms)


def take_out(loop: Loop) -> None:
    loop.taken = loop.params(0).pop(0)  # type: ignore[attr-defined]


def put_back(loop: Loop) -> None:
    loop.params(0).append(loop.taken)  # type: ignore[attr-defined]


def empty(loop: Loop) -> None:
    loop.kept = [*loop.params(1)]  # type: ignore[attr-defined]
    loop.of_groups()[1]["params"] = []


def fill(loop: Loop) -> None:
    loop.params(1).extend(loop.kept)  # type: ignore[attr-defined]


def reverse(loop: Loop) -> None:
    loop.params(0).reverse()


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_parameters_taken_out_and_put_back_train_as_by_torch(engine: str) -> None:
    """Plain PyTorch went on training a parameter that was taken out of its group; at ZeRO 0 all matrices stopped."""
    edits = [None, take_out, reverse, put_back, reverse, *([] if engine == "zero 0" else [empty, fill])]
    truth = alone()
    with on(engine) as loop:
        for number, edit in enumerate([*edits, None]):
            for each in (truth, loop) if edit is not None else ():
                edit(each)
            for factor in (1.0, 0.5 - number):
                truth.step(factor)
                loop.step(factor)
            assert largest_difference(loop.weights(), dict(truth.weights())) == 0.0, (number, edit)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "zero 0"])
@on_ranks(2)
def test_gradients_of_what_is_taken_out_count_in_no_norm(engine: str) -> None:
    """Fixed: owned storage under DeepSpeed clipped the others by it, and skipped their steps for a NaN in it;
    ``grad_norm`` and ``count_zeros`` of ModuleOptimizers had it too."""
    with on(engine) as loop:
        take_out(loop)
        assert loop.norms() == [40.0, 40.0]


@on_ranks(2)
def test_a_group_without_parameters_trains_none_at_stage_0() -> None:
    """DeepSpeed steps these parameters as one tensor there, with one count of steps."""
    with on("zero 0") as loop:
        loop.step(1.0)
        before = {name: weight.clone() for name, weight in loop.weights().items()}
        empty(loop)
        loop.step(1.0)
        assert torch.equal(before["last.bias"], loop.weights()["last.bias"])
        assert not torch.equal(before["first.weight"], loop.weights()["first.weight"])
        fill(loop)
        loop.step(1.0)
        assert not torch.equal(before["last.bias"], loop.weights()["last.bias"])


# Groups of a save


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.up = nn.Embedding(8, 6), nn.Linear(6, 9)
        self.mid, self.down, self.head = nn.Linear(9, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.down(self.mid(self.up(self.emb(rows)).relu()).relu())).square().mean()


OF_UP = [{"params": "up.*", "matrix": {"lr": 0.005}, "elementwise": {"lr": 0.001}}]
OF_DOWN = [{"params": "down.*", "matrix": {"lr": 0.005}}, {"params": "emb.*", "elementwise": {"lr": 0.001}}]
FORMS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
}


def named_on(engine: str, overrides: list[dict[str, Any]]) -> tuple[nn.Module, LayerWiseOptimizer]:
    model = Named()
    if engine == "fsdp2":
        fully_shard(model, mesh=fsdp2.mesh_of())
    return model, LayerWiseOptimizer(model, lr=0.02, elementwise_lr=0.003, overrides=overrides, report=False)


@cells(lambda engine, form: form != "full" or engine == "fsdp2", engine=["plain", "fsdp2"], form=[*FORMS])
@on_ranks(2)
def test_resume_with_other_groups_is_an_error(engine: str, form: str) -> None:
    """A run that was resumed through torch's ``set_state_dict`` with one override fewer trained every matrix at the
    override's rate, without a word: torch gives a group the options of any saved group that shares a parameter."""
    model, optimizer = named_on(engine, OF_UP)
    model(torch.arange(8)).backward()
    optimizer.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FORMS[form]))
    for overrides in ([], OF_DOWN):
        other_model, other = named_on(engine, overrides)
        rates = [group["lr"] for group in other.param_groups]
        with pytest.raises((ValueError, RuntimeError), match="had other parameters|All the parameters in the same"):
            set_optimizer_state_dict(other_model, other, copy.deepcopy(saved), options=FORMS[form])
        assert [group["lr"] for group in other.param_groups] == rates
    for group in optimizer.param_groups:
        group["lr"] /= 2
    rates = [group["lr"] for group in optimizer.param_groups]
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FORMS[form]))
    same_model, same = named_on(engine, OF_UP)
    set_optimizer_state_dict(same_model, same, saved, options=FORMS[form])
    assert [group["lr"] for group in same.param_groups] == rates


@on_ranks(2)
def test_groups_of_another_save_are_refused_before_sharding() -> None:
    """Fixed: An optimizer whose model was not sharded yet took the options of other parameters."""
    made = [
        LayerWiseOptimizer(
            Named(), lr=0.02, overrides=[{"params": name, "matrix": {"lr": 0.005}}], sharded_later=True, report=False
        )
        for name in ("up.weight", "mid.weight", "up.weight")
    ]
    saved, other, same = made
    for group in saved.param_groups:
        group["lr"] /= 2
    rates = [group["lr"] for group in other.param_groups]
    with pytest.raises(ValueError, match="had other parameters"):
        other.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in other.param_groups] == rates
    same.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in same.param_groups] == [group["lr"] for group in saved.param_groups]


def move(loop: Loop) -> None:
    loop.params(1).append(loop.params(0).pop(0))


def append(loop: Loop) -> None:
    moved = loop.params(0).pop(0)
    loop.of_groups().append({**loop.of_groups()[0], "params": [moved]})


def add_another(loop: Loop) -> None:
    loop.params(0).append(nn.Parameter(torch.ones(12, 12)))


def replace(loop: Loop) -> None:
    loop.params(0)[0] = nn.Parameter(torch.ones(12, 12))


def drop_group(loop: Loop) -> None:
    del loop.of_groups()[1]


def repeat(loop: Loop) -> None:
    loop.params(0).append(loop.params(0)[0])


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_what_is_moved_or_added_is_an_error_that_changes_nothing(engine: str) -> None:
    """A parameter that was moved to a group with a higher rate trained at its old rate, without a word; at ZeRO 0 all
    others were trained at the new one."""
    for edit in (move, append, add_another, replace, drop_group, repeat):
        with on(engine) as loop:
            loop.step(1.0)
            before = {name: weight.clone() for name, weight in loop.weights().items()}
            edit(loop)
            with pytest.raises((RuntimeError, ValueError), match="param_groups: expected"):
                loop.step(1.0)
            assert largest_difference(loop.weights(), before) == 0.0, edit


class Alike(nn.Module):
    """Two matrices of one shape, with gradients of other directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self) -> Tensor:
        return signed_sum(self.one.weight, 1.0) + signed_sum(self.two.weight.T, 1.0)


def made_alike(engine: str, model: nn.Module) -> Any:
    if engine == "fsdp2":
        fully_shard(model, mesh=fsdp2.mesh_of())
    one: Any = fsdp2.layer_wise(model)
    return ModuleOptimizers({"all": one}) if engine == "modules" else one


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "modules"])
@pytest.mark.parametrize("before", [False, True])
@on_ranks(2)
def test_states_stay_with_parameters_whatever_a_groups_order(engine: str, before: bool) -> None:
    """Fixed: a parameter that was taken out and put back stood at another place of its group. A state dict by number
    gave its state to another one of its shape, without a word. Also where the group that loads was edited."""
    models = [Alike(), Alike()]
    both = [made_alike(engine, model) for model in models]

    def step(number: int) -> None:
        models[number]().backward()
        both[number].step()
        both[number].zero_grad()

    step(0)
    for optimizer in both[: 2 if before else 1]:
        params = optimizer.param_groups[0]["params"]
        params.append(params.pop(0))
    models[1].load_state_dict(models[0].state_dict())
    both[1].load_state_dict(copy.deepcopy(both[0].state_dict()))
    for number in range(2):
        step(number)
    assert largest_difference(*map(fsdp2.weights_of, models)) == 0.0
