"""Param groups of a part of a model, as an optimizer would make them, from names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lwopt_backend.atoms import Divided
from lwopt_backend.grouping import Grouping
from lwopt_backend.param_groups import split
from lwopt_backend.plan.blocks import matrices_of
from lwopt_backend.plan.cost import Shape
from lwopt_backend.plan.types import Atom
from lwopt_backend.routing import Route
from lwopt_backend.study.setting import Setting


@dataclass(frozen=True)
class Share:
    """The parameters that some ranks share. ``wholes`` are the shapes of matrices that ``tp`` ranks hold together."""

    grouping: Grouping
    wholes: Mapping[str, Shape]
    tp: int = 1

    def shown(self, atom: Atom, setting: Setting) -> Atom:
        """The matrix with what its work costs one rank."""
        return replace(atom, cost=setting.costs(atom.cost, self.wholes.get(atom.name, atom.shape), self.tp))


def share_of(routes: Sequence[Route], divided: Mapping[str, Divided], setting: Setting, *, tp: int = 1) -> Share:
    """Param groups of parameters without memory, of all that are trained in one group that is split by rule.

    With ``tp`` > 1 a rank stores one part in ``tp`` of every matrix's longer side, each for itself, and of everything
    else; the ``tp`` ranks take turns in the work.
    """
    wholes: dict[str, Shape] = {}
    if tp > 1:
        routes, divided, wholes = _cut(routes, divided, tp)
    params = {
        route.name: nn.Parameter(torch.empty(route.shape, dtype=setting.dtype, device="meta"))
        for route in routes
        if route.kind != "frozen" and 0 not in route.shape
    }
    is_matrix = {id(params[r.name]): r.kind == "matrix" for r in routes if r.name in params}
    names = {id(param): name for name, param in params.items()}
    groups = split([{"params": list(params.values())}], is_matrix, setting.rules, names)
    own = {route.name: divided[route.name] for route in routes if route.kind == "matrix"}
    return Share(Grouping(list(routes), groups, names, own), wholes, tp)


def _cut(
    routes: Sequence[Route], divided: Mapping[str, Divided], tp: int
) -> tuple[list[Route], dict[str, Divided], dict[str, Shape]]:
    """What one of ``tp`` ranks stores: of every matrix in a parameter a part, as a parameter of its own."""
    found: list[Route] = []
    parts: dict[str, Divided] = {}
    wholes: dict[str, Shape] = {}
    for route in routes:
        if route.kind != "matrix":
            first = -(-route.shape[0] // tp) if route.shape else 1
            found.append(replace(route, shape=(first, *route.shape[1:]) if route.shape else ()))
            continue
        for block in divided[route.name].blocks:
            name, (rows, columns) = block.of(route.name), block.shape
            shape = (-(-rows // tp), columns) if rows >= columns else (rows, -(-columns // tp))
            found.append(replace(route, name=name, shape=shape, aliases=()))
            parts[name], wholes[name] = Divided(matrices_of(shape)), block.shape
    return found, parts, wholes
