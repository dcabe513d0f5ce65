"""What a step with a planned buffer costs: bytes per collective, seconds, and the order in which they pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lwopt_backend.plan.cost import CostModel, Machine, StepTime, all_reduce_seconds, gather_seconds


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes of one element: of a parameter and of a gradient as they travel, of a master copy, of optimizer state."""

    parameter: int = 2
    gradient: int = 4
    master: int = 4
    state: int = 4


class Buckets(Protocol):
    """Buckets of matrices over ``shards`` ranks: what travels of each, and the work that ranks have in it."""

    @property
    def shards(self) -> int: ...

    @property
    def bucket_numels(self) -> Sequence[int]:
        """Per bucket, the elements that travel."""

    def loads(self) -> list[int]:
        """Per rank, the cost of what it owns."""

    def bucket_loads(self) -> list[dict[int, int]]:
        """Per bucket, the cost of what each of its owners has there."""


@dataclass(frozen=True, slots=True)
class BucketTime:
    """One bucket's way: gradients to the owners, work at the busiest owner, parameters back. Seconds; ``end > start``.

    All gradients are taken to be ready at 0, so nothing hides behind backward. One collective runs at a time; owners
    work on a bucket as soon as it is there, and a bucket returns when its last owner is done.
    """

    bucket: int
    nbytes_reduced: int
    nbytes_returned: int
    reduce: tuple[float, float]
    work: tuple[float, float]
    back: tuple[float, float]


def buffer_step(
    plan: Buckets,
    machine: Machine,
    cost: CostModel,
    *,
    instances: int = 1,
    elements: Elements | None = None,
) -> StepTime:
    """Modelled seconds of a step, parts added: work of the busiest owner, its wire, latency.

    Reduce-scatter and all-gather of every bucket over the ``plan.shards`` ranks of an instance, which are neighbours;
    with ``instances`` > 1 an all-reduce of the owned gradients between them. A compact bucket's collectives are the
    same ones with unequal parts.
    """
    elements = elements or Elements()
    wire = latency = 0.0
    for numel in plan.bucket_numels:
        for seconds in _bucket_wire(plan, numel, machine, instances, elements):
            wire += seconds[0]
            latency += seconds[1]
    return StepTime(cost.seconds(max(plan.loads()), machine.flops_per_second), wire, latency)


def timeline(
    plan: Buckets,
    machine: Machine,
    cost: CostModel,
    *,
    instances: int = 1,
    elements: Elements | None = None,
) -> list[BucketTime]:
    """When each bucket is reduced, worked on and returned, overlapped as far as one wire and the owners allow."""
    elements = elements or Elements()
    arrive, back = [], []
    for numel in plan.bucket_numels:
        reduce, across, gather = _bucket_wire(plan, numel, machine, instances, elements)
        arrive.append(sum(reduce) + sum(across))
        back.append(sum(gather))
    work = bucket_work(plan, machine, cost)
    sizes = [(numel * elements.gradient, numel * elements.parameter) for numel in plan.bucket_numels]
    return schedule(sizes, arrive, work, back)


def bucket_work(plan: Buckets, machine: Machine, cost: CostModel) -> list[dict[int, float]]:
    """Per bucket, the seconds that each of its owners works on it."""
    rate = machine.flops_per_second
    return [{owner: cost.seconds(load, rate) for owner, load in loads.items()} for loads in plan.bucket_loads()]


def schedule(
    sizes: Sequence[tuple[int, int]],
    arrive: Sequence[float],
    work: Sequence[Mapping[int, float]],
    back: Sequence[float],
) -> list[BucketTime]:
    """Bucket by bucket: ``arrive[b]`` seconds on the wire, ``work[b][r]`` at rank r, ``back[b]`` on the wire again.

    What arrives has the wire first, in order; what returns takes it after that, as soon as its last owner is done.
    """
    arrivals, wire_free = [], 0.0
    for seconds in arrive:
        arrivals.append((wire_free, wire_free + seconds))
        wire_free += seconds
    times = []
    owner_free: dict[int, float] = {}
    for bucket, (here, owners) in enumerate(zip(arrivals, work)):
        starts = {owner: max(here[1], owner_free.get(owner, 0.0)) for owner in owners}
        owner_free |= {owner: starts[owner] + seconds for owner, seconds in owners.items()}
        done = max(owner_free[owner] for owner in owners)
        start = max(wire_free, done)
        wire_free = start + back[bucket]
        worked = (min(starts.values()), done)
        times.append(BucketTime(bucket, *sizes[bucket], here, worked, (start, wire_free)))
    return times


Seconds = tuple[float, float]  # on the wire, and of latency


def _bucket_wire(
    plan: Buckets, numel: int, machine: Machine, instances: int, elements: Elements
) -> tuple[Seconds, Seconds, Seconds]:
    """A bucket's gradients to the owners, summed across instances, and its parameters back."""
    everyone = plan.shards * instances
    reduce = gather_seconds(machine, numel * elements.gradient, plan.shards, of=everyone)
    shard = numel * elements.gradient / plan.shards
    across = all_reduce_seconds(machine, shard, instances, stride=plan.shards)
    return reduce, across, gather_seconds(machine, numel * elements.parameter, plan.shards, of=everyone)
