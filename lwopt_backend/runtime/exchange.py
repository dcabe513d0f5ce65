"""Moving a bucket's fragments to the owners of its atoms, and the updates back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lwopt_backend.plan import MatrixPlan, Segment, Transfer
from lwopt_backend.runtime.collectives import Collectives, Pending

Fetch = Callable[[Segment], Tensor]
Deliver = Callable[[Segment, Tensor], None]


class Arrival:
    """An all-to-all under way. ``wait`` hands every received segment to ``deliver``."""

    def __init__(self, transfer: Transfer, received: Tensor, sent: Tensor, pending: Pending) -> None:
        self._transfer = transfer
        self._received = received
        self._sent = sent  # kept alive until the transport has read it
        self._pending = pending

    def wait(self, deliver: Deliver) -> None:
        self._pending.wait()
        begin = 0
        for segment in self._transfer.receives:
            deliver(segment, self._received.narrow(0, begin, segment.numel))
            begin += segment.numel


class Exchange:
    """One group's transfers on one rank. Transfers are worked out once, when the exchange is made."""

    def __init__(self, plan: MatrixPlan, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._forth = [plan.transfer(bucket, collectives.rank) for bucket in range(len(plan.buckets))]
        self._back = [transfer.reversed() for transfer in self._forth]

    def __len__(self) -> int:
        return len(self._forth)

    def to_owners(self, bucket: int, dtype: torch.dtype, fetch: Fetch) -> Arrival:
        """Start bringing the bucket's fragments to their owners in ``dtype``. Called on all ranks, bucket by bucket."""
        return self._start(self._forth[bucket], dtype, fetch)

    def to_fragments(self, bucket: int, dtype: torch.dtype, fetch: Fetch) -> Arrival:
        """Start bringing the bucket's updates back to where the fragments came from. Called on all ranks."""
        return self._start(self._back[bucket], dtype, fetch)

    def _start(self, transfer: Transfer, dtype: torch.dtype, fetch: Fetch) -> Arrival:
        sent = torch.empty(sum(transfer.send_splits), dtype=dtype, device=self._device)
        received = torch.empty(sum(transfer.receive_splits), dtype=dtype, device=self._device)
        begin = 0
        for segment in transfer.sends:
            sent.narrow(0, begin, segment.numel).copy_(fetch(segment))
            begin += segment.numel
        pending = self._collectives.all_to_all(received, sent, transfer.receive_splits, transfer.send_splits)
        return Arrival(transfer, received, sent, pending)
