"""Which rules train a model, with which options: from JSON or from arguments in Python to one checked ``Rules``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from lwopt_backend.config import foreign
from lwopt_backend.config.hosts import HOSTS, HostConfig, ZeROConfig
from lwopt_backend.config.options import checked, options_in, within
from lwopt_backend.groups import Group
from lwopt_backend.groups.optimizer_classes import as_class, class_named, path_of
from lwopt_backend.groups.registry import (
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    check_options,
    known_of,
    options_of,
    rule_hint,
)
from lwopt_backend.routing.routing import as_globs, named_like

KINDS: Mapping[str, Mapping[str, object]] = {"matrix": MATRIX_RULES, "elementwise": ELEMENTWISE_RULES}
SECTIONS = {  # and what they mean
    "matrix": "rule for matrices: a name, or a section with 'name' and options",
    "elementwise": "rule for all other parameters: a name, or a section with 'name' and options",
    "overrides": "list of sections: 'params' or 'attribute', and options of these in 'matrix' or 'elementwise'",
}
DEFAULTS = {"matrix": "muon", "elementwise": "adamw"}
C = TypeVar("C", bound=HostConfig)


def changed(group: Group, given: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's rule and options, with the options ``given`` replaced. A ``name`` among them chooses another
    rule, with its own defaults, and so does another ``class``."""
    if not given:
        return dict(group)
    given = as_class(given)
    rule = given.get("name", group["rule"])
    _check_rule("matrix" if group["rule"] in MATRIX_RULES else "elementwise", rule)
    keeps = rule == group["rule"]
    if keeps and "class" in given and "class" in group:  # which may have several paths
        keeps = class_named(path_of(given["class"])) is class_named(group["class"])
    kept = {key: value for key, value in group.items() if keeps and (key, value) != ("lr", None)}
    options = {**kept, **given}
    return {"rule": rule, **options_of(rule, {key: options[key] for key in options if key not in ("rule", "name")})}


def _section(kind: str, given: Any, *, named: bool = False) -> dict[str, Any]:
    """A rule's name, or options, as a section; if ``named``, it must have the name of a rule."""
    given = {"name": given} if isinstance(given, str) else given
    form = "a section with a 'name'" if named else "a section of options"
    if not isinstance(given, Mapping):
        raise ValueError(f"{kind}: expected a rule's name, or {form}; found {given!r}")
    if named and "name" not in given:
        raise ValueError(f"{kind}: expected a key 'name', one of {', '.join(KINDS[kind])}; found {given!r}")
    with within(kind):
        given = as_class(given)
        if "name" in given:
            _check_rule(kind, given["name"])
        return {key: path_of(value) if key == "class" else value for key, value in given.items()}


Selects = Callable[[str, Tensor, nn.Module], object]


def _names_or_function(given: Any) -> tuple[str, ...] | Selects:
    return given if callable(given) else as_globs(given, "params")


@dataclass(frozen=True)
class Override:
    """Options of the parameters that it selects; those left out stay as they are.

    ``params`` are globs on names, or a function of a parameter's name, the parameter and its module; ``attribute`` are
    names of attributes of parameters, of which one is true.
    """

    params: tuple[str, ...] | Selects = field(default=(), metadata={"check": _names_or_function})
    attribute: tuple[str, ...] = field(default=(), metadata={"check": partial(as_globs, option="attribute")})
    matrix: Mapping[str, Any] = field(default_factory=dict, metadata={"check": partial(_section, "matrix")})
    elementwise: Mapping[str, Any] = field(default_factory=dict, metadata={"check": partial(_section, "elementwise")})

    def selects(self, name: str, param: Tensor | None, module: nn.Module | None) -> bool:
        """Raises ValueError if the parameter is not known where it is needed."""
        if not callable(self.params) and not self.attribute:
            return named_like(self.params)(name)
        if param is None or module is None:
            raise ValueError(
                f"{self} selects tensors, and only names and shapes are known here; write globs in 'params'"
            )
        if callable(self.params):
            return bool(self.params(name, param, module))
        return any(getattr(param, key, False) for key in self.attribute)

    def __str__(self) -> str:
        if callable(self.params):
            return f"function {getattr(self.params, '__qualname__', self.params)}"
        key, names = ("attribute", self.attribute) if self.attribute else ("params", self.params)
        return f"{key} {', '.join(map(repr, names))}"


@dataclass(frozen=True)
class Rules:
    """The rule for matrices, the rule for everything else, and overrides for some parameters; later ones win.

    A rule is what a param group has of it: its name as ``rule``, and the values of its options.
    """

    matrix: Group
    elementwise: Group
    overrides: tuple[Override, ...] = ()

    def selecting(self, name: str, param: Tensor | None = None, module: nn.Module | None = None) -> tuple[int, ...]:
        """The numbers of the overrides that select a parameter of ``module``."""
        found = []
        for number, override in enumerate(self.overrides):
            with within(f"overrides[{number}]"):
                found += [number] * override.selects(name, param, module)
        return tuple(found)


def settings_of(host: type[C], given: Mapping[str, Any], where: str) -> tuple[Rules, C]:
    """The rules and the host's options that an optimizer is given, in JSON or in Python.

    ``matrix`` and ``elementwise`` are each a rule's name, or a section with ``name`` and options. The matrix rule's
    options may also be beside the host's, and the element-wise rule's in a section of its name. Raises ValueError that
    begins with ``where``: for an unknown rule or option, for one of another optimizer, for a wrong value, and for an
    option that is given twice.
    """
    with within(where):
        return _settings(host, given)


def _settings(host: type[C], given: Mapping[str, Any]) -> tuple[Rules, C]:
    rest = {**DEFAULTS, **given}
    overrides = rest.pop("overrides", ())
    sections = {kind: _section(kind, rest.pop(kind), named=True) for kind in DEFAULTS}
    names = {kind: section.pop("name") for kind, section in sections.items()}
    if "elementwise_lr" in rest:
        add(sections["elementwise"], {"lr": rest.pop("elementwise_lr")}, "elementwise")
    add(sections["elementwise"], rest.pop(names["elementwise"], {}), names["elementwise"])
    with within("matrix"):
        of_matrix = known_of(names["matrix"], {**rest, **sections["matrix"]})
    of_host, known = options_in(host), {"matrix": of_matrix, "elementwise": known_of(names["elementwise"], {})}
    beside = of_matrix.keys() - of_host.keys()
    if names["matrix"] == "muon" and not sections["elementwise"]:
        beside -= {"eps"}  # which may be AdamW's
    theirs = {key: rest.pop(key) for key in foreign.foreign_keys(rest, {*beside, *of_host})}
    add(sections["matrix"], {key: rest.pop(key) for key in [*rest] if key in beside}, "matrix")
    if theirs:
        halves = {kind: {"name": names[kind], **section} for kind, section in sections.items()}
        _refuse(host, theirs, halves, {**rest, **({"overrides": overrides} if overrides else {})})
    # All options in one table, by the names under which errors tell them.
    places = {"matrix": "matrix." * any(key in of_host for key in of_matrix), "elementwise": f"{names['elementwise']}."}
    table = {places[kind] + key: option for kind, of_rule in known.items() for key, option in of_rule.items()}
    flat = {places[kind] + key: value for kind, section in sections.items() for key, value in section.items()}
    for key in rest:
        _check_place(key, host)
    values = checked({**table, **of_host}, {**flat, **rest})
    host.check_given(rest)
    made = {}
    for kind, of_rule in known.items():
        found = {key: values[places[kind] + key] for key in of_rule if places[kind] + key in values}
        made[kind] = {"rule": names[kind], **found}
        with within(kind):
            check_options(names[kind], found)
    config = host(**{key: values[key] for key in of_host})
    return Rules(**made, overrides=_overrides(overrides, made)), config


def _refuse(
    host: type[HostConfig], theirs: Mapping[str, Any], halves: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any]
) -> NoReturn:
    """Raises ValueError for another optimizer's keys, with what to write instead, which is accepted."""
    in_entry = issubclass(host, ZeROConfig)
    written = {**foreign.translated(theirs, halves, in_entry=in_entry), **rest}
    _settings(host, written)
    raise ValueError(foreign.advice(theirs, written, in_entry=in_entry))


def _check_place(key: str, host: type[HostConfig]) -> None:
    """Raises ValueError for an option of other hosts only, and for a rule's name."""
    others = [other for other in HOSTS.values() if key in options_in(other)]
    if others and key not in options_in(host):
        raise ValueError(host.lacks(repr(key), *others))
    for kind, rules in KINDS.items():
        if key in rules:
            raise ValueError(f"unknown key {key!r}; write {{{kind!r}: {{'name': {key!r}, ...}}}}")


def add(section: dict[str, Any], more: Any, what: str) -> None:
    """Add options to a section. Raises ValueError for one that it has, and if ``more`` is no mapping."""
    if not isinstance(more, Mapping):
        raise ValueError(f"{what}: expected a section of options; found {more!r}")
    for key, value in more.items():
        if key in section:
            given = f"{key!r} is given twice, as {value!r} and in {what!r} as {section[key]!r}"
            raise ValueError(f"{given}; leave one out")
        section[key] = value


def _check_rule(kind: str, name: object) -> None:
    """Raises ValueError for what is no name of a rule for this kind of parameters."""
    if not isinstance(name, str):
        raise ValueError(f"name: expected one of {', '.join(KINDS[kind])}; found {name!r}")
    if name not in KINDS[kind]:
        of_other = f"{name!r} is a rule of the other kind; known here: {', '.join(map(repr, KINDS[kind]))}"
        if kind == "elementwise":
            of_other += "; register_elementwise adds a class whose update is element-wise (docs/optimizers.md)"
        is_other = any(name in rules for rules in KINDS.values())
        raise ValueError(f"unknown rule {name!r}; {of_other if is_other else rule_hint(name, KINDS[kind])}")


def _overrides(given: Any, made: Mapping[str, Group]) -> tuple[Override, ...]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"overrides: expected a list of sections with 'params'; found {given!r}")
    overrides = []
    for number, entry in enumerate(given):
        with within(f"overrides[{number}]"):
            if not isinstance(entry, Mapping) or bool(entry.get("params")) == bool(entry.get("attribute")):
                raise ValueError(
                    "expected a section with 'params', a glob on names or several, or with 'attribute', one that "
                    f"parameters have; found {entry!r}"
                )
            override = Override(**checked(options_in(Override), entry))
            if not (override.matrix or override.elementwise):
                raise ValueError("expected options in 'matrix' or 'elementwise'; found none")
            for kind, group in made.items():
                with within(kind):
                    changed(group, getattr(override, kind))
            overrides.append(override)
    return tuple(overrides)
