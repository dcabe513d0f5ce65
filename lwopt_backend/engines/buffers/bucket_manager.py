"""The bucket manager: it takes gradients, reduces them to their owners, and returns new values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor

from lwopt_backend.engines.buffers.hooks import _NoHook as _NoHook  # by which pickles of models know it
from lwopt_backend.engines.buffers.marks import ShownMarks
from lwopt_backend.plan.buffers.layout import Bucket
from lwopt_backend.runtime.buffers import BucketBuffers, Ledger, RankGroups
from lwopt_backend.runtime.exchange import Beside
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.step import GRADIENTS, Underway, first_error, one_line, reduced, returned

# Buckets in flight to their owners. The stream of the backward pass waits for the one before them, because its next
# allocations may reuse that bucket's memory. More in flight would take more memory, and hide no more communication.
IN_FLIGHT = 2


class Pass:
    """A backward pass that reduces, from its first gradient here until all buckets have left: by bucket, the
    parameters whose gradients are ``missing``; and the numbers of those that have ``left``."""

    def __init__(self, buckets: Sequence[BucketBuffers]) -> None:
        self.missing = [{slot.param for slot in bucket.bucket.slots} for bucket in buckets]
        self.left = set[int]()


class BucketManager:
    """Owns the parameters' long-lived buffers, a bucket each, sends their gradients, and returns new values.

    ::

        backward      gradients fill the buckets; a full bucket is sent to its owners at once, in one order on all ranks
                      (``_launch``); arrived gradients are cast and added on a side stream
        end of it     the remaining buckets are sent; a missing gradient is zero
        step          bucket by bucket: wait -> its owners update it -> send the parameters to all ranks

    Every rank starts the same collectives in the same order, with or without gradients: every backward pass that
    reduces sends each bucket exactly once. The order is the plan's until ranks have agreed on another. How far a bucket
    is, its tasks know, and who goes on with them is in ``runtime/step.py``.

    Made on all ranks, which turns the parameters into views of the buffers. ``buckets`` of ``params`` are in backward
    order; the ranks ``rank_groups[i]`` share ``buckets[i]``. ``order`` is the numbers of the buckets as they leave.
    ``filled`` is those that were full in a backward pass on this rank, in that order; None once ranks have agreed on an
    order. ``returning`` has the tasks of those whose new values are still in flight to this rank.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rank_groups: Sequence[RankGroups],
        params: Sequence[Tensor],
        names: Sequence[str],
        *,
        grad_dtype: torch.dtype | None = None,
        keep_full: bool = False,
        overlap: bool = True,
    ) -> None:
        self.params = params
        self.names = names
        self.ledger, beside = Ledger(), Beside(params[0].device)
        self.buckets = [
            BucketBuffers(
                bucket,
                params,
                of_bucket,
                grad_dtype or params[bucket.slots[0].param].dtype,
                self.ledger,
                beside,
                keep_full=keep_full,
            )
            for bucket, of_bucket in zip(buckets, rank_groups, strict=True)
        ]
        self.order: Sequence[int] = range(len(buckets))
        self.filled: list[int] | None = []
        self.data_ptrs = [param.data_ptr() for param in params]
        self.bucket_of = {slot.param: n for n, bucket in enumerate(buckets) for slot in bucket.slots}
        self.reduces: Callable[[], bool] | None = None  # the host's answer to whether the next pass reduces
        self.pass_ended: Callable[[], None] | None = None  # called on all ranks, once the buckets of a pass have left
        self.keeps_full = keep_full  # whether every rank keeps all mean gradients, in param.grad
        # Whether buckets are sent during backward passes; or all of them in ``finish``, to keep full at a pass' end.
        self.overlap = overlap
        # The buckets' tasks, by number, never another dict (``_close`` has these), and the pass in which buckets leave.
        self._reducing: dict[int, Underway] = {}
        self.returning: dict[int, Underway] = {}
        self._pass: Pass | None = None
        # Errors of this rank: one that lost gradients, until all ranks drop theirs; and one after which other ranks are
        # in a collective that this one cannot join, for good.
        self.lost = ""
        self._behind = ""
        # Which gradients count for the next step.
        self._syncs = True  # the passes that run now reduce
        self.left_behind = False  # a pass left its gradients unreduced
        self.passes = 0  # reducing backward passes since the last step
        self.version = 0  # of the mean gradients
        self._touched = [False] * len(params)  # had a gradient on this rank since the last drop_gradients()
        self._stale: set[int] = set()  # parameters of whose gradients earlier passes are to be forgotten
        self.changes = 0  # a sum over all that was done to gradients; ranks compare it
        self.shown = ShownMarks(params, keep_full)
        tasks = (self._reducing, self.returning)
        weakref.finalize(self, _close, tasks, params, self.shown.marks).atexit = False

    @property
    def marks(self) -> list[Tensor]:
        """What param.grad shows of gradients that were taken; none if it shows nothing."""
        return self.shown.marks

    def leave_in(self, order: Sequence[int]) -> None:
        """Send buckets in this order from now on. Called on all ranks, between backward passes."""
        assert self._pass is None or not self._pass.left
        self.order, self.filled = order, None

    # Backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank, to be reduced together with those of a later backward pass."""
        before, self._syncs = self._syncs, False
        self.left_behind = True
        try:
            yield
        finally:
            self._syncs = before

    def begin_backward(self) -> None:
        """Note that a backward pass begins."""
        if self.reduces is not None:
            self._syncs = self.reduces()
        self.left_behind = self.left_behind or not self._syncs  # also of passes that follow a use under no_sync
        if self._syncs:
            self._begin_pass()

    def _begin_pass(self) -> Pass:
        """The pass in which buckets leave: a new one, unless one has not sent all."""
        if self._pass is None:
            self._pass = Pass(self.buckets)
        return self._pass

    def arrived(self, index: int) -> None:
        """Take a parameter's gradient, and send the buckets that are full up to the next one that is not: its own, if
        that has become full, or those that had to wait for it."""
        number = self.bucket_of[index]
        self._take(index, number)
        if not self._syncs:
            return
        current = self._begin_pass()
        current.missing[number].discard(index)
        if self.filled is not None and not current.missing[number] and number not in self.filled:
            self.filled.append(number)
        while self.overlap and (following := self._next(current)) is not None and not current.missing[following]:
            self._launch(current, following)
        if self._next(current) is None:
            self._end_pass()

    def _take(self, index: int, number: int) -> None:
        self._check_may_arrive(index, number)
        self._touched[index] = True
        with torch.no_grad():
            self.buckets[number].take(index)
        self.shown.show(index)

    def _check_may_arrive(self, index: int, number: int) -> None:
        """Raises RuntimeError if a parameter's bucket was sent, or its new value has not arrived."""
        if self._syncs and self._pass is not None and number in self._pass.left:
            raise RuntimeError(
                f"parameter {self.names[index]!r} got another gradient in one backward pass after bucket {number} had "
                "been sent with its first: several reentrant checkpoints use it. Use checkpoint(..., "
                'use_reentrant=False), or overlap_grad_reduce=False (under DeepSpeed "overlap_comm": false)'
            )
        if number in self.returning:
            if self.returning[number].failed:
                self.receive_values([number])  # which says so
            raise RuntimeError(
                f"parameter {self.names[index]!r} was used before its new value had arrived, because its module was "
                "not called; call optimizer.synchronize() before the forward pass, or switch overlap_param_gather off"
            )

    def end_backward(self) -> None:
        """Send the buckets that were not sent during the backward pass. Called on all ranks."""
        if self._pass is not None and (self.overlap or self.keeps_full):  # whose mean param.grad has after the pass
            self._launch_rest()
        elif self._pass is not None:
            self._show_others()
        self.shown.put_back()

    def _next(self, current: Pass) -> int | None:
        """The bucket that leaves next in a pass; None if all have left."""
        return self.order[len(current.left)] if len(current.left) < len(self.buckets) else None

    def _launch_rest(self) -> None:
        current = self._begin_pass()
        while (number := self._next(current)) is not None:
            self._launch(current, number)
        self._end_pass()

    def _launch(self, current: Pass, number: int) -> None:
        """Start to reduce a bucket. Nothing else does; ``model._transients`` computes the bytes of this order.

        A bucket has left once its collective has begun. A rank without memory for that raises, and begins it in
        ``zero_grad()``: the other ranks wait for all that they have begun.
        """
        self._check_joins()
        with self._guarded():
            # A bucket in flight keeps its buffer, so the oldest arrives first, or backward would fill the memory.
            if len(current.left) >= IN_FLIGHT:
                self._arrive(self.order[len(current.left) - IN_FLIGHT])
            self._arrive(number)  # its transfer of an earlier pass
            with torch.no_grad():
                self._look(slot.param for slot in self.buckets[number].bucket.slots)
                self._forget_stale(number)
                task = Underway(reduced(self.buckets[number], self._reducing.get(number)))
                next(task)
        self._reducing[number] = task
        current.left.add(number)
        self.version += 1

    def _end_pass(self) -> None:
        self._pass = None
        self.passes += 1
        self.left_behind = False
        with self._guarded(joins=True):
            if self.pass_ended is not None:
                self.pass_ended()
            self._show_others()
            if self.keeps_full:
                for number, bucket in enumerate(self.buckets):
                    self._settle(number)
                    with torch.no_grad():
                        bucket.spread_gradients()
                self._show_everywhere()
                self.shown.note_all()

    @contextmanager
    def _guarded(self, *, joins: bool = False) -> Iterator[None]:
        """Context of work on gradients, of which some are lost if it raises. If it then ``joins`` other ranks in a
        collective, those wait there for this rank, which cannot make up for that collective."""
        try:
            yield
        except BaseException as error:
            self.lost = self.lost or one_line(error)
            if joins and any(bucket.rank_groups.everyone.world_size > 1 for bucket in self.buckets):
                self._behind = self._behind or one_line(error)
            raise

    def _check_joins(self) -> None:
        """Raises RuntimeError if this rank would call other collectives than the ranks that wait for it."""
        if self._behind:
            raise RuntimeError(
                "expected this rank in a collective in which other ranks wait for it, but an error has ended what it "
                f"had to send there; end all ranks, and resume from a checkpoint. The error was: {self._behind}"
            )

    def _show_others(self) -> None:
        """After a pass that reduces: other ranks may have a gradient where this one has none."""
        if self.buckets[0].rank_groups.everyone.world_size > 1:
            self.shown.show_others()

    def _show_everywhere(self) -> None:
        """Set ``param.grad`` to the mean gradient where only other ranks had one. Called on all ranks."""
        for rank_groups in {id(bucket.rank_groups): bucket.rank_groups for bucket in self.buckets}.values():
            slots = [(b, slot.param) for b in self.buckets if b.rank_groups is rank_groups for slot in b.bucket.slots]
            here = [self.params[index].grad is not None for _, index in slots]
            presence = Presence(rank_groups.everyone, here, self.params[0].device)
            for place, (bucket, index) in enumerate(slots):
                if not here[place] and presence(place):
                    assert bucket.full is not None
                    self.params[index].grad = bucket.view(bucket.full, index)
            presence.finish()

    def _arrive(self, number: int) -> None:
        """Wait for a bucket's gradients, if they are on their way to its owners."""
        task = self._reducing.get(number)
        if task is None or task.at != GRADIENTS:
            return
        with self._guarded(joins=self.buckets[number].rank_groups.replicas is not None), torch.no_grad():
            del self._reducing[number]
            next(task, None)
            self._reducing[number] = task  # which has not raised

    def _settle(self, number: int) -> None:
        """Called on all ranks, before one more collective."""
        with self._guarded(joins=True), torch.no_grad():
            self._arrive(number)
            self.buckets[number].settle(self._reducing.get(number, ()))
            self._reducing.pop(number, None)
            self._forget_stale(number)

    # What was done to gradients between passes

    def lift(self, index: int) -> None:
        """Take the mark out of param.grad, to which autograd is about to add a gradient."""
        self._look([index])
        self.shown.lift(index)

    def _look(self, indices: Iterable[int]) -> None:
        """Drop the gradients that were removed from param.grad since they were shown there."""
        for index in self.shown.removed(indices):
            self._touched[index] = False
            self.forget([index])

    def forget(self, indices: Iterable[int]) -> None:
        """Forget the gradients of these parameters in all passes so far; those of a step's are then zero."""
        for index in indices:
            self.buckets[self.bucket_of[index]].forget_taken(index)
            self._stale.add(index)
            self.version += 1
            if self.passes:  # before, gradients were only this rank's
                self.note("forget", index)

    def note(self, what: str, *params: int) -> None:
        """Note what was done to mean gradients, in any order between two passes."""
        self.changes = (self.changes + crc32(repr((what, params, self.passes)).encode())) % 2**31

    def _forget_stale(self, number: int) -> None:
        bucket = self.buckets[number]
        if stale := self._stale.intersection(slot.param for slot in bucket.bucket.slots):
            bucket.forget(stale, self._reducing.get(number, ()))
            self._stale -= stale

    # Step

    def finish(self, passes: int = 1) -> None:
        """Send the unsent buckets if gradients remain here, or if fewer than ``passes`` passes reduced so far.

        A rank that had fewer backward passes than the others takes part with zeros. Called on all ranks.
        """
        self._check_joins()
        while self._pass is not None or self.left_behind or self.passes < passes:
            self._launch_rest()

    def has_gradient(self, index: int) -> bool:
        """Whether this rank has had a gradient for a parameter since the last ``drop_gradients``."""
        return self.params[index].grad is not None if self.keeps_full else self._touched[index]

    def assigned(self, index: int) -> None:
        """Note that the user assigned a gradient to a parameter at its owner."""
        self._touched[index] = True

    def unused_grad(self) -> str | None:
        """A parameter with a ``grad`` from outside a backward pass (the manager takes those of passes), or None."""
        self._look(range(len(self.params)))
        if self.keeps_full:
            return None
        for index, param in enumerate(self.params):
            if param.grad is not None and not self.shown.is_mark(index):
                return self.names[index]
        return None

    def take_changed(self) -> None:
        """Copy gradients that the user assigned to param.grad (``keep_full``)."""
        if self.keeps_full:
            for bucket in self.buckets:
                bucket.take_changed()

    def settled(self, numbers: Iterable[int] | None = None) -> Iterator[BucketBuffers]:
        """Yield the buckets, by default all in order, each once its owners have the mean gradients. On all ranks, after
        ``finish``. Raises RuntimeError if some were ``lost``."""
        self._check_joins()
        if self.lost:
            raise RuntimeError(
                "expected all gradients, but an error on this rank has lost some; call zero_grad() on all ranks, and "
                f"run the backward passes again. The error was: {self.lost}"
            )
        for number in range(len(self.buckets)) if numbers is None else numbers:
            self._settle(number)
            yield self.buckets[number]

    def stepped_grad(self) -> str | None:
        """A parameter whose gradient the last step has used, no pass has followed, and nobody has cleared; or None."""
        if self.has_unused_gradients:
            return None
        return next((name for index, name in enumerate(self.names) if self.shown.is_used(index)), None)

    def stepped(self, unused: Iterable[int]) -> None:
        """End a step: drop the gradients, unless ``keep_full`` leaves them for the user to read. Marks stay, as
        gradients do in torch, but for those of parameters ``unused`` by all ranks."""
        if self.keeps_full:
            self.passes = 0
            return
        self._drop()
        self.shown.drop(unused)

    def send_values(self, number: int) -> None:
        """Start sending a bucket's new parameters to all ranks. Called on all ranks, bucket by bucket."""
        with torch.no_grad():
            task = Underway(returned(self.buckets[number]))
            next(task)
        self.returning[number] = task

    def receive_values(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until the parameters of these buckets, by default of all, have arrived. Raises what a wait raises, and
        RuntimeError from then on: the parameters have no values."""
        for number in sorted(self.returning if numbers is None else self.returning.keys() & set(numbers)):
            with torch.no_grad():
                next(self.returning[number], None)
            del self.returning[number]

    def drop_gradients(self, *, to_zero: bool = False) -> None:
        """Drop all gradients; waits for those in flight. ``to_zero`` leaves zeros in their place, as in torch."""
        here = [to_zero and self._is_shown(index) for index in range(len(self.params))]
        self._drop()
        for index, param in enumerate(self.params):
            if not here[index]:
                param.grad = None
            elif self.keeps_full:
                with torch.no_grad():
                    param.grad.zero_()  # type: ignore[union-attr]
            else:
                self._count_again(index)

    def _is_shown(self, index: int) -> bool:
        """Whether ``param.grad`` shows a gradient that this rank had, or that the last step has used."""
        if self.keeps_full or not self.marks:
            return self.keeps_full and self.params[index].grad is not None
        return self.shown.is_used(index) or (self.shown.is_mark(index) and self._touched[index])

    def _count_again(self, index: int) -> None:
        self._touched[index] = True
        self.shown.count_again(index)

    def zero(self, indices: Iterable[int]) -> None:
        """Set the gradients that these parameters show to zero. One that the last step has used counts again."""
        indices = list(indices)
        for index in indices:
            if self._is_shown(index):
                self._count_again(index)
        if self.has_unused_gradients:
            self.forget(indices)
        self.version += 1

    def _drop(self) -> None:
        error = first_error(task.close for task in self._reducing.values())
        self._reducing.clear()
        for bucket in self.buckets:
            bucket.drop_gradients()
        self._touched = [False] * len(self.params)
        self.shown.clear()
        self._stale, self.changes = set(), 0
        self.version += 1
        self.left_behind = False
        self.passes = 0
        self._pass = None
        self.lost = ""
        if error is not None:
            raise error

    @property
    def has_unused_gradients(self) -> bool:
        """Whether a backward pass or ``no_sync`` ran since the last step. The same on all ranks that ran one."""
        return self.passes > 0 or self._pass is not None or self.left_behind

    @property
    def apart(self) -> bool:
        """Whether gradients of the last passes, under ``no_sync``, are each rank's own."""
        return self.left_behind and self._pass is None

    @property
    def all_left(self) -> bool:
        """Whether a pass has reduced since the last step, and all gradients were sent to their owners."""
        return self.passes > 0 and self._pass is None and not self.left_behind


def _close(tasks: Iterable[dict[int, Underway]], params: Sequence[Tensor], marks: Sequence[Tensor]) -> None:
    """Of a manager that is gone: its buckets' tasks wait for what they have in flight."""
    error = first_error(task.close for of_buckets in tasks for task in of_buckets.values())
    for param, mark in zip(params, marks):
        if param.grad is mark:
            param.grad = None
    if error is not None and not isinstance(error, RuntimeError):  # of ranks that are gone, too
        raise error
