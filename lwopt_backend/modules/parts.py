"""What ``ModuleOptimizers`` asks of one module's optimizer, and the three kinds of optimizers that it can ask.

::

    lwopt_backend.LayerWiseOptimizer   owners have the mean gradients         state: pieces in a folder
    one with ``gradients`` (FSDP2)     gradients are sharded over meshes      state: whole tensors
    any other torch.optim.Optimizer    every rank of the module has a copy    state: whole tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lwopt_backend.owned.optimizer import LayerWiseOptimizer


class Part(Protocol):
    """A module's optimizer on a rank that has the module.

    ``place`` is this rank's and the number of ranks that the optimizer works on; None where every rank has a copy that
    knows of no other. ``norm`` and ``count_zeros`` are called on all ranks of the module and equal on all of them.
    """

    @property
    def kind(self) -> str: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def place(self) -> tuple[int, int] | None: ...

    def params(self) -> Sequence[tuple[str, Tensor]]:
        """The trained parameters with their names."""

    def norm(self, norm_type: float) -> float:
        """The norm of the mean gradients, every element counted once."""

    def count_zeros(self) -> int:
        """How many elements of the mean gradients are zero, every element counted once."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients that ``norm`` has seen; starts no collective."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes within it need not travel."""


class OwnedPart:
    """``lwopt_backend.LayerWiseOptimizer``."""

    kind = "pieces"

    def __init__(self, optimizer: LayerWiseOptimizer) -> None:
        if optimizer.config.step_in_backward:
            raise ValueError("step_in_backward uses gradients before all ranks know that all are finite; leave it out")
        self.optimizer = optimizer
        self.everyone = optimizer.core.holdings[0].sharers.everyone
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return [(member.name, member.param) for member in self.optimizer.core.members]

    def norm(self, norm_type: float) -> float:
        return self.optimizer.grad_norm(norm_type=norm_type).item()

    def count_zeros(self) -> int:
        return self.optimizer.count_zeros()

    def scale(self, factor: float) -> None:
        self.optimizer.core.gradients.scale(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def process_groups(self) -> list[Any]:
        """Those through which gradients travel while a backward pass runs."""
        sharers = [held.sharers for held in self.optimizer.core.holdings]
        groups = [ranks for s in sharers for ranks in (s.everyone, s.instance, s.replicas) if ranks is not None]
        return [group for group in (getattr(g, "process_group", None) for g in groups) if group is not None]


class HostGradients(Protocol):
    """What an optimizer has as ``gradients``; the methods are those of ``Part``."""

    @property
    def place(self) -> tuple[int, int] | None: ...

    def params(self) -> Sequence[tuple[str, Tensor]]: ...

    def norm(self, norm_type: float) -> Tensor: ...

    def count_zeros(self) -> int: ...

    def scale(self, factor: float) -> None: ...


class HostPart:
    """An optimizer whose ``gradients`` count and scale for it: that of FSDP2."""

    kind = "whole"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.place = self._gradients().place

    def _gradients(self) -> HostGradients:
        gradients: HostGradients = self.optimizer.gradients
        return gradients

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return self._gradients().params()

    def norm(self, norm_type: float) -> float:
        return self._gradients().norm(norm_type).item()

    def count_zeros(self) -> int:
        return self._gradients().count_zeros()

    def scale(self, factor: float) -> None:
        self._gradients().scale(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class CopyPart:
    """Any torch optimizer of plain tensors: on one rank, or on several that hold copies and have equal gradients."""

    kind = "whole"
    place = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for name, param in self.params():
            if hasattr(param, "device_mesh"):
                raise TypeError(
                    f"{name!r} is a DTensor, whose norm {type(optimizer).__name__} cannot tell; use "
                    "lwopt_backend.integrations.fsdp2.LayerWiseOptimizer"
                )

    def params(self) -> Sequence[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            names = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
            found += zip(names, group["params"])
        return found

    def norm(self, norm_type: float) -> float:
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64).cpu() for g in self._grads()]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0

    def count_zeros(self) -> int:
        total = sum(param.numel() for _, param in self.params())
        return total - sum(int(torch.count_nonzero(grad)) for grad in self._grads())

    def scale(self, factor: float) -> None:
        for grad in self._grads():
            grad.mul_(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _grads(self) -> list[Tensor]:
        return [param.grad for _, param in self.params() if param.grad is not None]


def part_of(optimizer: Any) -> Part:
    """Raises TypeError or ValueError for what is no optimizer, or one whose steps cannot be held back."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, or None on ranks without it; found {optimizer!r}")
    if isinstance(optimizer, LayerWiseOptimizer):
        return OwnedPart(optimizer)
    if hasattr(type(optimizer), "gradients"):
        return HostPart(optimizer)
    return CopyPart(optimizer)
