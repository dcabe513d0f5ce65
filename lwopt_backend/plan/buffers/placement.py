"""Where buckets close, and which rank gets which bin."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from lwopt_backend.plan.buffers.layout import Stream
from lwopt_backend.plan.cost import per_rank


def balanced_measures(stream: Stream) -> dict[str, list[int]]:
    """Weights by position: the cost and, if Megatron's estimate differs from it, the estimate and the sum of both.

    Cost and estimate have equal parts in the sum, so that a plan that is even by it tends to be even by both.
    """
    measures = {"cost": stream.costs}
    of_first = (stream.costs[0], stream.estimates[0])
    if any(cost * of_first[1] != estimate * of_first[0] for cost, estimate in zip(stream.costs, stream.estimates)):
        cost, estimate = sum(stream.costs), sum(stream.estimates)
        measures["estimate"] = stream.estimates
        measures["both"] = [c * estimate + e * cost for c, e in zip(stream.costs, stream.estimates)]
    return measures


# Packing matrices into equal bins, by patterns.
#
# A model repeats few shapes many times. So one bin is filled as well as its room allows, and that filling is repeated
# while the matrices last: a thousand bins of forty thousand matrices take a millisecond. Filling one bin is the
# minimum-bin-slack idea of Gupta and Ho (1999), over kinds instead of items.

FINE = 1e-3  # tolerance of a height, relative to its bound
MOST_DIVISIONS = 12  # of a bin, in the proof that a room is too small
SEARCH_NODES = 50  # in one bin's search after its first filling; more found nothing better on the models tried


@dataclass(frozen=True, slots=True)
class Pattern:
    """A bin's content, as pairs of a kind and its count, repeated in ``times`` bins."""

    counts: tuple[tuple[int, int], ...]
    times: int


def height_bound(sizes: Sequence[int], counts: Sequence[int], bins: int) -> int:
    """A lower bound of the highest bin of any packing into ``bins``. ``sizes`` are in descending order.

    The mean; and, if c items are at least of size s, ceil(c / bins) * s, because some bin has that many of them.
    """
    total = larger = bound = 0
    for size, count in zip(sizes, counts):
        if count:
            total += size * count
            larger += count
            bound = max(bound, -(-larger // bins) * size)
    return max(bound, -(-total // bins))


def cannot_fit(sizes: Sequence[int], counts: Sequence[int], bins: int, room: int) -> bool:
    """Whether it is proven that ``bins`` bins of ``room`` cannot take everything; no packing is searched.

    By the dual feasible functions of Fekete and Schepers (2001): with u(x) = floor((k + 1) x) / k, or x where (k + 1) x
    is an integer, items that fit into one bin have a sum of u(size / room) of at most one, for every k. That refuses
    nearly every room in which ``fit`` would find nothing, in a tenth of its time.
    """
    if room < 1:
        return any(counts)
    for k in range(1, MOST_DIVISIONS):
        most = bins * room * k
        for size, count in zip(sizes, counts):
            units, rest = divmod((k + 1) * size, room)
            if not units:
                break
            most -= count * (units * room if rest else size * k)
        if most < 0:
            return True
    return False


def pack(
    sizes: Sequence[int], counts: Sequence[int], bins: int, *, tolerance: float = FINE
) -> tuple[int, list[Pattern]]:
    """The lowest height found, and patterns of that height. ``sizes`` are in descending order and may repeat.

    Tries the bound itself, then larger rooms until one fits, then halves the gap down to ``tolerance``.
    """
    there = [kind for kind, count in enumerate(counts) if count]
    height, patterns = _pack([sizes[kind] for kind in there], [counts[kind] for kind in there], bins, tolerance)
    named = [Pattern(tuple((there[k], count) for k, count in found.counts), found.times) for found in patterns]
    return height, named


def _pack(sizes: Sequence[int], counts: Sequence[int], bins: int, tolerance: float) -> tuple[int, list[Pattern]]:
    bound = height_bound(sizes, counts, bins)
    found = fit(sizes, counts, bins, bound)
    if found is not None:
        return bound, found
    low, room, step = bound, float(bound), max(1.0, bound * 0.004)
    while found is None:
        low, room, step = int(room), room + step, step * 1.6
        found = fit(sizes, counts, bins, int(room))
    high = int(room)
    while high - low > max(1, int(bound * tolerance)):
        middle = (low + high) // 2
        tried = fit(sizes, counts, bins, middle)
        low, high, found = (low, middle, tried) if tried is not None else (middle, high, found)
    return max(sum(sizes[kind] * count for kind, count in pattern.counts) for pattern in found), found


def fit(sizes: Sequence[int], counts: Sequence[int], bins: int, room: int) -> list[Pattern] | None:
    """Patterns for at most ``bins`` bins of ``room`` that take everything, or None if this search finds none."""
    if cannot_fit(sizes, counts, bins, room):
        return None
    left = list(counts)
    remaining = sum(map(mul, sizes, left))
    patterns: list[Pattern] = []
    first = 0
    while True:
        while first < len(left) and not left[first]:
            first += 1
        if first == len(left):
            return patterns
        spare = bins * room - remaining
        if spare < 0 or bins == 0 or sizes[first] > room:
            return None
        best, slack = _fullest_bin(sizes, left, first, room, spare // bins)
        if slack > spare:
            return None
        times = min(bins, *(left[kind] // count for kind, count in best))
        if slack * bins > spare:  # a wasteful filling: repeat it only while spare room lasts
            times = min(times, spare // slack)
        patterns.append(Pattern(tuple(best), times))
        for kind, count in best:
            left[kind] -= count * times
        remaining -= (room - slack) * times
        bins -= times


def _fullest_bin(
    sizes: Sequence[int], left: Sequence[int], first: int, room: int, good: int
) -> tuple[list[tuple[int, int]], int]:
    """The fullest bin found with at least one item of kind ``first``, which fits, and its slack.

    Depth first over kinds, the largest first; ends at a bin with at most ``good`` slack, or ``SEARCH_NODES`` after the
    first bin was filled.
    """
    greedy, rest = [], room  # the first bin of the search, and nearly always good enough
    for kind in range(first, len(left)):
        if left[kind] and sizes[kind] <= rest:
            greedy.append((kind, min(left[kind], rest // sizes[kind])))
            rest -= sizes[kind] * greedy[-1][1]
            if rest <= good:
                return greedy, rest
    kinds = [(kind, sizes[kind], left[kind]) for kind in range(first, len(left)) if left[kind]]
    last, smallest = len(kinds) - 1, kinds[-1][1]
    chosen: list[tuple[int, int]] = []
    best: list[tuple[int, int]] = []
    slack, nodes, filled_once = room + 1, SEARCH_NODES, False

    def take(place: int, least: int, room: int) -> None:
        """Try every count of the next kind that fits, the largest first."""
        nonlocal best, slack, nodes, filled_once
        while kinds[place][1] > room:
            place += 1
        kind, size, there = kinds[place]
        for count in range(min(there, room // size), least - 1, -1):
            rest = room - count * size
            nodes -= filled_once
            if rest < slack:
                best, slack = [*chosen, (kind, count)] if count else list(chosen), rest
            if place == last or rest < smallest:
                filled_once = True
            elif slack > good and (nodes >= 0 or not filled_once):
                if count:
                    chosen.append((kind, count))
                take(place + 1, 0, rest)
                if count:
                    chosen.pop()
            if slack <= good or (filled_once and nodes < 0):
                return
            if place == last:  # fewer of the smallest leave more room, and count as nodes
                nodes -= min(count - least, nodes + 1)
                return

    take(0, 1, room)
    return best, slack


def longest_first(sizes: Sequence[int], counts: Sequence[int], bins: int) -> tuple[int, list[Pattern]]:
    """The longest item to the lowest bin, and so on (Graham 1969): the height, and one pattern per bin."""
    heights = [(0, index) for index in range(bins)]
    content: list[dict[int, int]] = [{} for _ in range(bins)]
    for kind, count in enumerate(counts):
        for _ in range(count):
            height, index = heights[0]
            content[index][kind] = content[index].get(kind, 0) + 1
            heapq.heapreplace(heights, (height + sizes[kind], index))
    return max(heights)[0], [Pattern(tuple(sorted(bin.items())), 1) for bin in content if bin]


# Where buckets close: contiguous ranges of the backward order whose padding is least.

# 0 = first cut < ... < last cut = number of matrices; bucket b is positions [cuts[b], cuts[b+1])
Cuts = tuple[int, ...]

FEW = 256  # up to this many matrices, longest-first is tried, too: it is quick, and sometimes better
HOPELESS = 1.3  # a bucket whose bound is this many times its content is not worth packing
WASTEFUL = 1.3  # a bucket of more than this many times its content is dropped
MOST_PACKED = 12_000  # ranges that are packed to choose cuts; models repeat layers and have fewer
ROUGH = 0.01  # tolerance of heights that only choose cuts
EXACT_COUNTS = 48  # up to this many buckets, their number is a dimension of the search
FINE_ENDS = 12  # every position this near an end is a possible cut: a short last bucket may do without large matrices
HALVINGS = 24  # of a price, or until the number of buckets is near enough
NEAR_ENOUGH = 1.02  # times the wanted number


class Packer:
    """Packs ranges of a stream into shards and caches the results; equal ranges of layers are packed once."""

    def __init__(self, stream: Stream, shards: int) -> None:
        self.stream, self.shards = stream, shards
        self.sizes = [kind.numel for kind in stream.kinds]
        self._packed: dict[tuple[int, ...], tuple[int, list[Pattern]]] = {}
        self._rough: dict[tuple[int, ...], int] = {}

    def pack(self, start: int, stop: int) -> tuple[int, list[Pattern]]:
        """Shard size and patterns of positions [start, stop)."""
        counts = self.stream.counts(start, stop)
        if counts not in self._packed:
            self._packed[counts] = self._lowest(counts, FINE)
        return self._packed[counts]

    def height(self, start: int, stop: int, most: float = math.inf) -> int:
        """Roughly the shard size of positions [start, stop), or a lower bound of it.

        Returns the bound if it is above ``most``, if padding would be hopeless, or if too much was packed already.
        """
        counts = self.stream.counts(start, stop)
        bound = height_bound(self.sizes, counts, self.shards)
        if bound > most or bound * self.shards > HOPELESS * self.stream.numel(start, stop):
            return bound
        if counts not in self._rough and len(self._rough) < MOST_PACKED:
            self._rough[counts] = self._lowest(counts, ROUGH)[0]
        return self._rough.get(counts, bound)

    def _lowest(self, counts: tuple[int, ...], tolerance: float) -> tuple[int, list[Pattern]]:
        found = [pack(self.sizes, counts, self.shards, tolerance=tolerance)]
        if sum(counts) <= FEW:
            found.append(longest_first(self.sizes, counts, self.shards))
        return min(found, key=lambda packed: packed[0])


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

    Shortest paths over a grid of possible cuts: among all buckets, if few are wanted, and among those that are not
    wasteful themselves, which are more even. Empty if the grid has no such path.
    """
    grid = _Grid(packer, buckets, largest)
    search = grid.shortest_with if buckets <= EXACT_COUNTS else grid.shortest_with_price
    found = [search(buckets)] if buckets <= EXACT_COUNTS else []
    edges = grid.edges
    grid.drop_wasteful()
    found.append(search(buckets))
    if not any(found):  # too few buckets are lean
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
        self.reach = max(2, int(2.5 * per_bucket / stride)) + FINE_ENDS  # the most grid steps of a bucket
        self.packer, self.largest = packer, largest
        self.edges = self._edges()

    def _edges(self) -> list[list[tuple[int, int]]]:
        """Per position, (steps ahead, size of that bucket). Positions with equal matrices ahead share one list."""
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
        buckets, most = [], self.largest // self.packer.shards
        for steps, stop in enumerate(stops, 1):
            if self.packer.stream.numel(start, stop) > self.largest:
                break
            size = self.packer.height(start, stop, most) * self.packer.shards
            if size <= self.largest:
                buckets.append((steps, size))
        return buckets

    def drop_wasteful(self) -> None:
        """Drop buckets that are mostly padding, unless there is nothing better."""
        lean_of: dict[int, list[tuple[int, int]]] = {}
        for index, buckets in enumerate(self.edges):
            if id(buckets) not in lean_of:
                start, ahead = self.positions[index], self.positions[index:]
                numel = self.packer.stream.numel
                lean = [(steps, size) for steps, size in buckets if size <= WASTEFUL * numel(start, ahead[steps])]
                lean_of[id(buckets)] = lean or buckets
        self.edges = [lean_of[id(buckets)] for buckets in self.edges]

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
                cuts = [last]
                for origin in reversed(came_from):
                    cuts.append(origin[cuts[-1]])
                best.append((reached[last], tuple(self.positions[index] for index in reversed(cuts))))
        return min(best, key=lambda path: path[0])[1] if best else None

    def shortest_with_price(self, buckets: int) -> Cuts | None:
        """The shortest path when every bucket earns a price, at the lowest price that yields enough buckets.

        Two paths of one price are equally good, but their numbers of buckets may differ much; if they share a cut, the
        finer one's first part joined to the coarser one's rest is as good and comes close to the number.
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
        place = {cut: index for index, cut in enumerate(coarse)}
        for index, cut in enumerate(fine):  # a shared cut that leaves just enough buckets
            if cut in place and index + len(coarse) - 1 - place[cut] >= buckets:
                return fine[:index] + coarse[place[cut] :]
        return fine

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


@dataclass
class Placement:
    """Owners by position, while they are improved. ``weights`` are balanced: a cost per position.

    ``filled[b][r]`` is the elements of bucket b in shard r, ``loads[r]`` the weight of shard r over all buckets.
    """

    stream: Stream
    cuts: Cuts
    weights: Sequence[int]
    owners: list[int]
    filled: list[list[int]]
    loads: list[int]

    @classmethod
    def of(cls, stream: Stream, cuts: Cuts, weights: Sequence[int], owners: list[int], shards: int) -> Placement:
        """A placement with the sums of ``owners``."""
        filled = [per_rank(owners[a:b], stream.numels[a:b], shards) for a, b in zip(cuts, cuts[1:])]
        return cls(stream, cuts, weights, owners, filled, per_rank(owners, weights, shards))

    @property
    def heights(self) -> list[int]:
        """Per bucket, the elements of its fullest shard."""
        return [max(filled) for filled in self.filled]


def deal_bins(packer: Packer, cuts: Cuts, weights: Sequence[int]) -> Placement:
    """Pack every bucket as low as possible, and deal its bins to the shards, the heaviest to the least loaded.

    Buckets whose bins differ most are dealt first, when loads are still open; even ones even them out at the end. The
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
    """Positions [start, stop) in one bin per shard, by the packer's patterns; early positions first."""
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

    If no shard has room, the bucket's emptiest one takes it, above the cap. ``base`` is the shards' initial weight.
    """
    owners = [0] * len(stream)
    loads = list(base or [0] * shards)
    filled = [[0] * shards for _ in caps]
    runs: dict[tuple[int, int, int], list[int]] = {}  # positions of equal matrices of one bucket
    for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        for position in range(start, stop):
            key = (-weights[position], -stream.numels[position], bucket)
            runs.setdefault(key, []).append(position)
    for (_, minus_numel, bucket), run in sorted(runs.items()):
        dealt = _deal(len(run), weights[run[0]], -minus_numel, caps[bucket], loads, filled[bucket])
        for position, owner in zip(run, dealt):
            owners[position] = owner
    return Placement(stream, cuts, weights, owners, filled, loads)


def _deal(count: int, weight: int, numel: int, cap: int, loads: list[int], filled: list[int]) -> list[int]:
    """Owners of ``count`` equal matrices, each added to the least loaded shard with room for it.

    As soon as loads differ by less than one matrix, the shards take turns, and whole rounds are dealt at once.
    """
    ready = [(load, shard) for shard, load in enumerate(loads) if filled[shard] + numel <= cap]  # a heap
    heapq.heapify(ready)
    highest = max(ready, default=(0, 0))[0]
    owners: list[int] = []
    while len(owners) < count:
        if len(ready) <= count - len(owners) and ready and highest < ready[0][0] + weight:
            turn = [shard for _, shard in sorted(ready)]
            rounds = min((count - len(owners)) // len(turn), min((cap - filled[shard]) // numel for shard in turn))
            owners += turn * rounds
            for shard in turn:
                filled[shard] += rounds * numel
                loads[shard] += rounds * weight
            ready = [(loads[shard], shard) for shard in turn if filled[shard] + numel <= cap]
            highest = max(ready, default=(0, 0))[0]
            continue
        owner = ready[0][1] if ready else filled.index(min(filled))
        owners.append(owner)
        filled[owner] += numel
        loads[owner] += weight
        if filled[owner] + numel <= cap:
            highest = max(highest, loads[owner])
            heapq.heapreplace(ready, (loads[owner], owner))
        elif ready:
            heapq.heappop(ready)
    return owners
