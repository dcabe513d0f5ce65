"""Norm, number of zeros and scaling of the mean gradients in buckets; each element is counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.engines.buffers.bucket_manager import BucketManager
from lwopt_backend.engines.gradients import Pick, Version, clip_factor, everything, version_of
from lwopt_backend.runtime.buffers import RankGroups
from lwopt_backend.runtime.collectives import NORM, phase
from lwopt_backend.runtime.presence import largest_of_all, numbers_on

Scale = Callable[[Tensor, Any], Tensor]
SCALES: dict[str, Scale] = {"mul_": Tensor.mul_, "div_": Tensor.div_}  # by operator: what also scales the norms


class BufferGradients:
    """The mean gradients of ``manager``, after ``finish``. ``widest`` are the rank_groups with all ranks.

    Sums use a vector with one entry per parameter that all of ``widest`` have, and one for all others (experts), so
    that a rank's additions do not depend on where a layout puts parameters.
    """

    def __init__(self, manager: BucketManager, widest: RankGroups) -> None:
        self._manager = manager
        self._widest, self.everyone = widest, widest.everyone
        self._device = manager.params[0].device
        common = [slot.param for b in manager.buckets if b.rank_groups is widest for slot in b.bucket.slots]
        self._entry = {param: number for number, param in enumerate(sorted(common))}
        self._known: dict[float, Tensor] = {}  # norms by entry, in the orders that were asked for
        self._known_of = 0  # the manager's version of the gradients

    @torch.no_grad()
    def norm(self, norm_type: float, pick: Pick, foreach: bool | None = None) -> Tensor:
        """The norm of the mean gradients of the parameters that ``pick`` selects, in fp32. Called on all ranks."""
        with phase(NORM):
            found = self._powers(norm_type, pick)
            return found.max().float() if norm_type == math.inf else (found.sum() ** (1 / norm_type)).float()

    def agreed(self, norm: Tensor) -> Tensor:
        """A norm with the same bits on all ranks, as all of these norms are."""
        return norm

    def version(self) -> Version:
        """As in ``Gradients``. With ``keep_full``, the user may change the buffers, which param.grad shows."""
        full = [bucket.full for bucket in self._manager.buckets] if self._manager.keeps_full else []
        return version_of(full)._replace(changes=self._manager.version)

    def knows(self, norm_type: float) -> bool:
        """Whether ``norms`` of this order needs no other rank."""
        if self._known_of != self._manager.version:
            self._known, self._known_of = {}, self._manager.version
        return norm_type in self._known

    @torch.no_grad()
    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """The norm of each of these parameters' gradients, in fp32. Called on all ranks, unless it ``knows`` them."""
        for param in params:
            if param not in self._entry:
                raise RuntimeError(
                    f"param.grad of {self._manager.names[param]!r}: ranks have different experts, whose norms only "
                    "clip_grad_norm_ and grad_norm of the optimizer add up; call these"
                )
        if not self.knows(norm_type):
            with phase(NORM):
                found = self._powers(norm_type, everything)
                self._known[norm_type] = (found if norm_type == math.inf else found ** (1 / norm_type)).float()
        norms = self._known[norm_type].clone().unbind()
        return [norms[self._entry[param]] for param in params]

    @torch.no_grad()
    def count_zeros(self, pick: Pick) -> int:
        """The number of their elements that are exactly zero. Called on all ranks."""
        zeros = self._by_entry(pick, lambda grads: [(g.numel() - torch.count_nonzero(g)).double() for g in grads])
        self._widest.everyone.all_reduce(zeros)
        return int(zeros.sum())

    @torch.no_grad()
    def scale(self, factor: Tensor | float, pick: Pick = everything) -> None:
        """Multiply the mean gradients of the parameters that ``pick`` selects by ``factor``, in place."""
        self._manager.version += 1
        names = self._manager.names
        for bucket in list(self._manager.settled()):
            for grad in bucket.stored_grads(None if pick is everything else lambda param: pick(names[param])):
                grad.mul_(factor)

    def clip(self, max_norm: float, norm: Tensor, pick: Pick, foreach: bool | None = None) -> None:
        """``torch.nn.utils.clip_grads_with_norm_`` of the parameters that ``pick`` selects."""
        self.scale(clip_factor(max_norm, norm), pick)

    @torch.no_grad()
    def change(self, params: Sequence[int], operator: Any, *args: Any, **kwargs: Any) -> None:
        """Change these parameters' gradients by an in-place ``operator`` that takes elements one by one.

        Each rank changes its own while they are ``apart``, as it does under DDP.
        """
        name, pieces = operator._schema.name.partition("::")[2], self._pieces(params)
        if not self._manager.apart:
            self._manager.note(name, *params)
        for target in pieces if not name.startswith("_foreach_") else [pieces] if pieces else []:
            operator(target, *args, **kwargs)
        scale, known = SCALES.get(name.removeprefix("_foreach_")), self._known_of == self._manager.version
        self._manager.version += 1
        if scale is not None and known:
            self._known_of = self._manager.version
            entries = [self._entry[param] for param in params if param in self._entry]
            for of_all in self._known.values():
                for norms in [of_all] if len(entries) == len(self._entry) else [of_all[entry] for entry in entries]:
                    scale(norms, abs(args[0]))

    @torch.no_grad()
    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Multiply these parameters' gradients by ``inverse``. Set ``found_inf`` to 1, on all ranks, if any has a
        non-finite element. Called on all ranks."""
        self._manager.version += 1
        self._manager.note("unscale", *params)
        if pieces := self._pieces(params):
            torch._amp_foreach_non_finite_check_and_unscale_(pieces, found_inf, inverse)
        self._widest.everyone.all_reduce_max(found_inf).wait()

    def _pieces(self, params: Sequence[int]) -> list[Tensor]:
        """The mean gradients of this rank's pieces of these parameters, or all of its own while they are ``apart``."""
        wanted, numbers = set(params), sorted({self._manager.bucket_of[param] for param in params})
        if self._manager.apart:
            return [grad for number in numbers for grad in self._manager.buckets[number].taken(wanted)]
        buckets = list(self._manager.settled(numbers))
        pieces = [pair for bucket in buckets for pair in zip(bucket.pieces, bucket.owned_grads())]
        return [grad for piece, grad in pieces if piece.param in wanted]

    def _powers(self, norm_type: float, pick: Pick) -> Tensor:
        """By entry, the norms to the power of ``norm_type``, whose sum is that of all; of order infinity, the norms."""
        if norm_type == math.inf:
            largest = self._by_entry(pick, lambda grads: [grad.abs().max().double() for grad in grads], torch.maximum)
            return largest_of_all(self._widest.everyone, largest)

        def powers(grads: list[Tensor]) -> Sequence[Tensor]:
            return torch._foreach_pow(torch._foreach_norm(grads, norm_type, dtype=torch.float64), norm_type)

        sums = self._by_entry(pick, powers)
        self._widest.everyone.all_reduce(sums)
        return sums

    def _by_entry(
        self,
        pick: Pick,
        measure: Callable[[list[Tensor]], Sequence[Tensor]],
        join: Callable[[Tensor, Tensor], Tensor] = torch.add,
    ) -> Tensor:
        """By entry, ``measure`` of this rank's pieces, joined. The last entry is that of all experts."""
        owned = self._owned(pick)
        found: dict[int, Tensor] = {}
        for (param, _), value in zip(owned, measure([grad for _, grad in owned]) if owned else ()):
            entry = self._entry.get(param, len(self._entry))
            found[entry] = join(found[entry], value) if entry in found else value
        entries = torch.zeros(len(self._entry) + 1, dtype=torch.float64, device=self._device)
        if found:
            places = numbers_on(self._device, list(found), torch.int64)
            entries.index_copy_(0, places, torch.stack(list(found.values())))
        return entries

    def _owned(self, pick: Pick) -> list[tuple[int, Tensor]]:
        """The gradients of this rank's pieces; none on instances other than the first."""
        found = []
        for bucket in list(self._manager.settled()):
            rank_groups = bucket.rank_groups
            if rank_groups.replicas is not None and rank_groups.replicas.rank > 0:
                continue
            pieces = zip(bucket.pieces, bucket.owned_grads())
            found += [(piece.param, grad) for piece, grad in pieces if pick(self._manager.names[piece.param])]
        return found
