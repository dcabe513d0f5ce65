"""Learning rates of several param groups that a scheduler may treat as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OWN_RATES = "own_rates"  # a group's key, kept in checkpoints: its rate is taken as it is written


class ParamGroup(dict[str, Any]):
    """A param group that keeps its learning-rate ratio to its peers when one rate is written to all of them.

    The matrix rule and AdamW need learning rates that differ by a factor of 10 to 100. Many schedulers write a single
    rate to every group (DeepSpeed's WarmupLR with one ``warmup_max_lr``), which would give AdamW Muon's. So a rate that
    is written to every group in turn is taken as the optimizer's ``lr``, and each group holds it times the ratio it was
    configured with. A scheduler that has once written rates in another ratio knows its groups: from then on every rate
    is taken as it is written. So it is from the start where all groups were configured with one rate.
    ``group["lr"]`` is always the rate in use.
    """

    def __init__(self, group: Mapping[str, Any], rates: LinkedRates, index: int) -> None:
        super().__init__(group)
        self._rates = rates
        self._index = index

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self._rates.written(self._index, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class LinkedRates:
    """The learning rates written to a list of param groups, round by round."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self._ratios = tuple(ratios)
        self._groups: list[ParamGroup] = []
        self._round: list[Any] = []  # what was written to the first groups, in their order

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]], rate: float) -> LinkedRates:
        """Ratios of freshly configured groups to the optimizer's ``lr``; with an ``lr`` of 0 there is none to keep."""
        return cls([group["lr"] / rate if rate else 1.0 for group in groups])

    def link(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``groups`` as param groups that know each other, in the order of the ratios."""
        before, self._round = self._groups, []
        self._groups = [ParamGroup(group, self, index) for index, group in enumerate(groups)]
        assert len(self._groups) == len(self._ratios)
        if len(set(self._ratios)) == 1 or any(group.get(OWN_RATES) for group in [*before, *self._groups]):
            self._unlink()
        return [*self._groups]

    def written(self, index: int, value: Any) -> None:
        """Take note that ``value`` was written to group ``index``."""
        if self._groups[index].get(OWN_RATES):
            return
        # A schedule writes to the groups in their order; anything else is somebody writing to a single group.
        self._round = [*self._round, value] if index == len(self._round) else [value] if index == 0 else []
        if len(self._round) < len(self._groups):
            return
        values, self._round = self._round, []
        if all(written == value for written in values):
            for group, ratio in zip(self._groups, self._ratios):
                dict.__setitem__(group, "lr", value * ratio)
        elif not self._in_ratio(values):
            self._unlink()

    def _in_ratio(self, values: Sequence[Any]) -> bool:
        """Rates scaled together, by hand or by a schedule of factors, say nothing against the ratio."""
        pairs = list(zip(values, self._ratios))
        first, ratio = max(pairs, key=lambda pair: pair[1])
        return all(math.isclose(value * ratio, first * other, rel_tol=1e-6) for value, other in pairs)

    def _unlink(self) -> None:
        for group in self._groups:
            dict.__setitem__(group, OWN_RATES, True)
