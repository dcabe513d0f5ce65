"""Element-wise parameters stepped by torch's optimizers, and cautious weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.rules.protocol import inner_steps
from lwopt_backend.runtime.pieces import Slices

CHUNK = 2**22  # elements whose updates are in memory at a time


@torch.no_grad()
def step_cautiously(
    stepper: ElementwiseStepper, arguments: Mapping[str, Any], decay: float, parts: Sequence[Slices]
) -> None:
    """Step with ``arguments``, which have no decay; decay by ``decay`` every element that moves towards zero.

    "Cautious Weight Decay", arXiv 2510.12402. The optimizer steps zeros instead of the weights, which yields its update
    without rounding: the sign is right even if the update is too small to change the weight. This requires an optimizer
    whose update does not depend on the weight. Zero counts as towards zero.
    """
    for some in _chunks(parts):
        moves = [torch.zeros_like(part.value) for part in some]
        stepper.step(arguments, [Slices(move, part.grad, part.state) for move, part in zip(moves, some)])
        for part, move in zip(some, moves):
            _apply(part.value, move, decay)


def _apply(value: Tensor, move: Tensor, decay: float) -> None:
    # Signs, because the product of two small numbers may underflow.
    aligned = value.sign().mul_(move.sign()) <= 0
    kept = torch.where(aligned, 1 - decay, 1.0)
    value.copy_((value * kept).add_(move))  # in fp32, so that 16 bits are rounded once


def _chunks(parts: Sequence[Slices]) -> Iterator[list[Slices]]:
    """The parts' rows, about ``CHUNK`` elements at a time."""
    some: list[Slices] = []
    numel = 0
    for piece in (piece for part in parts for piece in _pieces(part)):
        if some and numel + piece.value.numel() > CHUNK:
            yield some
            some, numel = [], 0
        some.append(piece)
        numel += piece.value.numel()
    if some:
        yield some


def _pieces(part: Slices) -> Iterator[Slices]:
    """Cut a part by rows. Every piece starts with the part's counters; the part keeps the last piece's."""
    rows = part.value.shape[0] if part.value.ndim else 1
    count = max(1, CHUNK * rows // max(1, part.value.numel()))
    if rows <= count:
        yield part
        return
    before = {key: tensor.clone() for key, tensor in part.state.items() if not tensor.ndim}
    for begin in range(0, rows, count):
        size = min(count, rows - begin)
        value, grad = (tensor.narrow(0, begin, size) for tensor in (part.value, part.grad))
        counters = part.state if begin + size == rows else {key: tensor.clone() for key, tensor in before.items()}
        state = {
            key: tensor.narrow(0, begin, size) if tensor.ndim else counters[key] for key, tensor in part.state.items()
        }
        yield Slices(value, grad, state)


@dataclass(frozen=True)
class Counters:
    """Counters that an optimizer keeps as Python numbers, and this package as scalar tensors in every part's state.

    ``state`` maps keys of its state to their types; ``group`` maps keys of its param group to the key here and the
    type.
    """

    state: Mapping[str, type] = field(default_factory=dict)
    group: Mapping[str, tuple[str, type]] = field(default_factory=dict)

    def values(self, state: Mapping[str, Tensor]) -> tuple[float, ...]:
        """The part's counters."""
        return tuple(state[key].item() for key in (*self.state, *(key for key, _ in self.group.values())))


class ElementwiseStepper:
    """Steps one param group with an ``optimizer_class``, which is constructed at the first step.

    An element-wise update does not depend on how parameters are cut: each rank steps its own elements and sends
    nothing. All state stays in the parts' own dictionaries, so it does not matter which parts are stepped together.
    Parts with different counters are stepped one after the other.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], counters: Counters) -> None:
        self._class = optimizer_class
        self._counters = counters
        self._inner: torch.optim.Optimizer | None = None

    def step(self, options: Mapping[str, Any], parts: Sequence[Slices]) -> None:
        """One step over ``parts`` with the optimizer's arguments ``options``."""
        alike: dict[tuple[float, ...], list[Slices]] = {}
        for part in parts:
            alike.setdefault(self._counters.values(part.state), []).append(part)
        for some in alike.values():
            self._step(options, some)

    def _step(self, options: Mapping[str, Any], parts: Sequence[Slices]) -> None:
        values = [part.value for part in parts]
        if self._inner is None:
            self._inner = self._class(values, **options)
        inner, (group,) = self._inner, self._inner.param_groups
        group.update({key: value for key, value in options.items() if key in group}, params=values)
        for name, (key, kind) in self._counters.group.items():
            group[name] = kind(parts[0].state[key].item())
        inner.state.clear()
        # A host's tensors live on, such as a DTensor's local tensor: their ``grad`` would keep gradients alive between
        # steps. DeepSpeed's offload has its own buffer there.
        before = [value.grad for value in values]
        for part in parts:
            part.value.grad = part.grad
            inner.state[part.value] = self._given(part.state)
        try:
            with inner_steps():
                inner.step()
        finally:
            for value, grad in zip(values, before):
                value.grad = grad
        for part in parts:
            self._take(part.state, inner.state[part.value])
        # Some optimizers count in one parameter's state only; the counters of these parts were equal.
        for key in self._counters.state:
            count = max(inner.state[value][key] for value in values)
            for part in parts:
                part.state[key].fill_(count)
        for name, (key, _) in self._counters.group.items():
            for part in parts:
                part.state[key].fill_(group[name])
        group["params"] = []
        inner.state.clear()

    def _given(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """A part's state as the optimizer expects it."""
        of_group = {key for key, _ in self._counters.group.values()}
        kinds = self._counters.state
        return {
            key: kinds[key](value.item()) if key in kinds else value
            for key, value in state.items()
            if key not in of_group
        }

    def _take(self, state: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
        """Copy tensors that the optimizer has replaced into those that it was given."""
        for key, value in after.items():
            if isinstance(value, Tensor) and value is not state[key]:
                state[key].copy_(value)
