"""Bytes of gradients that are held, and bytes that are sent, counted exactly."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


class Ledger:
    """Hands out all tensors that hold gradients, in backward and until the step, and counts what they take.

    ``held`` are the bytes of those that are there, ``most_held`` the most there ever were. ``sent`` are the bytes that
    this rank has sent, by what they were. Flags and norms, a few bytes per parameter, are not counted.
    """

    def __init__(self) -> None:
        self.held = 0
        self.most_held = 0
        self.sent: Counter[str] = Counter()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that ``free`` is told of before its last reference goes."""
        self.held += numel * dtype.itemsize
        self.most_held = max(self.most_held, self.held)
        return torch.empty(numel, dtype=dtype, device=device)

    def free(self, tensor: Tensor) -> None:
        self.held -= tensor.numel() * tensor.itemsize


def all_reduce_nbytes(nbytes: int, ranks: int) -> int:
    """What a rank sends to sum a tensor of ``nbytes`` over ``ranks``, around a ring: twice all shares but its own."""
    return 2 * nbytes * (ranks - 1) // ranks
