"""One bucket on one rank: its parameters' buffer, its gradients on their way to the owners, what this rank owns of it.

::

    values    | p0 | p1 . | p2 | p3 |      every parameter is a view of it, for good
    grads     | g0 | g1 0 | g2 | g3 |      in backward only: filled as gradients arrive, gone once it was reduced
    mine           | g1 0 |                 fp32: the sum over all ranks and backward passes of this rank's part
    masters        | p1 |                   fp32, where the parameters are narrower; without padding
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwopt_backend.plan.buffers.arrangement import Bucket, Piece
from lwopt_backend.runtime import parts
from lwopt_backend.runtime.ledger import Ledger
from lwopt_backend.runtime.sharers import Sharers
from lwopt_backend.runtime.storage import owned_dtype


class BucketBuffers:
    """The buffers of ``bucket``. ``params`` are all parameters of the manager; the bucket's become views of ``values``.

    ``grad_dtype`` is that of gradients until they are at their owner. With ``keep_full`` the buffer of gradients stays,
    ``param.grad`` are views of it, and it ends up with the mean gradients on every rank.
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
        self._way: parts.PartsPending | None = None
        self._across: parts.PartsPending | None = None
        self._back: parts.PartsPending | None = None
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
        """Bytes of the gradients that are there between a backward pass and its step."""
        if self._keep_full:
            return self.bucket.numel * self._grad_dtype.itemsize
        start, stop = self.bucket.parts[self.sharers.instance.rank]
        return (stop - start) * self.owned_dtype.itemsize

    def view(self, buffer: Tensor, param: int) -> Tensor:
        """Parameter ``param``'s elements of a buffer laid out as this bucket."""
        slot = self._slots[param]
        return buffer.narrow(0, slot.offset, slot.numel).view(self._params[param].shape)

    def owned_values(self) -> list[Tensor]:
        """What is stepped, piece by piece, flat: masters, or where there are none the parameters themselves."""
        if self.masters is None:
            return [self.values.narrow(0, piece.offset, piece.numel) for piece in self.pieces]
        return list(self.masters.split([piece.numel for piece in self.pieces])) if self.pieces else []

    def owned_grads(self) -> list[Tensor]:
        """The reduced gradients of the pieces, flat, as they are stepped on."""
        if self._keep_full:
            assert self.full is not None
            grads = [self.full.narrow(0, piece.offset, piece.numel) for piece in self.pieces]
            return [grad.to(self.owned_dtype) for grad in grads]
        assert self.mine is not None
        start = self.bucket.parts[self.sharers.instance.rank][0]
        return [self.mine.narrow(0, piece.offset - start, piece.numel) for piece in self.pieces]

    def stored_grads(self) -> list[Tensor]:
        """The tensors that hold this rank's reduced gradients, padding included where it lies between them."""
        if self._keep_full:
            return [self.full] if self.full is not None else []
        return [self.mine] if self.mine is not None else []

    def refresh_masters(self) -> None:
        """Take the parameters' values into the masters, but for elements whose master rounds to just that value.

        So weights and optimizer state may be loaded in either order, and masters keep their precision.
        """
        if self.masters is not None:
            for piece, master in zip(self.pieces, self.owned_values()):
                value = self.values.narrow(0, piece.offset, piece.numel)
                torch.where(value == master.to(value.dtype), master, value.to(master.dtype), out=master)

    def publish_masters(self) -> None:
        """Round the masters into this rank's part of the parameters."""
        if self.masters is not None:
            for piece, master in zip(self.pieces, self.owned_values()):
                self.values.narrow(0, piece.offset, piece.numel).copy_(master)

    # Gradients

    def take(self, index: int) -> None:
        """Take a parameter's ``grad`` into the buffer."""
        param, view = self._params[index], self.view(self._full_buffer(), index)
        if self._keep_full:
            self._take_kept(param, view)
            return
        assert param.grad is not None
        parts.add(view, param.grad, self._ledger) if index in self._arrived else view.copy_(param.grad)
        self._arrived.add(index)
        param.grad = None

    def take_changed(self) -> None:
        """With ``keep_full``: take gradients that are no longer ours, because somebody has assigned others."""
        for index, param in self._params.items():
            if param.grad is not None:
                self._take_kept(param, self.view(self._full_buffer(), index))

    def _take_kept(self, param: Tensor, view: Tensor) -> None:
        """autograd adds to a gradient that is there in place, and then it is the view; else it made a new one."""
        assert param.grad is not None
        if param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
            param.grad = view

    def _full_buffer(self) -> Tensor:
        if self.full is None:
            self.full = self._ledger.empty(self.bucket.numel, self._grad_dtype, self.values.device)
        return self.full

    def launch(self) -> None:
        """Start bringing the gradients to their owners; those that have not arrived are zero. Called on all ranks."""
        full, ranks = self._full_buffer(), self.sharers.instance
        here = {i for i, p in self._params.items() if p.grad is not None} if self._keep_full else self._arrived
        for index in self._slots.keys() - here:
            self.view(full, index).zero_()
        if self.bucket.padding and not self._keep_full:
            parts.zero_padding(full, self.bucket)
        self._way = parts.reduce_parts(full, self.bucket, ranks, self._ledger, self.tag, keep=self._keep_full)
        if not self._keep_full:
            self.full = None
            self._arrived = set()

    @property
    def under_way(self) -> bool:
        return self._way is not None

    def arrive(self) -> None:
        """Wait for what ``launch`` started, and add it to what this rank has of earlier backward passes."""
        assert self._way is not None
        came, self._way = self._way.sum(self.owned_dtype), None
        if self.sharers.replicas is not None:
            self._settle_across()
            self._across = parts.reduce_across(came, self.sharers.replicas, self._ledger)
        else:
            self._add(came)

    def settle(self) -> None:
        """Make what arrived the mean gradient. Called on all ranks, after ``arrive``."""
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
            parts.split(self.full, self.bucket)[self.sharers.instance.rank].copy_(came.div_(self.sharers.divisor))
            self._ledger.free(came)
        elif self.mine is None:
            self.mine, self._averaged = came, False
        else:
            self.mine.add_(came.div_(self.sharers.divisor) if self._averaged else came)
            self._ledger.free(came)

    def spread_gradients(self) -> None:
        """Bring the mean gradients to all ranks (``keep_full``). Called on all ranks."""
        assert self.full is not None
        parts.return_parts(self.full, self.bucket, self.sharers.instance, self._ledger, self.tag, "gradients").wait()

    def drop_owned_gradients(self) -> None:
        """Forget the reduced gradients, which have been used."""
        if self.mine is not None:
            self._ledger.free(self.mine)
        self.mine = None
        self._averaged = False

    @property
    def is_here(self) -> bool:
        """Whether all that was started has arrived."""
        return self._way is None and self.mine is not None

    def drop_gradients(self) -> None:
        """Forget all gradients, those on their way included."""
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
        """Start bringing this rank's part of the parameters to all ranks, and theirs here. Called on all ranks."""
        self._back = parts.return_parts(self.values, self.bucket, self.sharers.instance, self._ledger, self.tag)

    def receive_values(self) -> None:
        """Return when the parameters are all ranks'."""
        if self._back is not None:
            self._back.wait()
            self._back = None

    @property
    def stale(self) -> bool:
        """Whether parameters are still on their way here."""
        return self._back is not None
