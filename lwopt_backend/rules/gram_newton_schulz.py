"""Newton-Schulz on the Gram matrix: the same polynomial as ``newton_schulz``, iterated on the shorter side only."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lwopt_backend.rules.newton_schulz import newton_schulz


def gram_newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """What ``newton_schulz`` computes, to rounding, from products of s x s matrices; s is the shorter side.

    Every step multiplies X by a polynomial of R = X X^T, so the product Q of several steps follows from R alone, and X
    is multiplied once (Dao-AILab, "Gram Newton-Schulz"). Fewer flops where the longer side is over 1.5 times the
    shorter, more where it is less.
    """
    batch = matrices.shape[:-2]
    x = newton_schulz(matrices, steps=0, coefficients=coefficients, eps=eps, dtype=dtype)  # cast and normalized
    x = x.flatten(0, -3) if len(batch) > 1 else x  # torch multiplies and adds 2-D and 3-D tensors
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for segment in segments(steps):
        x = _product_of_steps(x @ x.mT, segment, coefficients) @ x
    x = x.mT if tall else x
    return x.unflatten(0, batch) if len(batch) > 1 else x


def segments(steps: int) -> Iterator[int]:
    """The steps between restarts, which form Q X and then R anew: 3, then 2 each; of the usual 5 steps 3 and 2.

    Rounding makes small eigenvalues of R wrong, even negative, and steps let them grow. In bfloat16 the largest
    singular value of ill-conditioned matrices ends 0.02 above the exact polynomial's; with 2 steps before the restart
    and 3 after it, as others do, 0.2 above, and without a restart anywhere. The last segment matters most, as nothing
    mends what it leaves.
    """
    yield min(3, steps)
    for begin in range(3, steps, 2):
        yield min(2, steps - begin)


def _product_of_steps(gram: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Q of (..., s, s) with which ``steps`` steps take X to Q X, where X X^T is ``gram``.

    A step takes X to P X and R to P R P with P = a I + Z, Z = b R + c R^2; polynomials of one matrix commute.
    """
    a, b, c = coefficients
    multiply_add = torch.addmm if gram.ndim == 2 else torch.baddbmm
    product = None
    for remaining in reversed(range(steps)):
        z = multiply_add(gram, gram, gram, beta=b, alpha=c)
        if remaining:  # after the last step nobody needs R
            half = multiply_add(gram, z, gram, beta=a)
            gram = multiply_add(half, half, z, beta=a)
        if product is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            product = z
        else:
            product = multiply_add(product, z, product, beta=a)
    return product
