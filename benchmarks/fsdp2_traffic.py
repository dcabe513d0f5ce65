"""What one optimizer step sends: every collective of a rank, and the bytes that leave it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.runtime.collectives import TorchCollectives


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
    """Take a step and count what it sends. What ours sends is counted twice, and must be what its plan says."""
    rank = mesh.get_local_rank()
    with _calls_of_ours() as calls, Watch(rank, mesh.size()) as watch:
        optimizer.step()
    if isinstance(optimizer, LayerWiseOptimizer):
        (stepper,) = optimizer._steppers
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert len(stepper.plan.atoms) == len(params), "a matrix was not routed to the matrix rule"
        planned = 2 * len(stepper.plan.buckets), stepper.plan.wire_bytes()[rank]
        found = calls.calls.get("alltoall_base", 0), calls.sent.get("alltoall_base", 0)
        assert found == planned and calls == watch.traffic, (planned, calls, watch.traffic)
    return watch.traffic


class Watch(TorchDispatchMode):
    """Sees every collective this rank takes part in, whoever starts it. All of them are over all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again, with what it does to the shards
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._overloadpacket.__name__.strip("_")
            if name not in ("barrier", "wait_tensor", "wrap_tensor_autograd"):
                self.traffic.add(name, self.sent(name, args))
        return func(*args, **(kwargs or {}))

    def sent(self, name: str, args: Any) -> int:
        """Bytes that leave this rank; those of reductions and gathers as if they went around a ring."""
        others, n = self.world_size - 1, self.world_size
        if name == "allreduce":
            return sum(2 * others * nbytes(tensor) // n for tensor in args[0])
        if name == "all_reduce":
            return 2 * others * nbytes(args[0]) // n
        if name == "all_gather_into_tensor":
            return others * nbytes(args[0])
        if name == "allgather_base":
            return others * nbytes(args[1])
        if name in ("allgather", "allgather_into_tensor_coalesced"):
            return others * sum(nbytes(tensor) for tensor in args[1])
        if name == "reduce_scatter_tensor":
            return others * nbytes(args[0]) // n
        if name == "reduce_scatter_base":
            return others * nbytes(args[1]) // n
        if name == "broadcast":
            return others * sum(nbytes(tensor) for tensor in args[0]) if args[2] == self.rank else 0
        if name == "send":
            return sum(nbytes(tensor) for tensor in args[0])
        if name == "recv":
            return 0
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
