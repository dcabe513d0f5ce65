"""Param groups and the scheduler after a universal checkpoint: matched by parameters, and checked first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint import convert as translation
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param
from lwopt_backend.config.param_groups import OURS
from lwopt_backend.config.registry import option_names

PLACED = {"params", *OURS}  # a group's keys that say what it is, not how it is trained


ALONE = "load the weights alone, with load_optimizer_states=False"


Group = Mapping[str, Any]


def options_of(
    folder: Path, checkpoint: Checkpoint, groups: Sequence[Group], members: Sequence[Mapping[str, Param]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options that each of the param ``groups`` takes over, and sentences about those that it does not.

    ``members`` are, by group, its parameters in the checkpoint, by our names. Raises CheckpointError if they have other
    rules, or options that one group cannot have.
    """
    translated, notes = translation.translated(checkpoint)
    checkpoint = dataclasses.replace(checkpoint, groups=tuple(map(_named_as_ours, checkpoint.groups)))
    notes = [f"{folder}: {note}" for note in notes]
    notes += _differences(folder, checkpoint.groups, translated, groups, members)
    options = [
        _options(folder, checkpoint, number, group, {name: param.group for name, param in of_group.items()}, notes)
        for number, (group, of_group) in enumerate(zip(groups, members))
    ]
    return options, notes


def _named_as_ours(group: Group) -> Group:
    """Megatron's Muon has used two names for its momentum."""
    return {"momentum": group["momentum_beta"], **group} if "momentum_beta" in group else group


def _differences(
    folder: Path,
    saved: Sequence[Group],
    translated: Sequence[Group],
    groups: Sequence[Group],
    members: Sequence[Mapping[str, Param]],
) -> list[str]:
    """Sentences about arguments of the other optimizer, not in its groups' options, that are configured differently
    here. ``translated`` are the ``saved`` groups with our options."""
    said: dict[str, None] = {}
    for number, (group, of_group) in enumerate(zip(groups, members)):
        for theirs in sorted({p.group for p in of_group.values() if p.group is not None and p.group < len(saved)}):
            made = translated[theirs]
            if "rule" in saved[theirs] or made.get("rule") != group["rule"]:
                continue
            keys = [key for key in option_names(group) if key in made and key not in saved[theirs]]
            listed = [f"{key} {made[key]!r} (here {group.get(key)!r})" for key in keys if made[key] != group.get(key)]
            if listed:
                trained = f"param group {number} was trained with {', '.join(listed)} where it comes from"
                said[f"{folder}: {trained}, and goes on with what is configured here"] = None
    return list(said)


def _options(
    folder: Path,
    checkpoint: Checkpoint,
    number: int,
    group: Group,
    of_params: Mapping[str, int | None],
    notes: list[str],
) -> dict[str, Any]:
    """The options that param group ``number`` takes over. ``of_params`` are its parameters' groups in the checkpoint.

    From our optimizers' groups, which name their rule, all keys but ``PLACED``; from others the rule's options.
    """
    numbers = sorted({n for n in of_params.values() if n is not None and n < len(checkpoint.groups)})
    theirs = [checkpoint.groups[n] for n in numbers]
    for name, n in of_params.items():
        rule = checkpoint.groups[n].get("rule") if n in numbers else None
        if rule not in (None, group["rule"]):
            raise CheckpointError(
                f"{folder}: parameter {name!r} was trained by {rule!r}, here by {group['rule']!r}; let the same rule "
                f"train it, with include, exclude or overrides, or {ALONE}"
            )
    ours = all("rule" in of_group for of_group in theirs)
    wanted = {*option_names(group), "initial_lr"}
    keys = [
        key for key in dict.fromkeys(k for g in theirs for k in g) if (key not in PLACED if ours else key in wanted)
    ]
    taken = {}
    for key in keys:
        first = theirs[0].get(key)
        if all(of_group.get(key) == first for of_group in theirs):
            taken[key] = first
            continue
        values = [of_group.get(key) for of_group in theirs]
        text = (
            f"param group {number} here has parameters of the checkpoint's groups {numbers}, whose {key!r} are {values}"
        )
        if ours:
            raise CheckpointError(
                f"{folder}: {text}; give the optimizer the param groups it was saved with, or {ALONE}"
            )
        notes.append(f"{folder}: {text}; it keeps {group.get(key)}, as configured")
    return taken


def check_scheduler(folder: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> None:
    """A scheduler loads any state, and later fails or continues with another scheduler's numbers; so check its form."""

    def form(state: Mapping[str, Any]) -> list[tuple[str, int | None]]:
        return sorted((key, len(value) if isinstance(value, list) else None) for key, value in state.items())

    if theirs is None or form(theirs) != form(ours):
        raise CheckpointError(
            f"{folder}: expected the state of a scheduler like the one here, with {sorted(ours)}, found "
            f"{'none' if theirs is None else sorted(theirs)}; use the scheduler and the param groups it was saved "
            "with, or load_lr_scheduler_states=False"
        )
