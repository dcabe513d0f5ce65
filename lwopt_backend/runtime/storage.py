"""Where this rank's pieces of weights, gradients and state lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lwopt_backend.plan.block_views import View
from lwopt_backend.runtime.views import flat_views


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

    def parts(self, index: int) -> Sequence[Slices]:
        """This rank's fragment of matrix ``index``, of which it stores something, in one or several views.

        Their elements, one view after the other, are the fragment's row by row.
        """


class FlatLayout(Protocol):
    """Storage of a rank in one flat tensor."""

    def views(self, index: int, rank: int) -> Sequence[View]:
        """Where in it the rank's fragment of matrix ``index`` lies, in order."""


class FlatStorage:
    """One flat partition per group, as ZeRO-1/2 keep it: views into it, nothing is copied."""

    def __init__(self, layout: FlatLayout, rank: int, slices: Slices) -> None:
        self._layout = layout
        self._rank = rank
        self._slices = slices

    def parts(self, index: int) -> Sequence[Slices]:
        views, flat = self._layout.views(index, self._rank), self._slices
        values, grads, *states = (flat_views(t, views) for t in (flat.value, flat.grad, *flat.state.values()))
        return [
            Slices(value, grad, dict(zip(flat.state, state))) for value, grad, *state in zip(values, grads, *states)
        ]
