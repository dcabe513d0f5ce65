"""The things a plan is about: parameters, and the matrices (atoms) in them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One trainable parameter as every rank sees it.

    ``rule`` is a name in the registry (``"muon"``, ``"adamw"``); ``dtype`` is the model's, e.g. ``"bfloat16"``.
    ``transposed`` as in ``Atom``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    transposed: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def line(self) -> str:
        """One line that two ranks must agree on, in a fixed spelling (see ``runtime.agreement``)."""
        shape = "x".join(map(str, self.shape))
        return f"{self.name} {shape} {self.dtype} {self.rule}{' transposed' if self.transposed else ''}"


@dataclass(frozen=True, slots=True)
class Atom:
    """One independent matrix, stored in ``shape`` (rows, columns), whose update costs ``cost`` flops at its owner.

    A matrix rule is about (outputs, inputs); a ``transposed`` matrix is stored as (inputs, outputs).
    """

    name: str
    shape: tuple[int, int]
    cost: int
    transposed: bool = False

    @property
    def rule_shape(self) -> tuple[int, int]:
        """(outputs, inputs), the shape in which the rule sees the matrix."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]
