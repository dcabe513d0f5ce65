"""What leaves through the door to torch.distributed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from lwopt_backend.runtime.collectives import TorchCollectives


class Counted:
    """Counts all-to-alls on this rank while it is open: ``calls`` with even and uneven parts, and what is in flight."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.dtypes: set[torch.dtype] = set()

    def __enter__(self) -> Counted:
        self.original = original = TorchCollectives.all_to_all
        counted = self

        def all_to_all(self: TorchCollectives, received: Any, sent: Any, into: Any, out: Any) -> Any:
            splits = out or [sent.numel() // self.world_size] * self.world_size
            counted.calls["even" if not out else "uneven"] += 1
            counted.sent_bytes += sum(n for peer, n in enumerate(splits) if peer != self.rank) * sent.itemsize
            counted.dtypes.add(sent.dtype)
            counted.in_flight += 1
            counted.most_in_flight = max(counted.most_in_flight, counted.in_flight)
            return _Waited(original(self, received, sent, into, out), counted)

        TorchCollectives.all_to_all = all_to_all
        return self

    def __exit__(self, *error: object) -> None:
        TorchCollectives.all_to_all = self.original


class _Waited:
    def __init__(self, pending: Any, counted: Counted) -> None:
        self._pending, self._counted = pending, counted

    def wait(self) -> Any:
        self._counted.in_flight -= 1
        return self._pending.wait()
