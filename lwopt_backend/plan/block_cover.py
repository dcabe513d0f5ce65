"""The proof that the blocks of a parameter are exactly its elements: none left, none in two blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lwopt_backend.plan.blocks import Block, Stripes


def check_cover(param: str, blocks: Sequence[Block]) -> None:
    """Raises ValueError that names the parameter and what is outside of it, left over or in two blocks.

    Works on runs of rows and columns, and once for all slices that are divided alike.
    """
    if not blocks:
        raise ValueError(f"parameter {param!r}: expected at least one block")
    grid = blocks[0].grid
    slices: dict[int, list[Block]] = {number: [] for number in range(grid.slices)}
    for block in blocks:
        if block.grid != grid:
            raise ValueError(f"parameter {param!r} of {grid}: block {block.name!r} is of {block.grid}")
        if block.slice not in slices or block.rows.stop > grid.rows or block.columns.stop > grid.columns:
            raise ValueError(f"parameter {param!r} of {grid}: block {block.name!r} reaches beyond it: {block}")
        slices[block.slice].append(block)
    alike: set[tuple[tuple[Stripes, Stripes], ...]] = set()
    for number, members in slices.items():
        form = tuple((block.rows, block.columns) for block in members)
        if form not in alike:
            _check_slice(f"parameter {param!r} of {grid}, slice {number}", members)
            alike.add(form)


def _check_slice(where: str, blocks: Sequence[Block]) -> None:
    if not blocks:
        raise ValueError(f"{where}: belongs to no block")
    grid = blocks[0].grid
    rows = _intervals(grid.rows, [block.rows for block in blocks])
    columns = _intervals(grid.columns, [block.columns for block in blocks])
    holders: dict[tuple[int, int], Block] = {}
    for block in blocks:
        across = _within(columns, block.columns)
        for top in _within(rows, block.rows):
            for left in across:
                other = holders.setdefault((top, left), block)
                if other is not block:
                    shared = _place(top, rows[top], left, columns[left])
                    raise ValueError(f"{where}: {shared} are in {other.name!r} and in {block.name!r}")
    left = grid.slice_numel - sum(block.numel for block in blocks)
    if left:
        top, side = next((r, c) for r in rows for c in columns if (r, c) not in holders)
        missing = _place(top, rows[top], side, columns[side])
        raise ValueError(f"{where}: {left} of {grid.slice_numel} elements belong to no block, the first {missing}")


def _intervals(size: int, selections: Sequence[Stripes]) -> dict[int, int]:
    """Indices between two neighbouring ends of runs, as start: stop."""
    ends = {0, size, *chain.from_iterable(run for stripes in set(selections) for run in stripes.runs())}
    ordered = sorted(ends)
    return dict(zip(ordered, ordered[1:]))


def _within(intervals: dict[int, int], stripes: Stripes) -> list[int]:
    """The starts of the intervals that the stripes consist of."""
    starts = []
    for start, stop in stripes.runs():
        while start < stop:
            starts.append(start)
            start = intervals[start]
    return starts


def _place(top: int, bottom: int, left: int, right: int) -> str:
    return f"rows {top}:{bottom}, columns {left}:{right}"
