"""Gradients in plain PyTorch: kept on all ranks as under DDP, measured as on one process, in 16 bits, and in their
range."""

import contextlib
import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.presence import largest_of_all
from tests.support import plain
from tests.support.cells import cells
from tests.support.models import LinearLoss, UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.plain import exact_sums, shares
from tests.support.zero import Masters, batch_shares

# keep_full_grads: mean gradients in param.grad, to look at and to change
USES: dict[str, Callable[[int], str]] = {"both branches": lambda rank: "both"}
USES |= {"a branch per rank": lambda rank: "left" if rank else "right", "one branch on no rank": lambda rank: "left"}


@on_ranks(2)
@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("use", USES)
def test_kept_gradients_are_those_of_ddp(use: str, layout: str) -> None:
    """On gradients as they are; accumulated locally, then reduced, then another pass on top of the reduced ones."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(plain.Branches(), find_unused_parameters=True)
    model = plain.Branches()
    optimizer = plain.optimizer_in(model, "kept gradients", layout=layout)
    for part, apart in enumerate([True, False, False]):
        for trained, no_sync in ((model, optimizer.no_sync), (wrapped, wrapped.no_sync)):
            with no_sync() if apart else contextlib.nullcontext():
                plain.Turn(trained, 0, rank).back(part, use=USES[use](rank))
        for ours, theirs in zip(model.parameters(), wrapped.module.parameters()):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def change(model: Any) -> None:
    """In place, by another tensor, by none; and then all of them."""
    model.left.weight.grad.mul_(0.5)
    model.last.bias.grad.zero_()
    model.right.weight.grad = model.right.weight.grad * 0.5
    model.first.bias.grad = torch.ones_like(model.first.bias)
    model.middle[0].weight.grad = model.left.bias.grad = None
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@on_ranks(2, 3)
def test_what_the_user_does_to_gradients_is_stepped_on() -> None:
    plain.assert_trains_exactly(mode="kept gradients", change=change)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_a_zero_gradient_is_stepped_on(set_to_none: bool) -> None:
    model = plain.Branches()
    optimizer = plain.optimizer_in(model, "kept gradients")
    for step, use in enumerate(["both", "left"]):
        model.zero_grad(set_to_none=set_to_none)
        before = model.right.weight.detach().clone()
        plain.Turn(model, step, 0).back(use=use)
        optimizer.step()
    assert torch.equal(before, model.right.weight) == set_to_none


@on_ranks(2)
@pytest.mark.parametrize("mode", plain.MODES)
def test_grad_scaler_unscales_and_skips_on_all_ranks(mode: str) -> None:
    """Fixed: GradScaler neither unscaled nor skipped in plain PyTorch. In its second step one gradient overflows on one
    rank, so only its owner has it; the truth is a loop without that step. Scales are powers of two and sums of two
    commute, so not a bit may differ."""
    model, expected = plain.Branches(), plain.Branches()
    optimizer, theirs = plain.optimizer_in(model, mode), plain.optimizers_of(expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1000)
    for step in range(4):
        turn = plain.Turn(model, step, dist.get_rank())
        overflows = (step, turn.rank) == (1, 0)
        handle = model.left.weight.register_hook(lambda grad, by=math.inf if overflows else 1.0: grad * by)
        scaler.scale(turn.loss()).backward()
        handle.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            plain.mean_gradients(expected, plain.Turn.back, step)
            plain.step_all(theirs)
    optimizer.synchronize()
    plain.assert_same(model, expected)
    assert scaler.get_scale() == 2.0**3


@on_ranks(1, 2)
def test_a_pass_that_follows_a_norm_under_no_sync_counts() -> None:
    model, optimizer = plain.made()
    for step in range(2):
        turn = plain.Turn(model, step, dist.get_rank())
        with optimizer.no_sync():
            turn.back(0)
            optimizer.grad_norm()
            turn.back(1)
        plain.step_all([optimizer])
    plain.assert_same(model, plain.truth(2, scenario=plain.micro_batches(True, True)))


# Norms and zeros: every element counts once
SUBSETS: dict[str, Any] = {"all": "*", "matrices of the layers": "layers.*.weight"}
SUBSETS |= {"two globs": ["embedding.*", "*bias"], "one parameter": "gate.weight"}


def with_zeros(tied: bool = False) -> nn.Module:
    """Half of the elements of three parameters' gradients are exactly zero, the same ones on every rank."""
    model = exact_sums(UnevenLM(tied=tied))
    for name in ("layers.2.weight", "layers.2.bias", "embedding.weight"):
        param = model.get_parameter(name)
        zeros = torch.arange(param.numel()).view(param.shape) % 2
        param.register_hook(lambda grad, zeros=zeros: grad * zeros)
    return model


def after_backward(tied: bool = False, **options: Any) -> Any:
    model = with_zeros(tied)
    optimizer = plain.optimizer_for(model, **options)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    return optimizer


def gradients_of_one_process(tied: bool) -> dict[str, Tensor]:
    model = with_zeros(tied)
    for tokens, targets in shares(0, dist.get_world_size()):
        model(tokens, targets).backward()
    return {name: param.grad / dist.get_world_size() for name, param in model.named_parameters()}


@on_ranks()
@cells(
    lambda ranks, group_size, **_: group_size is None or ranks == 4,
    ranks=[1, 3, 4],
    group_size=[None, 1, 2],
    layout=["padded", "compact"],
    tied=[False, True],
    keep=[False, True],
)
def test_norms_zeros_and_clips_equal_one_process(group_size: int | None, layout: str, tied: bool, keep: bool) -> None:
    grads = gradients_of_one_process(tied)
    optimizer = after_backward(tied, group_size=group_size, layout=layout, keep_full_grads=keep)
    for subset, names in SUBSETS.items():
        globs = [names] if isinstance(names, str) else names
        flat = torch.cat([g.flatten() for n, g in grads.items() if any(fnmatchcase(n, glob) for glob in globs)])
        for order in (2.0, 1.0, 3.0, float("inf")):
            expected = float(torch.linalg.vector_norm(flat.double(), order))
            assert float(optimizer.grad_norm(names, norm_type=order)) == pytest.approx(expected, rel=1e-6), subset
        zeros = int((flat == 0).sum())
        assert optimizer.count_zeros(names) == zeros and (subset == "one parameter" or zeros > 0), subset
    norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
    for largest, left in ((1e6, norm), (0.1, 0.1)):
        found = optimizer.clip_grad_norm_(largest)
        assert found.dtype == torch.float32 and found.shape == () and float(found) == pytest.approx(norm, rel=1e-5)
        assert float(optimizer.grad_norm()) == pytest.approx(left, rel=1e-4)


@on_ranks(3)
@pytest.mark.parametrize("bad", [-1, 0, 1, 2])
def test_no_norm_and_no_maximum_hides_a_nan(bad: int) -> None:
    """One rank has the NaN: norms of gradients, of order infinity and 2, and a number per rank. gloo's own maximum
    ignores a NaN. The step goes through with it, as torch's does."""
    optimizer, rank = after_backward(), dist.get_rank()
    optimizer.grad_norm()
    if rank == bad:
        grads = [grad for bucket in optimizer.core.manager.buckets for grad in bucket.owned_grads()]
        grads[0][0] = float("nan")
    largest = largest_of_all(TorchCollectives(), torch.tensor(float("nan") if rank == bad else float(rank)))
    norms = [optimizer.grad_norm(norm_type=float("inf")), optimizer.grad_norm()]
    assert all(math.isnan(found) == (bad >= 0) for found in (largest, *norms))
    assert bad >= 0 or float(largest) == 2.0
    refused = pytest.raises(RuntimeError, match="set error_if_nonfinite=False")
    with refused if bad >= 0 else contextlib.nullcontext():
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.synchronize()
    assert all(member.param.isfinite().all() for member in optimizer.core.members) == (bad < 0)


@on_ranks()
@cells(
    lambda ranks, group_size, **_: group_size is None or ranks == 4,
    ranks=[2, 3, 4],
    layout=["padded", "compact"],
    group_size=[None, 1, 2],
    keep=[False, True],
)
def test_a_mean_has_the_range_of_ddp(layout: str, group_size: int | None, keep: bool) -> None:
    """fp16 ends at 65504: two gradients of 60000 overflow, and so does the sum of what three divide by two."""
    model = UnevenLM().half()
    optimizer = plain.optimizer_for(model, layout=layout, group_size=group_size, keep_full_grads=keep)
    torch.stack([60000 * param.float().sum() for param in model.parameters()]).sum().backward()
    assert float(optimizer.grad_norm(norm_type=math.inf)) == pytest.approx(60000, rel=2**-10)


# 16-bit parameters: as one process that keeps fp32 masters
NARROW = {**plain.MODES, "fp32 gradients": {"grad_dtype": "float32"}}


def narrow(dtype: torch.dtype, mixed: bool) -> nn.Module:
    model = UnevenLM().to(dtype)
    for module in (model.layers[4], model.lm_head) if mixed else ():
        module.float().register_forward_pre_hook(lambda _, given: given[0].float())
        module.register_forward_hook(lambda _, given, output: output.to(dtype))
    return model


@on_ranks(2)
@cells(
    dtype=[torch.bfloat16, torch.float16],
    mixed=[False, True],
    layout=["padded", "compact"],
    mode=["plain", "lazy return", "fp32 gradients"],
    load=[False, True],
)
def test_narrow_models_equal_fp32_masters(dtype: torch.dtype, mixed: bool, layout: str, mode: str, load: bool) -> None:
    """On gradients as they are: a sum of two ranks' has one value, in the dtype on the way."""
    model, single = narrow(dtype, mixed), Masters(dtype, mode == "fp32 gradients", predivided=True)
    single.low = narrow(dtype, mixed)
    optimizer = plain.optimizer_for(model, layout=layout, **NARROW[mode])
    for step in range(4):
        if load and step == 2:
            weights = {name: param + 0.25 for name, param in single.low.state_dict().items()}
            for each in (model, single.low, single.model):
                each.load_state_dict(weights)
        model(*batch_shares(step, 2)[dist.get_rank()]).backward()
        plain.step_all([optimizer])
        single.advance(step, 2, scale=2.0)  # its loss is that of two micro-batches, halved
    optimizer.synchronize()
    plain.assert_same(model, single.low)


@on_ranks(2)
def test_a_gradient_that_was_dropped_counts_in_no_norm() -> None:
    """Of kept gradients it was still in the owners' buffers, so a clip was at the norm of all."""
    for kept in (False, True):
        model = LinearLoss()
        optimizer = LayerWiseOptimizer(model, lr=0.02, keep_full_grads=kept, report=False)
        model(1.0).backward()
        model.last.bias.grad = None
        expected = pytest.approx((96**2 + 24**2) ** 0.5)
        assert float(optimizer.grad_norm()) == expected
        assert float(optimizer.clip_grad_norm_(1e3)) == expected
