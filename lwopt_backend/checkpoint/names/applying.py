"""Matches rules with names and applies them to a checkpoint, without reading a tensor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lwopt_backend.checkpoint.contents import MATRICES, SHOWN, Checkpoint, CheckpointError, LazyTensor, Param, listed
from lwopt_backend.checkpoint.formats import Numbers
from lwopt_backend.checkpoint.names.operations import OPERATIONS, stacked, unstacked
from lwopt_backend.checkpoint.names.rules import NameMap, Pattern, Rule, Values
from lwopt_backend.config.options import suggestion


@dataclass(frozen=True)
class Unit:
    """One use of a rule. ``sources`` are names by place in the stack (one place without a stack), one per source of the
    rule; ``sizes`` are the stack's. ``values`` are those of the fields on both sides."""

    rule: Rule
    values: Values
    sources: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.sources))

    def targets(self, sizes: Sequence[int] = ()) -> tuple[tuple[str, ...], ...]:
        """Names of the results, by place in an unstacked tensor of these ``sizes``."""
        places = itertools.product(*map(range, sizes))
        filled = [{**self.values, **dict(zip(self.rule.unstacked_over, place))} for place in places]
        return tuple(tuple(pattern.format(values) for pattern in self.rule.targets) for values in filled)


@dataclass
class _Found:
    """The names that matched one rule with equal values of the fields on both sides."""

    values: dict[str, int | str]
    names: dict[tuple[int, ...], dict[int, str]] = field(default_factory=dict)  # by place, by number of the source


def plan(names: NameMap, found: Iterable[str], numbers: Numbers) -> list[Unit]:
    """Units for all names, in the order of their first name. Raises CheckpointError with a list of problems."""
    found = list(found)
    patterns = [(at, number, each) for at, rule in enumerate(names.rules) for number, each in enumerate(rule.sources)]
    matches = []  # with the numbers of the rule and of its source, and the fields' values
    for name in found:
        taken = ((at, number, each.match(name)) for at, number, each in patterns)
        matches.append((name, next(((at, number, values) for at, number, values in taken if values is not None), None)))
    layers = _layers((match[2] for _, match in matches if match), numbers)
    by_rule: dict[int, dict[tuple[tuple[str, int | str], ...], _Found]] = {at: {} for at in range(len(names.rules))}
    problems = []
    for name, match in matches:
        if match is None:
            problems.append(f"{name!r} fits no rule")
            continue
        at, source, values = match
        rule = names.rules[at]
        place = tuple(int(values[key]) for key in rule.stacked_over)
        kept = {key: value for key, value in values.items() if key not in rule.stacked_over}
        unit = by_rule[at].setdefault(tuple(sorted(kept.items())), _Found(kept))
        unit.names.setdefault(place, {})[source] = name
    units = []
    for at, rule in enumerate(names.rules):
        made, wrong = _units(rule, list(by_rule[at].values()), numbers, layers, found)
        units += made
        problems += wrong
    if problems:
        raise CheckpointError(
            f"expected names that fit the map from {names.source} to {names.target}, found {len(problems)} problem(s); "
            f"give another map, or a file with your own rules (a rule with target [] drops a name):{listed(problems)}"
        )
    order = {name: at for at, name in enumerate(found)}
    return sorted(units, key=lambda unit: min(order[name] for name in unit.names))


def canonical(pairs: Sequence[tuple[Pattern, Pattern]], name: str) -> str:
    """The name behind an alias, or ``name`` itself."""
    matches = ((meant, alias.match(name)) for alias, meant in pairs)
    return next((meant.format(values) for meant, values in matches if values is not None), name)


def without_aliases(pairs: Sequence[tuple[Pattern, Pattern]], checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names behind aliases. Raises CheckpointError for two spellings of one parameter."""
    matrices = checkpoint.arguments.get(MATRICES) or {}
    names = (*checkpoint.params, *checkpoint.buffers, *checkpoint.tied, *checkpoint.tied.values(), *matrices)
    meant = {name: canonical(pairs, name) for name in names}
    if all(name == other for name, other in meant.items()):
        return checkpoint
    seen: set[str] = set()
    for name in (*checkpoint.params, *checkpoint.buffers):
        if meant[name] in seen:
            raise CheckpointError(f"expected one parameter {meant[name]!r}, found {name!r} and another; drop one")
        seen.add(meant[name])
    renamed = {meant[name]: of for name, of in matrices.items()}
    return dataclasses.replace(
        checkpoint,
        params={meant[name]: param for name, param in checkpoint.params.items()},
        buffers={meant[name]: buffer for name, buffer in checkpoint.buffers.items()},
        tied={meant[name]: meant[of] for name, of in checkpoint.tied.items()},
        arguments={**checkpoint.arguments, **({MATRICES: renamed} if renamed else {})},
    )


def _layers(values: Iterable[Mapping[str, int | str]], numbers: Numbers) -> int | None:
    """The number of layers. Raises CheckpointError if one is missing, or if the given number differs."""
    seen = {int(each["layer"]) for each in values if "layer" in each}
    if not seen:
        return numbers.layers
    count = max(seen) + 1
    missing = sorted(set(range(max(count, numbers.layers or 0))) - seen)
    if missing:
        raise CheckpointError(
            f"expected layers 0 to {count - 1}, found none of {', '.join(map(str, missing[:SHOWN]))}; the checkpoint "
            f"says that it has {numbers.layers or 'an unknown number of'} layers: is a part of it missing?"
        )
    if numbers.layers not in (None, count):
        raise CheckpointError(
            f"expected {numbers.layers} layers by the arguments, found {count}; copy all files of one checkpoint"
        )
    return count


def _units(
    rule: Rule, found: Sequence[_Found], numbers: Numbers, layers: int | None, names: Sequence[str]
) -> tuple[list[Unit], list[str]]:
    """The uses of a rule, and the problems: names that are missing among ``names``."""
    known = {"expert": numbers.experts, "layer": layers}
    sizes = []
    for number, name in enumerate(rule.stacked_over):
        most = max((place[number] + 1 for each in found for place in each.names), default=0)
        sizes.append(max(most, known.get(name) or 0))
    places = list(itertools.product(*map(range, sizes)))
    units, problems = [], []
    for each in found:
        some = next(iter(next(iter(each.names.values())).values()))
        missing = [
            pattern.format({**each.values, **dict(zip(rule.stacked_over, place))})
            for place in places
            for number, pattern in enumerate(rule.sources)
            if number not in each.names.get(place, {})
        ]
        problems += [f"{name!r} is missing, although {some!r} is there" for name in missing]
        if missing:
            continue
        sources = tuple(tuple(each.names[place][n] for n in range(len(rule.sources))) for place in places)
        units.append(Unit(rule, each.values, sources, tuple(sizes)))
    if rule.sources and not rule.optional:
        pattern, have = rule.sources[0], {each.values.get("layer") for each in found}
        if not found:
            near = suggestion(pattern.text, names) if names else "there are none"
            problems.append(f"{pattern.text!r} fits no name; {near}")
        elif "layer" in pattern.fields and layers is not None and "layer" not in rule.stacked_over:
            absent = [number for number in range(layers) if number not in have]
            problems += [f"{pattern.text!r} is missing for layer {number}" for number in absent]
    return units, problems


def is_gated(checkpoint: Checkpoint, numbers: Numbers) -> bool:
    """Whether Megatron-core's linear_qkv has the queries, gates, keys and values of each group in turn
    (--attention-output-gate). Arguments decide; without them, shapes: linear_proj has a column for every query."""
    if (said := checkpoint.arguments.get("attention_output_gate")) is not None or checkpoint.names != "megatron-core":
        return bool(said)
    for name, param in checkpoint.params.items():
        layer, qkv, _ = name.partition("linear_qkv.weight")
        if qkv and (proj := checkpoint.params.get(f"{layer}linear_proj.weight")):
            rows, queries, groups = param.shape[0], proj.shape[1], numbers.query_groups
            if numbers.heads and groups:
                return rows == 2 * queries + 2 * queries * groups // numbers.heads
            return rows > 2 * queries and rows != 3 * queries  # these are q, k and v with a key for each query
    return False


def apply(names: NameMap, checkpoint: Checkpoint, numbers: Numbers | None = None) -> Checkpoint:
    """The checkpoint in the map's target vocabulary, with notes on omissions.

    ``checkpoint.names`` must be the map's source. Given ``numbers`` take precedence over the map's, and these over the
    checkpoint's arguments. Reads no tensor. Raises CheckpointError for names that do not fit, listing all; for sizes
    that do not divide; for states that cannot follow their parameter.
    """
    if checkpoint.names != names.source:
        found = "does not record their family" if checkpoint.names == "model" else f"has those of {checkpoint.names}"
        raise CheckpointError(
            f"--names {names.target}: expected names of {names.source}, the checkpoint {found}; name their family with "
            f"--source-names (in lwopt diff --names-a or --names-b), {names.target} if they are those already"
        )
    given = {} if numbers is None else numbers.model_dump(exclude_unset=True)
    arguments = checkpoint.arguments
    numbers = names.numbers.model_copy(update=given).filled(arguments)
    family = names.target if names.source == "megatron-core" else names.source
    for key, (value, why) in names.refused.items():
        if arguments.get(key) == value:
            raise CheckpointError(
                f"expected another value than {key}={value!r} in training: {why}; weights under names of {family} "
                "would mean something else"
            )
    source = without_aliases(names.aliases, checkpoint)
    units = plan(names, source.params, numbers)
    not_gated = arguments.get("swiglu") is False and not arguments.get("quick_geglu")
    _check_gates(source, units, family, numbers)
    params: dict[str, Param] = {}
    unchanged: dict[str, str] = {}
    for unit in units:
        if not_gated and {"split_gate_up", "join_gate_up"} & set(unit.rule.do):
            raise CheckpointError(
                f"{unit.names[0]!r}: expected a gated fc1, because {unit.rule} divides gate and up, found the argument "
                "swiglu False: its fc1 is one matrix; give the map of another family"
            )
        for name, param in _made(source, unit, numbers).items():
            if name in params:
                raise CheckpointError(f"two rules make {name!r}; the second is {unit.rule}, of {unit.names[0]!r}")
            params[name] = param
            if param is source.params[unit.names[0]]:
                unchanged[unit.names[0]] = name
    tied, buffers, lost = _extras(names, source, units)
    dropped = [name for unit in units if not unit.rule.targets for name in unit.names]
    notes = [f"{len(dropped)} parameter(s) were dropped by the name map: {_some(dropped)}."] if dropped else []
    notes += [f"The name map has no name for {_some(lost)}; left out."] if lost else []
    return dataclasses.replace(
        checkpoint,
        names=names.target,
        params=params,
        arguments=_arguments(source.arguments, unchanged),
        notes=(*checkpoint.notes, *notes),
        tied=tied,
        buffers=buffers,
    )


def _check_gates(source: Checkpoint, units: Sequence[Unit], family: str, numbers: Numbers) -> None:
    taken = [unit.names[0] for unit in units if any("qkv" in operation for operation in unit.rule.do)]
    if taken and is_gated(source, numbers):
        raise CheckpointError(
            f"{taken[0]!r} has the gates of a gated attention in addition to q, k and v (Megatron's "
            f"--attention-output-gate), and {family} has no name for them; convert with --names megatron-core, for a "
            "model with its own class"
        )


def _arguments(arguments: Mapping[str, Any], unchanged: Mapping[str, str]) -> dict[str, Any]:
    """The arguments, with ``matrices`` by new names. Split, joined or permuted parameters lose their entries."""
    known = (arguments.get(MATRICES) or {}).items()
    renamed = {unchanged[name]: matrices for name, matrices in known if name in unchanged}
    rest = {key: value for key, value in arguments.items() if key != MATRICES}
    return {**rest, MATRICES: renamed} if renamed else rest


def _made(source: Checkpoint, unit: Unit, numbers: Numbers) -> dict[str, Param]:
    if not unit.rule.targets:
        return {}
    params = [source.params[name] for name in unit.names]
    first, keys = params[0], list(params[0].tensors)
    for name, param in zip(unit.names, params):
        pairs = [("tensors", sorted(first.tensors), sorted(param.tensors)), ("steps", first.step, param.step)]
        for what, expected, other in [*pairs, ("param group", first.group, param.group)]:
            if expected != other:
                raise CheckpointError(
                    f"expected equal {what} of {unit.names[0]!r} and {name!r}, which {unit.rule} joins, found "
                    f"{expected} and {other}; give a map that keeps them apart"
                )
    moved = {keys[0]: _moved(unit, [param.tensors[keys[0]] for param in params], numbers)}
    if len(params) == 1 and moved[keys[0]] == [[first.tensors[keys[0]]]]:  # renamed: states of any form can stay
        return {unit.targets()[0][0]: first}
    for name, param in zip(unit.names, params):
        fixed = [f"{key!r} of shape {state.shape}" for key, state in param.states.items() if state.shape != param.shape]
        fixed += ["owner state of its matrices (owner_states)"] if param.owner_states else []
        if fixed:
            raise CheckpointError(
                f"{name!r} of shape {param.shape}: expected only states of this shape, because {unit.rule} splits, "
                f"joins or permutes them, found {', '.join(fixed)}; give a map that only renames the parameter"
            )
    moved |= {key: _moved(unit, [param.tensors[key] for param in params], numbers) for key in keys[1:]}
    sizes = first.shape[: len(unit.rule.unstacked_over)]  # of an unstacked tensor
    known = {"layer": numbers.layers, "expert": numbers.experts}
    for name, size in zip(unit.rule.unstacked_over, sizes):
        if known.get(name) not in (None, size):
            raise CheckpointError(
                f"{unit.names[0]!r} of {first.shape}: expected a stack of {known[name]} {name}s, found {size}"
            )
    found = {}
    for place, targets in enumerate(unit.targets(sizes)):
        for number, name in enumerate(targets):
            found[name] = Param(None, {}, first.step, first.group).changed(
                {key: moved[key][place][number] for key in keys}
            )
    return found


def _moved(unit: Unit, tensors: Sequence[LazyTensor], numbers: Numbers) -> list[list[LazyTensor]]:
    """The resulting tensors: for each place of an unstacked tensor, a list with one for every target."""
    rule, width = unit.rule, len(unit.rule.sources)
    if rule.unstacked_over:
        items = list(zip(*(unstacked(tensor, len(rule.unstacked_over)) for tensor in tensors), strict=True))
    else:
        items = [tuple(tensors[start : start + width]) for start in range(0, len(tensors), width)]
    moved = []
    for item in map(list, items):
        for name in rule.do:
            item = OPERATIONS[name].run(item, numbers)
        moved.append(item)
    if rule.stacked_over:
        return [[stacked(parts, unit.sizes) for parts in zip(*moved, strict=True)]]
    return moved


def _extras(
    names: NameMap, checkpoint: Checkpoint, units: Sequence[Unit]
) -> tuple[dict[str, str], dict[str, LazyTensor], list[str]]:
    """Tied names and buffers in the target's vocabulary, and the names without a counterpart."""

    def renamed(name: str) -> str | None:
        """The new name by a rule with one source and one target, or None."""
        for rule in names.rules:
            values = rule.sources[0].match(name) if len(rule.sources) == 1 else None
            if values is not None:
                single = len(rule.targets) == 1 and set(rule.targets[0].fields) <= set(values) and not rule.stacked_over
                return rule.targets[0].format(values) if single else None
        return None

    single = [unit for unit in units if len(unit.names) == 1 == len(unit.rule.targets) and not unit.rule.unstacked_over]
    renames = {unit.names[0]: unit.targets()[0][0] for unit in single}
    ties = {n: (renamed(n), renames.get(of)) for n, of in checkpoint.tied.items()}
    tied = {new: of for new, of in ties.values() if new is not None and of is not None}
    of_buffers = {name: renamed(name) for name in checkpoint.buffers}
    buffers = {new: checkpoint.buffers[name] for name, new in of_buffers.items() if new is not None}
    lost = [name for name, both in ties.items() if None in both]
    return tied, buffers, lost + [name for name, new in of_buffers.items() if new is None]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
