"""What owned storage refuses, and what happens when a rank, a backward pass or the model breaks: never a hang."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.cells import cells
from tests.owned import difference
from tests.owned_scenarios import Branches, loss_of, made, one_pass, optimizer_for, rows, train_ours, truth
from tests.ranks import RankFailed, RankPool

# Models and options


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
    return fully_shard(Branches(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_by_fsdp() -> nn.Module:
    return FullyShardedDataParallel(Branches(), use_orig_params=True, device_id=torch.device("cpu"))


def in_ddp() -> nn.Module:
    return DistributedDataParallel(Branches())


def around_ddp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), in_ddp())


class Repeated(nn.Module):
    """Uses a layer in two reentrant checkpoints, before anything but it and ``other`` has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return checkpoint(self.layer, self.other(x), use_reentrant=True)


def passes(count: int, build: Callable[[], nn.Module] = Branches, **options: Any) -> Any:
    model, optimizer = made(build, **options)
    for _ in range(count):
        one_pass(model, None, 0, dist.get_rank())
    return optimizer


def a_second_optimizer() -> None:
    model, _optimizer = made()
    optimizer_for(model)


def forward_after_a_broken_pass() -> None:
    model, _optimizer = made()
    breaks_at(model, "left.weight")
    with pytest.raises(Broken):
        one_pass(model, None, 0, dist.get_rank())
    one_pass(model, None, 1, dist.get_rank())


STEPS = {"step_in_backward": True}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DDP": (lambda: optimizer_for(in_ddp()), "wrapped in DistributedDataParallel; pass the module inside"),
    "DDP within": (lambda: optimizer_for(around_ddp()), "its module '1' is wrapped in DistributedDataParallel"),
    "FSDP2": (
        lambda: optimizer_for(sharded_by_fsdp2()),
        "'first.weight' is a DTensor; for fully_shard models use lwopt_backend.integrations",
    ),
    "FSDP": (
        lambda: optimizer_for(sharded_by_fsdp()),
        "the model is sharded by FullyShardedDataParallel, which flattens matrices; pass the",
    ),
    "float8": (
        lambda: optimizer_for(float8()),
        "'left.weight' is stored in float8_e4m3fn; expected float32, bfloat16, float16 or float64 "
        "(computing in fp8 over bfloat16 parameters works)",
    ),
    "sparse": (lambda: optimizer_for(sparse()), "'0' makes sparse gradients, which no buffer holds; set sparse=False"),
    "meta": (lambda: optimizer_for(on_meta()), "'left.weight' is on the meta device and has no values yet"),
    "unknown option": (lambda: made(bucket_md=3), "did you mean 'bucket_mb'?"),
    "layout": (lambda: made(layout="paded"), "'auto', 'padded' or 'compact'"),
    "group size": (lambda: made(group_size=3), "group size 3 does not divide the 2 data-parallel ranks"),
    "step and keep": (lambda: made(**STEPS, keep_full_grads=True), "needs overlap_grad_reduce, and no keep"),
    "step without overlap": (lambda: made(**STEPS, overlap_grad_reduce=False), "needs overlap_grad_reduce"),
    "options of one rank": (
        lambda: made(bucket_mb=float(1 + dist.get_rank())),
        "ranks differ in bucket_mb: 1.0 on rank 0, 2.0 on rank 1",
    ),
    "a model of one rank": (lambda: optimizer_for(float8() if dist.get_rank() else Branches()), "float8_e4m3fn"),
    "clipping after steps in backward": (
        lambda: passes(1, **STEPS).clip_grad_norm_(1.0),
        "with step_in_backward gradients are used before their norm is known",
    ),
    "two passes with steps in backward": (
        lambda: passes(2, **STEPS),
        "it takes one backward pass per step: accumulate under no_sync()",
    ),
    "a second optimizer": (
        a_second_optimizer,
        "'first.weight' belongs to an earlier optimizer of ours, which is still in use",
    ),
    "a group added later": (
        lambda: made()[1].add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))]}),
        "takes no param group after it was made",
    ),
    "a copy": (lambda: copy.deepcopy(made()[1]), "cannot be copied or pickled"),
    "forward after a broken pass": (
        forward_after_a_broken_pass,
        "call optimizer.zero_grad() on all ranks before the next forward pass",
    ),
    "several reentrant checkpoints": (
        lambda: passes(1, Repeated),
        "it is used in several reentrant checkpoints; use checkpoint(..., use_reentrant=False)",
    ),
}


def refused(case: str) -> None:
    REFUSED[case][0]()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_all_ranks_in_words(ranks: RankPool, case: str) -> None:
    for error in ranks.errors(refused, case):
        assert REFUSED[case][1] in error, error


# An exception inside backward


class Broken(Exception):
    """The user's own."""


def breaks_at(model: nn.Module, name: str) -> Any:
    def fail(grad: Tensor) -> Tensor:
        raise Broken(name)

    return model.get_parameter(name).register_hook(fail)


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def broken_backward(where: str, after: str, mode: str) -> tuple[str, float]:
    """A step whose backward pass breaks on rank 1; what step() says, and how far training is off without that step."""
    model, optimizer = made(mode=mode)
    train_ours(model, optimizer, 1)
    handle = breaks_at(model, where) if dist.get_rank() == 1 or after == "all break" else None
    said = ""
    try:
        one_pass(model, None, 1, dist.get_rank())
    except Broken:
        if after == "all step":
            said = said_by(optimizer.step)
    else:
        if after != "all drop":
            said = said_by(optimizer.step)
    if handle is not None:
        handle.remove()
    optimizer.zero_grad()  # as a user would; where step() has raised there is nothing left to drop
    train_ours(model, optimizer, (2, 3))
    return said, difference(model, truth((0, 2, 3)))


@cells(
    ranks=[3],
    where=["last.weight", "left.weight", "first.weight"],  # at the first gradient, in the middle, at the last one
    after=["it drops, others step", "all step", "all drop", "all break"],
    mode=["plain", "kept gradients", "lazy return", "no overlap"],
)
def test_a_broken_backward_pass_is_dropped_and_training_goes_on(
    ranks: RankPool, where: str, after: str, mode: str
) -> None:
    text = "LayerWiseOptimizer: a backward pass ended in an exception; all gradients are dropped, on all ranks (rank 1)"
    says = {"it drops, others step": [text, "", text], "all step": [text] * 3}.get(after, [""] * 3)
    assert ranks.run(broken_backward, where, after, mode) == [(said, 0.0) for said in says]


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
    train_ours(model, optimizer, 2)
    return difference(model, truth(2))


def test_a_pass_that_breaks_under_no_sync_is_dropped_on_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(broken_in_no_sync) == [0.0, 0.0]


def dropped_on_one_rank() -> tuple[str, float]:
    """Rank 1 forgets its gradients where the others use theirs."""
    model, optimizer = made()
    one_pass(model, None, 5, dist.get_rank())
    said = "" if dist.get_rank() == 1 else said_by(optimizer.step)
    optimizer.zero_grad()
    train_ours(model, optimizer, 2)
    return said, difference(model, truth(2))


def test_gradients_that_one_rank_drops_are_used_by_none(ranks: RankPool) -> None:
    (said, far), other = ranks.run(dropped_on_one_rank)
    assert "another rank has called zero_grad() where this one uses its gradients" in said
    assert far == 0.0 and other == ("", 0.0)


def bad_gradients(value: float) -> list[bool]:
    """On rank 1 only. Every rank's norm says so; the step goes through with them, as torch's does."""
    model, optimizer = made()
    loss = loss_of(model(rows(0, dist.get_rank())))
    (loss * value if dist.get_rank() == 1 else loss).backward()
    norms = [optimizer.grad_norm(), optimizer.grad_norm(norm_type=float("inf"))]
    said = said_by(lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True))
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
    optimizer = optimizer_for(model)
    train_ours(model, optimizer, 1)
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


# A rank ends, or does something else


class Gone(Exception):
    """Ends what a rank does; to the others it is as if it hung."""


def end(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Gone


def one_rank_ends(how: str, when: str) -> None:
    """Rank 1, in a group whose collectives time out after a few seconds."""
    model, optimizer = made(process_group=dist.new_group(timeout=timedelta(seconds=3)))
    train_ours(model, optimizer, 1)
    if dist.get_rank() == 1:
        if "backward" in when:
            where = model.last.weight if when == "early in backward" else model.first.weight
            where.register_hook(lambda grad: end(how))
        elif when == "before the step":
            optimizer.register_step_pre_hook(lambda *args: end(how))
        else:
            optimizer._manager.send_values = lambda number: end(how)
    train_ours(model, optimizer, (1,))


def assert_the_others_say_where(ranks: RankPool, how: str, when: str, ended: str, what: str) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks.run(one_rank_ends, how, when)
    first, of_the_end, last = caught.value.errors
    assert ended in of_the_end
    for error in (first, last):
        assert what in error and "another rank has ended, hangs, or ran other backward passes" in error, error
        assert "bucket " in error and "the first is '" in error, error


@pytest.fixture
def ranks_of_broken_groups(rank_pools: dict[int, RankPool]) -> Iterator[RankPool]:
    yield rank_pools[3]
    rank_pools[3].renew()


HEARING = "hearing from all ranks which parameters have gradients, with gradients of"


@pytest.mark.parametrize(
    "when, what",
    [("late in backward", HEARING), ("when parameters return", "bringing its parameters to all ranks failed")],
)
def test_a_rank_that_hangs_ends_the_others_with_an_error_that_says_where(
    ranks_of_broken_groups: RankPool, when: str, what: str
) -> None:
    assert_the_others_say_where(ranks_of_broken_groups, "hangs", when, "Gone", what)


@pytest.mark.parametrize(
    "when, what",
    [
        ("early in backward", "bringing its gradients to their owners failed"),
        pytest.param("before the step", HEARING, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_ends_the_others_with_an_error_that_says_where(when: str, what: str) -> None:
    pool = RankPool(3)
    try:
        assert_the_others_say_where(pool, "dies", when, "lost: rank 1 died", what)
    finally:
        pool.remove()


def one_rank_runs_more_passes(bucket_mb: float) -> None:
    group = dist.new_group(timeout=timedelta(seconds=8))  # in which it also has to be made, on a busy machine
    model, optimizer = made(process_group=group, bucket_mb=bucket_mb)
    for _ in range(2 if dist.get_rank() == 1 else 1):
        one_pass(model, None, 0, dist.get_rank())
    optimizer.step()


# With small buckets the ranks wait for each other in backward, until their time is over.
@pytest.mark.parametrize("bucket_mb", [1.0, pytest.param(0.0001, marks=pytest.mark.full)])
def test_other_numbers_of_backward_passes_are_an_error(ranks_of_broken_groups: RankPool, bucket_mb: float) -> None:
    for error in ranks_of_broken_groups.errors(one_rank_runs_more_passes, bucket_mb):
        few = "since the last step some ranks have reduced the gradients of 2 backward passes, others of 1" in error
        assert few or "ran other backward passes" in error, error
        assert few or bucket_mb < 1, error
