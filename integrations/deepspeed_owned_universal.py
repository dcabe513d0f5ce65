"""Universal checkpoints in engines with owned storage: an owner takes its pieces of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.integrations.deepspeed_owned_state import publish, put
from lwopt_backend.integrations.deepspeed_universal_choice import STEP, Choice, Stepped, Trained
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.members import Member
from lwopt_backend.plan.buffers.arrangement import Piece
from lwopt_backend.runtime.ranks import Collectives


class OwnedStorage:
    """What an engine owns of the parameters that ``optimizer``, which is ours, trains, in ``core``."""

    def __init__(self, optimizer: Any, core: OwnedCore, ranks: Collectives) -> None:
        self._optimizer = optimizer
        self._core = core
        self.ranks: Sequence[Collectives] = [ranks]

    def groups(self) -> Sequence[Mapping[str, Any]]:
        groups: Sequence[Mapping[str, Any]] = self._optimizer.param_groups
        return groups

    def stepped(self) -> list[Stepped]:
        """Every parameter by itself: each has a count of its own."""
        return [
            Stepped(member.group, member.rule, (Trained(member.name, tuple(member.param.shape), member.blocks),))
            for member in self._core.members
        ]

    def put(self, choice: Choice, with_state: bool) -> None:
        """Weights, into masters where there are, states, and what rules keep beside them."""
        put(self._core, _Universal(choice), weights=True, state=with_state)

    def finish(self, choice: Choice, with_state: bool) -> None:
        """Weights go to all ranks."""
        publish(self._core)
        self._optimizer.take_loaded(choice.options, {})


class _Universal:
    """What goes into an engine, piece by piece; of every instance, as each reads for itself."""

    of_first_instance = False

    def __init__(self, choice: Choice) -> None:
        self._params = choice.params

    def weights(self, member: Member, number: int, piece: Piece) -> Tensor:
        return self._params[member.name].best.piece(piece.start, piece.stop).read()

    def state(self, member: Member, number: int, piece: Piece, key: str) -> Tensor:
        param = self._params[member.name]
        if key == STEP:
            return torch.tensor(param.step)
        return param.states[key].piece(piece.start, piece.stop).read()

    def owner(self) -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
        return {name: param.owner_states for name, param in self._params.items()}
