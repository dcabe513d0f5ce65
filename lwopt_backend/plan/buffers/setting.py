"""What planning owned storage is given: parameters, and how to plan."""

from __future__ import annotations

from dataclasses import dataclass

from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import CostModel
from lwopt_backend.plan.machine import Machine
from lwopt_backend.plan.types import Atom


@dataclass(frozen=True, slots=True)
class OwnedParam:
    """A parameter as planning sees it. ``atom`` is None for an element-wise one; ``tied`` has several uses.

    ``parts`` are elements and cost of the matrices in it, where there are several that lie one after the other.
    """

    name: str
    numel: int
    dtype: str
    atom: Atom | None
    tied: bool = False
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """How to plan. ``bucket_numel`` is the least size of a bucket, ``bus_multiple`` what a padded one ends on."""

    layout: str
    bucket_numel: int
    machine: Machine
    cost: CostModel
    elements: Elements
    direct: bool = False  # parts go straight to their owners, so uneven ones cost nothing
    bus_multiple: int = 1
