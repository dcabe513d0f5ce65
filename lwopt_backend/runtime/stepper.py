"""One optimizer step of one group of matrices on one rank.

::

    decay and momentum on everything stored here
    bucket 0 leaves for its owners
    for every bucket:     the next bucket leaves        | on the wire
                          a share of the local matrices | meanwhile
                          this bucket has arrived: its owned matrices, whole -> updates leave for the fragments
                          the previous bucket's updates are back: applied

Two buckets are in flight at most. Matrices that lie whole at their owner never enter a buffer: they are updated through
views, one at a time, so the step holds one matrix (or one bucket) of temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lwopt_backend.plan import MatrixPlan, Segment
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.exchange import Arrival, Exchange
from lwopt_backend.runtime.storage import Slices, Storage


class MatrixStepper:
    """Steps the matrices of one plan. Up to ``batch_numel`` elements of equal shape go through the rule together.

    0 is one by one: the same bits as an unsharded optimizer, and faster on a CPU. Batching saves kernel launches on an
    accelerator.
    """

    def __init__(
        self, plan: MatrixPlan, collectives: Collectives, device: torch.device, *, batch_numel: int = 0
    ) -> None:
        self._plan = plan
        self._exchange = Exchange(plan, collectives, device)
        self._local = share_out(plan.local_atoms(collectives.rank), len(self._exchange) + 1)
        self._owned = [
            [atom for atom in bucket if plan.ownership.owners[atom] == collectives.rank] for bucket in plan.buckets
        ]
        self._batch_numel = batch_numel

    @torch.no_grad()
    def step(self, rule: MatrixRule, storage: Storage) -> None:
        """Update the weights and the state in ``storage``. Called on all ranks of the group."""
        whole = storage.whole()
        rule.accumulate(whole.grad, whole.state)
        whole.value.mul_(1 - rule.lr * rule.weight_decay)

        arriving = self._depart(0, rule, storage)
        returning: Arrival | None = None
        for bucket in range(len(self._exchange)):
            following = self._depart(bucket + 1, rule, storage)
            self._step_local(self._local[bucket], rule, storage)
            departed = self._update_owned(bucket, arriving, rule)
            self._apply_returned(returning, rule, storage)
            returning, arriving = departed, following
        self._step_local(self._local[-1], rule, storage)
        self._apply_returned(returning, rule, storage)

    def _depart(self, bucket: int, rule: MatrixRule, storage: Storage) -> Arrival | None:
        if bucket >= len(self._exchange):
            return None

        def fetch(segment: Segment) -> Tensor:
            part = storage.part(segment.atom, segment.start, segment.stop)
            return rule.direction(part.grad, part.state)

        return self._exchange.to_owners(bucket, rule.exchange_dtype, fetch)

    def _update_owned(self, bucket: int, arriving: Arrival | None, rule: MatrixRule) -> Arrival:
        assert arriving is not None
        atoms = self._plan.atoms
        matrices: dict[int, Tensor] = {}

        def deliver(segment: Segment, data: Tensor) -> None:
            if segment.atom not in matrices:
                matrices[segment.atom] = data.new_empty(atoms[segment.atom].shape)
            _cut(matrices[segment.atom], segment).copy_(data)

        arriving.wait(deliver)
        updates: dict[int, Tensor] = {}
        for batch in self._batches(self._owned[bucket]):
            transformed = _transform(rule, [matrices.pop(atom) for atom in batch])
            updates.update((atom, update.contiguous()) for atom, update in zip(batch, transformed))
        return self._exchange.to_fragments(bucket, rule.exchange_dtype, lambda s: _cut(updates[s.atom], s))

    def _apply_returned(self, returning: Arrival | None, rule: MatrixRule, storage: Storage) -> None:
        if returning is not None:
            returning.wait(lambda segment, update: self._apply(segment, update, rule, storage))

    def _step_local(self, atoms: Sequence[int], rule: MatrixRule, storage: Storage) -> None:
        for batch in self._batches(atoms):
            segments = [Segment(atom, 0, 0, self._plan.atoms[atom].numel) for atom in batch]
            parts = [storage.part(s.atom, s.start, s.stop) for s in segments]
            directions = [_direction(rule, part, self._plan.atoms[s.atom].shape) for s, part in zip(segments, parts)]
            for segment, update in zip(segments, _transform(rule, directions)):
                self._apply(segment, update.reshape(-1), rule, storage)

    def _apply(self, segment: Segment, update: Tensor, rule: MatrixRule, storage: Storage) -> None:
        part = storage.part(segment.atom, segment.start, segment.stop)
        part.value.add_(update, alpha=-rule.lr * rule.scale(self._plan.atoms[segment.atom].shape))

    def _batches(self, atoms: Sequence[int]) -> Iterator[list[int]]:
        """Atoms of equal shape together, at most ``batch_numel`` elements at a time."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for atom in atoms:
            by_shape.setdefault(self._plan.atoms[atom].shape, []).append(atom)
        for (rows, columns), alike in by_shape.items():
            size = max(1, self._batch_numel // (rows * columns))
            for begin in range(0, len(alike), size):
                yield alike[begin : begin + size]


def share_out(items: Sequence[int], shares: int) -> list[list[int]]:
    """Consecutive shares of nearly equal length; some may be empty."""
    bounds = [len(items) * i // shares for i in range(shares + 1)]
    return [list(items[low:high]) for low, high in zip(bounds, bounds[1:])]


def _direction(rule: MatrixRule, part: Slices, shape: tuple[int, int]) -> Tensor:
    return rule.direction(part.grad, part.state).view(shape)


def _transform(rule: MatrixRule, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(matrices) == 1:
        return [rule.transform(matrices[0])]
    return rule.transform(torch.stack(list(matrices))).unbind(0)


def _cut(matrix: Tensor, segment: Segment) -> Tensor:
    return matrix.view(-1).narrow(0, segment.start, segment.numel)
