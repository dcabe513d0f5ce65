"""Norm, number of zeros and scaling of the mean gradients of owned storage; each element is counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lwopt_backend.engines.gradients import Pick, clip_factor, everything
from lwopt_backend.engines.owned.bucket_manager import BucketManager
from lwopt_backend.engines.owned.buckets import Sharers
from lwopt_backend.runtime.collectives import NORM, phase
from lwopt_backend.runtime.presence import largest_of_all, numbers_on


class OwnedGradients:
    """The mean gradients of ``manager``, after ``finish``. ``widest`` are the sharers with all ranks.

    Sums use a vector with one entry per parameter that all of ``widest`` have, and one for all others (experts), so
    that a rank's additions do not depend on where a layout puts parameters.
    """

    def __init__(self, manager: BucketManager, widest: Sharers) -> None:
        self._manager = manager
        self._widest = widest
        self._device = manager.params[0].device
        common = [slot.param for b in manager.buckets if b.sharers is widest for slot in b.bucket.slots]
        self._entry = {param: number for number, param in enumerate(sorted(common))}

    @torch.no_grad()
    def norm(self, norm_type: float, pick: Pick, foreach: bool | None = None) -> Tensor:
        """The norm of the mean gradients of the parameters that ``pick`` selects, in fp32. Called on all ranks."""

        def powers(grads: list[Tensor]) -> Sequence[Tensor]:
            return torch._foreach_pow(torch._foreach_norm(grads, norm_type, dtype=torch.float64), norm_type)

        with phase(NORM):
            if norm_type != float("inf"):
                return (self._summed(pick, powers).sum() ** (1 / norm_type)).float()
            largest = [grad.abs().max() for _, grad in self._owned(pick)]
            total = torch.stack(largest).max().float() if largest else torch.zeros((), device=self._device)
            return largest_of_all(self._widest.everyone, total)

    @torch.no_grad()
    def count_zeros(self, pick: Pick) -> int:
        """The number of their elements that are exactly zero. Called on all ranks."""
        zeros = self._summed(pick, lambda grads: [(g.numel() - torch.count_nonzero(g)).double() for g in grads])
        return int(zeros.sum())

    @torch.no_grad()
    def scale(self, factor: Tensor | float, pick: Pick = everything) -> None:
        """Multiply the mean gradients of the parameters that ``pick`` selects by ``factor``, in place."""
        names = self._manager.names
        for bucket in list(self._manager.settled()):
            for grad in bucket.stored_grads(None if pick is everything else lambda param: pick(names[param])):
                grad.mul_(factor)

    def clip(self, max_norm: float, norm: Tensor, pick: Pick, foreach: bool | None = None) -> None:
        """``torch.nn.utils.clip_grads_with_norm_`` of the parameters that ``pick`` selects."""
        self.scale(clip_factor(max_norm, norm), pick)

    def _summed(self, pick: Pick, measure: Callable[[list[Tensor]], Sequence[Tensor]]) -> Tensor:
        """Per parameter, the sum of ``measure`` over its pieces on all ranks; the last entry is for all experts."""
        owned = self._owned(pick)
        found: dict[int, Tensor] = {}
        for (param, _), value in zip(owned, measure([grad for _, grad in owned]) if owned else ()):
            entry = self._entry.get(param, len(self._entry))
            found[entry] = found[entry] + value if entry in found else value
        sums = torch.zeros(len(self._entry) + 1, dtype=torch.float64, device=self._device)
        if found:
            entries = numbers_on(self._device, list(found), torch.int64)
            sums.index_copy_(0, entries, torch.stack(list(found.values())))
        self._widest.everyone.all_reduce(sums)
        return sums

    def _owned(self, pick: Pick) -> list[tuple[int, Tensor]]:
        """The gradients of this rank's pieces; none on instances other than the first."""
        found = []
        for bucket in list(self._manager.settled()):
            sharers = bucket.sharers
            if sharers.replicas is not None and sharers.replicas.rank > 0:
                continue
            pieces = zip(bucket.pieces, bucket.owned_grads())
            found += [(piece.param, grad) for piece, grad in pieces if pick(self._manager.names[piece.param])]
        return found
