"""Which parameters have a gradient on any rank, and the maximum of a value over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from lwopt_backend.runtime.collectives import Collectives, Pending


def largest_of_all(collectives: Collectives, value: Tensor) -> Tensor:
    """The maximum over all ranks of each element; NaN where any rank has NaN. Called on all ranks.

    gloo's MAX may drop a NaN, or the values before it, depending on the order of ranks.
    """
    both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), value.isnan().to(value.dtype)])
    collectives.all_reduce_max(both).wait()
    return torch.where(both[1] > 0, math.nan, both[0])


def numbers_on(device: torch.device, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers on ``device``. Their copy to an accelerator is from pinned memory, for which no host waits."""
    pinned = device.type != "cpu" and torch.accelerator.is_available()
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=True)


def first_of(collectives: Collectives, here: Sequence[bool]) -> list[int]:
    """Flags of this rank. Their maximum over the ranks tells ``Presence.first`` on which rank one is set first."""
    number = collectives.world_size - collectives.rank
    return [number if one else 0 for one in here]


class Presence:
    """Which parameters have a gradient on any rank, and the maximum over the ranks of each of their ``flags``, int32.

    Flags are numbers, by name. Made on all ranks of the group, which starts the exchange. A
    query for a parameter that has a gradient ``here`` does not wait. Reading is no collective, so any rank may read the
    result, whether others do or not.
    """

    def __init__(
        self,
        collectives: Collectives,
        here: Sequence[bool],
        device: torch.device,
        **flags: Sequence[int],
    ) -> None:
        self._here = list(here)
        ends = list(accumulate(map(len, flags.values()), initial=len(self._here)))
        self._places = dict(zip(flags, map(slice, ends, ends[1:])))
        self._pending: Pending | None = None
        self._found: list[int] | None = None
        self._size = collectives.world_size
        mine = [*first_of(collectives, self._here), *chain.from_iterable(flags.values())]
        if collectives.world_size == 1:
            self._found = mine
            return
        self._flags = numbers_on(device, mine, torch.int32)
        self._pending = collectives.all_reduce_max(self._flags)

    def largest(self, name: str) -> list[int]:
        """The largest of each of these flags. Waits for the exchange."""
        return self.anywhere()[self._places[name]]

    def first(self, flag: int) -> int | None:
        """The first rank of those that a maximum of ``first_of`` comes from; None if there is none."""
        return self._size - flag if flag else None

    def __call__(self, index: int) -> bool:
        """Whether any rank has a gradient for parameter ``index``."""
        return self._here[index] or bool(self.anywhere()[index])

    @property
    def complete(self) -> bool:
        """Whether this rank has a gradient for every parameter."""
        return all(self._here)

    def anywhere(self) -> list[int]:
        """One flag per parameter, of the first rank that has a gradient (``first_of``), then all largest flags. Waits
        for the exchange."""
        if self._found is None:
            self.finish()
            self._found = self._flags.tolist()
        return self._found

    def finish(self) -> None:
        """Wait for the exchange, if nothing has waited for it yet."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def read_at_once(presences: Sequence[Presence]) -> None:
    """Wait for the exchanges, and read all results in one copy to the host."""
    unread = [presence for presence in presences if presence._found is None]
    if len(unread) < 2:
        for presence in unread:
            presence.anywhere()
        return
    for presence in unread:
        presence.finish()
    device = unread[0]._flags.device
    found = torch.cat([presence._flags.to(device) for presence in unread]).tolist()
    for presence in unread:
        count = len(presence._flags)
        presence._found, found = found[:count], found[count:]
