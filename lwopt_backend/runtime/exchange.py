"""A plan's buckets on the wire: their buffers, and the all-to-alls to the owners and back, or to copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import MatrixPlan, Segment, Transfer
from lwopt_backend.runtime.collectives import EXCHANGE_BACK, EXCHANGE_OUT, Collectives, Pending, phase, sending
from lwopt_backend.runtime.tensors import moved, take_filled, to_fill

Parts = Sequence[Tensor]  # the flat parts of a buffer, in the order of the segments


@dataclass(slots=True)
class Packing:
    """A buffer to send. Its ``parts`` are filled where their elements are stored, and moved in one copy."""

    sent: Tensor
    filled: Tensor  # ``sent`` itself, if the elements are stored there
    parts: Parts
    received: Tensor
    column: Tensor | None = None


@dataclass(slots=True)
class Arrival:
    """An all-to-all in flight, or an all-gather of ``Copies``. ``column`` is the buffer of the all-gather to follow."""

    way: Way | Copies
    received: Tensor
    data: Tensor  # what was sent, kept alive until the transport has read it
    pending: Pending
    column: Tensor | None = None
    waited: bool = False

    def passed_on(self) -> Arrival:
        """This arrival; if ranks of other rows store copies, wait, and return the arrival of all rows' updates."""
        if self.column is None:
            return self
        assert isinstance(self.way, Way) and self.way.copies is not None
        with phase(self.way.label):
            self.wait()
            return self.way.copies.start(self.column)

    def parts(self, on: torch.device | None = None) -> Parts:
        """Wait; returns the parts of the received segments, ``on`` a device, if given, with one copy."""
        self.wait()
        return self.way.received_in(self.received if on is None else moved(self.received, on))

    def wait(self) -> None:
        """Wait, once: a buffer must not be freed while the transport writes into it."""
        if self.waited:
            return
        self.pending.wait()
        self.waited = True

    discard = wait


class Beside:
    """A side stream of its caller, where ``device`` has streams; on a CPU, the caller itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._own: Any = None if self._streams is None else self._streams.Stream(device)

    @contextmanager
    def running(self, reads: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Context in which work follows the earlier work of the caller's stream, which waits for none of it. ``reads``
        returns tensors of other streams that may be freed before the work is done."""
        if self._streams is None:
            yield
            return
        self.follow()
        with self._streams.stream(self._own):
            for tensor in reads():
                if tensor.device.type == self._device.type:
                    tensor.record_stream(self._own)
            yield

    def follow(self) -> None:
        """Later work here waits for all work on the caller's stream."""
        if self._streams is not None:
            self._own.wait_stream(self._streams.current_stream(self._device))

    def join(self) -> None:
        """Later work on the caller's stream waits for all work here."""
        if self._streams is not None:
            self._streams.current_stream(self._device).wait_stream(self._own)


class ProducerStreams:
    """The streams that use a buffer before it is sent, where ``device`` has streams.

    autograd runs a backward operation, and the hooks of a gradient, on the stream of the forward operation. So a model
    with two streams fills a buffer from both.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._noted: list[Any] = []

    def note(self, buffer: Tensor) -> None:
        """The caller's stream is about to use ``buffer``, whose memory stays until that stream is done with it."""
        if self._streams is not None and (stream := self._streams.current_stream(self._device)) not in self._noted:
            self._noted.append(stream)
            buffer.record_stream(stream)

    def join(self) -> None:
        """Later work on the caller's stream waits for the work of all noted streams. Forget them."""
        noted, self._noted = self._noted, []
        current: Any = self._streams.current_stream(self._device) if noted else None
        for stream in noted:
            if stream != current:
                current.wait_stream(stream)


class Way:
    """One bucket's transfer in one direction, named ``label`` in profiles and passed on to ``copies``, if given.

    Splits and sizes are computed once.
    """

    def __init__(
        self,
        transfer: Transfer,
        label: str,
        collectives: Collectives,
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        self.transfer = transfer
        self.label = label
        self.copies = copies
        self._collectives = collectives
        self._device = device
        self.send_splits, self.receive_splits = transfer.send_splits, transfer.receive_splits
        self.send_numels, self.receive_numels = (
            [s.numel for s in some] for some in (transfer.sends, transfer.receives)
        )

    @property
    def arriving(self) -> Sequence[Segment]:
        """What arrives at last: the segments that this rank receives, or what its column has of them."""
        return self.transfer.receives if self.copies is None else self.copies.segments

    def received_in(self, buffer: Tensor) -> Parts:
        """The parts of the segments that this rank receives, in their order."""
        return buffer.split_with_sizes(self.receive_numels)

    def packing(self, dtype: torch.dtype, on: torch.device | None = None, *, zeros: bool = False) -> Packing:
        """The buffers of this rank's segments in ``dtype``, to be filled ``on`` a device, if given; of ``zeros`` if
        not all will be filled."""
        sent = torch.empty(sum(self.send_splits), dtype=dtype, device=self._device)
        numel, column = sum(self.receive_splits), None
        if self.copies is None:
            received = torch.empty(numel, dtype=dtype, device=self._device)
        else:
            column = torch.empty(self.copies.numel, dtype=dtype, device=self._device)
            received = column.narrow(0, self.copies.begin, numel)
        filled = to_fill(sent, on)
        if zeros:
            filled.zero_()
        return Packing(sent, filled, filled.split_with_sizes(self.send_numels), received, column)

    def send(self, packing: Packing) -> Arrival:
        """Send what the buffer was filled with. Called on all ranks, bucket by bucket."""
        sent, received = packing.sent, packing.received
        take_filled(sent, packing.filled)
        if self._collectives.world_size > 1:  # or it stays here
            sending((sent.numel() - self.send_splits[self._collectives.rank]) * sent.itemsize)
        pending = self._collectives.all_to_all(received, sent, self.receive_splits, self.send_splits)
        return Arrival(self, received, sent, pending, packing.column)


class Copies:
    """A bucket's updates between the ranks of a column, which store the same pieces: an all-gather of equal parts.

    ``pieces`` has those that each rank got from the owners of its row. All parts have the length of the longest.
    """

    def __init__(self, pieces: Sequence[Sequence[Segment]], label: str, column: Collectives) -> None:
        numels = [[segment.numel for segment in part] for part in pieces]
        self._part = max(map(sum, numels))  # NCCL gathers equal parts only
        self._numels = [numel for part in numels for numel in (*part, self._part - sum(part))]
        self._places = list(chain.from_iterable([True] * len(part) + [False] for part in numels))  # False: padding
        self._column = column if self._part else Collectives()  # a column without pieces sends nothing
        self.label = label
        self.numel, self.begin = self._part * len(pieces), self._part * column.rank
        self.segments = tuple(chain.from_iterable(pieces))

    def received_in(self, buffer: Tensor) -> Parts:
        """As on ``Way``."""
        return list(compress(buffer.split_with_sizes(self._numels), self._places))

    def start(self, whole: Tensor) -> Arrival:
        """Fill the other ranks' parts of ``whole``. Called on all ranks of the column."""
        sending((self._column.world_size - 1) * self._part * whole.itemsize)
        return Arrival(self, whole, whole, self._column.all_gather_parts(whole))


def ways_to_owners(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which sends this rank's fragments to their owners. Called on all ranks."""
    alone, (row, _) = Collectives(), _row_and_column(plan, collectives)
    return [
        Way(plan.transfer(n, collectives.rank), EXCHANGE_OUT, alone if plan.stays(n) else row, device)
        for n in range(len(plan.buckets))
    ]


def ways_back(plan: MatrixPlan, collectives: Collectives, device: torch.device) -> list[Way]:
    """One ``Way`` per bucket, which returns the owners' updates to the fragments. Called on all ranks."""
    rank, (row, column) = collectives.rank, _row_and_column(plan, collectives)

    def copies(bucket: int) -> Copies | None:
        return None if column is None else Copies(plan.pieces_of_column(bucket, rank), EXCHANGE_BACK, column)

    numbers = range(len(plan.buckets))
    return [Way(plan.way_back(n, rank), EXCHANGE_BACK, row, device, copies(n)) for n in numbers]


def _row_and_column(plan: MatrixPlan, collectives: Collectives) -> tuple[Collectives, Collectives | None]:
    """The ranks that exchange pieces, and the ranks with copies of this rank's pieces, if any.

    No rank of a large mesh should exchange with all others: NCCL keeps buffers for every peer.
    """
    if plan.rows is None:
        return collectives, None
    rows, columns = plan.rows.groups()
    return collectives.part(rows), collectives.part(columns)
