"""What each weight of a model is, written by hand from its ``forward``: models, examples of their inputs, and truths.

A truth is a word, for a weight that is no matrix (``head``, ``table``, ``embedding``, ``convolution``, ``vector``), or
the weight's dimensions in order, a letter each: ``o`` outputs, ``i`` inputs, ``e`` experts or other slices of which
each is multiplied by itself. ``oi`` is a linear, ``io`` what multiplies from the right, ``eio`` a stack of these, and
``ioo`` one matrix whose outputs are the last two dimensions. ``4*oi`` has 4 slices in its first dimension. Outputs
that are several matrices follow: ``oi/3`` is three equal runs, ``oi[8, 4, 4]`` runs of these sizes, ``oi[2, 1]x4`` such
runs in each of four groups, ``oi%2`` every second output. ``or`` is between truths that the forward does not decide.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Example = tuple[tuple[Any, ...], dict[str, Any]]
Made = TypeVar("Made", bound=type[nn.Module])
WORDS = ("head", "table", "embedding", "convolution", "vector")
FORM = re.compile(r"(?:(\d+)\*)?([eoi]+)(?:/(\d+)|%(\d+)|\[([\d, ]+)\](?:x(\d+))?)?")


class Case(NamedTuple):
    """``truth`` is by a glob on names of parameters; every parameter of two dimensions or more has one."""

    model: Callable[[], nn.Module]
    example: Callable[[], Example]
    truth: Mapping[str, str]

    def truths(self, model: nn.Module) -> dict[str, str]:
        """The truth of each parameter of two dimensions or more."""
        return {name: self.of(name) for name, param in model.named_parameters() if param.ndim > 1}

    def of(self, name: str) -> str:
        found = [truth for glob, truth in self.truth.items() if fnmatchcase(name, glob)]
        assert len(found) == 1, f"expected one truth of {name}, found {found}"
        return found[0]


CASES: dict[str, Case] = {}


def case(truth: Mapping[str, str], *args: Any, **kwargs: Any) -> Callable[[Made], Made]:
    """Register a class without arguments; ``args`` and ``kwargs`` are what its ``forward`` is given."""

    def register(made: Made) -> Made:
        add(f"{made.__module__.rpartition('.')[2]}.{made.__name__}", made, truth, *args, **kwargs)
        return made

    return register


def add(name: str, model: Callable[[], nn.Module], truth: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(model, lambda: (args, kwargs), truth)


def matrices(truth: str, shape: torch.Size) -> Iterator[Tensor] | None:
    """The elements of each matrix, by number, as (outputs, inputs); None for what is no matrix."""
    return None if truth in WORDS else _matrices(truth, shape)


def _matrices(truth: str, shape: torch.Size) -> Iterator[Tensor]:
    found = FORM.fullmatch(truth)
    assert found is not None, truth
    folded, letters, equal, strided, sizes, groups = found.groups()
    numbers = torch.arange(shape.numel()).view(shape)
    if folded is not None:
        numbers, letters = numbers.unflatten(0, (int(folded), -1)), f"e{letters}"
    assert len(letters) == numbers.ndim, f"{truth} of {tuple(shape)}"
    order = [place for wanted in "eoi" for place, letter in enumerate(letters) if letter == wanted]
    lengths = {letter: 1 for letter in "eoi"}
    for letter, length in zip(letters, numbers.shape):
        lengths[letter] *= length
    for one in numbers.permute(order).reshape([lengths[letter] for letter in "eoi"]):
        if equal is not None:
            assert len(one) % int(equal) == 0
            yield from one.chunk(int(equal))
        elif strided is not None:
            yield from (one[start :: int(strided)] for start in range(int(strided)))
        elif sizes is not None:
            of_each = [int(size) for size in sizes.split(",")]
            grouped = one.unflatten(0, (int(groups or 1), -1))
            assert grouped.shape[1] == sum(of_each), f"{truth} of {tuple(shape)}"
            yield from (part.flatten(0, 1) for part in grouped.split(of_each, 1))
        else:
            yield one
