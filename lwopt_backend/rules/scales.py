"""Factors on the learning rate by a matrix's shape, under the names that implementations have for them."""

from __future__ import annotations

import math
from collections.abc import Callable

Scale = Callable[[int, int], float]


def original(rows: int, columns: int) -> float:
    """sqrt(max(1, rows / columns)): Jordan's, torch's default; Megatron's "shape_scaling"."""
    return math.sqrt(max(1, rows / columns))


def match_rms_adamw(rows: int, columns: int) -> float:
    """0.2 sqrt(max(rows, columns)), for AdamW's learning rates: "Muon is Scalable for LLM Training", arXiv 2502.16982.

    dion calls it "rms_norm".
    """
    return 0.2 * math.sqrt(max(rows, columns))


def spectral(rows: int, columns: int) -> float:
    """sqrt(max(rows, columns)): Megatron's "spectral"; an update's elements have a root mean square of about one."""
    return math.sqrt(max(rows, columns))


def unit_rms_norm(rows: int, columns: int) -> float:
    """sqrt(rows / columns), which makes the operator norm between root mean squares one: Scion, arXiv 2502.07529.

    Megatron's "unit_rms_norm"; dion calls it "spectral_norm".
    """
    return math.sqrt(rows / columns)


def none(rows: int, columns: int) -> float:
    """The learning rate as it is."""
    return 1.0


SCALES: dict[str, Scale] = {
    "original": original,
    "match_rms_adamw": match_rms_adamw,
    "shape_scaling": original,
    "spectral": spectral,
    "unit_rms_norm": unit_rms_norm,
    "spectral_norm": unit_rms_norm,
    "rms_norm": match_rms_adamw,
    "none": none,
}
