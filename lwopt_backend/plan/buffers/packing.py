"""Packing matrices to owners, padded and compact; padded plans are never worse than Megatron-Core's."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import MOST_KINDS, BufferPlan, Stream, aligned_shard
from lwopt_backend.plan.buffers.placement import (
    EXACT_COUNTS,
    Cuts,
    Packer,
    Placement,
    balanced_measures,
    deal_bins,
    height_bound,
    least_padding,
    pack,
    place_costliest_first,
    whole_layers,
)
from lwopt_backend.plan.cost import per_rank

WORK = 400_000  # comparisons in all; bounds the time, equally on every machine
PARTNERS = 12  # the number of least loaded shards that the costliest one trades with


def relieve(placement: Placement, caps: list[int]) -> None:
    """Trade whole bins, then single matrices, away from the costliest shard while that lowers the largest load.

    In place. ``caps`` are the largest allowed sizes of the buckets' shards.
    """
    bins = _Bins(placement, caps)
    work = WORK
    while work > 0:
        costliest = bins.loads.index(max(bins.loads))
        work -= len(bins.loads)
        trade, looked = bins.best_bin_trade(costliest)
        work -= looked
        if trade is None:
            trade, looked = bins.best_matrix_trade(costliest)
            work -= looked
        if trade is None:
            return
        bucket, partner, given, taken = trade
        bins.move(bucket, costliest, partner, given)
        bins.move(bucket, partner, costliest, taken)


Trade = tuple[int, int, list[int], list[int]]  # bucket, partner, positions given, positions taken


class _Bins:
    """Each shard's matrices in each bucket."""

    def __init__(self, placement: Placement, caps: list[int]) -> None:
        self.placement, self.caps = placement, caps
        self.loads, self.filled = placement.loads, placement.filled
        shards = len(self.loads)
        self.content: list[list[list[int]]] = [[[] for _ in range(shards)] for _ in self.filled]
        self.weight = [[0] * shards for _ in self.filled]
        owners, weights = placement.owners, placement.weights
        for content, weight, start, stop in zip(self.content, self.weight, placement.cuts, placement.cuts[1:]):
            for position, owner in enumerate(owners[start:stop], start):
                content[owner].append(position)
                weight[owner] += weights[position]

    def best_bin_trade(self, costliest: int) -> tuple[Trade | None, int]:
        """The swap of two whole bins of one bucket that makes the heavier of the two shards lightest."""
        loads, top = self.loads, self.loads[costliest]
        best, found = top, None
        heavy_first = sorted(range(len(loads)), key=loads.__getitem__, reverse=True)
        loads_so = [loads[shard] for shard in heavy_first]
        for bucket, weight in enumerate(self.weight):
            mine = weight[costliest]
            if mine - min(weight) <= top - best:
                continue
            least = dict(zip(map(weight.__getitem__, heavy_first), loads_so))  # load of a shard, by its bin's weight
            after = min(max(top - mine + theirs, load + mine - theirs) for theirs, load in least.items())
            if after < best:
                pairs = zip(loads, weight)
                partner = [max(top - mine + theirs, load + mine - theirs) for load, theirs in pairs].index(after)
                best, found = after, (bucket, partner)
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
        partners = sorted(range(len(self.loads)), key=self.loads.__getitem__)[:PARTNERS]
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

    def move(self, bucket: int, source: int, target: int, positions: list[int]) -> None:
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


# Megatron-Core's plan of the same matrices: the reference that our plan is never worse than.
#
# Written from the behaviour of ``LayerWiseDistributedOptimizer`` (Megatron-LM, August 2026): buckets close by a soft
# minimum size, shards are filled by Megatron's cost estimate with loads carried over, within 1.3 times the mean size.
# ``benchmarks/planner.py`` compares the results with figures that Megatron's own code gave.

SOFT_MINIMUM = 0.9  # of shards x the bucket's largest matrix
CAP = 1.3  # of a shard's mean size


def closing_rule(stream: Stream, shards: int, bucket_numel: int | None) -> Cuts:
    """Megatron's buckets: at least ``bucket_numel``, and longer while the next matrix fits into existing padding."""
    if bucket_numel is None:
        return (0, len(stream))
    cuts = [0]
    loads, highest, filled, largest = [0] * shards, 0, 0, 0
    for position, numel in enumerate(stream.numels):
        enough = filled >= max(bucket_numel, int(shards * largest * SOFT_MINIMUM))
        if position > cuts[-1] and enough and loads[0] + numel > highest:
            cuts.append(position)
            loads, highest, filled, largest = [0] * shards, 0, 0, 0
        highest = max(highest, loads[0] + numel)
        heapq.heapreplace(loads, loads[0] + numel)
        filled += numel
        largest = max(largest, numel)
    return (*cuts, len(stream))


def capped_shards(stream: Stream, cuts: Cuts, shards: int) -> list[int]:
    """Megatron's owners, by position: the costliest matrix first, to the least loaded shard that has room."""
    owners = [0] * len(stream)
    loads = [0] * shards
    for start, stop in zip(cuts, cuts[1:]):
        _fill_bucket(stream, range(start, stop), owners, loads)
    return owners


def _fill_bucket(stream: Stream, bucket: range, owners: list[int], loads: list[int]) -> None:
    numels, costs = stream.numels, stream.estimates
    filled = [0] * len(loads)
    cap = sum(numels[i] for i in bucket) / len(loads) * CAP
    smallest = min(numels[i] for i in bucket)
    lightest = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(lightest)
    passed: list[tuple[int, int]] = []  # shards without room for a matrix of this size
    numel = 0
    for position in sorted(bucket, key=lambda i: -costs[i]):
        if numels[position] != numel:
            numel, lightest, passed = numels[position], [*lightest, *passed], []
            heapq.heapify(lightest)
        owner: int | None = None  # the least loaded shard with room; those with room for nothing are dropped
        while lightest and owner is None:
            load, shard = heapq.heappop(lightest)
            if filled[shard] + numel <= cap:
                owner = shard
            elif filled[shard] + smallest <= cap:
                passed.append((load, shard))
        if owner is None:
            owner = min(range(len(filled)), key=filled.__getitem__)
            passed = [entry for entry in passed if entry[1] != owner]
        owners[position] = owner
        filled[owner] += numel
        loads[owner] += costs[position]
        if filled[owner] + smallest <= cap:
            heapq.heappush(lightest, (loads[owner], owner))


# Padded layouts: several strategies, one objective, and never worse than Megatron-Core's plan.

LOOSENED = (0.0, 0.02)  # how much larger than necessary shards may be for better balance
BISECTIONS = 5
CLOSE = 1.01  # modelled times this near are equal, given the model's accuracy
MOST_GAINS = 2  # of ``Candidate.gains_over``
LARGER_BUCKET = 1.25  # than Megatron's largest, with as many buckets; more freedom where to cut


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and the measures that judge it; small is better."""

    plan: BufferPlan
    buffer_numel: int
    largest_load: int
    largest_estimate: int
    largest_bucket: int

    @property
    def measures(self) -> tuple[int, int, int]:
        return self.buffer_numel, self.largest_load, self.largest_estimate

    def gains_over(self, other: Candidate) -> int:
        """In how many of two measures it is better: smaller, and more even by Megatron's estimate."""
        return (self.buffer_numel < other.buffer_numel) + (self.largest_estimate < other.largest_estimate)

    def no_worse_than(self, other: Candidate) -> bool:
        """Whether it is at least as small, as balanced by both costs, and as fine."""
        return (
            self.buffer_numel <= other.buffer_numel
            and self.largest_load <= other.largest_load
            and self.largest_estimate <= other.largest_estimate
            and (
                len(self.plan.shard_numels) >= len(other.plan.shard_numels)
                or self.largest_bucket <= other.largest_bucket
            )
        )


Objective = Callable[[BufferPlan], float]


def plan_padded(atoms: Sequence[Atom], shards: int, *, bucket_numel: int | None, seconds: Objective) -> BufferPlan:
    """The padded plan of least modelled ``seconds``, or the most even near it, that is no worse than Megatron-Core's.

    No worse in four ways: elements with padding, the costliest shard by the atoms' cost and by Megatron's estimate, and
    how fine the buckets are (at least as many, or none larger). Megatron's own plan is one of the candidates, so one
    always exists; candidates that are smaller, and more even by Megatron's estimate, are preferred. ``bucket_numel`` is
    the least size of a bucket, in Megatron's sense; None means one bucket. Ties in every measure go to the strategy
    that is tried first.
    """
    stream = Stream(atoms)
    reference_cuts = closing_rule(stream, shards, bucket_numel)
    reference = _candidate(
        Placement.of(stream, reference_cuts, stream.costs, capped_shards(stream, reference_cuts, shards), shards),
        atoms,
        "megatron",
    )
    found = [(0, 0, seconds(reference.plan), reference)]

    def hopeless(cuts: Cuts) -> bool:
        """Whether a plan that gains in both measures is faster than any with these cuts can be."""
        rivals = [time for _, gains, time, _ in found if gains == MOST_GAINS]
        return bool(rivals) and seconds(_bound(stream, cuts, shards)) > CLOSE * min(rivals)

    for place, strategy, placement in _padded_strategies(stream, shards, reference_cuts, reference, hopeless):
        candidate = _candidate(placement, atoms, strategy)
        if candidate.no_worse_than(reference):
            found.append((place, candidate.gains_over(reference), seconds(candidate.plan), candidate))
    most = max(gains for _, gains, _, _ in found)
    timed = [(time, place, c) for place, gains, time, c in found if gains == most]
    fastest = min(time for time, _, _ in timed)
    close = [(c.largest_load, time, *c.measures, place, c) for time, place, c in timed if time <= CLOSE * fastest]
    return min(close, key=lambda entry: entry[:-1])[-1].plan


def _bound(stream: Stream, cuts: Cuts, shards: int) -> BufferPlan:
    """The smallest shards and the most even work that a plan with these cuts could have, as a plan of one matrix."""
    sizes = [kind.numel for kind in stream.kinds]
    heights = [height_bound(sizes, stream.counts(start, stop), shards) for start, stop in zip(cuts, cuts[1:])]
    work = Atom("all", (1, stream.numel_before[-1]), max(*stream.costs, -(-sum(stream.costs) // shards)))
    numels = tuple(aligned_shard(height, shards) for height in heights)
    return BufferPlan("padded", "bound", (work,), shards, (0,), (0,), numels)


def _padded_strategies(
    stream: Stream, shards: int, reference_cuts: Cuts, reference: Candidate, hopeless: Callable[[Cuts], bool]
) -> Iterator[tuple[int, str, Placement]]:
    """Yield the place in the order of preference, the name and the plan of what is tried, the leanest cuts first."""
    packer = Packer(stream, shards)
    choices = list(enumerate(_cuts(packer, reference_cuts, reference.largest_bucket), start=1))
    for place, (where, cuts) in reversed(choices):
        if hopeless(cuts):
            continue
        for measure, weights in balanced_measures(stream).items():
            dealt = deal_bins(packer, cuts, weights)
            heights = dealt.heights
            relieve(dealt, heights)
            yield place, f"{where}, bins dealt by {measure}", dealt
            for loosened in LOOSENED:
                caps = [int(height * (1 + loosened)) for height in heights]
                yield place, f"{where}, costliest first by {measure}", _placed(stream, cuts, weights, caps, shards)
    if len(reference_cuts) == 2:
        yield from ((len(choices) + 1, *between) for between in _between(packer, reference))


def _cuts(packer: Packer, reference_cuts: Cuts, largest: int) -> Iterator[tuple[str, Cuts]]:
    """Yield where buckets may close, each choice once."""
    buckets = len(reference_cuts) - 1
    yield "megatron's buckets", reference_cuts
    if buckets == 1:
        return
    layers = whole_layers(packer.stream, buckets)
    if layers != reference_cuts:
        yield "whole layers", layers
    seen = {reference_cuts, layers}
    for limit in (largest, int(largest * LARGER_BUCKET)) if buckets <= EXACT_COUNTS else (largest,):
        for ours in least_padding(packer, buckets, limit):
            if ours not in seen:
                seen.add(ours)
                yield "least padding", ours


def _between(packer: Packer, reference: Candidate) -> Iterator[tuple[str, Placement]]:
    """One bucket: small shards and even work conflict. Yield the smallest shards that are as even as Megatron's."""
    stream, shards = packer.stream, packer.shards
    cuts = (0, len(stream))
    for measure, weights in balanced_measures(stream).items():
        low, high = packer.pack(*cuts)[0], reference.plan.shard_numels[0]
        for _ in range(BISECTIONS):
            cap = (low + high) // 2
            placed = _placed(stream, cuts, weights, [cap], shards)
            yield f"one bucket, smallest shards by {measure}", placed
            even = _candidate(placed, reference.plan.atoms, "").no_worse_than(reference)
            low, high = (low, cap) if even else (cap, high)


def _placed(stream: Stream, cuts: Cuts, weights: Sequence[int], caps: list[int], shards: int) -> Placement:
    placed = place_costliest_first(stream, cuts, weights, caps, shards)
    relieve(placed, [max(pair) for pair in zip(placed.heights, caps)])
    return placed


def _candidate(placement: Placement, atoms: Sequence[Atom], strategy: str) -> Candidate:
    stream, cuts = placement.stream, placement.cuts
    shards = len(placement.loads)
    bucket_of = [bucket for bucket, (start, stop) in enumerate(zip(cuts, cuts[1:])) for _ in range(start, stop)]
    plan = BufferPlan(
        "padded",
        strategy,
        tuple(atoms),
        shards,
        tuple(reversed(placement.owners)),
        tuple(reversed(bucket_of)),
        tuple(aligned_shard(height, shards) for height in placement.heights),
    )
    load, estimate, _ = _largest(stream, placement.owners, shards)
    return Candidate(plan, plan.buffer_numel, load, estimate, max(plan.bucket_numels))


NEAR = 1.01  # times the most even plan found; of such plans, the one whose fullest shard is smallest is taken


def plan_compact(atoms: Sequence[Atom], shards: int, *, bucket_numel: int | None) -> BufferPlan:
    """Owners whose largest cost is within 1 % of the least found, by the atoms' cost and by Megatron's estimate.

    If no plan is near the best by both, the one whose larger excess is smallest. Buckets are consecutive matrices in
    backward order, of at least ``bucket_numel`` elements; None means one bucket.
    """
    stream = Stream(atoms)
    found = [(strategy, owners, *_largest(stream, owners, shards)) for strategy, owners in _strategies(stream, shards)]
    least_cost = max(1, min(cost for _, _, cost, _, _ in found))
    least_estimate = max(1, min(estimate for _, _, _, estimate, _ in found))

    def rank(entry: tuple[str, list[int], int, int, int]) -> tuple[float, int, int, int]:
        _, _, cost, estimate, numel = entry
        excess = max(cost / least_cost, estimate / least_estimate)
        return (max(excess, NEAR), numel, cost, estimate)

    strategy, owners, *_ = min(found, key=rank)
    dealt = (owners, _spread(stream, owners))
    plans = [_plan(atoms, stream, each, shards, bucket_numel, strategy) for each in dealt]
    return min(plans, key=lambda plan: sum(plan.shard_numels))


MUCH = 2**40  # integers in place of fractions: all machines find the same plan


def _spread(stream: Stream, owners: Sequence[int]) -> list[int]:
    """The owners of equal matrices dealt again, so that each one's are far apart: neighbours travel in one bucket, and
    an owner of most of it has all of that on its link."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for position, measures in enumerate(zip(stream.numels, stream.costs, stream.estimates)):
        alike.setdefault(measures, []).append(position)
    spread = list(owners)
    for positions in alike.values():
        counts = Counter(owners[position] for position in positions)
        turns = sorted(((2 * turn + 1) * MUCH // n, owner) for owner, n in counts.items() for turn in range(n))
        for position, (_, owner) in zip(positions, turns):
            spread[position] = owner
    return spread


def _strategies(stream: Stream, shards: int) -> Iterator[tuple[str, list[int]]]:
    cuts = (0, len(stream))
    endless = [stream.numel_before[-1] + 1]
    for measure, weights in balanced_measures(stream).items():
        placed = place_costliest_first(stream, cuts, weights, endless, shards)
        relieve(placed, endless)
        yield f"costliest first by {measure}", placed.owners
        if len(set(weights)) <= MOST_KINDS:
            filled = Placement.of(stream, cuts, weights, _by_patterns(stream, weights, shards), shards)
            relieve(filled, endless)
            yield f"patterns by {measure}", filled.owners


def _by_patterns(stream: Stream, weights: Sequence[int], shards: int) -> list[int]:
    """Owners from packing the weights as low as possible."""
    waiting: dict[tuple[int, int], list[int]] = {}
    for position in reversed(range(len(stream))):
        waiting.setdefault((-weights[position], stream.kind_of[position]), []).append(position)
    kinds = sorted(waiting)
    sizes = [max(1, -weight) for weight, _ in kinds]
    _, patterns = pack(sizes, [len(waiting[kind]) for kind in kinds], shards, tolerance=1e-4)
    owners = [0] * len(stream)
    shard = 0
    for pattern in patterns:
        for _ in range(pattern.times):
            for kind, count in pattern.counts:
                for _ in range(count):
                    owners[waiting[kinds[kind]].pop()] = shard
            shard += 1
    return owners


def _largest(stream: Stream, owners: Sequence[int], shards: int) -> tuple[int, int, int]:
    """The largest cost, estimate and number of elements of any shard."""
    measures = (stream.costs, stream.estimates, stream.numels)
    cost, estimate, numel = (max(per_rank(owners, amounts, shards)) for amounts in measures)
    return cost, estimate, numel


def _plan(
    atoms: Sequence[Atom], stream: Stream, owners: list[int], shards: int, bucket_numel: int | None, strategy: str
) -> BufferPlan:
    buckets, filled = [0], 0
    for numel in stream.numels[:-1]:
        filled += numel
        closes = bucket_numel is not None and filled >= bucket_numel
        buckets.append(buckets[-1] + closes)
        filled = 0 if closes else filled
    fullest: list[dict[int, int]] = [{} for _ in range(buckets[-1] + 1)]
    for bucket, owner, numel in zip(buckets, owners, stream.numels):
        fullest[bucket][owner] = fullest[bucket].get(owner, 0) + numel
    return BufferPlan(
        "compact",
        strategy,
        tuple(atoms),
        shards,
        tuple(reversed(owners)),
        tuple(reversed(buckets)),
        tuple(aligned_shard(max(shard.values()), shards) for shard in fullest),
    )
