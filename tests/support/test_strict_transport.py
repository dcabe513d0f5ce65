"""The strict transport finds what it promises to find: each fault is made on purpose."""

import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import strict_transport
from tests.support.ranks import RankPool

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
MAX, MIN = dist.ReduceOp.MAX, dist.ReduceOp.MIN
OWNER = """
class Owner:
    def start(self, tensor):
        self.work = dist.all_reduce(tensor, async_op=True)
"""


@pytest.fixture(scope="module")
def strict() -> Iterator[RankPool]:
    pool = RankPool(2, "strict")
    yield pool
    pool.close()


def owner(module: str) -> Any:
    """One in a module of that name, that has started an all-reduce, and its tensor."""
    names = {"__name__": module, "dist": dist}
    exec(OWNER, names)
    made, tensor = names["Owner"](), torch.ones(4)
    made.start(tensor)
    return made, tensor


def changes_an_input() -> None:
    sent, received = torch.ones(2), torch.empty(2 * dist.get_world_size())
    work = all_gather_single(received, sent, async_op=True)
    sent.add_(1)
    work.wait()


def writes_an_output() -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    tensor[0] = 0
    work.wait()


def drops_a_work() -> None:
    made, _ = owner("lwopt_backend.engine")
    del made.work


def of_rank(*values: Any) -> Any:
    return values[dist.get_rank()]


def reduced(tensor: Tensor, **options: Any) -> None:
    dist.all_reduce(tensor, **options)


def differ(*calls: Callable[[Tensor], Any]) -> None:
    of_rank(*calls)(torch.ones(1))


def exchanged(received: list[int], sent: list[int]) -> None:
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)


def gathers_unequal() -> None:
    dist.gather(torch.ones(2), [torch.ones(2), torch.ones(3)], dst=dist.get_rank())


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "input changed": (changes_an_input, "in changes_an_input: an input changed between the start of all_gather_single"),
    "output written": (writes_an_output, "in writes_an_output: an output was written between"),
    "work dropped": (drops_a_work, "in start: the Work of all_reduce was dropped without a wait"),
    "kinds": (lambda: differ(dist.all_reduce, functools.partial(dist.broadcast, src=0)), "all_reduce.*broadcast"),
    "sizes": (
        lambda: reduced(torch.ones(of_rank(3, 4))),
        r"rank 0 .*\[3, .* at tests.support.test.*, rank 1 .*\[4, .* at ",
    ),
    "dtypes": (lambda: reduced(torch.ones(1, dtype=of_rank(torch.half, torch.int))), "float16.*, rank 1 .*int32"),
    "reductions": (lambda: differ(*(functools.partial(reduced, op=op) for op in (MAX, MIN))), "MAX.*, rank 1 .*MIN"),
    "order": (lambda: [reduced(torch.ones(size)) for size in of_rank((2, 3), (3, 2))], r"rank 0 .*\[2.* rank 1 .*\[3"),
    "roots": (lambda: dist.broadcast(torch.ones(1), src=of_rank(0, 1)), r"rank 0 .*\[0, 1.* rank 1 .*\[1, 1"),
    "splits": (lambda: exchanged([1, 2], [1, 2]), "rank 0 has 2 at .*, rank 1 has 1 at "),
    "strides": (lambda: reduced(torch.ones(2, 2).T), r"NCCL takes contiguous tensors, found one of \(1, 2\)"),
    "device": (lambda: reduced(torch.ones(2, device="meta")), "NCCL takes memory of cpu, found meta"),
    "dtype": (lambda: reduced(torch.ones(1, dtype=torch.int16)), "NCCL takes its dtypes, found torch.int16"),
    "reduction": (lambda: reduced(torch.ones(1, dtype=torch.int), op=dist.ReduceOp.BXOR), "its reductions, found BXOR"),
    "tag": (lambda: dist.isend(torch.ones(1), dst=of_rank(1, 0), tag=3), "NCCL takes no tags, found 3"),
    "list": (gathers_unequal, r"NCCL takes tensors of equal sizes, found \[2, 3\]"),
    "overlap": (lambda: all_gather_single((both := torch.ones(4)), both[1:3]), "inputs apart .* found .* overlap"),
}


def make(fault: str) -> None:
    FAULTS[fault][0]()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_collectives_is_found(strict: RankPool, fault: str) -> None:
    for error in strict.errors(make, fault):
        assert re.search(f"StrictError: .*{FAULTS[fault][1]}", error)


def deliver() -> None:
    """Values, and flags, which hold poison until they are waited for. Nothing is said of a Work that goes with its
    owner. What others drop is delivered."""
    tensors = torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert all(tensor.isnan().all() for tensor in tensors[:2]) and tensors[2].item() == 0xA5A5A5A5 - 2**32
    assert all(work.wait() for work in works) and all((tensor == 2).all() for tensor in tensors)
    owner("lwopt_backend.engine")
    assert owner("torch.distributed.fsdp.engine")[1].tolist() == [2] * 4


def exchange_unevenly() -> None:
    parts = [torch.ones(3), torch.ones(2)]
    mine = torch.empty(of_rank(3, 2))
    dist.reduce_scatter(mine, parts)
    dist.all_gather(parts, mine)
    exchanged(of_rank([0, 0], [1, 1]), [0, 1])
    assert (mine == 2).all() and all((part == 2).all() for part in parts)


def lose_a_peer(reason: str, told: str) -> None:
    if dist.get_rank():
        if reason == "died":
            os._exit(1)
        while not Path(told).exists():
            time.sleep(0.05)
        return
    tensor = torch.ones(2)
    patience = math.inf if reason == "died" else 0.5  # whose end is seen at once
    with mock.patch.object(strict_transport, "PATIENCE", patience):
        work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and tensor.isnan().all()
    Path(told).touch()
    threading.Event().wait()  # for the end of the process


@pytest.mark.parametrize("body", [deliver, exchange_unevenly])
def test_results_of_collectives_come_with_wait(strict: RankPool, body: Callable[[], None]) -> None:
    strict.run(body)


@pytest.mark.parametrize("reason", ["died", "did not come"])
def test_a_lost_peer_ends_the_process_after_wait(strict: RankPool, tmp_path: Path, reason: str) -> None:
    with pytest.raises(AssertionError, match="rank 0 died"):
        strict.run(lose_a_peer, reason, str(tmp_path / "told"))
    assert (tmp_path / "told").exists()
