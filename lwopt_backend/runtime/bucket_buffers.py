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
from lwopt_backend.runtime.ledger import Ledger
from lwopt_backend.runtime.parts import PartsPending, reduce_parts, return_parts
from lwopt_backend.runtime.sharers import Sharers


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
        self._shapes = {slot.param: params[slot.param].shape for slot in bucket.slots}
        self._arrived: set[int] = set()
        self._way: PartsPending | None = None
        self._across: tuple[object, Tensor] | None = None
        self._back: PartsPending | None = None
        first = params[bucket.slots[0].param]
        self.values = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            view = self.view(self.values, slot.param)
            view.copy_(params[slot.param].data)
            params[slot.param].data = view
        self.pieces: list[Piece] = list(bucket.pieces(sharers.instance.rank))
        self.owned_dtype = torch.float32 if first.dtype.itemsize < 4 else first.dtype
        self.masters: Tensor | None = None
        if self.owned_dtype != first.dtype:
            self.masters = torch.empty(self.owned_numel, dtype=self.owned_dtype, device=first.device)
        self.full: Tensor | None = None
        if keep_full:
            self.full = torch.zeros(bucket.numel, dtype=grad_dtype, device=first.device)
        self.mine: Tensor | None = None
        self._averaged = False
        self.refresh_masters()

    @property
    def owned_numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def view(self, buffer: Tensor, param: int) -> Tensor:
        """Parameter ``param``'s elements of a buffer laid out as this bucket."""
        slot = self._slots[param]
        return buffer.narrow(0, slot.offset, slot.numel).view(self._shapes[param])

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
        """Take the parameters' values into the masters."""
        if self.masters is not None:
            for piece, master in zip(self.pieces, self.owned_values()):
                master.copy_(self.values.narrow(0, piece.offset, piece.numel))

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
        view.add_(param.grad) if index in self._arrived else view.copy_(param.grad)
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
            self._zero_padding(full)
        self._way = reduce_parts(full, self.bucket, ranks, self._ledger, self.tag, keep=self._keep_full)
        if not self._keep_full:
            self.full = None
            self._arrived = set()

    @property
    def under_way(self) -> bool:
        return self._way is not None

    def arrive(self) -> None:
        """Wait for what ``launch`` started, and add it to what this rank has of earlier backward passes."""
        assert self._way is not None
        came = self._way.sum(self.owned_dtype)
        self._way = None
        if self.sharers.replicas is not None:
            self._settle_across()
            self._ledger.sent["across instances"] += came.numel() * came.itemsize
            self._across = (self.sharers.replicas.start_all_reduce(came), came)
        else:
            self._add(came)

    def settle(self) -> None:
        """Make ``mine`` the mean gradient. Called on all ranks, after ``arrive``."""
        self._settle_across()
        if self.mine is not None and not self._averaged:
            self.mine.div_(self.sharers.divisor)
            self._averaged = True

    def _settle_across(self) -> None:
        if self._across is not None:
            pending, came = self._across
            pending.wait()  # type: ignore[attr-defined]
            self._across = None
            self._add(came)

    def _add(self, came: Tensor) -> None:
        if self.mine is None or self._keep_full:
            self.mine, self._averaged = came, False
        else:
            self.mine.add_(came.div_(self.sharers.divisor) if self._averaged else came)

    def spread_gradients(self) -> None:
        """Bring the mean gradients to all ranks (``keep_full``). Called on all ranks."""
        assert self.full is not None and self.mine is not None
        start, stop = self.bucket.parts[self.sharers.instance.rank]
        self.full[start:stop].copy_(self.mine)
        self.mine = None
        return_parts(self.full, self.bucket, self.sharers.instance, self._ledger, self.tag, "gradients").wait()

    def drop_owned_gradients(self) -> None:
        """Forget the reduced gradients, which have been used."""
        self.mine = None
        self._averaged = False

    @property
    def is_here(self) -> bool:
        """Whether all that was started has arrived."""
        return self._way is None and self.mine is not None

    def drop_gradients(self) -> None:
        """Forget all gradients, those on their way included."""
        if self._way is not None:
            self._way.discard()
            self._way = None
        if self._across is not None:
            self._across[0].wait()  # type: ignore[attr-defined]
            self._across = None
        self.drop_owned_gradients()
        self._arrived = set()
        if not self._keep_full and self.full is not None:
            self._ledger.free(self.full)
            self.full = None

    def _zero_padding(self, buffer: Tensor) -> None:
        end = 0
        for slot in sorted(self._slots.values(), key=lambda slot: slot.offset):
            buffer[end : slot.offset].zero_()
            end = slot.offset + slot.numel
        buffer[end:].zero_()

    # Parameters

    def send_values(self) -> None:
        """Start bringing this rank's part of the parameters to all ranks, and theirs here. Called on all ranks."""
        self._back = return_parts(self.values, self.bucket, self.sharers.instance, self._ledger, self.tag)

    def receive_values(self) -> None:
        """Return when the parameters are all ranks'."""
        if self._back is not None:
            self._back.wait()
            self._back = None

    @property
    def stale(self) -> bool:
        """Whether parameters are still on their way here."""
        return self._back is not None
