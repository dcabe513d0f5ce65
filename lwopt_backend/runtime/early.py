"""Buckets that leave during the backward pass, and are used only if they carried what the step would have sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.exchange import Arrival
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import Slices, Storage
from lwopt_backend.runtime.whole import advance, directed, joined

LONGEST_PAUSE = 32  # steps


class EarlyExchange:
    """The buckets of one stepper that are under way before the step.

    A bucket leaves when the last of its gradients is ready, with the direction that momentum would have after this
    gradient; the state itself is advanced by the step. The step then works out the direction again, for momentum has to
    be advanced anyway, and compares it with what was sent, bit by bit. If gradients were clipped, unscaled or otherwise
    touched in between, on any rank, the bucket is exchanged again. So the result is always that of a step without early
    exchange. Where that happens there is nothing to gain: the next steps are left alone, 1, then 2, up to 32 of them.
    """

    def __init__(self, stepper: MatrixStepper, buckets: Sequence[Sequence[int]]) -> None:
        self._stepper = stepper
        self._buckets = buckets
        self._bucket_of = {atom: number for number, bucket in enumerate(buckets) for atom in bucket}
        self._waiting = [set(bucket) for bucket in buckets]
        self._departed: dict[int, Arrival] = {}
        self._advanced: set[int] = set()
        self._pause = 0
        self._penalty = 1

    @torch.no_grad()
    def ready(self, atom: int, now: Callable[[], tuple[Sequence[MatrixRule], Storage]]) -> None:
        """Take note that an atom's gradient is there. Called on all ranks, for the same atoms in the same order.

        ``now`` gives the rules and the storage of this moment; only the last atom of a bucket asks. A gradient that is
        ready for the second time belongs to another micro-batch: what has left is stale.
        """
        bucket = self._bucket_of.get(atom)
        if bucket is None or self._pause:
            return
        if atom not in self._waiting[bucket]:
            self.forget()
        self._waiting[bucket].discard(atom)
        if not self._waiting[bucket]:
            rules, storage = now()
            self._departed[bucket] = self._stepper.send(
                bucket, rules, lambda index: preview(rules[index], storage, index)
            )

    def forget(self) -> None:
        """Drop what is under way."""
        for arrival in self._departed.values():
            arrival.discard()
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]

    def touched(self, rules: Sequence[MatrixRule], storage: Storage, missing: set[int], device: torch.device) -> Tensor:
        """Advance the state of what has left and compare: per bucket of the plan, 1 if it must be exchanged again.

        ``missing`` are atoms that have no gradient on this rank any more.
        """
        flags = torch.zeros(len(self._buckets), dtype=torch.int32, device=device)
        for bucket, arrival in self._departed.items():
            if missing.intersection(self._buckets[bucket]):
                flags[bucket] = 1
                continue
            for atom in self._stepper.held(bucket):
                advance(rules[atom], storage.parts(atom))
            self._advanced.add(bucket)
            for segment, sent in arrival.sent():
                now = joined(directed(rules[segment.atom], storage.parts(segment.atom)))
                now = now.to(sent.device, sent.dtype).reshape(-1)
                flags[bucket] |= (_bits(now) != _bits(sent)).any()
        return flags

    def settle(self, touched: Sequence[int]) -> Mapping[int, Arrival | None]:
        """What a step needs of the buckets that have left, given on which of them some rank has found a difference."""
        self._pause = max(0, self._pause - 1)
        wrong = [bucket for bucket in self._departed if touched[bucket]]
        for bucket in wrong:
            self._departed.pop(bucket).discard()
        settled: dict[int, Arrival | None] = dict.fromkeys(self._advanced)
        settled.update(self._departed)
        if wrong:
            self._pause, self._penalty = self._penalty, min(2 * self._penalty, LONGEST_PAUSE)
        elif self._departed:
            self._penalty = 1
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]
        return settled


def preview(rule: MatrixRule, storage: Storage, atom: int) -> Tensor:
    """The direction after this gradient, with the state left as it is."""
    pieces = [
        Slices(part.value, part.grad, {key: tensor.clone() for key, tensor in part.state.items()})
        for part in storage.parts(atom)
    ]
    advance(rule, pieces)
    return joined(directed(rule, pieces))


def _bits(tensor: Tensor) -> Tensor:
    """For comparison: NaN equals itself, and 0 does not equal -0."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
