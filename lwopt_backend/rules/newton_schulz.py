"""The quintic Newton-Schulz iteration: an approximate polar factor from matrix products alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lwopt_backend.rules.coefficients import Coefficients, by_step, table_of

LEAST_NORM = 1e-15  # of which float32 and bfloat16 square every element that counts without losing it


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Push the singular values of every matrix in (..., rows, columns) towards one.

    X <- a X + (b A + c A^2) X with A = X X^T, starting from X / ||X||_F, on the transposed matrix where rows > columns
    (Keller Jordan, "Muon", 2024); a, b and c may differ from step to step. Computed and returned in ``dtype``; with one
    triple the arithmetic is that of torch.optim.Muon, operation by operation, so one matrix gives the same bits. The
    input is not changed. Raises ValueError for coefficients that are not for so many steps.
    """
    x, as_given = prepare(matrices, coefficients, eps, dtype)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in by_step(coefficients, steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return as_given(x)


def prepare(
    matrices: Tensor, coefficients: Coefficients, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What iterations start from, and the way back: cast, 2-D or 3-D, no longer than wide, of norm one."""
    x = matrices.to(dtype)
    batch = x.shape[:-2]
    x = x.flatten(0, -3) if len(batch) > 1 else x  # torch multiplies and adds 2-D and 3-D tensors
    tall = x.size(-2) > x.size(-1)
    x = normalize(x.mT if tall else x, eps, table_of(coefficients).margin)

    def as_given(result: Tensor) -> Tensor:
        result = result.mT if tall else result
        return result.unflatten(0, batch) if len(batch) > 1 else result

    return x, as_given


def normalize(x: Tensor, eps: float, margin: float = 1.0) -> Tensor:
    """Every matrix of 2-D or 3-D ``x`` over its Frobenius norm times ``margin``.

    torch.optim.Muon divides by at least ``eps``, so what gradient clipping left of a matrix may begin the iteration too
    small to end near one. Where the norm is below that, or too large to be a number, the matrix is divided by its
    largest element first; elsewhere that is a division by one, which changes no bit. Zero stays zero, and what is not
    finite ends as NaN. No device has to be waited for.
    """
    norm = _norm(x)
    bounded = norm.clamp(max(eps, LEAST_NORM), torch.finfo(x.dtype).max)
    guarded = bounded != norm
    if x.device.type != "cpu" or guarded.any():  # looking is free on a CPU only
        largest = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1), keepdim=x.ndim > 2)
        x = x / torch.where(guarded, largest.clamp(min=torch.finfo(x.dtype).tiny), 1)
        bounded = torch.where(guarded, _norm(x).clamp(min=LEAST_NORM), bounded)
    return x / (bounded if margin == 1 else bounded * margin)


def _norm(x: Tensor) -> Tensor:
    """One matrix takes the 2-D path: its norm is reduced in torch.optim.Muon's order, batched it would not be."""
    norm: Tensor = x.norm() if x.ndim == 2 else torch.linalg.matrix_norm(x, keepdim=True)
    return norm
