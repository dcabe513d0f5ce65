"""Any torch optimizer as a matrix rule: SOAP, Shampoo, or the user's own, unmodified, on whole matrices in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.rules.protocol import WeightRule, inner_steps


class TorchOptimizer(WeightRule):
    """An optimizer class, made anew for every matrix and step with ``arguments``, and given back its state.

    It sees one matrix: the whole weight as a parameter, the whole gradient as its ``grad``. What it keeps in ``state``
    of the parameter, and what it counts in its param group, is the owner's state of the matrix. What it keeps anywhere
    else would be lost: that is an error.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **arguments: Any) -> None:
        self.optimizer_class = optimizer_class
        self._arguments = arguments

    def step(self, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        param = nn.Parameter(value)
        param.grad = grad
        inner = self.optimizer_class([param], **self._arguments)
        (group,) = inner.param_groups
        group.update(state.get("group", {}))
        if "state" in state:
            inner.state[param] = state["state"]
        before, attributes = dict(group), dict(vars(inner))
        with inner_steps():
            inner.step()
        self._check(inner, param, attributes, first=not state)
        own = {"params", *self._arguments}
        counted = {key: v for key, v in group.items() if key not in own and v is not before.get(key)}
        state["group"] = {**state.get("group", {}), **counted}
        state["state"] = dict(inner.state.get(param, {}))
        if param.data_ptr() != value.data_ptr():  # it put other data in place of the parameter's
            value.copy_(param.detach())

    def _check(self, inner: torch.optim.Optimizer, param: Tensor, attributes: dict[str, Any], *, first: bool) -> None:
        """Raises TypeError for an optimizer that keeps something that we would lose."""
        others = [key for key in inner.state if key is not param]
        changed = [key for key, value in vars(inner).items() if attributes.get(key, self) is not value]
        if first and (others or changed):
            where = f"in its attribute {changed[0]!r}" if changed else f"under the key {others[0]!r} of its state"
            raise TypeError(
                f"{self.optimizer_class.__name__} keeps something {where}; expected all of it in state[parameter] and "
                "in the param group, which checkpoints hold"
            )
