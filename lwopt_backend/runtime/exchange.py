"""A plan's buckets on the wire: their buffers, and the all-to-alls to the owners and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from lwopt_backend.plan import MatrixPlan, Segment, Transfer
from lwopt_backend.runtime.collectives import EXCHANGE_BACK, EXCHANGE_OUT, Alone, Collectives, Pending

Fetch = Callable[[Segment], Tensor | None]
Deliver = Callable[[Segment, Tensor], object]


@dataclass(frozen=True, slots=True)
class Arrival:
    """An all-to-all in flight. ``wait`` passes every received segment to ``deliver``, as a flat tensor."""

    way: Way
    received: Tensor
    data: Tensor  # what was sent, kept alive until the transport has read it
    pending: Pending

    def wait(self, deliver: Deliver) -> None:
        with record_function(self.way.label):
            self.discard()
            for segment, begin in zip(self.way.transfer.receives, self.way.receive_offsets):
                deliver(segment, self.received.narrow(0, begin, segment.numel))

    def discard(self) -> None:
        """Wait, and deliver nothing: a buffer must not be freed while the transport writes into it."""
        self.pending.wait()
        if self.received.is_cuda:  # it may have been sent from another stream, that of the backward pass
            stream = torch.cuda.current_stream(self.received.device)
            self.received.record_stream(stream)
            self.data.record_stream(stream)

    def sent(self) -> list[tuple[Segment, Tensor]]:
        """The segments that this rank sent, as flat tensors."""
        places = zip(self.way.transfer.sends, self.way.send_offsets)
        return [(segment, self.data.narrow(0, begin, segment.numel)) for segment, begin in places]


class Way:
    """One bucket's transfer in one direction, ``label`` in profiles. Splits and offsets are computed once.

    ::

            compact, 3 ranks     | to 0 | to 1       | to 2 |              exact lengths, uneven all-to-all
            padded               | to 0 . . . | to 1       | to 2 . . . |  equal lengths, plain all-to-all
    """

    def __init__(self, transfer: Transfer, label: str, collectives: Collectives, device: torch.device) -> None:
        self.transfer = transfer
        self.label = label
        self._collectives = collectives
        self._device = device
        self.send_splits, self.receive_splits = transfer.send_splits, transfer.receive_splits
        self.send_offsets, self.receive_offsets = transfer.send_offsets, transfer.receive_offsets

    def start(self, dtype: torch.dtype, fetch: Fetch) -> Arrival:
        """Pack the segments that ``fetch`` returns, each in any shape, and send them in ``dtype``.

        Where it returns None, arbitrary values are sent. Called on all ranks, bucket by bucket.
        """
        with record_function(self.label):
            sent = torch.empty(sum(self.send_splits), dtype=dtype, device=self._device)
            received = torch.empty(sum(self.receive_splits), dtype=dtype, device=self._device)
            for segment, begin in zip(self.transfer.sends, self.send_offsets):
                piece = fetch(segment)
                if piece is not None:
                    sent.narrow(0, begin, segment.numel).view(piece.shape).copy_(piece)
            even = self.transfer.split is not None
            splits: tuple[Sequence[int], Sequence[int]] = ((), ()) if even else (self.receive_splits, self.send_splits)
            return Arrival(self, received, sent, self._collectives.all_to_all(received, sent, *splits))


def ways_to_owners(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which sends this rank's fragments to their owners."""
    alone = Alone()
    return [
        Way(plan.transfer(n, collectives.rank), EXCHANGE_OUT, alone if plan.stays(n) else collectives, device)
        for n in range(len(plan.buckets))
    ]


def ways_back(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which returns the owners' updates to the fragments."""
    rank = collectives.rank
    return [Way(plan.way_back(n, rank), EXCHANGE_BACK, collectives, device) for n in range(len(plan.buckets))]
