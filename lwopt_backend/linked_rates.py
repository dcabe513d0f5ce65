"""Learning rates of several param groups that a scheduler may treat as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ParamGroup(dict):
    """A param group that keeps its learning-rate ratio to its peers when one rate is written to all of them.

    The matrix rule and AdamW need learning rates that differ by a factor of 10 to 100. Many schedulers write a single
    rate to every group (DeepSpeed's WarmupLR with one ``warmup_max_lr``), which would give AdamW Muon's. So a rate that
    is written to every group in turn is taken as the optimizer's ``lr``, and each group holds it times the ratio it was
    configured with. A scheduler that has once written different rates knows its groups: from then on every rate is
    taken as it is written. ``group["lr"]`` is always the rate in use.
    """

    def __init__(self, group: Mapping[str, Any], rates: LinkedRates, index: int) -> None:
        super().__init__(group)
        self._rates = rates
        self._index = index

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self._rates.written(self._index, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class LinkedRates:
    """The learning rates written to a list of param groups, round by round."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self._ratios = tuple(ratios)
        self._groups: list[ParamGroup] = []
        self._round: dict[int, Any] = {}
        self._per_group = False

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]], rate: float) -> LinkedRates:
        """Ratios of freshly configured groups to the optimizer's ``lr``; with an ``lr`` of 0 there is none to keep."""
        return cls([group["lr"] / rate if rate else 1.0 for group in groups])

    def link(self, groups: Iterable[Mapping[str, Any]]) -> list[ParamGroup]:
        """``groups`` as param groups that know each other, in the order of the ratios."""
        self._groups = [ParamGroup(group, self, index) for index, group in enumerate(groups)]
        self._round = {}
        assert len(self._groups) == len(self._ratios)
        return self._groups

    def written(self, index: int, value: Any) -> None:
        """Take note that ``value`` was written to group ``index``."""
        if index in self._round:  # the last round was left unfinished: somebody wrote to a single group
            self._round = {}
        self._round[index] = value
        if len(self._round) < len(self._groups):
            return
        values, self._round = list(self._round.values()), {}
        self._per_group |= any(value != values[0] for value in values)
        if not self._per_group:
            for group, ratio in zip(self._groups, self._ratios):
                dict.__setitem__(group, "lr", value * ratio)
