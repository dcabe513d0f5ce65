"""What a rule's work on one matrix costs. Flops count one multiply-add as two; s is the shorter side, l the longer.

A cost is an integer, so that sums and comparisons are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Shape = tuple[int, int]

# An H100's dense bf16 rate over its memory bandwidth (989e12 / 3.35e12): flops that pass while one byte is moved.
FLOPS_PER_BYTE = 295
FLOPS_PER_ESTIMATE = 24  # Newton-Schulz flops per l s^2: 30 for a square matrix, 20 for a very long one
GRAM_ASPECT = 1.5  # there both forms cost the same, whatever the number of steps
SOAP_FREQUENCY = 10  # steps between two updates of the eigenbases, SOAP's default
SHAMPOO_FREQUENCY = 100  # steps between two inverse roots, Distributed Shampoo's advice for large models
ADAM_FLOPS = 12  # an element of Adam's step; all there is where both sides are too long
SECOND_MOMENT_FLOPS = 9  # an element: square, average (3), root and sum, division, norm (2), product
LARGEST_PRECONDITIONER = 10_000  # a longer side keeps the identity, SOAP's and Distributed Shampoo's usual limit


def newton_schulz_flops(shape: Shape, steps: int = 5) -> int:
    """Flops of ``steps`` quintic Newton-Schulz iterations on a (rows, columns) matrix: ``steps * (4 s^2 l + 2 s^3)``.

    One iteration is X X^T (2 s^2 l), A A (2 s^3) and B X (2 s^2 l). The element-wise work around it is left out, it
    is smaller by a factor s.
    """
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def batched_flops(shape: Shape, steps: int = 5) -> int:
    """Newton-Schulz of a matrix within a stack of equal ones: its flops, and its memory traffic in flops.

    In a stack no kernel's launch is paid per matrix; what a small matrix still pays is its traffic. An iteration in
    bf16 reads X three times and writes it once, and reads or writes an s x s matrix six times.
    """
    short, long = sorted(shape)
    traffic = 2 * steps * (4 * short * long + 6 * short * short)
    return newton_schulz_flops(shape, steps) + FLOPS_PER_BYTE * traffic


def gram_flops(shape: Shape, steps: int = 5, aspect: float | None = GRAM_ASPECT, segments: int | None = None) -> int:
    """Newton-Schulz on the Gram matrix where the longer side is at least ``aspect`` times the shorter, else plain.

    Segments of steps form X X^T and apply the product of their polynomials once (4 s^2 l each). In between a step is
    four s x s products (8 s^3); a segment's first step saves one of them and its last step two (6 s^3 a segment). By
    default segments are as many as with Jordan's coefficients: of 3 steps, then 2 each. ``aspect`` None: no matrix
    takes it.
    """
    short, long = sorted(shape)
    if aspect is None or long < aspect * short:
        return newton_schulz_flops(shape, steps)
    segments = 1 + max(0, steps - 2) // 2 if segments is None else segments
    return segments * 4 * short * short * long + (8 * steps - 6 * segments) * short**3


def max_min_squared(shape: Shape) -> int:
    """``l s^2``: the leading term only, by which Megatron-Core's planner weighs matrices."""
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


@dataclass(frozen=True, slots=True)
class CostModel:
    """What planning balances: ``of(shape)`` in ``unit``: "flops", "ns", or "l s^2" (24 flops each)."""

    name: str
    unit: str
    of: Callable[[Shape], int]
    meaning: str

    def seconds(self, cost: int | float, flops_per_second: float) -> float:
        """Seconds that ``cost`` takes on a device that reaches ``flops_per_second``."""
        if self.unit == "ns":
            return cost / 1e9
        return cost * (FLOPS_PER_ESTIMATE if self.unit == "l s^2" else 1) / flops_per_second


COSTS: Mapping[str, CostModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            CostModel("newton_schulz", "flops", newton_schulz_flops, "5 (4 s^2 l + 2 s^3), exact"),
            CostModel("batched", "flops", batched_flops, "newton_schulz and its memory traffic, launches shared"),
            CostModel("gram", "flops", gram_flops, "Newton-Schulz on the Gram matrix from aspect 1.5 on"),
            CostModel("max_min_squared", "l s^2", max_min_squared, "l s^2, Megatron-Core's estimate"),
            CostModel("soap", "flops", soap_flops, "statistics, projections, eigenbases every 10 steps"),
            CostModel("shampoo", "flops", shampoo_flops, "statistics, products, inverse roots every 100 steps"),
        )
    }
)
