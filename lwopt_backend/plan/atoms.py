"""Parameters, the matrices (atoms) in them, and blocks of fused weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate, product


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension ``dim`` of a parameter is cut into equal parts, one for each of ``ranks`` tensor-parallel ranks.

    ``shared``: each rank has a part of every matrix in a fused weight, e.g. of q, k and v; ``parts`` are its rows of
    each, if the host provides them.
    """

    dim: int
    ranks: int
    shared: bool = True
    parts: tuple[int, ...] = ()

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The whole parameter's shape, from a shard's."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(shape))

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shard's shape, from the whole parameter's."""
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(shape))

    def __str__(self) -> str:
        return f"{('rows', 'columns')[self.dim] if self.dim < 2 else f'dim {self.dim}'} cut over {self.ranks} TP ranks"


@dataclass(frozen=True)
class TrainedParam:
    """A trained parameter, as every rank sees it.

    ``shape`` is the whole parameter's, ``dtype`` the model's, e.g. ``"bfloat16"``. ``rule`` is a name in the registry
    (``"muon"``, ``"adamw"``), ``group`` the number of its param group. ``transposed`` is as in ``Atom``; a ``tied``
    parameter is used several times. ``blocks`` are its matrices; an element-wise parameter has none. ``cut`` is that
    of tensor parallelism; ``parts`` are the rows that each rank has of every part of a fused weight, or of its bias.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    group: int = 0
    transposed: bool = False
    tied: bool = False
    blocks: tuple[Block, ...] = ()
    cut: Cut | None = None
    parts: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on one tensor-parallel rank."""
        return self.shape if self.cut is None else self.cut.local(self.shape)

    @property
    def matrices(self) -> list[str]:
        """The elements of the whole parameter in each matrix; in order, where each rank has a part of every matrix."""
        if self.cut is None or len(self.parts) != len(self.blocks):
            return list(map(str, self.blocks))
        pairs = zip(accumulate(self.parts, initial=0), self.parts)
        rows = [Stripes(start * self.cut.ranks, size * self.cut.ranks) for start, size in pairs]
        return [str(replace(block, rows=of)) for block, of in zip(self.blocks, rows)]

    @property
    def tiles(self) -> int:
        """As in ``Atom``."""
        return self.cut.ranks if self.cut is not None and self.cut.dim == 1 else 1

    def line(self) -> str:
        """The line that must be equal on all ranks, in a fixed spelling (see ``runtime.agreement``)."""
        shape = "x".join(map(str, self.shape))
        more = f"{' transposed' if self.transposed else ''}{f', {self.cut}' if self.cut else ''}"
        return f"{self.name} {shape} {self.dtype} {self.rule}{more}"


@dataclass(frozen=True, slots=True)
class Atom:
    """One independent matrix, stored in ``shape`` (rows, columns), whose update costs ``cost`` flops at its owner.

    A matrix rule expects (outputs, inputs); a ``transposed`` matrix is stored as (inputs, outputs). Elements are
    numbered as they are stored: a matrix in ``tiles``, equal parts of the columns, is stored part after part.
    """

    name: str
    shape: tuple[int, int]
    cost: int
    transposed: bool = False
    tiles: int = 1

    @property
    def rule_shape(self) -> tuple[int, int]:
        """(outputs, inputs), the shape in which the rule sees the whole matrix."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


# Matrices inside a parameter: blocks of it, such as q, k and v of a fused weight or the experts of a stack.
#
# A parameter is divided into slices of a matrix each (a ``Grid``). A block is some rows and some columns of one slice,
# both given by ``Stripes``, equal runs at equal distances::
#
#     q k v of two groups, sizes 4, 2, 2:   q q q q k k v v q q q q k k v v      q: Stripes(0, 4, count=2, pitch=8)
#     gate and up, interleaved:             g u g u g u g u                      up: Stripes(1, 1, count=4, pitch=2)
#
# The elements of a block, row by row, keep their order in the flattened parameter: a contiguous range of the parameter
# has a contiguous range of the block.


@dataclass(frozen=True, slots=True)
class Grid:
    """A parameter's elements as ``slices`` x ``rows`` x ``columns``, in their order in memory."""

    slices: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int], lead: int) -> Grid:
        """The first ``lead`` dimensions are slices, the next is rows; the rest are columns, several as if flattened."""
        return cls(math.prod(shape[:lead]), shape[lead], math.prod(shape[lead + 1 :]))

    def lead(self, shape: Sequence[int]) -> int:
        """The number of dimensions of ``shape`` that are slices. Raises ValueError for the shape of a different grid.

        Dimensions of size 1 allow several numbers; returns the largest, which flattens the fewest dimensions.
        """
        return self.in_rows(shape)[0]

    def in_rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many dimensions of ``shape`` are slices, and how many after them are flattened into rows: one, or several
        of a kernel by head.

        Raises ValueError for the shape of a different grid.
        """
        for lead in reversed(range(len(shape) - 1)):
            if Grid.of(shape, lead) == self:
                return lead, 1
        for lead in range(len(shape) - 2):
            for stop in range(lead + 2, len(shape)):
                if self == Grid(*map(math.prod, (shape[:lead], shape[lead:stop], shape[stop:]))):
                    return lead, stop - lead
        raise ValueError(f"a parameter of shape {tuple(shape)} is not {self}")

    @property
    def slice_numel(self) -> int:
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.slices} x {self.rows} x {self.columns}"


@dataclass(frozen=True, slots=True)
class Stripes:
    """``count`` runs of ``length`` indices, ``pitch`` apart; the first begins at ``start``."""

    start: int
    length: int
    count: int = 1
    pitch: int = 0

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or self.count < 1 or (self.count > 1 and self.pitch <= self.length):
            raise ValueError(f"{self!r}: expected runs of one index or more with a gap between them")

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.length * self.count

    @property
    def stop(self) -> int:
        """The last index plus one."""
        return self.at(self.size - 1) + 1

    def at(self, place: int) -> int:
        """The index at position ``place`` of these."""
        run, rest = divmod(place, self.length)
        return self.start + run * self.pitch + rest

    def before(self, index: int) -> int:
        """The number of these indices below ``index``."""
        if index <= self.start:
            return 0
        if self.count == 1:
            return min(index - self.start, self.length)
        run, rest = divmod(index - self.start, self.pitch)
        return self.size if run >= self.count else run * self.length + min(rest, self.length)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Start and stop of every run."""
        for number in range(self.count):
            start = self.start + number * self.pitch
            yield start, start + self.length

    def __str__(self) -> str:
        repeated = f" x {self.count} every {self.pitch}" if self.count > 1 else ""
        return f"{self.start}:{self.start + self.length}{repeated}"


@dataclass(frozen=True, slots=True)
class Block:
    """One matrix in a parameter. ``name`` is unique there: ``"q"``, ``"[3]"``, ``"[3].gate"``; ``""`` for a single one.

    Two blocks are equal if they have the same elements of equally large parameters.
    """

    name: str = field(compare=False)
    grid: Grid
    slice: int
    rows: Stripes
    columns: Stripes

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.columns.size

    @property
    def numel(self) -> int:
        return self.rows.size * self.columns.size

    @property
    def is_everything(self) -> bool:
        """Whether the block is the whole parameter."""
        return self.grid.slices == 1 and self.shape == (self.grid.rows, self.grid.columns)

    def of(self, param: str) -> str:
        """The block's full name in parameter ``param``."""
        return f"{param}.{self.name}" if self.name and not self.name.startswith("[") else param + self.name

    def flat(self, place: int) -> int:
        """The index in the flattened parameter of the element at ``place`` of the flattened block."""
        row, column = divmod(place, self.columns.size)
        return self._begin + self.rows.at(row) * self.grid.columns + self.columns.at(column)

    def before(self, flat: int) -> int:
        """The number of the block's elements before element ``flat`` of the flattened parameter."""
        row, column = divmod(max(0, flat - self._begin), self.grid.columns)
        above = self.rows.before(row)
        in_row = self.columns.before(column) if self.rows.before(row + 1) > above else 0
        return above * self.columns.size + in_row

    @property
    def _begin(self) -> int:
        return self.slice * self.grid.slice_numel

    def __str__(self) -> str:
        return f"slice {self.slice} rows {self.rows} columns {self.columns} of {self.grid}"


# Divisions of a matrix's outputs: a name and indices for every part.

Parts = Sequence[tuple[str, Stripes]]


def repeated(parts: Parts, size: int, times: int) -> Parts:
    """Parts of ``size`` outputs, several times one after the other: q, k, v, q, k, v, ..."""
    if len(parts) == 1:
        return [(parts[0][0], Stripes(0, size * times))]
    pitches = [size if run.count == 1 else run.pitch for _, run in parts]
    return [
        (name, Stripes(run.start, run.length, run.count * times, pitch)) for (name, run), pitch in zip(parts, pitches)
    ]


def undivided(size: int) -> Parts:
    return [("", Stripes(0, size))]


def grouped(names: Sequence[str], sizes: Sequence[int], groups: int = 1) -> Parts:
    """``groups`` times a run of every part, of length ``sizes``; one group is the parts one after the other.

    Block order is one group; interleaving q, k and v by query group or by head makes as many groups. Alternating gate
    and up have sizes (1, 1) and as many groups as each has outputs.
    """
    pitch, start, parts = sum(sizes), 0, []
    for name, size in zip(names, sizes, strict=True):
        if size == pitch or groups == 1:
            parts.append((name, Stripes(start, size * groups)))
        else:
            parts.append((name, Stripes(start, size, groups, pitch)))
        start += size
    return parts


def equal(count: int, size: int, name: str) -> Parts:
    """``count`` consecutive parts of ``size``: the heads of a projection."""
    return grouped([f"{name}{number}" for number in range(count)], [size] * count)


def divided(grid: Grid, outputs: Parts, inputs: Parts = (), *, transposed: bool = False) -> tuple[Block, ...]:
    """Every slice divided into parts of its outputs, its rows, or its columns if stored ``transposed``; and of inputs.

    Raises ValueError for parts that are not exactly the slice.
    """
    return _divided(grid, tuple(outputs), tuple(inputs), transposed)


@lru_cache(maxsize=256)  # layers that are alike have the same
def _divided(
    grid: Grid, outputs: tuple[tuple[str, Stripes], ...], inputs: tuple[tuple[str, Stripes], ...], transposed: bool
) -> tuple[Block, ...]:
    sizes = (grid.columns, grid.rows) if transposed else (grid.rows, grid.columns)
    inputs = inputs or tuple(undivided(sizes[1]))
    for parts, size in zip((outputs, inputs), sizes):
        _check_partition(parts, size)
    blocks = []
    for number in range(grid.slices):
        for (of, taken), (part, made) in product(inputs, outputs):
            label = ".".join(filter(None, [f"[{number}]" if grid.slices > 1 else "", of, part]))
            rows, columns = (taken, made) if transposed else (made, taken)
            blocks.append(Block(label, grid, number, rows, columns))
    return tuple(blocks)


def _check_partition(parts: Parts, size: int) -> None:
    """Raises ValueError for indices below ``size`` in no part or in two, and for others."""
    end, runs = 0, sorted((start, stop, name) for name, run in parts for start, stop in run.runs())
    for start, stop, name in [*runs, (size, size, "the end")]:
        if start != end:
            raise ValueError(f"expected parts of {size} in all, the next from {end} on, found {name!r} from {start} on")
        end = stop


@cache
def matrices_of(shape: tuple[int, ...]) -> tuple[Block, ...]:
    """The matrices of a parameter that nothing divides: the parameter, or every slice of more than two dimensions."""
    grid = Grid.of(shape, len(shape) - 2)
    return divided(grid, undivided(grid.rows))


def lie_end_to_end(blocks: Sequence[Block]) -> bool:
    """Whether the blocks are contiguous in the flattened parameter, one after the other."""
    place = 0
    for block in blocks:
        if (block.flat(0), block.flat(block.numel - 1)) != (place, place + block.numel - 1):
            return False
        place += block.numel
    return True
