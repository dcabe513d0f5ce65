"""What is read: the routes of a model, and before that the tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lwopt_backend.atoms import Divided
from lwopt_backend.routing import Route

NOT_IN_MODEL_ORDER = (
    "the parameters are in alphabetical order, since the format does not keep the model's: which rank stores what is "
    "approximate"
)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model's parameters and where each goes.

    - ``source``: what was read, e.g. ``"config.json of LlamaForCausalLM"``.
    - ``routes``: one per parameter, in model order as far as the source keeps it.
    - ``divided``: by the name of a parameter that the matrix rule trains, the matrices in it.
    - ``notes``: sentences that the user should read.
    """

    source: str
    routes: tuple[Route, ...]
    divided: Mapping[str, Divided]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint, without its elements. ``aliases`` are the other names it is stored under."""

    name: str
    shape: tuple[int, ...]
    floating: bool = True
    frozen: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """What one reader found: the model's tensors (no optimizer state), and sentences for the user."""

    source: str
    tensors: tuple[Stored, ...]
    notes: tuple[str, ...] = ()


def in_natural_order(tensors: Iterable[Stored]) -> tuple[Stored, ...]:
    """By name, numbers by value: layer 2 before layer 10. For formats that forget the model's order."""
    return tuple(
        sorted(tensors, key=lambda t: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", t.name)])
    )
