"""From a model and the user's param groups to the groups that are stepped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lwopt_backend.atom_settings import AtomSettings
from lwopt_backend.atoms import Divided, divide
from lwopt_backend.chosen import Rules
from lwopt_backend.config import HostConfig
from lwopt_backend.output_heads import output_heads
from lwopt_backend.param_groups import check_overrides, split
from lwopt_backend.plan.blocks import Block
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.routing import Kind, Route, by_glob, check_all_globs, named_parameters, route_part
from lwopt_backend.row_scaling import RowScaling


@dataclass(frozen=True)
class Grouping:
    """``groups`` are param groups of one rule each; ``names`` gives a parameter's name by its id."""

    routes: list[Route]
    groups: list[dict[str, Any]]
    names: Mapping[int, str]
    divided: Mapping[str, Divided]  # by a matrix parameter's name, the matrices in it

    def row_scaling(self) -> RowScaling:
        """Factors on the outputs of the trained parameters, none so far."""
        trained = {id(param) for group in self.groups for param in group["params"]}
        shapes = {route.name: route.shape for route in self.routes}
        names = [name for key, name in self.names.items() if key in trained]
        return RowScaling({name: shapes[name] for name in names}, self.transposed, self.matrices_in)

    def matrices_in(self, name: str) -> tuple[Block, ...]:
        """The matrices in a parameter; none in one that the matrix rule does not update."""
        return self.divided[name].blocks if name in self.divided else ()

    @property
    def transposed(self) -> frozenset[str]:
        """Names of the matrices that are stored as (inputs, outputs)."""
        return frozenset(r.name for r in self.routes if r.kind == "matrix" and r.transposed)


def group_parameters(
    model: nn.Module,
    given: Sequence[Mapping[str, Any]],
    rules: Rules,
    config: HostConfig,
    *,
    stacks: bool = False,
    routes: Sequence[Route] | None = None,
    elsewhere: Sequence[Route] = (),
) -> Grouping:
    """Route ``model``'s parameters and split the ``given`` param groups by rule.

    With ``stacks`` stacked experts go to the matrix rule, slice by slice. A part of a model comes with its ``routes``,
    from ``route_given``, and those of the other parts ``elsewhere``. Raises ValueError if a given parameter is not the
    model's, if a glob or an override matches nothing, or if no parameter is a matrix and the configuration does not
    allow that.
    """
    names = {id(param): name for name, param in named_parameters(model)}
    _check_known(given, names)
    if routes is None:
        routes = route_given(model, given, rules, config, output_heads(model), stacks=stacks)
    everywhere = [*routes, *elsewhere]
    check_all_globs(config.include, config.exclude, everywhere)
    kinds = [r.kind for r in everywhere if r.kind != "frozen" and math.prod(r.shape) > 0]
    if "matrix" not in kinds and not config.allow_no_matrix:
        raise ValueError(
            f"none of the {len(kinds)} trained parameters is a matrix, so {rules.matrix.rule!r} would train "
            "nothing; name some in 'include', use AdamW, or set 'allow_no_matrix'"
        )
    check_overrides(rules, {r.name: r.kind == "matrix" for r in everywhere if r.kind != "frozen"})
    divided = divide(model, routes, AtomSettings.parse(config.atoms), elsewhere=elsewhere)
    routes = [_told(r, divided.get(r.name)) for r in routes]
    return Grouping(routes, split(given, _are_matrices(routes, names), rules, names), names, divided)


def _told(found: Route, matrices: Divided | None) -> Route:
    """The route with what is in the parameter, where that is more than one matrix or less than plain."""
    if matrices is None or matrices.is_plain:
        return found
    return replace(found, reason=f"{found.reason}: {matrices.reason}")


def route_given(
    model: nn.Module,
    given: Sequence[Mapping[str, Any]],
    rules: Rules,
    config: HostConfig,
    heads: Mapping[int, str],
    *,
    stacks: bool = False,
) -> list[Route]:
    """Route ``model``'s parameters, as the matrix rule wants it; those that are not in ``given`` are frozen."""
    names = {id(param): name for name, param in named_parameters(model)}
    wanted = {names.get(id(param)) for group in given for param in group["params"]}
    routes = [
        as_taken(r, rules.matrix.rule, config)
        if r.name in wanted
        else replace(r, kind="frozen", reason="not given to the optimizer")
        for r in route_part(
            model, config.include, config.exclude, heads, stacks=stacks, atoms=AtomSettings.parse(config.atoms)
        )
    ]
    groups = split(given, _are_matrices(routes, names), rules, names)
    rule = {names[id(param)]: group.get("class", group["rule"]) for group in groups for param in group["params"]}
    return [replace(r, rule=rule.get(r.name, "")) for r in routes]


def _are_matrices(routes: Sequence[Route], names: Mapping[int, str]) -> dict[int, bool]:
    """By a trained parameter's id, whether it is a matrix."""
    trained = {r.name: r for r in routes if r.kind != "frozen" and math.prod(r.shape) > 0}
    return {key: trained[name].kind == "matrix" for key, name in names.items() if name in trained}


def as_taken(found: Route, rule: str, config: HostConfig) -> Route:
    """The route as the matrix rule's default routing has it, where no glob decides."""
    takes = MATRIX_RULES[rule].takes
    names, shape = [found.name, *found.aliases], found.shape
    if takes is None or found.kind == "frozen" or by_glob(shape, names, config.include, config.exclude) is not None:
        return found
    taken = takes(found)
    if taken is None or len(shape) != 2 or 0 in shape or taken == (found.kind == "matrix"):
        return found
    kind: Kind = "matrix" if taken else "elementwise"
    return replace(found, kind=kind, reason=f"{found.reason}; {rule!r} {'takes' if taken else 'leaves'} it")


def _check_known(given: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    for number, group in enumerate(given):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"param group {number}, position {position}: the parameter of shape {tuple(param.shape)} is not in "
                    "the model that is trained; pass that model's parameters"
                )
