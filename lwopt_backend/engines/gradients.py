"""Shared by the gradients of all engines: which of them count, orders of norms, and clip groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lwopt_backend.config.hosts import ClipGroup

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

    @property
    def named(self) -> dict[str, Tensor]:
        """The norms of the groups that have a name, in fp32."""
        return {group: norm.float() for group, norm in self.norms.items() if group is not None}


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
