"""Views of this rank's part of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple, Protocol

from torch import Tensor

from lwopt_backend.plan.atoms import Block
from lwopt_backend.plan.layouts import Span, View, box_views


@dataclass(frozen=True, slots=True)
class Slices:
    """The same elements of the weight, the gradient and every state tensor, in equal shapes."""

    value: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class Pieces(NamedTuple):
    """This rank's fragment of a matrix: one or several views, which concatenated have the fragment's elements in
    row-major order. A view of the weight, of the gradient and of every state tensor have equal shapes."""

    values: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[dict[str, Tensor]]
    is_flat: bool = False  # one view, with one dimension


class PiecesOf(Protocol):
    """This rank's pieces of matrices during one step, by a matrix's number. An engine cuts them when they are read."""

    def __getitem__(self, atom: int, /) -> Pieces: ...


class Regions:
    """The places of matrices in a local tensor, found once. Tensors themselves are not kept: a host may replace or move
    them between steps.

    ``views_of`` returns, by matrix, the places of its views in a tensor of the given strides; their sizes do not depend
    on the strides. In tensors that are ``contiguous``, of ``numel`` elements, ranges in order take one call of the
    host for all.
    """

    def __init__(
        self,
        views_of: Callable[[tuple[int, ...]], Sequence[Sequence[View]]],
        contiguous: tuple[int, ...],
        numel: int,
    ) -> None:
        self._views_of = cache(views_of)
        views = self._views_of(contiguous)
        self._counts = [len(of_matrix) for of_matrix in views]
        self._sizes: list[int] = []  # of every view, and of the gap before it unless there are none
        end = 0
        ranges = [_range(view) for of_matrix in views for view in of_matrix]
        self._in_order = None not in ranges
        for begin, stop in filter(None, ranges):
            self._in_order &= begin >= end
            self._sizes += [begin - end, stop - begin]
            end = stop
        self._places = slice(1, None, 2)
        if not any(self._sizes[::2]):
            self._sizes, self._places = self._sizes[1::2], slice(len(self._sizes) // 2)
        self._is_whole = self._in_order and self._sizes == [numel] and len(views) == 1
        self._sizes.append(numel - end)

    def cut(self, slices: Slices) -> list[Pieces]:
        """The pieces of every matrix."""
        tensors = (slices.value, slices.grad, *slices.state.values())
        flats = _flat(tensors) if self._in_order else None
        if self._is_whole and flats is not None:  # most parameters: thousands of them in a model of separate experts
            value, grad, *of_states = flats
            return [Pieces((value,), (grad,), (dict(zip(slices.state, of_states)),), True)]
        is_flat = flats is not None
        values, grads, *of_state = map(self._strided, tensors) if flats is None else map(self._ranges, flats)
        states = [dict(zip(slices.state, each)) for each in zip(*of_state)] if of_state else [{} for _ in values]
        if self._is_whole:
            return [Pieces(values, grads, states, is_flat)]
        found, begin = [], 0
        for count in self._counts:
            end = begin + count
            found.append(Pieces(values[begin:end], grads[begin:end], states[begin:end], is_flat and count == 1))
            begin = end
        return found

    def of_matrices(self, numbers: Iterable[int]) -> Callable[[Tensor], Iterator[tuple[int, Sequence[Tensor]]]]:
        """A function that yields the views of each matrix in a tensor, with its number: ``numbers`` are in order."""
        in_order = list(numbers)

        def cut(tensor: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
            found = self.cut(Slices(tensor, tensor, {}))
            return zip(in_order, (pieces.values for pieces in found), strict=True)

        return cut

    def _ranges(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split_with_sizes(self._sizes)[self._places]

    def _strided(self, tensor: Tensor) -> Sequence[Tensor]:
        return [view_of(tensor, view) for of_matrix in self._views_of(tensor.stride()) for view in of_matrix]


def _flat(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The tensors with one dimension, in their order, without copies; None if that is not possible for one of them."""
    try:
        return [tensor.view(-1) for tensor in tensors]
    except (RuntimeError, ValueError):  # without real tensors, torch raises the latter
        return None


def _range(view: View) -> tuple[int, int] | None:
    """The elements of a view if they are a range, in order."""
    in_order = tuple(math.prod(view.sizes[dim + 1 :]) for dim in range(len(view.sizes)))
    return view.span if view.strides == in_order else None


def flat_regions(views: Sequence[Sequence[View]], numel: int) -> Regions:
    """By matrix, places in a one-dimensional tensor."""

    def views_of(strides: tuple[int, ...]) -> Sequence[Sequence[View]]:
        (stride,) = strides
        if stride == 1:
            return views
        apart = lambda view: View(view.offset * stride, view.sizes, tuple(stride * s for s in view.strides))  # noqa: E731
        return [[*map(apart, of_matrix)] for of_matrix in views]

    return Regions(views_of, (1,), numel)


def box_regions(blocks: Sequence[Block], shape: Sequence[int], box: Sequence[Span]) -> Regions:
    """The places of ``blocks`` in a rank's local tensor, which is its ``box`` of a parameter of ``shape``.

    Raises ValueError as ``box_views`` does.
    """
    sizes = [size for _, size in box]
    contiguous = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    views_of = lambda strides: [box_views(block, shape, box, strides) for block in blocks]  # noqa: E731
    return Regions(views_of, contiguous, math.prod(sizes))


def view_of(tensor: Tensor, view: View) -> Tensor:
    """Elements of a tensor, sharing its memory."""
    return tensor.as_strided(view.sizes, view.strides, tensor.storage_offset() + view.offset)


class Joined(NamedTuple):
    grads: list[Tensor]
    values: list[Tensor]
    states: list[dict[str, Tensor]]


def joined(of_batch: Sequence[Pieces]) -> Joined:
    """The pieces of several matrices, in order."""
    values, grads, states, _ = zip(*of_batch)  # no call of Python a matrix
    flat = chain.from_iterable
    return Joined([*flat(grads)], [*flat(values)], [*flat(states)])
