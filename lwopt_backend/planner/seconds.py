"""Modelled seconds of a step on a cluster: of collectives, of work, and the order of both."""

from __future__ import annotations

from dataclasses import dataclass

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buckets import BUCKET_LAUNCHES, BucketSeconds, Timeline, bucket_work, pipeline
from lwopt_backend.plan.cost import Machine, StepTime, per_rank


@dataclass(frozen=True, slots=True)
class Elements:
    """Bytes of one element on the wire, of a parameter and of a gradient."""

    parameter: int = 2
    gradient: int = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """Matrices with their owners and buckets, from which a step's seconds are computed.

    A matrix in bucket -1 is not exchanged.
    """

    atoms: tuple[Atom, ...]
    shards: int
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    bucket_numels: tuple[int, ...]  # that are exchanged, with padding

    def loads(self) -> list[int]:
        """Per rank, the cost of the matrices that it owns."""
        return per_rank(self.owners, [atom.cost for atom in self.atoms], self.shards)


def buffer_step(plan: Placed, machine: Machine, *, instances: int = 1, elements: Elements | None = None) -> StepTime:
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


def buffer_timeline(
    plan: Placed, machine: Machine, *, instances: int = 1, elements: Elements | None = None, batch_numel: int = 0
) -> Timeline:
    """The modelled step, without overlap with backward: gradients to their owners, work, and parameters back.

    A rule takes up to ``batch_numel`` elements at once.
    """
    elements = elements or Elements()
    assert min(plan.buckets, default=0) >= 0, "in plain PyTorch every matrix travels"
    owned: list[list[tuple[int, Atom, int]]] = [[] for _ in plan.bucket_numels]
    for atom, bucket, owner in zip(plan.atoms, plan.buckets, plan.owners):
        owned[bucket].append((owner, atom, 1))
    seconds = []
    for numel, some in zip(plan.bucket_numels, owned):
        reduce, across, gather = _bucket_wire(plan, numel, machine, instances, elements)
        seconds.append(BucketSeconds(sum(reduce) + sum(across), sum(gather), bucket_work(some, machine, batch_numel)))
    return pipeline(seconds, [0.0] * plan.shards, BUCKET_LAUNCHES * machine.launch_seconds, reduced=True)


Seconds = tuple[float, float]  # on the wire, and of latency


def _bucket_wire(
    plan: Placed, numel: int, machine: Machine, instances: int, elements: Elements
) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds of a bucket's gradients to the owners, of their sum across instances, and of its parameters back."""
    shards, gradients = plan.shards, numel * elements.gradient

    def gather(nbytes: float) -> Seconds:
        return machine.collective(nbytes * (shards - 1) / shards, shards, of=shards * instances)

    # An all-reduce is a reduce-scatter and an all-gather.
    wire, latency = machine.collective(gradients / shards * (instances - 1) / instances, instances, stride=shards)
    return gather(gradients), (2 * wire, 2 * latency), gather(numel * elements.parameter)
