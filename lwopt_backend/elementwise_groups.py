"""The optimizers of the element-wise param groups, by a group's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.profiler import record_function

from lwopt_backend.registry import ELEMENTWISE_RULES, arguments, is_cautious, optimizer_arguments
from lwopt_backend.runtime.cautious_decay import step_cautiously
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
        given = optimizer_arguments(options)
        if number not in self._steppers:
            entry = ELEMENTWISE_RULES[group["rule"]]
            self._steppers[number] = ElementwiseStepper(entry.optimizer(options), entry.counters(options))
        stepper = self._steppers[number]
        with record_function(of_elementwise(group)):
            if is_cautious(options):
                step_cautiously(stepper, given, options["lr"] * options["weight_decay"], parts)
            else:
                stepper.step(given, parts)
