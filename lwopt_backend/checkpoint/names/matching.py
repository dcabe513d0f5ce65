"""Which rule takes which names, and what it makes of them: the plan of a conversion, without any tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.names.megatron_core import HEAD
from lwopt_backend.checkpoint.names.patterns import Pattern, Values
from lwopt_backend.checkpoint.names.rules import LAYERS, NameMap, Rule
from lwopt_backend.checkpoint.numbers import Numbers
from lwopt_backend.spelling import suggestion

SHOWN = 20  # problems that are listed


@dataclass(frozen=True)
class Unit:
    """One use of a rule.

    ``sources`` are names by place in the stack (one place if there is none), each as many as the rule has sources;
    ``sizes`` are the stack's. ``values`` are those of the fields that both sides have, and of ``layers``.
    """

    rule: Rule
    values: Values
    sources: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.sources))

    def targets(self, sizes: Sequence[int] = ()) -> tuple[tuple[str, ...], ...]:
        """Names of what comes out, by place in a stack that is undone; ``sizes`` are its."""
        places = itertools.product(*map(range, sizes))
        filled = [{**self.values, **dict(zip(self.rule.unstacked_over, place))} for place in places]
        return tuple(tuple(pattern.format(values) for pattern in self.rule.targets) for values in filled)


@dataclass
class _Found:
    """What matched one rule under the same values of the fields that both sides have."""

    values: dict[str, int | str]
    names: dict[tuple[int, ...], dict[int, str]] = field(default_factory=dict)  # by place, by number of the source


def plan(names: NameMap, found: Iterable[str], numbers: Numbers) -> list[Unit]:
    """Units for all names, in the order of their first. Raises CheckpointError that lists what does not fit."""
    found = list(found)
    tied = HEAD not in found
    rules = [rule for rule in names.rules if rule.only in (None, "tied" if tied else "untied")]
    matches = [(name, _first(rules, name)) for name in found]
    layers = _layers((match[2] for _, match in matches if match), numbers)
    by_rule: dict[int, dict[tuple[tuple[str, int | str], ...], _Found]] = {at: {} for at in range(len(rules))}
    problems = []
    for name, match in matches:
        if match is None or match[2].get(LAYERS, layers) != layers:
            problems.append(f"{name!r} fits no rule")
            continue
        at, source, values = match
        rule = rules[at]
        place = tuple(int(values[key]) for key in rule.stacked_over)
        kept = {key: value for key, value in values.items() if key not in (*rule.stacked_over, LAYERS)}
        unit = by_rule[at].setdefault(tuple(sorted(kept.items())), _Found(kept))
        unit.names.setdefault(place, {})[source] = name
    units = []
    for at, rule in enumerate(rules):
        made, wrong = _units(rule, list(by_rule[at].values()), numbers, layers)
        units += made
        problems += wrong + _absent(rule, list(by_rule[at].values()), layers, found)
    if problems:
        raise CheckpointError(_listed(names, problems))
    order = {name: at for at, name in enumerate(found)}
    return sorted(units, key=lambda unit: min(order[name] for name in unit.names))


def canonical(pairs: Sequence[tuple[Pattern, Pattern]], name: str) -> str:
    """The name that an alias stands for, or itself."""
    for alias, meant in pairs:
        values = alias.match(name)
        if values is not None:
            return meant.format(values)
    return name


def _first(rules: Sequence[Rule], name: str) -> tuple[int, int, dict[str, int | str]] | None:
    """The number of the rule that takes a name, of the source in it, and the fields' values."""
    for at, rule in enumerate(rules):
        for number, pattern in enumerate(rule.sources):
            values = pattern.match(name)
            if values is not None:
                return at, number, values
    return None


def _layers(values: Iterable[Mapping[str, int | str]], numbers: Numbers) -> int | None:
    """How many layers there are. Raises CheckpointError if one is missing, or the given number is another."""
    seen = {int(each["layer"]) for each in values if "layer" in each}
    if not seen:
        return numbers.layers
    count = max(seen) + 1
    missing = sorted(set(range(max(count, numbers.layers or 0))) - seen)
    if missing:
        raise CheckpointError(
            f"nothing was found of layer(s) {', '.join(map(str, missing[:SHOWN]))}, but of others up to {count - 1}; "
            f"the checkpoint says that there are {numbers.layers or 'unknown'}; is a part of it missing?"
        )
    if numbers.layers not in (None, count):
        raise CheckpointError(f"there are {count} layers, but {numbers.layers} were expected; give 'layers'")
    return count


def _units(rule: Rule, found: Sequence[_Found], numbers: Numbers, layers: int | None) -> tuple[list[Unit], list[str]]:
    known = {"expert": numbers.experts, "layer": layers}
    sizes = []
    for number, name in enumerate(rule.stacked_over):
        most = max((place[number] + 1 for each in found for place in each.names), default=0)
        sizes.append(max(most, known.get(name) or 0))
    places = list(itertools.product(*map(range, sizes)))
    units, problems = [], []
    for each in found:
        if layers is not None:
            each.values[LAYERS] = layers
        missing = []
        for place in places:
            values = {**each.values, **dict(zip(rule.stacked_over, place))}
            have = each.names.get(place, {})
            missing += [p.format(values) for number, p in enumerate(rule.sources) if number not in have]
        if missing:
            some = next(iter(next(iter(each.names.values())).values()))
            problems += [f"{name!r} is missing, which belongs with {some!r}" for name in missing]
            continue
        sources = tuple(tuple(each.names[place][n] for n in range(len(rule.sources))) for place in places)
        if layers is None and any(LAYERS in pattern.fields for pattern in rule.targets):
            problems.append(f"{rule}: the number of layers is not known; give 'layers'")
            continue
        units.append(Unit(rule, each.values, sources, tuple(sizes)))
    return units, problems


def _absent(rule: Rule, found: Sequence[_Found], layers: int | None, names: Sequence[str]) -> list[str]:
    """What a rule that is not optional lacks."""
    if rule.optional or not rule.sources:
        return []
    pattern = rule.sources[0]
    if not found:
        return [f"{pattern.text!r} fits no name; {suggestion(pattern.text, names) if names else 'there are none'}"]
    if "layer" not in pattern.fields or layers is None or "layer" in rule.stacked_over:
        return []
    have = {each.values["layer"] for each in found}
    return [f"{pattern.text!r} is missing for layer {number}" for number in range(layers) if number not in have]


def _listed(names: NameMap, problems: Sequence[str]) -> str:
    more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return (
        f"names do not fit the map from {names.source} to {names.target}, {len(problems)} problem(s); give another "
        "map, or a file with rules of your own (a rule with target [] drops a name):\n  "
        + "\n  ".join(problems[:SHOWN])
        + more
    )
