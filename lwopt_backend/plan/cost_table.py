"""Measured costs: the seconds that Newton-Schulz took on one device, as a cost model for planning.

Ranks that plan with a table must read the same one: two tables are two plans, which the ranks notice and stop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from lwopt_backend.plan.cost import CostModel, Shape, newton_schulz_flops

SCHEMA = 1
RULE = "newton_schulz"  # whose flops scale what is not measured
TABLE_KEYS: Mapping[str, type] = {
    "schema": int,
    "device": str,
    "dtype": str,
    "rule": str,
    "steps": int,
    "torch_version": str,
    "entries": list,
}
ENTRY_KEYS: Mapping[str, type] = {"rows": int, "columns": int, "batch": int, "seconds": float}


@dataclass(frozen=True, slots=True)
class CostTable:
    """What was measured, and on what. ``seconds`` holds (rows, columns), the stack's size, median seconds per matrix.

    Raises ValueError, which names the entry, where a table could not have been measured.
    """

    device: str
    dtype: str  # of the iteration, e.g. "bfloat16"
    rule: str
    steps: int
    torch_version: str
    seconds: tuple[tuple[Shape, int, float], ...]

    def __post_init__(self) -> None:
        if self.rule != RULE:
            raise ValueError(f"rule: expected {RULE!r}, found {self.rule!r}")
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, found {self.steps}")
        if not self.seconds:
            raise ValueError("entries: expected at least one measurement, found none")
        seen: set[tuple[Shape, int]] = set()
        for index, (shape, batch, seconds) in enumerate(self.seconds):
            if problem := _problem(shape, batch, seconds, seen):
                raise ValueError(f"entries[{index}] ({shape[0]} x {shape[1]}, batch {batch}): {problem}")
            seen.add((_sides(shape), batch))

    def to_json(self) -> str:
        entries = [dict(zip(ENTRY_KEYS, (*shape, batch, float(seconds)))) for shape, batch, seconds in self.seconds]
        head = (SCHEMA, self.device, self.dtype, self.rule, self.steps, self.torch_version)
        return json.dumps(dict(zip(TABLE_KEYS, (*head, entries))), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The table that ``to_json`` wrote. Raises ValueError that names what is wrong."""
        found = json.loads(text)
        schema = found.get("schema", SCHEMA) if isinstance(found, dict) else SCHEMA
        if schema != SCHEMA:  # before the keys, which another schema may have others of
            raise ValueError(f"schema: expected {SCHEMA}, found {schema!r}; make a new table with `lwopt calibrate`")
        _, device, dtype, rule, steps, torch_version, entries = _values(found, TABLE_KEYS, "table")
        read = [_values(entry, ENTRY_KEYS, f"entries[{index}]") for index, entry in enumerate(entries)]
        measured = tuple(((rows, columns), batch, seconds) for rows, columns, batch, seconds in read)
        return cls(device, dtype, rule, steps, torch_version, measured)

    def unmeasured(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Those of ``shapes``, in order and with sorted sides, whose cost is not measured but scaled from another's."""
        known = {_sides(shape) for shape, _, _ in self.seconds}
        return [shape for shape in dict.fromkeys(map(_sides, shapes)) if shape not in known]

    def model(self, stacked: bool = True) -> CostModel:
        """Nanoseconds per matrix, at least 1: as measured, else scaled by flops from the nearest measured shape.

        With ``stacked`` a shape's largest stack counts, as on an accelerator; without, its smallest, mostly one
        matrix alone, as on a CPU.
        """
        measured: dict[Shape, int] = {}
        for shape, _, seconds in sorted(self.seconds, key=lambda entry: entry[1], reverse=not stacked):
            measured[_sides(shape)] = max(1, round(seconds * 1e9))
        how = "in stacks" if stacked else "one by one"
        meaning = f"measured on {self.device} in {self.dtype}, {how}"
        return CostModel("table", "ns", partial(_nanoseconds, measured), meaning)


def read_cost_table(path: str | Path) -> CostTable:
    """The table in the file. Raises FileNotFoundError, or ValueError that names the file and what is wrong in it."""
    path = Path(path)
    try:
        return CostTable.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no cost table; `lwopt calibrate` makes one") from None
    except ValueError as error:
        raise ValueError(f"{path} is no valid cost table: {error}") from error


def _nanoseconds(measured: Mapping[Shape, int], shape: Shape) -> int:
    sides = _sides((max(1, shape[0]), max(1, shape[1])))  # an empty matrix has a cost, if the smallest
    if sides in measured:
        return measured[sides]
    nearest = min(measured, key=lambda known: (_distance(sides, known), known))
    return max(1, measured[nearest] * newton_schulz_flops(sides) // newton_schulz_flops(nearest))


def _distance(one: Shape, other: Shape) -> Fraction:
    """exp(|log s - log s'| + |log l - log l'|): logarithms would round, and a tie break differently elsewhere."""
    (short, long), (other_short, other_long) = one, other
    ratio = Fraction(max(short, other_short), min(short, other_short))
    return ratio * Fraction(max(long, other_long), min(long, other_long))


def _sides(shape: Shape) -> Shape:
    return min(shape), max(shape)


def _problem(shape: Shape, batch: int, seconds: float, seen: Collection[tuple[Shape, int]]) -> str | None:
    if min(*shape, batch) < 1:
        return "rows, columns and batch must be at least 1"
    if not (math.isfinite(seconds) and seconds > 0):
        return f"seconds must be positive and finite, found {seconds}"
    if (_sides(shape), batch) in seen:
        return "measured twice; (rows, columns) and (columns, rows) are one shape"
    return None


def _values(found: Any, keys: Mapping[str, type], where: str) -> list[Any]:
    """The values of ``keys``, in their order; all of them and no others must be there."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, found {found!r:.60}")
    if unknown := sorted(set(found) - set(keys)):
        raise ValueError(f"{where}: unknown key(s) {', '.join(unknown)}; known: {', '.join(keys)}")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{where}: missing key(s) {', '.join(missing)}")
    for key, kind in keys.items():
        if type(found[key]) is not kind:  # exactly: True is no integer here
            raise ValueError(f"{where}: {key} must be of type {kind.__name__}, found {found[key]!r:.60}")
    return [found[key] for key in keys]
