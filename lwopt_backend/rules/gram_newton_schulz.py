"""Newton-Schulz on the Gram matrix: the same polynomial as ``newton_schulz``, iterated on the shorter side only."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lwopt_backend.rules.coefficients import Coefficients, Triple, by_step
from lwopt_backend.rules.newton_schulz import prepare

FIRST_SLOPES, LATER_SLOPES = 45.0, 31.0  # largest products of slopes at zero within a segment


def gram_newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    restarts: Sequence[int] | None = None,
) -> Tensor:
    """What ``newton_schulz`` computes, to rounding, from products of s x s matrices; s is the shorter side.

    Every step multiplies X by a polynomial of R = X X^T, so the product Q of several steps follows from R alone, and X
    is multiplied once (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026). Fewer flops where the longer side is
    over 1.5 times the shorter, more where it is less. ``restarts`` are the numbers of steps after which X and R are
    formed anew.
    """
    x, as_given = prepare(matrices, coefficients, eps, dtype)
    for triples in segments(coefficients, steps, restarts):
        x = _product_of_steps(x @ x.mT, triples) @ x
    return as_given(x)


def segments(coefficients: Coefficients, steps: int, restarts: Sequence[int] | None = None) -> list[tuple[Triple, ...]]:
    """The coefficients of the steps from one restart to the next.

    Rounding makes small eigenvalues of R wrong, even negative, and every step multiplies them by its slope at zero, a,
    twice. So by default a segment ends before its slopes' product would pass a bound; the first one's is larger, as the
    restart mends what it leaves. Of 5 steps that is 3 and 2 with Jordan's coefficients, 2 and 3 with the other tables.
    On ill-conditioned matrices in bfloat16 the largest singular value then ends at most 0.02 above the plain
    iteration's with Jordan's coefficients and 0.2 with the others; were it 3 and 2 with all, 0.6 to 2.5 with the
    others, and without a restart it has no bound.
    """
    triples = by_step(coefficients, steps)
    if restarts is None:
        restarts, begin, bound = [], 0, FIRST_SLOPES
        while (begin := begin + _steps_within(bound, triples[begin:])) < steps:
            restarts.append(begin)
            bound = LATER_SLOPES
    bounds = [0, *(restart for restart in restarts if restart < steps), steps]
    return [triples[begin:end] for begin, end in zip(bounds, bounds[1:])]


def _steps_within(bound: float, triples: Sequence[Triple]) -> int:
    """How many of these steps have slopes whose product is within the bound; one at least."""
    products: Iterable[float] = itertools.accumulate((abs(a) for a, _, _ in triples), operator.mul)
    return max(1, sum(product <= bound for product in products))


def _product_of_steps(gram: Tensor, triples: Sequence[Triple]) -> Tensor:
    """Q of (..., s, s) with which steps take X to Q X, where X X^T is ``gram``.

    A step takes X to P X and R to P R P with P = a I + Z, Z = b R + c R^2; polynomials of one matrix commute.
    """
    multiply_add = torch.addmm if gram.ndim == 2 else torch.baddbmm
    product = None
    for number, (a, b, c) in enumerate(triples, start=1):
        z = multiply_add(gram, gram, gram, beta=b, alpha=c)
        if number < len(triples):  # after the last step nobody needs R
            half = multiply_add(gram, z, gram, beta=a)
            gram = multiply_add(half, half, z, beta=a)
        if product is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            product = z
        else:
            product = multiply_add(product, z, product, beta=a)
    assert product is not None
    return product
