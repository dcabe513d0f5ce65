"""Which shard takes which matrix, for given buckets: filled bins dealt to shards, or matrices one by one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.buffers.cuts import Cuts, Packer
from lwopt_backend.plan.buffers.stream import Stream


@dataclass
class Placement:
    """Owners by position, being worked on. ``weights`` is what is balanced: a cost per position.

    ``filled[b][r]`` are the elements of bucket b in shard r, ``loads[r]`` the weight of shard r over all buckets.
    """

    stream: Stream
    cuts: Cuts
    weights: Sequence[int]
    owners: list[int]
    filled: list[list[int]]
    loads: list[int]

    @classmethod
    def of(cls, stream: Stream, cuts: Cuts, weights: Sequence[int], owners: list[int], shards: int) -> Placement:
        """The sums that belong to ``owners``."""
        placement = cls(stream, cuts, weights, owners, [[0] * shards for _ in cuts[1:]], [0] * shards)
        for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])):
            filled = placement.filled[bucket]
            for position in range(start, stop):
                filled[owners[position]] += stream.numels[position]
                placement.loads[owners[position]] += weights[position]
        return placement

    @property
    def heights(self) -> list[int]:
        """Per bucket, the elements of its fullest shard."""
        return [max(filled) for filled in self.filled]


def deal_bins(packer: Packer, cuts: Cuts, weights: Sequence[int]) -> Placement:
    """Every bucket packed as low as possible; its bins go to the shards, the heaviest to the least loaded.

    Buckets whose bins differ most are dealt first, while nothing is settled; the even ones fill up at the end. The
    bins decide the padding, so dealing is free to balance the work.
    """
    bins = [_bins(packer, start, stop) for start, stop in zip(cuts, cuts[1:])]
    heavy = [[sum(weights[i] for i in bin) for bin in some] for some in bins]
    owners = [0] * len(packer.stream)
    loads = [0] * packer.shards
    for bucket in sorted(range(len(bins)), key=lambda b: min(heavy[b]) - max(heavy[b])):
        shards = sorted(range(packer.shards), key=lambda r: (loads[r], r))
        order = sorted(range(packer.shards), key=lambda q: (-heavy[bucket][q], q))
        for shard, bin in zip(shards, order):
            loads[shard] += heavy[bucket][bin]
            for position in bins[bucket][bin]:
                owners[position] = shard
    return Placement.of(packer.stream, cuts, weights, owners, packer.shards)


def _bins(packer: Packer, start: int, stop: int) -> list[list[int]]:
    """Positions [start, stop) in as many bins as there are shards, by the packer's patterns; early positions first."""
    _, patterns = packer.pack(start, stop)
    waiting: list[list[int]] = [[] for _ in packer.sizes]
    for position in range(stop - 1, start - 1, -1):
        waiting[packer.stream.kind_of[position]].append(position)
    bins = [
        [waiting[kind].pop() for kind, count in pattern.counts for _ in range(count)]
        for pattern in patterns
        for _ in range(pattern.times)
    ]
    return bins + [[] for _ in range(packer.shards - len(bins))]


def place_costliest_first(
    stream: Stream,
    cuts: Cuts,
    weights: Sequence[int],
    caps: Sequence[int],
    shards: int,
    base: Sequence[int] | None = None,
) -> Placement:
    """All buckets' matrices, the costliest first, to the least loaded shard with room under its bucket's cap.

    Where no shard has room the emptiest one of the bucket takes it, above the cap. ``base`` is the weight that shards
    have before.
    """
    owners = [0] * len(stream)
    loads = list(base or [0] * shards)
    filled = [[0] * shards for _ in caps]
    for bucket, numel, run in _runs(stream, cuts, weights):
        here, cap = filled[bucket], caps[bucket]
        open_shards = [(loads[r], r) for r in range(shards) if here[r] + numel <= cap]
        heapq.heapify(open_shards)
        for position in run:
            owner = heapq.heappop(open_shards)[1] if open_shards else min(range(shards), key=lambda r: (here[r], r))
            owners[position] = owner
            here[owner] += numel
            loads[owner] += weights[position]
            if here[owner] + numel <= cap:
                heapq.heappush(open_shards, (loads[owner], owner))
    return Placement(stream, cuts, weights, owners, filled, loads)


def _runs(stream: Stream, cuts: Cuts, weights: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """(bucket, elements, positions) of equal matrices of one bucket, the costliest first."""
    runs: dict[tuple[int, int, int], list[int]] = {}
    for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        for position in range(start, stop):
            key = (-weights[position], -stream.numels[position], bucket)
            runs.setdefault(key, []).append(position)
    return [(bucket, -numel, positions) for (_, numel, bucket), positions in sorted(runs.items())]
