"""A name map applied to a checkpoint: the same tensors under other names, moved when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lwopt_backend.checkpoint.contents import MATRICES, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.names.matching import Unit, canonical, plan
from lwopt_backend.checkpoint.names.muon import check_gated, sentences
from lwopt_backend.checkpoint.names.operations import OPERATIONS, stacked, unstacked
from lwopt_backend.checkpoint.names.rules import NameMap
from lwopt_backend.checkpoint.numbers import Numbers

WEIGHT = "weight"


def apply(names: NameMap, checkpoint: Checkpoint, numbers: Numbers | None = None) -> Checkpoint:
    """The checkpoint in the map's target vocabulary; what is said of it is added to its notes.

    ``checkpoint.names`` must be the map's source. ``numbers`` that were given go before the map's own, and these
    before what the checkpoint's arguments say. Nothing is read. Raises CheckpointError for names that do not fit, all
    listed; for sizes that do not divide; for states that cannot follow their parameter.
    """
    if checkpoint.names != names.source:
        raise CheckpointError(
            f"the map is from {names.source} to {names.target}, but the checkpoint's names are {checkpoint.names}; "
            "give a map for these, or say in which vocabulary they are"
        )
    given = {} if numbers is None else numbers.model_dump(exclude_unset=True)
    numbers = names.numbers.model_copy(update=given).filled(checkpoint.arguments)
    _check_arguments(names, checkpoint)
    source = dataclasses.replace(checkpoint, params=_spelled(names, checkpoint))
    units = plan(names, source.params, numbers)
    check_gated(source.arguments, units)
    params: dict[str, Param] = {}
    dropped: list[str] = []
    unchanged: dict[str, str] = {}
    for unit in units:
        made = _made(source, unit, numbers)
        dropped += unit.names if not unit.rule.targets else ()
        for name, param in made.items():
            if name in params:
                raise CheckpointError(f"two rules make {name!r}; the second is {unit.rule}, of {unit.names[0]!r}")
            params[name] = param
            if param is source.params[unit.names[0]]:
                unchanged[unit.names[0]] = name
    single = [unit for unit in units if len(unit.names) == 1 == len(unit.rule.targets) and not unit.rule.unstacked_over]
    renames = {unit.names[0]: unit.targets()[0][0] for unit in single}
    tied, buffers, lost = _extras(names, checkpoint, renames)
    notes = [*sentences(source, units, numbers)]
    notes += [f"{len(dropped)} parameter(s) were dropped by the name map: {_some(dropped)}."] if dropped else []
    notes += [f"The name map has no name for {_some(lost)}; left out."] if lost else []
    return dataclasses.replace(
        checkpoint,
        names=names.target,
        params=params,
        arguments=_arguments(names, checkpoint.arguments, unchanged),
        notes=(*checkpoint.notes, *(note for note in notes if note not in checkpoint.notes)),
        tied=tied,
        buffers=buffers,
    )


def _check_arguments(names: NameMap, checkpoint: Checkpoint) -> None:
    for key, (value, why) in names.refused.items():
        if checkpoint.arguments.get(key) == value:
            raise CheckpointError(
                f"the model was trained with {key}={value!r}: {why}; weights under names of "
                f"{names.target if names.source == 'megatron-core' else names.source} would mean something else"
            )


def _arguments(names: NameMap, arguments: Mapping[str, Any], unchanged: Mapping[str, str]) -> dict[str, Any]:
    """With matrices by the new names, of parameters that only got another; of others they are not these any more."""
    known = {canonical(names.aliases, name): matrices for name, matrices in (arguments.get(MATRICES) or {}).items()}
    renamed = {unchanged[name]: matrices for name, matrices in known.items() if name in unchanged}
    rest = {key: value for key, value in arguments.items() if key != MATRICES}
    return {**rest, MATRICES: renamed} if renamed else rest


def _spelled(names: NameMap, checkpoint: Checkpoint) -> dict[str, Param]:
    found: dict[str, Param] = {}
    for name, param in checkpoint.params.items():
        meant = canonical(names.aliases, name)
        if meant in found:
            raise CheckpointError(f"{name!r} and another parameter are both {meant!r}; one of them is too many")
        found[meant] = param
    return found


def _made(source: Checkpoint, unit: Unit, numbers: Numbers) -> dict[str, Param]:
    """The parameters that one unit makes."""
    if not unit.rule.targets:
        return {}
    params = [source.params[name] for name in unit.names]
    first, keys = params[0], _keys(unit, params)
    moved = {keys[0]: _moved(unit, [_tensor(param, keys[0]) for param in params], numbers)}
    if len(params) == 1 and moved[keys[0]] == [[_tensor(first, keys[0])]]:  # renamed: states of any form can stay
        return {unit.targets()[0][0]: first}
    _check_movable(unit, params)
    moved |= {key: _moved(unit, [_tensor(param, key) for param in params], numbers) for key in keys[1:]}
    found = {}
    for place, targets in enumerate(unit.targets(_sizes(unit, first, numbers))):
        for number, name in enumerate(targets):
            tensors = {key: moved[key][place][number] for key in keys}
            found[name] = Param(tensors.pop(WEIGHT, None), tensors, first.step, first.group)
    return found


def _tensor(param: Param, key: str) -> LazyTensor:
    found = param.weight if key == WEIGHT else param.states[key]
    assert found is not None
    return found


def _moved(unit: Unit, tensors: Sequence[LazyTensor], numbers: Numbers) -> list[list[LazyTensor]]:
    """By place in a stack that is undone the tensors that come out, one for every target."""
    rule, width = unit.rule, len(unit.rule.sources)
    if rule.unstacked_over:
        leading = len(rule.unstacked_over)
        parts = [unstacked(tensor, leading) for tensor in tensors]
        return [_operated(rule.do, list(place), numbers) for place in zip(*parts, strict=True)]
    items = [tensors[start : start + width] for start in range(0, len(tensors), width)]
    moved = [_operated(rule.do, item, numbers) for item in items]
    if rule.stacked_over:
        return [[stacked(parts, unit.sizes) for parts in zip(*moved, strict=True)]]
    return moved


def _operated(do: Sequence[str], tensors: Sequence[LazyTensor], numbers: Numbers) -> list[LazyTensor]:
    tensors = list(tensors)
    for name in do:
        tensors = OPERATIONS[name].run(tensors, numbers)
    return tensors


def _keys(unit: Unit, params: Sequence[Param]) -> list[str]:
    """ "weight" and the states' keys; the same, with the same counters, of all that are joined."""

    def of(param: Param) -> list[str]:
        return ([WEIGHT] if param.weight is not None else []) + list(param.states)

    first = params[0]
    for name, param in zip(unit.names, params):
        pairs = [("tensors", sorted(of(first)), sorted(of(param))), ("steps", first.step, param.step)]
        for what, expected, found in [*pairs, ("param group", first.group, param.group)]:
            if expected != found:
                raise CheckpointError(
                    f"{unit.names[0]!r} and {name!r} are joined by {unit.rule}, but differ in {what}: {expected} and "
                    f"{found}; give a map that keeps them apart"
                )
    return of(first)


def _check_movable(unit: Unit, params: Sequence[Param]) -> None:
    """Raises CheckpointError for a state that is not as large as its parameter."""
    for name, param in zip(unit.names, params):
        other = [f"{key!r} of shape {state.shape}" for key, state in param.states.items() if state.shape != param.shape]
        other += ["what a rule keeps of its matrices (owner_states)"] if param.owner_states else []
        if other:
            raise CheckpointError(
                f"{name!r} of shape {param.shape} has {', '.join(other)}, which cannot follow {unit.rule}; only states "
                "of a parameter's own shape can be split, joined or permuted. Give a map that only renames it"
            )


def _sizes(unit: Unit, param: Param, numbers: Numbers) -> tuple[int, ...]:
    """Of a stack that is undone. Raises CheckpointError if another number was expected."""
    sizes = param.shape[: len(unit.rule.unstacked_over)]
    known = {"layer": numbers.layers, "expert": numbers.experts}
    for name, size in zip(unit.rule.unstacked_over, sizes):
        if known.get(name) not in (None, size):
            raise CheckpointError(
                f"{unit.names[0]!r} of shape {param.shape} is a stack of {size}; expected were {known[name]} {name}s"
            )
    return sizes


def _extras(
    names: NameMap, checkpoint: Checkpoint, renames: dict[str, str]
) -> tuple[dict[str, str], dict[str, LazyTensor], list[str]]:
    """Tied names and buffers in the target's vocabulary, and the names that have none there."""
    tied, buffers, lost = {}, {}, []
    for name, target in checkpoint.tied.items():
        new, kept = _renamed(names, name), renames.get(canonical(names.aliases, target))
        if new is None or kept is None:
            lost.append(name)
        else:
            tied[new] = kept
    for name, buffer in checkpoint.buffers.items():
        new = _renamed(names, name)
        if new is None:
            lost.append(name)
        else:
            buffers[new] = buffer
    return tied, buffers, lost


def _renamed(names: NameMap, name: str) -> str | None:
    """The name by a rule that takes one and makes one, or None."""
    name = canonical(names.aliases, name)
    for rule in names.rules:
        values = rule.sources[0].match(name) if len(rule.sources) == 1 else None
        if values is None:
            continue
        single = len(rule.targets) == 1 and set(rule.targets[0].fields) <= set(values) and not rule.stacked_over
        return rule.targets[0].format(values) if single and rule.only is None else None
    return None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
