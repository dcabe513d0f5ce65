"""What the runtime asks of a matrix rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class OwnerStateRule(Protocol):
    """A matrix rule that also keeps state of other shapes at the owner, such as SOAP's and Shampoo's factors."""

    def new_owner_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        """Fresh state for a matrix of ``shape``: contiguous fp32 tensors of at least one dimension, by name."""

    def transform_with(self, matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
        """``transform`` of one matrix, with its owner-held state, which is changed in place."""
