"""Numbers as text: three digits that matter, thousands separated, units apart so that a column shares one."""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE = "–"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit and what one of it is, in bytes or seconds."""

    name: str
    size: float

    def text(self, amount: float | None) -> str:
        """``amount`` in this unit, without its name."""
        return NONE if amount is None else digits(amount / self.size)

    def named(self, amount: float) -> str:
        return f"{self.text(amount)} {self.name}"


TIME_UNITS = (Unit("ms", 1e-3), Unit("µs", 1e-6), Unit("ns", 1e-9))
BYTE_UNITS = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))
SI_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6))


def byte_unit(largest: float) -> Unit:
    """The unit of a column or axis whose largest amount this is: GiB from one on."""
    return next((unit for unit in BYTE_UNITS if largest >= unit.size), BYTE_UNITS[-1])


def time_unit(largest: float) -> Unit:
    """ms from a tenth of one, however long, so that steps are told in the same unit."""
    return next((unit for unit in TIME_UNITS if largest >= unit.size / 10), TIME_UNITS[-1])


def digits(value: float | None) -> str:
    """Three significant digits, or all digits before the point: ``1,138``, ``27.5``, ``0.480``; None is a dash."""
    if value is None:
        return NONE
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}" if places < 7 else f"{value:.3g}"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def ratio(value: float | None) -> str:
    """Such as the busiest rank over the mean: three places, so that 1.004 is not 1."""
    return NONE if value is None else f"{value:.3f}" if value < 10 else digits(value)


def percent(value: float | None) -> str:
    """A percentage without its sign, one place."""
    return NONE if value is None else f"{value:,.1f}"


def rate(value: float, unit: str) -> str:
    """With a decimal prefix, as rates are quoted: ``400 TFLOP/s``."""
    prefix, size = next((pair for pair in SI_PREFIXES if value >= pair[1] * 0.9995), SI_PREFIXES[-1])
    return f"{value / size:.3g} {prefix}{unit}"


def one_line(text: object, most: int = 10_000) -> str:
    """Printable text on one line; what is longer than ``most`` loses its middle. Line breaks become spaces."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[: most // 3]}…{line[len(line) - (most - most // 3 - 1) :]}"
