"""Learning rates of param groups, and the states of schedulers, which have an entry for each param group."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lwopt_backend.groups import Groups
from lwopt_backend.runtime.nested import with_values

# One rate over groups that were made with unlike ones.


class MadeRates:
    """The rates with which the param ``groups`` of an optimizer were made. Schedules also overwrite ``initial_lr``."""

    def __init__(self, groups: Groups) -> None:
        self._made = [float(group["lr"]) for group in groups]
        self.told = len(set(self._made)) < 2

    def warning(self, groups: Groups) -> str | None:
        """A sentence, once, if unlike rates have become one that is larger than the smallest of them. Called in every
        step. The zero of a warm-up and the floor of a decay are no larger."""
        rates = set() if self.told else {float(group["lr"]) for group in groups}
        least, now = min(self._made, default=0.0), max(rates, default=0.0)
        if len(rates) != 1 or now <= least:
            return None
        self.told = True
        given = ", ".join(f"{rate:g}" for rate in self._made)
        return (
            f"all param groups have the learning rate {now:g}, also those that were made with {least:g}: a schedule or "
            f"a loop wrote one rate over the rates {given}. Give the schedule one rate for each group, such as max_lr="
            f"[{given}], or multiply: group['lr'] = group['initial_lr'] * factor"
        )

    def warn(self, name: str, groups: Groups) -> None:
        """Warn of the optimizer ``name`` if there is a reason."""
        if (said := self.warning(groups)) is not None:
            warnings.warn(f"{name}: {said}", stacklevel=4)


# States of schedulers: torch's, nested ones included, transformers' and timm's. DeepSpeed's only count steps.

OF_RATES = {"base_lrs", "_last_lr", "max_lrs", "min_lrs", "_init_lrs", "base_values", "warmup_steps"}
BY_GROUP = OF_RATES | {"lr_lambdas", "base_momentums", "max_momentums"}
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # that schedulers read and write in param groups
IN_GROUPS = (*RATES[1:], "base_momentum", "max_momentum")
Lists = Sequence[Sequence[Any]]


def by_group(states: Sequence[Any], counts: Sequence[int], change: Callable[[str, Lists], list[Any]]) -> Any:
    """The first of several states of one form, with ``change(key, lists)`` in place of each list by param group, at any
    depth. ``counts`` are the numbers of param groups, by state. Containers keep their types."""

    def of_key(key: Any, _: Any) -> Any:
        found: list[Any] = [state.get(key) if isinstance(state, dict) else None for state in states]
        fit = all(isinstance(each, (list, tuple)) and len(each) == count for each, count in zip(found, counts))
        return change(key, found) if key in BY_GROUP and fit else by_group(found, counts, change)

    first = states[0]
    if isinstance(first, dict):
        return with_values(first, of_key)
    if type(first) in (list, tuple):
        alike = all(type(each) is type(first) and len(each) == len(first) for each in states)
        entries = zip(*states) if alike else zip(first)
        return type(first)([by_group(each, counts, change) for each in entries])
    return first


def regrouped(state: Any, order: Sequence[int], count: int) -> Any:
    """A scheduler's state for other param groups: ``order`` are their numbers among the ``count`` groups it is of."""
    return by_group([state], [count], lambda key, lists: [lists[0][number] for number in order])


def joined(states: Sequence[Any], numbers: Sequence[Sequence[int]]) -> Any:
    """The state of a scheduler over all param groups of a model, from those of its parts. ``numbers`` are those of each
    part's groups among all."""
    places = {number: (part, place) for part, of_part in enumerate(numbers) for place, number in enumerate(of_part)}

    def of_all(key: str, lists: Lists) -> list[Any]:
        return [lists[part][place] for _, (part, place) in sorted(places.items())]

    return by_group(states, [len(of_part) for of_part in numbers], of_all)


def restored(state: Any) -> Any:
    """A state that torch.distributed.checkpoint stored, which makes text of the keys of MultiStepLR's Counter."""

    def of_key(key: Any, value: Any) -> Any:
        if key == "milestones" and isinstance(value, dict) and all(str(step).isdecimal() for step in value):
            return Counter({int(step): count for step, count in value.items()})
        return restored(value)

    if isinstance(state, dict):
        return with_values(state, of_key)
    return [*map(restored, state)] if isinstance(state, list) else state
