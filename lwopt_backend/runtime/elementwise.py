"""Element-wise parameters: torch's own optimizer, stepped on whatever flat tensor this rank stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ElementwiseStepper:
    """A torch.optim optimizer over one flat tensor whose state stays in the outer optimizer.

    An element-wise update does not care how parameters are cut: each rank steps its own elements, nothing travels.
    Sharing the state dictionary is what lets the host's checkpoint code save and restore it.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], flat: Tensor, options: Mapping[str, Any]) -> None:
        self._flat = flat
        self._options = tuple(options)
        self._inner = optimizer_class([flat], **options)

    def step(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """One step of ``flat`` from its ``.grad`` with the hyperparameters in ``group``; changes ``state`` in place."""
        self._inner.param_groups[0].update({key: group[key] for key in self._options})
        self._inner.state[self._flat] = state
        self._inner.step()
