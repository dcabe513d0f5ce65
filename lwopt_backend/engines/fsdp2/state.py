"""FSDP2's state: a rank's pieces, checks of a state dict, and owner state."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lwopt_backend.engines.fsdp2.plan import MeshMember, MeshStepper, local, placed
from lwopt_backend.groups.param_groups import check_saved_groups, of_another_optimizer
from lwopt_backend.groups.registry import rule_of
from lwopt_backend.plan import TrainedParam
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.plan.layouts import View
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.state import (
    MATRICES,
    Key,
    OwnerShards,
    StatePiece,
    check_fits,
    form_of,
    owner_key,
    part_of,
)


class MeshStore:
    """A ``StateStore`` of this rank's boxes of ``members`` and of their ``states``.

    ``different`` is whether ``ranks`` have different parameters (experts) under one name.
    """

    elsewhere: Collection[str] = ()

    def __init__(
        self,
        members: Sequence[MeshMember],
        groups: Sequence[dict[str, Any]],
        states: Mapping[Tensor, Mapping[str, Any]],
        ranks: Sequence[Collectives],
        different: bool,
    ) -> None:
        self._held = [(member.param, states[member.param]) for member in members]
        self.ranks = ranks
        self.groups = groups
        self.params: Sequence[TrainedParam] = members
        self.units: Sequence[Sequence[TrainedParam]] = [[member] for member in members]
        self.ambiguous = "ranks have different parameters (experts) under the same names" if different else None

    def pieces(self) -> list[StatePiece]:
        found = []
        for number, (param, state) in enumerate(self._held):
            tensors = {key: local(tensor) for key, tensor in state.items() if not tensor.is_meta}
            found.append(StatePiece(number, view_of(param), local(param), tensors))
        return found


# The check of a state dict before it is loaded.

WHAT = "load_state_dict"
ANEW = "load it with torch.distributed.checkpoint, which shards it anew, into the model it was saved with"


def check_loadable(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    made: Mapping[Tensor, Mapping[str, Any]],
    shards: Of,
) -> None:
    """Raises ValueError for groups with other rules or sizes, and for state with other keys, shapes or matrices; warns
    of missing state. ``made`` is what ``with_owner_keys`` returned."""
    saved, states = state_dict["param_groups"], state_dict["state"]
    if not of_another_optimizer(saved):  # a group without a rule is trained by ours
        saved = [{"rule": rule_of(group), **theirs} for group, theirs in zip(groups, saved)] + saved[len(groups) :]
    check_saved_groups(WHAT, groups, saved)
    if not states:
        return  # saved by an optimizer that had no state yet
    params = [(name, p) for group, of_group in zip(groups, names) for p, name in zip(group["params"], of_group)]
    indices = [index for group in saved for index in group["params"]]
    found = {name: (p, states[index]) for (name, p), index in zip(params, indices) if states.get(index)}
    elements = dict(_elements(shards))
    here, there = dict[str, Any](), dict[str, Any]()
    for name, (param, of_param) in found.items():
        here[name], there[name] = _facts(of_param, made[param], elements.get(param))
    check_fits(WHAT, here, there, advice=ANEW)
    missing = [name for name, _ in params if name not in found]
    if missing:
        warnings.warn(f"the checkpoint has no state of {missing}; theirs is left as it is", stacklevel=3)


def _facts(
    found: Mapping[str, Any], made: Mapping[str, Tensor], matrices: list[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of a parameter's state, here and in a state dict: shards are placed as here, or tensors are whole."""
    here: dict[str, Any] = {"matrices": matrices, "state": sorted(made)}
    there: dict[str, Any] = {"state": sorted(found)}
    if matrices is not None and MATRICES in found:
        there["matrices"] = nested.rebuilt(found[MATRICES])
    for key in made.keys() & found.keys():
        value, like = found[key], made[key]
        if isinstance(value, Tensor) or like.ndim:  # a counter may be a number
            whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            here[f"{key!r} as"] = form_of(torch.empty(like.shape, device="meta") if whole else like)
            there[f"{key!r} as"] = form_of(value)
    return here, there


def view_of(tensor: Tensor) -> View:
    """The elements of a tensor that this rank has: a box of a DTensor, all of a plain tensor."""
    begin, sizes = box_of(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tensor.shape)
    return View.of_box(tensor.shape, list(zip(begin, sizes)))


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's box of a DTensor begins, and its sizes."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    box = placed(tensor).box(tuple(coordinate))
    return tuple(begin for begin, _ in box), tuple(size for _, size in box)


def as_shard(part: Tensor, made: DTensor) -> DTensor:
    """``part`` as this rank's shard of a DTensor with the mesh, the placements and the shape of ``made``."""
    if not made.is_meta:
        part = part.to(made.device)
    return DTensor.from_local(
        part, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
    )


# Owner state in an optimizer's state dict: DTensors, cut by rows over the parameter's mesh.
#
# If a parameter has several matrices, keys begin with a matrix's place in it, ``"[1].GG.0"``. If its shape does not
# tell which elements these have (q, k and v, say), a further key does.

Groups = Sequence[Sequence[Tensor]]
Of = list[tuple[MeshStepper, OwnerShards]]


def owner_shards(
    steppers: Sequence[MeshStepper], rules: Mapping[int, MatrixRule], states: Mapping[Tensor, dict[str, Any]]
) -> Of:
    """The owner state of each stepper's matrices, in shards. Called on all ranks of the meshes.

    Adds its keys to ``states``, with meta tensors: torch reads a flattened checkpoint by the keys that are there.
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
    """``state_dict`` with the owner state of the matrices in ``groups``. Called on all ranks of the meshes."""
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


@torch.no_grad()
def take_state(
    state_dict: Mapping[str, Any],
    groups: Groups,
    states: Mapping[Tensor, Mapping[str, Any]],
    shards: Of,
    expected: Mapping[Tensor, Mapping[str, Tensor]],
) -> None:
    """Copy this rank's part of a state dict, of whole tensors or shards, into ``states``; send owner state to the
    owners.

    ``expected`` is what ``with_owner_keys`` returned. State that the state dict lacks is not changed. Called on all
    ranks.
    """
    index_of, saved = _indices(state_dict, groups), state_dict["state"]
    found = {param: saved.get(index_of[id(param)], {}) for group in groups for param in group}
    for stepper, held in shards:
        keys = [(entry.atom, entry.key) for entry in held.entries]
        places = [(key, _param(stepper, key), _name(stepper, key)) for key in keys]
        if places and all(name in found[param] for _, param, name in places):
            held.load({key: _here(found[param][name], expected[param][name]) for key, param, name in places})
    for param, entry in found.items():
        for key, into in states[param].items():
            if key in entry and not into.is_meta:  # the rest is at the owner
                local(into).copy_(_here(torch.as_tensor(entry[key]), into))


def _here(value: Tensor, made: Tensor) -> Tensor:
    """This rank's part of ``value``, which is a shard or whole, for a tensor that is sharded as ``made`` is."""
    return local(value) if isinstance(value, DTensor) else part_of(value, view_of(made))


def _entries(shards: Of) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield every tensor of owner state: its parameter, its key, and a meta tensor of its shape and dtype."""
    for stepper, held in shards:
        for entry in held.entries:
            key = (entry.atom, entry.key)
            yield _param(stepper, key), _name(stepper, key), torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def with_owner_keys(states: Mapping[Tensor, Mapping[str, Any]], shards: Of) -> dict[Tensor, dict[str, Any]]:
    """The state that each parameter has in a checkpoint: its own, and meta tensors for its owner state."""
    expected = {param: dict(state) for param, state in states.items()}
    for param, name, like in _entries(shards):
        expected[param][name] = _as_dtensor(like, like.shape, param)
    for param, elements in _elements(shards):
        expected[param][MATRICES] = nested.described(elements)
    return expected


def _elements(shards: Of) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield each parameter with owner state whose shape does not tell its matrices, and their elements."""
    for stepper, held in shards:
        for number in sorted({stepper.matrices[entry.atom] for entry in held.entries}):
            member = stepper.members[number]
            if member.blocks != matrices_of(member.sharding.shape):
                yield member.param, list(map(str, member.blocks))


def _param(stepper: MeshStepper, key: Key) -> Tensor:
    return stepper.members[stepper.matrices[key[0]]].param


def _name(stepper: MeshStepper, key: Key) -> str:
    atom, path = key
    return owner_key(path, stepper.places[atom], len(stepper.members[stepper.matrices[atom]].blocks))


def _indices(state_dict: Mapping[str, Any], groups: Groups) -> dict[int, Any]:
    """Each parameter's key in a state dict, by position: a number, or a name from torch.distributed.checkpoint."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    return {id(param): index for param, index in zip((p for group in groups for p in group), saved)}


def _as_dtensor(part: Tensor, shape: Sequence[int], param: Tensor) -> Tensor:
    """This rank's rows as a DTensor of the whole ``shape``; for a plain parameter, ``part`` itself."""
    if not isinstance(param, DTensor):
        return part
    placements = [Replicate() if p.is_replicate() or 0 in shape else Shard(0) for p in param.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
