"""Param groups and state of other optimizers as this package's, as ``groups/others.py`` describes them.

Torch's DCP loads the groups (docs/migration.md). Torch's own options are kept and completed, so that torch.optim.AdamW
also finds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, Param
from lwopt_backend.config.options import within
from lwopt_backend.groups.others import BUFFER, Told, told
from lwopt_backend.groups.rates import regrouped
from lwopt_backend.groups.registry import MATRIX_RULES, arguments, options_of, torchs_keys

_PLACES = ("members", "from_group", "overrides")  # keys of engines that are no options


def as_ours(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with this package's param groups, with ``rule``, in the order in which its optimizers have them:
    those of another optimizer with matrices first; and with their state as that rule keeps it. The lists in states of
    schedulers keep to the groups.

    A group without a rule of this package, or with unknown options, stays as it is, and the notes say why; this
    package's optimizers will not load it, because it lacks their options.
    """
    found, notes = translated(checkpoint)
    ours = {number for number, group in enumerate(found) if "rule" in group}  # else all of a group stays as it is
    converted, more = with_our_state(checkpoint, lambda name: "ema", ours)
    count = len(found)
    order = sorted(range(count), key=lambda number: _place_of(checkpoint.groups, found, number))
    place: dict[int | None, int] = {number: position for position, number in enumerate(order)}
    params = {
        name: replace(param, group=place.get(param.group, param.group)) for name, param in converted.params.items()
    }
    return replace(
        checkpoint,
        params=params,
        groups=tuple(found[number] for number in order),
        scheduler=regrouped(checkpoint.scheduler, order, count),
        client=regrouped(dict(checkpoint.client), order, count),
        notes=(*checkpoint.notes, *notes, *more),
    )


def _place_of(saved: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], number: int) -> tuple[Any, ...]:
    """Sorts groups. This package saves them in its optimizers' order, except those of a pipeline's stages."""
    is_matrix = found[number].get("rule") in MATRIX_RULES
    if all("from_group" in group for group in saved):
        return saved[number]["from_group"], not is_matrix, saved[number].get("overrides", [])
    return (number,) if all("rule" in group for group in saved) else (not is_matrix, number)


class Writers:
    """Who wrote the state of each parameter of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._found: dict[tuple[int | None, frozenset[str]], Told | ValueError] = {}

    def of(self, param: Param) -> Told | ValueError | None:
        """What the table of other optimizers says of a parameter's state, or the reason why it says nothing; None for
        state of this package, and for none. Where the param group is not known, all that fit must say the same."""
        keys, every = frozenset(param.states) - {MASTER}, self._checkpoint.groups
        number = param.group if param.group in range(len(every)) else None
        groups = every if number is None else [every[number]]
        if not keys or any("rule" in group for group in groups):
            return None
        if (number, keys) not in self._found:
            self._found[number, keys] = self._told(keys, groups)
        return self._found[number, keys]

    def _told(self, keys: frozenset[str], groups: Sequence[Mapping[str, Any]]) -> Told | ValueError:
        found, wrong = set[Told](), ValueError("expected its param group, found none in the checkpoint")
        for group in groups:
            try:
                found.add(told(keys, group, self._checkpoint.arguments))
            except ValueError as error:
                wrong = error
        return found.pop() if len(found) == 1 else wrong


def with_our_state(
    checkpoint: Checkpoint, form_of: Callable[[str], str], groups: Collection[int] | None = None
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with the state of other optimizers under this package's keys, and momentum in the form
    ``form_of`` each parameter; and sentences on what was converted. State that no rule here keeps, or that is not of
    ``groups`` if they are given, stays as it is. Raises ValueError for a sum without a decay rate."""
    writers, params, notes = Writers(checkpoint), dict(checkpoint.params), dict[str, None]()
    for name, param in checkpoint.params.items():
        by = writers.of(param)
        if not isinstance(by, Told) or groups is not None and param.group not in groups:
            continue
        states = {ours: param.states[theirs] for ours, theirs in by.source.keys(param.states).items()}
        masters = {MASTER: param.states[MASTER]} if MASTER in param.states else {}
        scale = by.scale({} if param.group is None else checkpoint.groups[param.group], form_of(name))
        if scale != 1.0:
            states[BUFFER] = states[BUFFER].times(scale)
            said = f"param group {param.group} is of {by.name}, whose momentum is in the form {by.source.form!r}"
            notes[f"{said}; here it is {form_of(name)!r}, {scale:.6g} times as large"] = None
        params[name] = replace(param, states={**masters, **states})
    return replace(checkpoint, params=params), list(notes)


def on_loading(checkpoint: Checkpoint) -> list[str]:
    """Notes for a folder that keeps the state of other optimizers: what a load here converts, and what it refuses."""
    writers, notes = Writers(checkpoint), dict[str, None]()
    for param in checkpoint.params.values():
        by = writers.of(param)
        if isinstance(by, ValueError):
            notes[f"param group {param.group} is kept as it is, and this package does not load its state: {by}"] = None
        elif by is not None and by.rule == "muon" and by.source.form == "sum":
            notes[f"param group {param.group} is of {by.name}, whose momentum is a sum: a load here converts it"] = None
    return list(notes)


def translated(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups in order, with ``rule`` if they have a counterpart; and sentences on those that have none."""
    writers, by = Writers(checkpoint), dict[int, set[Told | ValueError | None]]()
    for param in checkpoint.params.values():
        if param.group is not None:
            by.setdefault(param.group, set()).add(writers.of(param))
    found, notes, peaks = [], [], _peaks(checkpoint)
    for number, (group, peak) in enumerate(zip(checkpoint.groups, peaks)):
        try:
            found.append(_translated(group, [of for of in by.get(number, ()) if of is not None], checkpoint, peak))
        except ValueError as error:
            found.append(dict(group))
            if number in by:
                notes.append(f"param group {number} does not fit a rule of this package: {error}")
    return found, notes


def _peaks(checkpoint: Checkpoint) -> list[float | None]:
    """By group, the rate after the configured warm-up of DeepSpeed's schedulers, which save no rates; None if unknown.

    The number in a ds_config is the rate of the matrices, and this package gives each of its groups a share; without
    it, DeepSpeed writes the number into all groups.
    """
    groups = checkpoint.groups
    ds_config = checkpoint.arguments.get("ds_config") or {}
    peak = ((ds_config.get("scheduler") or {}).get("params") or {}).get("warmup_max_lr")
    is_theirs = "last_batch_iteration" in (checkpoint.scheduler or {})
    if is_theirs and isinstance(peak, list) and len(peak) == len(groups):
        return [float(each) for each in peak]
    if not is_theirs or not isinstance(peak, (int, float)):
        return [None] * len(groups)
    if not all("rule" in group for group in groups):
        return [float(peak)] * len(groups)
    main = next(group["lr"] for group in sorted(groups, key=lambda group: group["rule"] not in MATRIX_RULES))
    return [peak * (group["lr"] / main) if main else None for group in groups]


def _translated(
    group: Mapping[str, Any], by: Sequence[Told | ValueError], checkpoint: Checkpoint, peak: float | None
) -> dict[str, Any]:
    """``by`` are those who wrote its parameters' state. Raises ValueError with the reason if it has no counterpart."""
    if "rule" in group:
        known: dict[str, Any] = {}
        with suppress(ValueError):  # an unknown rule or class
            known = arguments(group)
        first = {} if peak is None else {"initial_lr": peak}
        own = {key: value for key, value in group.items() if key not in _PLACES}
        return {**(torchs_keys() if group["rule"] == "adamw" else {}), **known, **first, **own}
    for writer in by:
        if isinstance(writer, ValueError):
            raise writer
    rules = {writer.rule: writer for writer in by if isinstance(writer, Told)}
    if len(rules) != 1:
        raise ValueError(f"expected parameters with the state of one rule, found {sorted(rules) or 'none with state'}")
    ((rule, writer),) = rules.items()
    kept = {key: value for key, value in group.items() if value is not None} if rule == "adamw" else dict(group)
    # The base learning rate that a schedule multiplies: torch's ``initial_lr``.
    start = group.get("initial_lr", group.get("max_lr"))
    if start is None:
        start = group.get("lr") if checkpoint.scheduler is None else peak
    writer.scale(group, "ema")
    given = writer.options(group, checkpoint.arguments)
    with within(f"a group of {rule}"):
        options = options_of(rule, given)
    torchs = torchs_keys() if rule == "adamw" else {}
    return {**torchs, **kept, "rule": rule, **options, **({} if start is None else {"initial_lr": start})}


def with_lions_steps(checkpoint: Checkpoint) -> Checkpoint:
    """Megatron's Lion counts no steps; this package's Lion does, although no update depends on them."""

    def counted(param: Param) -> Param:
        is_lion = param.step is None and set(param.states) - {MASTER} == {"exp_avg"}
        return replace(param, step=float(checkpoint.iteration or 0)) if is_lion else param

    return replace(checkpoint, params={name: counted(param) for name, param in checkpoint.params.items()})
