"""Shapes that the user wrote down: ``[["layers.0.q", [4096, 4096]], ...]`` in model order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lwopt_backend.model_shapes.json_files import read_json
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.model_shapes.types import ModelShapes
from lwopt_backend.routing import Route, named_as_stack

FORM = '[["name", [rows, columns]], ...] or {"name": [rows, columns], ...}'


def read_shapes_json(path: str | os.PathLike[str], training: Training | None = None) -> ModelShapes:
    """The parameters listed in ``path``, in its order. Whatever has two dimensions is a matrix: it was listed for that.

    ``training`` says by which rules it is trained.
    Raises ValueError that names the file, the entry, what was expected and what was found.
    """
    path = Path(path)
    entries = read_json(path, FORM, objects=tuple)  # an object comes as a tuple of pairs, a list stays a list
    if not isinstance(entries, (list, tuple)) or not entries:
        found = "no entry" if entries in ([], ()) else repr(entries)
        raise ValueError(f"{path}: expected {FORM}, found {found}; list the model's parameters")
    routes: dict[str, Route] = {}
    for index, entry in enumerate(entries):
        name, shape = _checked(entry, type(entries), f"{path}: entry {index}")
        if name in routes:
            first = list(routes).index(name)
            raise ValueError(
                f"{path}: entry {index} ({name!r}): expected a new name, found that of entry {first}; "
                "give every parameter a name of its own"
            )
        matrix = len(shape) == 2
        reason = "listed as a matrix" if matrix else f"{len(shape)}-D"
        stack = named_as_stack(name, shape)
        routes[name] = Route(name, tuple(shape), "matrix" if matrix else "elementwise", reason, stack=stack)
    return ModelShapes(path.name, *(training or Training()).of(list(routes.values())))


def _checked(entry: Any, pair: type[list[Any]] | type[tuple[Any, ...]], where: str) -> tuple[str, list[int]]:
    """The name and shape of an entry, which is a ``pair``: a list, or of an object a tuple."""
    if not (type(entry) is pair and len(entry) == 2 and isinstance(entry[0], str) and entry[0]):
        found = dict(entry) if isinstance(entry, tuple) else entry
        raise ValueError(f'{where}: expected ["name", [rows, columns]], found {found!r}; write it in this form')
    name, shape = entry
    if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
        raise ValueError(
            f"{where} ({name!r}): expected a shape of positive integers, such as [4096, 1024], found {shape!r}; "
            "correct it"
        )
    return name, shape
