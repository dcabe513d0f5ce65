"""The cost of a step with a planned buffer: bytes per collective, seconds, and the order of collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.cost import Machine, StepTime, all_reduce_seconds, gather_seconds


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes of one element: of a parameter and of a gradient on the wire, of a master copy, of optimizer state."""

    parameter: int = 2
    gradient: int = 4
    master: int = 4
    state: int = 4


class Buckets(Protocol):
    """Matrices over ``shards`` ranks, each with its owner and bucket, and what is exchanged of each bucket."""

    @property
    def shards(self) -> int: ...

    @property
    def atoms(self) -> Sequence[Atom]: ...

    @property
    def owners(self) -> Sequence[int]: ...

    @property
    def buckets(self) -> Sequence[int]:
        """By matrix, its bucket; -1 if it is not exchanged."""

    @property
    def bucket_numels(self) -> Sequence[int]:
        """Per bucket, the elements that are exchanged."""

    def loads(self) -> list[int]:
        """Per rank, the cost of the matrices that it owns."""


@dataclass(frozen=True, slots=True)
class BucketTime:
    """One bucket's times: gradients to the owners, work at the busiest owner, parameters back. Seconds; ``end >
    start``.

    All gradients are assumed ready at 0: nothing overlaps with backward. One collective runs at a time; owners work on
    a bucket once it arrives, and it returns when its last owner is done.
    """

    bucket: int
    nbytes_reduced: int
    nbytes_returned: int
    reduce: tuple[float, float]
    work: tuple[float, float]
    back: tuple[float, float]


def buffer_step(plan: Buckets, machine: Machine, *, instances: int = 1, elements: Elements | None = None) -> StepTime:
    """Modelled seconds of a step, without overlap: work of the busiest owner, its wire, latency.

    A reduce-scatter and an all-gather of every bucket over the ``plan.shards`` neighbouring ranks of an instance; with
    ``instances`` > 1, also an all-reduce of the owned gradients between them. A compact bucket has the same collectives
    with unequal parts.
    """
    elements = elements or Elements()
    wire = latency = 0.0
    for numel in plan.bucket_numels:
        for seconds in _bucket_wire(plan, numel, machine, instances, elements):
            wire += seconds[0]
            latency += seconds[1]
    return StepTime(max(plan.loads()) / machine.flops_per_second, wire, latency)


def timeline(
    plan: Buckets, machine: Machine, *, instances: int = 1, elements: Elements | None = None
) -> list[BucketTime]:
    """When each bucket is reduced, worked on and returned, overlapping as far as one wire and the owners allow."""
    elements = elements or Elements()
    arrive, back = [], []
    for numel in plan.bucket_numels:
        reduce, across, gather = _bucket_wire(plan, numel, machine, instances, elements)
        arrive.append(sum(reduce) + sum(across))
        back.append(sum(gather))
    work = bucket_work(plan, machine)
    sizes = [(numel * elements.gradient, numel * elements.parameter) for numel in plan.bucket_numels]
    return schedule(sizes, arrive, work, back)


def bucket_work(plan: Buckets, machine: Machine) -> list[dict[int, float]]:
    """Per bucket and owner, the seconds that the owner works on it."""
    table: list[dict[int, int]] = [{} for _ in plan.bucket_numels]
    for atom, bucket, owner in zip(plan.atoms, plan.buckets, plan.owners):
        if bucket >= 0:
            table[bucket][owner] = table[bucket].get(owner, 0) + atom.cost
    rate = machine.flops_per_second
    return [{owner: load / rate for owner, load in loads.items()} for loads in table]


def schedule(
    sizes: Sequence[tuple[int, int]],
    arrive: Sequence[float],
    work: Sequence[Mapping[int, float]],
    back: Sequence[float],
) -> list[BucketTime]:
    """Times of the buckets: ``arrive[b]`` seconds on the wire, ``work[b][r]`` at rank r, ``back[b]`` on the wire again.

    Arrivals use the wire first, in order; returns follow, each as soon as its last owner is done.
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
    """Seconds of a bucket's gradients to the owners, of their sum across instances, and of its parameters back."""
    everyone = plan.shards * instances
    reduce = gather_seconds(machine, numel * elements.gradient, plan.shards, of=everyone)
    shard = numel * elements.gradient / plan.shards
    across = all_reduce_seconds(machine, shard, instances, stride=plan.shards)
    return reduce, across, gather_seconds(machine, numel * elements.parameter, plan.shards, of=everyone)
