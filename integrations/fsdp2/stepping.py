"""One step of all steppers of a model: matrices mesh by mesh, the rest while the first bucket travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from torch import Tensor

from lwopt_backend.elementwise_groups import ElementwiseGroups
from lwopt_backend.integrations.fsdp2.attach import Attachment
from lwopt_backend.integrations.fsdp2.binding import NAME
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper, States
from lwopt_backend.registry import ELEMENTWISE_RULES
from lwopt_backend.row_scaling import RowScaling
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.storage import Slices


def step_all(
    steppers: Sequence[MeshStepper],
    groups: Sequence[Mapping[str, Any]],
    rules: Mapping[int, MatrixRule],
    optimizers: ElementwiseGroups,
    states: States,
    attachment: Attachment | None,
    row_scaling: RowScaling,
    changed: str | None,
) -> None:
    """One step from the gradients that are there. ``rules`` are by param group. Called on all ranks of the meshes.

    ``changed`` says what has happened to the model on this rank that ends its training. Raises RuntimeError, on all
    ranks and before any weight is changed, if there is such a thing on any.
    """
    of_steppers = [stepper.rules_of(rules) for stepper in steppers]
    storages = [stepper.storage(states) for stepper in steppers]
    touched: list[Tensor | None] = [None] * len(steppers)
    if attachment is not None:
        parts = zip(steppers, of_steppers, storages)
        touched = [attachment.touched(number, *part) for number, part in enumerate(parts)]
    presences = [stepper.presence(flags, changed=changed is not None) for stepper, flags in zip(steppers, touched)]
    changed = _changed_anywhere(steppers, presences, changed)
    if changed is not None:
        if attachment is not None:
            attachment.remove()
        raise RuntimeError(f"{NAME}: {changed}")
    meanwhile: Callable[[], None] | None = functools.partial(_step_elementwise, optimizers, groups, steppers, presences, states)
    for number, (stepper, presence) in enumerate(zip(steppers, presences)):
        departed: Mapping[int, Any] = {}
        if attachment is not None and touched[number] is not None:
            departed = attachment.settle(number, presence.anywhere()[len(stepper.members) + 1 :])
        stepper.step_matrices(of_steppers[number], storages[number], presence, departed, meanwhile)
        presence.finish()
        meanwhile = None
    if row_scaling:
        for stepper in steppers:
            stepper.scale_rows(row_scaling)
        row_scaling.clear()


def _changed_anywhere(
    steppers: Sequence[MeshStepper], presences: Sequence[Presence], changed: str | None
) -> str | None:
    """What the first rank of a mesh says that has something to say. Called on all ranks of the meshes."""
    found = None
    for stepper, presence in zip(steppers, presences):
        if presence.anywhere()[len(stepper.members)]:
            of_ranks = stepper.collectives.gather_objects(changed)
            ranks = sorted(stepper.mesh.ranks) if stepper.mesh is not None else [0]
            first = next(f"{said} (rank {rank})" for rank, said in zip(ranks, of_ranks) if said is not None)
            found = found or first
    return found


def _step_elementwise(
    optimizers: ElementwiseGroups,
    groups: Sequence[Mapping[str, Any]],
    steppers: Sequence[MeshStepper],
    presences: Sequence[Presence],
    states: States,
) -> None:
    """One step of every element-wise param group, on this rank's pieces of whatever mesh.

    Where the state has a wider dtype than the parameter, the step is computed in the state's and rounded at its end.
    """
    for number, group in enumerate(groups):
        if group["rule"] not in ELEMENTWISE_RULES:
            continue
        parts = [
            part for stepper, here in zip(steppers, presences) for part in stepper.elementwise(number, states, here)
        ]
        wide = [
            part
            if part.value.dtype == part.grad.dtype
            else Slices(part.value.to(part.grad.dtype), part.grad, part.state)
            for part in parts
        ]
        optimizers.step(number, group, wide)
        for part, computed in zip(parts, wide):
            if computed is not part:
                part.value.copy_(computed.value)
