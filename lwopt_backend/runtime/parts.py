"""The two ways of a bucket's buffer: every rank's gradients to the owners of the parts, and the parts back to all.

Where parts travel from rank to rank (gloo), an owner adds them up itself, in rank order and in its own dtype: the sum
does not depend on the layout. Elsewhere (NCCL) a reduce-scatter and an all-gather do it, of equal parts where the
layout has such.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.runtime.labels import EXCHANGE_BACK, EXCHANGE_OUT
from lwopt_backend.runtime.ledger import Ledger, all_reduce_nbytes
from lwopt_backend.runtime.ranks import PartCollectives, Pending

WIDENED_NUMEL = 2**16  # elements that are widened at a time to be added


class PartsPending:
    """A buffer under way. ``received[r]`` is what rank r has of this rank's part, or there is one, the sum.

    ``held`` are the ledger's tensors among them and beside them; until it is done the transport reads and writes there.
    ``label`` is for profiles.
    """

    def __init__(
        self, label: str, pending: Pending, received: Sequence[Tensor], held: Sequence[Tensor], ledger: Ledger | None
    ) -> None:
        self._label = label
        self._pending = pending
        self._received = received
        self._held = held
        self._ledger = ledger

    def wait(self) -> None:
        with record_function(self._label):
            self._pending.wait()

    def sum(self, dtype: torch.dtype) -> Tensor:
        """Wait; this rank's part, summed over all ranks in their order, in a tensor of the ledger's for the caller.

        Where the dtype allows it that is one of the tensors that came: of the first two, whose sum is the same either
        way. One that only looks into a buffer is copied, it would keep all of it.
        """
        assert self._ledger is not None
        self.wait()
        whole = [part for part in self._received[:2] if part.dtype == dtype and any(part is t for t in self._held)]
        if whole:
            total = whole[0]
            others = [part for part in self._received if part is not total]
        else:
            first, *others = self._received
            total = self._ledger.empty(first.numel(), dtype, first.device).copy_(first)
        for other in others:
            add(total, other, self._ledger)
        self._free(total)
        return total

    def discard(self) -> None:
        """Wait, and forget what came."""
        self.wait()
        self._free(None)

    def _free(self, kept: Tensor | None) -> None:
        for tensor in self._held:
            if tensor is not kept:
                assert self._ledger is not None
                self._ledger.free(tensor)
        self._received, self._held = (), ()


def add(total: Tensor, other: Tensor, ledger: Ledger) -> None:
    """Add ``other``, which may be narrower; PyTorch would widen all of it at once in memory that nobody counts."""
    if total.dtype == other.dtype:
        total.add_(other)
        return
    flat, narrow = total.view(-1), other.reshape(-1)
    wide = ledger.empty(min(flat.numel(), WIDENED_NUMEL), total.dtype, total.device)
    for begin in range(0, flat.numel(), WIDENED_NUMEL):
        strip = narrow[begin : begin + WIDENED_NUMEL]
        flat[begin : begin + WIDENED_NUMEL].add_(wide[: strip.numel()].copy_(strip))
    ledger.free(wide)


def split(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The parts of a buffer, as views in rank order."""
    return [buffer[start:stop] for start, stop in bucket.parts]


def zero_padding(buffer: Tensor, bucket: Bucket) -> None:
    """Zero what no parameter has of a buffer."""
    end = 0
    for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
        buffer[end : slot.offset].zero_()
        end = slot.offset + slot.numel
    buffer[end:].zero_()


def reduce_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, *, keep: bool = False
) -> PartsPending:
    """Start bringing every rank's ``buffer`` to the parts' owners. It is given up unless ``keep``."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank] if ranks.world_size > 1 else buffer
    held = [] if keep else [buffer]
    ledger.sent["gradients"] += bucket.reduce_numels()[ranks.rank] * buffer.itemsize
    if not ranks.direct(buffer.device):
        total = ledger.empty(mine.numel(), buffer.dtype, buffer.device)
        with record_function(EXCHANGE_OUT):
            pending = ranks.reduce_scatter_parts(total, parts, buffer if bucket.even else None)
        return PartsPending(EXCHANGE_OUT, pending, [total], [*held, total], ledger)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    received = {rank: ledger.empty(mine.numel(), buffer.dtype, buffer.device) for rank in others}
    with record_function(EXCHANGE_OUT):
        pending = ranks.exchange(
            [(rank, parts[rank]) for rank in others if parts[rank].numel()],
            [(rank, into) for rank, into in received.items() if mine.numel()],
            tag,
        )
    in_order = [received.get(rank, mine) for rank in range(ranks.world_size)]
    return PartsPending(EXCHANGE_OUT, pending, in_order, [*held, *received.values()], ledger)


def reduce_across(part: Tensor, replicas: PartCollectives, ledger: Ledger) -> PartsPending:
    """Start summing an owner's part, a tensor of the ledger's, over the owners of the same part elsewhere."""
    ledger.sent["across instances"] += all_reduce_nbytes(part.numel() * part.itemsize, replicas.world_size)
    with record_function(EXCHANGE_OUT):
        pending = replicas.start_all_reduce(part)
    return PartsPending(EXCHANGE_OUT, pending, [part], [part], ledger)


def return_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, what: str = "parameters"
) -> PartsPending:
    """Start bringing every owner's part of ``buffer`` to all ranks."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank]
    ledger.sent[what] += bucket.return_numels()[ranks.rank] * buffer.itemsize
    if not ranks.direct(buffer.device):
        with record_function(EXCHANGE_BACK):
            pending = ranks.all_gather_parts(parts, buffer if bucket.even else None)
        return PartsPending(EXCHANGE_BACK, pending, (), (), None)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    with record_function(EXCHANGE_BACK):
        pending = ranks.exchange(
            [(rank, mine) for rank in others if mine.numel()],
            [(rank, parts[rank]) for rank in others if parts[rank].numel()],
            tag,
        )
    return PartsPending(EXCHANGE_BACK, pending, (), (), None)
