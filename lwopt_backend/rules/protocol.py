"""What the runtime asks of a matrix rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


class MatrixRule(Protocol):
    """An optimizer for whole matrices, cut where sharding cuts it.

    ``accumulate`` and ``direction`` are element-wise and run on whatever fragment a rank stores; ``transform`` needs
    the whole matrix and runs once, at its owner. The weight then moves by ``-lr * scale(shape) * transform(direction)``
    after the decoupled decay ``value *= 1 - lr * weight_decay``.
    """

    lr: float
    weight_decay: float
    state_keys: tuple[str, ...]
    exchange_dtype: torch.dtype

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take ``grad`` into the element-wise ``state`` (same shape, in place)."""

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The tensor ``transform`` needs, element by element, in ``grad``'s shape; neither argument is changed."""

    def transform(self, matrices: Tensor) -> Tensor:
        """(..., rows, columns) to the same shape: the update direction of each matrix. The input is not changed."""

    def scale(self, shape: tuple[int, int]) -> float:
        """The factor on the learning rate for a matrix of this shape."""
