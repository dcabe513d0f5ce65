"""The things a plan is about: parameters, and the matrices (atoms) in them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One trainable parameter as every rank sees it.

    ``rule`` is a name in the registry (``"muon"``, ``"adamw"``); ``dtype`` is the model's, e.g. ``"bfloat16"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def line(self) -> str:
        """One line that two ranks must agree on, in a fixed spelling (see ``runtime.agreement``)."""
        return f"{self.name} {'x'.join(map(str, self.shape))} {self.dtype} {self.rule}"


@dataclass(frozen=True, slots=True)
class Atom:
    """One independent matrix of ``shape`` (rows, columns) whose update costs ``cost`` flops at its owner."""

    name: str
    shape: tuple[int, int]
    cost: int

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]
