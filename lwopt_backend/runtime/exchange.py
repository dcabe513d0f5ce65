"""A plan's buckets on the wire: their buffers, and the all-to-alls to the owners and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lwopt_backend.plan import MatrixPlan, Segment, Transfer
from lwopt_backend.runtime.agreement import failing
from lwopt_backend.runtime.collectives import EXCHANGE_BACK, EXCHANGE_OUT, Alone, Collectives, Pending, phase, sending

WORD_NBYTES = 8
Segments = Sequence[tuple[Segment, Tensor]]  # with the flat part of a buffer that is theirs


@dataclass(frozen=True, slots=True)
class Arrival:
    """An all-to-all in flight. ``wait`` passes the received segments to ``deliver``.

    ``room`` is the number of elements at the end of each part that carry a rank's word instead of a segment.
    """

    way: Way
    received: Tensor
    data: Tensor  # what was sent, kept alive until the transport has read it
    pending: Pending
    room: int

    def wait(self, deliver: Callable[[Segments], object]) -> None:
        with phase(self.way.label):
            self.discard()
            deliver(_in(self.received, self.way.transfer.receives, self.way.receive_offsets, self.room))

    def words(self) -> Tensor:
        """Every rank's word, in rank order. Call it after ``wait``."""
        ends = accumulate(split + self.room for split in self.way.receive_splits)
        return torch.cat([self.received[end - self.room : end] for end in ends]).view(torch.int64)

    def discard(self) -> None:
        """Wait, and deliver nothing: a buffer must not be freed while the transport writes into it."""
        with failing(lambda: f"{self.way.what}: {self.way.label.partition(': ')[2]}"):
            self.pending.wait()
        if self.received.is_cuda:  # it may have been sent from another stream, that of the backward pass
            stream = torch.cuda.current_stream(self.received.device)
            self.received.record_stream(stream)
            self.data.record_stream(stream)

    def sent(self) -> Segments:
        """The segments that this rank sent."""
        return _in(self.data, self.way.transfer.sends, self.way.send_offsets, self.room)


def _in(buffer: Tensor, segments: Sequence[Segment], offsets: Sequence[int], room: int) -> Segments:
    places = zip(segments, offsets)
    return [(segment, buffer.narrow(0, begin + room * segment.peer, segment.numel)) for segment, begin in places]


class Way:
    """One bucket's transfer in one direction, ``label`` in profiles. Splits and offsets are computed once.

    ``what`` names the bucket in errors.

    Each part of the buffer, for or from one rank, may end with a word of ``WORD_NBYTES`` bytes, the same for all ranks.
    """

    def __init__(
        self, transfer: Transfer, label: str, collectives: Collectives, device: torch.device, what: str
    ) -> None:
        self.transfer = transfer
        self.label, self.what = label, what
        self._collectives = collectives
        self._device = device
        self.send_splits, self.receive_splits = transfer.send_splits, transfer.receive_splits
        self.send_offsets, self.receive_offsets = transfer.send_offsets, transfer.receive_offsets

    def start(
        self,
        dtype: torch.dtype,
        has: Callable[[Segment], bool],
        pack: Callable[[Segments], bool],
        word: Callable[[], int] | None = None,
    ) -> Arrival:
        """Send the segments that this rank ``has``, in ``dtype``; ``pack`` fills them, and says if it could.

        Zeros are sent for all others. ``word`` is called after packing. Called on all ranks, bucket by bucket.
        """
        with phase(self.label):
            room = 0 if word is None else WORD_NBYTES // dtype.itemsize
            send_splits, receive_splits = ([n + room for n in some] for some in (self.send_splits, self.receive_splits))
            sent = torch.empty(sum(send_splits), dtype=dtype, device=self._device)
            received = torch.empty(sum(receive_splits), dtype=dtype, device=self._device)
            segments = _in(sent, self.transfer.sends, self.send_offsets, room)
            here = [(segment, target) for segment, target in segments if has(segment)]
            if len(here) < len(segments):
                sent.zero_()
            if not pack(here):
                sent.zero_()
            if word is not None:
                said = torch.tensor([word()], dtype=torch.int64).view(dtype).to(self._device, non_blocking=True)
                ends = accumulate(send_splits)
                torch._foreach_copy_([sent[end - room : end] for end in ends], [said] * len(send_splits))
            sending((sum(send_splits) - send_splits[self._collectives.rank]) * sent.itemsize)
            pending = self._collectives.all_to_all(received, sent, receive_splits, send_splits)
            return Arrival(self, received, sent, pending, room)


def ways_to_owners(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which sends this rank's fragments to their owners."""
    alone = Alone()
    return [
        Way(plan.transfer(n, collectives.rank), EXCHANGE_OUT, alone if plan.stays(n) else collectives, device, what)
        for n, what in enumerate(_names(plan))
    ]


def ways_back(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which returns the owners' updates to the fragments."""
    rank = collectives.rank
    return [
        Way(plan.way_back(n, rank), EXCHANGE_BACK, collectives, device, what) for n, what in enumerate(_names(plan))
    ]


def _names(plan: MatrixPlan) -> list[str]:
    """Describe each bucket in errors: its number, its size and its first matrix."""
    return [
        f"bucket {number} ({len(bucket)} matrices, the first is {plan.atoms[bucket[0]].name!r})"
        for number, bucket in enumerate(plan.buckets)
    ]
