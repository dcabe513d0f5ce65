"""Which parameters have a gradient on any rank, and the largest value of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lwopt_backend.runtime.collectives import Collectives, Pending


def largest_of_all(collectives: Collectives, value: Tensor) -> Tensor:
    """The maximum of a scalar tensor over all ranks; NaN if any rank's is NaN. Called on all ranks.

    gloo's MAX compares, so it may drop a NaN, or the values before it, depending on the order of ranks.
    """
    both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), value.isnan().to(value.dtype)])
    collectives.all_reduce_max(both).wait()
    return torch.where(both[1] > 0, math.nan, both[0])


class Presence:
    """Which parameters have a gradient on any rank. Made on all ranks of the group, which starts the exchange.

    A rank that has a gradient does not wait; one that has none waits to learn whether another has it. So if all ranks
    have all gradients, none waits.

    ``number``, below 2^62, travels along: ``alike`` says whether all ranks gave the same.
    """

    def __init__(
        self,
        collectives: Collectives,
        here: Sequence[bool],
        device: torch.device,
        more: Tensor | Sequence[int] = (),
        number: int = 0,
    ) -> None:
        self._here = list(here)
        high, low = divmod(number, 2**31)
        halves = [high, -high, low, -low]  # all ranks have one number if the largest is also the smallest
        flags = [*halves, *map(int, [*self._here, *([] if isinstance(more, Tensor) else more)])]
        self._pending: Pending | None = None
        self._found: list[int] | None = None
        if collectives.world_size == 1 and not isinstance(more, Tensor):
            self._found = flags
            return
        self._flags = torch.tensor(flags, dtype=torch.int32).to(device, non_blocking=True)  # else a GPU's host waits
        if isinstance(more, Tensor):
            self._flags = torch.cat([self._flags, more])
        self._pending = collectives.all_reduce_max(self._flags)

    def __call__(self, index: int) -> bool:
        """Whether any rank has a gradient for parameter ``index``."""
        return self._here[index] or bool(self.anywhere()[index])

    def anywhere(self) -> list[int]:
        """One int per parameter, then per flag of ``more`` (int32): 1 if any rank has it. Waits for the exchange."""
        return self._largest()[4:]

    @property
    def alike(self) -> bool:
        """Whether all ranks gave one ``number``."""
        high, minus_high, low, minus_low = self._largest()[:4]
        return high == -minus_high and low == -minus_low

    def _largest(self) -> list[int]:
        if self._found is None:
            self.finish()
            self._found = self._flags.tolist()
        return self._found

    def finish(self) -> None:
        """Wait for the exchange, if nothing has waited for it yet."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
