"""Owner-held state in an optimizer's state dict: DTensors, cut by rows over the parameter's mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lwopt_backend.integrations.fsdp2.meshes import local
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper
from lwopt_backend.runtime.owner_state import OwnerState

Groups = Sequence[Sequence[Tensor]]


def with_owner_state(state_dict: dict[str, Any], steppers: Sequence[MeshStepper], groups: Groups) -> dict[str, Any]:
    """``state_dict`` with what the owners of ``groups``' matrices hold. Called on all ranks if they hold anything."""
    state = dict(state_dict["state"])
    index_of = _indices(state_dict, groups)
    for stepper, held in _holders(steppers):
        for (atom, key), (shape, part) in held.shards().items():
            param = _param(stepper, atom)
            index = index_of[id(param)]
            state[index] = {**state[index], key: _as_dtensor(part, shape, param)}
    return {**state_dict, "state": state}


def take_owner_state(state_dict: Mapping[str, Any], steppers: Sequence[MeshStepper], groups: Groups) -> dict[str, Any]:
    """``state_dict`` without what owners hold, which is brought to them. Called on all ranks if they hold anything."""
    state = {index: dict(entry) for index, entry in state_dict["state"].items()}
    index_of = _indices(state_dict, groups)
    for stepper, held in _holders(steppers):
        places = [(atom, key, state.get(index_of[id(_param(stepper, atom))], {})) for atom, key in held.shapes()]
        if places and all(key in entry for _, key, entry in places):
            held.load({(atom, key): local(entry.pop(key)) for atom, key, entry in places})
    return {**state_dict, "state": state}


def with_owner_keys(
    states: Mapping[Tensor, Mapping[str, Any]], steppers: Sequence[MeshStepper]
) -> dict[Tensor, dict[str, Any]]:
    """What state each parameter should have in a checkpoint: its own, and of owner-held tensors their shapes."""
    expected = {param: dict(state) for param, state in states.items()}
    for stepper, held in _holders(steppers):
        for (atom, key), like in held.shapes().items():
            param = _param(stepper, atom)
            expected[param][key] = _as_dtensor(like, like.shape, param)
    return expected


def _holders(steppers: Sequence[MeshStepper]) -> Iterator[tuple[MeshStepper, OwnerState]]:
    return ((s, s.stepper.owner_state) for s in steppers if s.stepper.owner_state is not None)


def _param(stepper: MeshStepper, atom: int) -> Tensor:
    return stepper.members[stepper.matrices[atom]].param


def _indices(state_dict: Mapping[str, Any], groups: Groups) -> dict[int, Any]:
    """Each parameter's key in a state dict, by its place: a number, or from torch.distributed.checkpoint a name."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    return {id(param): index for param, index in zip((p for group in groups for p in group), saved)}


def _as_dtensor(part: Tensor, shape: torch.Size, param: Tensor) -> Tensor:
    """This rank's rows as a DTensor of the whole ``shape``; of a plain parameter the rows are all there are."""
    if not isinstance(param, DTensor):
        return part
    placements = [Replicate() if p.is_replicate() else Shard(0) for p in param.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)
