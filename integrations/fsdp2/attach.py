"""The hook: exchange begins in the backward pass, when FSDP2 has reduced a bucket's last gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.integrations.fsdp2.stepper import MeshStepper, Shards, States
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.early import EarlyExchange

Rules = Callable[[], Mapping[int, MatrixRule]]


def check_is_of(module: nn.Module, params: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for a parameter that is not the module's."""
    theirs = {id(param) for param in module.parameters()}
    for group, group_names in zip(params, names):
        for param, name in zip(group, group_names):
            if id(param) not in theirs:
                raise ValueError(f"attach: parameter {name!r} of this optimizer is not the model's")


class Attachment:
    """Hooks on the sharded matrices of an optimizer; ``remove()`` takes them off, also at the end of a ``with``.

    ``Tensor.register_post_accumulate_grad_hook`` on a sharded parameter is the one public sign that its gradient has
    been reduced: FSDP2 calls it in the order of the backward pass, which is the same on all ranks.
    """

    def __init__(self, steppers: Sequence[MeshStepper], rules: Rules, states: Callable[[], States]) -> None:
        self._rules = rules
        self._states = states
        self._early: dict[int, EarlyExchange] = {}
        self._handles: list[Any] = []
        for number, stepper in enumerate(steppers):
            if stepper.plan.buckets:
                self._early[number] = EarlyExchange(stepper.stepper, stepper.plan.buckets)
                for atom, index in enumerate(stepper.matrices):
                    hook = self._hook(number, stepper, atom)
                    self._handles.append(stepper.members[index].param.register_post_accumulate_grad_hook(hook))

    def _hook(self, number: int, stepper: MeshStepper, atom: int) -> Callable[[Tensor], None]:
        def now() -> tuple[Sequence[MatrixRule], Shards]:
            return stepper.rules_of(self._rules()), stepper.storage(self._states())

        return lambda param: self._early[number].ready(atom, now)

    def touched(self, number: int, stepper: MeshStepper, rules: Sequence[MatrixRule], storage: Shards) -> Tensor | None:
        """Per bucket of a stepper, whether what has left is not what the step would send; None where nothing leaves."""
        if number not in self._early:
            return None
        missing = {atom for atom, i in enumerate(stepper.matrices) if stepper.members[i].param.grad is None}
        return self._early[number].touched(rules, storage, missing, stepper.device)

    def settle(self, number: int, touched: Sequence[int]) -> Mapping[int, Any]:
        return self._early[number].settle(touched) if number in self._early else {}

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with torch.no_grad():
            for early in self._early.values():
                early.forget()
        self._early = {}

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
