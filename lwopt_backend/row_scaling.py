"""Factors on the outputs of weights, applied by the next step right after its update, wherever the elements lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lwopt_backend.plan.blocks import Block
from lwopt_backend.spelling import suggestion


class RowScaling:
    """What an optimizer's next step multiplies weights by. ``shapes`` are those of all trained parameters, by name,
    ``matrices_in`` tells the matrices in one.

    A weight of shape (outputs, inputs) is scaled by row; one of ``transposed``, stored as (inputs, outputs), by column;
    a bias element by element.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        transposed: frozenset[str],
        matrices_in: Callable[[str], Sequence[Block]],
    ) -> None:
        self.matrices_in = matrices_in
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._transposed = transposed
        self._factors: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._factors)

    def outputs(self, name: str) -> int:
        """How many outputs a parameter has. Raises ValueError for one that is not trained."""
        if name not in self._shapes:
            raise ValueError(f"no trained parameter is named {name!r}; {suggestion(name, self._shapes)}")
        shape = self._shapes[name]
        return shape[-1] if name in self._transposed else shape[0]

    def set(self, factors: Mapping[str, Tensor]) -> None:
        """Take one factor per output of each parameter named, in place of all that were set before.

        Every rank must give the same. Raises ValueError for a parameter that is not there, or too few or many factors.
        """
        for name, given in factors.items():
            if given.ndim != 1 or len(given) != self.outputs(name):
                raise ValueError(
                    f"parameter {name!r} has {self.outputs(name)} outputs; expected a factor for each, found shape "
                    f"{tuple(given.shape)}"
                )
        self._factors = {name: given.detach().clone() for name, given in factors.items()}

    def clear(self) -> None:
        """Forget all; a step has applied them, or was left out."""
        self._factors = {}

    def forget(self, names: Iterable[str]) -> None:
        """Forget those of parameters that a step has applied, where it takes them group by group."""
        for name in names:
            self._factors.pop(name, None)

    def scale_range(self, name: str, elements: Tensor, start: int) -> bool:
        """Multiply consecutive elements of a flattened parameter, from ``start`` on; False if there is no factor."""
        factors, shape = self._of(name, elements), self._shapes[name]
        if factors is None:
            return False
        if name in self._transposed or len(shape) == 1:
            index = torch.arange(start, start + elements.numel(), device=elements.device) % len(factors)
            elements.mul_(factors[index].view(elements.shape))
            return True
        inputs, stop = math.prod(shape[1:]), start + elements.numel()
        first, last = start // inputs, -(-stop // inputs)
        spread = factors[first:last].repeat_interleave(inputs)
        elements.mul_(spread[start - first * inputs : stop - first * inputs].view(elements.shape))
        return True

    def scale_box(self, name: str, local: Tensor, box: Sequence[tuple[int, int]]) -> bool:
        """Multiply a rectangle of a parameter: per dimension where it begins and how long it is."""
        factors = self._of(name, local)
        if factors is None:
            return False
        dim = local.ndim - 1 if name in self._transposed else 0
        begin, size = box[dim]
        local.mul_(factors[begin : begin + size].view([-1 if i == dim else 1 for i in range(local.ndim)]))
        return True

    def _of(self, name: str, like: Tensor) -> Tensor | None:
        found = self._factors.get(name)
        return None if found is None else found.to(like.device, like.dtype)
