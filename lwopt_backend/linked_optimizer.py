"""What our optimizers have in common: param groups that a scheduler may treat as one, and a plan with a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.chosen import Rules
from lwopt_backend.linked_rates import CYCLED, LinkedRates
from lwopt_backend.registry import MATRIX_RULES, option_names

Groups = Sequence[Mapping[str, Any]]


class LinkedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are ``ParamGroup``s, as many as it was made with."""

    _rates: LinkedRates | None = None  # once the groups are linked, which the base class's constructor makes one by one
    _plan_digest: str | None = None  # once there is a plan

    @property
    def plan_digest(self) -> str:
        """The name of this rank's plan: the ``digest`` of ``lwopt plan`` for the same model, ranks and options.

        Raises RuntimeError before there is a plan.
        """
        if self._plan_digest is None:
            raise RuntimeError(
                f"this {getattr(self, 'name', type(self).__name__)} has no plan yet, so plan_digest has no value; "
                "under DeepSpeed it plans in deepspeed.initialize, with sharded_later in the first step: ask after that"
            )
        return self._plan_digest

    def _begin(self, rules: Rules, groups: Groups, marks: Groups = (), *, rate: float | None = None) -> None:
        """Link the groups as they were configured, and show schedulers what they look for."""
        self.defaults = defaults_of(rules, groups)
        self._rates = LinkedRates.of(groups, rate_of(rules, groups) if rate is None else rate, marks)
        self.link_groups(self.param_groups)

    def link_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Go on with ``groups``, as after a checkpoint, which brings plain dictionaries."""
        assert self._rates is not None
        self.param_groups = self._rates.link(groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class's constructor. Raises RuntimeError afterwards: the plan knows no later parameters."""
        if self._rates is not None:
            name = getattr(self, "name", "LayerWiseOptimizer")
            raise RuntimeError(f"{name} takes no param group after it was made; give all groups to the constructor")
        super().add_param_group(param_group)


def rate_of(rules: Rules, groups: Groups) -> float:
    """The optimizer's ``lr``: the matrix rule's, or the other's where that trains everything."""
    return (rules.matrix if _has_matrices(groups) else rules.elementwise).lr


def defaults_of(rules: Rules, groups: Groups) -> dict[str, Any]:
    """What schedulers read of the optimizer: options, and ``momentum`` and ``betas`` if any group has one of them.

    torch's OneCycleLR and CyclicLR ask for either, DeepSpeed's OneCycle for ``betas`` alone.
    """
    defaults = (rules.matrix if _has_matrices(groups) else rules.elementwise).options.model_dump()
    found = [group[key] for group in groups for key in CYCLED if key in option_names(group)]
    if found:
        momentum = found[0] if isinstance(found[0], (int, float)) else found[0][0]
        defaults = {"momentum": momentum, "betas": (momentum,), **defaults}
    return defaults


def _has_matrices(groups: Groups) -> bool:
    return any(group["rule"] in MATRIX_RULES for group in groups)
