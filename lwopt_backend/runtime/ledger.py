"""What is held only within a step, and what is sent, counted byte by byte."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


class Ledger:
    """Hands out the buffers that live only within a step and counts their bytes; counts bytes sent by what they are."""

    def __init__(self) -> None:
        self.held = 0
        self.most_held = 0
        self.sent: Counter[str] = Counter()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that ``free`` gets back."""
        self.held += numel * dtype.itemsize
        self.most_held = max(self.most_held, self.held)
        return torch.empty(numel, dtype=dtype, device=device)

    def free(self, buffer: Tensor) -> None:
        self.held -= buffer.numel() * buffer.itemsize
