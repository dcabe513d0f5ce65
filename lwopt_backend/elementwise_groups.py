"""The optimizers of the element-wise param groups, by a group's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.profiler import record_function

from lwopt_backend.registry import ELEMENTWISE_RULES, arguments, optimizer_arguments
from lwopt_backend.runtime.elementwise import ElementwiseStepper
from lwopt_backend.runtime.labels import of_elementwise
from lwopt_backend.runtime.storage import Slices


class ElementwiseGroups:
    """Steps parts of element-wise param groups; every group's optimizer is made once."""

    def __init__(self) -> None:
        self._steppers: dict[int, ElementwiseStepper] = {}

    def step(self, number: int, group: Mapping[str, Any], parts: Sequence[Slices]) -> None:
        """One step of ``parts``, of param group ``number``, with the options that it has now."""
        options = arguments(group)
        if number not in self._steppers:
            entry = ELEMENTWISE_RULES[group["rule"]]
            self._steppers[number] = ElementwiseStepper(entry.optimizer(options), entry.counters(options))
        with record_function(of_elementwise(group)):
            self._steppers[number].step(optimizer_arguments(options), parts)
