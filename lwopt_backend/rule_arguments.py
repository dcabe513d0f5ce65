"""From the arguments of ``LayerWiseOptimizer`` to one checked configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from lwopt_backend.config import LayerWiseConfig, parse
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES
from lwopt_backend.spelling import suggestion

NAME = "LayerWiseOptimizer"
C = TypeVar("C", bound=LayerWiseConfig)


def config_of(
    model: type[C],
    matrix: str | Mapping[str, Any],
    lr: float | None,
    elementwise: str | Mapping[str, Any],
    elementwise_lr: float | None,
    options: Mapping[str, Any],
) -> C:
    """Raises ValueError for an unknown rule or option, for a wrong value, and for an option that is given twice."""
    _, of_matrix = _rule("matrix", matrix, MATRIX_RULES)
    name, of_elements = _rule("elementwise", elementwise, ELEMENTWISE_RULES)
    rates = {} if lr is None else {"lr": lr}
    element_rates = {} if elementwise_lr is None else {"lr": elementwise_lr}
    merged = _merge(_merge(dict(options), of_matrix, "matrix"), rates, "lr")
    section = dict(merged.pop("adamw", {}))
    section = _merge(_merge(section, of_elements, "elementwise"), element_rates, "elementwise_lr")
    return parse(model, {**merged, name: section}, NAME)


def _rule(argument: str, given: str | Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in options:
        raise ValueError(f"{NAME}: {argument}: expected a key 'name', one of {', '.join(known)}; found {given!r}")
    name = options.pop("name")
    if name not in known:
        raise ValueError(f"{NAME}: {argument}: unknown rule {name!r}; {suggestion(str(name), known)}")
    return name, options


def _merge(options: dict[str, Any], more: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key, value in more.items():
        if key in options:
            raise ValueError(f"{NAME}: {key!r} is given twice, as {options[key]!r} and in {where!r} as {value!r}")
        options[key] = value
    return options
