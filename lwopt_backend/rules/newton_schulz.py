"""The quintic Newton-Schulz iteration: an approximate polar factor from matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: tuple[float, float, float],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Push the singular values of every matrix in (..., rows, columns) towards one.

    X <- a X + (b A + c A^2) X with A = X X^T, starting from X / ||X||_F, on the transposed matrix where rows > columns
    (Keller Jordan, "Muon", 2024). Computed and returned in ``dtype``; the arithmetic is that of torch.optim.Muon,
    operation by operation, so one matrix gives the same bits. The input is not changed.
    """
    a, b, c = coefficients
    x = matrices.to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # One matrix takes the 2-D path: its norm is reduced in torch.optim.Muon's order, batched it would not be.
    norm = x.norm() if x.ndim == 2 else torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norm.clamp(min=eps)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x.mT if tall else x
