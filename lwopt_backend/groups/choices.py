"""Which rules train a model, with which options: from JSON or from arguments in Python to one checked ``Rules``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lwopt_backend.config import foreign
from lwopt_backend.config.hosts import HOSTS, HostConfig, ZeROConfig
from lwopt_backend.config.options import (
    WrongOptions,
    checked,
    collected,
    option_suggestion,
    options_in,
    suggestion,
    within,
)
from lwopt_backend.groups.optimizer_classes import class_named, path_of
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES, options_of, rule_named
from lwopt_backend.routing.routing import as_globs

KINDS: Mapping[str, Mapping[str, object]] = {"matrix": MATRIX_RULES, "elementwise": ELEMENTWISE_RULES}
SECTIONS = {  # and what they mean
    "matrix": "rule for matrices: a name, or a section with 'name' and options",
    "elementwise": "rule for all other parameters: a name, or a section with 'name' and options",
    "overrides": "list of sections: 'params', globs on names, and their options in 'matrix' or 'elementwise'",
}
DEFAULTS = {"matrix": "muon", "elementwise": "adamw"}
Form = Literal["sections", "flat", "either"]
C = TypeVar("C", bound=HostConfig)


@dataclass(frozen=True)
class Choice:
    """A rule and the values of its options."""

    rule: str
    options: Mapping[str, Any]

    def changed(self, given: Mapping[str, Any]) -> Choice:
        """This choice with the options ``given`` replaced. A ``name`` among them chooses another rule, with its own
        defaults, and so does another ``class``."""
        if not given:
            return self
        given = dict(given)
        rule = given.pop("name", self.rule)
        _check_rule("matrix" if self.rule in MATRIX_RULES else "elementwise", rule)
        keeps = rule == self.rule
        if keeps and "class" in given and "class" in self.options:  # which may have several paths
            keeps = class_named(path_of(given["class"])) is class_named(self.options["class"])
        return Choice(rule, options_of(rule, {**(self.options if keeps else {}), **given}))


@dataclass(frozen=True)
class Override:
    """Options of the parameters whose names match one of the globs ``params``; those left out stay as they are."""

    params: tuple[str, ...]
    matrix: Mapping[str, Any] = field(default_factory=dict)
    elementwise: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """The rule for matrices, the rule for everything else, and overrides for some parameters; later ones win."""

    matrix: Choice
    elementwise: Choice
    overrides: tuple[Override, ...] = ()


def settings_of(host: type[C], given: Mapping[str, Any], where: str, form: Form = "sections") -> tuple[Rules, C]:
    """The rules and the host's options that an optimizer is given, in JSON or in Python.

    - "sections": ``matrix`` and ``elementwise``, a rule's name or a section with ``name`` and options, and
      ``overrides``. A ``lr`` or ``weight_decay`` beside them is the matrix rule's.
    - "flat": the options of Muon beside the host's, a section ``adamw``, and ``overrides``.
    - "either": sections, all of the matrix rule's options beside them, a section named as the element-wise rule, and
      ``elementwise_lr``.

    Raises ValueError that begins with ``where``, for an unknown rule or option, for one of another optimizer, for a
    wrong value, and for an option that is given twice.
    """
    with within(where):
        return _settings(host, given, form)


def _settings(host: type[C], given: Mapping[str, Any], form: Form) -> tuple[Rules, C]:
    named = () if form == "flat" else KINDS
    rest = {key: value for key, value in given.items() if key not in named and key != "overrides"}
    chosen = {kind: given[kind] if kind in named and kind in given else name for kind, name in DEFAULTS.items()}
    matrix, elementwise = (_section(kind, section) for kind, section in chosen.items())
    if form != "sections":
        name = elementwise["name"]
        elementwise = _merged(elementwise, _mapping(rest.pop(name, {}), name), name)
    if form == "either" and "elementwise_lr" in rest:
        elementwise = _merged(elementwise, {"lr": rest.pop("elementwise_lr")}, "elementwise_lr")
    with within("matrix"):
        of_matrix, of_host = rule_named(matrix["name"]).known({**rest, **matrix}), options_in(host)
    beside = {*(foreign.SHARED if form == "sections" else of_matrix)} - of_host.keys()
    if matrix["name"] == "muon" and len(elementwise) == 1:
        beside -= {"eps"}  # which may be AdamW's
    theirs = {key: rest.pop(key) for key in foreign.foreign_keys(rest, {*beside, *of_host})}
    if theirs:
        beside = {*of_matrix} - of_host.keys()
    matrix = _merged({key: rest.pop(key) for key in [*rest] if key in beside}, matrix, "matrix")
    sections = {"matrix": matrix, "elementwise": elementwise}
    if not theirs:
        return _checked(host, sections, rest, given.get("overrides", ()), form)
    if given.get("overrides"):
        rest["overrides"] = given["overrides"]
    in_entry = issubclass(host, ZeROConfig)
    written = {**foreign.translated(theirs, sections, in_entry=in_entry), **rest}
    _settings(host, written, "sections")  # so that what is printed is accepted
    raise ValueError(foreign.advice(theirs, written, in_entry=in_entry))


def _checked(
    host: type[C], sections: Mapping[str, Mapping[str, Any]], rest: Mapping[str, Any], overrides: Any, form: Form
) -> tuple[Rules, C]:
    """The rules of both sections, and the host's options, which are in ``rest``."""
    problems: list[str] = []
    made: dict[str, Choice] = {}
    own = {key: value for key, value in rest.items() if key in options_in(host)}
    for kind, section in sections.items():
        place = kind if form != "flat" else "adamw" * (kind == "elementwise")
        with collected(problems, place):
            options = {key: value for key, value in section.items() if key != "name"}
            made[kind] = Choice(section["name"], options_of(section["name"], options))
    with collected(problems):
        host.check_given(own)
        checked(options_in(host), own)
    problems += [_unknown(key, host, sections, form) for key in rest if key not in own]
    if problems:
        raise WrongOptions(problems)
    return Rules(**made, overrides=_overrides(overrides, made)), host(**checked(options_in(host), own))


def _unknown(key: str, host: type[HostConfig], sections: Mapping[str, Mapping[str, Any]], form: Form) -> str:
    """What to do instead of giving this key."""
    if others := [other for other in HOSTS.values() if key in options_in(other)]:
        return host.lacks(repr(key), *others)
    kind = next((kind for kind, rules in KINDS.items() if key in rules), None)
    if kind and form != "flat":
        return f"unknown key {key!r}; write {{{kind!r}: {{'name': {key!r}, ...}}}}"
    prefixes = {"matrix": "" if form != "sections" else "matrix."}
    prefixes["elementwise"] = "elementwise." if form == "sections" else f"{sections['elementwise']['name']}."
    known = [f"{prefixes[kind]}{each}" for kind, of in sections.items() for each in rule_named(of["name"]).known(of)]
    known += [*options_in(host), "overrides", *(KINDS if form != "flat" else ())]
    return f"unknown key {key!r}; {option_suggestion(key, known)}"


def _mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: expected a section of options; found {given!r}")
    return given


def _section(kind: str, given: Any, *, named: bool = True) -> dict[str, Any]:
    """A rule's name, or options, as a section; if ``named``, it must have the name of a rule."""
    with within(kind):
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, Mapping):
            form = "a section with a 'name'" if named else "a section of options"
            raise ValueError(f"expected a rule's name, or {form}; found {given!r}")
        if named and "name" not in given:
            raise ValueError(f"expected a key 'name', one of {', '.join(KINDS[kind])}; found {given!r}")
        if "name" in given:
            _check_rule(kind, given["name"])
        return {key: path_of(value) if key == "class" else value for key, value in given.items()}


def _check_rule(kind: str, name: object) -> None:
    """Raises ValueError for what is no name of a rule for this kind of parameters."""
    if not isinstance(name, str):
        raise ValueError(f"name: expected one of {', '.join(KINDS[kind])}; found {name!r}")
    if name not in KINDS[kind]:
        of_other = f"{name!r} is a rule of the other kind; known here: {', '.join(map(repr, KINDS[kind]))}"
        if kind == "elementwise":
            of_other += "; register_elementwise adds a class whose update is element-wise (docs/optimizers.md)"
        is_other = any(name in rules for rules in KINDS.values())
        raise ValueError(f"unknown rule {name!r}; {of_other if is_other else suggestion(name, KINDS[kind])}")


def _merged(options: Mapping[str, Any], more: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The union. Raises ValueError for a key that both have."""
    for key, value in more.items():
        if key in options:
            given = f"{key!r} is given twice, as {options[key]!r} and in {what!r} as {value!r}"
            raise ValueError(f"{given}; leave one out")
    return {**options, **more}


def _overrides(given: Any, chosen: Mapping[str, Choice]) -> tuple[Override, ...]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"overrides: expected a list of sections with 'params'; found {given!r}")
    overrides = []
    for number, entry in enumerate(given):
        with within(f"overrides[{number}]"):
            if not isinstance(entry, Mapping) or not entry.get("params"):
                raise ValueError(f"expected a section with 'params', a glob on names or several; found {entry!r}")
            for key in entry:
                if key not in ("params", *KINDS):
                    raise ValueError(f"unknown key {key!r}; {suggestion(str(key), ('params', *KINDS))}")
            sections = {kind: _section(kind, entry[kind], named=False) for kind in KINDS if kind in entry}
            if not any(sections.values()):
                raise ValueError("expected options in 'matrix' or 'elementwise'; found none")
            for kind, section in sections.items():
                with within(kind):
                    chosen[kind].changed(section)
            overrides.append(Override(as_globs(entry["params"], "params"), **sections))
    return tuple(overrides)
