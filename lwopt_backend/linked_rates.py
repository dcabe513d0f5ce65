"""Param groups as schedulers write to them: one rate for all keeps their ratio, one momentum reaches every rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lwopt_backend import torch_adamw
from lwopt_backend.registry import ELEMENTWISE_RULES, option_names

OWN_RATES = "own_rates"  # a group's key, kept in checkpoints: whether its rate is taken as it is written
CYCLED = ("momentum", "betas")  # schedulers write a momentum under either name, the same for all groups


class ParamGroup(dict[str, Any]):
    """A param group to which a scheduler may write one rate and one momentum for all groups.

    *Rates.* The matrix rule and AdamW need learning rates that differ by a factor of 10 to 100. Many schedulers write a
    single rate to every group (torch's OneCycleLR with one ``max_lr``, DeepSpeed's WarmupLR), which would give AdamW
    Muon's. So a rate that is written to every group in turn is taken as the optimizer's ``lr``, and each group holds it
    times the ratio it was configured with. A scheduler that has once written rates in another ratio knows its groups:
    from then on every rate is taken as it is written. So it is from the start where all groups were configured with one
    rate. ``group["lr"]`` is always the rate in use.

    *Momentum.* Of ``momentum`` and ``betas`` a group keeps the one that its rule has. A write of the other sets it:
    ``betas[0]`` is the momentum. A rule with neither ignores both, and so does an element-wise rule with a momentum of
    0, whose state has no place for one. Reading works likewise, for torch's schedulers read ``betas`` of every group to
    write its first number.

    ``marks`` are values that can be read by their keys and are in no list of them, as long as no others were written
    (``torch_adamw``).
    """

    def __init__(
        self, group: Mapping[str, Any], rates: LinkedRates, index: int, marks: Mapping[str, Any] | None = None
    ) -> None:
        self._marks = dict(marks or {})
        if self._marks:
            torch_adamw.check(group, f"param group {index}")
        super().__init__({k: v for k, v in group.items() if k not in self._marks or v != self._marks[k]})
        self._rates = rates
        self._index = index
        names = option_names(self) if "rule" in self or "rule" in self._marks else list(self)
        self._has = [key for key in CYCLED if key in names]
        for key in CYCLED:
            if key not in self._has:
                self.pop(key, None)  # a checkpoint may bring what a scheduler once left there
        self._still = "momentum" in self and not self["momentum"] and self["rule"] in ELEMENTWISE_RULES

    def __setitem__(self, key: str, value: Any) -> None:
        if key in CYCLED and (self._still or key not in self._has):
            if self._has == ["betas"]:
                self["betas"] = (value, *self["betas"][1:])
            elif self._has == ["momentum"] and not self._still:
                self["momentum"] = value[0]
            return
        if self._marks:
            torch_adamw.check({key: value}, f"param group {self._index}")
        super().__setitem__(key, value)
        if key == "lr":
            self._rates.written(self._index, value)

    def __missing__(self, key: str) -> Any:
        if key in self._marks:
            return self._marks[key]
        if key == "betas":
            return (self["momentum"],) if self._has else ()
        if key == "momentum" and self._has:
            return self["betas"][0]
        raise KeyError(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class LinkedRates:
    """The learning rates written to a list of param groups, round by round.

    ``marks`` are, by group, those of the ``ParamGroup``s.
    """

    def __init__(self, ratios: Sequence[float], marks: Sequence[Mapping[str, Any]] = ()) -> None:
        self._ratios = tuple(ratios)
        self._marks = list(marks) or [{} for _ in self._ratios]
        self._alike = len(set(self._ratios)) == 1
        self._groups: list[ParamGroup] = []
        self._round: list[Any] = []  # what was written to the first groups, in their order

    @classmethod
    def of(
        cls, groups: Iterable[Mapping[str, Any]], rate: float, marks: Sequence[Mapping[str, Any]] = ()
    ) -> LinkedRates:
        """Ratios of freshly configured groups to the optimizer's ``lr``; with an ``lr`` of 0 there is none to keep."""
        return cls([group["lr"] / rate if rate else 1.0 for group in groups], marks)

    def link(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``groups`` as param groups that know each other, in the order of the ratios."""
        before, self._round = self._groups, []
        pairs = zip(groups, self._marks, strict=True)
        self._groups = [ParamGroup(group, self, index, marks) for index, (group, marks) in enumerate(pairs)]
        for group, marks in zip(self._groups, self._marks):
            if self._alike or (marks and not group.get(OWN_RATES)):
                group.pop(OWN_RATES, None)
            elif not marks:  # from the beginning: a flattened checkpoint is read by the keys that there are
                group.setdefault(OWN_RATES, False)
        if not self._alike and any(group.get(OWN_RATES) for group in [*before, *self._groups]):
            self._unlink()
        return [*self._groups]

    def written(self, index: int, value: Any) -> None:
        """Take note that ``value`` was written to group ``index``."""
        if self._alike or self._groups[index].get(OWN_RATES):
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
