"""Where in a rank's local storage its part of a block lies: few strided views that give the elements in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.atoms import Block, Stripes

Span = tuple[int, int]  # offset, size


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a local tensor, from ``offset`` elements after its first, with ``sizes`` and ``strides``."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def range_views(block: Block, start: int, stop: int, offset: int) -> tuple[View, ...]:
    """The block's elements in ``[start, stop)`` of the flattened parameter, stored from ``offset`` of a flat tensor.

    Together the views are the block's own range, element by element.
    """
    width = block.grid.columns
    dims = _merged([*_dims(block.rows, width), *_dims(block.columns, 1)])
    sizes, strides = [size for size, _ in dims], tuple(stride for _, stride in dims)
    origin = offset - start + block.flat(0)
    found = []
    for corner, lengths in _boxes(sizes, block.before(start), block.before(stop)):
        begin = origin + sum(place * stride for place, stride in zip(corner, strides))
        found.append(_without_ones(View(begin, lengths, strides)))
    return tuple(found)


def rectangle(block: Block, shape: Sequence[int], box: Sequence[Span]) -> tuple[Span, Span] | None:
    """Which of the block's own rows and columns a box of a parameter of ``shape`` holds, or None.

    Raises ValueError for a box that is cut inside dimensions that are flattened into columns.
    """
    lead = block.grid.lead(shape)
    for place, (begin, size) in zip(_unravel(block.slice, shape[:lead]), box):
        if not begin <= place < begin + size:
            return None
    top, height = box[lead]
    left, width = _flattened(block, shape[lead + 1 :], box[lead + 1 :])
    rows, columns = block.rows.before(top), block.columns.before(left)
    held = block.rows.before(top + height) - rows, block.columns.before(left + width) - columns
    return ((rows, held[0]), (columns, held[1])) if min(held) > 0 else None


def box_views(block: Block, shape: Sequence[int], box: Sequence[Span], strides: Sequence[int]) -> tuple[View, ...]:
    """The block's elements in a local tensor that is ``box`` of a parameter of ``shape``, with any ``strides``.

    Row by row of the part of the block that ``rectangle`` tells. Their sizes do not depend on the strides. Raises
    ValueError where the box cuts runs of columns apart so that this order needs a view for every row.
    """
    held = rectangle(block, shape, box)
    if held is None:
        return ()
    lead = block.grid.lead(shape)
    (row, height), (column, width) = held
    slice_places = _unravel(block.slice, shape[:lead])
    origin = sum((place - begin) * stride for place, (begin, _), stride in zip(slice_places, box, strides))
    origin += (block.rows.at(0) - box[lead][0]) * strides[lead]
    down = _dims(block.rows, strides[lead])
    if len(shape) - lead == 2:
        across = _dims(block.columns, strides[-1])
        origin += (block.columns.at(0) - box[-1][0]) * strides[-1]
    else:
        across = [(size, stride) for (_, size), stride in zip(box[lead + 1 :], strides[lead + 1 :])]
        column = block.columns.at(column) - box[lead + 1][0] * math.prod(shape[lead + 2 :])
    sideways = _boxes([size for size, _ in across], column, column + width)
    if height > 1 and len(sideways) > 1:
        raise ValueError(f"the part {box} cuts runs of columns apart ({block})")
    found = []
    for corner, sizes in _boxes([size for size, _ in down], row, row + height):
        for side, widths in sideways:
            both = [*down, *across]
            begin = origin + sum(place * stride for place, (_, stride) in zip((*corner, *side), both))
            found.append(_without_ones(View(begin, sizes + widths, tuple(stride for _, stride in both))))
    return tuple(found)


def _dims(stripes: Stripes, stride: int) -> list[tuple[int, int]]:
    """Sizes and strides of the stripes, whose neighbouring indices lie ``stride`` apart."""
    run = (stripes.length, stride)
    if stripes.count == 1:
        return [run]
    outer = (stripes.count, stripes.pitch * stride)
    return [outer] if stripes.length == 1 else [outer, run]


def _merged(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same elements in the same order with as few dimensions as there can be."""
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found or [(1, 1)]


def _boxes(sizes: Sequence[int], low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The range ``[low, high)`` of a row-major array of ``sizes`` as boxes, in order: their corners and sizes."""
    if low >= high:
        return []
    if len(sizes) == 1:
        return [((low,), (high - low,))]
    inner = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        return _in_row(first, _boxes(sizes[1:], head, tail))
    found = []
    if head:
        found += _in_row(first, _boxes(sizes[1:], head, inner))
        first += 1
    if first < last:
        found.append(((first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])))
    return found + _in_row(last, _boxes(sizes[1:], 0, tail))


def _in_row(
    row: int, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *corner), (1, *sizes)) for corner, sizes in boxes]


def _without_ones(view: View) -> View:
    kept = [(size, stride) for size, stride in zip(view.sizes, view.strides) if size > 1] or [(1, 1)]
    return View(view.offset, tuple(size for size, _ in kept), tuple(stride for _, stride in kept))


def _flattened(block: Block, sizes: Sequence[int], box: Sequence[Span]) -> Span:
    """Of dimensions that are flattened into columns, which columns the box holds."""
    if len(box) > 1 and 0 not in (held for _, held in box):
        if any(span != (0, full) for span, full in zip(box[1:], sizes[1:])):
            raise ValueError(f"the part {box} cuts dimensions that are flattened into columns, other than the first")
        if block.columns.count > 1:
            raise ValueError(f"columns {block.columns} of flattened dimensions cannot be a block of their own")
    return box[0][0] * math.prod(sizes[1:]), math.prod(held for _, held in box)


def _unravel(position: int, sizes: Sequence[int]) -> list[int]:
    places = []
    for size in reversed(sizes):
        position, place = divmod(position, size)
        places.append(place)
    return places[::-1]
