"""From backward passes to a step: everything has left, all ranks are well, and all know who has gradients."""

from __future__ import annotations

import torch
from torch import nn

from lwopt_backend.owned.checks import NAME, moved
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.runtime.backward import BackwardPasses
from lwopt_backend.runtime.failures import failing
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.watched_model import WatchedModel


class Backward:
    """Follows backward passes of ``model``, whose parameters ``core`` holds. All methods are called on all ranks."""

    def __init__(self, core: OwnedCore, model: nn.Module, name: str = NAME) -> None:
        self._core = core
        self._name = name  # of the optimizer, for errors
        self._manager = core.manager
        self._watched = WatchedModel(model, list(zip(core.manager.names, core.manager.params)), alone=True)
        self._passes = BackwardPasses(core.manager, model)
        self._agreed: tuple[int, list[Presence]] | None = None  # after so many passes

    def finish(self) -> list[Presence]:
        """Which parameters have a gradient on any rank. Raises RuntimeError, on all ranks, if one is not well."""
        if self._agreed is None or self._agreed[0] != self._manager.passes or not self._manager.all_left:
            problem = self._agree()
            if problem:
                self._manager.drop_gradients()
                raise RuntimeError(f"{self._name}: {problem}")
        assert self._agreed is not None
        self._manager.take_changed()
        return self._agreed[1]

    def stepped(self) -> None:
        """The gradients have been used."""
        self._agreed = None

    def discard(self) -> None:
        """Forget all gradients. Ranks whose pass was interrupted meet the others here, or at their step."""
        if self._passes.interrupted or self._manager.has_unused_gradients:
            self._agree(drops=True)
        self._agreed = None
        self._manager.drop_gradients()

    def remove(self) -> None:
        """Follow the model no longer."""
        self._passes.remove()

    def _agree(self, *, drops: bool = False) -> str | None:
        """Bring on its way what is left of a backward pass, and hear from all ranks; what is wrong anywhere.

        All ranks take part in the same collectives, whatever they say, and leave with the same answer. A rank that
        ``drops`` its gradients meets here ranks that want to use theirs.
        """
        mine = self._problem()
        self._passes.forget()
        self._manager.finish()
        passes = self._manager.passes
        flags = torch.tensor([mine is not None, drops, passes, -passes], dtype=torch.int32)
        presences = self._core.presences(flags.to(self._manager.params[0].device))
        self._agreed = (passes, presences)
        with failing(self._hearing):
            any_problem, any_drops, most, fewest = presences[0].anywhere()[-4:]
        if most != -fewest:
            raise RuntimeError(
                f"{self._name}: since the last step some ranks have reduced the gradients of {most} backward passes, "
                f"others of {-fewest}, this rank of {passes}; run equally many on all, or accumulate under no_sync()"
            )
        if any_problem:
            everyone = self._core.holdings[0].sharers.everyone
            return next(f"{said} (rank {rank})" for rank, said in enumerate(everyone.gather_objects(mine)) if said)
        if any_drops and not drops:
            return "another rank has called zero_grad() where this one uses its gradients; all ranks drop them"
        return None

    def _hearing(self) -> str:
        manager = self._manager
        ways = [manager.label(number) for number, bucket in enumerate(manager.buckets) if bucket.under_way]
        what = f"{self._name}: hearing from all ranks which parameters have gradients"
        return f"{what}, with gradients of {', '.join(ways)} on their way," if ways else what

    def _problem(self) -> str | None:
        """What is wrong with the model, or with the last backward pass, on this rank."""
        manager = self._manager
        changed = self._watched.changes() or moved(manager.names, manager.params, manager.places)
        if changed is not None:
            return changed
        if self._passes.interrupted:
            return "a backward pass ended in an exception; all gradients are dropped, on all ranks"
        return None
