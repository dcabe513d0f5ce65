"""Convolutions as matrices, if the option ``convolutions`` is "flatten".

A convolution maps a window of channels to one place: its matrix is (outputs, inputs x kernel), one for each of its
groups, between which nothing is mapped. A transposed one maps the channels of one place to a window: (inputs, outputs x
kernel), stored transposed. Muon's factor by shape is that of these. A depthwise kernel maps no channel to another: each
is a filter of one channel, a vector, which orthogonalization would only normalize; it stays element-wise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lwopt_backend.plan.atoms import Grid
from lwopt_backend.routing.shown import Sight

CONVOLUTION = "convolution"  # the reason of one that is element-wise
DEPTHWISE = "depthwise convolution"
FLATTENED = "convolution, flattened"


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution's ``groups``, and whether it is transposed, so that its weight is (inputs, outputs, ...)."""

    groups: int = 1
    transposed: bool = False

    def is_depthwise(self, shape: Sequence[int]) -> bool:
        """Whether each output sees one input of several, or each input one output."""
        inside = shape[0] // self.groups if self.transposed else shape[1]
        return self.groups > 1 and inside == 1

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns, as stored, of the matrix of each group."""
        grid = Grid.of(shape, 0)
        return grid.rows // self.groups, grid.columns


def of_module(module: nn.Module) -> Convolution | None:
    """The convolution of one of torch's modules, or of a subclass."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return None
    return Convolution(module.groups, bool(module.transposed))


def of_sight(sight: Sight) -> Convolution | None:
    """That in which a run used a module's own parameter."""
    found = sight.run.convolved.get(sight.number)
    return None if found is None else Convolution(*found)
