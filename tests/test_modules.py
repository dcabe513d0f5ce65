"""Modules on ranks of their own train what one process that holds them all trains, whatever each one's optimizer."""

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
from torch.optim import lr_scheduler

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.engines.modules import step as of_modules
from lwopt_backend.engines.owned.buckets import BucketBuffers
from lwopt_backend.optimizer import OwnedOptimizer
from tests.cells import cells
from tests.engines import ExactLM
from tests.fsdp2 import fsdp, layer_wise, set_weights, whole
from tests.fused import Experts
from tests.models import MATRICES
from tests.on_ranks import on_ranks
from tests.owned import optimizer_for, shares
from tests.ranks import kept_in_a_world
from tests.zero import ADAMW, MUON

INF, NAN = math.inf, math.nan
NAMES = ("vision", "language")
BIASES: dict[str, Any] = {"clip_groups": {"biases": {"params": "*.bias", "max_norm": 0.002}}}
OWNED = "owned and owned"
SPLITS = ["01|23", "0|123", "012|123", "0123|0123", "0|0"]  # side by side, overlapping, everywhere, all on one


def model_of(name: str) -> nn.Module:
    return ExactLM(seed=7, hidden=(31, 24)) if name == "vision" else ExactLM()


def ranks_of(split: str) -> dict[str, tuple[int, ...]]:
    """By module the ranks that have it: "01|23" says it of both."""
    return {name: tuple(map(int, digits)) for name, digits in zip(NAMES, split.split("|"))}


def backward(split: str, modules: Mapping[str, nn.Module], step: int, part: int = 0, parts: int = 1) -> None:
    """The loss of one micro-batch of each module, of which this rank computes its share."""
    for name, module in modules.items():
        ranks = ranks_of(split)[name]
        rows = shares(step, parts * len(ranks))[part * len(ranks) + ranks.index(dist.get_rank())]
        module(*rows).backward()


# Kinds of optimizers


@kept_in_a_world
def group_of(ranks: tuple[int, ...], module: str) -> Any:
    """A separate process group for each module; called on all ranks."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


@kept_in_a_world
def mesh_of_group(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def owned(module: nn.Module, group: Any, **options: Any) -> tuple[nn.Module, Any]:
    return module, optimizer_for(module, process_group=group, **options)


def sharded(module: nn.Module, group: Any, **options: Any) -> tuple[nn.Module, Any]:
    fsdp(module, mesh_of_group(group))
    return module, layer_wise(module, **options)


def sharded_early(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    """The exchange begins in backward, so it is under way when a step is skipped."""
    module, optimizer = sharded(module, group)
    optimizer.attach(module)
    return module, optimizer


def copied(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    optimizer = sgd(list(module.parameters()))
    return DistributedDataParallel(module, process_group=group), optimizer


def plain(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    return module, sgd(list(module.parameters()))


KINDS = {"owned": owned, "FSDP2": sharded, "FSDP2, attached": sharded_early, "DDP": copied, "plain": plain}


def make(split: str, kinds: str = OWNED, *, shared: bool = False, **options: Any) -> tuple[dict[str, nn.Module], Any]:
    """This rank's modules and their optimizers, with a process group each, or one that is ``shared``."""
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for (name, ranks), kind in zip(ranks_of(split).items(), kinds.split(" and ")):
        group = group_of(ranks, "shared" if shared else name)
        if dist.get_rank() in ranks:
            modules[name], optimizers[name] = KINDS[kind](model_of(name), group, **options)
    return modules, ModuleOptimizers(optimizers)


# The reference


class OneProcess:
    """Both modules whole on each process, with torch.optim.Muon and AdamW."""

    def __init__(self, vision_by_sgd: bool) -> None:
        self.modules = {name: model_of(name) for name in NAMES}
        params: dict[str, list[Tensor]] = {"muon": [], "adamw": [], "sgd": []}
        for module_name, module in self.modules.items():
            for name, param in module.named_parameters():
                by_sgd = vision_by_sgd and module_name == "vision"
                params["sgd" if by_sgd else "muon" if name in MATRICES else "adamw"].append(param)
        self.optimizers = [torch.optim.Muon(params["muon"], **MUON), torch.optim.AdamW(params["adamw"], **ADAMW)]
        if vision_by_sgd:
            self.optimizers.append(sgd(params["sgd"]))

    def gradients(self, split: str, step: int, accumulation: int = 1, names: Sequence[str] = NAMES) -> None:
        """Mean gradients of a global batch, of which every rank computes some rows: sums of ``ExactLM``'s are exact."""
        for name in names:
            count, params = len(ranks_of(split)[name]), list(self.modules[name].parameters())
            for rows in shares(step, accumulation * count)[dist.get_rank() :: dist.get_world_size()]:
                self.modules[name](*rows).backward()
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for param, summed in zip(params, flat.split([param.numel() for param in params])):
                param.grad = summed.view_as(param) / count

    def grads(self, name: str, apart: str = "") -> list[Tensor]:
        """The norm of all parameters, or with ``apart`` of "biases" or "rest"."""
        named = self.modules[name].named_parameters()
        kinds = ((p.grad, "biases" if name.endswith("bias") else "rest") for name, p in named)
        return [grad for grad, kind in kinds if grad is not None and apart in ("", kind)]

    def norms(self, norm_type: float = 2.0, apart: str = "") -> list[float]:
        """The norms of each module's gradients, and of all."""
        flat = [torch.cat([grad.flatten() for grad in self.grads(name, apart)]).double() for name in NAMES]
        return [torch.linalg.vector_norm(grad, norm_type).item() for grad in (*flat, torch.cat(flat))]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Beside:
    """Modules that are trained on a split of the ranks, and one process that trains what they must become."""

    def __init__(self, split: str, kinds: str = OWNED, single: OneProcess | None = None, **options: Any) -> None:
        self.split, self.kinds = split, kinds
        self.modules, self.optimizers = make(split, kinds, **options)
        self.single = single or OneProcess(kinds.startswith(("DDP", "plain")))
        self.apart = "clip_groups" in options

    def train(self, steps: range, *, accumulation: int = 1, clip: float | Mapping[str, float] | None = None) -> None:
        """Steps of both; norms and zeros are those of one process, which clips with our norm."""
        for step in steps:
            for part in range(accumulation):
                with self.optimizers.no_sync() if part < accumulation - 1 else contextlib.nullcontext():
                    backward(self.split, self.modules, step, part, accumulation)
            self.single.gradients(self.split, step, accumulation)
            if clip is not None:
                self.clip(clip)
            assert self.optimizers.step() is True and self.optimizers.overflowed == ()
            if self.apart:
                self.clip_single("biases", self.optimizers.clip_group_norms["biases"], dict.fromkeys(NAMES, 0.002))
            self.optimizers.zero_grad()
            self.single.step()

    def clip(self, clip: float | Mapping[str, float]) -> None:
        limits = clip if isinstance(clip, Mapping) else dict.fromkeys(NAMES, clip)
        self.clip_single("rest" if self.apart else "", self.optimizers.clip_grad_norm_(clip), limits)

    def clip_single(self, apart: str, norm: Tensor, limits: Mapping[str, float]) -> None:
        """By this package's norm, which has to be that of the one process."""
        assert norm.item() == pytest.approx(self.single.norms(apart=apart)[-1], rel=1e-6)
        assert norm > max(limits.values()), "nothing is clipped"
        for name in NAMES:
            for grad in self.single.grads(name, apart):
                grad.mul_(torch.clamp(limits[name] / (norm + 1e-6), max=1.0))  # as torch.nn.utils.clip_grad_norm_

    def check(self) -> None:
        for of, module in self.modules.items():
            if isinstance(owned := self.optimizers.modules[of], OwnedOptimizer):
                owned.synchronize()  # with overlap_param_gather, values may still be on their way
            for name, param in module.named_parameters():
                expected = self.single.modules[of].get_parameter(name.removeprefix("module."))  # DDP's
                assert torch.equal(whole(param), expected), (of, name)

    def take_weights(self) -> None:
        """Those of the one process."""
        for name, module in self.modules.items():
            set_weights(getattr(module, "module", module), dict(self.single.modules[name].named_parameters()))

    def resumed(self, split: str, folder: Path, by_torch: bool = False) -> Beside:
        """New modules on another split, from the one process's weights and what was saved."""
        after = Beside(split, self.kinds, self.single)
        after.take_weights()
        if by_torch:
            dcp.load({"optimizer": after.optimizers}, checkpoint_id=folder)
        else:
            after.optimizers.load_state_dict_from(folder)
        return after


def fails_with(words: str, call: Callable[[], Any]) -> None:
    """Here, with what was wrong here or on another rank."""
    with pytest.raises((TypeError, ValueError, RuntimeError, OSError)) as caught:
        call()
    assert words in str(caught.value).replace("\\", ""), words


@on_ranks(4)
@cells(
    lambda options, split="01|23", accumulation=1, clip=None, kinds=OWNED: (
        kinds == OWNED or (options == BIASES and accumulation == 1 and split == "01|23")
    ),
    split=SPLITS,
    accumulation=[1, 2],
    clip=[None, 0.05, {"vision": 0.01, "language": 0.05}],
    options=[{}, BIASES, {"layout": "padded"}, {"layout": "compact", "group_size": 1}, {"overlap_param_gather": True}],
    kinds=[OWNED, "FSDP2 and owned"],
)
def test_parameters_equal_one_process_that_holds_both_modules(
    split: str, accumulation: int, clip: Any, options: dict[str, Any], kinds: str
) -> None:
    """Clipped by the one norm over both, which counts each element once, with one limit or one for each; biases of both
    by the limit of their group."""
    run = Beside(split, kinds, **options)
    run.train(range(3), accumulation=accumulation, clip=clip)
    run.check()


@on_ranks(4)
@pytest.mark.parametrize(
    ("split", "options"),
    [("0123|0123", {}), ("0123|0123", {"shared": True}), ("0123|0123", {"group_size": 2}), ("012|123", {})],
)
def test_modules_on_the_same_ranks_send_gradients_in_one_order(split: str, options: dict[str, Any]) -> None:
    """Although every second rank runs the backward passes in the other order. One module sends during them."""
    run, launch, sent = Beside(split, **options), BucketBuffers.launch, list[str]()
    held = {name: optimizer.core.manager.buckets for name, optimizer in run.optimizers.modules.items()}
    of_bucket = {id(bucket): name for name, buckets in held.items() for bucket in buckets}

    def noted(bucket: BucketBuffers) -> None:
        sent.append(of_bucket[id(bucket)])
        launch(bucket)

    with mock.patch.object(BucketBuffers, "launch", noted):
        backward(split, dict([*run.modules.items()][:: 1 if dist.get_rank() % 2 else -1]), 0)
        in_backward = [*sent]
        assert run.optimizers.step()
    seen: list[Any] = [None] * 4
    dist.all_gather_object(seen, (in_backward, sent))
    assert seen[1] == seen[2], "in another order"
    (first,) = {name for during, _ in seen for name in during}
    assert seen[1][1] == sorted(seen[1][1], key=lambda name: name != first)
    run.single.gradients(split, 0)
    run.single.step()
    run.check()


# Norms


@on_ranks(4)
@cells(split=SPLITS)
def test_norms_count_each_element_once(split: str) -> None:
    run = Beside(split)
    backward(split, run.modules, 0)
    run.single.gradients(split, 0)
    for norm_type in (2.0, 1.0, 3.0, INF):
        norms = run.optimizers.grad_norms(norm_type)
        assert list(norms) == list(NAMES) and norms["vision"].dtype == torch.float32
        found = [norm.item() for norm in (*norms.values(), run.optimizers.grad_norm(norm_type))]
        assert found == pytest.approx(run.single.norms(norm_type), rel=1e-6)
    run.optimizers.scale_grads(2.0**-10)
    assert run.optimizers.grad_norm().item() == pytest.approx(run.single.norms()[-1] * 2.0**-10, rel=1e-6)


@on_ranks(4)
def test_a_norm_that_is_not_finite_is_said_on_all_ranks_and_clips_nothing() -> None:
    """The gradients of one rank are NaN, of each of the language's in turn: gloo's MAX forgets a NaN."""
    modules, optimizers = make("0|123")
    for bad in (1, 2, 3):
        if dist.get_rank() == bad:
            handle = modules["language"].lm_head.weight.register_hook(lambda grad: grad * NAN)
        backward("0|123", modules, 0)
        if dist.get_rank() == bad:
            handle.remove()
        assert all(optimizers.grad_norm(norm_type).isnan() for norm_type in (2.0, INF))
        before = optimizers.grad_norms()["vision"]
        optimizers.clip_grad_norm_(1e-3)
        assert optimizers.grad_norms()["vision"] == before
        with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan"):
            optimizers.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizers.zero_grad()


OVERFLOWS = [  # split, kinds, and whose gradient on which of its ranks is what
    *((split, OWNED, *spoiled) for split in SPLITS[:3] for spoiled in (("vision", -1, INF), ("language", -1, NAN))),
    ("01|23", "FSDP2 and owned", "vision", 0, INF),
    ("01|23", "owned and FSDP2", "vision", 1, NAN),
    ("01|23", "owned and FSDP2, attached", "language", 1, INF),
    ("01|23", "FSDP2 and FSDP2", "language", 0, INF),
    ("01|23", "DDP and owned", "language", 1, INF),
    ("01|23", "DDP and FSDP2", "vision", 1, INF),
    ("01|23", "DDP and FSDP2", "language", 0, INF),
    ("0|12", "plain and FSDP2", "vision", 0, INF),  # the fourth rank has nothing
]


@on_ranks(4)
@pytest.mark.parametrize(("split", "kinds", "module", "place", "value"), OVERFLOWS)
def test_a_gradient_that_is_not_finite_anywhere_skips_the_step_everywhere(
    split: str, kinds: str, module: str, place: int, value: float
) -> None:
    """The steps before and after equal those of one process, of every mixture of optimizers."""
    run, spoils = Beside(split, kinds), dist.get_rank() == ranks_of(split)[module][place]
    run.train(range(2), clip=0.05)
    param = next(run.modules[module].parameters()) if spoils else None
    in_backward = spoils and kinds.split(" and ")[NAMES.index(module)] == "owned"  # takes gradients away as they come
    if in_backward:
        handle = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
    backward(split, run.modules, 2)
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


@on_ranks(4)
@cells(split=["01|23", "012|123"], idle=NAMES)
def test_a_module_without_a_backward_pass_is_left_alone(split: str, idle: str) -> None:
    run = Beside(split)
    run.train(range(1))
    backward(split, {name: module for name, module in run.modules.items() if name != idle}, 1)
    run.single.gradients(split, 1, names=[name for name in NAMES if name != idle])
    assert run.optimizers.grad_norms()[idle] == 0 and run.optimizers.grad_norm() > 0
    assert run.optimizers.step() is True
    run.single.step()
    run.train(range(2, 3))
    run.check()


@on_ranks(4)
def test_parameters_that_are_unfrozen_in_a_module_are_not_trained() -> None:
    def frozen(name: str) -> nn.Module:
        model = ExactLM(seed=len(name))
        model.gate.requires_grad_(False)
        return model

    found = []
    for unfreezes in (False, True):
        with mock.patch(f"{__name__}.model_of", frozen):
            modules, optimizers = make("01|23", "owned and FSDP2")
        for step in range(3):
            backward("01|23", modules, step)
            assert optimizers.step() is True
            optimizers.zero_grad()
            for module in modules.values():
                module.get_submodule("gate").requires_grad_(unfreezes)
        found.append([whole(param) for module in modules.values() for param in module.parameters()])
    assert all(map(torch.equal, *found))


# Schedulers, groups and hooks


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [2 * group["lr"] for group in optimizer.param_groups], 8, cycle_momentum=False
    ),
}


@on_ranks(4)
@cells(name=SCHEDULERS)
def test_torchs_schedulers_work_on_all_modules(name: str) -> None:
    run = Beside("0|12" if name == "plateau" else "01|23")  # also on a rank without a module
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (run.optimizers, *run.single.optimizers)]
    for step in range(5):
        run.train(range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
    run.check()


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
def test_a_hook_after_the_step_reads_the_weights_that_the_step_made() -> None:
    run = Beside("0123|0123", OWNED, overlap_param_gather=True)

    def weights() -> Tensor:
        return torch.cat([whole(param).detach().flatten() for m in run.modules.values() for param in m.parameters()])

    read = list[Tensor]()
    run.optimizers.register_step_post_hook(lambda *_: read.append(weights()))
    run.train(range(1))
    for optimizer in run.optimizers.modules.values():
        optimizer.synchronize()
    assert torch.equal(read[0], weights())


# What is refused, and what goes wrong


def test_what_it_cannot_be_used_for_says_so() -> None:
    module = nn.Linear(2, 2)
    optimizers = ModuleOptimizers({"a": torch.optim.SGD(module.parameters(), lr=0.1)})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    for error, words, use in (
        (TypeError, "takes no closure", lambda: optimizers.step(lambda: 1.0)),
        (RuntimeError, "expected a module for this param group", lambda: optimizers.add_param_group({"params": []})),
        (TypeError, "cannot be copied or pickled", lambda: pickle.dumps(optimizers)),
        (RuntimeError, r"use scale_grads\(\)", lambda: scaler.step(optimizers)),
        (ValueError, "unknown module 'aa'; did you mean 'a'", lambda: optimizers.clip_grad_norm_({"aa": 1.0})),
        (ValueError, "max_norm: expected module 'a'", lambda: optimizers.clip_grad_norm_({})),
        (ValueError, "norm_type: expected a number above 0", lambda: optimizers.grad_norm(0)),
    ):
        with pytest.raises(error, match=words):
            use()


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.ModuleList(modules).parameters())


@on_ranks(4)
def test_modules_that_cannot_be_trained_together_are_refused_on_all_ranks() -> None:
    rank = dist.get_rank()
    vision, other, language = (model_of(name) for name in ("vision", "vision", "language"))
    with torch.no_grad():
        other.layers[2].bias[0] += rank == 1
    everyone, half = group_of((0, 1, 2, 3), "vision"), [group_of((0, 1), "half"), group_of((2, 3), "half")][rank // 2]

    def on(group: Any, **options: Any) -> dict[str, Any]:
        return {"vision": optimizer_for(model_of("vision"), process_group=group, **options)}

    order = "expected all modules on all ranks, in one order, with None for modules on other ranks: ranks differ"
    ours, both = {"vision": adam(vision)}, [("vision", adam(vision)), ("language", adam(language))]
    shared, elsewhere = {**ours, "language": adam(language, *vision.layers[: rank == 1])}, on(everyone)
    given: list[tuple[str, dict[str, Any]]] = [
        (order, dict(both[:: -1 if rank == 2 else 1])),
        (order, ours if rank == 1 else {**ours, "language": None}),
        ("module 'language': expected an optimizer on some rank, found none", {**ours, "language": None}),
        ("module 'vision': expected a torch.optim.Optimizer, or None on ", {"vision": vision} if rank == 3 else ours),
        ("expected a mapping from modules' names to optimizers, found {}", {}),
        ("expected every parameter in one module, found '1 of group 0' of 'vision' as ", shared),
        ("their process groups have other sizes: {0: 4,", {"vision": None} if rank == 2 else elsewhere),
        (
            "[0, 1, 2, 3] have an optimizer of module 'vision', but their process groups have other sizes: {0: 2,",
            on(half),
        ),
        ("module 'vision': ranks differ in parameter 4 of group 0", {"vision": adam(other)}),
        (
            "module 'vision': ranks differ in optimizer: 'OwnedOptimizer' on rank 0, 'Adam'",
            on(half) if rank < 2 else ours,
        ),
        (
            "expected no DTensors with Adam, which cannot compute their norm",
            {"vision": adam(sharded(model_of("vision"), everyone)[0])},
        ),
    ]
    for words, optimizers in given:
        fails_with(words, lambda optimizers=optimizers: ModuleOptimizers(optimizers))


@on_ranks(2)
def test_copies_of_any_dtype_are_compared_and_a_rank_that_cannot_is_an_error_on_all() -> None:
    """Otherwise the other ranks wait for what it has."""
    for dtype in (torch.bfloat16, torch.float64, torch.complex128):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, dtype=dtype))])
        ModuleOptimizers({"all": optimizer})
    described = KeyError("broken") if dist.get_rank() == 0 else of_modules.held_by
    broken = mock.patch.object(of_modules, "held_by", side_effect=described)
    with broken, pytest.raises((KeyError, RuntimeError), match="broken"):
        ModuleOptimizers({"all": optimizer})
    ModuleOptimizers({"all": optimizer})


@on_ranks(4)
def test_what_is_refused_in_a_step_on_one_rank_is_an_error_on_all() -> None:
    modules, optimizers = make("01|23", "plain and owned")
    backward("01|23", modules, 0)
    fails_with("reduce their gradients before (DDP does)", optimizers.step)  # copies whose gradients nobody reduced
    groups = {name: dist.new_group(list(of)) for name, of in ranks_of("01|23").items()}
    modules, _ = make("01|23", "plain and plain")
    optimizers = ModuleOptimizers({n: owned(modules[n], groups[n])[1] if n in modules else None for n in NAMES})
    backward("01|23", modules, 0)
    if dist.get_rank() == 2:
        optimizers.modules["language"].param_groups[0]["lr"] = 0.5
    fails_with("module 'language' failed with RanksDisagree", optimizers.step)


@on_ranks(4)
def test_an_interrupted_backward_pass_of_one_module_stops_all_before_they_step() -> None:
    """On rank 1, which catches it; all drop their gradients."""
    run = Beside("01|23")
    run.train(range(1))
    if dist.get_rank() == 1:
        handle = run.modules["vision"].layers[0].weight.register_hook(lambda grad: grad.view(-1, 7, 7))
        with pytest.raises(RuntimeError):
            backward(run.split, run.modules, 1)
        handle.remove()
    else:
        backward(run.split, run.modules, 1)
    with pytest.raises(RuntimeError, match="module 'vision' failed with.*backward pass ended in an exception"):
        run.optimizers.step()
    run.check()  # language has not stepped either
    run.optimizers.zero_grad()
    run.train(range(2, 3))
    run.check()


# State

OTHER_RANKS = ["01|23", "23|01", "3|12"]


@on_ranks(4)
@pytest.mark.parametrize(
    ("kinds", "splits", "by_torch"),
    [
        (OWNED, ["01|23", "0|123", "0|0", "012|123", "01|23", "0123|0123"], False),
        ("FSDP2 and owned", OTHER_RANKS, False),
        ("DDP and FSDP2", OTHER_RANKS, False),
        ("FSDP2 and owned", OTHER_RANKS, True),
    ],
)
def test_training_goes_on_when_the_split_changed(tmp_path: Path, kinds: str, splits: list[str], by_torch: bool) -> None:
    """Each split goes on from what the one before saved, with the learning rates that it had."""
    run = Beside(splits[0], kinds)
    for number, split in enumerate(splits):
        if number > 0:
            run = run.resumed(split, tmp_path, by_torch)
        run.train(range(2 * number, 2 * number + 2))
        run.check()
        for optimizer in (run.optimizers, *run.single.optimizers):
            for group in optimizer.param_groups:
                group["lr"] /= 2
        if by_torch:
            dcp.save({"optimizer": run.optimizers}, checkpoint_id=tmp_path)
        else:
            run.optimizers.save_state_dict(tmp_path)


def stacks(split: str) -> tuple[dict[str, nn.Module], ModuleOptimizers]:
    """Six experts in one weight each, which several ranks own, by a rule that keeps factors at owners."""
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for name, ranks in ranks_of(split).items():
        group = group_of(ranks, name)
        if dist.get_rank() in ranks:
            modules[name], rule = Experts(6, 8), {"name": "soap", "lr": 3e-3, "precondition_frequency": 2}
            optimizers[name] = LayerWiseOptimizer(modules[name], rule, process_group=group, report=False)
    return modules, ModuleOptimizers(optimizers)


@on_ranks(4)
def test_factors_at_the_owners_of_one_weight_go_to_other_ranks(tmp_path: Path) -> None:
    modules, optimizers = stacks("01|23")
    for step in range(2):
        for module in modules.values():
            module(torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        assert optimizers.step()
    optimizers.save_state_dict(tmp_path / "first")
    for number, split in enumerate(("012|123", "3|0123", "01|23")):
        _, optimizers = stacks(split)
        optimizers.load_state_dict_from(tmp_path / ("first" if number == 0 else str(number - 1)))
        optimizers.save_state_dict(tmp_path / str(number))
    first, last = (DcpFolder(tmp_path / name) for name in ("first", "2"))
    assert first.tensors.keys() == last.tensors.keys() and any("GG" in key for key in first.tensors)
    assert all(torch.equal(first.tensor(key).read(), last.tensor(key).read()) for key in first.tensors)


@on_ranks(4)
def test_state_dicts_are_keyed_by_module() -> None:
    """One that is taken before two more steps undoes these."""
    run = Beside("012|123")
    run.train(range(2))
    told: list[str] = []
    run.optimizers.register_state_dict_pre_hook(lambda optimizer: told.append("saved"))
    run.optimizers.register_load_state_dict_post_hook(lambda optimizer: told.append("loaded"))
    saved = copy.deepcopy(run.optimizers.state_dict())
    assert list(saved) == list(run.modules)
    for step in (2, 3):
        backward(run.split, run.modules, step)
        assert run.optimizers.step()
    run.take_weights()
    run.optimizers.load_state_dict({**saved, **{name: None for name in NAMES if name not in run.modules}})
    assert told == ["saved", "loaded"]
    run.train(range(2, 4))
    run.check()


def on_first_rank(change: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        change()
    dist.barrier()


@on_ranks(4)
def test_state_that_is_not_all_there_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder, (_, optimizers) = tmp_path / "state", make("01|23")
    fails_with("'langauge'; did you mean 'language'?", lambda: optimizers.load_state_dict({"langauge": 0}))
    fails_with("expected module", lambda: optimizers.load_state_dict({}))

    def refuses(words: str, by: ModuleOptimizers = optimizers) -> None:
        fails_with(words, lambda: by.load_state_dict_from(folder))

    refuses("expected a finished checkpoint")
    optimizers.save_state_dict(folder)
    misspelled = {new: optimizers.modules.get(name) for name, new in zip(NAMES, ("vision", "langauge"))}
    refuses("unknown module 'language'; did you mean 'langauge'", ModuleOptimizers(misspelled))
    metadata = (folder / ".metadata").read_bytes()
    dist.barrier()  # all have read it before it is damaged
    on_first_rank(lambda: (folder / ".metadata").write_bytes(metadata[:-200]))
    refuses("expected the saved file with CRC32")
    on_first_rank(lambda: (folder / ".metadata").write_bytes(metadata))
    optimizers.load_state_dict_from(folder)
    on_first_rank(lambda: next(folder.glob("__2_*")).unlink())
    refuses("is missing")


@on_ranks(4)
def test_another_kinds_state_and_damaged_state_are_refused_on_all_ranks(tmp_path: Path) -> None:
    (_, on_fsdp2), (_, on_owned), (_, by_sgd) = (
        make("01|23", f"{kind} and owned") for kind in ("FSDP2", "owned", "DDP")
    )
    run = Beside("01|23", "DDP and owned")
    run.train(range(1))
    dcp.save({"optimizer": run.optimizers}, checkpoint_id=tmp_path / "of torch")
    load = functools.partial(dcp.load, {"optimizer": by_sgd}, checkpoint_id=tmp_path / "of torch")
    fails_with("has no state yet; load with load_state_dict_from", load)  # by_sgd has no state to load into
    on_fsdp2.save_state_dict(tmp_path)
    on_owned.load_state_dict_from(tmp_path)
    fails_with("expected parameter", lambda: by_sgd.load_state_dict_from(tmp_path))
    on_first_rank(lambda: (tmp_path / manifest.NAME).unlink())
    damaged = next(tmp_path.glob("__0_*"))
    on_first_rank(lambda: damaged.write_bytes(bytes(damaged.stat().st_size)))
    fails_with("distcp is damaged", lambda: on_fsdp2.load_state_dict_from(tmp_path))


@on_ranks(4)
@cells(kinds=[OWNED, "DDP and FSDP2"])
def test_options_that_differ_are_not_saved(kinds: str, tmp_path: Path) -> None:
    _, optimizers = make("01|23", kinds)
    if dist.get_rank() == 3:
        optimizers.modules["language"].param_groups[0]["lr"] = 0.5
    fails_with("module 'language': ranks differ in lr of param group 0", lambda: optimizers.save_state_dict(tmp_path))
    assert not list(tmp_path.iterdir())


@on_ranks(4)
def test_a_save_that_fails_leaves_the_one_before_and_the_next_removes_it(tmp_path: Path) -> None:
    run = Beside("01|23")
    run.train(range(2))
    run.optimizers.save_state_dict(tmp_path)
    before = sorted(tmp_path.iterdir())
    for group in run.optimizers.param_groups:
        if group["module"] == "language":
            group["note"] = lambda: None  # which no checkpoint can hold
    fails_with(
        "module 'language', param group 0: expected values that", lambda: run.optimizers.save_state_dict(tmp_path)
    )
    dist.barrier()
    assert sorted(tmp_path.iterdir()) == before
    run = run.resumed("0|123", tmp_path)
    run.train(range(2, 3))
    run.check()
    on_first_rank(lambda: (tmp_path / "__0_9.distcp").write_bytes(b""))  # as a crash leaves one
    run.optimizers.save_state_dict(tmp_path)
    after = sorted(tmp_path.iterdir())
    assert set(after) & set(before) == {tmp_path / ".metadata", tmp_path / manifest.NAME} and len(after) == 6
