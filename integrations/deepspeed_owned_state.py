"""Owned storage in DeepSpeed's checkpoints.

At stages 1 and 2 every rank writes what it owns, a group per parameter: laid end to end over the ranks, the pieces of a
group are the parameter, whatever the layout. So DeepSpeed's own tools read it: ``zero_to_fp32``, ``ds_to_universal``.
At stage 0 the first rank writes everything, whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.members import Member
from lwopt_backend.owned.whole_state import reduced
from lwopt_backend.plan.buffers.arrangement import Piece
from lwopt_backend.registry import new_state
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.bucket_buffers import BucketBuffers
from lwopt_backend.runtime.owner_state import CHECKPOINT_KEY

Groups = Sequence[Mapping[str, Any]]
OwnerStates = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by parameter and the matrix's place in it


def mark(core: OwnedCore) -> dict[str, Any]:
    """What a checkpoint says of itself: its parameters, and which pieces of them this rank owns."""
    pieces = {core.members[piece.param].name: (piece.start, piece.stop) for piece, _ in owned_pieces(core).values()}
    members = [(m.name, tuple(m.param.shape), m.rule, list(map(str, m.blocks))) for m in core.members]
    return {"members": members, "pieces": pieces}


def owned_pieces(core: OwnedCore) -> dict[int, tuple[Piece, Tensor]]:
    """By a member's number, the piece of it that this rank owns, and its values as they are stepped, flat."""
    buckets = core.manager.buckets
    return {p.param: (p, value) for bucket in buckets for p, value in zip(bucket.pieces, bucket.owned_values())}


def saved_groups(core: OwnedCore, groups: Groups) -> list[dict[str, Any]]:
    """The param groups with names in place of parameters."""
    names = {id(member.param): member.name for member in core.members}
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]


def owner_states(core: OwnedCore) -> dict[str, dict[int, dict[str, Any]]]:
    """What rules keep on this rank beside tensors of the parameter's size, by parameter and matrix."""
    found = {core.members[number].name: core.stepper.owner_states(number) for number in owned_pieces(core)}
    return {name: {place: nested.plain(s) for place, s in states.items()} for name, states in found.items() if states}


def take_owner_states(core: OwnedCore, saved: OwnerStates) -> None:
    """Take over what ``owner_states`` returned on the ranks that own these pieces."""
    for number in owned_pieces(core):
        core.stepper.take_owner_states(number, saved.get(core.members[number].name, {}))


def save_parts(core: OwnedCore, groups: Groups) -> dict[str, Any]:
    """What this rank owns, under the keys that DeepSpeed's tools read. Of several instances the first one saves."""
    mine = {} if _is_copy(core) else owned_pieces(core)
    weights, states, places = [], {}, []
    for number, member in enumerate(core.members):
        value = mine[number][1] if number in mine else torch.empty(0)
        state = core.stepper.state[number] if number in mine else empty_state(member, groups)
        weights.append(value.detach().clone())
        states[number] = _readable(state, value.numel())
        places.append({member.name: fragment_address(numel=value.numel(), start=0)} if number in mine else {})
    count = len(core.members)
    return {
        "base_optimizer_state": {"state": states, "param_groups": saved_groups(core, groups)},
        "single_partition_of_fp32_groups": weights,
        "param_slice_mappings": places,
        "group_paddings": [0] * count,
        "partition_count": [core.holdings[0].sharers.everyone.world_size] * count,
        CHECKPOINT_KEY: owner_states(core),
    }


def _is_copy(core: OwnedCore) -> bool:
    """Whether another instance owns the same as this rank, and is the one that saves."""
    replicas = core.holdings[0].sharers.replicas
    return replicas is not None and replicas.rank > 0


def empty_state(member: Member, groups: Groups) -> dict[str, Tensor]:
    """The state of a piece without elements: its keys, and which of them are numbers."""
    return new_state(torch.empty(0), groups[member.group])


def _readable(state: Mapping[str, Tensor], numel: int) -> dict[str, Tensor]:
    """With the two keys that ``ds_to_universal`` asks of every optimizer; they take no space."""
    if "exp_avg" in state:
        return dict(state)
    first = next((tensor for tensor in state.values() if tensor.ndim > 0), torch.zeros(1).expand(numel))
    return {**state, "exp_avg": first, "exp_avg_sq": torch.zeros(1).expand(first.numel())}


def save_whole(core: OwnedCore, groups: Groups) -> dict[str, Any]:
    """All weights and states by name, on the first rank. Called on all ranks."""
    kept = [empty_state(member, groups) for member in core.members]
    weights: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {member.name: {} for member in core.members}
    for bucket in core.manager.buckets:
        for number, tensor in _gather(bucket, bucket.owned_values()):
            weights[core.members[number].name] = tensor
        for key in sorted({key for slot in bucket.bucket.slots for key, t in kept[slot.param].items() if t.ndim}):
            mine = [core.stepper.state[piece.param].get(key) for piece in bucket.pieces]
            for number, tensor in _gather(bucket, mine):
                if key in kept[number]:
                    states[core.members[number].name][key] = tensor
    for key in sorted({key for state in kept for key, tensor in state.items() if not tensor.ndim}):
        for number, value in enumerate(_scalars(core, key)):
            if key in kept[number]:
                states[core.members[number].name][key] = value
    of_ranks = core.holdings[0].sharers.everyone.gather_objects_to_first(owner_states(core))
    if of_ranks is None:
        return {}
    owner: dict[str, dict[int, dict[str, Any]]] = {}
    for of_rank in of_ranks:
        for name, found in of_rank.items():
            owner.setdefault(name, {}).update(found)
    return {"weights": weights, "state": states, "param_groups": saved_groups(core, groups), CHECKPOINT_KEY: owner}


def _gather(bucket: BucketBuffers, mine: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
    """By a member's number, what the ranks have of it in one tensor, on the first rank. ``mine`` is by piece."""
    buffer = reduced(bucket, mine)
    if bucket.sharers.everyone.rank == 0:
        for slot in bucket.bucket.slots:
            yield slot.param, bucket.view(buffer, slot.param).to("cpu", copy=True)


def _scalars(core: OwnedCore, key: str) -> list[Tensor]:
    """A state that is one number, of every member; all ranks that own a piece have the same."""
    found = torch.zeros(len(core.members), device=core.manager.params[0].device)
    for number, state in core.stepper.state.items():
        if key in state:
            found[number] = state[key]
    core.holdings[0].sharers.everyone.all_reduce_max(found).wait()
    return [value.clone() for value in found.cpu()]


class Source(Protocol):
    """Where weights and states are loaded from. Tensors are flat, as long as the piece."""

    @property
    def of_first_instance(self) -> bool: ...  # it has nothing for other instances

    def weights(self, member: Member, number: int, piece: Piece) -> Tensor: ...

    def state(self, member: Member, number: int, piece: Piece, key: str) -> Tensor: ...

    def owner(self) -> OwnerStates: ...


class Parts:
    """What ``save_parts`` returned on this rank."""

    of_first_instance = True

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._weights: Sequence[Tensor] = saved["single_partition_of_fp32_groups"]
        self._state: Sequence[Mapping[str, Tensor]] = saved["base_optimizer_state"]["state"]
        self._owner: OwnerStates = saved.get(CHECKPOINT_KEY, {})

    def weights(self, member: Member, number: int, piece: Piece) -> Tensor:
        return self._weights[number]

    def state(self, member: Member, number: int, piece: Piece, key: str) -> Tensor:
        return self._state[number][key]

    def owner(self) -> OwnerStates:
        return self._owner


class Whole:
    """What ``save_whole`` returned on the first rank."""

    of_first_instance = False

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self._weights = saved["weights"]
        self._state = saved["state"]
        self._owner: OwnerStates = saved.get(CHECKPOINT_KEY, {})

    def weights(self, member: Member, number: int, piece: Piece) -> Tensor:
        return part(self._weights[member.name], piece)

    def state(self, member: Member, number: int, piece: Piece, key: str) -> Tensor:
        return part(self._state[member.name][key], piece)

    def owner(self) -> OwnerStates:
        return self._owner


def part(whole: Tensor, piece: Piece) -> Tensor:
    """The piece of a tensor that is as large as the parameter; a scalar as it is."""
    return whole.reshape(-1)[piece.start : piece.stop] if whole.ndim else whole


@torch.no_grad()
def put(core: OwnedCore, source: Source, *, weights: bool, state: bool) -> None:
    """Take what this rank owns of weights, into masters, and of states from ``source``."""
    if state:
        take_owner_states(core, source.owner())
    if source.of_first_instance and _is_copy(core):
        return
    for bucket in core.manager.buckets:
        for piece, value in zip(bucket.pieces, bucket.owned_values()):
            member = core.members[piece.param]
            if weights:
                value.copy_(source.weights(member, piece.param, piece))
            if state:
                for key, mine in core.stepper.state[piece.param].items():
                    mine.copy_(source.state(member, piece.param, piece, key))


@torch.no_grad()
def share(core: OwnedCore, *, weights: bool, state: bool) -> None:
    """Bring what the first instance has to the others. Called on all ranks."""
    for bucket in core.manager.buckets:
        if bucket.sharers.replicas is None:
            continue
        for piece, value in zip(bucket.pieces, bucket.owned_values()):
            for mine in [value] * weights + list(core.stepper.state[piece.param].values()) * state:
                bucket.sharers.replicas.broadcast(mine)


def publish(core: OwnedCore) -> None:
    """Bring the owners' weights into all ranks' parameters. Called on all ranks."""
    for number, bucket in enumerate(core.manager.buckets):
        bucket.publish_masters()
        core.manager.send_values(number)
    core.manager.receive_values()


def load(core: OwnedCore, source: Source, *, weights: bool = True, state: bool = True) -> None:
    """Take weights, into masters and parameters, and states from ``source``. Called on all ranks."""
    put(core, source, weights=weights, state=state)
    if source.of_first_instance:
        share(core, weights=weights, state=state)
    if weights:
        publish(core)
