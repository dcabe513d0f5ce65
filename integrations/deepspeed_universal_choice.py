"""What of a universal checkpoint goes into an engine of any storage: decided, and checked, before any of it does.

Parameters are found by name, and a param group's hyperparameters by the parameters in it: the checkpoint's groups may
be others, in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.deepspeed.universal_reader import OWNERS
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.integrations.deepspeed_universal_groups import ALONE, Group, check_scheduler, options_of
from lwopt_backend.param_groups import of_another_optimizer
from lwopt_backend.plan.blocks import Block
from lwopt_backend.registry import MATRIX_RULES, arguments, new_state
from lwopt_backend.runtime.owner_state import keeps_state
from lwopt_backend.spelling import suggestion

STEP = "step"


@dataclass(frozen=True)
class Trained:
    """A parameter by its name and whole shape, and the matrices in it; none in an element-wise one."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Stepped:
    """Parameters that an engine steps at a time, with one count of steps. ``group`` is their param group's number."""

    group: int
    rule: str
    params: tuple[Trained, ...]


@dataclass(frozen=True)
class Choice:
    """``params`` are the trained ones, by our names, ``rest`` what is frozen, and buffers. ``options`` are what each
    param group goes on with, ``notes`` what rank 0 says of those that it cannot go on with."""

    folder: Path
    checkpoint: Checkpoint
    params: Mapping[str, Param]
    rest: Mapping[str, LazyTensor]
    options: Sequence[dict[str, Any]]
    notes: Sequence[str]


def choose(
    engine: DeepSpeedEngine,
    stepped: Sequence[Stepped],
    groups: Sequence[Group],
    folder: Path,
    checkpoint: Checkpoint,
    *,
    with_state: bool,
    with_scheduler: bool,
    strict: bool,
) -> Choice:
    """Of ``checkpoint``, which is in ``folder``, what an engine takes that trains ``stepped`` in param ``groups``.

    Raises CheckpointError, which is a ValueError, for parameters, shapes, states or rules that do not fit. ``strict``
    asks for every frozen parameter and buffer, too.
    """
    trained = {param.name: param for unit in stepped for param in unit.params}
    others = _others(engine, trained)
    params = _matched(folder, checkpoint, trained, others)
    for name, param in trained.items():
        _check_shape(folder / "zero" / name / f"{MASTER}.pt", name, param.shape, params[name].shape)
    rest = _rest(folder, checkpoint, others, strict)
    options: list[dict[str, Any]] = [{} for _ in groups]
    notes: list[str] = []
    if with_state:
        members: list[dict[str, Param]] = [{} for _ in groups]
        for unit in stepped:
            notes += _check_states(folder, checkpoint, unit, groups[unit.group], params)
            members[unit.group].update((param.name, params[param.name]) for param in unit.params)
        options, more = options_of(folder, checkpoint, groups, members)
        notes += more
    if with_scheduler and engine.lr_scheduler is not None:
        check_scheduler(folder, engine.lr_scheduler.state_dict(), checkpoint.scheduler)
    return Choice(folder, checkpoint, params, rest, options, notes)


def _others(engine: DeepSpeedEngine, trained: Mapping[str, Trained]) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the module's frozen parameters and of those buffers that are saved."""
    saved = engine.module.state_dict().keys()  # at stage 3, too: only what the parameters hold is elsewhere
    buffers = {name: tuple(buffer.shape) for name, buffer in engine.module.named_buffers() if name in saved}
    params = engine.module.named_parameters()
    frozen = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in params if name not in trained}
    return {**frozen, **buffers}


def _matched(
    folder: Path, checkpoint: Checkpoint, trained: Mapping[str, Trained], others: Mapping[str, Any]
) -> dict[str, Param]:
    there = checkpoint.params
    names = {name: name if name in there else checkpoint.tied.get(name, name) for name in trained}
    missing = [name for name, theirs in names.items() if theirs not in there or not there[theirs].states]
    if missing:
        kind = "has it frozen" if missing[0] in there else f"has none of that name; {suggestion(missing[0], there)}"
        raise CheckpointError(
            f"{folder}: expected the state of all {len(trained)} trained parameters, but {len(missing)} are missing, "
            f"first {missing[0]!r}: the checkpoint {kind}. Its names are {checkpoint.names!r}; convert it with lwopt "
            "convert --names where the model's are others"
        )
    taken = {*names.values(), *others, *(checkpoint.tied.get(name) for name in others)}
    left = [name for name in there if name not in taken]
    if left:
        raise CheckpointError(
            f"{folder} has {len(left)} parameters that the model does not train, first {left[0]!r}; "
            f"{suggestion(left[0], trained)} Load it into the model it was saved with"
        )
    return {name: there[theirs] for name, theirs in names.items()}


def _rest(
    folder: Path, checkpoint: Checkpoint, others: Mapping[str, tuple[int, ...]], strict: bool
) -> dict[str, LazyTensor]:
    """Tensors for frozen parameters and buffers, by name; DeepSpeed's converter makes parameters of both."""
    found = {}
    for name, shape in others.items():
        there = checkpoint.params.get(checkpoint.tied.get(name, name))
        tensor = checkpoint.buffers.get(name) if there is None or name in checkpoint.buffers else there.best
        if tensor is not None:
            _check_shape(folder, name, shape, tensor.shape)
            found[name] = tensor
        elif strict:
            raise CheckpointError(
                f"{folder}: the files of model states have no {name!r}, which is frozen or a buffer; with "
                "load_module_strict=False it keeps what it has"
            )
    return found


def _check_shape(file: Path, name: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if tuple(expected) != tuple(found):
        raise CheckpointError(
            f"{file}, parameter {name!r}: expected shape {tuple(expected)}, found {tuple(found)}; load it into the "
            "model it was saved with"
        )


def _check_states(
    folder: Path, checkpoint: Checkpoint, unit: Stepped, group: Group, params: Mapping[str, Param]
) -> list[str]:
    """Raises CheckpointError unless there is all that the rule of ``group`` keeps of a unit's parameters. Sentences on
    what is different all the same."""
    like = new_state(torch.empty(1, device="meta"), group)
    expected = sorted(key for key, tensor in like.items() if tensor.ndim)
    keeps_owner_state = unit.rule in MATRIX_RULES and keeps_state(MATRIX_RULES[unit.rule].build(**arguments(group)))
    notes = []
    for trained in unit.params:
        name, param = trained.name, params[trained.name]
        whose = f"parameter {name!r}, which {unit.rule!r} trains"
        found = sorted(key for key in param.states if key != MASTER)
        if found != expected:
            others = "; another optimizer wrote the checkpoint" if of_another_optimizer(checkpoint.groups) else ""
            raise CheckpointError(
                f"{folder / 'zero' / name}: {whose}: expected the states {expected}, found {found}{others}; let the "
                f"rule train it that trained it there, with include, exclude or overrides, or {ALONE}"
            )
        if STEP in like and param.step is None:
            raise CheckpointError(f"{folder / 'zero' / name / STEP}.pt is missing: {whose}; {ALONE}")
        if keeps_owner_state and checkpoint.iteration != 0:
            notes += _check_owner_states(folder, checkpoint, trained, whose, param, unit.rule)
        elif param.owner_states and not keeps_owner_state:
            raise CheckpointError(f"{folder / OWNERS / name}.pt: {whose}, a rule that keeps no such state; {ALONE}")
        ours, theirs = list(map(str, trained.blocks)), _matrices(checkpoint, name)
        if theirs not in (None, ours):
            notes.append(f"{folder}: {whose} as the matrices {ours}, was trained as {theirs}; their updates differ")
    steps = {trained.name: params[trained.name].step for trained in unit.params}
    if STEP in like and len(set(steps.values())) > 1:
        raise CheckpointError(
            f"{folder}: DeepSpeed steps the parameters of a param group as one tensor; expected one count of steps for "
            f"those of {unit.rule!r}, found {steps}; put them into groups of their own"
        )
    return notes


def _matrices(checkpoint: Checkpoint, name: str) -> list[str] | None:
    """Which matrices a parameter was trained as, where the checkpoint tells."""
    found = (checkpoint.arguments.get("matrices") or {}).get(checkpoint.tied.get(name, name))
    return None if found is None else list(found)


def _check_owner_states(
    folder: Path, checkpoint: Checkpoint, trained: Trained, whose: str, param: Param, rule: str
) -> list[str]:
    """Raises CheckpointError unless there is something of every matrix, and of the same ones.

    Of one that never had a gradient there is nothing; where others have something, that is said and no error.
    """
    ours, theirs = list(map(str, trained.blocks)), _matrices(checkpoint, trained.name)
    found, file = param.owner_states, f"{folder / OWNERS / trained.name}.pt: {whose}"
    if found and (theirs not in (None, ours) or max(found) >= len(ours)):
        raise CheckpointError(
            f"{file} as the matrices {ours}: found what owners keep of {theirs or sorted(found)}; load it with the "
            f"'atoms' it was saved with, or {ALONE}"
        )
    if len(found) == len(ours):
        return []
    number = len(checkpoint.groups) if param.group is None else param.group
    by = checkpoint.groups[number].get("rule") if number in range(len(checkpoint.groups)) else None
    if by != rule or not any(other.owner_states for other in checkpoint.params.values()):
        raise CheckpointError(
            f"{file}: expected what the owner keeps of {len(ours)} matrices, found {len(found)}; convert the "
            f"checkpoint with lwopt convert, which takes it along, or {ALONE}"
        )
    return [f"{file}: nothing was kept of {len(ours) - len(found)} of {len(ours)} matrices; they begin anew"]
