"""Owner-held state in an optimizer's state dict: DTensors, cut by rows over the parameter's mesh.

Of several matrices in a parameter they are named by their place in it, ``"[1].GG.0"``. Which elements these are stands
beside them where the parameter's shape does not tell: of q, k and v, say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lwopt_backend.integrations.fsdp2.meshes import local
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper
from lwopt_backend.plan.blocks import matrices_of
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.owner_shards import MATRICES, Key, OwnerShards

Groups = Sequence[Sequence[Tensor]]
Of = list[tuple[MeshStepper, OwnerShards]]


def owner_shards(
    steppers: Sequence[MeshStepper], rules: Mapping[int, MatrixRule], states: Mapping[Tensor, dict[str, Any]]
) -> Of:
    """What the owners of each stepper's matrices keep. Called on all ranks of the meshes.

    In ``states`` its names stand for it, with tensors that have no memory: a flattened checkpoint is read by them.
    """
    shards = [
        (s, OwnerShards(s.plan, s.rules_of(rules), s.stepper.owner_state, s.collectives, s.device)) for s in steppers
    ]
    for state in states.values():
        for name in [name for name, tensor in state.items() if tensor.is_meta]:
            del state[name]
    for param, name, like in _entries(shards):
        states[param][name] = like
    for param, elements in _elements(shards):
        states[param][MATRICES] = nested.described(elements).to("meta")
    return shards


def with_owner_state(state_dict: dict[str, Any], shards: Of, groups: Groups) -> dict[str, Any]:
    """``state_dict`` with what the owners of ``groups``' matrices hold. Called on all ranks of the meshes."""
    state = dict(state_dict["state"])
    index_of = _indices(state_dict, groups)
    for stepper, held in shards:
        for key, (shape, part) in held.save().items():
            param = _param(stepper, key)
            index = index_of[id(param)]
            state[index] = {**state.get(index, {}), _name(stepper, key): _as_dtensor(part, shape, param)}
    for param, elements in _elements(shards):
        state[index_of[id(param)]][MATRICES] = nested.described(elements)
    return {**state_dict, "state": state}


def take_owner_state(state_dict: Mapping[str, Any], shards: Of, groups: Groups) -> dict[str, Any]:
    """``state_dict`` without what owners hold, which is brought to them. Called on all ranks of the meshes."""
    state = {index: dict(entry) for index, entry in state_dict["state"].items()}
    index_of = _indices(state_dict, groups)
    for param, _ in _elements(shards):
        state.get(index_of[id(param)], {}).pop(MATRICES, None)
    for stepper, held in shards:
        keys = [(entry.atom, entry.key) for entry in held.entries]
        places = [(key, _name(stepper, key), state.get(index_of[id(_param(stepper, key))], {})) for key in keys]
        if places and all(name in entry for _, name, entry in places):
            held.load({key: local(entry.pop(name)) for key, name, entry in places})
    return {**state_dict, "state": state}


def check_matrices(state_dict: Mapping[str, Any], shards: Of, groups: Groups) -> None:
    """Raises ValueError for owners' state of other matrices than there are here."""
    index_of = _indices(state_dict, groups)
    for param, elements in _elements(shards):
        index = index_of.get(id(param))
        saved = state_dict["state"].get(index, {}).get(MATRICES)
        found = elements if saved is None else nested.rebuild(nested.description(saved.cpu()), {})
        if found != elements:
            raise ValueError(
                f"the checkpoint's state of parameter {index!r} is of the matrices {found}, expected those that there "
                f"are here, {elements}; load it with the 'atoms' it was saved with"
            )


def _entries(shards: Of) -> Iterator[tuple[Tensor, str, Tensor]]:
    """By parameter and name, tensors without memory of the shape and dtype that owner-held state has."""
    for stepper, held in shards:
        for entry in held.entries:
            key = (entry.atom, entry.key)
            yield _param(stepper, key), _name(stepper, key), torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def with_owner_keys(states: Mapping[Tensor, Mapping[str, Any]], shards: Of) -> dict[Tensor, dict[str, Any]]:
    """What state each parameter should have in a checkpoint: its own, and of owner-held tensors their shapes."""
    expected = {param: dict(state) for param, state in states.items()}
    for param, name, like in _entries(shards):
        expected[param][name] = _as_dtensor(like, like.shape, param)
    for param, elements in _elements(shards):
        expected[param][MATRICES] = nested.described(elements)
    return expected


def _elements(shards: Of) -> Iterator[tuple[Tensor, list[str]]]:
    """By parameter with owner-held state, which elements its matrices are, where its shape does not tell."""
    for stepper, held in shards:
        for number in sorted({stepper.matrices[entry.atom] for entry in held.entries}):
            member = stepper.members[number]
            if member.blocks != matrices_of(member.sharding.shape):
                yield member.param, list(map(str, member.blocks))


def _param(stepper: MeshStepper, key: Key) -> Tensor:
    return stepper.members[stepper.matrices[key[0]]].param


def _name(stepper: MeshStepper, key: Key) -> str:
    """Unique among a parameter's: of several matrices in it, which one's."""
    atom, path = key
    several = len(stepper.members[stepper.matrices[atom]].blocks) > 1
    return f"[{stepper.places[atom]}].{path}" if several else path


def _indices(state_dict: Mapping[str, Any], groups: Groups) -> dict[int, Any]:
    """Each parameter's key in a state dict, by its place: a number, or from torch.distributed.checkpoint a name."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    return {id(param): index for param, index in zip((p for group in groups for p in group), saved)}


def _as_dtensor(part: Tensor, shape: Sequence[int], param: Tensor) -> Tensor:
    """This rank's rows as a DTensor of the whole ``shape``; of a plain parameter the rows are all there are."""
    if not isinstance(param, DTensor):
        return part
    placements = [Replicate() if p.is_replicate() or 0 in shape else Shard(0) for p in param.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
