"""FSDP2's steps, and state for parameters that are sharded after the optimizer is made, as by Accelerate's ``prepare``.

The order of events with ``prepare``:

1. It is made for the plain model, and routes its parameters.
2. ``prepare`` loads its own state dict into it, to move state to the device. It has no state yet.
3. ``prepare`` puts placeholders into the param groups, shards the model, and puts the sharded parameters there.
4. A checkpoint may be saved or loaded before the first step. ``torch.distributed.checkpoint`` reads ``state`` and,
   if it is empty, takes a step without gradients to create some: AdamW's counter would begin at 1.

So state is created when it is first read after 3., without other ranks. Planning needs them, and waits for the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lwopt_backend.config.hosts import NAME
from lwopt_backend.engines import report
from lwopt_backend.engines.base import machine_for
from lwopt_backend.engines.fsdp2.gradients import Counted
from lwopt_backend.engines.fsdp2.plan import Mesh, MeshStepper, States, describe, mesh_state_nbytes, sharded_by
from lwopt_backend.engines.output import binary_units
from lwopt_backend.groups.param_groups import NONE, ComparedOptions, ElementwiseGroups
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, rule_of
from lwopt_backend.qk_clip import RowScaling
from lwopt_backend.runtime.agreement import StepRefused, disagreement
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.pieces import Slices
from lwopt_backend.runtime.places import Rules
from lwopt_backend.runtime.presence import Presence, first_of, read_at_once


class StateOnceSharded:
    """An optimizer's attribute ``state``: created for the parameters of its param groups when they are DTensors.

    The optimizer's ``_make_state`` creates missing state; ``_stated`` lists the parameters that have it.
    """

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        held = [param for group in optimizer.param_groups for param in group["params"]]
        # A reader makes all state: Accelerate shards after the optimizer was made, and saves before the first step.
        if any(isinstance(param, DTensor) for param in held) and any(id(p) not in optimizer._stated for p in held):
            optimizer._make_state()
        return optimizer.__dict__["state"]

    def __set__(self, optimizer: Any, state: Any) -> None:
        optimizer.__dict__["state"] = state  # Optimizer.__setstate__ also writes it there


def check_sharded(params: Iterable[Tensor]) -> None:
    """Raises RuntimeError if none of the parameters is a DTensor at the first step."""
    if not any(isinstance(param, DTensor) for param in params):
        raise RuntimeError(
            "LayerWiseOptimizer with sharded_later=True: expected DTensors in its param groups at the first step, "
            "found none; check that prepare() was given the model and this optimizer together, and that Accelerate "
            "runs with FSDP, fsdp_version 2 (on CPUs it silently falls back to DDP)"
        )


def check_scaler(held: Iterable[tuple[str, Tensor]]) -> None:
    """Raises RuntimeError if torch's GradScaler would tell some ranks only of an overflow, so that they alone skip.

    Of the gradients of one dtype, torch 2.13 exchanges what it found along the mesh dimensions that cut the first one.
    """
    firsts = dict[torch.dtype, tuple[str, DTensor]]()
    for name, param in held:
        grad = param.grad
        if not isinstance(grad, DTensor):
            continue
        first, exchanged = firsts.setdefault(grad.dtype, (name, grad))
        if not _reaches(exchanged, grad):
            raise RuntimeError(
                f"{NAME}: GradScaler would skip a step on some ranks only, because it exchanges an overflow along the "
                f"dimensions that cut the gradient of {describe(first, exchanged)}; found {describe(name, grad)}; "
                'train in bf16, or scale losses by a fixed factor, with on_nonfinite="skip"'
            )


def _reaches(exchanged: DTensor, grad: DTensor) -> bool:
    """Whether each rank learns of what a rank has found in ``grad`` from an exchange along the cut of another."""
    cut = _cut(exchanged)
    if grad.device_mesh == exchanged.device_mesh:
        return _cut(grad) <= cut
    everywhere = {dim for dim, size in enumerate(exchanged.device_mesh.shape) if size > 1} <= cut
    ranks, reached = (set(each.device_mesh.mesh.flatten().tolist()) for each in (grad, exchanged))
    return everywhere and ranks <= reached


def _cut(grad: DTensor) -> set[int]:
    """The mesh dimensions along which ranks have different shards, or parts of a sum."""
    sizes = grad.device_mesh.shape
    return {dim for dim, how in enumerate(grad.placements) if not how.is_replicate() and sizes[dim] > 1}


# One step of all steppers of a model: matrices mesh by mesh, other parameters while the first bucket is in transit.


def step_all(
    steppers: Sequence[MeshStepper],
    groups: Sequence[Mapping[str, Any]],
    rules: Rules,
    optimizers: ElementwiseGroups,
    states: States,
    row_scaling: RowScaling,
    options: ComparedOptions,
    out: Collection[str] = (),
) -> list[Presence]:
    """One step with the current gradients. ``rules`` are those of the param groups, of which ``out`` are names of
    parameters that were taken out. Called on all ranks. Returns which members of each stepper have a gradient on any
    rank that has them.

    If ``options`` are found to differ, or layers of a fully_shard unit that ranks have used, all ranks raise before any
    weight is changed.

    The host reads the flags of other ranks, and so waits for the backward pass, only where something depends on them:
    in steps that compare options, and on a rank that lacks a gradient that other ranks may have. No rank's collectives
    depend on whether it reads.
    """
    grads = [stepper.placed_gradients() for stepper in steppers]
    now = [(stepper, stepper.given(rules, states, of_members)) for stepper, of_members in zip(steppers, grads)]
    presences = _meet([stepper for stepper, _ in now], grads, groups, options, out)
    try:
        for number, ((stepper, given), presence) in enumerate(zip(now, presences)):
            given = replace(given, skipped=stepper.skipped(presence))
            with stepper.matrix_stepper.window(given) as window:
                window.advance()
                if number == 0:
                    _step_elementwise(optimizers, groups, steppers, presences, states)
                window.advance()
                stepper.matrix_stepper.step_in_place(given)
                while window.advance():
                    pass
    finally:  # most ranks have not read their flags
        for presence in presences:
            presence.finish()
    if row_scaling:
        for stepper in steppers:
            row_scaling.scale(stepper.members, stepper.pieces(states))
        row_scaling.clear()
    return presences


def _meet(
    steppers: Sequence[MeshStepper],
    grads: Sequence[Sequence[Tensor | None]],
    groups: Sequence[Mapping[str, Any]],
    options: ComparedOptions,
    out: Collection[str],
) -> list[Presence]:
    """Start to exchange the flags of every stepper, before any state advances. Raises as ``step_all``."""
    flags = options.flags(groups)
    compares = flags[0] != NONE
    lacking = [stepper.lacking(of_members, out) for stepper, of_members in zip(steppers, grads)]
    presences = [
        stepper.presence(of_members, out, options=flags, lacking=first_of(stepper.collectives, here))
        for stepper, of_members, here in zip(steppers, grads, lacking)
    ]
    if compares or not all(each.complete for each in presences):
        read_at_once(presences)
    if compares or any(map(any, lacking)):
        error = _used_apart(steppers, presences)
        if error is None and compares:
            error = _difference(steppers, presences, options.lines(groups))
        if error is not None:
            raise error
    return presences


def check_units(model: nn.Module, steppers: Sequence[MeshStepper], counted: Sequence[Counted]) -> None:
    """Let the steppers look, from now on, at what ``fully_shard`` reduces of ``model``: not what it ignores, and not
    experts, of which ranks have different ones."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found = {id(param) for module in units for param in sharded_by(module)}
    for each in counted:
        if each.different:
            found -= {id(member.param) for member in steppers[each.stepper].members if member.name in each.names}
    for stepper in steppers:
        stepper.check_units(found if stepper.mesh is not None else ())


def _used_apart(steppers: Sequence[MeshStepper], presences: Sequence[Presence]) -> Exception | None:
    """The error about a parameter of a fully_shard unit that some ranks of its mesh alone have used.

    fully_shard reduces what a rank has used of a unit, end to end. Ranks that used different parameters of equal sizes
    so add up gradients of different parameters; other sizes are an error of the transport. Equal sizes of different
    parameters mean that every rank lacks one. So every rank looks in that step, and ranks with all gradients need not
    wait for flags. All that look find this, by flags alone: it calls no collective.
    """
    found = (stepper.unlike(each) for stepper, each in zip(steppers, presences) if stepper.mesh is not None)
    said = next((sentence for sentence in found if sentence), None)
    if said is None:
        return None
    unused = "model.set_reduce_scatter_unused_params(True)"
    add = f" {unused} adds zeros." if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else ""
    return StepRefused(
        f"{NAME}: {said}. Ranks that use different layers of one unit get sums of different layers' gradients from "
        "torch. Nothing was changed: call zero_grad(), and let all ranks use the same layers, some with a factor of 0, "
        f"or shard each layer as a unit that all ranks use.{add}"
    )


def _difference(
    steppers: Sequence[MeshStepper], presences: Sequence[Presence], lines: Sequence[str]
) -> Exception | None:
    """The error about options that differ. Called on the ranks that compare, each of which goes through its meshes: if
    the options on one differ, all of its ranks are here."""
    found: Exception | None = None
    for stepper, presence in zip(steppers, presences):
        if ComparedOptions.differ(presence.largest("options")):
            error = disagreement(stepper.collectives, NAME, lines)
            found = found or error
    return found


def _step_elementwise(
    optimizers: ElementwiseGroups,
    groups: Sequence[Mapping[str, Any]],
    steppers: Sequence[MeshStepper],
    presences: Sequence[Presence],
    states: States,
) -> None:
    """One step of every element-wise param group, on this rank's shards on all meshes.

    If the state has a wider dtype than the parameter, the step is computed in the state's dtype and rounded at its end.
    """
    for number, group in enumerate(groups):
        if rule_of(group) not in ELEMENTWISE_RULES:
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


# What is printed when an optimizer is made for an FSDP2 model: the routing, and the plan of every mesh; and later.


def without_gradient(
    steppers: Sequence[MeshStepper], counted: Sequence[Counted], place: Collectives
) -> report.MissingGradients:
    """The report of missing gradients, by the numbers of a stepper and a member. ``place`` is in the largest mesh.

    The first rank of each mesh speaks for it; of copies on several meshes, and of plain tensors, the first of all.
    """
    copies = {(each.stepper, name) for each in counted if each.firsts and not each.different for name in each.names}
    names = {}
    for number, stepper in enumerate(steppers):
        for index, member in enumerate(stepper.members):
            of_all = stepper.mesh is None or (number, member.name) in copies
            if (place if of_all else stepper.collectives).rank == 0:
                names[number, index] = f"{member.name} (on rank 0)" if stepper.mesh is None else member.name
    return report.MissingGradients(names, place.rank)


def described(steppers: Sequence[MeshStepper], counted: Sequence[Counted], reduction: str) -> report.Described:
    """The plan of every mesh. ``reduction`` says in which dtype gradients are reduced."""
    for number, stepper in enumerate(steppers):
        elsewhere = [
            report.Note("copies", _elsewhere(each)) for each in counted if each.stepper == number and each.firsts
        ]
        table = [] if stepper.mesh is None else [_table(stepper, stepper.mesh)]
        plan = stepper.plan
        yield [
            report.Note("plan", _sentence(stepper)),
            *elsewhere,
            *report.on_copies(plan),
            *report.on_blocks(plan),
            *report.on_stacks(plan),
            *report.on_pieces(plan, machine_for(stepper.device)),
            *report.on_peers([plan]),
            *table,
        ]
    if reduction:
        yield [report.Note("gradients", reduction)]


def _sentence(stepper: MeshStepper) -> str:
    plan, elements = stepper.plan, len(stepper.members) - len(set(stepper.member_of_atom))
    counts = f"{len(plan.atoms)} matrices and {elements} element-wise parameters"
    if stepper.mesh is None:
        return f"Plan: {counts} are plain tensors; every rank steps its own copy."
    stay = len(plan.atoms) - sum(map(len, plan.buckets))
    return (
        f"Plan: {counts} on a {stepper.mesh}; {len(plan.atoms) - stay} matrices travel, in {len(plan.buckets)} "
        f"bucket(s); busiest rank over mean {plan.ownership.imbalance:.3f}."
    )


def _elsewhere(counted: Counted) -> str:
    """What ranks outside of a mesh have under the names of its parameters."""
    if not counted.different:
        return f"Other ranks have copies of {len(counted.names)} of these; a norm counts them once."
    return (
        f"Other ranks have different parameters (experts) under {len(counted.names)} of these names; a norm counts all "
        f"{len(counted.firsts)}. If they are copies, name them in 'copies'."
    )


def _table(stepper: MeshStepper, mesh: Mesh) -> Table:
    """One row per rank of the mesh: its matrices, their work, its state, and its traffic."""
    plan, state = stepper.plan, mesh_state_nbytes(stepper.members, stepper.groups, stepper.config)
    sent, owned = (plan.of_mesh(of_ranks) for of_ranks in (plan.wire_bytes(), plan.owned_counts()))
    columns = {
        "matrices": lambda place: str(owned[place]),
        "state": lambda place: binary_units(state(mesh.coordinates[place])),
        "sent a step": lambda place: binary_units(sent[place]),
    }
    rules = [member.rule for member in stepper.members]
    return report.rank_table(plan.of_mesh(plan.ownership.loads), rules, columns, sorted(mesh.ranks))
