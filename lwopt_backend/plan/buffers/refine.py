"""Local search: relieve the costliest shard without making any bucket's shards larger."""

from __future__ import annotations

from lwopt_backend.plan.buffers.placement import Placement

WORK = 400_000  # comparisons in all; bounds the time, and is the same on every machine
PARTNERS = 12  # the least loaded shards that the costliest one trades with


def relieve(placement: Placement, caps: list[int]) -> None:
    """Trade whole bins, then single matrices, away from the costliest shard while that lowers the largest load.

    In place. ``caps`` are the largest sizes that the buckets' shards may have.
    """
    bins = _Bins(placement, caps)
    work = WORK
    while work > 0:
        costliest = max(range(len(bins.loads)), key=lambda r: (bins.loads[r], -r))
        work -= len(bins.loads)
        trade, looked = bins.best_bin_trade(costliest)
        work -= looked
        if trade is None:
            trade, looked = bins.best_matrix_trade(costliest)
            work -= looked
        if trade is None:
            return
        bins.make(costliest, *trade)


Trade = tuple[int, int, list[int], list[int]]  # bucket, partner, positions given, positions taken


class _Bins:
    """What each shard holds of each bucket."""

    def __init__(self, placement: Placement, caps: list[int]) -> None:
        self.placement, self.caps = placement, caps
        self.loads, self.filled = placement.loads, placement.filled
        shards = len(self.loads)
        self.content: list[list[list[int]]] = [[[] for _ in range(shards)] for _ in self.filled]
        self.weight = [[0] * shards for _ in self.filled]
        for bucket, (start, stop) in enumerate(zip(placement.cuts, placement.cuts[1:])):
            for position in range(start, stop):
                owner = placement.owners[position]
                self.content[bucket][owner].append(position)
                self.weight[bucket][owner] += placement.weights[position]

    def best_bin_trade(self, costliest: int) -> tuple[Trade | None, int]:
        """The swap of two whole bins of one bucket after which the heavier of the two shards is lightest."""
        top = self.loads[costliest]
        best, found = top, None
        for bucket, weight in enumerate(self.weight):
            mine = weight[costliest]
            for partner, load in enumerate(self.loads):
                given = mine - weight[partner]
                if given > 0 and max(top - given, load + given) < best:
                    best, found = max(top - given, load + given), (bucket, partner)
        looked = len(self.loads) * len(self.weight)
        if found is None:
            return None, looked
        bucket, partner = found
        return (bucket, partner, list(self.content[bucket][costliest]), list(self.content[bucket][partner])), looked

    def best_matrix_trade(self, costliest: int) -> tuple[Trade | None, int]:
        """The best move of one matrix, or swap of two of one bucket, with one of the least loaded shards."""
        placement = self.placement
        numels, weights, kinds = placement.stream.numels, placement.weights, placement.stream.kind_of
        top = self.loads[costliest]
        best, found, looked = top, None, 1
        partners = sorted(range(len(self.loads)), key=lambda r: (self.loads[r], r))[:PARTNERS]
        for bucket, content in enumerate(self.content):
            mine = {kinds[p]: p for p in content[costliest]}.values()
            room = self.caps[bucket] - self.filled[bucket][costliest]
            for partner in partners:
                spare = self.caps[bucket] - self.filled[bucket][partner]
                theirs = [None, *{kinds[p]: p for p in content[partner]}.values()]
                for give in mine:
                    for take in theirs:
                        looked += 1
                        moved = numels[give] - (numels[take] if take is not None else 0)
                        relief = weights[give] - (weights[take] if take is not None else 0)
                        if moved > spare or -moved > room or relief <= 0:
                            continue
                        after = max(top - relief, self.loads[partner] + relief)
                        if after < best:
                            best, found = after, (bucket, partner, [give], [] if take is None else [take])
        return found, looked

    def make(self, costliest: int, bucket: int, partner: int, given: list[int], taken: list[int]) -> None:
        """Carry a trade out."""
        self._move(bucket, costliest, partner, given)
        self._move(bucket, partner, costliest, taken)

    def _move(self, bucket: int, source: int, target: int, positions: list[int]) -> None:
        placement = self.placement
        gone = set(positions)
        content = self.content[bucket]
        content[source] = [p for p in content[source] if p not in gone]
        content[target] = content[target] + positions
        weight = sum(placement.weights[p] for p in positions)
        numel = sum(placement.stream.numels[p] for p in positions)
        for sums, amount in ((self.weight[bucket], weight), (self.filled[bucket], numel), (self.loads, weight)):
            sums[source] -= amount
            sums[target] += amount
        for position in positions:
            placement.owners[position] = target
