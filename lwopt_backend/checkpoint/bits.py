"""Values compared bit by bit, and those that are no finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether they are, bit for bit, which is seen much sooner than where they are not."""
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Where bits are not the same, and not both are NaN."""
    bits = _BITS[one.dtype.itemsize]
    differs = one.contiguous().view(bits) != other.contiguous().view(bits)
    if one.dtype.is_floating_point and bool(differs.any()):
        differs &= ~(one.isnan() & other.isnan())
    return differs


def infinite(values: Tensor) -> int:
    """How many elements are not finite. None is if their sum is, which is found much sooner; it may overflow too."""
    if not values.is_floating_point():
        return 0
    wide = values if values.dtype.itemsize >= 4 or values.dtype == torch.bfloat16 else values.float()
    return 0 if bool(wide.sum().isfinite()) else int((~wide.isfinite()).sum())
