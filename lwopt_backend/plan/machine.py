"""The model of a machine by which plans are compared: seconds from flops, bytes and latency."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank can do: matrix flops per second, bytes per second on the wire, seconds per collective.

    ``bytes_per_second`` is a rank's share of the network; between the ``node_size`` ranks of one node it is
    ``node_bytes_per_second``. ``memory_bytes`` is a rank's memory, 0 if unknown.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float
    node_size: int = 1
    node_bytes_per_second: float = 0.0
    memory_bytes: float = 0.0

    def link(self, ranks: int, stride: int = 1, of: int | None = None) -> float:
        """Bytes per second that each of ``ranks`` ranks, ``stride`` apart, can send to the others at once.

        Groups follow one another from rank 0 on, ``of`` ranks in all (one group by default). They all lie within nodes
        if one node holds all of them, or if their extent divides a node.
        """
        extent = ranks * stride
        inside = (of or extent) <= self.node_size or self.node_size % extent == 0
        return self.node_bytes_per_second if inside and self.node_bytes_per_second else self.bytes_per_second


# Round figures, good enough to rank two plans and the same on every rank; they are not measured at run time, because
# ranks that measured differently would choose differently. cuda: an H100's bf16 matmul rate as reached by
# Newton-Schulz, and one 200 Gb/s network card per GPU. cpu: one core's bf16 rate and gloo on loopback.
MACHINES = {
    "cuda": Machine("cuda", 4e14, 25e9, 3e-5),
    "cpu": Machine("cpu", 5e10, 1e9, 3e-4),
}


def machine_of(device_type: str) -> Machine:
    """The machine that an engine plans for, by the type of its parameters' device: ``"cpu"``, or any accelerator."""
    return MACHINES.get(device_type, MACHINES["cuda"])


# Clusters for planning ahead. Flops: 40 % of the dense bf16 peak, what batched Newton-Schulz reaches on large matrices.
# Wires: 80 % of a rank's network card (400 Gb/s NDR, 200 Gb/s HDR) and of its NVLink or Infinity Fabric, one direction.
CLUSTERS = {
    machine.name: machine
    for machine in (
        Machine("h100-8x-ib", 4.0e14, 40e9, 2e-5, 8, 360e9, 80e9),
        Machine("h200-8x-ib", 4.0e14, 40e9, 2e-5, 8, 360e9, 141e9),
        Machine("b200-8x-ib", 9.0e14, 40e9, 2e-5, 8, 720e9, 180e9),
        Machine("gb200-72x-ib", 1.0e15, 40e9, 2e-5, 72, 720e9, 186e9),
        Machine("a100-8x-ib", 1.25e14, 20e9, 2e-5, 8, 240e9, 80e9),
        Machine("mi300x-8x-roce", 5.2e14, 40e9, 3e-5, 8, 358e9, 192e9),
        Machine("h100-8x-ethernet", 4.0e14, 10e9, 5e-5, 8, 360e9, 80e9),
    )
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Modelled seconds of one optimizer step's matrix part on the busiest rank.

    The parts are added, not overlapped: an upper bound that does not depend on how well a host hides transport.
    """

    compute: float
    wire: float
    latency: float

    @property
    def total(self) -> float:
        return self.compute + self.wire + self.latency

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.compute + other.compute, self.wire + other.wire, self.latency + other.latency)


def step_time(machine: Machine, *, flops: int, nbytes: int, collectives: int) -> StepTime:
    """Seconds for the busiest rank's ``flops``, the ``nbytes`` through its link and the number of ``collectives``."""
    return StepTime(
        flops / machine.flops_per_second,
        nbytes / machine.bytes_per_second,
        collectives * machine.latency_seconds,
    )


def gather_seconds(
    machine: Machine, nbytes: float, ranks: int, *, stride: int = 1, of: int | None = None
) -> tuple[float, float]:
    """(wire, latency) of an all-gather or reduce-scatter of ``nbytes`` in all; ranks as in ``Machine.link``.

    A rank sends the share (ranks - 1) / ranks of them, in ceil(log2(ranks)) rounds of latency.
    """
    if ranks == 1 or not nbytes:
        return 0.0, 0.0
    wire = nbytes * (ranks - 1) / ranks / machine.link(ranks, stride, of)
    return wire, machine.latency_seconds * math.ceil(math.log2(ranks))


def all_reduce_seconds(machine: Machine, nbytes: float, ranks: int, *, stride: int = 1) -> tuple[float, float]:
    """(wire, latency) of an all-reduce: a reduce-scatter and an all-gather."""
    wire, latency = gather_seconds(machine, nbytes, ranks, stride=stride)
    return 2 * wire, 2 * latency
