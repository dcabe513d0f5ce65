"""Shared by the gradients of all engines: norms and how long they are true, clip groups, and steps that are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lwopt_backend.config.hosts import ClipGroup
from lwopt_backend.runtime.agreement import StepRefused
from lwopt_backend.runtime.collectives import Collectives

Pick = Callable[[str], bool]  # selects parameters by name


def everything(name: str) -> bool:
    return True


def but(out: Collection[str]) -> Pick:
    """Selects every parameter that is not ``out``."""
    return (lambda name: name not in out) if out else everything


class ClipGroups:
    """The groups of parameters that are clipped separately, by ``group_of`` a parameter's name, and the rest, None.

    Those that are ``out`` of the param groups are in none."""

    def __init__(
        self,
        groups: Mapping[str, ClipGroup],
        group_of: Mapping[str, str],
        out: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.limits: dict[str | None, float] = {name: group.max_norm for name, group in groups.items()}
        self._group_of, self._out = group_of, out

    def pick(self, group: str | None) -> Pick:
        """Selects the parameters of a group."""
        out = self._out()
        if not (self.limits or out):
            return everything
        return lambda name: self._group_of.get(name) == group and name not in out


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


class Gradients(Protocol):
    """The mean gradients of an optimizer, each element counted once. Called on all ranks that step together."""

    everyone: Collectives

    def norm(self, norm_type: float, pick: Pick, foreach: bool | None = None) -> Tensor: ...

    def agreed(self, norm: Tensor) -> Tensor:
        """A norm with the same bits on all ranks, by which they may decide."""

    def clip(self, max_norm: float, norm: Tensor, pick: Pick, foreach: bool | None = None) -> None:
        """``torch.nn.utils.clip_grads_with_norm_`` of the parameters that ``pick`` selects."""

    def version(self) -> Version:
        """Which gradients this rank has."""


class GradientNorms:
    """The norms of a step's gradients before they were last clipped. Nothing else keeps a norm.

    They are true until a gradient changes: by a backward pass, ``param.grad = ...``, ``zero_grad`` or a scaling. Then
    ``settle`` measures again. Methods are called on all ranks.
    """

    def __init__(self, groups: ClipGroups, guard: Guard) -> None:
        self.groups, self.guard = groups, guard
        self.of_groups: dict[str | None, Tensor] = {}  # by clip group; None is the rest
        self.of_all: Tensor | float = 0.0  # of order 2, if the guard is on
        self._clipped: Version | None = None  # of the gradients that a call has clipped since the last step

    @property
    def named(self) -> dict[str, Tensor]:
        """The norms of the groups that have a name, in fp32."""
        return {group: norm.float() for group, norm in self.of_groups.items() if group is not None}

    def clip(
        self, gradients: Gradients, max_norm: float, norm_type: float, finite: bool, foreach: bool | None
    ) -> Tensor:
        """Clip each group by its norm, and the rest by ``max_norm``; returns the norm of the rest.

        Raises RuntimeError for a norm that is not ``finite``, if that is wanted.
        """
        order, limits = checked_order(norm_type), {**self.groups.limits, None: max_norm}
        if self.guard.is_on and order != 2:
            self._measure_all(gradients)
        self._measure(gradients, limits, order, foreach)
        if self.guard.is_on and order == 2:
            self.of_all = self._total(gradients)
        for norm in self.of_groups.values():
            check_finite(norm, norm_type, finite)
        self._clip(gradients, limits, foreach)
        self._clipped = gradients.version()
        return self.of_groups[None]

    def settle(self, gradients: Callable[[], Gradients]) -> bool:
        """At a step: clip the groups, unless a call has clipped these gradients. Returns whether the guard skips the
        step. Raises StepRefused if the guard raises."""
        version, self._clipped = self._clipped, None
        if not (self.guard.is_on or self.groups.limits):
            return False
        now = gradients()
        clipped = version is not None and on_all(now.everyone, now.version().same(version))
        if self.guard.is_on and not clipped:
            self._measure_all(now)
        skips = self.guard.is_on and self.guard.skips(float(self.of_all))
        if self.groups.limits and not (clipped or skips):
            if not self.guard.is_on:
                self._measure(now, self.groups.limits, 2.0)
            self._clip(now, self.groups.limits)
        return skips

    def _measure(
        self, gradients: Gradients, groups: Iterable[str | None], order: float, foreach: bool | None = None
    ) -> None:
        self.of_groups |= {group: gradients.norm(order, self.groups.pick(group), foreach) for group in groups}

    def _measure_all(self, gradients: Gradients) -> None:
        self._measure(gradients, [None, *self.groups.limits], 2.0)
        self.of_all = self._total(gradients)

    def _total(self, gradients: Gradients) -> Tensor:
        """The norm of order 2 of all gradients, from those of the groups and of the rest."""
        first, *others = self.of_groups.values()
        if others:
            first = torch.linalg.vector_norm(torch.stack([first, *others]), dtype=torch.float64)
        return gradients.agreed(first)

    def _clip(self, gradients: Gradients, limits: Mapping[str | None, float], foreach: bool | None = None) -> None:
        for group, limit in limits.items():
            gradients.clip(limit, self.of_groups[group], self.groups.pick(group), foreach)


def on_all(everyone: Collectives, here: bool) -> bool:
    """Whether it is true ``here`` and on all other ranks, each of which may have changed its gradients alone."""
    flag = torch.full((), not here, dtype=torch.int32, device=everyone.device)
    everyone.all_reduce_max(flag).wait()
    return not flag


class Version(NamedTuple):
    """Which gradients a rank has: a number of changes, and norms of its own gradients, where nobody counts."""

    changes: int = 0
    norms: Tensor | None = None

    def same(self, other: Version) -> bool:
        if self.norms is None or other.norms is None:
            return self == other
        return self.changes == other.changes and torch.equal(self.norms, other.norms)


def version_of(grads: Sequence[Tensor | None]) -> Version:
    """The version of gradients that are tensors, by the norm of each on this rank; a change that changes none of these
    changes no norm.

    torch's own counts do not tell: an operator on lists of DTensors does not count, nor does GradScaler's unscaling.
    """
    local = [grad if grad is None else getattr(grad, "_local_tensor", grad) for grad in grads]
    here = [grad for grad in local if grad is not None]
    if not here:
        return Version(len(local))
    norms = iter(torch._foreach_norm(here, dtype=torch.float32))
    device = here[0].device
    missing = torch.full((), -1.0, device=device)
    return Version(len(local), torch.stack([missing if grad is None else next(norms).to(device) for grad in local]))


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
