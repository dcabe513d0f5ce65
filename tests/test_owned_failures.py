"""What owned storage refuses, and what happens when a rank, a backward pass or the model breaks: never a hang."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lwopt_backend import LayerWiseOptimizer
from tests.owned import difference, exact_sums, optimizer_for
from tests.owned_scenarios import BUCKET_MB, Branches, loss_of, rows, train_ours, truth
from tests.ranks import RankFailed, RankPool


def one_pass(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()


def made(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, LayerWiseOptimizer]:
    model = exact_sums(Branches()) if model is None else model
    return model, optimizer_for(model, bucket_mb=BUCKET_MB, **options)


# Refused at construction


def float8() -> nn.Module:
    model = Branches()
    model.left.weight = nn.Parameter(model.left.weight.to(torch.float8_e4m3fn), requires_grad=True)
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 6, sparse=True), Branches())


def on_meta() -> nn.Module:
    model = Branches()
    model.left = nn.Linear(11, 7, device="meta")
    return model


def sharded_by_fsdp2() -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(Branches(), mesh=mesh)


def sharded_by_fsdp() -> nn.Module:
    return FullyShardedDataParallel(Branches(), use_orig_params=True, device_id=torch.device("cpu"))


def within_ddp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), DistributedDataParallel(Branches()))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: DistributedDataParallel(Branches()), "wrapped in DistributedDataParallel; pass the module inside"),
    "DDP within": (within_ddp, "its module '1' is wrapped in DistributedDataParallel"),
    "FSDP2": (sharded_by_fsdp2, "'first.weight' is a DTensor; for fully_shard models use lwopt_backend.integrations"),
    "FSDP": (sharded_by_fsdp, "the model is sharded by FullyShardedDataParallel, which flattens matrices; pass the"),
    "float8": (float8, "'left.weight' is stored in float8_e4m3fn; expected float32, bfloat16, float16 or float64 "
     "(computing in fp8 over bfloat16 parameters works)"),
    "sparse": (sparse, "'0' makes sparse gradients, which no buffer holds; set sparse=False"),
    "meta": (on_meta, "'left.weight' is on the meta device and has no values yet"),
}  # fmt: skip


def refused_model(which: str) -> None:
    made(MODELS[which][0]())


@pytest.mark.parametrize("which", MODELS)
def test_models_are_refused_by_name_on_all_ranks(ranks: RankPool, which: str) -> None:
    for error in ranks.errors(refused_model, which):
        assert MODELS[which][1] in error and "LayerWiseOptimizer" in error, error


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"bucket_md": 3}, "did you mean 'bucket_mb'?"),
    "layout": ({"layout": "paded"}, "'auto', 'padded' or 'compact'"),
    "group size": ({"group_size": 3}, "group size 3 does not divide the 2 data-parallel ranks"),
    "step and keep": ({"step_in_backward": True, "keep_full_grads": True}, "needs overlap_grad_reduce, and no keep"),
    "step without overlap": ({"step_in_backward": True, "overlap_grad_reduce": False}, "needs overlap_grad_reduce"),
}


def refused_options(which: str) -> None:
    optimizer_for(Branches(), **OPTIONS[which][0])


@pytest.mark.parametrize("which", OPTIONS)
def test_options_are_refused_on_all_ranks(ranks: RankPool, which: str) -> None:
    for error in ranks.errors(refused_options, which):
        assert OPTIONS[which][1] in error, error


def different_options() -> None:
    optimizer_for(Branches(), bucket_mb=float(1 + dist.get_rank()))


def model_refused_on_one_rank() -> None:
    made(float8() if dist.get_rank() else Branches())


@pytest.mark.parametrize(
    "function, text",
    [
        (different_options, "ranks differ in bucket_mb: 1.0 on rank 0, 2.0 on rank 1"),
        (model_refused_on_one_rank, "float8_e4m3fn"),
    ],
)
def test_what_one_rank_does_otherwise_stops_all(ranks: RankPool, function: Callable[[], None], text: str) -> None:
    for error in ranks.errors(function):
        assert text in error, error


def clipping_after_steps_in_backward() -> None:
    model, optimizer = made(step_in_backward=True)
    one_pass(model, None, 0, dist.get_rank())
    optimizer.clip_grad_norm_(1.0)


def two_passes_with_steps_in_backward() -> None:
    model, optimizer = made(step_in_backward=True)
    for _ in range(2):
        one_pass(model, None, 0, dist.get_rank())


def a_second_optimizer() -> None:
    model, optimizer = made()
    made(model)


def a_group_added_later() -> None:
    model, optimizer = made()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))]})


def a_copied_optimizer() -> None:
    _, optimizer = made()
    copy.deepcopy(optimizer)


def a_weight_in_several_reentrant_checkpoints() -> None:
    model, optimizer = made(Repeated())
    one_pass(model, None, 0, dist.get_rank())


class Repeated(nn.Module):
    """Uses a layer in two reentrant checkpoints, before anything but it and ``other`` has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return checkpoint(self.layer, self.other(x), use_reentrant=True)


CALLS: dict[Callable[[], None], str] = {
    clipping_after_steps_in_backward: "with step_in_backward gradients are used before their norm is known",
    two_passes_with_steps_in_backward: "it takes one backward pass per step: accumulate under no_sync()",
    a_second_optimizer: "'first.weight' belongs to an earlier optimizer of ours, which is still in use",
    a_group_added_later: "takes no param group after it was made",
    a_copied_optimizer: "cannot be copied or pickled",
    a_weight_in_several_reentrant_checkpoints: "it is used in several reentrant checkpoints; use checkpoint(..., "
    "use_reentrant=False)",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls_are_refused_on_all_ranks(ranks: RankPool, call: Callable[[], None]) -> None:
    for error in ranks.errors(call):
        assert CALLS[call] in error, error


# An exception inside backward


class Broken(Exception):
    """The user's own."""


def breaks_at(model: nn.Module, name: str) -> Any:
    def fail(grad: Tensor) -> Tensor:
        raise Broken(name)

    return model.get_parameter(name).register_hook(fail)


WHERE = ["last.weight", "left.weight", "first.weight"]  # at the first gradient, in the middle, at the last one


def train_on(model: nn.Module, optimizer: LayerWiseOptimizer, steps: list[int]) -> None:
    for step in steps:
        one_pass(model, None, step, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def broken_backward(where: str, after: str, **options: Any) -> tuple[str, float]:
    """A step whose backward pass breaks on rank 1; what step() says, and how far training is off without that step."""
    model, optimizer = made(**options)
    train_on(model, optimizer, [0])
    handle = breaks_at(model, where) if dist.get_rank() == 1 or after == "all break" else None
    said = ""
    try:
        one_pass(model, None, 1, dist.get_rank())
    except Broken:
        if after == "it drops, others step":
            optimizer.zero_grad()
        elif after == "all step":
            said = _said(optimizer.step)
    else:
        if after != "all drop":
            said = _said(optimizer.step)
    if handle is not None:
        handle.remove()
    if after in ("all drop", "all break"):
        optimizer.zero_grad()
    elif said:
        optimizer.zero_grad()  # as a user would; there is nothing left to drop
    train_on(model, optimizer, [2, 3])
    return said, difference(model, truth(Branches, one_pass, [0, 2, 3], dist.get_world_size()))


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


OPTIONS_OF_BACKWARD = [{}, {"keep_full_grads": True}, {"overlap_param_gather": True}, {"overlap_grad_reduce": False}]


@pytest.mark.parametrize("options", OPTIONS_OF_BACKWARD, ids=str)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_broken_backward_pass_is_dropped_and_training_goes_on(
    ranks: RankPool, where: str, options: dict[str, Any]
) -> None:
    text = "LayerWiseOptimizer: a backward pass ended in an exception; all gradients are dropped, on all ranks (rank 1)"
    found = ranks.run(broken_backward, where, "it drops, others step", **options)
    assert found == [(text, 0.0), ("", 0.0), (text, 0.0)]
    assert ranks.run(broken_backward, where, "all step", **options) == [(text, 0.0)] * 3
    assert ranks.run(broken_backward, where, "all drop", **options) == [("", 0.0)] * 3
    assert ranks.run(broken_backward, where, "all break", **options) == [("", 0.0)] * 3


def broken_in_no_sync() -> float:
    """On rank 1, in the first of two micro-batches; all ranks hear of it and drop what they have."""
    model, optimizer = made()
    handle = breaks_at(model, "left.weight") if dist.get_rank() == 1 else None
    with optimizer.no_sync():
        try:
            one_pass(model, None, 7, dist.get_rank())
        except Broken:
            handle.remove()
    optimizer.zero_grad()
    train_on(model, optimizer, [0, 1])
    return difference(model, truth(Branches, one_pass, 2, dist.get_world_size()))


def test_a_pass_that_breaks_under_no_sync_is_dropped_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(broken_in_no_sync) == [0.0, 0.0]


def forward_after_a_broken_pass() -> None:
    model, optimizer = made()
    breaks_at(model, "left.weight")
    with pytest.raises(Broken):
        one_pass(model, None, 0, dist.get_rank())
    one_pass(model, None, 1, dist.get_rank())


def test_going_on_after_a_broken_pass_is_an_error_that_says_what_to_do(ranks: RankPool) -> None:
    for error in ranks.errors(forward_after_a_broken_pass):
        assert "call optimizer.zero_grad() on all ranks before the next forward pass" in error


def dropped_on_one_rank() -> tuple[str, float]:
    """Rank 1 forgets its gradients where the others use theirs."""
    model, optimizer = made()
    one_pass(model, None, 5, dist.get_rank())
    said = "" if dist.get_rank() == 1 else _said(optimizer.step)
    optimizer.zero_grad()
    train_on(model, optimizer, [0, 1])
    return said, difference(model, truth(Branches, one_pass, 2, dist.get_world_size()))


def test_gradients_that_one_rank_drops_are_used_by_none(ranks: RankPool) -> None:
    (said, far), other = ranks.run(dropped_on_one_rank)
    assert "another rank has called zero_grad() where this one uses its gradients" in said
    assert far == 0.0 and other == ("", 0.0)


# Gradients that are not numbers


def bad_gradients(value: float) -> list[bool]:
    """On rank 1 only. Every rank's norm says so; the step goes through with them, as torch's does."""
    model, optimizer = made()
    loss = loss_of(model(rows(0, dist.get_rank())))
    (loss * value if dist.get_rank() == 1 else loss).backward()
    norms = [optimizer.grad_norm(), optimizer.grad_norm(norm_type=float("inf"))]
    said = _said(lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True))
    optimizer.step()
    bad = not all(param.isfinite().all() for param in model.parameters())
    return [not norm.isfinite() for norm in norms] + ["set error_if_nonfinite=False" in said, bad]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_told_to_all_ranks(ranks: RankPool, value: float) -> None:
    assert ranks.run(bad_gradients, value) == [[True] * 4] * 2


# The model is changed behind the optimizer's back


def replaces(model: nn.Module) -> None:
    model.left.weight = nn.Parameter(model.left.weight.detach().clone())


def casts(model: nn.Module) -> None:
    model.to(torch.float64)


def assigns_data(model: nn.Module) -> None:
    model.right.weight.data = model.right.weight.data.clone()


def adds(model: nn.Module) -> None:
    model.new = nn.Linear(3, 3)


def unfreezes(model: nn.Module) -> None:
    model.norm.bias.requires_grad_(True)


CHANGES = {
    replaces: "parameter 'left.weight' is no longer in the model (replaced)",
    casts: "was moved or got other data (model.to(), param.data = ...)",
    assigns_data: "parameter 'right.weight' was moved or got other data",
    adds: "parameters 'new.weight', 'new.bias' are trained now, but not when the optimizer was made (new",
    unfreezes: "parameter 'norm.bias' is trained now, but not when the optimizer was made",
}


def changed(change: Callable[[nn.Module], None], everywhere: bool) -> None:
    model = Branches()
    model.norm.bias.requires_grad_(False)
    model, optimizer = made(model)
    train_on(model, optimizer, [0])
    if everywhere or dist.get_rank() == 1:
        change(model)
    x = rows(1, dist.get_rank()).to(model.first.weight.dtype)
    loss_of(model(x)).backward()
    optimizer.step()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_an_error_on_all_ranks_that_names_the_parameter(
    ranks: RankPool, change: Callable[[nn.Module], None], everywhere: bool
) -> None:
    for error in ranks.errors(changed, change, everywhere):
        assert CHANGES[change] in error and f"(rank {0 if everywhere else 1})" in error, error


def frozen_later() -> float:
    """Two steps, the second without a layer that is frozen in between and trained again after it, as under torch."""

    def scenario(model, no_sync, step, rank):
        model.left.requires_grad_(step != 1)
        one_pass(model, no_sync, step, rank)

    model, optimizer = made()
    train_ours(model, optimizer, scenario, 3)
    return difference(model, truth(Branches, scenario, 3, dist.get_world_size()))


def test_a_parameter_that_is_frozen_for_a_while_is_left_alone(ranks: RankPool) -> None:
    assert ranks.run(frozen_later) == [0.0, 0.0]


# A rank ends, hangs, or does something else


@pytest.fixture
def ranks_with_an_end() -> Iterator[RankPool]:
    """Three ranks of which not all survive the test."""
    pool = RankPool(3)
    yield pool
    pool.remove()


def end(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def one_rank_ends(how: str, when: str) -> None:
    """Rank 1, in a group whose collectives time out after two seconds."""
    model, optimizer = made(process_group=dist.new_group(timeout=timedelta(seconds=2)))
    train_on(model, optimizer, [0])
    if dist.get_rank() == 1:
        if "backward" in when:
            where = model.last.weight if when == "early in backward" else model.first.weight
            where.register_hook(lambda grad: end(how))
        elif when == "before the step":
            optimizer.register_step_pre_hook(lambda *args: end(how))
        else:
            optimizer._manager.send_values = lambda number: end(how)
    train_on(model, optimizer, [1])


@pytest.mark.parametrize(
    "how, when, what",
    [
        ("dies", "early in backward", "bringing its gradients to their owners failed"),
        ("hangs", "late in backward", "hearing from all ranks which parameters have gradients, with gradients of"),
        ("dies", "before the step", "hearing from all ranks which parameters have gradients, with gradients of"),
        ("hangs", "when parameters return", "bringing its parameters to all ranks failed"),
    ],
)
def test_the_others_end_with_an_error_that_says_where(
    ranks_with_an_end: RankPool, how: str, when: str, what: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks_with_an_end.run(one_rank_ends, how, when)
    first, ended, last = caught.value.errors
    assert ended in ("lost: rank 1 died", "lost: rank 1 did not answer")
    for error in (first, last):
        assert what in error and "another rank has ended, hangs, or ran other backward passes" in error, error
        assert "bucket " in error and "the first is '" in error, error


def one_rank_runs_more_passes(bucket_mb: float) -> None:
    model = Branches()
    group = dist.new_group(timeout=timedelta(seconds=8))  # in which it also has to be made, on a busy machine
    optimizer = optimizer_for(model, process_group=group, bucket_mb=bucket_mb)
    for _ in range(2 if dist.get_rank() == 1 else 1):
        one_pass(model, None, 0, dist.get_rank())
    optimizer.step()


@pytest.mark.parametrize("bucket_mb", [1.0, BUCKET_MB])
def test_other_numbers_of_backward_passes_are_an_error(ranks_with_an_end: RankPool, bucket_mb: float) -> None:
    for error in ranks_with_an_end.errors(one_rank_runs_more_passes, bucket_mb):
        few = "since the last step some ranks have reduced the gradients of 2 backward passes, others of 1" in error
        assert few or "ran other backward passes" in error, error
        assert few or bucket_mb < 1, error
