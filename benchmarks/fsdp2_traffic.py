"""What one optimizer step sends: every collective of a rank, and the bytes that leave it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.exchange import WORD_NBYTES


@dataclass
class Traffic:
    """The collectives of one step of one rank by operation: how many, and the bytes that leave the rank in them."""

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, sent: int) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.sent[operation] = self.sent.get(operation, 0) + sent

    @property
    def count(self) -> int:
        return sum(self.calls.values())

    @property
    def nbytes(self) -> int:
        return sum(self.sent.values())


def count(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> Traffic:
    """Take a step and count what it sends. What ours sends is counted twice, and must be what its plan says, and a word
    to each rank."""
    rank = mesh.get_local_rank()
    with _calls_of_ours() as calls, _Watch(rank, mesh.size()) as watch:
        optimizer.step()
    if isinstance(optimizer, LayerWiseOptimizer):
        (stepper,) = optimizer._steppers
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert len(stepper.plan.atoms) == len(params), "a matrix was not routed to the matrix rule"
        words = WORD_NBYTES * (mesh.size() - 1) if stepper.plan.buckets else 0
        planned = 2 * len(stepper.plan.buckets), stepper.plan.wire_bytes()[rank] + words
        found = calls.calls.get("alltoall_base", 0), calls.sent.get("alltoall_base", 0)
        assert found == planned and calls == watch.traffic, (planned, calls, watch.traffic)
    return watch.traffic


class _Watch(CommDebugMode):
    """Sees every collective of this rank, also those of DTensors."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.rank, self.world_size = rank, world_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.get_total_counts()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.get_total_counts() > before:
            name = str(func._overloadpacket).split(".")[-1].rstrip("_")
            self.traffic.add(name, self.sent(name, args))
        return result

    def sent(self, name: str, args: Sequence[Any]) -> int:
        """Bytes that leave this rank; those of reductions and gathers as if they went around a ring."""
        others, n = self.world_size - 1, self.world_size
        if name == "all_gather_into_tensor":
            return others * nbytes(args[0])
        if name == "reduce_scatter_tensor":
            return others * nbytes(args[0]) // n
        if name == "all_reduce":
            return 2 * others * nbytes(args[0]) // n
        if name == "allreduce":
            return sum(2 * others * nbytes(tensor) // n for tensor in args[0])
        if name == "alltoall_base":
            return _leaves(args[1], args[4], self.rank, n)
        raise NotImplementedError(f"the bytes of a collective {name!r} are not known; add its rule")


@contextlib.contextmanager
def _calls_of_ours() -> Iterator[Traffic]:
    """Our collectives where they leave our code."""
    traffic = Traffic()
    real = TorchCollectives.all_to_all, TorchCollectives.all_reduce_max

    def all_to_all(self: TorchCollectives, received: Tensor, sent: Tensor, into: Any, out: Any) -> Any:
        traffic.add("alltoall_base", _leaves(sent, out, self.rank, self.world_size))
        return real[0](self, received, sent, into, out)

    def all_reduce_max(self: TorchCollectives, tensor: Tensor) -> Any:
        traffic.add("allreduce", 2 * (self.world_size - 1) * nbytes(tensor) // self.world_size)
        return real[1](self, tensor)

    TorchCollectives.all_to_all, TorchCollectives.all_reduce_max = all_to_all, all_reduce_max  # type: ignore
    try:
        yield traffic
    finally:
        TorchCollectives.all_to_all, TorchCollectives.all_reduce_max = real  # type: ignore[method-assign]


def _leaves(sent: Tensor, splits: Sequence[int], rank: int, world_size: int) -> int:
    """Bytes of an all-to-all that go to other ranks; no splits are equal parts."""
    return nbytes(sent) - (splits[rank] * sent.itemsize if splits else nbytes(sent) // world_size)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
