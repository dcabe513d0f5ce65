"""Which parameters have a gradient on any rank: one vector, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwopt_backend.runtime.ranks import Collectives


class Presence:
    """Starts to agree when made, and is waited for only by who needs the others' word.

    A rank that has a gradient knows that it will be used; one that has not asks whether another has. So where all ranks
    have all gradients nobody waits. Made on all ranks of the group.
    """

    def __init__(
        self, collectives: Collectives, here: Sequence[bool], device: torch.device, more: Tensor | None = None
    ) -> None:
        self._here = list(here)
        self._flags = torch.tensor(self._here, dtype=torch.int32, device=device)
        if more is not None:
            self._flags = torch.cat([self._flags, more])
        self._pending = collectives.all_reduce_max(self._flags) if len(self._flags) else None
        self._anywhere: list[int] | None = None

    def __call__(self, index: int) -> bool:
        """Whether any rank has a gradient for parameter ``index``."""
        return self._here[index] or bool(self.anywhere()[index])

    def anywhere(self) -> list[int]:
        """Per parameter, and per flag of ``more`` (int32) after them, 1 if any rank has it."""
        if self._anywhere is None:
            self.finish()
            self._anywhere = self._flags.tolist()
        return self._anywhere

    def finish(self) -> None:
        """Wait for the collective, whether anybody asked or not."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
