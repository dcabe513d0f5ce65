"""What modules' own parameters are for, by what their ``forward`` does with them.

Of torch's modules it is known: a linear's weight is multiplied, an embedding's looked up. A module of somebody else
holds parameters of which only its ``forward`` says what they are. Such a parameter is

- a matrix if it is multiplied, (outputs, inputs) or (inputs, outputs) by the side on which it stands;
- a stack of matrices if each step takes one slice, by its number or in a product of slices with slices, whatever it is
  called; one matrix if all slices are summed over, or are all outputs of one product, as in a kernel by head;
- a table if it is only added, scaled with, concatenated or looked up; or looked up besides, or added to data itself
  where weights alone multiply it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lwopt_backend.plan.atoms import Grid
from lwopt_backend.routing.convolutions import Convolution, of_sight
from lwopt_backend.routing.parts import partition
from lwopt_backend.routing.shown import Shown, Sight, Truth
from lwopt_backend.routing.tracks import LEADS

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Used:
    """What a parameter of a module's own is for. ``table``: nothing multiplies it.

    Of one that is multiplied: whether it is ``transposed``, None if that is not known; whether it is a ``stack``; the
    ``grid`` of one matrix of more than two dimensions; its ``convolution``. ``across``: its last two dimensions
    are no matrix.
    """

    truth: Truth
    table: bool = False
    transposed: bool | None = None
    stack: bool = False
    grid: Grid | None = None
    convolution: Convolution | None = None
    across: bool = False


def use_of(shown: Shown, holders: Sequence[str], param: Tensor, shape: Shape) -> Used | None:
    """What runs show of a parameter of the modules ``holders``; None if nothing shows it."""
    within: Used | None = None  # a module that multiplies weights alone, whose product others use
    for name in dict.fromkeys(holders):
        for sight in shown.of(name, param, whole=True):
            used = _plane(sight) if len(shape) == 2 else _solid(sight, shape)
            if sight.truth == "example":  # which is surer than any guess
                return used
            if used is not None and len(shape) == 2 and not used.table and "multiplied" not in sight.uses:
                within = within or used
            elif used is not None:
                return used
    return within


def _plane(sight: Sight) -> Used | None:
    """Rows that are looked up in are a table, although what a model returns is compared with all of them; so is what is
    added to data itself, as learned queries are, although kernels multiply it."""
    if "multiplied" in sight.uses and not sight.is_looked_up:
        return Used(sight.truth, transposed=sight.transposed)
    if "combined" in sight.uses and "added" not in sight.uses:
        return Used(sight.truth, transposed=sight.transposed)
    return Used(sight.truth, table=True) if "added" in sight.uses and "lost" not in sight.uses else None


def _solid(sight: Sight, shape: Shape) -> Used | None:
    """Of more than two dimensions."""
    if (convolution := of_sight(sight)) is not None:
        return Used(sight.truth, convolution=convolution)
    use = sight.slices
    if use is not None and len(use.dims) == 1 and len(shape) > 3 and (found := _kernels(sight, shape, *use.dims)):
        return found
    if sight.is_added and not (use is not None and use.taken):
        return Used(sight.truth, table=True)
    if use is None or use.mixed:
        return None
    if use.taken:
        return Used(sight.truth, transposed=sight.transposed, stack=True)
    return Used(sight.truth, across=True) if use.across else _kernel(sight, shape, use.ways)


def _kernels(sight: Sight, shape: Shape, dims: str) -> Used | None:
    """Kernels by head, such as (inputs, heads, size), of which each step takes one of a stack, or what one made; or one
    of more dimensions."""
    lead = len(dims) - len(dims.lstrip("e"))
    if not lead and dims[0] == "o" and (ends := sight.run.ends.get((sight.number, LEADS))) is not None:
        apart = partition(ends).parts  # all in one product, whose outputs are then taken apart
        lead = int(len(apart) == shape[0] > 1)
    kernel = dims[lead:]
    stop = len(dims) - len(kernel.lstrip(kernel[:1]))
    if len(kernel) < 3 or {kernel[0], dims[-1]} != {"o", "i"} or len({*dims[stop:]}) != 1:
        return None
    grid = Grid(*map(math.prod, (shape[:lead], shape[lead:stop], shape[stop:])))
    return Used(sight.truth, transposed=kernel[0] == "i", grid=grid)


def _kernel(sight: Sight, shape: Shape, ways: set[tuple[bool, bool, bool]]) -> Used | None:
    """One matrix of three dimensions or more, of which some are its outputs, the others its inputs."""
    if len(ways) != 1:
        return None
    (slices, rows, columns) = next(iter(ways))
    if len({slices, rows, columns}) != 2:
        return None
    if rows == columns:  # the first dimensions are one side
        if len(shape) > 3:
            return None
        return Used(sight.truth, transposed=columns, grid=Grid.of(shape, 0))
    if slices == rows:
        grid = Grid(1, math.prod(shape[:-1]), shape[-1])
        return Used(sight.truth, transposed=columns, grid=grid)
    return None
