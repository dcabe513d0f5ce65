"""The buffers of plain PyTorch's buckets on one rank, the ranks that share them, and their collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.plan.buffers.layout import Bucket, Piece
from lwopt_backend.runtime.collectives import (
    DONE,
    EXCHANGE_BACK,
    EXCHANGE_OUT,
    Collectives,
    Pending,
    all_reduce_nbytes,
    phase,
    sending,
)
from lwopt_backend.runtime.exchange import Beside, ProducerStreams
from lwopt_backend.runtime.tensors import owned_dtype


@dataclass(frozen=True, eq=False)
class RankGroups:
    """The ranks that share some parameters: ``instance`` owns them; ``replicas`` own this rank's part in all instances.

    ``everyone`` is the ranks of all instances. A mean gradient is the sum divided by ``divisor``.
    """

    everyone: Collectives
    instance: Collectives
    replicas: Collectives | None
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
        """Count sent bytes."""
        self.sent[kind] += nbytes
        sending(nbytes)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized flat tensor; pass it to ``free`` before its last reference goes."""
        made = torch.empty(numel, dtype=dtype, device=device)
        self.held += made.nbytes
        self.most_held = max(self.most_held, self.held)
        return made

    def free(self, tensor: Tensor) -> None:
        self.held -= tensor.numel() * tensor.itemsize


# The two collectives of a bucket, on every transport: a reduce-scatter brings gradients to the parts' owners, and an
# all-gather brings new parts to all ranks. Without equal parts, these are a reduction and a broadcast of each owner.


@dataclass
class PartsPending:
    """A collective in flight. ``label`` is for profiles.

    ``reduced``, a ledger tensor, takes this rank's part of the sum. ``sent``, if given, is freed when all is done.
    """

    label: str
    pending: Pending
    ledger: Ledger
    reduced: Tensor | None = None
    sent: Tensor | None = None

    def wait(self) -> None:
        with phase(self.label):
            self.pending.wait()
        used_here(self.sent, self.reduced)
        if self.sent is not None:
            self.ledger.free(self.sent)
        self.pending, self.sent = DONE, None

    def room(self, dtype: torch.dtype) -> Tensor:
        """The ledger tensor in ``dtype`` for the sum: ``reduced`` itself, or one that is not filled yet."""
        assert self.reduced is not None
        if self.reduced.dtype == dtype:
            return self.reduced
        return self.ledger.empty(self.reduced.numel(), dtype, self.reduced.device)

    def sum(self, into: Tensor) -> Tensor:
        """Wait; returns ``into``, what ``room`` returned, with this rank's part of the sum. The caller frees it."""
        self.wait()
        assert self.reduced is not None
        total, self.reduced = self.reduced, None
        if into is not total:
            into.copy_(total)
            self.ledger.free(total)
        return into

    def discard(self) -> None:
        """Wait, unless that is done, and free what was received."""
        if self.pending is not DONE or self.sent is not None:
            self.wait()
        if self.reduced is not None:
            self.ledger.free(self.reduced)
            self.reduced = None


def used_here(*tensors: Tensor | None) -> None:
    """The caller's stream uses these; their memory stays until it is done. A hook of a gradient runs on the stream of
    its forward operation, so another stream may have allocated them."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def reduce_parts(
    buffer: Tensor, bucket: Bucket, ranks: Collectives, ledger: Ledger, *, keep: bool = False
) -> PartsPending:
    """Start summing all ranks' ``buffer`` at the parts' owners. Frees it when done, unless ``keep``."""
    ledger.send("gradients", bucket.sent_numels(ranks.rank)[0] * buffer.itemsize)
    if ranks.world_size == 1 and not keep:
        return PartsPending(EXCHANGE_OUT, DONE, ledger, buffer)
    start, stop = bucket.parts[ranks.rank]
    mine = ledger.empty(stop - start, buffer.dtype, buffer.device)
    with phase(EXCHANGE_OUT):
        pending = ranks.reduce_scatter_parts(mine, buffer, None if bucket.even else bucket.owned)
    return PartsPending(EXCHANGE_OUT, pending, ledger, mine, None if keep else buffer)


def return_parts(
    buffer: Tensor, bucket: Bucket, ranks: Collectives, ledger: Ledger, what: str = "parameters"
) -> PartsPending:
    """Start sending every owner's part of ``buffer`` to all ranks."""
    ledger.send(what, bucket.sent_numels(ranks.rank)[1] * buffer.itemsize)
    if ranks.world_size == 1:
        return PartsPending(EXCHANGE_BACK, DONE, ledger)
    with phase(EXCHANGE_BACK):
        pending = ranks.all_gather_parts(buffer, None if bucket.even else bucket.owned)
    return PartsPending(EXCHANGE_BACK, pending, ledger)


def predivisor(divisor: float) -> float:
    """The divisor of gradients before they are summed: the least power of two that is not below ``divisor``.

    No partial sum can exceed the largest mean, as in DDP, which divides by ``divisor`` itself. A power of two rounds
    nothing above the subnormal numbers; the sum is divided by the rest, in the dtype of the step.
    """
    return float(2 ** math.ceil(math.log2(divisor)))


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
        rank_groups: RankGroups,
        grad_dtype: torch.dtype,
        ledger: Ledger,
        beside: Beside,
        *,
        keep_full: bool,
    ) -> None:
        self.bucket = bucket
        self.rank_groups = rank_groups
        self._predivisor = predivisor(rank_groups.divisor)
        self._rest = rank_groups.divisor / self._predivisor
        self._grad_dtype = grad_dtype
        self._ledger = ledger
        self._beside = beside
        self._keep_full = keep_full
        self._params = {slot.param: params[slot.param] for slot in bucket.slots}
        self._slots = {slot.param: slot for slot in bucket.slots}
        self._arrived: set[int] = set()
        first = params[bucket.slots[0].param]
        self._producers = ProducerStreams(first.device)
        self.values = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for slot in bucket.slots:
            view = self.view(self.values, slot.param)
            view.copy_(params[slot.param].data)
            params[slot.param].data = view
        self.pieces: list[Piece] = list(bucket.pieces(rank_groups.instance.rank))
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
        start, stop = self.bucket.parts[self.rank_groups.instance.rank]
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
        start = self.bucket.parts[self.rank_groups.instance.rank][0]
        return [self.mine.narrow(0, piece.offset - start, piece.numel) for piece in self.pieces]

    def stored_grads(self, pick: Callable[[int], bool] | None = None) -> list[Tensor]:
        """The buffer of this rank's reduced gradients, padding included; with ``keep_full``, that of all gradients. If
        ``pick`` is given, one tensor for each parameter that it selects."""
        stored = self.full if self._keep_full else self.mine
        if stored is None or pick is None:
            return [] if stored is None else [stored]
        if self._keep_full:
            return [self.view(stored, param) for param in self._slots if pick(param)]
        return [grad for piece, grad in zip(self.pieces, self.owned_grads()) if pick(piece.param)]

    def refresh_masters(self) -> None:
        """Copy the parameters into the masters, except where a master already rounds to its parameter's value.

        Weights and optimizer state may therefore be loaded in either order, and masters keep their precision.
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
        view.add_(param.grad) if index in self._arrived else view.copy_(param.grad)
        self._arrived.add(index)
        param.grad = None

    def taken(self, params: Collection[int]) -> list[Tensor]:
        """What ``take`` has moved here of these parameters' gradients. After backward, whose streams autograd joins."""
        return [self.view(self._full_buffer(), index) for index in self._arrived.intersection(params)]

    def forget_taken(self, index: int) -> None:
        """Forget what ``take`` has moved here of a parameter's gradients, and what was not sent."""
        self._arrived.discard(index)

    def forget(self, params: Collection[int], crossing: Iterable[object]) -> None:
        """Forget what was reduced of these parameters' gradients. Called after ``arrive``; what is still ``crossing``
        to other instances is ended."""
        self._end(crossing)
        if self._keep_full and self.full is not None:  # where a gradient that came later stays
            for param in params:
                if self._params[param].grad is None:
                    self.view(self.full, param).zero_()
        for piece, grad in zip(self.pieces, self.owned_grads()) if self.mine is not None else ():
            if piece.param in params:
                grad.zero_()

    def take_changed(self) -> None:
        """With ``keep_full``, copy gradients that the user has assigned to param.grad."""
        for index, param in self._params.items():
            if param.grad is not None:
                self._take_kept(param, self.view(self._full_buffer(), index))

    def _take_kept(self, param: Tensor, view: Tensor) -> None:
        """autograd adds to an existing gradient, the view, in place; otherwise it makes a new tensor."""
        assert param.grad is not None
        if param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
            param.grad = view

    def _full_buffer(self) -> Tensor:
        if self.full is None:
            self.full = self._ledger.empty(self.bucket.numel, self._grad_dtype, self.values.device)
        self._producers.note(self.full)
        return self.full

    def launch(self) -> PartsPending:
        """Start reducing the gradients to their owners; missing ones are zero. Called on all ranks."""
        full, ranks = self._full_buffer(), self.rank_groups.instance
        self._producers.join()
        here = {i for i, p in self._params.items() if p.grad is not None} if self._keep_full else self._arrived
        for index in self._slots.keys() - here:
            self.view(full, index).zero_()
        if self.bucket.padding and not self._keep_full:
            slots = sorted(self._slots.values(), key=lambda slot: slot.offset)
            starts = [*(slot.offset for slot in slots), len(full)]
            ends = [0, *(slot.offset + slot.numel for slot in slots)]
            torch._foreach_zero_([full[end:start] for end, start in zip(ends, starts) if start > end])
        if self._predivisor != 1:
            full.mul_(1 / self._predivisor)
        way = reduce_parts(full, self.bucket, ranks, self._ledger, keep=self._keep_full)
        if not self._keep_full:
            self.full = None
            self._arrived = set()
        return way

    def arrive(self, way: PartsPending, crossing: Iterable[object]) -> PartsPending | None:
        """Wait for the reduction that ``launch`` started, and add the sum to that of earlier backward passes; or start
        to add it up across instances, after the sum of an earlier pass that is still ``crossing``.

        A side stream does this. The caller's stream waits, because it may now be given the memory that was sent. The
        caller's stream also allocates the sum, which the step uses: the side stream's memory would serve nothing else.
        """
        way.wait()
        into = way.room(self.owned_dtype)
        with self._beside.running(lambda: [into] if way.reduced is None else [into, way.reduced]):
            came = way.sum(into)
            if self.rank_groups.replicas is None:
                self._add(came)
                return None
            for _ in crossing:
                pass
            nbytes, replicas = came.numel() * came.itemsize, self.rank_groups.replicas
            self._ledger.send("across instances", all_reduce_nbytes(nbytes, replicas.world_size))
            with phase(EXCHANGE_OUT):
                pending = replicas.start_all_reduce(came)
            return PartsPending(EXCHANGE_OUT, pending, self._ledger, came)

    def add_crossed(self, across: PartsPending) -> None:
        """Wait for the sum across instances, and add it to that of earlier backward passes."""
        self._add(across.sum(across.room(self.owned_dtype)))

    def _end(self, crossing: Iterable[object]) -> None:
        self._beside.join()
        for _ in crossing:
            pass

    def settle(self, crossing: Iterable[object]) -> None:
        """Wait for the sum, also that which is still ``crossing`` to other instances, and turn it into a mean. Called
        on all ranks, after ``arrive``."""
        self._end(crossing)
        used_here(self.mine)
        if self.mine is not None and not self._averaged:
            self.mine.div_(self._rest)
            self._averaged = True

    def _add(self, came: Tensor) -> None:
        if self._keep_full:
            assert self.full is not None
            start, _ = self.bucket.parts[self.rank_groups.instance.rank]
            self.full.narrow(0, start, len(came)).copy_(came.div_(self._rest))
            self._ledger.free(came)
        elif self.mine is None:
            self.mine, self._averaged = came, False
        else:
            self.mine.add_(came.div_(self._rest) if self._averaged else came)
            self._ledger.free(came)

    def spread_gradients(self) -> None:
        """Send the mean gradients to all ranks (``keep_full``). Called on all ranks."""
        assert self.full is not None
        return_parts(self.full, self.bucket, self.rank_groups.instance, self._ledger, "gradients").wait()

    def drop_gradients(self) -> None:
        """Free all gradients. Called once none is in flight."""
        if self.mine is not None:
            self._ledger.free(self.mine)
        self.mine = None
        self._averaged = False
        self._arrived = set()
        if not self._keep_full and self.full is not None:
            self._ledger.free(self.full)
            self.full = None

    # Parameters

    def send_values(self) -> PartsPending:
        """Start sending each rank's part of the parameters to all others. Called on all ranks."""
        # The parameters are views by ``.data``, so autograd does not see their changes.
        torch.autograd.graph.increment_version(self._params.values())
        return return_parts(self.values, self.bucket, self.rank_groups.instance, self._ledger)

    def receive_values(self, back: PartsPending) -> None:
        """Wait until the parts of all ranks have arrived."""
        back.wait()
