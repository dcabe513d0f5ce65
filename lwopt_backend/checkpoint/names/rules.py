"""Maps of names: patterns with numbers, and the rules that pair them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import StrictBool

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.formats import OURS, Numbers
from lwopt_backend.checkpoint.names.operations import OPERATIONS
from lwopt_backend.config.options import Options, option, parse, suggestion

MOST_TEXTS = 2  # {*} in a pattern: each multiplies the time of matching by the length of the name
_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([a-z_]+)(?:\+([0-9]+))?")
_WORDS = re.compile(r"[A-Za-z0-9_.]*(\|[A-Za-z0-9_.]*)+")

Values = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Pattern:
    """A name with fields in braces: ``decoder.layers.{layer}.mlp.linear_fc2.{weight|bias}``. Raises ValueError for
    any other field.

    - ``{layer}``, ``{layer+2}``: a number; in the name it is larger by the number after the plus.
    - ``{weight|bias}``: one of these words. The text in the braces is the field's name.
    - ``{*}``: any text.
    """

    text: str

    def __post_init__(self) -> None:
        for field in _FIELD.findall(self.text):
            if field != "*" and not _NUMBER.fullmatch(field) and not _WORDS.fullmatch(field):
                known = "{layer}, {layer+2}, {weight|bias} or {*}"
                raise ValueError(f"{self.text!r}: expected a field {known}, found {{{field}}}")
        if self.text.count("{*}") > MOST_TEXTS:
            raise ValueError(
                f"{self.text!r}: expected {{*}} at most {MOST_TEXTS} times, found more, whose matching takes hours"
            )
        if re.search(r"[{}]", _FIELD.sub("", self.text)):
            raise ValueError(f"{self.text!r}: expected pairs of braces, found one that is not closed or not opened")

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_base(field)[0] for field in _FIELD.findall(self.text)))

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = [re.escape(part) for part in _FIELD.split(self.text)]
        for at, field in enumerate(_FIELD.findall(self.text)):
            words = "|".join(map(re.escape, field.split("|"))) if "|" in field else "0|[1-9][0-9]*"
            parts[2 * at + 1] = "(.+)" if field == "*" else f"({words})"
        return re.compile("".join(parts))

    def match(self, name: str) -> dict[str, int | str] | None:
        """The fields' values in ``name``, or None if it is not of this form."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for field, text in zip(_FIELD.findall(self.text), found.groups()):
            base, offset = _base(field)
            value = text if offset is None else int(text) - offset
            if (isinstance(value, int) and value < 0) or values.setdefault(base, value) != value:
                return None
        return values

    def format(self, values: Values) -> str:
        """The name with these values; others are ignored."""

        def filled(found: re.Match[str]) -> str:
            base, offset = _base(found[1])
            value = values[base]
            return str(value) if offset is None else str(int(value) + offset)

        return _FIELD.sub(filled, self.text)

    def example(self) -> str:
        """One of the names of this form."""
        return self.format({field: field.split("|")[0] if "|" in field else 0 for field in self.fields})


def _base(field: str) -> tuple[str, int | None]:
    """The field's name, and the offset of its number in the name; None if it is not a number."""
    number = _NUMBER.fullmatch(field)
    return (number[1], int(number[2] or 0)) if number else (field, None)


# Name maps as data: rules from names to names, with operations on the tensors; the inverse map follows from them.


@dataclass(frozen=True)
class Rule:
    """``sources`` become ``targets`` by ``do``; without targets they are dropped.

    A number only in the sources is stacked over, after ``do``; one only in the targets is unstacked, before it. The
    stack's dimensions come first, in the order of the numbers in the name. Raises ValueError for an inconsistent rule.

    - ``optional``: the names may be missing; otherwise every layer must have them.
    """

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    do: tuple[str, ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        count = len(self.sources)
        for name in self.do:
            if name not in OPERATIONS:
                raise ValueError(f"{self}: unknown operation {name!r}; {suggestion(name, OPERATIONS)}")
            if count != OPERATIONS[name].takes:
                raise ValueError(f"{self}: expected {OPERATIONS[name].takes} tensors for {name!r}, found {count}")
            count = OPERATIONS[name].gives
        if not (self.sources and self.targets):
            if self.do:
                raise ValueError(f"{self}: expected no operations on a dropped name, found some; leave 'do' out")
            return
        if count != len(self.targets):
            raise ValueError(f"{self}: expected {count} targets, one for each tensor, found {len(self.targets)}")
        for side in (self.sources, self.targets):
            if any(pattern.fields != side[0].fields for pattern in side):
                raise ValueError(f"{self}: expected equal fields, in one order, in the names of one side")
        if self.stacked_over and self.unstacked_over:
            raise ValueError(
                f"{self}: expected extra fields on one side, found {self.stacked_over}, {self.unstacked_over}"
            )
        for name in (*self.stacked_over, *self.unstacked_over):
            if name == "*" or "|" in name:
                raise ValueError(f"{self}: expected a number to stack over, found {{{name}}}")

    @functools.cached_property
    def stacked_over(self) -> tuple[str, ...]:
        return _only_in(self.sources, self.targets)

    @functools.cached_property
    def unstacked_over(self) -> tuple[str, ...]:
        return _only_in(self.targets, self.sources)

    def inverse(self) -> Rule:
        back = tuple(OPERATIONS[name].back for name in reversed(self.do))
        return Rule(self.targets, self.sources, back, self.optional)

    def __str__(self) -> str:
        sides = [" + ".join(pattern.text for pattern in side) or "nothing" for side in (self.sources, self.targets)]
        return f"rule {sides[0]} -> {sides[1]}"


def _only_in(side: tuple[Pattern, ...], other: tuple[Pattern, ...]) -> tuple[str, ...]:
    """Fields of one side that the other side lacks, if that has any."""
    if not side or not other:
        return ()
    return tuple(name for name in side[0].fields if name not in other[0].fields)


@dataclass(frozen=True)
class NameMap:
    """From the vocabulary ``source`` to ``target``; the first rule that fits a name is used.

    - ``aliases``: other spellings of the source's names; ``target_aliases``: of the target's, for the inverse.
    - ``refused``: values of Megatron's arguments with which weights of the other side mean something else, with the
    reason.
    - ``numbers``: used if none are given.
    """

    source: str
    target: str
    rules: tuple[Rule, ...]
    aliases: tuple[tuple[Pattern, Pattern], ...] = ()
    target_aliases: tuple[tuple[Pattern, Pattern], ...] = ()
    refused: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    numbers: Numbers = Numbers()

    def inverse(self) -> NameMap:
        turned = replace(self, source=self.target, target=self.source, rules=tuple(r.inverse() for r in self.rules))
        return replace(turned, aliases=self.target_aliases, target_aliases=self.aliases)


def rule(source: str | Sequence[str], target: str | Sequence[str], *do: str, **options: Any) -> Rule:
    """A rule from strings, as in tables; ``options`` are Rule's."""
    return Rule(_patterns(source), _patterns(target), do, **options)


def renamed(pairs: Mapping[str, str]) -> tuple[Rule, ...]:
    """Optional rules for names that differ only in spelling."""
    return tuple(rule(source, target, optional=True) for source, target in pairs.items())


def aliases(pairs: Mapping[str, str]) -> tuple[tuple[Pattern, Pattern], ...]:
    return tuple((Pattern(alias), Pattern(name)) for alias, name in pairs.items())


def _patterns(names: str | Iterable[str]) -> tuple[Pattern, ...]:
    return (Pattern(names),) if isinstance(names, str) else tuple(map(Pattern, names))


class RuleEntry(Options):
    """One rule of a file: see ``Rule``."""

    source: str | tuple[str, ...] = option(..., "name or names, with fields", OURS)
    target: str | tuple[str, ...] = option(..., "name or names; [] drops the source", OURS)
    do: tuple[str, ...] = option((), f"in order, any of {', '.join(OPERATIONS)}", OURS)
    optional: StrictBool = option(False, "nothing is wrong if there is no such name", OURS)


class MapFile(Options):
    """A name map as a file: see ``NameMap``."""

    source: str = option("megatron-core", "vocabulary of the names on the left", OURS)
    target: str = option(..., "vocabulary of the names on the right; any word", OURS)
    family: str | None = option(
        None, "a table whose rules follow these, but for those of the same sources; source is then the table's", OURS
    )
    numbers: dict[str, Any] = option({}, "heads, query_groups, ... where the checkpoint does not say", OURS)
    aliases: dict[str, str] = option({}, "other spellings of names on the left", OURS)
    rules: tuple[dict[str, Any], ...] = option((), "in order; the first that fits a name counts", OURS)


def read_map(path: Path, families: Mapping[str, NameMap]) -> NameMap:
    """A user's JSON file. Raises CheckpointError that names every wrong key, what was expected and what was found."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object with 'target' and 'rules'; found {type(found).__name__}")
        file = parse(MapFile, found, "name map")
        if file.family is not None and file.family not in families:
            raise ValueError(f"unknown family {file.family!r}; {suggestion(file.family, families)}")
        if file.target == file.source:
            raise ValueError(f"source and target are both {file.source!r}; call the target's vocabulary something else")
        base = families[file.family] if file.family else NameMap(file.source, file.target, ())
        if base.source != file.source:
            raise ValueError(f"family {file.family!r} is for {base.source!r}, but source is {file.source!r}")
        entries = [parse(RuleEntry, entry, f"rule {number}") for number, entry in enumerate(file.rules)]
        rules = tuple(rule(e.source, e.target, *e.do, optional=e.optional) for e in entries)
        if not rules + base.rules:
            raise ValueError("expected 'rules', or a 'family' with rules; found neither")
        replaced = {own.sources for own in rules if own.sources}
        others = tuple(of_family for of_family in base.rules if of_family.sources not in replaced)
        spelled, numbers = aliases(file.aliases) + base.aliases, parse(Numbers, file.numbers, "numbers")
        own = [pattern.example() for each in rules for pattern in each.targets]
        theirs = tuple(pair for pair in base.target_aliases if not any(pair[0].match(name) for name in own))
        named = replace(base, target=file.target, rules=rules + others, aliases=spelled, target_aliases=theirs)
        return replace(named, numbers=numbers)
    except (OSError, ValueError, RecursionError) as error:  # also what json and pydantic raise
        raise CheckpointError(f"{path}: {error}") from error
