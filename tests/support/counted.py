"""What runs: operations, and what leaves through the door to torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lwopt_backend.runtime.collectives import TorchCollectives


class Operations(TorchDispatchMode):
    """The operations that run within it, reads by the host and allocations among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Counted:
    """Counts all-to-alls on this rank while it is open, ``calls`` with even and uneven parts, and all-gathers of parts;
    among which ``groups`` of ranks, and what is in flight; also the bytes that all-to-alls receive, and the most bytes
    of one exchange, sent and received."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = self.received_bytes = self.most_bytes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.dtypes: set[torch.dtype] = set()
        self.groups: set[tuple[int, ...]] = set()

    def __enter__(self) -> Counted:
        self.original = all_to_all, all_gather = TorchCollectives.all_to_all, TorchCollectives.all_gather_parts
        counted = self

        def started(self: TorchCollectives, kind: str, sent: Tensor, numel: int, pending: Any) -> Any:
            counted.calls[kind] += 1
            counted.sent_bytes += numel * sent.itemsize
            counted.dtypes.add(sent.dtype)
            counted.groups.add(tuple(self.ranks()))
            counted.in_flight += 1
            counted.most_in_flight = max(counted.most_in_flight, counted.in_flight)
            return _Waited(pending, counted)

        def to_all(self: TorchCollectives, received: Any, sent: Any, into: Any, out: Any) -> Any:
            incoming, outgoing = (
                sum(
                    n
                    for peer, n in enumerate(splits or [whole // self.world_size] * self.world_size)
                    if peer != self.rank
                )
                for splits, whole in ((into, received.numel()), (out, sent.numel()))
            )
            counted.received_bytes += incoming * received.itemsize
            counted.most_bytes = max(counted.most_bytes, received.nbytes + sent.nbytes)
            pending = all_to_all(self, received, sent, into, out)
            return started(self, "uneven" if out else "even", sent, outgoing, pending)

        def gather(self: TorchCollectives, buffer: Tensor, owned: Any = None) -> Any:
            sizes = {rank: stop - start for rank, start, stop in owned or ()}
            mine = sizes.get(self.rank, 0) if owned else buffer.numel() // self.world_size
            counted.most_bytes = max(counted.most_bytes, buffer.nbytes)
            return started(self, "gathered", buffer, (self.world_size - 1) * mine, all_gather(self, buffer, owned))

        TorchCollectives.all_to_all, TorchCollectives.all_gather_parts = to_all, gather
        return self

    def __exit__(self, *error: object) -> None:
        TorchCollectives.all_to_all, TorchCollectives.all_gather_parts = self.original


class _Waited:
    def __init__(self, pending: Any, counted: Counted) -> None:
        self._pending, self._counted = pending, counted

    def wait(self) -> Any:
        self._counted.in_flight -= 1
        return self._pending.wait()
