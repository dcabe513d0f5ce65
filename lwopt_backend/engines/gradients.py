"""Shared by the gradients of all engines: which count, orders of norms, clip groups, and steps that are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lwopt_backend.config.hosts import ClipGroup
from lwopt_backend.runtime.agreement import StepRefused

Pick = Callable[[str], bool]  # selects parameters by name


def everything(name: str) -> bool:
    return True


class ClipGroups:
    """The groups of parameters that are clipped separately, by ``group_of`` a parameter's name, and the rest, None.

    ``norms`` has each group's norm before the last clipping.
    """

    def __init__(self, groups: Mapping[str, ClipGroup], group_of: Mapping[str, str]) -> None:
        self.limits: dict[str | None, float] = {name: group.max_norm for name, group in groups.items()}
        self._group_of = group_of
        self.norms: dict[str | None, Tensor] = {}

    def pick(self, group: str | None) -> Pick:
        """Selects the parameters of a group."""
        return (lambda name: self._group_of.get(name) == group) if self.limits else everything

    def measure(self, groups: Iterable[str | None], norm: Callable[[Pick], Tensor]) -> dict[str | None, Tensor]:
        """The ``norm`` of each of the groups, kept in ``norms``."""
        self.norms.update((group, norm(self.pick(group))) for group in groups)
        return {group: self.norms[group] for group in groups}

    def total(self, norm: Callable[[Pick], Tensor]) -> Tensor:
        """The norm of order 2 of all gradients, by the ``norm`` of each group and of the rest, kept in ``norms``."""
        norms = list(self.measure([None, *self.limits], norm).values())
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.double() for n in norms]))

    @property
    def named(self) -> dict[str, Tensor]:
        """The norms of the groups that have a name, in fp32."""
        return {group: norm.float() for group, norm in self.norms.items() if group is not None}


class Guard:
    """Decides by the norm of all gradients before clipping whether a step is taken. All ranks have the same norm.

    ``on_nonfinite`` decides on NaN and infinity, ``skip_above`` on other norms. "auto" is "skip" with ``skip_above``,
    or if the engine ``skips_by_default``, otherwise "step".
    """

    def __init__(
        self, name: str, on_nonfinite: str, skip_above: float | None, *, skips_by_default: bool = False
    ) -> None:
        if on_nonfinite == "auto":
            on_nonfinite = "skip" if skips_by_default or skip_above is not None else "step"
        self._name, self._on_nonfinite, self._skip_above = name, on_nonfinite, skip_above
        self.is_on = on_nonfinite != "step" or skip_above is not None
        self.skipped = False  # the last step
        self._count = 0

    def skips(self, norm: float) -> bool:
        """Whether a step with gradients of this norm is skipped. Raises StepRefused for "raise"."""
        finite = math.isfinite(norm)
        if not finite and self._on_nonfinite == "raise":
            raise nonfinite(self._name, norm)
        limit = math.inf if self._skip_above is None else self._skip_above
        self.skipped = norm > limit if finite else self._on_nonfinite == "skip"
        self._count += self.skipped
        return self.skipped

    def take(self) -> dict[str, int]:
        """The number of skipped steps since the last call, for metrics; nothing if none can be."""
        count, self._count = self._count, 0
        return {"skipped_steps": count} if self.is_on else {}


def nonfinite(name: str, norm: float) -> StepRefused:
    """The error for ``on_nonfinite="raise"``."""
    return StepRefused(
        f"{name}: on_nonfinite is 'raise', and the norm of the gradients is {norm}; no weight or state was changed. Go "
        "on from a checkpoint without these data, or say 'skip'"
    )


def checked_order(norm_type: float | str) -> float:
    """The order of a norm as a float; takes "inf", as torch does. Raises ValueError unless it is above 0."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type: expected a number above 0, or inf; found {norm_type}")
    return order


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of this norm, at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def check_finite(norm: Tensor, norm_type: float, wanted: bool) -> None:
    """Raises RuntimeError if ``wanted`` and the norm is infinite or NaN."""
    if wanted and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}; set error_if_nonfinite=False to "
            "clip by it anyway"
        )
