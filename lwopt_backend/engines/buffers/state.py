"""The state that a rank owns, piece by piece: its store, its names in checkpoints, and a ``state_dict`` of it.

The ``state_dict`` has this rank's pieces and fits no other rank. Any ranks can load the folders of ``buffers.files``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER
from lwopt_backend.engines.buffers.partial import PartialTensor
from lwopt_backend.engines.buffers.saves import Save
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups import Groups
from lwopt_backend.groups.registry import new_state
from lwopt_backend.plan import TrainedParam
from lwopt_backend.plan.atoms import matrices_of as matrices_by_shape
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.state import MATRICES, OwnerStates, StatePiece, StateStore, WithQuantized


def state_pieces(core: BufferCore) -> list[StatePiece]:
    """This rank's pieces: ranges of flattened parameters. ``tensors`` has masters of 16-bit parameters."""
    return [piece for bucket in core.manager.buckets for piece in core.stepper.pieces(bucket)]


class BufferStore(StateStore):
    """This rank's pieces, under the names of ``names_of``. Made on all ranks."""

    def __init__(self, core: BufferCore, groups: Sequence[dict[str, Any]]) -> None:
        self._core, names = core, names_of(core, groups)
        units = [[replace(member, name=names.keys[number])] for number, member in enumerate(core.members)]
        super().__init__([core.everyone], groups, units, names.params.keys())

    def pieces(self) -> list[StatePiece]:
        return state_pieces(self._core)

    def take_owner_states(self, states: OwnerStates) -> None:
        for piece in self.pieces():
            self._core.stepper.take_owner_states(piece.member, states.get(self.params[piece.member].name, {}))

    def forget_owner_states(self, names: Collection[str]) -> None:
        for piece in self.pieces():
            if self.params[piece.member].name in names:
                self._core.stepper.take_owner_states(piece.member, {})

    def publish(self) -> None:
        for number, bucket in enumerate(self._core.manager.buckets):
            bucket.publish_masters()
            self._core.manager.send_values(number)
        self._core.manager.receive_values()


# Names of all ranks' parameters and param groups in a checkpoint; they do not depend on owners.


@dataclass(frozen=True)
class Names:
    """``keys`` of this rank's members, by number; all ranks' ``params`` and the keys of their ``groups``, by key."""

    keys: Mapping[int, str]
    params: Mapping[str, TrainedParam]
    groups: Mapping[str, str]


def names_of(core: BufferCore, groups: Groups) -> Names:
    """A parameter's key is its name; with the number of its set if that name means other experts on other ranks.

    Sets are numbered by their lowest rank. Called on all ranks.
    """
    everyone = core.everyone
    places, first_here = {}, []  # of sets of which this rank is the first
    for index, planned in enumerate(core.planned_sets):
        number = 0
        if index:
            lowest = min(planned.rank_groups.everyone.gather_objects(everyone.rank))
            number = sorted(set(everyone.gather_objects(lowest))).index(lowest)
        for member in planned.numbers:
            found = core.members[member]
            places[member] = (index, number, found.name)
            if planned.rank_groups.everyone.rank == 0:
                param = TrainedParam(found.name, found.shape, found.dtype, found.rule)
                first_here.append((places[member], param, core.group_keys[found.group]))
    entries = [entry for of_rank in everyone.gather_objects(first_here) for entry in of_rank]
    count: dict[str, int] = {}
    for (_, _, name), *_ in entries:
        count[name] = count.get(name, 0) + 1

    def key(place: tuple[int, int, str]) -> str:
        _, number, name = place
        return name if count[name] == 1 else f"{name} of expert set {number}"

    return Names(
        {m: key(place) for m, place in places.items()},
        {key(place): param for place, param, _ in entries},
        {key(place): group for place, _, group in entries},
    )


# ``state_dict`` as in torch's optimizers, with this rank's pieces in place of whole tensors.

EXPERTS = (
    "expected a parameter that all ranks share, found {!r} in expert_params, which means other parameters on other "
    "ranks; save with optimizer.save_state_dict(folder)"
)


def held_state(core: BufferCore, groups: Groups) -> dict[Tensor, Mapping[str, Tensor]]:
    """By parameter, this rank's piece of its state, as ``optimizer.state`` shows it; empty tensors if this rank owns
    none of it.

    All ranks have all keys: torch.distributed.checkpoint steps an optimizer without state to create some, and reads
    only the existing keys of a flattened state dict.
    """
    pieces, found = {piece.member: piece.tensors for piece in state_pieces(core)}, dict[Tensor, Mapping[str, Tensor]]()
    for number, member in enumerate(core.members):
        tensors = pieces.get(number)
        if tensors is None:  # a counter too: its number is not known here
            tensors = {key: form.new_empty(0) for key, form in state_forms(core, number, groups).items()}
        found[member.param] = tensors.shown() if isinstance(tensors, WithQuantized) else tensors
    return found


def state_forms(core: BufferCore, number: int, groups: Groups) -> dict[str, Tensor]:
    """The keys of a member's state, with empty tensors for all but counters, in their dtypes."""
    bucket = core.manager.buckets[core.manager.bucket_of[number]]
    empty = torch.empty(0, dtype=bucket.owned_dtype, device=bucket.values.device)
    masters = {} if bucket.masters is None else {MASTER: empty}
    return {**new_state(empty, groups[core.members[number].group]), **masters}


def state_of(core: BufferCore, groups: Groups) -> dict[str, Any]:
    """The state by the parameters' numbers in the param groups, in the form of torch's optimizers.

    It has this rank's pieces, not copied; none of a parameter that was taken out of its group.
    """
    indices = {id(param): index for index, param in enumerate(p for group in groups for p in group["params"])}
    found = {id(core.members[number].param): of_member for number, of_member in sorted(by_member(core, groups).items())}
    return {
        "state": {indices[param]: found[param] for param in found if param in indices},
        "param_groups": [{**group, "params": [indices[id(p)] for p in group["params"]]} for group in groups],
    }


def by_member(core: BufferCore, groups: Groups) -> dict[int, dict[str, PartialTensor]]:
    """By member, this rank's pieces of its state, with fp32 masters and owner state."""
    pieces, found = {piece.member: piece for piece in state_pieces(core)}, dict[int, dict[str, PartialTensor]]()
    this_rank, save = (core.everyone.rank, core.everyone.world_size), Save(core.saves)
    for planned in core.planned_sets:
        alone = planned.rank_groups.everyone.world_size < core.everyone.world_size
        for number in planned.numbers:
            member, piece, of_member = core.members[number], pieces.get(number), dict[str, PartialTensor]()
            refused = EXPERTS.format(member.name) if alone else ""
            for key, like in state_forms(core, number, groups).items():
                shape = tuple(member.param.shape) if like.ndim else ()
                boxes = piece.boxes(piece.tensors[key], shape) if piece else {}
                of_member[key] = PartialTensor(shape, like.dtype, boxes, refused, of=this_rank, save=save)
            owner = core.stepper.owner_tensors(number, groups) if piece else {}
            if owner and member.blocks != matrices_by_shape(member.shape):
                owner[MATRICES] = nested.described(member.matrices)
            for key, tensor in owner.items():
                boxes = {(0,) * tensor.ndim: tensor}
                of_member[key] = PartialTensor(tensor.shape, tensor.dtype, boxes, refused, of=this_rank, save=save)
            found[number] = of_member
    return found


def gathered(core: BufferCore, groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """Yield a member's number, a key and the whole state, copied; masters included. Called on all ranks."""
    own = {piece.member: piece.tensors for piece in state_pieces(core)}
    for bucket in core.manager.buckets:
        replicas = bucket.rank_groups.replicas
        kept = {slot.param: state_forms(core, slot.param, groups) for slot in bucket.bucket.slots}
        for key in dict.fromkeys(key for of_member in kept.values() for key in of_member):
            whole = torch.zeros(bucket.bucket.numel, dtype=bucket.owned_dtype, device=bucket.values.device)
            for piece in bucket.pieces if replicas is None or replicas.rank == 0 else ():
                if key in own[piece.param]:  # a counter is spread over the elements, which several ranks may own
                    whole.narrow(0, piece.offset, piece.numel).copy_(own[piece.param][key])
            bucket.rank_groups.everyone.start_all_reduce(whole).wait()
            for number in (number for number in kept if key in kept[number]):
                found = bucket.view(whole, number)
                if kept[number][key].ndim:
                    yield number, key, found.clone()
                else:  # the counter, of the first element, without dimensions; 0 if the parameter has no elements
                    yield number, key, found.reshape(-1)[:1].sum()
