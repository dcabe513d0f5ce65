"""Tables of cells: every pair of values of two axes in `make test`, the full product in `make test-full`.

    @cells(ranks=[2, 4], stage=[0, 1, 2, 3], clip=[0.0, 0.5])
    def test_...(ranks: RankPool, stage: int, clip: float) -> None: ...

Options of one axis that change what another one does need every combination; those that do not are tested as well by
pairs, in a tenth of the time.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs

Filter = Callable[..., bool]  # of a cell's values, by name


class Filters(NamedTuple):
    """Which cells there are, and which of these are in `make test`."""

    there_is: Filter | None
    in_short: Filter | None


def cells(there_is: Filter | None = None, in_short: Filter | None = None, /, **axes: Sequence[Any]) -> Any:
    """Run a test on a table of its arguments. ``there_is`` says whether there is such a cell, ``in_short`` whether
    `make test` may take it: of rows on 2 and on 4 ranks, those on 4 that need 4. The axis ``ranks`` has numbers of
    ranks."""
    return pytest.mark.cells(Filters(there_is, in_short), axes)


def with_full(chosen: Sequence[tuple[Any, ...]], everything: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The rows chosen for `make test`, and the others for `make test-full`."""
    return [*chosen, *(pytest.param(*row, marks=pytest.mark.full) for row in everything if row not in chosen)]


def table(axes: dict[str, Sequence[Any]], filters: Filters, full: bool) -> list[tuple[Any, ...]]:
    """The cells: all, or few enough that every pair of values in one of all is in one of these."""
    names = list(axes)
    applied = [each for each in (filters.there_is, None if full else filters.in_short) if each is not None]
    product = [
        cell for cell in itertools.product(*axes.values()) if all(each(**dict(zip(names, cell))) for each in applied)
    ]
    if full or len(names) < 3:
        return product
    # Indices, because a value may be a dict. A row may be the beginning of a cell only.
    numbers = [range(len(values)) for values in axes.values()]
    values = [list(values) for values in axes.values()]
    known = [tuple(values[axis].index(value) for axis, value in enumerate(cell)) for cell in product]
    beginnings = {cell[:length] for cell in known for length in range(1, len(names) + 1)}
    rows = AllPairs([list(axis) for axis in numbers], filter_func=lambda row: tuple(row) in beginnings)
    chosen = [tuple(row) for row in rows]
    missed = _pairs(known) - _pairs(chosen)
    for cell in known:  # what the filter has kept the table from
        if missed & _pairs([cell]):
            chosen.append(cell)
            missed -= _pairs([cell])
    return [tuple(values[axis][number] for axis, number in enumerate(cell)) for cell in sorted(chosen)]


def _pairs(rows: Sequence[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
