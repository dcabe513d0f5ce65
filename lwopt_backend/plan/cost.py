"""What a rule's work costs, in floating-point operations (one multiply-add counts as two)."""

from __future__ import annotations


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> int:
    """Flops of ``steps`` quintic Newton-Schulz iterations on a (rows, columns) matrix.

    With s the shorter and l the longer side, one iteration is X X^T (2 s^2 l), A A (2 s^3) and B X (2 s^2 l):
    ``4 s^2 l + 2 s^3``. The element-wise work around it is left out, it is smaller by a factor s.
    """
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)
