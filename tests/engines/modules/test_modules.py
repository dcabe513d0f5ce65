"""Modules on ranks of their own (ModuleOptimizers) train what one process that holds them all trains, whatever each
one's optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.engines.modules import step as of_modules
from lwopt_backend.optimizer import PlainOptimizer
from lwopt_backend.runtime.buffers import BucketBuffers, PartsPending
from tests.support.cells import cells
from tests.support.engines import Alone, ExactLM
from tests.support.fsdp2 import fsdp, layer_wise, set_weights, whole
from tests.support.fused import Experts
from tests.support.on_ranks import on_ranks
from tests.support.plain import optimizer_for, shares, step_all
from tests.support.ranks import gathered
from tests.support.references import round_to_8_bits

INF, NAN = math.inf, math.nan
NAMES = ("vision", "language")
BIASES: dict[str, Any] = {"clip_groups": {"biases": {"params": "*.bias", "max_norm": 0.002}}}
OWNED = ("owned", "owned")  # the kind of optimizer of each module
Split = tuple[tuple[int, ...], tuple[int, ...]]  # the ranks of each module
APART: Split = ((0, 1), (2, 3))
ONE_AND_REST: Split = ((0,), (1, 2, 3))
OVERLAPPING: Split = ((0, 1, 2), (1, 2, 3))
EVERYWHERE: Split = ((0, 1, 2, 3), (0, 1, 2, 3))
ON_ONE: Split = ((0,), (0,))
SPLITS = [APART, ONE_AND_REST, OVERLAPPING, EVERYWHERE, ON_ONE]


def model_of(name: str) -> nn.Module:
    return ExactLM(seed=7, hidden=(31, 24)) if name == "vision" else ExactLM()


# Kinds of optimizers
@functools.cache
def group_of(ranks: tuple[int, ...], module: str) -> Any:
    """A separate process group for each module; called on all ranks."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def sharded(module: nn.Module, group: Any) -> nn.Module:
    fsdp(module, DeviceMesh.from_group(group, "cpu"))
    return module


def trained(kind: str, module: nn.Module, group: Any, **options: Any) -> tuple[nn.Module, Any]:
    """A module and its optimizer."""
    if kind == "owned":
        return module, optimizer_for(module, process_group=group, **options)
    if kind == "FSDP2":
        return module, layer_wise(sharded(module, group), **options)
    by_sgd = sgd(module)
    return DistributedDataParallel(module, process_group=group) if kind == "DDP" else module, by_sgd


def make(
    split: Split, kinds: Sequence[str] = OWNED, *, shared: bool = False, **options: Any
) -> tuple[dict[str, nn.Module], Any]:
    """This rank's modules and their optimizers, with a process group each, or one that is ``shared``."""
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for name, ranks, kind in zip(NAMES, split, kinds):
        group = group_of(ranks, "shared" if shared else name)
        if dist.get_rank() in ranks:
            modules[name], optimizers[name] = trained(kind, model_of(name), group, **options)
    return modules, ModuleOptimizers(optimizers)


class Beside:
    """Modules that are trained on a split of the ranks, and both whole on one process, which they must equal."""

    def __init__(self, split: Split, kinds: Sequence[str] = OWNED, **options: Any) -> None:
        self.split, self.kinds, self.apart, self.options = split, kinds, "clip_groups" in options, options
        self.modules, self.optimizers = make(split, kinds, **options)
        self.single = {name: model_of(name) for name in NAMES}
        self.single_optimizers: list[Any] = []
        for module, kind in zip(self.single.values(), kinds):
            by_sgd = kind in ("DDP", "plain")
            self.single_optimizers += [sgd(module)] if by_sgd else Alone(module, "muon", "adamw").optimizers

    def backward(self, step: int, part: int = 0, parts: int = 1, names: Sequence[str] = NAMES) -> None:
        """The loss of one micro-batch of each module, of which this rank computes its share."""
        for name in names:
            if name in self.modules:
                ranks = self.split[NAMES.index(name)]
                rows = shares(step, parts * len(ranks))[part * len(ranks) + ranks.index(dist.get_rank())]
                (self.modules[name](*rows) / parts).backward()

    def backward_of_single(self, step: int, parts: int = 1, names: Sequence[str] = NAMES) -> None:
        """Mean gradients of the global batch; sums of ``ExactLM``'s are exact."""
        for name in names:
            count = len(self.split[NAMES.index(name)])
            for rows in shares(step, parts * count):
                (self.single[name](*rows) / parts).backward()
            torch._foreach_div_(self.grads(name), count)

    def train(self, steps: range, *, parts: int = 1, clip: float | Mapping[str, float] | None = None) -> None:
        """Steps of both; norms are those of one process, which clips with our norm."""
        for step in steps:
            for part in range(parts):
                with self.optimizers.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    self.backward(step, part, parts)
            self.backward_of_single(step, parts)
            if clip is not None:
                limits = clip if isinstance(clip, Mapping) else dict.fromkeys(NAMES, clip)
                self.clip_single(self.optimizers.clip_grad_norm_(clip), limits, "rest" if self.apart else "")
            assert self.optimizers.step() is True and self.optimizers.overflowed == ()
            if self.apart:
                self.clip_single(self.optimizers.clip_group_norms["biases"], dict.fromkeys(NAMES, 0.002), "biases")
            self.optimizers.zero_grad()
            step_all(self.single_optimizers)
            for optimizer in self.single_optimizers if "momentum_dtype" in self.options else ():
                for state in optimizer.state.values() if isinstance(optimizer, torch.optim.Muon) else ():
                    round_to_8_bits(state["momentum_buffer"])

    def grads(self, module: str, apart: str = "") -> list[Tensor]:
        """Of one process: all, or with ``apart`` of "biases" or "rest"."""
        named = self.single[module].named_parameters()
        kinds = ((p.grad, "biases" if name.endswith("bias") else "rest") for name, p in named)
        return [grad for grad, kind in kinds if grad is not None and apart in ("", kind)]

    def norms(self, norm_type: float = 2.0, apart: str = "") -> list[float]:
        """Of one process: the norms of each module's gradients, and of all."""
        none = torch.zeros(1)
        flat = [torch.cat([none, *map(torch.flatten, self.grads(name, apart))]).double() for name in NAMES]
        return [torch.linalg.vector_norm(grad, norm_type).item() for grad in (*flat, torch.cat(flat))]

    def clip_single(self, norm: Tensor, limits: Mapping[str, float], apart: str) -> None:
        """As torch.nn.utils.clip_grad_norm_ does, with this package's norm."""
        assert norm.item() == pytest.approx(self.norms(apart=apart)[-1], rel=1e-6)
        assert norm > max(limits.values()), "nothing is clipped"
        for name in NAMES:
            for grad in self.grads(name, apart):
                grad.mul_(torch.clamp(limits[name] / (norm + 1e-6), max=1.0))

    def check(self) -> None:
        for of, module in self.modules.items():
            if isinstance(optimizer := self.optimizers.modules[of], PlainOptimizer):
                optimizer.synchronize()  # with overlap_param_gather, values may still be on their way
            for name, param in module.named_parameters():
                expected = self.single[of].get_parameter(name.removeprefix("module."))  # DDP's
                assert torch.equal(whole(param), expected), (of, name)

    def go_on_with(self, split: Split) -> None:
        """New modules and optimizers on another split, with the one process's weights."""
        self.split = split
        self.modules, self.optimizers = make(split, self.kinds, **self.options)
        self.take_weights()

    def take_weights(self) -> None:
        for name, module in self.modules.items():
            set_weights(getattr(module, "module", module), dict(self.single[name].named_parameters()))


def fails_with(words: str, call: Callable[[], Any]) -> None:
    """Here, with what was wrong here or on another rank."""
    with pytest.raises((TypeError, ValueError, RuntimeError, OSError)) as caught:
        call()
    assert words in str(caught.value).replace("\\", ""), words


@on_ranks(4)
@cells(
    split=SPLITS,
    parts=[1, 2],
    clip=[None, 0.05, {"vision": 0.01, "language": 0.05}],
    options=[{}, BIASES, {"layout": "compact", "group_size": 1}, {"overlap_param_gather": True}],
)
def test_parameters_equal_one_process_that_holds_both_modules(
    split: Split, parts: int, clip: Any, options: dict[str, Any]
) -> None:
    """Clipped by the one norm over both, which counts each element once, with one limit or one for each; biases of both
    by the limit of their group. At last with gradients that are scaled, and without a backward pass of one module."""
    run = Beside(split, **options)
    run.train(range(3), parts=parts, clip=clip)
    for names in (NAMES, ("language",)) if options != BIASES else ():
        run.backward(3, names=names)
        run.backward_of_single(3, names=names)
        for norm_type in (2.0, 1.0, 3.0, INF):
            norms = run.optimizers.grad_norms(norm_type)
            assert list(norms) == list(NAMES) and norms["vision"].dtype == torch.float32
            found = [norm.item() for norm in (*norms.values(), run.optimizers.grad_norm(norm_type=norm_type))]
            assert found == pytest.approx(run.norms(norm_type), rel=1e-6)
            assert run.optimizers.grad_norm("language.*", norm_type) == norms["language"]
        if names != NAMES:  # the other module has no gradient
            of_vision = sum(param.numel() for param in run.single["vision"].parameters() if param.requires_grad)
            assert run.optimizers.count_zeros("vision.*") == of_vision
        run.optimizers.scale_grads(0.5)
        for name in names:
            torch._foreach_mul_(run.grads(name), 0.5)
        assert run.optimizers.step() is True
        run.optimizers.zero_grad()
        step_all(run.single_optimizers)
    run.check()


@pytest.mark.also_on_gloo
@on_ranks(4)
def test_clip_groups_on_fsdp2_and_owned_storage() -> None:
    """Clip groups are of modules on FSDP2 and of plain modules, and the rest of each module is clipped by a limit of
    its own, of which one clips seven times as much."""
    run = Beside(APART, ("FSDP2", "owned"), **BIASES)
    run.train(range(3), clip={"vision": 0.007, "language": 0.05})
    run.check()


@on_ranks(4)
@pytest.mark.parametrize(
    ("split", "options"),
    [(EVERYWHERE, {}), (EVERYWHERE, {"shared": True}), (EVERYWHERE, {"group_size": 2}), (OVERLAPPING, {})],
)
def test_modules_on_the_same_ranks_send_gradients_in_one_order(split: Split, options: dict[str, Any]) -> None:
    """Although every second rank runs the backward passes in the other order. One module sends during them."""
    run, launch, sent = Beside(split, **options), BucketBuffers.launch, list[str]()
    held = {name: optimizer.core.manager.buckets for name, optimizer in run.optimizers.modules.items()}
    of_bucket = {id(bucket): name for name, buckets in held.items() for bucket in buckets}

    def noted(bucket: BucketBuffers) -> PartsPending:
        sent.append(of_bucket[id(bucket)])
        return launch(bucket)

    with mock.patch.object(BucketBuffers, "launch", noted):
        run.backward(0, names=NAMES[:: 1 if dist.get_rank() % 2 else -1])
        in_backward = [*sent]
        assert run.optimizers.step()
    seen = gathered((in_backward, sent))
    assert seen[1] == seen[2], "in another order"
    (first,) = {name for during, _ in seen for name in during}
    assert seen[1][1] == sorted(seen[1][1], key=lambda name: name != first)
    run.backward_of_single(0)
    step_all(run.single_optimizers)
    run.check()


# Norms
@on_ranks(4)
def test_a_nan_norm_is_told_on_all_ranks_and_clips_nothing() -> None:
    """The gradients of one rank are NaN, of each of the language's in turn: gloo's MAX forgets a NaN."""
    run = Beside(ONE_AND_REST)
    for bad in (1, 2, 3):
        if dist.get_rank() == bad:
            handle = run.modules["language"].lm_head.weight.register_hook(lambda grad: grad * NAN)
        run.backward(0)
        if dist.get_rank() == bad:
            handle.remove()
        assert all(run.optimizers.grad_norm(norm_type=norm_type).isnan() for norm_type in (2.0, INF))
        before = run.optimizers.grad_norms()["vision"]
        run.optimizers.clip_grad_norm_(1e-3)
        assert run.optimizers.grad_norms()["vision"] == before
        with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan"):
            run.optimizers.clip_grad_norm_(1.0, error_if_nonfinite=True)
        run.optimizers.zero_grad()


OVERFLOWS: list[tuple[Split, tuple[str, str], str, int, float]] = [  # whose gradient on which of its ranks is what
    (APART, OWNED, "language", -1, NAN),
    (ONE_AND_REST, OWNED, "vision", -1, INF),
    (OVERLAPPING, OWNED, "language", -1, NAN),
    (APART, ("FSDP2", "owned"), "vision", 0, INF),
    (APART, ("owned", "FSDP2"), "language", 1, INF),
    (APART, ("DDP", "owned"), "language", 1, INF),
    (APART, ("DDP", "FSDP2"), "vision", 1, NAN),
    (((0,), (1, 2)), ("plain", "FSDP2"), "vision", 0, INF),  # the fourth rank has nothing
]


@on_ranks(4)
@pytest.mark.parametrize(("split", "kinds", "module", "place", "value"), OVERFLOWS)
def test_nonfinite_gradient_skips_the_step_on_all_ranks(
    split: Split, kinds: tuple[str, str], module: str, place: int, value: float
) -> None:
    """A gradient that is not finite anywhere skips the step everywhere. The steps before and after equal those of one
    process, of every mixture of optimizers."""
    run, number = Beside(split, kinds), NAMES.index(module)
    spoils = dist.get_rank() == split[number][place]
    run.train(range(2), clip=0.05)
    param = next(run.modules[module].parameters()) if spoils else None
    in_backward = spoils and kinds[number] == "owned"  # takes gradients away as they come
    if in_backward:
        handle = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
    run.backward(2)
    if in_backward:
        handle.remove()
    elif spoils:
        local = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
        local.view(-1)[0] = value
    run.optimizers.clip_grad_norm_(0.05)
    assert run.optimizers.step() is False and run.optimizers.overflowed == (module,)
    assert all(p.grad is None for m in run.modules.values() for p in m.parameters())
    run.train(range(3, 4), clip=0.05)
    run.check()


def test_zeros_and_scaled_gradients_of_torchs_optimizers() -> None:
    """A parameter without a gradient counts as zeros. What is scaled up, and down again, trains as if it were not."""
    modules, twins = ({name: nn.Linear(4, 3) for name in NAMES} for _ in range(2))
    inputs = torch.tensor([[1.0, 0.0, 2.0, 0.0]])  # two of four columns of a gradient are zero
    for name in NAMES:
        twins[name].load_state_dict(modules[name].state_dict())
    optimizers = ModuleOptimizers({name: sgd(module) for name, module in modules.items()})
    assert optimizers.count_zeros() == 2 * 15 and optimizers.count_zeros("vision.1*") == 3
    (modules["language"](inputs).sum() * 8).backward()
    assert (optimizers.count_zeros("language.*"), optimizers.count_zeros()) == (6, 6 + 15)
    (modules["vision"](inputs).sum() * 8).backward()
    optimizers.scale_grads(1 / 8)
    assert optimizers.step() is True
    for name, twin in twins.items():
        twin(inputs).sum().backward()
        sgd(twin).step()
        assert torch.equal(modules[name].weight, twin.weight) and torch.equal(modules[name].bias, twin.bias)


# Groups and hooks
def test_param_groups_are_the_modules_own_and_hooks_are_torchs() -> None:
    """In one process without torch.distributed."""
    modules = {name: nn.Linear(4, 4) for name in ("a", "b")}
    inner = {name: torch.optim.Adam(module.parameters(), lr=0.1) for name, module in modules.items()}
    optimizers = ModuleOptimizers(inner)
    assert isinstance(optimizers, torch.optim.Optimizer) and "betas" in optimizers.defaults
    assert [group["module"] for group in optimizers.param_groups] == ["a", "b"]
    optimizers.load_state_dict(optimizers.state_dict())  # torch makes new groups then
    inner["b"].load_state_dict(inner["b"].state_dict())
    for number, group in enumerate(optimizers.param_groups):
        group["lr"] = float(number)
    assert [inner[name].param_groups[0]["lr"] for name in inner] == [0.0, 1.0]
    inner["a"].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert [group["module"] for group in optimizers.param_groups] == ["a", "a", "b"]
    told: list[str] = []
    optimizers.register_step_pre_hook(lambda *_: told.append("before"))
    optimizers.register_step_post_hook(lambda *_: told.append("after"))
    inner["b"].register_step_post_hook(lambda *_: told.append("b"))
    modules["b"](torch.ones(1, 4)).sum().backward()
    before = modules["b"].weight.detach().clone()
    assert optimizers.step() is True
    assert told == ["before", "b", "after"] and not torch.equal(before, modules["b"].weight)
    assert set(optimizers.state) == set(modules["b"].parameters())
    optimizers.zero_grad()
    assert modules["b"].weight.grad is None


@on_ranks(4)
def test_hook_after_the_step_reads_new_weights() -> None:
    """A hook after the step reads the weights that the step made."""
    run = Beside(EVERYWHERE, overlap_param_gather=True)

    def weights() -> Tensor:
        return torch.cat([param.detach().flatten() for m in run.modules.values() for param in m.parameters()])

    read = list[Tensor]()
    run.optimizers.register_step_post_hook(lambda *_: read.append(weights()))
    run.train(range(1))
    for optimizer in run.optimizers.modules.values():
        optimizer.synchronize()
    assert torch.equal(read[0], weights())


# What is refused, and what goes wrong
def test_what_module_optimizers_cannot_be_used_for_says_so() -> None:
    module = nn.Linear(2, 2)
    optimizers = ModuleOptimizers({"a": torch.optim.SGD(module.parameters(), lr=0.1)})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    for words, use in (
        ("takes no closure", lambda: optimizers.step(lambda: 1.0)),
        ("expected all param groups in the modules' optimizers", lambda: optimizers.add_param_group({"params": []})),
        ("cannot be copied or pickled", lambda: pickle.dumps(optimizers)),
        ("use scale_grads()", lambda: scaler.step(optimizers)),
        ("unknown module 'aa'; did you mean 'a'", lambda: optimizers.clip_grad_norm_({"aa": 1.0})),
        ("max_norm: expected module 'a'", lambda: optimizers.clip_grad_norm_({})),
        ("norm_type: expected a number above 0", lambda: optimizers.grad_norm(norm_type=0)),
        ("'a.nothing' matches no trained parameter", lambda: optimizers.count_zeros("a.nothing")),
    ):
        fails_with(words, use)


@on_ranks(2)
def test_names_that_differ_on_ranks_are_an_error_on_all() -> None:
    optimizers = ModuleOptimizers({"a": adam(nn.Linear(2, 2))})
    given = f"a.{('weight', 'bias')[dist.get_rank()]}"
    found = r"found rank 0: ['a.weight']; rank 1: ['a.bias']"
    fails_with(found, lambda: optimizers.grad_norm(given))


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.ModuleList(modules).parameters())


@on_ranks(4)
def test_modules_that_do_not_fit_together_are_refused() -> None:
    """Modules that cannot be trained together are refused on all ranks."""
    rank = dist.get_rank()
    vision, other, language = (model_of(name) for name in ("vision", "vision", "language"))
    with torch.no_grad():
        other.layers[2].bias[0] += rank == 1
    everyone, half = group_of((0, 1, 2, 3), "vision"), [group_of((0, 1), "half"), group_of((2, 3), "half")][rank // 2]

    def on(group: Any) -> dict[str, Any]:
        return {"vision": optimizer_for(model_of("vision"), process_group=group)}

    order = "expected all modules on all ranks, in one order, with None for modules on other ranks: ranks differ"
    ours, both = {"vision": adam(vision)}, [("vision", adam(vision)), ("language", adam(language))]
    shared, elsewhere = {**ours, "language": adam(language, *vision.layers[: rank == 1])}, on(everyone)
    by_adam = {"vision": adam(sharded(model_of("vision"), everyone))}
    sizes = "[0, 1, 2, 3] have an optimizer of module 'vision', but their process groups have other sizes: {0: 2,"
    kinds = "module 'vision': ranks differ in optimizer: 'PlainOptimizer' on rank 0, 'Adam'"
    given: list[tuple[str, dict[str, Any]]] = [
        (order, dict(both[:: -1 if rank == 2 else 1])),
        (order, ours if rank == 1 else {**ours, "language": None}),
        ("module 'language': expected an optimizer on some rank, found none", {**ours, "language": None}),
        ("module 'vision': expected a torch.optim.Optimizer, or None on ", {"vision": vision} if rank == 3 else ours),
        ("expected a mapping from modules' names to optimizers, found {}", {}),
        ("expected every parameter in one module, found '1 of group 0' of 'vision' as ", shared),
        ("their process groups have other sizes: {0: 4,", {"vision": None} if rank == 2 else elsewhere),
        (sizes, on(half)),
        ("module 'vision': ranks differ in parameter 4 of group 0", {"vision": adam(other)}),
        (kinds, on(half) if rank < 2 else ours),
        ("expected no DTensors with Adam, which cannot compute their norm", by_adam),
    ]
    for words, optimizers in given:
        fails_with(words, lambda optimizers=optimizers: ModuleOptimizers(optimizers))


@on_ranks(2)
def test_copies_are_compared_in_any_dtype() -> None:
    """Copies of any dtype are compared, and a rank that cannot compare is an error on all. Otherwise the other ranks
    wait for what it has."""
    one, up = torch.tensor(1.0, dtype=torch.float64), torch.tensor((1 << 32) - 1)
    others = [  # than 1.0: by one bit, in the upper half alone, by one in the upper and -1 in the lower half
        *(torch.nextafter(one.to(dtype), one.to(dtype) + 1) for dtype in (torch.bfloat16, torch.float32, one.dtype)),
        *(torch.tensor(2.0), one * 2, (one.view(torch.int64) + up + (1 << 32)).view(one.dtype)),
        *(torch.tensor(1 + 1e-7j), torch.tensor(2.0, dtype=torch.complex128)),
    ]
    for other in others:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, dtype=other.dtype))])
        ModuleOptimizers({"all": optimizer})
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0][1] = other if dist.get_rank() else 1
        fails_with("ranks differ in parameter 0 of group 0", lambda given={"all": optimizer}: ModuleOptimizers(given))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    described = KeyError("broken") if dist.get_rank() == 0 else of_modules.facts_of
    broken = mock.patch.object(of_modules, "facts_of", side_effect=described)
    with broken, pytest.raises((KeyError, RuntimeError), match="broken"):
        ModuleOptimizers({"all": optimizer})
    ModuleOptimizers({"all": optimizer})


@on_ranks(4)
def test_refusal_in_a_step_is_an_error_on_all_ranks() -> None:
    """What is refused in a step on one rank is an error on all."""
    run = Beside(APART, ("plain", "owned"))
    run.backward(0)
    fails_with("reduce their gradients before (DDP does)", run.optimizers.step)  # copies whose gradients nobody reduced
    run = Beside(APART)
    run.backward(0)
    if dist.get_rank() == 2:
        run.optimizers.modules["language"].param_groups[0]["lr"] = 0.5
    fails_with("module 'language' failed with RanksDisagree", run.optimizers.step)


@on_ranks(4)
def test_interrupted_backward_of_one_module_stops_all() -> None:
    """An interrupted backward pass of one module stops all before they step. On rank 1, which catches it; all drop
    their gradients."""
    run = Beside(APART)
    run.train(range(1))
    if dist.get_rank() == 1:
        handle = run.modules["vision"].layers[0].weight.register_hook(lambda grad: grad.view(-1, 7, 7))
        with pytest.raises(RuntimeError):
            run.backward(1)
        handle.remove()
    else:
        run.backward(1)
    with pytest.raises(RuntimeError, match="module 'vision' failed with.*backward pass ended in an exception"):
        run.optimizers.step()
    run.check()  # language has not stepped either
    run.optimizers.zero_grad()
    run.train(range(2, 3))
    run.check()


# State
TURNED: list[Split] = [APART, ((2, 3), (0, 1)), ((3,), (1, 2))]


@on_ranks(4)
@pytest.mark.parametrize(
    ("kinds", "splits", "by_torch", "options"),
    [
        (OWNED, [APART, ONE_AND_REST, ON_ONE, OVERLAPPING, EVERYWHERE], False, {}),
        (("DDP", "FSDP2"), TURNED, False, {}),
        (("FSDP2", "owned"), TURNED, True, {}),
        (("FSDP2", "owned"), TURNED, False, {"momentum_dtype": "int8"}),
    ],
)
def test_training_goes_on_from_a_save_when_the_split_changed(
    tmp_path: Path, kinds: tuple[str, str], splits: list[Split], by_torch: bool, options: dict[str, Any]
) -> None:
    """Each split goes on from what the one before saved, with the learning rates that it had."""
    run = Beside(splits[0], kinds, **options)
    for number, split in enumerate(splits):
        if number > 0:
            run.go_on_with(split)
            if by_torch:
                dcp.load({"optimizer": run.optimizers}, checkpoint_id=tmp_path)
            else:
                run.optimizers.load_state_dict_from(tmp_path)
        run.train(range(2 * number, 2 * number + 2))
        run.check()
        for optimizer in (run.optimizers, *run.single_optimizers):
            for group in optimizer.param_groups:
                group["lr"] /= 2
        if by_torch:
            dcp.save({"optimizer": run.optimizers}, checkpoint_id=tmp_path)
        else:
            run.optimizers.save_state_dict(tmp_path)


@on_ranks(4)
def test_factors_at_the_owners_of_one_weight_go_to_other_ranks(tmp_path: Path) -> None:
    """Six experts in one weight, which several ranks own, by a rule that keeps factors at owners."""
    rule = {"name": "soap", "lr": 3e-3, "precondition_frequency": 2}
    for number, ranks in enumerate([(0, 1), (1, 2, 3), (0, 1)]):
        group, module = group_of(ranks, "experts"), Experts(6, 8)
        here = dist.get_rank() in ranks
        inner = LayerWiseOptimizer(module, rule, process_group=group, report=False) if here else None
        optimizers = ModuleOptimizers({"experts": inner})
        if number > 0:
            optimizers.load_state_dict_from(tmp_path / str(number - 1))
        elif here:
            module(torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
        assert number or optimizers.step()
        optimizers.save_state_dict(tmp_path / str(number))
    first, last = (DcpFolder(tmp_path / name) for name in ("0", "2"))
    assert first.tensors.keys() == last.tensors.keys() and any("GG" in key for key in first.tensors)
    assert all(torch.equal(first.tensor(key).read(), last.tensor(key).read()) for key in first.tensors)


@on_ranks(4)
def test_state_dicts_are_keyed_by_module() -> None:
    """One that is taken before two more steps undoes these."""
    run = Beside(OVERLAPPING)
    run.train(range(2))
    told: list[str] = []
    run.optimizers.register_state_dict_pre_hook(lambda optimizer: told.append("saved"))
    run.optimizers.register_load_state_dict_post_hook(lambda optimizer: told.append("loaded"))
    saved = copy.deepcopy(run.optimizers.state_dict())
    assert list(saved) == list(run.modules)
    for step in (2, 3):
        run.backward(step)
        assert run.optimizers.step()
    run.take_weights()
    run.optimizers.load_state_dict({**saved, **{name: None for name in NAMES if name not in run.modules}})
    assert told == ["saved", "loaded"]
    run.train(range(2, 4))
    run.check()


@on_ranks(4)
def test_incomplete_or_foreign_state_is_refused(tmp_path: Path) -> None:
    """State that lacks something or is of another kind is refused on all ranks."""
    folder, (_, optimizers), (_, others) = tmp_path / "state", make(APART), make(APART, ("DDP", "owned"))
    fails_with("'langauge'; did you mean 'language'?", lambda: optimizers.load_state_dict({"langauge": 0}))
    fails_with("expected module", lambda: optimizers.load_state_dict({}))
    fails_with("expected a finished checkpoint", lambda: optimizers.load_state_dict_from(folder))
    optimizers.save_state_dict(folder)
    misspelled = ModuleOptimizers(
        {"vision": optimizers.modules.get("vision"), "langauge": others.modules.get(NAMES[1])}
    )
    fails_with("unknown module 'language'; did you mean", lambda: misspelled.load_state_dict_from(folder))
    fails_with("expected parameter", lambda: others.load_state_dict_from(folder))
    _, on_fsdp2 = make(APART, ("FSDP2", "owned"))
    on_fsdp2.load_state_dict_from(folder)
    run = Beside(APART, ("DDP", "owned"))
    run.train(range(1))
    dcp.save({"optimizer": run.optimizers}, checkpoint_id=tmp_path / "of torch")
    load = {"optimizer": others}
    fails_with("has no state yet; load with", lambda: dcp.load(load, checkpoint_id=tmp_path / "of torch"))
    dist.barrier()
    if dist.get_rank() == 0:
        next(folder.glob("*_2.distcp")).unlink()
    dist.barrier()
    fails_with("is missing", lambda: optimizers.load_state_dict_from(folder))


@on_ranks(4)
def test_a_module_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    run = Beside(APART)
    run.train(range(2))
    run.optimizers.save_state_dict(tmp_path)
    before = sorted(tmp_path.iterdir())
    groups = [group for group in run.optimizers.param_groups if group["module"] == "language"]
    for group in groups:
        group["note"] = lambda: None  # which no checkpoint can hold
    told = "module 'language', param group 0: expected values that"
    fails_with(told, lambda: run.optimizers.save_state_dict(tmp_path))
    for group in groups:
        del group["note"]
    if dist.get_rank() == 3:
        groups[0]["lr"] = 0.5
    told = "module 'language': ranks differ in lr of param group 0"
    fails_with(told, lambda: run.optimizers.save_state_dict(tmp_path))
    dist.barrier()
    assert sorted(tmp_path.iterdir()) == before
    run.go_on_with(ONE_AND_REST)
    run.optimizers.load_state_dict_from(tmp_path)
    run.train(range(2, 3))
    run.check()
