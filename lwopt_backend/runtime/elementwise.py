"""Element-wise parameters: a torch optimizer, stepped on whatever tensors this rank stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.rules.step_hooks import inner_steps
from lwopt_backend.runtime.storage import Slices


@dataclass(frozen=True)
class Counters:
    """What an optimizer keeps as numbers of Python, which we keep in tensors without dimensions, in every part's state.

    ``state`` has the type of those in its state; ``group``, of those in its param group, our key and the type.
    """

    state: Mapping[str, type] = field(default_factory=dict)
    group: Mapping[str, tuple[str, type]] = field(default_factory=dict)

    def values(self, state: Mapping[str, Tensor]) -> tuple[float, ...]:
        """What a part has counted so far."""
        return tuple(state[key].item() for key in (*self.state, *(key for key, _ in self.group.values())))


class ElementwiseStepper:
    """The optimizer of one param group, made at its first step with ``optimizer_class`` and kept.

    An element-wise update does not care how parameters are cut: each rank steps its own elements, nothing travels.
    All state stays in the parts' own dictionaries, so nothing depends on which of them are stepped together; those
    that have counted differently go one after the other.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], counters: Counters) -> None:
        self._class = optimizer_class
        self._counters = counters
        self._inner: torch.optim.Optimizer | None = None

    def step(self, options: Mapping[str, Any], parts: Sequence[Slices]) -> None:
        """One step over ``parts`` with the arguments ``options``."""
        alike: dict[tuple[float, ...], list[Slices]] = {}
        for part in parts:
            alike.setdefault(self._counters.values(part.state), []).append(part)
        for some in alike.values():
            self._step(options, some)

    def _step(self, options: Mapping[str, Any], parts: Sequence[Slices]) -> None:
        values = [part.value for part in parts]
        if self._inner is None:
            self._inner = self._class(values, **options)
        inner, (group,) = self._inner, self._inner.param_groups
        group.update({key: value for key, value in options.items() if key in group}, params=values)
        for name, (key, kind) in self._counters.group.items():
            group[name] = kind(parts[0].state[key].item())
        inner.state.clear()
        for part in parts:
            part.value.grad = part.grad
            inner.state[part.value] = self._given(part.state)
        with inner_steps():
            inner.step()
        for part in parts:
            self._take(part.state, inner.state[part.value])
        # Some optimizers count in the state of one parameter only; all parts have counted alike so far.
        for key in self._counters.state:
            count = max(inner.state[value][key] for value in values)
            for part in parts:
                part.state[key].fill_(count)
        for name, (key, _) in self._counters.group.items():
            for part in parts:
                part.state[key].fill_(group[name])
        group["params"] = []
        inner.state.clear()

    def _given(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """A part's state as the optimizer wants it."""
        of_group = {key for key, _ in self._counters.group.values()}
        kinds = self._counters.state
        return {
            key: kinds[key](value.item()) if key in kinds else value
            for key, value in state.items()
            if key not in of_group
        }

    def _take(self, state: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
        """Tensors that the optimizer put in place of those it was given, into those."""
        for key, value in after.items():
            if isinstance(value, Tensor) and value is not state[key]:
                state[key].copy_(value)
