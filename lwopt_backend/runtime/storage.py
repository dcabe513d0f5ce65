"""Where this rank's pieces of weights, gradients and state lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lwopt_backend.plan import FlatPartition


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which an owner steps parameters of ``dtype``: fp32, if they are narrower, in masters; else their own."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor, in equal shapes."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class Storage(Protocol):
    """This rank's part of a set of matrices."""

    def part(self, index: int) -> Slices:
        """This rank's fragment of matrix ``index``, of which it stores something; elements row by row."""


class FlatStorage:
    """One flat partition per group, as ZeRO-1/2 keep it: views into it, nothing is copied."""

    def __init__(self, layout: FlatPartition, rank: int, slices: Slices) -> None:
        self._layout = layout
        self._rank = rank
        self._slices = slices

    def part(self, index: int) -> Slices:
        held = self._layout.fragment(index, self._rank)
        assert held is not None, (index, self._rank)
        flat = self._slices
        state = {key: tensor.narrow(0, held.offset, held.numel) for key, tensor in flat.state.items()}
        value, grad = (tensor.narrow(0, held.offset, held.numel) for tensor in (flat.value, flat.grad))
        return Slices(value, grad, state)
