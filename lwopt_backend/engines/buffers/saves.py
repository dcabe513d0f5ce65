"""Which ranks have pickled their pieces of the state: a file of one rank has one rank's share."""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter

from lwopt_backend.config.hosts import NAME
from lwopt_backend.runtime.collectives import Collectives

ADVICE = (
    "call optimizer.save_state_dict(folder) on all ranks, which load_state_dict_from(folder) loads on any number of "
    "ranks; or save the state_dict() of every rank"
)
PATIENCE = 5.0  # seconds at the end of a program, in which slower ranks may begin the same save
MADE = Counter[str]()  # optimizers of each plan in this process, by which ranks name them alike


class Saves:
    """The saves of one optimizer's ``state_dict`` that this rank has begun, compared with those of all ranks.

    ``torch.save`` of a state dict on rank 0 alone, as a DDP loop has it, writes rank 0's share, which no error of a
    later load brings back. When a rank pickles its pieces, it cannot know whether the others will, so ranks compare
    counts in their next step, and through the store when the program ends.
    """

    def __init__(self, everyone: Collectives, plan: str) -> None:
        self.count = self._met = 0
        # Not the group, whose threads have to end before Python does.
        self._rank, self._ranks = everyone.rank, everyone.world_size
        self._store = everyone.store if everyone.world_size > 1 else None
        self._key = f"lwopt saves {plan} {MADE[plan]}"
        MADE[plan] += 1
        if self._store is not None:
            atexit.register(self.tell_at_exit)

    def begun(self) -> None:
        """Note that this rank has begun to pickle the pieces of another state dict."""
        self.count += 1
        if self._store is not None:
            self._store.add(f"{self._key} {self.count}", 1)

    def met(self, most: int) -> None:
        """All ranks have begun as many saves as this one; or were told that some have begun ``most``."""
        self.count = self._met = most

    def unlike(self, most: int, fewest: int) -> str:
        return (
            f"some ranks have saved their pieces of the optimizer's state {most - fewest} time(s) more than others "
            f"(here {self.count - self._met} since the last step): such a file has the state of what one rank owns. "
            f"In place of torch.save(optimizer.state_dict(), ...) on one rank, {ADVICE}"
        )

    def alone(self, patience: float = PATIENCE) -> bool:
        """Whether a save since the last step was begun on some ranks alone. Called when a program ends."""
        if self._store is None:
            return False
        try:
            if self.count == self._met:
                return self._store.check([f"{self._key} {self.count + 1}"])
            until = time.monotonic() + patience
            while (begun := self._store.add(f"{self._key} {self.count}", 0)) < self._ranks:
                if time.monotonic() > until:
                    return begun > 0
                time.sleep(0.1)
        except RuntimeError:  # the store's process is gone
            pass
        return False

    def tell_at_exit(self) -> None:
        if self.alone():
            print(f"{NAME} (rank {self._rank}): {self.unlike(1, 0)}", file=sys.stderr, flush=True)


class Save:
    """One state dict, whose pieces share it; ``begin`` counts its first pickling. A copy counts nothing, because a
    thread may save it at any time."""

    def __init__(self, saves: Saves | None) -> None:
        self._saves = saves

    def __reduce__(self) -> tuple[type[Save], tuple[None]]:  # torch's asynchronous save copies attributes of tensors
        return Save, (None,)

    def begin(self) -> None:
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.begun()
