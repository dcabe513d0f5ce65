"""The two ways of a bucket's buffer: every rank's gradients to the owners of the parts, and the parts back to all.

Where parts travel from rank to rank (gloo), an owner adds them up itself, in rank order and in its own dtype: the sum
does not depend on the layout. Elsewhere (NCCL) a reduce-scatter and an all-gather do it, of equal parts where the
layout has such.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.runtime.ledger import Ledger
from lwopt_backend.runtime.ranks import PartCollectives, Pending


class PartsPending:
    """A buffer under way. ``received[r]`` is what rank r has of this rank's part, or there is one, the sum."""

    def __init__(
        self,
        pending: Pending,
        received: Sequence[Tensor],
        held: Sequence[Tensor],
        ledger: Ledger | None,
    ) -> None:
        self._pending = pending
        self._received = received
        self._held = held  # freed when it is done; until then the transport reads and writes there
        self._ledger = ledger

    def wait(self) -> None:
        self._pending.wait()

    def sum(self, dtype: torch.dtype) -> Tensor:
        """Wait; this rank's part, summed over all ranks, in a tensor of its own."""
        self.wait()
        total = self._received[0].to(dtype, copy=True)
        for other in self._received[1:]:
            total.add_(other)
        self._free()
        return total

    def discard(self) -> None:
        """Wait, and forget what came."""
        self.wait()
        self._free()

    def _free(self) -> None:
        if self._ledger is not None:
            for tensor in self._held:
                self._ledger.free(tensor)
        self._received, self._held = (), ()


def split(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """The parts of a buffer, as views in rank order."""
    return [buffer[start:stop] for start, stop in bucket.parts]


def reduce_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, *, keep: bool = False
) -> PartsPending:
    """Start bringing every rank's ``buffer`` to the parts' owners. It is given up to the ledger unless ``keep``."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank]
    held = [] if keep else [buffer]
    ledger.sent["gradients"] += bucket.reduce_numels()[ranks.rank] * buffer.itemsize
    if not ranks.direct:
        total = ledger.empty(mine.numel(), buffer.dtype, buffer.device)
        pending = ranks.reduce_scatter_parts(total, parts, buffer if bucket.even else None)
        return PartsPending(pending, [total], [*held, total], ledger)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    received = {rank: ledger.empty(mine.numel(), buffer.dtype, buffer.device) for rank in others}
    pending = ranks.exchange(
        [(rank, parts[rank]) for rank in others if parts[rank].numel()],
        [(rank, into) for rank, into in received.items() if mine.numel()],
        tag,
    )
    in_order = [received.get(rank, mine) for rank in range(ranks.world_size)]
    return PartsPending(pending, in_order, [*held, *received.values()], ledger)


def return_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, what: str = "parameters"
) -> PartsPending:
    """Start bringing every owner's part of ``buffer`` to all ranks."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank]
    ledger.sent[what] += bucket.return_numels()[ranks.rank] * buffer.itemsize
    if not ranks.direct:
        return PartsPending(ranks.all_gather_parts(parts, buffer if bucket.even else None), (), (), None)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    pending = ranks.exchange(
        [(rank, mine) for rank in others if mine.numel()],
        [(rank, parts[rank]) for rank in others if parts[rank].numel()],
        tag,
    )
    return PartsPending(pending, (), (), None)
