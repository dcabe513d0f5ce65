"""The model of a machine by which ``auto`` compares plans: seconds from flops, bytes and latency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank can do: matrix flops per second, bytes per second on the wire, seconds per collective."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float


# Round figures, good enough to rank two plans and the same on every rank; they are not measured at run time, because
# ranks that measured differently would choose differently. cuda: an H100's bf16 matmul rate as reached by
# Newton-Schulz, and one 200 Gb/s network card per GPU. cpu: one core's bf16 rate and gloo on loopback.
MACHINES = {
    "cuda": Machine("cuda", 4e14, 25e9, 3e-5),
    "cpu": Machine("cpu", 5e10, 1e9, 3e-4),
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


def step_time(machine: Machine, *, flops: int, nbytes: int, collectives: int) -> StepTime:
    """Seconds for the busiest rank's ``flops``, the ``nbytes`` through its link and the number of ``collectives``."""
    return StepTime(
        flops / machine.flops_per_second,
        nbytes / machine.bytes_per_second,
        collectives * machine.latency_seconds,
    )
