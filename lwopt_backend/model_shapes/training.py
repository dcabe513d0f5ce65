"""Which rules a model is read for, and what they train of it where there are names and shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lwopt_backend.atom_settings import AtomSettings
from lwopt_backend.atoms import Divided, divide_by_name
from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import HostConfig
from lwopt_backend.grouping import as_taken
from lwopt_backend.param_groups import check_overrides
from lwopt_backend.routing import Route, stacked


def _default_rules() -> Rules:
    return settings_of(HostConfig, {}, "default rules")[0]


@dataclass(frozen=True)
class Training:
    """The rules, and the options that routing reads."""

    rules: Rules = field(default_factory=_default_rules)
    config: HostConfig = field(default_factory=lambda: HostConfig(allow_no_matrix=True))

    @classmethod
    def routed(cls, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Training:
        """With the default rules."""
        return cls(config=HostConfig(include=tuple(include), exclude=tuple(exclude), allow_no_matrix=True))

    def of(self, routes: Sequence[Route]) -> tuple[tuple[Route, ...], dict[str, Divided]]:
        """Routes by name as training has them, stacked experts slice by slice, and the matrices in each parameter."""
        found = [as_taken(_as_stack(route), self.rules.matrix.rule, self.config) for route in routes]
        check_overrides(self.rules, {r.name: r.kind == "matrix" for r in found if r.kind != "frozen"})
        return tuple(found), divide_by_name(found, AtomSettings.parse(self.config.atoms))


def _as_stack(route: Route) -> Route:
    if route.kind != "elementwise" or route.reason != f"{len(route.shape)}-D":
        return route
    if route.stack:
        return replace(route, kind="matrix", reason=stacked(route.joined))
    return replace(route, kind="matrix", reason=f"{route.reason} weight") if route.side_by_side else route
