"""Norms, zeros and scaling of the mean gradients that owners have: every element counts once, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from lwopt_backend.runtime.bucket_buffers import BucketBuffers
from lwopt_backend.runtime.bucket_manager import BucketManager
from lwopt_backend.runtime.labels import NORM
from lwopt_backend.runtime.maximum import largest_of_all
from lwopt_backend.runtime.sharers import Sharers


class OwnedGradients:
    """The gradients of ``manager`` after ``finish``. ``widest`` are the ranks that have all sharers' parameters.

    Sums run over a vector with one entry per parameter that all of ``widest`` have, and one for all others (experts),
    so that what a rank adds up does not depend on where a layout puts it.
    """

    def __init__(self, manager: BucketManager, widest: Sharers) -> None:
        self._manager = manager
        self._widest = widest
        common = [slot.param for b in manager.buckets if b.sharers is widest for slot in b.bucket.slots]
        self._entry = {param: number for number, param in enumerate(sorted(common))}

    @torch.no_grad()
    def norm(self, norm_type: float, pick: Callable[[int], bool]) -> Tensor:
        """The norm of the mean gradients of the parameters that ``pick`` says, in fp32. Called on all ranks."""
        with record_function(NORM):
            return self._norm(norm_type, pick)

    def _norm(self, norm_type: float, pick: Callable[[int], bool]) -> Tensor:
        if norm_type == float("inf"):
            largest = [g.abs().max() for _, g in self._owned(pick)]
            total = torch.stack(largest).max().float() if largest else torch.zeros((), device=self._device())
            return largest_of_all(self._widest.everyone, total)

        def power(grad: Tensor) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
            return norm**norm_type

        return (self._summed(pick, power).sum() ** (1 / norm_type)).float()

    @torch.no_grad()
    def count_zeros(self, pick: Callable[[int], bool]) -> int:
        """How many elements of the mean gradients are exactly zero. Called on all ranks."""
        zeros = self._summed(pick, lambda grad: (grad.numel() - torch.count_nonzero(grad)).double())
        return int(zeros.sum())

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        """Multiply all mean gradients."""
        for bucket in self._settled():
            for grad in bucket.stored_grads():
                grad.mul_(factor)

    def _summed(self, pick: Callable[[int], bool], measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Per parameter the sum of ``measure`` over its pieces on all ranks; the last entry is that of experts."""
        sums = torch.zeros(len(self._entry) + 1, dtype=torch.float64, device=self._device())
        for param, grad in self._owned(pick):
            sums[self._entry.get(param, len(self._entry))] += measure(grad)
        self._widest.everyone.all_reduce(sums)
        return sums

    def _owned(self, pick: Callable[[int], bool]) -> list[tuple[int, Tensor]]:
        """This rank's pieces; of several instances only the first counts."""
        found = []
        for bucket in self._settled():
            sharers = bucket.sharers
            if sharers.replicas is not None and sharers.replicas.rank > 0:
                continue
            pieces = zip(bucket.pieces, bucket.owned_grads())
            found += [(piece.param, grad) for piece, grad in pieces if pick(piece.param)]
        return found

    def _settled(self) -> Sequence[BucketBuffers]:
        return list(self._manager.settled())

    def _device(self) -> torch.device:
        return self._manager.params[0].device
