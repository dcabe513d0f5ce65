"""Gradients of owned storage: kept on all ranks as under DDP, measured as on one process, in 16 bits, as NCCL moves
them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.maximum import largest_of_all
from lwopt_backend.runtime.ranks import Pending
from tests.cells import cells
from tests.models import UnevenLM
from tests.owned import BUCKET_MB, difference, exact_sums, shares, train
from tests.owned import optimizer_for as optimizer_of_lm
from tests.owned_scenarios import (
    MODES,
    Branches,
    differences,
    loss_of,
    made,
    one_pass,
    optimizer_for,
    optimizers_of,
    rows,
    step_all,
    train_ours,
    truth,
)
from tests.ranks import RankPool

LAYOUTS = ["padded", "compact", "auto"]
FULL = pytest.mark.full

# keep_full_grads: mean gradients in param.grad, to look at and to change

USES = {
    "both branches": lambda rank: "both",
    "a branch per rank": lambda rank: "left" if rank else "right",
    "one branch on no rank": lambda rank: "left",
}


def as_under_ddp(use: str, layout: str) -> list[bool]:
    """On gradients as they are; accumulated locally, then reduced, then another pass on top of the reduced ones."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    model = Branches()
    optimizer = optimizer_for(model, "kept gradients", layout=layout)
    found = []
    for part, apart in enumerate([True, False, False]):
        for trained, no_sync in ((model, optimizer.no_sync), (wrapped, wrapped.no_sync)):
            with no_sync() if apart else contextlib.nullcontext():
                loss_of(trained(rows(0, rank, part), use=USES[use](rank))).backward()
        pairs = [(mine.grad, its.grad) for mine, its in zip(model.parameters(), wrapped.module.parameters())]
        found.append(all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs))
    return found


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("use", USES)
def test_kept_gradients_are_those_of_ddp(ranks: RankPool, use: str, layout: str) -> None:
    assert ranks.run(as_under_ddp, use, layout) == [[True] * 3] * 2


def halve_in_place(model: nn.Module) -> None:
    model.left.weight.grad.mul_(0.5)
    model.last.bias.grad.zero_()


def assign(model: nn.Module) -> None:
    model.left.weight.grad = model.left.weight.grad * 0.5
    model.last.bias.grad = torch.ones_like(model.last.bias)


def take_away(model: nn.Module) -> None:
    model.left.weight.grad = model.last.bias.grad = None


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def changed_difference(change: Callable[[nn.Module], object]) -> float:
    model, optimizer = made(mode="kept gradients")
    train_ours(model, optimizer, 3, change=change)
    return difference(model, truth(3, change=change))


@pytest.mark.parametrize("change", [halve_in_place, assign, take_away, clip], ids=lambda change: change.__name__)
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=FULL)], indirect=True)
def test_what_the_user_does_to_gradients_is_stepped_on(ranks: RankPool, change: Callable[[nn.Module], object]) -> None:
    assert set(ranks.run(changed_difference, change)) == {0.0}


def forgotten_difference(set_to_none: bool, mode: str) -> float:
    model, optimizer = made(mode=mode)
    train_ours(model, optimizer, 3, forget=lambda model: model.zero_grad(set_to_none=set_to_none))
    return difference(model, truth(3))


@pytest.mark.parametrize("mode", ["plain", "kept gradients"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_models_zero_grad_does_as_well(ranks: RankPool, set_to_none: bool, mode: str) -> None:
    assert ranks.run(forgotten_difference, set_to_none, mode) == [0.0, 0.0]


def moved_without_gradient(set_to_none: bool) -> bool:
    """A step that only ``left`` takes part in: is ``right``, whose gradient is forgotten or zero, changed?"""
    model = Branches()
    optimizer = optimizer_for(model, "kept gradients")
    for step, use in enumerate(["both", "left"]):
        model.zero_grad(set_to_none=set_to_none)
        before = model.right.weight.detach().clone()
        loss_of(model(rows(step, 0), use=use)).backward()
        optimizer.step()
    return not torch.equal(before, model.right.weight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_zero_gradient_is_stepped_on_and_none_is_not(ranks: RankPool, set_to_none: bool) -> None:
    assert ranks.run(moved_without_gradient, set_to_none) == [not set_to_none] * 2


def scaled_difference(mode: str) -> tuple[float, float]:
    """With torch.amp.GradScaler, whose second step overflows on one rank; the truth is a loop without that step.

    Scales are powers of two and sums of two commute, so not a bit may differ. Also returns the scale in the end.
    """
    model, expected = Branches(), Branches()
    optimizer, theirs = optimizer_for(model, mode), optimizers_of(expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1000)
    for step in range(4):
        loss = loss_of(model(rows(step, dist.get_rank())))
        scaler.scale(loss * float("inf") if step == 1 and dist.get_rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            for rank in range(2):
                (loss_of(expected(rows(step, rank))) / 2).backward()
            step_all(theirs)
    return difference(model, expected), scaler.get_scale()


def test_grad_scaler_works_on_kept_gradients_and_refuses_others(ranks: RankPool) -> None:
    """It finds none to unscale; going on with scaled ones would be silent."""
    assert ranks.run(scaled_difference, "kept gradients") == [(0.0, 2.0**3)] * 2
    assert all("set keep_full_grads" in error for error in ranks.errors(scaled_difference, "plain"))


# Norms and zeros: every element counts once

SUBSETS: dict[str, Any] = {
    "all": "*",
    "matrices of the layers": "layers.*.weight",
    "two globs": ["embedding.*", "*bias"],
    "one parameter": "gate.weight",
}
ORDERS = (2.0, 1.0, 3.0, float("inf"))


def halved(grad: Tensor) -> Tensor:
    """Half of the elements exactly zero, the same ones on every rank."""
    return grad * (torch.arange(grad.numel()).view(grad.shape) % 2)


def with_zeros(tied: bool = False) -> nn.Module:
    model = exact_sums(UnevenLM(tied=tied))
    for name in ("layers.2.weight", "layers.2.bias", "embedding.weight"):
        model.get_parameter(name).register_hook(halved)
    return model


def after_backward(tied: bool = False, **options: Any) -> Any:
    """The optimizer of such a model after a backward pass."""
    model = with_zeros(tied)
    optimizer = optimizer_of_lm(model, bucket_mb=BUCKET_MB, **options)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    return optimizer


def mean_gradients(tied: bool = False) -> dict[str, Tensor]:
    model = with_zeros(tied)
    for tokens, targets in shares(0, dist.get_world_size()):
        model(tokens, targets).backward()
    return {name: param.grad / dist.get_world_size() for name, param in model.named_parameters()}


def measured(tied: bool, **options: Any) -> list[dict[str, tuple[list[float], int]]]:
    """Ours and one process's, by subset: norms and zeros."""
    optimizer, grads = after_backward(tied, **options), mean_gradients(tied)
    ours, theirs = {}, {}
    for subset, names in SUBSETS.items():
        norms = [float(optimizer.grad_norm(names, norm_type=order)) for order in ORDERS]
        ours[subset] = norms, optimizer.count_zeros(names)
        globs = [names] if isinstance(names, str) else names
        flat = torch.cat([g.flatten() for n, g in grads.items() if any(fnmatchcase(n, glob) for glob in globs)])
        norms = [float(torch.linalg.vector_norm(flat.double(), order)) for order in ORDERS]
        theirs[subset] = norms, int((flat == 0).sum())
    return [ours, theirs]


@cells(
    lambda ranks, group_size, **_: group_size is None or ranks == 4,
    ranks=[1, 3, 4],
    group_size=[None, 1, 2],
    layout=["padded", "compact"],
    tied=[False, True],
    keep=[False, True],
)
def test_norms_and_zeros_equal_one_process(
    ranks: RankPool, group_size: int | None, layout: str, tied: bool, keep: bool
) -> None:
    options = {"group_size": group_size, "layout": layout, "keep_full_grads": keep}
    for ours, theirs in ranks.run(measured, tied, **options):
        for subset, (norms, zeros) in theirs.items():
            assert ours[subset][0] == pytest.approx(norms, rel=1e-6), subset
            assert ours[subset][1] == zeros and (subset == "one parameter" or zeros > 0), subset


def clipped(max_norm: float) -> tuple[float, float, float]:
    """The norm that clipping returns, the norm after it, and torch's."""
    optimizer = after_backward()
    before = float(optimizer.clip_grad_norm_(max_norm))
    torchs = torch.nn.utils.get_total_norm(list(mean_gradients().values()))
    return before, float(optimizer.grad_norm()), float(torchs)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_scales_to_the_norm_asked_for(ranks: RankPool, max_norm: float) -> None:
    for before, after, torchs in ranks.run(clipped, max_norm):
        assert before == pytest.approx(torchs, rel=1e-5)
        assert after == pytest.approx(min(max_norm, before), rel=1e-4)


def a_glob_that_matches_nothing() -> None:
    after_backward().grad_norm("layer.*")


def test_a_glob_that_matches_nothing_is_an_error(ranks: RankPool) -> None:
    for error in ranks.errors(a_glob_that_matches_nothing):
        assert "'layer.*'" in error and "layers." in error, error


def norms_with_a_nan_on(rank: int) -> list[float]:
    """Of gradients, of order infinity and 2, and of a number per rank: gloo's own maximum of them goes on."""
    optimizer = after_backward()
    optimizer.grad_norm()
    if dist.get_rank() == rank:
        grads = [grad for bucket in optimizer.core.manager.buckets for grad in bucket.owned_grads()]
        grads[0][0] = float("nan")
    mine = torch.tensor(float("nan") if dist.get_rank() == rank else float(dist.get_rank()))
    found = [optimizer.grad_norm(norm_type=float("inf")), optimizer.grad_norm()]
    found.append(largest_of_all(TorchCollectives(), mine))
    optimizer.zero_grad()
    return [float(norm) for norm in found]


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_no_norm_and_no_maximum_hides_a_nan(ranks: RankPool) -> None:
    assert [found[-1] for found in ranks.run(norms_with_a_nan_on, -1)] == [2.0] * 3
    for rank in range(3):
        assert all(math.isnan(norm) for norms in ranks.run(norms_with_a_nan_on, rank) for norm in norms)


# Sums as they round


def weights_on_real_gradients(layout: str, **options: Any) -> dict[str, Tensor]:
    model = UnevenLM()
    train(model, optimizer_of_lm(model, layout=layout, **options), 5, accumulation=2, clip=0.3)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks", [4, pytest.param(3, marks=FULL)], indirect=True)
def test_layouts_and_runs_equal_each_other_on_gradients_as_they_are(ranks: RankPool) -> None:
    """Whatever the sums round to: owners of one instance add in rank order, wherever their part of a bucket lies."""
    size = {"group_size": ranks.world_size}
    first, *others = (ranks.run(weights_on_real_gradients, layout, **size)[0] for layout in (*LAYOUTS, "auto"))
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


# 16-bit parameters: as one process that keeps fp32 masters

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = {**MODES, "fp32 gradients": {"grad_dtype": "float32"}}


class Narrow(Branches):
    """All parameters in 16 bits, or all but those of the norm and the last layer."""

    def __init__(self, dtype: torch.dtype, mixed: bool) -> None:
        super().__init__()
        wide = [self.norm, self.last] if mixed else []
        for module in self.children():
            module.to(torch.float32 if module in wide else dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        x = (self.left(x) + self.right(x)).to(self.norm.weight.dtype)
        return self.last(self.norm(x)).float()


class Masters:
    """One process: fp32 copies of the parameters are stepped, and rounded into the model."""

    def __init__(self, model: Narrow) -> None:
        self.model, self.masters = model, Branches()
        self.take()
        self.optimizers = optimizers_of(self.masters)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.masters.parameters(), self.model.parameters()))

    def take(self) -> None:
        for master, param in self.pairs():
            master.data.copy_(param.data)

    def step(self, step: int) -> None:
        for rank in range(2):
            one_pass(self.model, None, step, rank)
            for master, param in self.pairs():
                grad = param.grad.float()
                master.grad, param.grad = grad if master.grad is None else master.grad + grad, None
        for master in self.masters.parameters():
            master.grad /= 2
        step_all(self.optimizers)
        for master, param in self.pairs():
            param.data.copy_(master.data)


def as_with_masters(dtype: str, mixed: bool, layout: str, mode: str, load: bool) -> bool:
    """On gradients as they are: a sum of two ranks' in fp32 has one value."""
    model, expected = Narrow(DTYPES[dtype], mixed), Masters(Narrow(DTYPES[dtype], mixed))
    optimizer = optimizer_for(model, layout=layout, **NARROW[mode])
    for step in range(4):
        if load and step == 2:
            weights = {name: param + 0.25 for name, param in expected.model.state_dict().items()}
            model.load_state_dict(weights)
            expected.model.load_state_dict(weights)
            expected.take()
        one_pass(model, None, step, dist.get_rank())
        step_all([optimizer])
        expected.step(step)
    optimizer.synchronize()
    return all(torch.equal(mine, other) for other, mine in zip(expected.model.parameters(), model.parameters()))


@cells(
    lambda dtype, mixed, mode, load, **_: (
        ((dtype, mixed) == ("bf16", False) or not (load or mode == "fp32 gradients"))
        and (not load or mode in ("plain", "lazy return", "step in backward"))
    ),
    dtype=list(DTYPES),
    mixed=[False, True],
    layout=["padded", "compact"],
    mode=["plain", "lazy return", "step in backward", "fp32 gradients"],
    load=[False, True],
)
def test_narrow_models_equal_one_process_with_masters_which_loaded_weights_replace(
    ranks: RankPool, dtype: str, mixed: bool, layout: str, mode: str, load: bool
) -> None:
    assert ranks.run(as_with_masters, dtype, mixed, layout, mode, load) == [True, True]


# The collectives that NCCL takes, on gloo: reduce-scatter and all-gather, of equal parts and of unequal ones


@contextlib.contextmanager
def not_from_rank_to_rank() -> Iterator[set[str]]:
    """Groups that are not ``direct``, as NCCL's; says which ran. gloo lacks one, which broadcasts replace."""
    calls: set[str] = set()
    replaced = ("direct", "reduce_scatter_parts", "all_gather_parts")
    before = {name: getattr(TorchCollectives, name) for name in replaced}

    def direct(self: TorchCollectives, device: torch.device) -> bool:
        return False

    def reduce_scatter(self: TorchCollectives, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        calls.add("reduce_scatter uneven" if whole is None else "reduce_scatter_tensor")
        return before["reduce_scatter_parts"](self, mine, parts, whole)

    def all_gather(self: TorchCollectives, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        calls.add("all_gather uneven" if whole is None else "all_gather_into_tensor")
        if whole is not None:
            return before["all_gather_parts"](self, parts, whole)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=self.group, group_src=rank)
        return dist.barrier(self.group, async_op=True)

    try:
        for name, replacement in zip(replaced, (direct, reduce_scatter, all_gather)):
            setattr(TorchCollectives, name, replacement)
        yield calls
    finally:
        for name, original in before.items():
            setattr(TorchCollectives, name, original)


def accumulation(model, no_sync, step, rank):
    with no_sync():
        loss_of(model(rows(step, rank))).backward()
    loss_of(model(rows(step, rank, 1))).backward()


def trained(mode: str, layout: str, **options: Any) -> tuple[float, set[str]]:
    with not_from_rank_to_rank() as calls:
        found = differences(accumulation, modes=(mode,), layouts=(layout,), **options)
    return found[mode], calls


@cells(
    lambda mode, group_size, **_: mode == "plain" or group_size is None,
    ranks=[2, 4],
    layout=LAYOUTS,
    mode=["plain", "kept gradients"],
    group_size=[None, 2],
)
def test_collectives_of_parts_equal_one_process(
    ranks: RankPool, layout: str, mode: str, group_size: int | None
) -> None:
    for off, calls in ranks.run(trained, mode, layout, group_size=group_size):
        assert off == 0.0
        if layout == "padded":
            assert calls == {"reduce_scatter_tensor", "all_gather_into_tensor"}
        if layout == "compact":
            assert {"reduce_scatter uneven", "all_gather uneven"} <= calls


def direct_of_unknown_device() -> None:
    """gloo serves CPU tensors from rank to rank; tensors elsewhere would be read as if they were in its memory."""
    TorchCollectives().direct(torch.device("cuda"))


def test_gloo_is_refused_for_other_devices(ranks: RankPool) -> None:
    assert all("cuda" in error for error in ranks.errors(direct_of_unknown_device))
