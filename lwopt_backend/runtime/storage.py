"""Where this rank's pieces of weights, gradients and state lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lwopt_backend.plan import FlatPartition


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor: flat views of equal length."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class Storage(Protocol):
    """This rank's part of a group of parameters."""

    def whole(self) -> Slices:
        """Everything this rank stores of the group, padding included."""

    def part(self, index: int, start: int, stop: int) -> Slices:
        """Elements ``[start, stop)`` of parameter ``index``, which this rank stores."""


class FlatStorage:
    """One flat partition per group, as ZeRO-1/2 keep it: views into it, nothing is copied."""

    def __init__(self, layout: FlatPartition, rank: int, slices: Slices) -> None:
        self._layout = layout
        self._rank = rank
        self._slices = slices

    def whole(self) -> Slices:
        return self._slices

    def part(self, index: int, start: int, stop: int) -> Slices:
        held = self._layout.fragment(index, self._rank)
        assert held is not None and held.start <= start < stop <= held.stop, (index, start, stop, held)
        begin = held.offset + start - held.start
        flat = self._slices
        state = {key: tensor.narrow(0, begin, stop - start) for key, tensor in flat.state.items()}
        return Slices(flat.value.narrow(0, begin, stop - start), flat.grad.narrow(0, begin, stop - start), state)
