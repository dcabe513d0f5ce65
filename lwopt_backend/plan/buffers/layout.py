"""A buffer as planned: which shard owns which matrix, in which bucket it travels, and what padding that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.buffers.stream import shard_multiple
from lwopt_backend.plan.cost import max_min_squared
from lwopt_backend.plan.types import Atom


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Matrices of one buffer over ``shards`` ranks, in model order.

    ::

        bucket 0 (last layers)         bucket 1                        padded: every bucket is ``shards`` equal parts
        | a a a . | b b c c | d d d d |  e e . . | f f f f | g g g . |         of shard_numels[bucket] elements
          shard 0   shard 1   shard 2    shard 0   shard 1   shard 2   compact: the dots are left out

    ``owners[i]`` is the shard of matrix i, ``buckets[i]`` its bucket; buckets are in backward order.
    """

    layout: str  # "padded" or "compact"
    strategy: str  # what found it
    atoms: tuple[Atom, ...]
    shards: int
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    shard_numels: tuple[int, ...]  # per bucket, the elements of its fullest shard, aligned

    @property
    def numel(self) -> int:
        """Elements of the matrices."""
        return sum(atom.numel for atom in self.atoms)

    @property
    def buffer_numel(self) -> int:
        """Elements that the long-lived buffer holds: with padding in a padded layout, without in a compact one."""
        return self.shards * sum(self.shard_numels) if self.layout == "padded" else self.numel

    @property
    def padding(self) -> float:
        """Padding over the matrices' elements; 0.5 is 50 %."""
        return self.buffer_numel / self.numel - 1

    @property
    def bucket_numels(self) -> list[int]:
        """Per bucket, the elements that travel."""
        if self.layout == "padded":
            return [self.shards * numel for numel in self.shard_numels]
        totals = [0] * len(self.shard_numels)
        for atom, bucket in zip(self.atoms, self.buckets):
            totals[bucket] += atom.numel
        return totals

    def loads(self) -> list[int]:
        """Per shard, the cost of what it owns."""
        return self._per_shard([atom.cost for atom in self.atoms])

    def estimated_loads(self) -> list[int]:
        """Per shard, Megatron-Core's estimate of the cost of what it owns."""
        return self._per_shard([max_min_squared(atom.shape) for atom in self.atoms])

    def owned_numels(self) -> list[int]:
        """Per shard, the elements it owns."""
        return self._per_shard([atom.numel for atom in self.atoms])

    def bucket_loads(self) -> list[dict[int, int]]:
        """Per bucket, the cost of what each of its owners has there; a shard that owns nothing of it is left out."""
        table: list[dict[int, int]] = [{} for _ in self.shard_numels]
        for atom, bucket, owner in zip(self.atoms, self.buckets, self.owners):
            table[bucket][owner] = table[bucket].get(owner, 0) + atom.cost
        return table

    def _per_shard(self, amounts: Sequence[int]) -> list[int]:
        sums = [0] * self.shards
        for owner, amount in zip(self.owners, amounts):
            sums[owner] += amount
        return sums

    def problems(self) -> list[str]:
        """What is wrong with this plan, in sentences; an empty list for every plan that was built here."""
        found = []
        bounds = (("owner", self.owners, self.shards), ("bucket", self.buckets, len(self.shard_numels)))
        for name, values, end in bounds:
            if len(values) != len(self.atoms):
                found.append(f"{len(values)} {name}s for {len(self.atoms)} matrices")
            found += [f"matrix {i}: {name} {v} is not in [0, {end})" for i, v in enumerate(values) if not 0 <= v < end]
        if any(later > earlier for earlier, later in zip(self.buckets, self.buckets[1:])):
            found.append("buckets are not contiguous ranges of the backward order")
        filled: dict[tuple[int, int], int] = {}
        for atom, bucket, owner in zip(self.atoms, self.buckets, self.owners):
            filled[bucket, owner] = filled.get((bucket, owner), 0) + atom.numel
        for (bucket, owner), numel in filled.items():
            if 0 <= bucket < len(self.shard_numels) and numel > self.shard_numels[bucket]:
                found.append(f"bucket {bucket}, shard {owner}: {numel} elements in {self.shard_numels[bucket]}")
        return found


def imbalance(loads: Sequence[int]) -> float:
    """Largest load over mean load; 1.0 is perfect, and that of no load at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def aligned_shard(numel: int, shards: int) -> int:
    """A shard's size rounded up to where the next bucket may start."""
    multiple = shard_multiple(shards)
    return -(-numel // multiple) * multiple
