"""Owners without padding: only the work has to be even, and after it the elements, which are optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import MOST_KINDS, BufferPlan, Stream, aligned_shard
from lwopt_backend.plan.buffers.padded import relieve
from lwopt_backend.plan.buffers.placement import Placement, balanced_measures, pack, place_costliest_first

NEAR = 1.01  # of the most even plan found; among those the one whose fullest shard holds least is taken


def plan_compact(atoms: Sequence[Atom], shards: int, *, bucket_numel: int | None) -> BufferPlan:
    """Owners whose largest cost is within 1 % of the least found, by the atoms' cost and by Megatron's estimate.

    Where no plan is near the best by both, the one whose larger excess is smallest. Buckets are consecutive matrices
    in backward order, of at least ``bucket_numel`` elements; None is one bucket.
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
    return _plan(atoms, stream, owners, shards, bucket_numel, strategy)


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
    """The largest cost, estimate and number of elements of a shard."""
    sums = [[0] * shards for _ in range(3)]
    for amounts, total in zip((stream.costs, stream.estimates, stream.numels), sums):
        for owner, amount in zip(owners, amounts):
            total[owner] += amount
    cost, estimate, numel = map(max, sums)
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
