"""The optimizer's state in DeepSpeed's checkpoints: what may be loaded, and state of stage 0, which is saved whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lwopt_backend.checkpoint.deepspeed.owners import MATRICES
from lwopt_backend.group_stepper import GroupStepper
from lwopt_backend.integrations.deepspeed_binding import Binding
from lwopt_backend.param_groups import of_another_optimizer
from lwopt_backend.replicated_state import gather_whole, take_part
from lwopt_backend.replicated_stepper import ReplicatedStepper
from lwopt_backend.runtime.owner_state import CHECKPOINT_KEY, brought_here

Groups = Sequence[Mapping[str, Any]]
Stepper = GroupStepper | ReplicatedStepper
States = Mapping[int, Mapping[str, Any]]  # by the position of their tensor in all param groups


def check_groups(saved: Groups, groups: Groups) -> None:
    """Raises ValueError if ``saved`` param groups have other rules or other members than ``groups``."""
    if of_another_optimizer(saved):
        raise ValueError(
            "the state was written by another optimizer: its param groups have no 'rule'; begin without it"
        )
    theirs, ours = ([group.get("rule", "unknown") for group in some] for some in (saved, groups))
    if theirs != ours:
        raise ValueError(f"the checkpoint's param groups follow the rules {theirs}, this optimizer's follow {ours}")
    for number, (their, our) in enumerate(zip(saved, groups)):
        if their.get("members") != our.get("members"):
            raise ValueError(
                f"param group {number} ({our['rule']}) holds other parameters than in the checkpoint; load it with "
                "the model, the 'include', 'exclude' and 'atoms' it was saved with"
            )


def check_partitions(saved: Groups, state: States, groups: Groups) -> None:
    """Raises ValueError if what was saved lies in other flat tensors than those in ``groups``."""
    for number, (their, our) in enumerate(zip(saved, groups)):
        counts = len(their["params"]), len(our["params"])
        if counts[0] != counts[1]:
            raise ValueError(
                f"param group {number}: saved in {counts[0]} flat tensors, found {counts[1]}; load with the "
                "zero_optimization.sub_group_size it was saved with"
            )
    numbered = [(number, tensor) for number, group in enumerate(groups) for tensor in group["params"]]
    for position, (number, flat) in enumerate(numbered):
        for key, value in state.get(position, {}).items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() != flat.numel():
                raise ValueError(
                    f"param group {number}: the checkpoint's {key} has {value.numel()} elements for this rank, "
                    f"which stores {flat.numel()}"
                )


def save_whole(binding: Binding, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every parameter's state at stage 0, on the first rank; nothing on the others. Called on all ranks."""
    saved: dict[int, dict[str, Any]] = {}
    first = 0
    for unit, plan in zip(binding.units, binding.plans):
        whole = gather_whole(plan, states.get(unit.params[0], {}), unit.ranks)
        saved.update((first + i, state) for i, state in enumerate(whole or []) if state)
        first += len(unit.params)
    return saved


def owner_states(steppers: Iterable[Stepper]) -> dict[str, dict[str, Any]]:
    """What owners keep of the matrices of this rank, by name."""
    return {k: v for s in steppers if s.matrices for k, v in s.matrices.owner_state.by_name().items()}


def save_matrices(binding: Binding, held: Mapping[str, dict[str, Any]] | None) -> dict[str, Any]:
    """By parameter, its matrices' names and which elements they are, in the order of their places; and what owners keep
    of them by name, if they keep anything: this rank's, which ``held`` is, or if parameters are replicated that of all
    ranks, on the first. Called on all ranks."""
    matrices = {
        spec.name: [(block.of(spec.name), str(block)) for block in blocks]
        for plan in binding.plans
        for spec, blocks in zip(plan.specs, plan.blocks)
        if blocks
    }
    if held is None:
        return {MATRICES: matrices}
    return {MATRICES: matrices, CHECKPOINT_KEY: _gather_named(binding, held) if binding.replicated else held}


def _gather_named(binding: Binding, held: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All ranks' states by name, on the first rank of every group. Called on all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for ranks in binding.ranks:
        for part in ranks.gather_objects_to_first(held) or []:
            found.update(part)
    return found


def take_owner_states(binding: Binding, steppers: Sequence[Stepper], saved: Mapping[str, dict[str, Any]]) -> None:
    """Bring what ``owner_states`` returned, on any ranks, to the owners that there are now. Called on all ranks."""
    for unit, plan, stepper in zip(binding.units, binding.plans, steppers):
        if stepper.matrices is not None and plan.matrices is not None:
            names = [plan.matrices.atoms[atom].name for atom in stepper.matrices.owned]
            stepper.matrices.owner_state.take(stepper.matrices.owned, brought_here(saved, names, unit.ranks))


def load_whole(binding: Binding, saved: States) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the states that ``save_whole`` returned on the first rank."""
    states: dict[Tensor, dict[str, Any]] = {}
    first = 0
    for unit, plan in zip(binding.units, binding.plans):
        of_unit = [saved.get(first + index, {}) for index in range(len(unit.params))]
        _check_shapes(plan.specs, of_unit)
        if of_unit[0]:
            states[unit.params[0]] = take_part(plan, of_unit, unit.ranks.rank, binding.engine.device)
        first += len(unit.params)
    return states


def _check_shapes(specs: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    for spec, state in zip(specs, states):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() != spec.numel:
                raise ValueError(
                    f"parameter {spec.name!r} has shape {spec.shape}, the checkpoint's {key} {tuple(value.shape)}"
                )
