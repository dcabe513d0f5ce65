"""What loops call on gradients between backward and step, on every engine: it acts as in one process, or is refused."""

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lwopt_backend import ModuleOptimizers
from tests.support import fsdp2
from tests.support.cells import cells
from tests.support.engines import Alone, Cell, Engine, ExactLM, exact, running
from tests.support.models import NORM_ROUNDING, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import (
    Branches,
    Turn,
    assert_same,
    back,
    exact_sums,
    made,
    mean_gradients,
    optimizer_in,
    optimizers_of,
    rows,
    shares,
    step_all,
    train_ours,
)
from tests.support.plain import truth as owned_truth
from tests.support.references import MUON, newton_schulz_in_float32
from tests.support.zero import engine_for, own_settings

# The sums of a norm round in their order, and so does what gradients are multiplied by. Newton-Schulz in fp32 makes up
# to 3.4445^5 of a rounding, and the step of the tallest matrix ``lr`` sqrt(63 / 24) of that.
ROUNDED = MUON["lr"] * (63 / 24) ** 0.5 * 3.4445**5 * torch.finfo(torch.float32).eps
Call = Callable[[Any], object]  # what is done to a model's gradients


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def clip(model: nn.Module, limit: float = 0.1, **how: Any) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit, **how)


def clip_one_by_one(model: nn.Module) -> None:
    """As DINO's script does."""
    for grad in grads(model):
        norm = grad.data.norm(2)
        if (factor := 0.01 / (value(norm) + 1e-6)) < 1:
            grad.data.mul_(factor)


def with_norm(model: nn.Module) -> Tensor:
    norm = nn.utils.get_total_norm(grads(model), foreach=True)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm, foreach=True)
    return norm


def remove(model: Any) -> None:
    """A layer's, as a script does that trains it later."""
    for param in model.layers[2].parameters():
        param.grad = None


ACTS: dict[str, Call] = {
    "clip_grad_norm_": clip,
    "clip_grad_norm_, one by one": lambda model: clip(model, foreach=False),
    "clip_grad_norm_ of order 1": lambda model: clip(model, norm_type=1.0),
    "clip_grad_norm_ of order inf": lambda model: clip(model, 0.01, norm_type=float("inf")),
    "clip_grad_norm_ of a part, then of all": lambda model: (clip(model.layers[0], 0.01), clip(model))[1],
    "clip_grads_with_norm_": with_norm,
    "norms and factors one by one": clip_one_by_one,
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "div_": lambda model: [grad.div_(4) for grad in grads(model)] and None,
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad to zeros": lambda model: model.zero_grad(set_to_none=False),
    "None": remove,
    "clip_grad_norm_, then None": lambda model: (clip(model), remove(model))[0],
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {"layout": "padded"}),
    "plain, late parameters": ("plain", {"layout": "compact", "overlap_param_gather": True}),
    "plain, sent at the step": ("plain", {"overlap_grad_reduce": False}),
    "plain, each by itself": ("plain", {"group_size": 1}),
    "plain, kept": ("plain", {"keep_full_grads": True}),
    "modules": ("plain", {"layout": "padded"}),
    "fsdp2": ("fsdp2", {}),
}


@contextlib.contextmanager
def training(name: str) -> Iterator[Engine]:
    """SGD instead of AdamW, for which a factor on all gradients would change nothing."""
    engine, options = ENGINES[name]
    with running(Cell(engine, elementwise="sgd", ns_in_fp32=True, options=options), ExactLM()) as found:
        if name == "modules":
            inner, found.optimizer = found.optimizer, ModuleOptimizers({"all": found.optimizer})
            found.optimizer.synchronize = inner.synchronize  # which the engine calls
        yield found


def parts(step: int) -> list[tuple[Tensor, Tensor]]:
    return shares(step, 2 * dist.get_world_size())


def value(found: Any) -> float:
    return float(found.full_tensor() if isinstance(found, DTensor) else found)


def values(found: Sequence[Any]) -> list[float]:
    return [value(each) for each in found if each is not None]


@functools.cache
def truth(steps: int, call: Call = lambda model: None, between: Call = lambda model: None) -> tuple[Any, list[float]]:
    """The weights of one process, and what ``call`` has returned. It is called before each step, ``between`` between
    the two micro-batches that a rank has in a step."""
    alone, returned, world = Alone(ExactLM(), "muon", "sgd"), [], dist.get_world_size()
    for step in range(steps):
        for number, micro_batch in enumerate(parts(step)):
            if number == world:
                between(alone.model)
            (alone.model(*micro_batch) / 2).backward()
        for grad in grads(alone.model):
            grad.div_(world)
        returned.append(call(alone.model))
        with newton_schulz_in_float32():
            step_all(alone.optimizers)
    return {name: param.detach() for name, param in alone.model.named_parameters()}, values(returned)


@on_ranks(2)
@pytest.mark.parametrize("name", ENGINES)
def test_calls_on_gradients_act_as_in_one_process(name: str) -> None:
    """Fixed: `clip_grad_norm_`, factors of `param.grad` and the like did nothing in plain PyTorch. Sums are exact, so
    only norms round."""
    untouched, _ = truth(1)
    for what, call in ACTS.items():
        expected, theirs = truth(1, call)
        with training(name) as engine:
            engine.backward(parts(0)[dist.get_rank() :: dist.get_world_size()])
            found = call(engine.model)
            engine.optimizer.step()
            assert largest_difference(engine.weights(), expected) < ROUNDED, what
            assert values([found]) == pytest.approx(theirs, rel=NORM_ROUNDING), what
        assert largest_difference(untouched, expected) > 100 * ROUNDED, f"{what} must do something to be tested"


BETWEEN: dict[str, Call] = {
    "the model's zero_grad": ACTS["zero_grad"],
    "to zeros": ACTS["zero_grad to zeros"],
    "a layer's": remove,
    "all, one by one": lambda model: [setattr(param, "grad", None) for param in model.parameters()],
    "none, but halved": lambda model: [grad.mul_(0.5) for grad in grads(model)],
}


@on_ranks(2)
@cells(lambda name, apart: not (apart and "fsdp2" in name), name=ENGINES, apart=[False, True])
def test_changes_between_two_passes_count(name: str, apart: bool) -> None:
    """What is dropped or scaled between two passes is stepped on as it is then. Also where the first pass was under
    no_sync; FSDP2 keeps the gradients of such a pass to itself."""
    for what, change in BETWEEN.items():
        with training(name) as engine:
            for step in range(2):
                first, second = parts(step)[dist.get_rank() :: dist.get_world_size()]
                with engine.optimizer.no_sync() if apart else contextlib.nullcontext():
                    (engine.model(*first) / 2).backward()
                change(engine.model)
                (engine.model(*second) / 2).backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            assert largest_difference(engine.weights(), truth(2, between=change)[0]) == 0.0, what


# zero_grad(set_to_none=False): a layer that is not used then is stepped on its zeros, as by torch
USED = ("left", "left", "either", "left", "left", "left")  # by step; "either" is one branch or the other by rank
ZEROS = (True, True, True, True, False)  # between these steps, and not None


def exact_branches() -> Any:
    model = Branches()
    exact(model)
    return model


def on_branches(name: str) -> tuple[Any, Any]:
    (engine, options), model = ENGINES[name], exact_branches()
    if engine == "plain":
        optimizer: Any = optimizer_in(model, **options)
        return model, ModuleOptimizers({"all": optimizer}) if name == "modules" else optimizer
    fully_shard(model, mesh=fsdp2.mesh_of())
    return model, fsdp2.layer_wise(model)


@on_ranks(2)
@cells(name=ENGINES, who=["optimizer", "model"])
def test_zeroed_layer_is_stepped_on_its_zeros(name: str, who: str) -> None:
    """Whoever cleared, and whichever rank had the gradient; one that never had a gradient, or None, is not."""
    alone, (model, optimizer) = exact_branches(), on_branches(name)
    theirs, rank, moved = optimizers_of(alone), dist.get_rank(), []

    def use(step: int, rank: int) -> str:
        if USED[step] != "either":
            return USED[step]
        return "both" if "fsdp2" in name else ("left", "right")[rank % 2]

    for step, zeros in enumerate((*ZEROS, False)):
        before = alone.right.weight.detach().clone()
        mean_gradients(alone, lambda turn: turn.back(use=use(turn.step, turn.rank)), step)
        for each in theirs:
            each.step()
            each.zero_grad(set_to_none=not zeros)
        moved.append(not torch.equal(before, alone.right.weight))
        Turn(model, step, rank).back(use=use(step, rank))
        optimizer.step()
        (optimizer if who == "optimizer" else model).zero_grad(set_to_none=not zeros)
        if name != "modules":
            optimizer.synchronize()
        assert largest_difference(fsdp2.weights_of(model), alone) == 0.0, step
    assert moved == [False, False, True, True, True, False]


@on_ranks(2)
@pytest.mark.parametrize("name", [name for name in ENGINES if "fsdp2" not in name])
def test_calls_act_where_ranks_use_different_layers(name: str) -> None:
    """Fixed: with ``overlap_grad_reduce=False``, param.grad showed only what its rank had used, and a call on all
    gradients, such as a GradScaler's, was an error in the step."""
    model, optimizer = on_branches(name)
    Turn(model, 0, dist.get_rank()).back(use=("left", "right")[dist.get_rank()])
    for grad in grads(model):
        grad.div_(4)
    quarter = float(optimizer.grad_norm())
    optimizer.zero_grad()
    Turn(model, 0, dist.get_rank()).back(use=("left", "right")[dist.get_rank()])
    assert quarter == float(optimizer.grad_norm()) / 4
    optimizer.step()


# A second step without zero_grad


@on_ranks(2)
@pytest.mark.parametrize("name", ENGINES)
def test_a_second_step_is_on_the_same_gradients_or_an_error(name: str) -> None:
    """As torch.optim's. Where a step frees gradients, it is an error on all ranks that changes nothing, and so is a
    norm; a step on gradients that are cleared is none."""
    alone, world = Alone(ExactLM(), "muon", "sgd"), dist.get_world_size()
    for micro_batch in parts(0):
        (alone.model(*micro_batch) / 2).backward()
    for grad in grads(alone.model):
        grad.div_(world)
    kept = name == "plain, kept" or "fsdp2" in name
    with training(name) as engine:
        engine.backward(parts(0)[dist.get_rank() :: world])
        for step in range(2):
            if step == 0 or kept:
                engine.optimizer.step()
                with newton_schulz_in_float32():
                    for optimizer in alone.optimizers:
                        optimizer.step()
            else:
                for call in (engine.optimizer.step, engine.optimizer.grad_norm, engine.optimizer.step):
                    with pytest.raises(RuntimeError, match="zero_grad"):
                        call()
                engine.optimizer.zero_grad()
                engine.optimizer.step()
            assert largest_difference(engine.weights(), alone.model) == 0.0


# Plain PyTorch: every pair of options
def mask(model: Any) -> None:
    for grad in grads(model):
        grad.mul_(torch.arange(grad.numel()).view(grad.shape) % 2)


def assign(model: Any) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5


NEEDS_ELEMENTS: dict[str, Call] = {"a mask": mask, "an assigned gradient": assign}


@cells(ranks=[2], kept=[False, True], overlap=[False, True], late=[False, True], size=[None, 1], wide=[False, True])
@on_ranks()
def test_calls_act_whatever_the_options_of_a_plain_model_are(
    kept: bool, overlap: bool, late: bool, size: int | None, wide: bool
) -> None:
    """With ``kept`` gradients also those that need elements."""
    options = {"keep_full_grads": kept, "overlap_grad_reduce": overlap, "overlap_param_gather": late}
    options |= {"group_size": size, "layout": "compact" if wide else "padded"}
    options |= {"grad_dtype": "float32" if wide else "parameter"}
    for what, call in {**ACTS, **(NEEDS_ELEMENTS if kept else {})}.items():
        expected, theirs = truth(1, call)
        with running(Cell("plain", elementwise="sgd", ns_in_fp32=True, options=options), ExactLM()) as engine:
            engine.backward(parts(0)[dist.get_rank() :: dist.get_world_size()])
            found = call(engine.model)
            engine.optimizer.step()
            assert largest_difference(engine.weights(), expected) < ROUNDED, what
            assert values([found]) == pytest.approx(theirs, rel=NORM_ROUNDING), what


# Plain PyTorch: ``param.grad`` has no elements
REFUSED: dict[str, Call] = {
    "noise": lambda model: [grad.add_(0.1) for grad in grads(model)],
    "another tensor": lambda model: [
        grad.copy_(torch.ones_like(param)) for param, grad in zip(model.parameters(), grads(model))
    ],
    "a mask": lambda model: model.left.weight.grad.mul_(torch.ones(7, 11)),
    "a norm of rows": lambda model: model.left.weight.grad.norm(dim=1),
    "a norm of order 0": lambda model: model.left.weight.grad.norm(0),
    "a norm of order -inf": lambda model: clip(model, norm_type=-float("inf")),
    "deepcopy": lambda model: copy.deepcopy(model.left.weight.grad),
    "pickle": lambda model: pickle.dumps(model.left.weight.grad),
    "a change of another precision": lambda model: model.left.weight.grad.double().mul_(2),
    "another precision of before": lambda model: [(grad.double(), clip(model))[0].norm() for grad in grads(model)],
    "another device": lambda model: model.left.weight.grad.to("meta").norm(),
    "a vector of all": lambda model: nn.utils.parameters_to_vector(grads(model)),
}


@on_ranks(1)
@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_elements_is_refused_by_name(what: str) -> None:
    """Fixed: What needs a gradient's elements read a tensor without elements, and went on."""
    model, _optimizer = made()
    back(model, 0)
    with pytest.raises(RuntimeError, match=r"param.grad of '\w+\.\w+': ") as refused:
        REFUSED[what](model)
    assert "keep_full_grads=True" in str(refused.value) or what == "another device"
    assert "at its owners" in repr(model.left.weight.grad)


def in_backward(model: Any, optimizer: Any) -> None:
    model.first.weight.register_post_accumulate_grad_hook(lambda param: param.grad.norm())
    back(model, 0)


def after_a_pass_under_no_sync(model: Any, optimizer: Any) -> None:
    back(model, 0)
    with optimizer.no_sync():
        back(model, 1)
    clip(model)


def scaled_after_both(model: Any, optimizer: Any) -> None:
    back(model, 0)
    with optimizer.no_sync():
        back(model, 1)
    model.left.weight.grad.mul_(0.5)


def after_the_step(model: Any, optimizer: Any) -> None:
    back(model, 0)
    optimizer.step()
    clip(model)


TOO_EARLY_OR_LATE = {in_backward: "use it after backward", after_the_step: "read it before the step"}
TOO_EARLY_OR_LATE |= dict.fromkeys([after_a_pass_under_no_sync, scaled_after_both], "use it after a pass outside")


@on_ranks(2)
def test_a_gradient_is_refused_when_ranks_have_not_got_it() -> None:
    for use, message in TOO_EARLY_OR_LATE.items():
        with pytest.raises(RuntimeError, match=message):
            use(*made())


ALONE: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "reads": (
        lambda model, optimizer: clip(model),
        "another rank (steps|uses gradients).* where this one (steps|uses gradients)",
    ),
    "reads by the optimizer": (lambda model, optimizer: optimizer.grad_norm(), "where this one"),
    "removes": (
        lambda model, optimizer: setattr(model.left.weight, "grad", None),
        "did different things to their grad",
    ),
    "scales": (lambda model, optimizer: (clip(model), model.left.weight.grad.mul_(2)), "where this one"),
    "assigns": (
        lambda model, optimizer: setattr(model.left.weight, "grad", torch.ones(7, 11)),
        "found an assigned one",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", ALONE)
def test_change_on_one_rank_is_an_error_on_all(what: str) -> None:
    """What one rank does alone to its gradients is an error on all. Nothing is trained, and training goes on once
    gradients are cleared."""
    (do, message), (model, optimizer) = ALONE[what], made()
    back(model, 7)
    with pytest.raises(RuntimeError, match=message):
        if dist.get_rank() == 1:
            do(model, optimizer)
        optimizer.step()
    optimizer.zero_grad()
    train_ours(model, optimizer, 2)
    assert_same(model, owned_truth(2))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_another_precision_is_that_of_the_gradient(dtype: torch.dtype) -> None:
    """Autocast asks for one; and a model may be moved after the step."""
    model = exact_sums(Branches()).to(dtype)
    optimizer = optimizer_in(model)
    Turn(model, 0, dist.get_rank()).model(rows(0, dist.get_rank()).to(dtype)).float().square().mean().backward()
    norm = float(optimizer.grad_norm())
    assert sum(float(grad.double().norm()) ** 2 for grad in grads(model)) ** 0.5 == pytest.approx(norm, rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(clip(model, foreach=False)) == pytest.approx(norm, rel=1e-2)
        assert model.left.weight.grad.norm(dtype=torch.float64).dtype == torch.float64
    optimizer.step()
    model.share_memory()
    model.to(torch.float64)
    assert model.left.weight.grad.dtype == torch.float64


@on_ranks(2)
def test_a_gradient_is_there_after_the_step_as_in_torch() -> None:
    """Wrappers such as Lookahead change the parameters that have one. Both zero_grad then do as in torch."""
    model, optimizer = made()
    for clear in (optimizer.zero_grad, model.zero_grad):
        back(model, 0)
        optimizer.step()
        assert all(param.grad is not None and param.grad.shape == param.shape for param in model.parameters())
        model.zero_grad(set_to_none=False)
        clear()
        assert grads(model) == []


@on_ranks(2)
def test_a_gradient_by_autograd_in_between_changes_nothing() -> None:
    """What param.grad shows is there before and after."""
    model, optimizer = made()

    def change(changed: Any) -> None:
        torch.autograd.grad(Turn(changed, 9, 0).loss(), changed.parameters())
        nn.utils.clip_grad_value_(changed.parameters(), 1e-3)

    train_ours(model, optimizer, 2, change=change)
    assert_same(model, owned_truth(2, change=change))


@on_ranks(2)
def test_gradients_of_several_optimizers_in_one_list() -> None:
    """As clip_grad_norm_ takes those of a generator and a discriminator, and of a model with torch's optimizer."""
    (one, _first), (two, _second), other = made(), made(), exact_sums(Branches())
    for model in (one, two, other):
        Turn(model, 0, 0).back()
    every = [*grads(one), *grads(other), *grads(two)]
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads(other)]))
    for foreach in (False, True):
        found = float(nn.utils.get_total_norm(every, foreach=foreach))
        assert found == pytest.approx(3**0.5 * float(norm), rel=NORM_ROUNDING)
    nn.utils.clip_grads_with_norm_([*one.parameters(), *other.parameters(), *two.parameters()], 0.01, norm)
    for model in (one, two, other):
        assert float(nn.utils.get_total_norm(grads(model))) == pytest.approx(0.01, rel=1e-4)


# DeepSpeed decides what param.grad is


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_deepspeed_gradients_are_where_it_has_them(stage: int) -> None:
    """With Adam and with this package, clip_grad_norm_ returns the same, and the same parameters have no gradient."""
    found = []
    for optimizer in ({"type": "Adam", "params": {"torch_adam": True}}, None):
        settings = own_settings("zero", stage)
        settings |= {"optimizer": optimizer} if optimizer else {}
        with engine_for(settings, ExactLM()) as engine:
            engine.backward(engine(*shares(0, 2)[dist.get_rank()]))
            found.append(
                (float(clip(engine.module, 1e-3)), [param.grad is None for param in engine.module.parameters()])
            )
    assert found[0] == found[1]
