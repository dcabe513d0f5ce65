"""Costs: flops of a rule, seconds on a machine, bytes of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# The cost of a rule's work on one matrix. A multiply-add is two flops; s is the shorter side, l the longer.
#
# A cost is an integer, so that sums and comparisons are the same on every machine.

Shape = tuple[int, int]

GRAM_ASPECT = 1.5  # at this aspect, both forms cost the same, for any number of steps
SOAP_FREQUENCY = 10  # steps between two updates of the eigenbases, SOAP's default
SHAMPOO_FREQUENCY = 100  # steps between two inverse roots, Distributed Shampoo's advice for large models
ADAM_FLOPS = 12  # per element of Adam's step; the only cost if both sides are too long
SECOND_MOMENT_FLOPS = 9  # per element: square, average (3), root and sum, division, norm (2), product
LARGEST_PRECONDITIONER = 10_000  # a longer side keeps the identity, SOAP's and Distributed Shampoo's usual limit


def newton_schulz_flops(shape: Shape, steps: int = 5) -> int:
    """Flops of ``steps`` quintic Newton-Schulz iterations on a (rows, columns) matrix: ``steps * (4 s^2 l + 2 s^3)``.

    One iteration is X X^T (2 s^2 l), A A (2 s^3) and B X (2 s^2 l). Element-wise work is left out, because it is
    smaller by a factor s.
    """
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def gram_flops(
    shape: Shape,
    steps: int = 5,
    aspect: float | None = GRAM_ASPECT,
    segments: int | None = None,
    symmetric: bool = False,
) -> int:
    """Newton-Schulz on the Gram matrix if the longer side is at least ``aspect`` times the shorter, else plain.

    Every segment of steps forms X X^T and applies the product of its polynomials once (4 s^2 l each). A step in between
    is four s x s products (8 s^3); a segment's first step saves one of them and its last step two (6 s^3 a segment).
    The default segments are those of Jordan's coefficients: 3 steps, then 2 each. With ``aspect`` None, all are plain.
    With ``symmetric``, products whose result is symmetric, all but the last of a step or segment, cost half.
    """
    short, long = sorted(shape)
    saved = 2 if symmetric else 1
    if aspect is None or long < aspect * short:
        return steps * (2 + 2 // saved) * short * short * long + steps * 2 // saved * short**3
    segments = 1 + max(0, steps - 2) // 2 if segments is None else segments
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
    """Per rank, the sum of ``amounts`` over what it owns."""
    sums = [0] * ranks
    for owner, amount in zip(owners, amounts):
        sums[owner] += amount
    return sums


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of one rank: matrix flops per second, bytes per second on the wire, seconds per collective.

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

        Groups follow one another from rank 0, ``of`` ranks in all (one group by default). All of them are within nodes
        if one node has all ranks, or if a group's extent divides a node.
        """
        extent = ranks * stride
        inside = (of or extent) <= self.node_size or self.node_size % extent == 0
        return self.node_bytes_per_second if inside and self.node_bytes_per_second else self.bytes_per_second


# Round figures, good enough to rank two plans and the same on every rank; they are not measured at run time, because
# ranks that measured differently would choose differently. cuda: an H100's bf16 matmul rate as reached by
# Newton-Schulz, and one 200 Gb/s network card per GPU. cpu: one core's bf16 rate and gloo on loopback.
MACHINES = {"cuda": Machine("cuda", 4e14, 25e9, 3e-5), "cpu": Machine("cpu", 5e10, 1e9, 3e-4)}


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

    - ``gradients`` are gone after the step unless all ranks keep them; ``padding`` is that of parameters and gradients.
    - ``workspace``: what a step's largest batch of matrices needs in addition, in a plan; ``exchange``: what the
      buffers need at most in which a host's matrices travel.
    - ``transient``: what backward passes need in addition on owned storage, for gradients on their way; in a run, what
      they have needed. A flag per parameter is not counted.
    - ``sent``: what a step with one backward pass sends.
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
        """The sum of two buffers on one rank; the step uses one workspace and one exchange after the other."""
        return RankMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.state + other.state,
            self.padding + other.padding,
            max(self.workspace, other.workspace),
            max(self.exchange, other.exchange),
            self.transient + other.transient,
            self.sent + other.sent,
        )
