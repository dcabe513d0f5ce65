"""What the product says of a model, from outside: ``explain``, and what a matrix rule of a test is given."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer, MatrixRule, explain, register_rule
from lwopt_backend.groups.registry import MATRIX_RULES

OPTIONS: dict[str, Any] = {"allow_no_matrix": True}


class Told(NamedTuple):
    """``matrices`` has, of each one, which elements it has, as (outputs, inputs); None if the rule is element-wise.
    ``said``: it is told that the weight may be otherwise, by ``looks_fused`` or in a warning."""

    why: str
    matrices: list[Tensor] | None
    said: bool


@dataclass
class Elements(MatrixRule):
    """Notes the matrices that it is given, whose gradients are the numbers of their elements."""

    lr: float = 0.0
    given: ClassVar[list[Tensor]] = []

    def transform(self, matrices: Tensor) -> Tensor:
        self.given.extend(matrices.double().reshape(-1, *matrices.shape[-2:]))
        return torch.zeros_like(matrices)


def told(model: nn.Module, example: Any = None) -> dict[str, Told]:
    """What would be trained how, by name. ``model`` has memory, and is as it was after the call."""
    options = {**OPTIONS, "example": example}
    with mock.patch.dict(MATRIX_RULES):
        register_rule("elements", Elements, source="a test")
        with heard() as warned:
            said = explain(model, matrix="elements", show=False, **options)
            optimizer = LayerWiseOptimizer(model, "elements", report=False, **options)
        of = matrices_of(model, optimizer)
    return {
        each.name: Told(
            each.why,
            of.get(each.name, []) if each.kind == "matrix" else None,
            is_unclear(each, warned),
        )
        for each in said
    }


def matrices_of(model: nn.Module, optimizer: LayerWiseOptimizer) -> dict[str, list[Tensor]]:
    """Which elements are in each matrix, by parameter: two steps, because a float32 has 24 bits."""
    named, of = dict(model.named_parameters()), dict[str, list[Tensor]]()
    starts = torch.tensor([0, *(param.numel() for param in named.values())]).cumsum(0)
    found = []
    for high in (False, True):
        losses = []
        for first, param in zip(starts.tolist(), named.values()):
            numbers = torch.arange(first, first + param.numel()).view(param.shape)
            if param.requires_grad and param.is_floating_point():
                losses.append((param * (numbers >> 20 if high else numbers & 0xFFFFF)).sum())
        torch.stack(losses).sum().backward()
        Elements.given.clear()
        optimizer.step()
        found.append([*Elements.given])
        optimizer.zero_grad()
    Elements.given.clear()
    for low, high_part in zip(*found, strict=True):
        numbers = (low + high_part * 2**20).long()
        at = int(torch.searchsorted(starts, numbers[0, 0], right=True)) - 1
        of.setdefault([*named][at], []).append(numbers - starts[at])
    return of


@contextmanager
def heard() -> Iterator[Any]:
    """What was warned of inside."""

    class Warned(list[str]):
        def __contains__(self, text: object) -> bool:
            return any(str(text) in each for each in self)

    texts = Warned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(each.message) for each in caught)


def kind_of(name: str) -> str:
    """A name as tables and warnings may have it: with a star for the number of a layer."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def is_unclear(explained: Any, warned: Any) -> bool:
    """Whether the product says of a weight that it may be otherwise."""
    names = explained.name, kind_of(explained.name)
    return bool(explained.looks_fused) or any(repr(name) in warned for name in names)


def as_sets(matrix: Tensor) -> tuple[frozenset[frozenset[int]], frozenset[frozenset[int]]]:
    """A matrix whatever the order of its rows and columns, which no rule for whole matrices looks at."""
    rows, columns = (frozenset(map(frozenset, one.tolist())) for one in (matrix, matrix.T))
    return rows, columns
