"""What plain PyTorch refuses, and what happens when a rank, a backward pass or the model breaks: never a hang."""

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from lwopt_backend.runtime.buffers import BucketBuffers, Ledger, PartsPending
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.cells import cells
from tests.support.on_ranks import on_ranks
from tests.support.plain import Branches, Turn, assert_same, back, made, optimizer_in, train_ours, truth
from tests.support.ranks import RankPool


# Models and options
def float8() -> nn.Module:
    model = Branches()
    model.left.weight = nn.Parameter(model.left.weight.to(torch.float8_e4m3fn), requires_grad=True)
    return model


def on_meta() -> nn.Module:
    model = Branches()
    model.left.to("meta")
    return model


def sharded_by_fsdp() -> nn.Module:
    return FullyShardedDataParallel(Branches(), use_orig_params=True, device_id=torch.device("cpu"))


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
        back(model, 0)
    return optimizer


def a_second_optimizer() -> None:
    model, _optimizer = made()
    optimizer_in(model)


def forward_after_a_broken_pass() -> None:
    model, _optimizer = made()
    breaks_at(model, "left.weight")
    with pytest.raises(Broken):
        back(model, 0)
    back(model, 1)


def with_buffer(buffer: Tensor) -> nn.Module:
    model = Branches()
    model.register_buffer("there", buffer)
    return model


def some_sparse() -> Tensor:
    return torch.eye(2).to_sparse() if dist.get_rank() else torch.eye(2)


def with_wide_gradients(dtype: torch.dtype | None) -> nn.Module:
    model = Branches().bfloat16()
    model.left.weight.grad_dtype = dtype
    return model


def tied_by_memory() -> nn.Module:
    """torch.optim and DDP keep such weights equal, as decoders that are tied to encoders by ``weight.data``."""
    model = Branches()
    model.right.weight.data = model.left.weight.data
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: DDP(Branches()), "wrapped in DistributedDataParallel; pass the module inside"),
    "DDP within": (lambda: nn.Sequential(DDP(Branches())), "its module '0' is wrapped in DistributedDataParallel"),
    "FSDP": (sharded_by_fsdp, "found the model sharded by FullyShardedDataParallel, which flattens matrices; pass the"),
    "float8": (float8, "'left.weight' is stored in float8_e4m3fn; expected float32, bfloat16, float16 or float64"),
    "float8 on one rank": (lambda: float8() if dist.get_rank() else Branches(), "float8_e4m3fn"),
    "tied by memory": (tied_by_memory, "'left.weight' and 'right.weight' share memory, so a step of one would change"),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(7, 6, sparse=True)),
        "expected dense gradients, found sparse ones of '0'",
    ),
    "wide gradients": (
        lambda: with_wide_gradients(torch.float32 if dist.get_rank() else torch.bfloat16),
        "'left.weight' has the attribute grad_dtype torch.float32, but its gradients are kept in torch.bfloat16; keep",
    ),
    "gradients of any dtype": (lambda: with_wide_gradients(None), "'left.weight' has the attribute grad_dtype None"),
    "meta": (on_meta, "'left.weight': expected values, found none on the meta device"),
    "frozen on meta": (
        lambda: with_buffer(torch.ones(2, device="meta")),
        "found 'there', a torch.strided tensor on meta",
    ),
    "sparse buffer on one rank": (lambda: with_buffer(some_sparse()), "where the process group can send it, found"),
    "a buffer of another shape": (lambda: with_buffer(torch.ones(1 + dist.get_rank())), "there (1,) torch.float32"),
}
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    # gloo would read tensors that lie elsewhere as if they were in its memory.
    "gloo for other devices": (lambda: TorchCollectives().check_device(torch.device("cuda")), "cuda"),
    "a glob that matches nothing": (
        lambda: passes(1).grad_norm("middel.*"),
        "'middel.*' matches no trained parameter;",
    ),
    "a second optimizer": (a_second_optimizer, "'first.weight' belongs to an earlier LayerWiseOptimizer that is"),
    "forward after a broken pass": (forward_after_a_broken_pass, "call optimizer.zero_grad() on all ranks before the"),
    "several reentrant checkpoints": (lambda: passes(1, Repeated), "several reentrant checkpoints use it. Use"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", [*MODELS, *CALLS])
def test_what_cannot_work_is_refused_on_all_ranks_in_words(case: str) -> None:
    make, message = {**MODELS, **CALLS}[case]
    with pytest.raises(Exception, match=re.escape(message)):
        optimizer_in(make()) if case in MODELS else make()


# An exception inside backward
class Broken(Exception):
    """The user's own."""


def breaks_at(model: nn.Module, name: str) -> Any:
    def fail(grad: Tensor) -> Tensor:
        raise Broken(name)

    return model.get_parameter(name).register_hook(fail)


AGAIN = r"expected the optimizer's zero_grad\(\) on all ranks after an error .* The error was: LayerWiseOptimizer: "
BROKEN = "LayerWiseOptimizer: a backward pass ended in an exception; all gradients are dropped, on all ranks (rank 1)"


@on_ranks()
@cells(
    ranks=[3],
    where=["last.weight", "left.weight", "first.weight"],  # at the first gradient, in the middle, at the last one
    after=["it drops, others step", "all step", "all drop", "all break"],
    mode=["plain", "kept gradients", "lazy return", "no overlap"],
    apart=[False, True],
)
def test_a_broken_backward_pass_is_dropped_and_training_goes_on(where: str, after: str, mode: str, apart: bool) -> None:
    """On rank 1, in the second step, without which training goes on as it would; or ``apart``, under no_sync."""
    model, optimizer = made(mode=mode)
    train_ours(model, optimizer, 1)
    breaks = dist.get_rank() == 1 or after == "all break"
    handle = breaks_at(model, where) if breaks else None
    fails, nothing = pytest.raises(Broken), contextlib.nullcontext()
    with optimizer.no_sync() if apart else nothing, fails if breaks else nothing:
        back(model, 1)
    if handle is not None:
        handle.remove()
    if after == "all step" or (after == "it drops, others step" and not breaks):
        for message in (f"^{re.escape(BROKEN)}$", AGAIN):
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
    optimizer.zero_grad()
    train_ours(model, optimizer, (2, 3))
    assert_same(model, truth((0, 2, 3)))


@on_ranks(2)
def test_gradients_after_an_error_are_not_scaled_until_cleared() -> None:
    """Nor those of the next pass, although ranks had agreed on as many passes before the error."""
    model, optimizer = made()
    back(model, 0)
    torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    if dist.get_rank() == 1:
        handle = breaks_at(model, "left.weight")
        with pytest.raises(Broken):
            back(model, 1)
        handle.remove()
    else:
        back(model, 1)
    with pytest.raises(RuntimeError, match=f"^{re.escape(BROKEN)}$"):
        optimizer.step()
    back(model, 1)
    with pytest.raises(RuntimeError, match=AGAIN):
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)


@on_ranks(2)
def test_gradients_that_one_rank_drops_are_used_by_none() -> None:
    model, optimizer = made()
    back(model, 5)
    if dist.get_rank() == 0:
        for message in (r"another rank has called zero_grad\(\) where this one uses its gradients", AGAIN):
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
    optimizer.zero_grad()
    train_ours(model, optimizer, 2)
    assert_same(model, truth(2))


@pytest.mark.on_gloo  # where a collective that some ranks call later holds up none of their other groups
@on_ranks(4)
def test_unlike_numbers_of_passes_train_nothing() -> None:
    """After unlike numbers of passes nothing trains until gradients are cleared. Instances have other numbers, so that
    every reduction meets its own."""
    model, optimizer = made(group_size=2)
    for _ in range(2 if dist.get_rank() < 2 else 1):
        back(model, 7)
    for message in ("ranks ran different numbers of backward passes", AGAIN, AGAIN):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    with pytest.raises(RuntimeError, match=AGAIN):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    train_ours(model, optimizer, 2)
    assert_same(model, truth(2))


# A rank without memory, or whose wait fails
@contextlib.contextmanager
def without_memory(fails_at: int | None) -> Iterator[list[int]]:
    """Within it the allocation of this number fails, of those for gradients, once. Yields the sizes of all."""
    sizes, allocate = list[int](), Ledger.empty

    def empty(ledger: Ledger, numel: int, *args: Any) -> Tensor:
        sizes.append(numel)
        if len(sizes) - 1 == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(ledger, numel, *args)

    with mock.patch.object(Ledger, "empty", empty):
        yield sizes


class InDtype(Branches):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        return super().forward(x.to(self.first.weight.dtype), use)


def left_alone(turn: Turn) -> None:
    turn.back(use="left")  # nothing comes for ``right``, whose bucket leaves at the end


@on_ranks()
@cells(
    lambda mode, dtype, **_: mode in ("plain", "lazy return") or dtype == torch.float32,
    ranks=[3],
    mode=["plain", "kept gradients", "lazy return", "no overlap"],
    after=["it drops", "it steps", "it drops, others step"],
    dtype=[torch.float32, torch.bfloat16],  # of which the owners' sums need memory of their own
)
def test_a_rank_without_memory_meets_the_others_again(mode: str, after: str, dtype: torch.dtype) -> None:
    """Whichever allocation failed on rank 1, in backward or in the step. It counted a bucket as sent before it was, and
    then called one collective fewer than the others."""
    model, optimizer = made(lambda: InDtype(dtype), mode=mode)
    train_ours(model, optimizer, 1, left_alone)
    with without_memory(None) as sizes:
        left_alone(Turn(model, 1, dist.get_rank()))
        if mode == "no overlap":  # then the step sends the gradients
            optimizer.step()
    optimizer.zero_grad()
    (count,) = TorchCollectives().gather_objects(len(sizes))[1:2]
    for number in range(count):
        turn, fails = Turn(model, 2, dist.get_rank()), dist.get_rank() == 1
        with without_memory(number if fails else None), contextlib.ExitStack() as raises:
            if fails:
                raises.enter_context(pytest.raises(torch.OutOfMemoryError))
            left_alone(turn)
            if mode == "no overlap" and fails:
                optimizer.step()
        if after == "it steps" or (after == "it drops, others step" and not fails):
            with pytest.raises(RuntimeError, match=r"ended in an exception; all .* dropped, on all ranks.*\(rank 1\)"):
                optimizer.step()
        optimizer.zero_grad()
    train_ours(model, optimizer, (3,), left_alone)
    untouched, other = made(lambda: InDtype(dtype), mode=mode)
    steps = (0, 1, 3) if mode == "no overlap" else (0, 3)
    train_ours(untouched, other, steps, left_alone)
    assert_same(model, untouched)


@on_ranks(2)
@pytest.mark.parametrize("kept", [False, True])
def test_a_rank_that_misses_a_collective_of_others_calls_no_more(kept: bool) -> None:
    """Sums that have arrived are sent on: to other instances, or those that are kept to all ranks. Without memory for
    that, ranks cannot send, here all of them. Before, each went on with the next collective."""
    model, optimizer = made(lambda: InDtype(torch.bfloat16), **{"keep_full_grads": True} if kept else {"group_size": 1})
    back(model, 0)
    optimizer.zero_grad()
    where: Any = (BucketBuffers, "spread_gradients") if kept else (PartsPending, "room")
    fails = mock.patch.object(*where, side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with fails, pytest.raises(torch.OutOfMemoryError):
        back(model, 1)
    for call in (optimizer.zero_grad, optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="end all ranks, and resume from a checkpoint.*OutOfMemoryError: CUDA"):
            call()


@on_ranks(2)
@pytest.mark.parametrize("once", [RuntimeError("Connection closed by peer"), KeyboardInterrupt()])
def test_values_that_did_not_arrive_are_read_by_nobody(once: BaseException) -> None:
    """The second forward pass after an error read what was there: weights of both steps."""
    model, optimizer = made(mode="lazy return")
    back(model, 0)
    optimizer.step()
    with mock.patch.object(BucketBuffers, "receive_values", side_effect=once), pytest.raises(type(once)):
        back(model, 1)
    refused = f"expected the values of other ranks, but .* resume from a checkpoint.*{type(once).__name__}"
    for read in (lambda: back(model, 1), model.state_dict, optimizer.synchronize):
        with pytest.raises(RuntimeError, match=refused):
            read()


@on_ranks(2)
def test_a_gradient_that_was_lost_is_never_a_mean() -> None:
    """A rank that caught an error of its norm or step and called it again trained on the gradients that were left."""
    model, optimizer = made(mode="no overlap")
    back(model, 0)
    fails = mock.patch.object(Ledger, "empty", side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with fails, pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"reducing gradients ended in an exception; all are dropped.*\(rank 0\)"):
        optimizer.step()
    optimizer.zero_grad()
    train_ours(model, optimizer, (1,))
    assert_same(model, truth((1,)))


@on_ranks(2)
def test_all_in_flight_is_waited_for_although_a_wait_fails() -> None:
    """Or a transport would write into buffers that are free."""
    model, optimizer = made(group_size=1)
    waited, wait = list[PartsPending](), PartsPending.wait

    def fails(pending: PartsPending) -> None:
        waited.append(pending)
        wait(pending)
        raise RuntimeError("Connection closed by peer")

    back(model, 0)
    crossing = [task for task in optimizer._manager._reducing.values() if task.at == "sums across instances"]
    with mock.patch.object(PartsPending, "wait", fails), pytest.raises(RuntimeError, match="Connection closed"):
        optimizer._manager.drop_gradients()
    assert len(set(map(id, waited))) == len(crossing) > 1
    back(model, 1)
    optimizer.step()


# The model is changed behind the optimizer's back
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "replaced": (lambda model: setattr(model, "left", nn.Linear(11, 7)), "are no longer in the model (replaced)"),
    "cast": (lambda model: model.double(), "was moved or has new data (model.to(), param.data = ...)"),
    "other data": (lambda model: setattr(model.right.weight, "data", torch.zeros(7, 11)), "'right.weight' was moved"),
}


@on_ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_changed_model_is_an_error_on_all_ranks(how: str, everywhere: bool) -> None:
    """A changed model is an error on all ranks that names the parameter."""
    (change, message), (model, optimizer) = CHANGES[how], made()
    train_ours(model, optimizer, 1)
    turn = Turn(model, 1, dist.get_rank())
    if everywhere or turn.rank == 1:
        change(model)
    with pytest.raises(RuntimeError, match=f"{re.escape(message)}.*\\(rank {0 if everywhere else 1}\\)"):
        model(turn.rows().to(model.first.weight.dtype)).square().mean().backward()
        optimizer.step()


# A rank hangs, or does something else. That the others end where one dies: test_ranks_that_differ.py
class Gone(Exception):
    """Ends what a rank does; to the others it is as if it hung."""


def one_rank_hangs(when: str) -> None:
    """Rank 1. Collectives of the others time out soon from then on, not before: a busy machine may be slow."""
    model, optimizer = made(process_group=dist.new_group())
    train_ours(model, optimizer, 1)

    def here(*args: object) -> None:
        if dist.get_rank() == 1:
            raise Gone
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)

    manager = optimizer._manager
    if when == "late in backward":
        model.first.weight.register_hook(here)
    else:
        send = manager.send_values
        manager.send_values = lambda *args: (here(), send(*args))[1]
    train_ours(model, optimizer, (1,))


@pytest.mark.on_gloo  # whose timeout it is; the strict transport's thread ends the process with it
@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("when", ["late in backward", "when parameters return"])
def test_rank_that_hangs_ends_the_others(ranks: RankPool, when: str) -> None:
    """A rank that hangs ends the others by the timeout of their group."""
    first, of_the_end, last = ranks.errors(one_rank_hangs, when)
    ranks.close()  # their group is broken
    assert of_the_end.startswith("Gone")
    assert all(re.search("Timed out|timeout|Connection closed", error) for error in (first, last)), (first, last)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["plain", "kept gradients", "lazy return"])
def test_a_graph_from_before_the_step_is_refused_as_by_torch(mode: str) -> None:
    model, optimizer = made(mode=mode)
    loss = Turn(model, 0, dist.get_rank()).loss()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
