"""From a model and the user's param groups to the groups that are stepped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lwopt_backend.config import LayerWiseConfig
from lwopt_backend.param_groups import split
from lwopt_backend.routing import Route, named_parameters, route


@dataclass(frozen=True)
class Grouping:
    """``groups`` are param groups of one rule each; ``names`` gives a parameter's name by its id."""

    routes: list[Route]
    groups: list[dict[str, Any]]
    names: Mapping[int, str]


def group_parameters(model: nn.Module, given: Sequence[Mapping[str, Any]], config: LayerWiseConfig) -> Grouping:
    """Route ``model``'s parameters and split the ``given`` param groups by rule.

    Raises ValueError if a given parameter is not the model's, if a glob matches nothing, or if no parameter is a matrix
    and the configuration does not allow that.
    """
    names = {id(param): name for name, param in named_parameters(model)}
    _check_known(given, names)
    wanted = {names[id(param)] for group in given for param in group["params"]}
    routes = [
        r if r.name in wanted else replace(r, kind="frozen", reason="not given to the optimizer")
        for r in route(model, config.include, config.exclude)
    ]
    trained = {r.name: r for r in routes if r.kind != "frozen" and math.prod(r.shape) > 0}
    is_matrix = {key: trained[name].kind == "matrix" for key, name in names.items() if name in trained}
    if not any(is_matrix.values()) and not config.allow_no_matrix:
        raise ValueError(
            f"none of the {len(is_matrix)} trained parameters is a matrix, so Muon would train nothing; name some in "
            "'include', use AdamW, or set 'allow_no_matrix'"
        )
    return Grouping(routes, split(given, is_matrix, config), names)


def _check_known(given: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    for number, group in enumerate(given):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"param group {number}, position {position}: the parameter of shape {tuple(param.shape)} is not in "
                    "the model that is trained; pass that model's parameters"
                )
