"""Where buckets close: contiguous ranges of the backward order whose padding is least."""

from __future__ import annotations

from bisect import bisect_left

from lwopt_backend.plan.buffers.patterns import Pattern, height_bound, longest_first, pack
from lwopt_backend.plan.buffers.stream import Stream

Cuts = tuple[
    int, ...
]  # 0 = first cut < ... < last cut = number of matrices; bucket b is positions [cuts[b], cuts[b+1])

FEW = 256  # matrices; up to here longest-first is tried too, it is quick and sometimes better
HOPELESS = 1.3  # a bucket whose bound is this much above its content is not worth packing
WASTEFUL = 1.3  # times its content is what a bucket may be that is not dropped
MOST_PACKED = 12_000  # ranges that are packed to choose cuts; models repeat themselves and have fewer
ROUGH = 0.01  # tolerance of heights that only choose cuts
EXACT_COUNTS = 48  # up to so many buckets, the number of buckets is a dimension of the search
FINE_ENDS = 12  # every position this near an end is a possible cut: a short last bucket may do without large matrices
HALVINGS = 24  # of a price, or until the number of buckets is
NEAR_ENOUGH = 1.02  # times what is asked for


class Packer:
    """Packs ranges of a stream into shards, remembering what it packed; equal ranges of layers are packed once."""

    def __init__(self, stream: Stream, shards: int) -> None:
        self.stream, self.shards = stream, shards
        self.sizes = [kind.numel for kind in stream.kinds]
        self._packed: dict[tuple[int, ...], tuple[int, list[Pattern]]] = {}
        self._rough: dict[tuple[int, ...], int] = {}

    def pack(self, start: int, stop: int) -> tuple[int, list[Pattern]]:
        """Shard size and patterns of positions [start, stop)."""
        counts = self.stream.counts(start, stop)
        if counts not in self._packed:
            best = pack(self.sizes, counts, self.shards)
            if sum(counts) <= FEW:
                best = min(best, longest_first(self.sizes, counts, self.shards), key=lambda packed: packed[0])
            self._packed[counts] = best
        return self._packed[counts]

    def height(self, start: int, stop: int) -> int:
        """Roughly the shard size of positions [start, stop), or a lower bound of it.

        The bound does where padding would be hopeless, or where too much has been packed already.
        """
        counts = self.stream.counts(start, stop)
        bound = height_bound(self.sizes, counts, self.shards)
        if bound * self.shards > HOPELESS * self.stream.numel(start, stop):
            return bound
        if counts not in self._rough and len(self._rough) < MOST_PACKED:
            height = pack(self.sizes, counts, self.shards, tolerance=ROUGH)[0]
            if sum(counts) <= FEW:
                height = min(height, longest_first(self.sizes, counts, self.shards)[0])
            self._rough[counts] = height
        return self._rough.get(counts, bound)


def whole_layers(stream: Stream, buckets: int) -> Cuts:
    """Cuts between layers into ``buckets`` buckets of nearly equal size; fewer if there are too few layers."""
    cuts = {0, len(stream)}
    starts = [stream.numel_before[position] for position in stream.layer_starts]
    for bucket in range(1, buckets):
        target = stream.numel_before[-1] * bucket // buckets
        after = bisect_left(starts, target)
        near = [i for i in (after - 1, after) if 0 <= i < len(starts)]
        cuts |= {stream.layer_starts[i] for i in sorted(near, key=lambda i: abs(starts[i] - target))[:1]}
    return tuple(sorted(cuts))


def least_padding(packer: Packer, buckets: int, largest: int) -> list[Cuts]:
    """Cuts into at least ``buckets`` buckets of at most ``largest`` elements with padding, of the least total size.

    Shortest paths over a grid of possible cuts: among all buckets, where few are asked for, and among those that are
    not wasteful themselves, which are more even. Empty if the grid has no such path.
    """
    grid = _Grid(packer, buckets, largest)
    search = grid.shortest_with if buckets <= EXACT_COUNTS else grid.shortest_with_price
    found = [search(buckets)] if buckets <= EXACT_COUNTS else []
    edges = grid.edges
    grid.drop_wasteful()
    found.append(search(buckets))
    if not any(found):  # too few are lean
        grid.edges = edges
        found.append(search(buckets))
    return [cuts for cuts in found if cuts is not None]


class _Grid:
    """Possible cuts at regular positions, and the size of the bucket between any two that are near enough."""

    def __init__(self, packer: Packer, buckets: int, largest: int) -> None:
        count = len(packer.stream)
        per_bucket = count / buckets
        stride = max(1, int(per_bucket / (32 if buckets <= EXACT_COUNTS else 20)))
        ends = {*range(min(FINE_ENDS, count)), *range(max(0, count - FINE_ENDS), count + 1)}
        self.positions = sorted({*range(0, count, stride), *ends})
        self.reach = max(2, int(2.5 * per_bucket / stride)) + FINE_ENDS  # grid steps that a bucket spans at most
        self.packer, self.largest = packer, largest
        self.edges = self._edges()

    def _edges(self) -> list[list[tuple[int, int]]]:
        """Per position, (steps ahead, size of that bucket). Positions that look alike ahead share one list."""
        seen: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, int]]] = {}
        edges = []
        stream = self.packer.stream
        for index, position in enumerate(self.positions[:-1]):
            ahead = self.positions[index : index + self.reach + 1]
            look = (stream.kind_of[position : ahead[-1]].tobytes(), tuple(stop - position for stop in ahead))
            if look not in seen:
                seen[look] = self._buckets_from(position, ahead[1:])
            edges.append(seen[look])
        return edges

    def _buckets_from(self, start: int, stops: list[int]) -> list[tuple[int, int]]:
        buckets = []
        for steps, stop in enumerate(stops, 1):
            if self.packer.stream.numel(start, stop) > self.largest:
                break
            size = self.packer.height(start, stop) * self.packer.shards
            if size <= self.largest:
                buckets.append((steps, size))
        return buckets

    def drop_wasteful(self) -> None:
        """Forget buckets that are mostly padding, but where there is nothing better."""
        lean_of: dict[int, list[tuple[int, int]]] = {}
        for index, buckets in enumerate(self.edges):
            if id(buckets) not in lean_of:
                lean = [b for b in buckets if b[1] <= WASTEFUL * self._numel(index, b[0])]
                lean_of[id(buckets)] = lean or buckets
        self.edges = [lean_of[id(buckets)] for buckets in self.edges]

    def _numel(self, index: int, steps: int) -> int:
        return self.packer.stream.numel(self.positions[index], self.positions[index + steps])

    def shortest_with(self, buckets: int) -> Cuts | None:
        """The shortest path of exactly ``buckets`` edges, or of one or two more if that is shorter."""
        last = len(self.positions) - 1
        best: list[tuple[int, Cuts]] = []
        reached = {0: 0}  # position -> total size, with as many edges as rounds
        came_from: list[dict[int, int]] = []
        for edges_used in range(1, buckets + 3):
            ahead: dict[int, int] = {}
            origin: dict[int, int] = {}
            for index, total in reached.items():
                if index == last:
                    continue
                for steps, size in self.edges[index]:
                    if total + size < ahead.get(index + steps, total + size + 1):
                        ahead[index + steps], origin[index + steps] = total + size, index
            reached = ahead
            came_from.append(origin)
            if edges_used >= buckets and last in reached:
                best.append((reached[last], self._walk_back(came_from)))
        return min(best, key=lambda path: path[0])[1] if best else None

    def _walk_back(self, came_from: list[dict[int, int]]) -> Cuts:
        index = len(self.positions) - 1
        cuts = [index]
        for origin in reversed(came_from):
            index = origin[index]
            cuts.append(index)
        return tuple(self.positions[index] for index in reversed(cuts))

    def shortest_with_price(self, buckets: int) -> Cuts | None:
        """The shortest path when every bucket earns a price, at the lowest price that gives enough buckets.

        Two paths of one price are equally good but may differ much in their number of buckets; where they share a
        cut, the finer one's first part joined to the coarser one's rest is as good and hits the number closely.
        """
        low, high = 0, self.largest
        fine, coarse = self._priced(high), self._priced(low)
        while fine is not None and len(fine) - 1 < buckets and high < self.largest * len(self.positions):
            high *= 4
            fine = self._priced(high)
        if fine is None or coarse is None or len(fine) - 1 < buckets:
            return None
        if len(coarse) - 1 >= buckets:
            return coarse
        for _ in range(HALVINGS):
            if len(fine) - 1 <= buckets * NEAR_ENOUGH:
                break
            price = (low + high) // 2
            tried = self._priced(price)
            assert tried is not None
            low, high, fine, coarse = (
                (low, price, tried, coarse) if len(tried) - 1 >= buckets else (price, high, fine, tried)
            )
        return _joined(fine, coarse, buckets)

    def _priced(self, price: int) -> Cuts | None:
        last = len(self.positions) - 1
        unreached = None
        totals: list[int | None] = [0] + [unreached] * last
        origin = [0] * (last + 1)
        for index, edges in enumerate(self.edges):
            here = totals[index]
            if here is None:
                continue
            for steps, size in edges:
                there = totals[index + steps]
                if there is None or here + size - price < there:
                    totals[index + steps], origin[index + steps] = here + size - price, index
        if totals[last] is None:
            return None
        cuts = [last]
        while cuts[-1]:
            cuts.append(origin[cuts[-1]])
        return tuple(self.positions[index] for index in reversed(cuts))


def _joined(fine: Cuts, coarse: Cuts, buckets: int) -> Cuts:
    """``fine`` up to a shared cut and ``coarse`` from there on: the shared cut that leaves just enough buckets."""
    place = {cut: index for index, cut in enumerate(coarse)}
    for index, cut in enumerate(fine):
        if cut in place and index + len(coarse) - 1 - place[cut] >= buckets:
            return fine[:index] + coarse[place[cut] :]
    return fine
