"""Param groups whose learning rates follow each other, and those of AdamW alone, with torch's keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.config.choices import Rules
from lwopt_backend.config.param_groups import OURS, Groups
from lwopt_backend.config.registry import ELEMENTWISE_RULES, MATRIX_RULES, AdamWOptions, option_names
from lwopt_backend.runtime.collectives import RECORDERS, Collectives, Recorder

# Param groups of AdamW alone have the keys of torch.optim.AdamW's, so that state dicts go from one to the other:
# torch.distributed.checkpoint reads a flattened state dict by the keys that the groups have. What we know of a group
# beside them is in the ``marks`` of its ``ParamGroup``.


class _WithoutGroups(torch.optim.AdamW):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's own imports its compiler, which takes longer than to read and write a gigabyte."""


@functools.cache
def torchs() -> Mapping[str, Any]:
    """torch.optim.AdamW's options of a group, with their defaults."""
    return _WithoutGroups([torch.zeros(1)]).defaults


@functools.cache
def fixed() -> Mapping[str, Any]:
    """Those of them that are no options of ours; they are there for others to read."""
    return {key: value for key, value in torchs().items() if key not in AdamWOptions.model_fields}


def is_alone(groups: Groups) -> bool:
    """Whether AdamW trains everything. ``groups`` are as they come from the routing, with ``rule``."""
    return all(group["rule"] == "adamw" for group in groups)


def marks_of(groups: Groups) -> list[dict[str, Any]]:
    """By group, what is not to stand among its keys; empty where other rules train, too."""
    if not is_alone(groups):
        return [{} for _ in groups]
    # Options that torch's does not have are there where they say something.
    ours = {k: field.default for k, field in AdamWOptions.model_fields.items() if k not in torchs()}
    return [{**ours, **{key: group[key] for key in OURS if key in group}} for group in groups]


def shown(groups: Groups) -> list[dict[str, Any]]:
    """Copies of the groups, with all of torch's keys where AdamW trains everything."""
    return [{**(fixed() if is_alone(groups) else {}), **group} for group in groups]


def check(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for an option of torch.optim.AdamW that ours would not follow."""
    for key, value in fixed().items():
        if group.get(key, value) != value:
            raise ValueError(
                f"{where}: {key!r} is {group[key]!r}, but AdamW here has {value!r} only; set it to that, if the "
                "training so far allows it"
            )


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
    (``is_alone``).
    """

    def __init__(
        self, group: Mapping[str, Any], rates: LinkedRates, index: int, marks: Mapping[str, Any] | None = None
    ) -> None:
        self._marks = dict(marks or {})
        if self._marks:
            check(group, f"param group {index}")
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
            check({key: value}, f"param group {self._index}")
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

    def __init__(self, ratios: Sequence[float], marks: Groups = ()) -> None:
        self._ratios = tuple(ratios)
        self._marks = list(marks) or [{} for _ in self._ratios]
        self._alike = len(set(self._ratios)) == 1
        self._groups: list[ParamGroup] = []
        self._round: list[Any] = []  # what was written to the first groups, in their order

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]], rate: float, marks: Groups = ()) -> LinkedRates:
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
        """Record that ``value`` was written to group ``index``."""
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
            return
        # Rates scaled together, by hand or by a schedule of factors, say nothing against the ratio.
        first, ratio = max(zip(values, self._ratios), key=lambda pair: pair[1])
        if not all(math.isclose(v * ratio, first * r, rel_tol=1e-6) for v, r in zip(values, self._ratios)):
            self._unlink()

    def _unlink(self) -> None:
        for group in self._groups:
            dict.__setitem__(group, OWN_RATES, True)


NAME = "LayerWiseOptimizer"


def saved(optimizer: torch.optim.Optimizer, state_of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A state dict, with torch's hooks around ``state_of``, which makes it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state_dict = state_of()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = after(optimizer, state_dict) or state_dict
    return state_dict


def loaded(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], take: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict with torch's hooks around ``take``, which takes it."""
    state_dict = dict(state_dict)  # torch's hooks may change the one they are given
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    take(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


class LinkedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are ``ParamGroup``s, as many as it was made with."""

    name = NAME  # for errors
    _rates: LinkedRates | None = None  # once the groups are linked, which the base class's constructor makes one by one
    _plan_digest: str | None = None  # once there is a plan
    _recorder: Recorder | None = None  # while steps are measured

    @property
    def plan_digest(self) -> str:
        """The name of this rank's plan: the ``digest`` of ``lwopt plan`` for the same model, ranks and options.

        Raises RuntimeError before there is a plan.
        """
        if self._plan_digest is None:
            raise RuntimeError(
                f"this {self.name} has no plan yet, so plan_digest has no value; "
                "under DeepSpeed it plans in deepspeed.initialize, with sharded_later in the first step: ask after that"
            )
        return self._plan_digest

    def record_metrics(self, on: bool = True) -> None:
        """From now on measure steps for ``metrics``, or stop. Off at first, and then nothing is measured."""
        self._recorder = Recorder() if on else None
        if self._recorder is not None:
            RECORDERS.add(self._recorder)

    def metrics(self) -> dict[str, Any]:
        """What the steps since the last call took, the same on all ranks, which all call it after a step.

        - ``grad_norm``: before the last clipping, if this optimizer or DeepSpeed clipped or measured it; without the
          parameters in ``clip_group_norms``
        - ``update_rms``: by rule, the root mean square of what a step changes in a weight
        - ``orthogonality``: by matrix rule, of a sampled update that one rank computed, how far its shorter side is
          from orthogonal, 0 if it is: ||U U^T - 1|| / sqrt(rows)
        - ``exchange_bytes``: what the busiest rank has sent
        - ``seconds``: of the busiest rank, by part: exchange, rule, elementwise and norm

        Other optimizers of the process that step meanwhile count, too. Raises RuntimeError without ``record_metrics``.
        """
        if self._recorder is None:
            raise RuntimeError(f"{self.name}: call record_metrics() before the steps that metrics() is to measure")
        norm, groups = self._norms_before_clipping()
        norms = {} if norm is None else {"grad_norm": float(norm)}
        named = {"clip_group_norms": {name: float(each) for name, each in groups.items()}} if groups else {}
        return {**norms, **named, **self._recorder.take(self._everyone())}

    def _norms_before_clipping(self) -> tuple[Any, Mapping[str, Any]]:
        """That of the gradients in no clip group, None if nothing measured it, and those of the clip groups."""
        raise NotImplementedError

    def _everyone(self) -> Collectives:
        """All ranks that step together."""
        raise NotImplementedError

    def _begin(self, rules: Rules, groups: Groups, marks: Groups = (), *, rate: float | None = None) -> None:
        """Link the groups as they were configured, and set the ``defaults`` that schedulers read.

        ``rate`` is the optimizer's ``lr``; by default the matrix rule's, or the other's where that trains everything.
        """
        main = rules.matrix if any(group["rule"] in MATRIX_RULES for group in groups) else rules.elementwise
        self.defaults = main.options.model_dump()
        found = [group[key] for group in groups for key in CYCLED if key in option_names(group)]
        if found:  # torch's OneCycleLR and CyclicLR ask for either name, DeepSpeed's OneCycle for ``betas`` alone
            momentum = found[0] if isinstance(found[0], (int, float)) else found[0][0]
            self.defaults = {"momentum": momentum, "betas": (momentum,), **self.defaults}
        self._rates = LinkedRates.of(groups, main.lr if rate is None else rate, marks)
        self.link_groups(self.param_groups)

    def link_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Replace the param groups, e.g. by the plain dictionaries of a checkpoint."""
        assert self._rates is not None
        self.param_groups = self._rates.link(groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class's constructor. Raises RuntimeError afterwards: the plan knows no later parameters."""
        if self._rates is not None:
            raise RuntimeError(f"{self.name} takes no param group after it was made; give the constructor all groups")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self.name} belongs to its process groups and cannot be copied or pickled; use state_dict()")
