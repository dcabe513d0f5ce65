"""From backward passes to a step: everything has left, all ranks are well, and all know who has gradients."""

from __future__ import annotations

import torch
from torch import nn

from lwopt_backend.owned.checks import changes
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.rule_arguments import NAME
from lwopt_backend.runtime.backward import BackwardPasses
from lwopt_backend.runtime.presence import Presence


class Backward:
    """Follows backward passes of ``model``, whose parameters ``core`` holds. All methods are called on all ranks."""

    def __init__(self, core: OwnedCore, model: nn.Module) -> None:
        self._core = core
        self._model = model
        self._manager = core.manager
        self._passes = BackwardPasses(core.manager, model)
        self._agreed: tuple[int, list[Presence]] | None = None  # after so many passes
        self._unread: Presence | None = None

    def finish(self) -> list[Presence]:
        """Which parameters have a gradient on any rank. Raises RuntimeError, on all ranks, if one is not well."""
        if self._agreed is None or self._agreed[0] != self._manager.passes:
            problem = self._agree()
            if problem:
                self._manager.drop_gradients()
                raise RuntimeError(f"{NAME}: {problem}")
        assert self._agreed is not None
        self._manager.take_changed()
        return self._agreed[1]

    def stepped(self) -> None:
        """The gradients have been used."""
        self._agreed = None

    def discard(self) -> None:
        """Forget all gradients. Ranks whose pass was interrupted meet the others here, or at their step."""
        if self._passes.interrupted or self._manager.has_unused_gradients:
            self._agree()
        self._agreed = None
        self._manager.drop_gradients()

    def _agree(self) -> str | None:
        """Bring on its way what is left of a backward pass, and hear from all ranks; what is wrong anywhere."""
        interrupted = self._passes.interrupted
        changed = changes(self._model, self._manager.names, self._manager.params, self._manager.places)
        self._passes.forget()
        self._manager.finish()
        device = self._manager.params[0].device
        flags = torch.tensor([interrupted, bool(changed)], dtype=torch.int32, device=device)
        presences = self._core.presences(flags)
        # Reading what the others say waits for the device; where that costs, it is read at the next step.
        unread, self._unread = self._unread, presences[0]
        asked = presences[0] if device.type == "cpu" or interrupted or changed else unread
        self._agreed = (self._manager.passes, presences)
        if asked is None:
            return None
        interrupted_anywhere, changed_anywhere = asked.anywhere()[-2:]
        if changed:
            return changed[0]
        if changed_anywhere:
            return "on another rank the model's parameters were changed; see its error"
        if interrupted_anywhere:
            where = "this rank" if interrupted else "another rank"
            return f"a backward pass ended in an exception on {where}; all gradients are dropped, on all ranks"
        return None
