"""Learning rates of param groups, and the states of schedulers, which have an entry for each param group."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lwopt_backend.config.hosts import NAME
from lwopt_backend.groups import Group, Groups
from lwopt_backend.groups.registry import MATRIX_RULES, arguments, rule_of
from lwopt_backend.runtime.collectives import rule_name
from lwopt_backend.runtime.nested import with_values

# Rates that matrices hardly move at, and one rate over groups that were made with unlike ones.

LEAST_RATE = 2e-3  # below it, an orthogonal update without AdamW's factor moves a large matrix much less than AdamW


def hardly_moves(group: Group, rate: float) -> bool:
    """Whether a param group's matrices hardly move at a learning ``rate``, which was chosen for AdamW."""
    if not 0 < rate * group.get("extra_scale_factor", 1.0) < LEAST_RATE or rule_of(group) not in MATRIX_RULES:
        return False
    return MATRIX_RULES[rule_of(group)].build(**arguments(group)).needs_large_rate


def small_rate(groups: Groups) -> str | None:
    """A warning about matrices whose learning rate was chosen for AdamW, while the updates are those of Muon."""
    small = [group for group in groups if hardly_moves(group, float(group["lr"]))]
    if not small:
        return None
    count = sum(len(group["params"]) for group in small)
    return (
        f"{rule_name(small[0])} trains {count} parameter(s) at a learning rate of {float(small[0]['lr']):g} with the "
        f"factor {small[0].get('adjust_lr_fn') or 'original'!r}, at which matrices hardly move. Give it a rate for "
        "Muon, such as 0.02; or keep the rate and set 'adjust_lr_fn' to 'match_rms_adamw', which makes updates as "
        "large as AdamW's"
    )


def warn_of_small_rate(groups: Groups) -> None:
    """Warn once of matrices that would hardly move."""
    if (slow := small_rate(groups)) is not None:
        warnings.warn(f"{NAME}: {slow}", stacklevel=5)


class MadeRates:
    """The rates with which the param ``groups`` of an optimizer were made, beside those with which it steps.

    A schedule or a loop may write a rate that was meant for AdamW over that of the matrices. A rate that rises may be a
    warm-up: it is judged when it no longer does, by the largest so far. ``initial_lr``, which torch's schedules write
    and a resumed run has, counts. Schedules also overwrite it.
    """

    def __init__(self, groups: Groups) -> None:
        self._made = [float(group["lr"]) for group in groups]
        self._rates = [-math.inf] * len(self._made)  # of the last step
        self._largest = [0.0] * len(self._made)
        self._idle = [0] * len(self._made)  # steps in which the rate has not risen
        self.told = False

    def loaded(self, groups: Groups) -> None:
        """Note rates of a checkpoint. Without ``initial_lr``, nothing tells those of its earlier steps."""
        self._largest = [
            max(largest, float(g.get("initial_lr", math.inf))) for largest, g in zip(self._largest, groups)
        ]

    def warning(self, groups: Groups, idle: int = 0) -> str | None:
        """A sentence, once, if AdamW's rate trains matrices, or if unlike rates have become one that is larger than the
        smallest of them. Called in every step that is taken. The zero of a warm-up and the floor of a decay are no
        fault. A warm-up's first rate may last ``idle`` steps longer than one."""
        if self.told or len(groups) != len(self._made):  # a torch optimizer among several modules takes further groups
            return None
        rates = [float(group["lr"]) for group in groups]
        one = len(set(rates)) == 1 and len(set(self._made)) > 1
        slow = None
        for number, (group, rate) in enumerate(zip(groups, rates)):
            largest = self._largest[number] = max(self._largest[number], rate, float(group.get("initial_lr", 0.0)))
            self._idle[number] = 0 if rate > self._rates[number] else self._idle[number] + 1
            if self._idle[number] == 1 + idle and self._made[number] > largest and hardly_moves(group, largest):
                slow = number if slow is None else slow
        self._rates = rates
        if slow is None and not (one and rates[0] > min(self._made)):
            return None
        self.told = True
        given = ", ".join(f"{rate:g}" for rate in self._made)
        advice = (
            f"Give the schedule one rate for each group, such as max_lr=[{given}], or multiply: group['lr'] = "
            "group['initial_lr'] * factor"
        )
        if one:
            now, made = (rates[0], min(self._made)) if slow is None else (self._largest[slow], self._made[slow])
            return (
                f"all param groups have the learning rate {now:g}, also those that were made with {made:g}: a "
                f"schedule or a loop wrote one rate over the rates {given}. {advice}"
            )
        assert slow is not None
        return (
            f"param group {slow} ({rule_name(groups[slow])}), made with the learning rate {self._made[slow]:g}, has "
            f"trained at {self._largest[slow]:g} at most, at which matrices hardly move: a schedule or a loop wrote a "
            f"rate for AdamW over the rates {given}. {advice}"
        )

    def warn(self, name: str, groups: Groups, idle: int = 0) -> None:
        """Warn of the optimizer ``name`` if there is a reason."""
        if (said := self.warning(groups, idle)) is not None:
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


def joined_schedules(states: Sequence[Any], numbers: Sequence[Sequence[int]]) -> Any:
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
