"""Which rules train a model, with which options: from configurations and arguments to one checked ``Rules``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import create_model

from lwopt_backend.config import foreign
from lwopt_backend.config.hosts import HOSTS, HostConfig, ZeROConfig
from lwopt_backend.config.options import Options, option_suggestion, parse, suggestion
from lwopt_backend.groups.optimizer_classes import class_named
from lwopt_backend.groups.registry import (
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    AdamWOptions,
    MuonOptions,
    by_path,
    options_of,
    rule_named,
)
from lwopt_backend.routing.routing import as_globs
from lwopt_backend.runtime.agreement import setting

KINDS: Mapping[str, Mapping[str, object]] = {"matrix": MATRIX_RULES, "elementwise": ELEMENTWISE_RULES}
SECTIONS = {  # and what they mean
    "matrix": "rule for matrices: a name, or a section with 'name' and options",
    "elementwise": "rule for all other parameters: a name, or a section with 'name' and options",
    "overrides": "list of sections: 'params', globs on names, and their options in 'matrix' or 'elementwise'",
}
DEFAULTS = {"matrix": "muon", "elementwise": "adamw"}
C = TypeVar("C", bound=HostConfig)
M = TypeVar("M", bound=Options)


@dataclass(frozen=True)
class Choice:
    """A rule and its options."""

    rule: str
    options: Options

    @property
    def lr(self) -> float:
        return getattr(self.options, "lr", 0.0)

    def changed(self, given: Mapping[str, Any], where: str) -> Choice:
        """This choice with the options ``given`` replaced. A ``name`` among them chooses another rule, with its own
        defaults."""
        if not given:
            return self
        given = by_path(given, where)
        kind = "matrix" if self.rule in MATRIX_RULES else "elementwise"
        rule = _rule_of(kind, given.pop("name", self.rule), where)
        keeps = rule == self.rule and self._has_class(given.get("class"))
        return Choice(rule, options_of(rule, {**(self.options.model_dump() if keeps else {}), **given}, where))

    def _has_class(self, given: str | None) -> bool:
        """Whether the options are those of the class ``given``, or none is given. Another class's mean other things."""
        own = getattr(self.options, "class", None)
        if given is None or own is None or given == own:
            return True
        try:
            return class_named(given) is class_named(own)  # a class may have several paths
        except ValueError:
            return False  # the options' model reports the problem


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


def settings_lines(rules: Rules, config: HostConfig) -> list[str]:
    """One line for each setting that must be equal on all ranks, which excludes ``report``."""

    def spelled(value: Any) -> Any:
        """With numbers in place of tensors, whose device differs between ranks."""
        if isinstance(value, Mapping):
            return {key: spelled(entry) for key, entry in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    lines = [setting("torch.__version__", str(torch.__version__))]
    for kind, choice in (("matrix", rules.matrix), ("elementwise", rules.elementwise)):
        lines.append(setting(kind, choice.rule))
        lines += [setting(f"{kind}.{key}", spelled(value)) for key, value in choice.options.model_dump().items()]
    for number, override in enumerate(rules.overrides):
        lines += [setting(f"overrides[{number}].{key}", spelled(value)) for key, value in vars(override).items()]
    return lines + [setting(key, value) for key, value in config.model_dump(exclude={"report"}).items()]


def settings_of(model: type[C], options: Mapping[str, Any], where: str, *, entry: str | None = None) -> tuple[Rules, C]:
    """The rules in the sections ``matrix``, ``elementwise`` and ``overrides``, and the host's options.

    A ``lr`` or ``weight_decay`` outside the sections is the matrix rule's. ``entry`` is the type of an entry in
    ds_config.json. Raises ValueError for an unknown rule or option, for one of another optimizer, for a wrong value,
    and for an option that is given twice.
    """
    rest = {key: value for key, value in options.items() if key not in SECTIONS}
    given = {kind: _section(options.get(kind, name), f"{where}: {kind}", kind) for kind, name in DEFAULTS.items()}
    for key in foreign.SHARED:
        if key in rest:
            given["matrix"] = merged({key: rest.pop(key)}, given["matrix"], "matrix", where)
    choices = {kind: _choice(kind, section, f"{where}: {kind}") for kind, section in given.items()}
    unknown = [key for key in rest if key not in model.model_fields]
    if unknown:
        _check_host(model, unknown[0], where)
        _refuse_foreign(model, options, rest, given, where, entry)
        kind = next((kind for kind, rules in KINDS.items() if unknown[0] in rules), None)
        as_section = f"write {{{kind!r}: {{'name': {unknown[0]!r}, ...}}}}"
        known = [f"{kind}.{key}" for kind, choice in choices.items() for key in type(choice.options).model_fields]
        hint = as_section if kind else option_suggestion(unknown[0], [*SECTIONS, *model.model_fields, *known])
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; {hint}")
    overrides = _overrides(options.get("overrides", ()), choices, where)
    return Rules(choices["matrix"], choices["elementwise"], overrides), parse(model, rest, where)


def _refuse_foreign(
    model: type[HostConfig],
    options: Mapping[str, Any],
    rest: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    where: str,
    entry: str | None,
) -> None:
    """Raises ValueError for keys of other optimizers in ``rest``, the part of ``given`` outside the rules."""
    theirs = {key: rest[key] for key in foreign.foreign_keys(rest, model.model_fields)}
    others = {key: value for key, value in rest.items() if key not in theirs}
    fields = _fields({}, given["matrix"], model, where)
    flat = {key: others.pop(key) for key in list(others) if key in fields and key not in model.model_fields}
    if options.get("overrides"):
        others["overrides"] = options["overrides"]
    foreign.refuse(
        theirs,
        {kind: by_path({**section, **(flat if kind == "matrix" else {})}, where) for kind, section in given.items()},
        where,
        entry,
        lambda halves: {**halves, **others},
        lambda found: settings_of(model, found, where),
    )


def _check_host(model: type[HostConfig], key: str, where: str) -> None:
    """Raises ValueError for an option that only other hosts have."""
    others = [host for host in HOSTS.values() if key in host.model_fields]
    if others:
        raise ValueError(f"{where}: {model.lacks(repr(key), *others)}")


def _section(given: Any, where: str, kind: str | None = None) -> dict[str, Any]:
    """A rule's name, or options, as a section; with ``kind``, it must have the name of a rule."""
    if isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping):
        form = "a section with a 'name'" if kind else "a section of options"
        raise ValueError(f"{where}: expected a rule's name, or {form}; found {given!r}")
    if kind and "name" not in given:
        raise ValueError(f"{where}: expected a key 'name', one of {', '.join(KINDS[kind])}; found {given!r}")
    return dict(given)


def _choice(kind: str, section: Mapping[str, Any], where: str) -> Choice:
    name = _rule_of(kind, section["name"], where)
    return Choice(name, options_of(name, {key: value for key, value in section.items() if key != "name"}, where))


def _rule_of(kind: str, name: object, where: str) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{where}: name: expected one of {', '.join(KINDS[kind])}; found {name!r}")
    if name not in KINDS[kind]:
        others = {other for rules in KINDS.values() for other in rules} - set(KINDS[kind])
        of_other = f"{name!r} is a rule of the other kind; known here: {', '.join(map(repr, KINDS[kind]))}"
        if kind == "elementwise":
            of_other += "; register_elementwise adds a class whose update is element-wise (docs/optimizers.md)"
        hint = of_other if name in others else suggestion(name, KINDS[kind])
        raise ValueError(f"{where}: unknown rule {name!r}; {hint}")
    return name


def merged(options: Mapping[str, Any], more: Mapping[str, Any], what: str, where: str) -> dict[str, Any]:
    """The union. Raises ValueError for a key that both have."""
    for key, value in more.items():
        if key in options:
            given = f"{key!r} is given twice, as {options[key]!r} and in {what!r} as {value!r}"
            raise ValueError(f"{where}: {given}; leave one out")
    return {**options, **more}


def _overrides(given: Any, choices: Mapping[str, Choice], where: str) -> tuple[Override, ...]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{where}: overrides: expected a list of sections with 'params'; found {given!r}")
    overrides = []
    for number, entry in enumerate(given):
        place = f"{where}: overrides[{number}]"
        if not isinstance(entry, Mapping) or not entry.get("params"):
            raise ValueError(f"{place}: expected a section with 'params', a glob on names or several; found {entry!r}")
        for key in entry:
            if key not in ("params", *KINDS):
                raise ValueError(f"{place}: unknown key {key!r}; {suggestion(str(key), ('params', *KINDS))}")
        sections = {kind: _section(entry[kind], f"{place}: {kind}") for kind in KINDS if kind in entry}
        if not any(sections.values()):
            raise ValueError(f"{place}: expected options in 'matrix' or 'elementwise'; found none")
        for kind, section in sections.items():
            choices[kind].changed(section, f"{place}: {kind}")
        overrides.append(Override(as_globs(entry["params"], f"{place}: params"), **sections))
    return tuple(overrides)


def arguments_of(
    model: type[C],
    matrix: str | Mapping[str, Any],
    lr: float | None,
    elementwise: str | Mapping[str, Any],
    elementwise_lr: float | None,
    overrides: Iterable[Mapping[str, Any]],
    options: Mapping[str, Any],
    where: str,
) -> tuple[Rules, C]:
    """``settings_of`` for arguments in Python, where the matrix rule's options may also be next to the host's.

    A section named as the element-wise rule, ``adamw={...}``, has options of that rule.
    """
    both = {"matrix": matrix, "elementwise": elementwise}
    sections = {kind: _section(given, f"{where}: {kind}", kind) for kind, given in both.items()}
    for kind, section in sections.items():
        _rule_of(kind, section["name"], f"{where}: {kind}")
    rest = dict(options)
    name = sections["elementwise"]["name"]
    more = rest.pop(name, {})
    if not isinstance(more, Mapping):
        raise ValueError(f"{where}: {name}: expected a section of options; found {more!r}")
    sections["elementwise"] = merged(sections["elementwise"], more, name, where)
    fields = _fields({"lr": lr, **rest} if lr is not None else rest, sections["matrix"], model, f"{where}: matrix")
    if sections["matrix"]["name"] == "muon" and len(sections["elementwise"]) == 1 and elementwise_lr is None:
        fields = {key: field for key, field in fields.items() if key != "eps"}  # which may be AdamW's
    theirs = foreign.foreign_keys(rest, {*fields, *model.model_fields})
    for key in rest:
        if key not in fields and key not in model.model_fields and not theirs:
            _check_host(model, key, where)
            known = [*model.model_fields, *fields, "elementwise_lr"]
            known += [f"{name}.{option}" for option in _fields({}, sections["elementwise"], model, where)]

            def as_argument(known: str) -> str:
                """An option of a section as it is written in Python."""
                section, _, option = known.rpartition(".")
                return f"{section}={{{option!r}: ...}}" if section else repr(known)

            raise ValueError(f"{where}: unknown key {key!r}; {option_suggestion(key, known, as_argument)}")
    own = {key: rest.pop(key) for key in list(rest) if key in fields and key not in model.model_fields}
    sections["matrix"] = merged(own, sections["matrix"], "matrix", where)
    if lr is not None:
        sections["matrix"] = merged(sections["matrix"], {"lr": lr}, "lr", where)
    if elementwise_lr is not None:
        sections["elementwise"] = merged(sections["elementwise"], {"lr": elementwise_lr}, "elementwise_lr", where)
    return settings_of(model, {**rest, **sections, "overrides": overrides}, where)


def _fields(
    beside: Mapping[str, Any], section: Mapping[str, Any], model: type[HostConfig], where: str
) -> Mapping[str, Any]:
    """Options of the section's rule, which may depend on those given, in the section or ``beside`` it."""
    given = {**{key: value for key, value in beside.items() if key not in model.model_fields}, **section}
    given = by_path(given, where)
    name = given.pop("name")
    rule = MATRIX_RULES.get(name) or rule_named(name)
    return rule.model(given, where).model_fields


# ``"type": "LayerWiseMuon"``: Muon's options, AdamW's in a section, and DeepSpeed's, in one flat model.

LayerWiseMuonConfig = create_model(
    "LayerWiseMuonConfig",
    __base__=(ZeROConfig, MuonOptions),
    adamw=(AdamWOptions, AdamWOptions()),
    overrides=(Any, ()),  # ``_overrides`` looks at them
)


def muon_settings(options: Mapping[str, Any], where: str) -> tuple[Rules, ZeROConfig]:
    """Raises ValueError that names every wrong key. Without ``adamw``, ``eps`` is ambiguous."""
    section = options.get("adamw", {})
    known = LayerWiseMuonConfig.model_fields.keys() - (set() if section else {"eps"})
    theirs = {key: options[key] for key in foreign.foreign_keys(options, known)}
    if theirs and isinstance(section, Mapping):
        rest = {key: value for key, value in options.items() if key not in theirs and key != "adamw"}
        matrix = {key: rest.pop(key) for key in list(rest) if key in MuonOptions.model_fields}

        def flat(halves: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
            half = {kind: {key: value for key, value in of.items() if key != "name"} for kind, of in halves.items()}
            return {**half["matrix"], "adamw": half["elementwise"], **rest}

        given = {"matrix": {"name": "muon", **matrix}, "elementwise": {"name": "adamw", **section}}
        foreign.refuse(theirs, given, where, "LayerWiseMuon", flat, lambda found: muon_settings(found, where))
    for key in options.keys() - LayerWiseMuonConfig.model_fields.keys():
        _check_host(ZeROConfig, key, where)
    found: Any = parse(LayerWiseMuonConfig, options, where)
    choices = {"matrix": Choice("muon", _part(MuonOptions, found)), "elementwise": Choice("adamw", found.adamw)}
    return Rules(**choices, overrides=_overrides(found.overrides, choices, where)), _part(ZeROConfig, found)


def _part(model: type[M], flat: Options) -> M:
    """A model's options, from a checked configuration that has them among others."""
    values = {key: getattr(flat, key) for key in model.model_fields}
    return model.model_construct(flat.model_fields_set & values.keys(), **values)
