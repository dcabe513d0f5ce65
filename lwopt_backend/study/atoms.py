"""Matrices to plan: parameters as they are, cut by tensor parallelism, or split into the matrices that are in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from lwopt_backend.plan.cost import CostModel
from lwopt_backend.plan.types import Atom
from lwopt_backend.routing import Route, stacked

STACK = "stack"
Split = tuple[int, ...] | int | str  # rows of each block, the number of equal blocks, or STACK: one matrix a slice


def parse_split(text: str) -> tuple[str, Split]:
    """``GLOB=N`` (equal row blocks), ``GLOB=R1,R2,...`` (blocks of so many rows) or ``GLOB=stack`` (a matrix a slice).

    Raises ValueError for anything else.
    """
    glob, _, how = text.rpartition("=")
    if glob and how == STACK:
        return glob, STACK
    numbers = how.split(",")
    if not glob or not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"split {text!r}: expected GLOB=N, GLOB=rows,rows,... or GLOB={STACK}")
    rows = tuple(int(number) for number in numbers)
    return glob, rows[0] if len(rows) == 1 else rows


def check_splits(routes: Sequence[Route], splits: Mapping[str, Split]) -> None:
    """Raises ValueError for a split that matches no parameter."""
    for glob in splits:
        if not any(fnmatchcase(route.name, glob) for route in routes):
            raise ValueError(f"split: {glob!r} matches no parameter; names look like {routes[0].name!r}")


def as_trained(routes: Sequence[Route], splits: Mapping[str, Split]) -> tuple[list[Route], dict[str, Split]]:
    """Routes and splits as our optimizers have them: stacked experts are matrices, slice by slice."""
    stacks = {r.name: r for r in routes if r.stack and r.reason == f"{len(r.shape)}-D"}
    trained = [replace(r, kind="matrix", reason=stacked(r.shape)) if r.name in stacks else r for r in routes]
    return trained, {**splits, **{name: STACK for name in sorted(stacks) if not stacks[name].parts}}


def make_atoms(
    routes: Sequence[Route], splits: Mapping[str, Split], cost: CostModel, *, tp: int = 1
) -> tuple[list[Atom], list[Route]]:
    """The atoms of the matrix parameters among ``routes``, and what stays element-wise.

    A parameter that a split's glob matches becomes several atoms, also if it is a stack of more than two dimensions
    that would be element-wise otherwise. With ``tp`` > 1 a rank stores one part in ``tp`` of every matrix's longer
    side, and the ``tp`` ranks take turns in the work: an atom then has the part's shape, and the whole's cost over
    ``tp``. Raises ValueError for a split that does not fit.
    """
    atoms: list[Atom] = []
    rest: list[Route] = []
    for route in routes:
        glob = next((glob for glob in splits if fnmatchcase(route.name, glob)), None)
        if route.kind == "frozen" or (route.kind != "matrix" and (glob is None or len(route.shape) < 3)):
            rest.append(route)
            continue
        blocks = route.parts or [(route.name, route.shape)] if glob is None else _blocks(route, splits[glob])
        for name, (rows, columns) in blocks:
            whole = cost.of((rows, columns))
            atoms.append(Atom(name, _part(rows, columns, tp), -(-whole // tp)))
    return atoms, rest


def _part(rows: int, columns: int, tp: int) -> tuple[int, int]:
    return (-(-rows // tp), columns) if rows >= columns else (rows, -(-columns // tp))


def _blocks(route: Route, split: Split) -> list[tuple[str, tuple[int, int]]]:
    if split == STACK:
        if len(route.shape) < 3:
            raise ValueError(f"split: {route.name!r} has shape {route.shape}; a stack has three dimensions or more")
        count, (rows, columns) = math.prod(route.shape[:-2]), route.shape[-2:]
        return [(f"{route.name}[{i}]", (rows, columns)) for i in range(count)]
    if len(route.shape) != 2:
        raise ValueError(f"split: {route.name!r} has shape {route.shape}; row blocks are for two dimensions")
    rows, columns = route.shape
    if isinstance(split, int):
        if rows % split:
            raise ValueError(f"split: {rows} rows of {route.name!r} do not divide into {split} equal blocks")
        split = (rows // split,) * split
    assert isinstance(split, tuple)
    if sum(split) != rows:
        raise ValueError(f"split: blocks of {'+'.join(map(str, split))} rows do not add up to {rows} of {route.name!r}")
    starts = [sum(split[:i]) for i in range(len(split))]
    return [(f"{route.name}[{start}:{start + size}]", (size, columns)) for start, size in zip(starts, split)]
