"""Costs: flops of a rule, seconds on a machine, bytes of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

# The cost of a rule's work on one matrix. A multiply-add is two flops; s is the shorter side, l the longer.
#
# A cost is an integer, so that sums and comparisons are the same on every machine.

Shape = tuple[int, int]

SOAP_FREQUENCY = 10  # steps between two updates of the eigenbases, SOAP's default
SHAMPOO_FREQUENCY = 100  # steps between two inverse roots, Distributed Shampoo's advice for large models
ADAM_FLOPS = 12  # per element of Adam's step; the whole cost if both sides are too long
SECOND_MOMENT_FLOPS = 9  # per element: square, average (3), root and sum, division, norm (2), product
LARGEST_PRECONDITIONER = 10_000  # a longer side keeps the identity, SOAP's and Distributed Shampoo's usual limit


def newton_schulz_flops(shape: Shape, steps: int = 5, segments: int | None = None, symmetric: bool = False) -> int:
    """Flops of ``steps`` quintic Newton-Schulz iterations on a (rows, columns) matrix: ``steps * (4 s^2 l + 2 s^3)``.

    One iteration is X X^T (2 s^2 l), A A (2 s^3) and B X (2 s^2 l). Element-wise work is left out, because it is
    smaller by a factor s.

    With ``segments``, by the Gram matrix: every segment of steps forms X X^T and applies the product of its polynomials
    once (4 s^2 l each). Each further step is four s x s products (8 s^3); a segment saves one of them in its first step
    and two in its last (6 s^3 a segment). With ``symmetric``, all products with a symmetric result, which excludes the
    last of a step or segment, cost half.
    """
    short, long = sorted(shape)
    saved = 2 if symmetric else 1
    if segments is None:
        return steps * (2 + 2 // saved) * short * short * long + steps * 2 // saved * short**3
    return segments * (2 + 2 // saved) * short * short * long + (8 * steps - 6 * segments) // saved * short**3


def max_min_squared(shape: Shape) -> int:
    """``l s^2``: only the leading term, Megatron-Core's planner's estimate of a matrix's work."""
    short, long = sorted(shape)
    return long * short * short


def soap_flops(shape: Shape, frequency: int = SOAP_FREQUENCY, largest: int = LARGEST_PRECONDITIONER) -> int:
    """One SOAP step (Vyas et al. 2024, algorithm 3): both statistics, two projections and the way back.

    A preconditioned side of size k costs 2 m n k for its statistic and for either direction of the projection, and
    10/3 k^3 for one power iteration with QR every ``frequency`` steps. Sides over ``largest`` keep the identity.
    """
    rows, columns = shape
    sides = [side for side in shape if side <= largest]
    adam = ADAM_FLOPS * rows * columns
    return adam + sum(6 * rows * columns * side + 10 * side**3 // (3 * frequency) for side in sides)


def shampoo_flops(shape: Shape, frequency: int = SHAMPOO_FREQUENCY, largest: int = LARGEST_PRECONDITIONER) -> int:
    """One Shampoo step (Gupta et al. 2018): both statistics, both products, and the inverse roots' share.

    An inverse root by a symmetric eigendecomposition is 9 k^3 (Golub and Van Loan, 8.3) every ``frequency`` steps.
    """
    rows, columns = shape
    sides = [side for side in shape if side <= largest]
    adam = ADAM_FLOPS * rows * columns  # the grafted step
    return adam + sum(4 * rows * columns * side + 9 * side**3 // frequency for side in sides)


def per_rank(owners: Iterable[int], amounts: Iterable[int], ranks: int) -> list[int]:
    """Per rank, the sum of its owned ``amounts``."""
    sums = [0] * ranks
    for owner, amount in zip(owners, amounts):
        sums[owner] += amount
    return sums


LAUNCH_SECONDS = 6e-6  # of the host, to launch an operation on a device
MEMORY_BYTES_PER_SECOND = 2.7e12  # that element-wise kernels read and write: 80 % of an H100's peak
PIECE_SECONDS = 15e-6  # of a rank's host on FSDP2, in a step, for a matrix of which it stores a piece


@dataclass(frozen=True, slots=True)
class ElementwiseBytes:
    """Bytes of a device's memory that the element-wise operations of a step read and write: for an element that a rank
    stores, and for one that it owns."""

    stored: int
    owned: int

    @classmethod
    def of(cls, *, param: int = 4, grad: int = 4, state: int = 4, states: int = 1, wire: int = 2) -> ElementwiseBytes:
        """From the bytes of an element of the weight, of its gradient, of each of its ``states``, and on the wire.

        Where an element is stored, the gradient changes each state (1 + 2 a state), all of them make the direction (2
        + 1 a state), and decay and update change the weight (2 + 3), in the dtype of the state, to and from which
        others are cast. Of an owned element, the rule's norm, casts and copies are 14 on the wire. A record of
        ``benchmarks/clock`` for stacks of 768 x 2048 has 31 to 44 and 23 to 28 bytes, where these are 44 and 28. Norms
        of whole matrices, cautious decay and states in 8 bits take more.
        """
        casts = (grad + state) * (grad != state) + 2 * (param + state) * (param != state)
        return cls((8 + 3 * states) * state + casts, 14 * wire)


MUON_IN_FP32 = ElementwiseBytes.of()


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of one rank: matrix flops per second, bytes per second on the wire, seconds per collective.

    ``bytes_per_second`` is a rank's share of the network; between the ``node_size`` ranks of one node it is
    ``node_bytes_per_second``. ``memory_bytes`` is a rank's memory, 0 if unknown. ``launch_seconds`` is 0 where the host
    computes itself, and collectives are gloo's instead of NCCL's.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float
    node_size: int = 1
    node_bytes_per_second: float = 0.0
    memory_bytes: float = 0.0
    launch_seconds: float = LAUNCH_SECONDS

    def collective(
        self,
        nbytes: float,
        ranks: int,
        *,
        stride: int = 1,
        of: int | None = None,
        direct: bool = False,
        operations: int = 1,
    ) -> tuple[float, float]:
        """Seconds on the wire, and of latency, of a collective in which a rank sends or receives ``nbytes`` at most.

        The ranks are ``stride`` apart; groups of them follow one another from rank 0, ``of`` ranks in all (one group by
        default). Between nodes a rank has one network card. If ``direct``, as in an all-to-all, the card carries the
        rank's exchange with other nodes, in one round. Otherwise rings pass through all of a group's ranks in a node
        and leave the node by all their cards, in log2 ``ranks`` rounds. Each of NCCL's ``operations`` costs a latency.
        """
        if ranks == 1 or not nbytes:
            return 0.0, 0.0
        extent, size = ranks * stride, self.node_size
        here = ranks if max(of or 0, extent) <= size else min(ranks, max(1, math.gcd(extent, size) // stride))
        inside = self.node_bytes_per_second or self.bytes_per_second
        if direct:
            away = nbytes * (ranks - here) / (ranks - 1)
            wire = max(away / self.bytes_per_second, (nbytes - away) / inside)
        else:
            wire = nbytes / (inside if here == ranks else min(inside, here * self.bytes_per_second))
        rounds = 1 if direct else (ranks - 1).bit_length()
        return wire, self.latency_seconds * max(rounds, operations)


# Clusters by name. Flops: 40 % of the dense bf16 peak, the rate of batched Newton-Schulz on large matrices. Wires:
# 80 % of a rank's network card (400 Gb/s NDR, 200 Gb/s HDR) and of its NVLink or Infinity Fabric, one direction.
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

# The engines' target machines: the same on every rank. They are not measured, because ranks with different measurements
# would choose different plans. cuda: any accelerator. cpu: one core's bf16 rate and gloo on loopback.
MACHINES = {
    "cuda": replace(CLUSTERS["h100-8x-ib"], name="cuda", memory_bytes=0.0),
    "cpu": Machine("cpu", 5e10, 1e9, 3e-4, launch_seconds=0.0),
}


def machine_of(device_type: str) -> Machine:
    """The machine that an engine plans for, by the type of its parameters' device: ``"cpu"``, or any accelerator."""
    return MACHINES.get(device_type, MACHINES["cuda"])


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


# The memory of a rank.


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. ``parameters`` to ``padding`` are kept between a backward pass and its step.

    - ``gradients`` are freed after the step unless all ranks keep them; ``padding`` is that of parameters and
    gradients.
    - ``workspace`` and ``exchange``: the planned additional need of the phase of a step that needs most: for a batch of
      matrices that a rule updates, and for the buffers in which matrices are sent.
    - ``transient``: the additional need of backward passes in plain PyTorch, for gradients on their way; in a run, the
      measured need. A flag per parameter is not counted.
    - ``sent``: the bytes that a step with one backward pass sends.
    """

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    state: int = 0
    padding: int = 0
    workspace: int = 0
    exchange: int = 0
    transient: int = 0
    sent: int = 0

    @property
    def long_lived(self) -> int:
        return self.parameters + self.gradients + self.masters + self.state + self.padding

    @property
    def peak(self) -> int:
        """The planned peak of a step."""
        return self.long_lived + self.workspace + self.exchange

    @property
    def backward(self) -> int:
        """The planned peak of the backward pass before it, without activations."""
        return self.long_lived + self.transient

    def __add__(self, other: RankMemory) -> RankMemory:
        """The sum of two buffers on one rank; the step has their phases one after the other."""
        largest = max(self, other, key=lambda each: each.workspace + each.exchange)
        return RankMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.state + other.state,
            self.padding + other.padding,
            largest.workspace,
            largest.exchange,
            self.transient + other.transient,
            self.sent + other.sent,
        )
