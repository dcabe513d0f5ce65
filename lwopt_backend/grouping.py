"""From a model and the user's param groups to the groups that are stepped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lwopt_backend.config import LayerWiseConfig
from lwopt_backend.output_heads import output_heads
from lwopt_backend.param_groups import split
from lwopt_backend.routing import Route, check_all_globs, named_parameters, route_part


@dataclass(frozen=True)
class Grouping:
    """``groups`` are param groups of one rule each; ``names`` gives a parameter's name by its id."""

    routes: list[Route]
    groups: list[dict[str, Any]]
    names: Mapping[int, str]

    @property
    def transposed(self) -> frozenset[str]:
        """Names of the matrices that are stored as (inputs, outputs)."""
        return frozenset(r.name for r in self.routes if r.kind == "matrix" and r.transposed)


def group_parameters(
    model: nn.Module,
    given: Sequence[Mapping[str, Any]],
    config: LayerWiseConfig,
    *,
    stacks: bool = False,
    routes: Sequence[Route] | None = None,
    elsewhere: Sequence[Route] = (),
) -> Grouping:
    """Route ``model``'s parameters and split the ``given`` param groups by rule.

    With ``stacks`` stacked experts go to the matrix rule, slice by slice. A part of a model comes with its ``routes``,
    from ``route_given``, and those of the other parts ``elsewhere``. Raises ValueError if a given parameter is not the
    model's, if a glob matches nothing, or if no parameter is a matrix and the configuration does not allow that.
    """
    names = {id(param): name for name, param in named_parameters(model)}
    _check_known(given, names)
    if routes is None:
        routes = route_given(model, given, config, output_heads(model), stacks=stacks)
    everywhere = [*routes, *elsewhere]
    check_all_globs(config.include, config.exclude, everywhere)
    kinds = [r.kind for r in everywhere if r.kind != "frozen" and math.prod(r.shape) > 0]
    if "matrix" not in kinds and not config.allow_no_matrix:
        raise ValueError(
            f"none of the {len(kinds)} trained parameters is a matrix, so Muon would train nothing; name some in "
            "'include', use AdamW, or set 'allow_no_matrix'"
        )
    trained = {r.name: r for r in routes if r.kind != "frozen" and math.prod(r.shape) > 0}
    is_matrix = {key: trained[name].kind == "matrix" for key, name in names.items() if name in trained}
    return Grouping(list(routes), split(given, is_matrix, config), names)


def route_given(
    model: nn.Module,
    given: Sequence[Mapping[str, Any]],
    config: LayerWiseConfig,
    heads: Mapping[int, str],
    *,
    stacks: bool = False,
) -> list[Route]:
    """Route ``model``'s parameters; those that are not in ``given`` are frozen."""
    names = {id(param): name for name, param in named_parameters(model)}
    wanted = {names.get(id(param)) for group in given for param in group["params"]}
    return [
        r if r.name in wanted else replace(r, kind="frozen", reason="not given to the optimizer")
        for r in route_part(model, config.include, config.exclude, heads, stacks=stacks)
    ]


def _check_known(given: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    for number, group in enumerate(given):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"param group {number}, position {position}: the parameter of shape {tuple(param.shape)} is not in "
                    "the model that is trained; pass that model's parameters"
                )
