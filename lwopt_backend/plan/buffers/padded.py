"""Padded layouts: several strategies, one objective, and never worse than what Megatron-Core would plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lwopt_backend.plan.buffers.cuts import EXACT_COUNTS, Cuts, Packer, least_padding, whole_layers
from lwopt_backend.plan.buffers.layout import BufferPlan, aligned_shard
from lwopt_backend.plan.buffers.megatron import capped_shards, closing_rule
from lwopt_backend.plan.buffers.placement import Placement, deal_bins, place_costliest_first
from lwopt_backend.plan.buffers.refine import relieve
from lwopt_backend.plan.buffers.stream import Stream
from lwopt_backend.plan.buffers.weights import balanced_measures
from lwopt_backend.plan.types import Atom

LOOSENED = (0.0, 0.02)  # how much larger than necessary shards may get in return for balance
BISECTIONS = 5
CLOSE = 1.01  # modelled times this near are equal as far as a model can tell
LARGER_BUCKET = 1.25  # than Megatron's largest, where there are as many buckets; more freedom where to cut


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what it is judged by, all to be small."""

    plan: BufferPlan
    buffer_numel: int
    largest_load: int
    largest_estimate: int
    largest_bucket: int

    @property
    def measures(self) -> tuple[int, int, int]:
        return self.buffer_numel, self.largest_load, self.largest_estimate

    def gains_over(self, other: Candidate) -> int:
        """In how many of two ways it is better: leaner, and more even by Megatron's estimate."""
        return (self.buffer_numel < other.buffer_numel) + (self.largest_estimate < other.largest_estimate)

    def no_worse_than(self, other: Candidate) -> bool:
        """At least as lean, as balanced by either cost, and as fine."""
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
    how fine the buckets are (at least as many, or none larger). Megatron's own plan is one of the candidates, so there
    always is one; those that are leaner than it, and more even by its estimate, come first. ``bucket_numel`` is the
    least size of a bucket as Megatron means it; None is one bucket. What is equal in every measure is decided by the
    order in which strategies are tried.
    """
    stream = Stream(atoms)
    reference_cuts = closing_rule(stream, shards, bucket_numel)
    reference = _candidate(
        Placement.of(stream, reference_cuts, stream.costs, capped_shards(stream, reference_cuts, shards), shards),
        atoms,
        "megatron",
    )
    found = [reference]
    for strategy, placement in _strategies(stream, shards, reference_cuts, reference):
        candidate = _candidate(placement, atoms, strategy)
        if candidate.no_worse_than(reference):
            found.append(candidate)
    most = max(candidate.gains_over(reference) for candidate in found)
    timed = [(seconds(c.plan), c) for c in found if c.gains_over(reference) == most]
    fastest = min(time for time, _ in timed)
    close = [(c.largest_load, time, *c.measures, c) for time, c in timed if time <= CLOSE * fastest]
    return min(close, key=lambda entry: entry[:-1])[-1].plan


def _strategies(
    stream: Stream, shards: int, reference_cuts: Cuts, reference: Candidate
) -> Iterator[tuple[str, Placement]]:
    """Every plan that is tried, with its name."""
    packer = Packer(stream, shards)
    for where, cuts in _cuts(packer, reference_cuts, reference.largest_bucket):
        for measure, weights in balanced_measures(stream).items():
            dealt = deal_bins(packer, cuts, weights)
            heights = dealt.heights
            relieve(dealt, heights)
            yield f"{where}, bins dealt by {measure}", dealt
            for loosened in LOOSENED:
                caps = [int(height * (1 + loosened)) for height in heights]
                yield f"{where}, costliest first by {measure}", _placed(stream, cuts, weights, caps, shards)
    if len(reference_cuts) == 2:
        yield from _between(packer, reference)


def _cuts(packer: Packer, reference_cuts: Cuts, largest: int) -> Iterator[tuple[str, Cuts]]:
    """Where buckets may close, without repetition."""
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
    """One bucket: smaller shards and even work pull apart. The smallest shards that are as even as Megatron's."""
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
    loads = [0] * shards
    estimates = [0] * shards
    for owner, cost, estimate in zip(placement.owners, stream.costs, stream.estimates):
        loads[owner] += cost
        estimates[owner] += estimate
    return Candidate(plan, plan.buffer_numel, max(loads), max(estimates), max(plan.bucket_numels))
