"""The transport of `make test`: every collective against what its values say, on three ranks, and what it promises."""

import math
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.counted import Operations
from tests.support.ranks import RankPool, gathered
from tests.support.wire import INLINE

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OP, RANKS = dist.ReduceOp, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(scope="module")
def shared() -> Iterator[RankPool]:
    pool = RankPool(RANKS, "shared")
    yield pool
    pool.close()


# Values


def values_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums and products every dtype has."""
    return ((torch.arange(numel) + rank) % 5).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def every_collective(numel: int, dtype: torch.dtype, asynchronous: bool) -> None:
    def has(start: Callable[..., Any], outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        work = start(async_op=asynchronous)
        if asynchronous:
            early = [torch.equal(*map(bits, each)) for each in zip(outputs, expected) if each[1].numel()]
            assert not any(early), f"{start}: there before its wait"
            work.wait()
        for found, value in zip(outputs, expected, strict=True):
            assert torch.equal(found, value), start

    me, ranks = dist.get_rank(), range(RANKS)
    values = [values_of(rank, numel, dtype) for rank in ranks]
    stacked, mine, empty = torch.stack(values), values[me].clone(), partial(torch.empty, dtype=dtype)
    reductions = {OP.SUM: stacked.sum(0), OP.PRODUCT: stacked.prod(0), OP.MAX: stacked.amax(0), OP.MIN: stacked.amin(0)}
    for op, expected in reductions.items():
        has(partial(dist.all_reduce, into := mine.clone(), op), [into], [expected.to(dtype)])
    for root in ranks:
        at_root, total = me == root, [stacked.sum(0).to(dtype)]
        into = mine.clone()
        has(partial(dist.broadcast, into, root), [into][at_root:], [values[root]][at_root:])
        into = mine.clone()
        has(partial(dist.reduce, into, root), [into][:at_root], total[:at_root])
        lists = [empty(numel) for _ in ranks if at_root]
        has(partial(dist.gather, mine, lists or None, root), lists, values if at_root else [])
        has(partial(dist.scatter, into := empty(numel), values if at_root else None, root), [into], [values[me]])
    has(partial(dist.all_gather, lists := [empty(numel) for _ in ranks], mine), lists, values)
    has(partial(all_gather_single, into := empty(RANKS * numel), mine), [into], [torch.cat(values)])
    into = empty(RANKS * numel)
    own = into.view(RANKS, numel)[me].copy_(mine)
    has(partial(all_gather_single, into, own), [into], [torch.cat(values)])
    rows = [torch.stack([values_of(rank + part, numel, dtype) for part in ranks]) for rank in ranks]
    summed = torch.stack(rows).sum(0).to(dtype)[me]
    has(partial(reduce_scatter_single, into := empty(numel), rows[me].flatten()), [into], [summed])
    has(partial(dist.reduce_scatter, into := empty(numel), [*rows[me]]), [into], [summed])


def uneven_exchanges(numel: int, dtype: torch.dtype) -> None:
    """From each rank to the first twice as much as to the last, and nothing to the second."""
    me, ranks, counts = dist.get_rank(), range(RANKS), [2 * numel, 0, numel]
    sent = [values_of(me + part, counts[part], dtype) for part in ranks]
    expected = [values_of(rank + me, counts[me], dtype) for rank in ranks]
    received = [torch.empty(counts[me], dtype=dtype) for _ in ranks]
    whole = torch.empty(RANKS * counts[me], dtype=dtype)
    dist.all_to_all(received, sent)
    dist.all_to_all_single(whole, torch.cat(sent), [counts[me]] * RANKS, counts)
    assert all(map(torch.equal, received, expected)) and torch.equal(whole, torch.cat(expected))


@pytest.mark.parametrize("numel", [0, 1, 7, INLINE + 1])
def test_every_collective_has_its_values(shared: RankPool, numel: int) -> None:
    for dtype in DTYPES:
        shared.run(every_collective, numel, dtype, asynchronous=False)
        shared.run(every_collective, numel, dtype, asynchronous=True)
        shared.run(uneven_exchanges, numel, dtype)


def of_other_forms() -> None:
    me, everyone, world = dist.get_rank(), [*range(RANKS)], dist.group.WORLD
    assert gathered({"rank": me}) == [{"rank": rank} for rank in everyone]
    objects = [me, "of the first"] if me == 0 else [None, None]
    dist.broadcast_object_list(objects)
    assert objects == [0, "of the first"]
    mine, of_all = torch.full((2,), float(me)), torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    assert functional.all_reduce(mine, "sum", world).tolist() == [3.0, 3.0]
    assert functional.all_gather_tensor(mine, 0, world).tolist() == of_all.tolist()
    assert functional.reduce_scatter_tensor(of_all, "avg", 0, world).tolist() == [float(me)] * 2
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(me))).sum().backward()
    assert model.module.weight.grad.item() == 1.0
    part = TorchCollectives().part([[0, 2], [1]])
    part.all_reduce(mine)
    assert mine.tolist() == [[2.0, 2.0], [1.0, 1.0]][me == 1]
    dist.barrier()


def messages() -> None:
    """Without a wait more than a socket takes, both ways; received last to first."""
    me, number = dist.get_rank(), 40
    peers = [rank for rank in range(RANKS) if rank != me]
    for at in range(number):
        for peer in peers:
            dist.isend(torch.full((INLINE // 4,), 100.0 * me + at), peer)
    for peer in peers:
        into = [torch.zeros(INLINE // 4) for _ in range(number)]
        works = [dist.irecv(tensor, peer) for tensor in into]
        assert all(tensor.isnan().all() for tensor in into)
        assert all(work.wait() for work in reversed(works))
        assert [tensor.unique().tolist() for tensor in into] == [[100.0 * peer + at] for at in range(number)]


def by_threads() -> None:
    """Each in its own group, whose ranks meet in other orders."""
    groups, found = [dist.new_group() for _ in range(4)], {}

    def work(number: int) -> None:
        for at in range(20):
            tensor = torch.full((3,), float(number + at))
            dist.all_reduce(tensor, group=groups[number])
            found[number, at] = tensor.tolist() == [RANKS * (number + at)] * 3

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads[:: 1 if dist.get_rank() else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(found.values())


@pytest.mark.parametrize("body", [of_other_forms, messages, by_threads])
def test_what_goes_over_it(shared: RankPool, body: Callable[[], None]) -> None:
    shared.run(body)


# What it says it is


def passes_for_gloo() -> None:
    group = TorchCollectives()
    assert group._is_gloo(torch.device("cpu")) and group.device == torch.device("cpu")
    with pytest.raises(ValueError, match="expected NCCL .* found gloo"):
        group.check_device(torch.device("cuda"))
    assert not group.sends(torch.empty(1, device="meta"))
    maximum = torch.tensor([math.nan if place == dist.get_rank() else 1.0 for place in range(RANKS)])
    dist.all_reduce(maximum, OP.MAX)
    assert not maximum.isnan().all(), "of the NaNs of one rank, gloo forgets some"
    sent = torch.ones(2)
    dist.reduce(sent, 0)
    assert dist.get_rank() == 0 or sent.isnan().all(), "what gloo leaves there is no value"
    with Operations() as seen:
        dist.all_reduce(sent)
    assert [name.rsplit(".", 1)[0] for name in seen.names] == ["c10d.allreduce_"]


def test_it_passes_for_gloo(shared: RankPool) -> None:
    shared.run(passes_for_gloo)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16)), "gloo takes its dtypes, found torch.int16"),
    "reduction": (lambda: dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0)), "found PREMUL_SUM"),
    "sizes": (lambda: dist.all_gather([*map(torch.ones, range(RANKS))], torch.ones(dist.get_rank())), "equal sizes"),
    "device": (lambda: dist.all_reduce(torch.ones(1, device="meta")), "gloo takes memory of cpu, found meta"),
    "call": (lambda: dist.broadcast(torch.ones(1), src=dist.get_rank()), r"ranks differ: rank 0 has .* rank 1 has"),
}


def refuse(what: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[what][1]):
        REFUSED[what][0]()


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses_what_gloo_refuses_and_calls_that_differ(shared: RankPool, what: str) -> None:
    shared.run(refuse, what)


# Waits that are dropped


def dropped_in(module: str) -> list[float]:
    names = {"__name__": module, "dist": dist}
    exec("def start(tensor):\n    dist.all_reduce(tensor, async_op=True)", names)
    names["start"](tensor := torch.ones(1))
    return tensor.tolist()


def drops() -> None:
    assert dropped_in("torch.distributed.fsdp.engine") == [3.0], "others may"
    assert dropped_in("lwopt_backend.engine") != [3.0]


def test_a_dropped_wait_shows(shared: RankPool) -> None:
    shared.run(drops)


# Ranks that do not come


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1), async_op=True).wait()


def test_the_peers_of_a_rank_that_died_raise_at_once(shared: RankPool) -> None:
    """The group's timeout is half an hour."""
    with pytest.raises(AssertionError) as failed:
        shared.run(one_dies)
    told, gone, other = failed.value.errors
    assert "lost: rank 1 died" in gone and all("rank 1 is gone: connection closed" in error for error in (told, other))


def one_does_not_come() -> None:
    """And then does, to a group that the others have given up. Their world is as it was."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if late := dist.get_rank() == 2:
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=group)  # for which the others had sent their part
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting 0.5 s for rank "):
            dist.all_reduce(torch.ones(1), group=group)
    if not late:
        dist.barrier()
    dist.barrier()


def without_memory() -> None:
    """One rank may write no more than 4 kB into a file."""
    if one := dist.get_rank() == 1:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    with pytest.raises(RuntimeError, match="File too large"):
        dist.all_reduce(torch.ones(INLINE), group=(group := dist.new_group()))
    if one:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.raises(RuntimeError, match="File too large"):
        dist.barrier(group)


def without_descriptors() -> None:
    """As a Python that was built for an older Linux, and for folders that end on disks."""
    made, create = [], tempfile.TemporaryFile
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create")
        patch.setattr(tempfile, "TemporaryFile", lambda: made.append(create()) or made[-1])
        dist.all_reduce(tensor := torch.ones(INLINE))
    assert len(made) == 1 and tensor.unique().tolist() == [3.0]


@pytest.mark.parametrize("body", [one_does_not_come, without_memory, without_descriptors])
def test_what_is_missing_is_an_error_or_done_without(shared: RankPool, body: Callable[[], None]) -> None:
    shared.run(body)
