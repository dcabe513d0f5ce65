"""The buffers of owned buckets on one rank, the ranks that share them, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.plan.buffers.layout import Bucket, Piece
from lwopt_backend.runtime.collectives import (
    EXCHANGE_BACK,
    EXCHANGE_OUT,
    PartCollectives,
    Pending,
    all_reduce_nbytes,
    phase,
    sending,
)
from lwopt_backend.runtime.whole import owned_dtype


@dataclass(frozen=True, eq=False)
class Sharers:
    """The ranks that share some parameters: ``instance`` owns them; ``replicas`` own this rank's part in all instances.

    ``everyone`` is the ranks of all instances. A mean gradient is the sum divided by ``divisor``.
    """

    everyone: PartCollectives
    instance: PartCollectives
    replicas: PartCollectives | None
    divisor: float


class Ledger:
    """Allocates all tensors that store gradients, in backward and until the step, and counts their bytes.

    ``held`` is the bytes allocated now, ``most_held`` the peak. ``sent`` is the bytes that this rank has sent, by kind.
    Flags and norms, a few bytes per parameter, are not counted.
    """

    def __init__(self) -> None:
        self.held = 0
        self.most_held = 0
        self.sent: Counter[str] = Counter()

    def send(self, kind: str, nbytes: int) -> None:
        """Count what leaves this rank."""
        self.sent[kind] += nbytes
        sending(nbytes)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized flat tensor; pass it to ``free`` before its last reference goes."""
        self.held += numel * dtype.itemsize
        self.most_held = max(self.most_held, self.held)
        return torch.empty(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        self.held -= tensor.numel() * tensor.itemsize


# The two collectives of a bucket: gradients are reduced to the parts' owners, and new parts are sent to all ranks.
#
# Point to point (gloo), an owner adds up the parts itself, in rank order and in its own dtype, so the sum does not
# depend on the layout. Otherwise (NCCL) a reduce-scatter and an all-gather are used, of equal parts if the layout has
# them.

WIDENED_NUMEL = 2**16  # elements widened at a time before they are added


@dataclass
class PartsPending:
    """A buffer in flight. ``received[r]`` is rank r's share of this rank's part; a single tensor is their sum.

    ``held`` are the ledger's tensors that the transport reads or writes until it is done. ``label`` is for profiles.
    """

    label: str
    pending: Pending
    received: Sequence[Tensor]
    held: Sequence[Tensor]
    ledger: Ledger | None

    def wait(self) -> None:
        with phase(self.label):
            self.pending.wait()

    def sum(self, dtype: torch.dtype) -> Tensor:
        """Wait; returns this rank's part, summed over all ranks in rank order, as a ledger tensor that the caller
        frees.

        One of the first two tensors takes the sum if it has ``dtype``: their order does not matter. A view of a larger
        buffer is copied, because it would keep the whole buffer alive.
        """
        assert self.ledger is not None
        self.wait()
        whole = [part for part in self.received[:2] if part.dtype == dtype and any(part is t for t in self.held)]
        if whole:
            total = whole[0]
            others = [part for part in self.received if part is not total]
        else:
            first, *others = self.received
            total = self.ledger.empty(first.numel(), dtype, first.device).copy_(first)
        for other in others:
            add(total, other, self.ledger)
        self._free(total)
        return total

    def discard(self) -> None:
        """Wait, and free what was received."""
        self.wait()
        self._free(None)

    def _free(self, kept: Tensor | None) -> None:
        for tensor in self.held:
            if tensor is not kept:
                assert self.ledger is not None
                self.ledger.free(tensor)
        self.received, self.held = (), ()


def add(total: Tensor, other: Tensor, ledger: Ledger) -> None:
    """Add ``other`` to ``total``. A narrower dtype is widened in strips, so that the ledger counts the memory."""
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
    """Views of a buffer's parts, in rank order."""
    return [buffer[start:stop] for start, stop in bucket.parts]


def reduce_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, *, keep: bool = False
) -> PartsPending:
    """Start reducing all ranks' ``buffer`` to the parts' owners. Frees it when done, unless ``keep``."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank] if ranks.world_size > 1 else buffer
    held = [] if keep else [buffer]
    ledger.send("gradients", bucket.sent_numels(ranks.rank)[0] * buffer.itemsize)
    if not ranks.direct(buffer.device):
        total = ledger.empty(mine.numel(), buffer.dtype, buffer.device)
        with phase(EXCHANGE_OUT):
            pending = ranks.reduce_scatter_parts(total, parts, buffer if bucket.even else None)
        return PartsPending(EXCHANGE_OUT, pending, [total], [*held, total], ledger)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    received = {rank: ledger.empty(mine.numel(), buffer.dtype, buffer.device) for rank in others}
    with phase(EXCHANGE_OUT):
        pending = ranks.exchange(
            [(rank, parts[rank]) for rank in others if parts[rank].numel()],
            [(rank, into) for rank, into in received.items() if mine.numel()],
            tag,
        )
    in_order = [received.get(rank, mine) for rank in range(ranks.world_size)]
    return PartsPending(EXCHANGE_OUT, pending, in_order, [*held, *received.values()], ledger)


def return_parts(
    buffer: Tensor, bucket: Bucket, ranks: PartCollectives, ledger: Ledger, tag: int, what: str = "parameters"
) -> PartsPending:
    """Start sending every owner's part of ``buffer`` to all ranks."""
    parts = split(buffer, bucket)
    mine = parts[ranks.rank]
    ledger.send(what, bucket.sent_numels(ranks.rank)[1] * buffer.itemsize)
    if not ranks.direct(buffer.device):
        with phase(EXCHANGE_BACK):
            pending = ranks.all_gather_parts(parts, buffer if bucket.even else None)
        return PartsPending(EXCHANGE_BACK, pending, (), (), None)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    with phase(EXCHANGE_BACK):
        pending = ranks.exchange(
            [(rank, mine) for rank in others if mine.numel()],
            [(rank, parts[rank]) for rank in others if parts[rank].numel()],
            tag,
        )
    return PartsPending(EXCHANGE_BACK, pending, (), (), None)


# One bucket on one rank: the buffers of its parameters, of its gradients, and of the part that this rank owns.
#
# ::
#
#     values    | p0 | p1 . | p2 | p3 |      every parameter is a view of it, permanently
#     grads     | g0 | g1 0 | g2 | g3 |      in backward only: filled as gradients arrive, freed when reduced
#     mine           | g1 0 |                 fp32: this rank's part, summed over all ranks and backward passes
#     masters        | p1 |                   fp32, if the parameters are narrower; without padding


class BucketBuffers:
    """The buffers of ``bucket``. ``params`` are all parameters of the manager; the bucket's become views of ``values``.

    ``grad_dtype`` is the dtype of gradients on their way to the owners. With ``keep_full`` the gradients' buffer stays,
    every ``param.grad`` is a view of it, and after a reduction it has the mean gradients on every rank.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        sharers: Sharers,
        grad_dtype: torch.dtype,
        ledger: Ledger,
        *,
        keep_full: bool,
        tag: int,
    ) -> None:
        self.bucket = bucket
        self.sharers = sharers
        self.tag = tag
        self._grad_dtype = grad_dtype
        self._ledger = ledger
        self._keep_full = keep_full
        self._params = {slot.param: params[slot.param] for slot in bucket.slots}
        self._slots = {slot.param: slot for slot in bucket.slots}
        self._arrived: set[int] = set()
        self._way: PartsPending | None = None
        self._across: PartsPending | None = None
        self._back: PartsPending | None = None
        first = params[bucket.slots[0].param]
        self.values = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            view = self.view(self.values, slot.param)
            view.copy_(params[slot.param].data)
            params[slot.param].data = view
        self.pieces: list[Piece] = list(bucket.pieces(sharers.instance.rank))
        self.owned_dtype = owned_dtype(first.dtype)
        self.masters: Tensor | None = None
        if self.owned_dtype != first.dtype:
            numel = sum(piece.numel for piece in self.pieces)
            self.masters = torch.full((numel,), torch.nan, dtype=self.owned_dtype, device=first.device)
        self.full: Tensor | None = None
        if keep_full:
            self.full = ledger.empty(bucket.numel, grad_dtype, first.device).zero_()
        self.mine: Tensor | None = None
        self._averaged = False
        self.refresh_masters()

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the gradients that are kept between a backward pass and its step."""
        if self._keep_full:
            return self.bucket.numel * self._grad_dtype.itemsize
        start, stop = self.bucket.parts[self.sharers.instance.rank]
        return (stop - start) * self.owned_dtype.itemsize

    def view(self, buffer: Tensor, param: int) -> Tensor:
        """Parameter ``param``'s elements of a buffer laid out as this bucket."""
        slot = self._slots[param]
        return buffer.narrow(0, slot.offset, slot.numel).view(self._params[param].shape)

    def owned_values(self) -> list[Tensor]:
        """The flat weights to step, one tensor per piece: masters, or without masters the parameters themselves."""
        if self.masters is None:
            return [self.values.narrow(0, piece.offset, piece.numel) for piece in self.pieces]
        return list(self.masters.split([piece.numel for piece in self.pieces])) if self.pieces else []

    def owned_grads(self) -> list[Tensor]:
        """The flat reduced gradients, one tensor per piece, in the dtype of the step."""
        if self._keep_full:
            assert self.full is not None
            grads = [self.full.narrow(0, piece.offset, piece.numel) for piece in self.pieces]
            return [grad.to(self.owned_dtype) for grad in grads]
        assert self.mine is not None
        start = self.bucket.parts[self.sharers.instance.rank][0]
        return [self.mine.narrow(0, piece.offset - start, piece.numel) for piece in self.pieces]

    def stored_grads(self, pick: Callable[[int], bool] | None = None) -> list[Tensor]:
        """The buffer of this rank's reduced gradients, padding included; with ``keep_full``, that of all gradients.
        Of the parameters that ``pick`` selects, if given, one tensor each."""
        stored = self.full if self._keep_full else self.mine
        if stored is None or pick is None:
            return [] if stored is None else [stored]
        if self._keep_full:
            return [self.view(stored, param) for param in self._slots if pick(param)]
        return [grad for piece, grad in zip(self.pieces, self.owned_grads()) if pick(piece.param)]

    def refresh_masters(self) -> None:
        """Copy the parameters into the masters, except where a master already rounds to its parameter's value.

        So weights and optimizer state may be loaded in either order, and masters keep their precision.
        """
        if self.masters is not None:
            for piece, master in zip(self.pieces, self.owned_values()):
                value = self.values.narrow(0, piece.offset, piece.numel)
                torch.where(value == master.to(value.dtype), master, value.to(master.dtype), out=master)

    def publish_masters(self) -> None:
        """Round the masters into this rank's part of the parameters."""
        if self.masters is not None and self.pieces:
            parts = [self.values.narrow(0, piece.offset, piece.numel) for piece in self.pieces]
            torch._foreach_copy_(parts, self.owned_values())

    # Gradients

    def take(self, index: int) -> None:
        """Move a parameter's ``grad`` into the buffer, adding to an earlier one."""
        param, view = self._params[index], self.view(self._full_buffer(), index)
        if self._keep_full:
            self._take_kept(param, view)
            return
        assert param.grad is not None
        add(view, param.grad, self._ledger) if index in self._arrived else view.copy_(param.grad)
        self._arrived.add(index)
        param.grad = None

    def take_changed(self) -> None:
        """With ``keep_full``, copy gradients that the user has assigned in place of ours."""
        for index, param in self._params.items():
            if param.grad is not None:
                self._take_kept(param, self.view(self._full_buffer(), index))

    def _take_kept(self, param: Tensor, view: Tensor) -> None:
        """autograd adds in place to an existing gradient, which is the view; without one, it makes a new tensor."""
        assert param.grad is not None
        if param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
            param.grad = view

    def _full_buffer(self) -> Tensor:
        if self.full is None:
            self.full = self._ledger.empty(self.bucket.numel, self._grad_dtype, self.values.device)
        return self.full

    def launch(self) -> None:
        """Start reducing the gradients to their owners; missing ones are zero. Called on all ranks."""
        full, ranks = self._full_buffer(), self.sharers.instance
        here = {i for i, p in self._params.items() if p.grad is not None} if self._keep_full else self._arrived
        for index in self._slots.keys() - here:
            self.view(full, index).zero_()
        if self.bucket.padding and not self._keep_full:
            slots = sorted(self._slots.values(), key=lambda slot: slot.offset)
            starts = [*(slot.offset for slot in slots), len(full)]
            ends = [0, *(slot.offset + slot.numel for slot in slots)]
            torch._foreach_zero_([full[end:start] for end, start in zip(ends, starts) if start > end])
        self._way = reduce_parts(full, self.bucket, ranks, self._ledger, self.tag, keep=self._keep_full)
        if not self._keep_full:
            self.full = None
            self._arrived = set()

    @property
    def under_way(self) -> bool:
        return self._way is not None

    def arrive(self) -> None:
        """Wait for the reduction that ``launch`` started, and add the sum to that of earlier backward passes."""
        assert self._way is not None
        came, self._way = self._way.sum(self.owned_dtype), None
        if self.sharers.replicas is not None:
            self._settle_across()
            nbytes, replicas = came.numel() * came.itemsize, self.sharers.replicas
            self._ledger.send("across instances", all_reduce_nbytes(nbytes, replicas.world_size))
            with phase(EXCHANGE_OUT):
                pending = replicas.start_all_reduce(came)
            self._across = PartsPending(EXCHANGE_OUT, pending, [came], [came], self._ledger)
        else:
            self._add(came)

    def settle(self) -> None:
        """Wait for the sum across instances, and divide by ``divisor``. Called on all ranks, after ``arrive``."""
        self._settle_across()
        if self.mine is not None and not self._averaged:
            self.mine.div_(self.sharers.divisor)
            self._averaged = True

    def _settle_across(self) -> None:
        if self._across is not None:
            came, self._across = self._across.sum(self.owned_dtype), None
            self._add(came)

    def _add(self, came: Tensor) -> None:
        if self._keep_full:
            assert self.full is not None
            split(self.full, self.bucket)[self.sharers.instance.rank].copy_(came.div_(self.sharers.divisor))
            self._ledger.free(came)
        elif self.mine is None:
            self.mine, self._averaged = came, False
        else:
            self.mine.add_(came.div_(self.sharers.divisor) if self._averaged else came)
            self._ledger.free(came)

    def spread_gradients(self) -> None:
        """Send the mean gradients to all ranks (``keep_full``). Called on all ranks."""
        assert self.full is not None
        return_parts(self.full, self.bucket, self.sharers.instance, self._ledger, self.tag, "gradients").wait()

    def drop_owned_gradients(self) -> None:
        """Free the reduced gradients, once they are used."""
        if self.mine is not None:
            self._ledger.free(self.mine)
        self.mine = None
        self._averaged = False

    @property
    def is_here(self) -> bool:
        """Whether this rank's reduced gradients have arrived."""
        return self._way is None and self.mine is not None

    def drop_gradients(self) -> None:
        """Free all gradients; waits for those in flight."""
        for way in (self._way, self._across):
            if way is not None:
                way.discard()
        self._way = self._across = None
        self.drop_owned_gradients()
        self._arrived = set()
        if not self._keep_full and self.full is not None:
            self._ledger.free(self.full)
            self.full = None

    # Parameters

    def send_values(self) -> None:
        """Start sending each rank's part of the parameters to all others. Called on all ranks."""
        self._back = return_parts(self.values, self.bucket, self.sharers.instance, self._ledger, self.tag)

    def receive_values(self) -> None:
        """Wait until the parts of all ranks have arrived."""
        if self._back is not None:
            self._back.wait()
            self._back = None

    @property
    def stale(self) -> bool:
        """Whether parameters are still in flight to this rank."""
        return self._back is not None
