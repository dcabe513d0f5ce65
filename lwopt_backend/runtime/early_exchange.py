"""Early exchange: buckets sent in the backward pass, used only if they equal those that the step would send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lwopt_backend.runtime.exchange import Arrival, Beside
from lwopt_backend.runtime.pieces import Pieces, PiecesOf
from lwopt_backend.runtime.step import Given, MatrixStepper
from lwopt_backend.runtime.undisturbed import undisturbed

LONGEST_PAUSE = 32  # steps


class EarlyExchange:
    """The buckets of one stepper that are exchanged before the step.

    A bucket is sent when the last of its gradients is ready, with the directions that follow from these gradients. The
    step advances the state, computes the directions again, and compares them with those sent, bit by bit. If any rank
    finds a difference, because gradients were clipped, unscaled or otherwise changed in between, the bucket is
    exchanged again. The result therefore always equals that of a step without early exchange. After such a
    repetition, early exchange pauses for 1 step, then for 2, up to 32.

    Directions are computed on a different stream from that of the gradients, so that gradients need not wait. A read
    may be torn by a later change of the gradient; the comparison finds that difference too.
    """

    def __init__(self, stepper: MatrixStepper, buckets: Sequence[Sequence[int]], device: torch.device) -> None:
        self._stepper = stepper
        self._device = device
        self._beside = Beside(device)
        self._buckets = buckets
        self._bucket_of = {atom: number for number, bucket in enumerate(buckets) for atom in bucket}
        self._waiting = [set(bucket) for bucket in buckets]
        self._departed: dict[int, Arrival] = {}
        self._advanced: set[int] = set()
        self._pause = 0
        self._penalty = 1

    @torch.no_grad()
    def ready(self, atom: int, now: Callable[[], Given]) -> None:
        """Note that an atom's gradient is ready. Called on all ranks, for the same atoms in the same order.

        ``now`` returns what the step would be given now, and is called only for a bucket's last atom. If a gradient is
        ready a second time, it belongs to another micro-batch, and everything sent so far is dropped as stale.
        """
        bucket = self._bucket_of.get(atom)
        if bucket is None or self._pause:
            return
        self._beside.follow()  # this gradient's stream: every FSDP2 root reduces on its own
        if atom not in self._waiting[bucket]:
            self.forget()
        self._waiting[bucket].discard(atom)
        if not self._waiting[bucket]:
            given = now()
            if self._stepper.in_blocks(given.rules).intersection(self._buckets[bucket]):
                return
            atoms = self._stepper.sent_atoms(bucket)
            with (
                undisturbed(),
                torch.no_grad(),
                self._beside.running(lambda: [grad for atom in atoms for grad in given.pieces[atom].grads]),
            ):
                self._departed[bucket] = self._stepper.send_directions(bucket, copied(given))

    def forget(self) -> None:
        """Drop all exchanges in flight."""
        self._beside.join()
        for arrival in self._departed.values():
            arrival.wait()
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]

    def touched(self, given: Given, missing: set[int]) -> Tensor:
        """Advance the state of the buckets already sent, and compare them with what the step would send.

        Returns int32 flags of shape (buckets of the plan,), 1 where a bucket must be exchanged again.

        ``missing`` are atoms that no longer have a gradient on this rank.
        """
        self._beside.join()
        flags = torch.zeros(len(self._buckets), dtype=torch.int32, device=self._device)
        for bucket, arrival in self._departed.items():
            if missing.intersection(self._buckets[bucket]):
                flags[bucket] = 1
                continue
            sent = arrival.sent()
            now = self._stepper.advance_sent(bucket, given, arrival)
            if sent:
                flags[bucket] |= (_bits(torch.cat([*now])) != _bits(torch.cat([*sent]))).any()
            self._advanced.add(bucket)
        return flags

    def settle(self, touched: Sequence[int]) -> Mapping[int, Arrival | None]:
        """The buckets already sent, as ``step`` takes them in ``departed``, given the flags of all ranks."""
        self._pause = max(0, self._pause - 1)
        wrong = [bucket for bucket in self._departed if touched[bucket]]
        for bucket in wrong:
            self._departed.pop(bucket).wait()
        settled: dict[int, Arrival | None] = dict.fromkeys(self._advanced)
        settled.update(self._departed)
        if wrong:
            self._pause, self._penalty = self._penalty, min(2 * self._penalty, LONGEST_PAUSE)
        elif self._departed:
            self._penalty = 1
        self._departed, self._advanced = {}, set()
        self._waiting = [set(bucket) for bucket in self._buckets]
        return settled


def copied(given: Given) -> Given:
    """What is given, with copies of the state, for an advance before the step."""
    return Given(given.rules, _Copied(given.pieces), given.skipped)


class _Copied:
    """Pieces with copies of their state."""

    def __init__(self, pieces: PiecesOf) -> None:
        self._pieces = pieces

    def __getitem__(self, atom: int, /) -> Pieces:
        pieces = self._pieces[atom]
        states = [{key: tensor.clone() for key, tensor in state.items()} for state in pieces.states]
        return Pieces(pieces.values, pieces.grads, states)


def _bits(tensor: Tensor) -> Tensor:
    """The bits as integers, so that NaN equals itself, and 0 does not equal -0."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
