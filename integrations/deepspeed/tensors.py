"""Owned storage for DeepSpeed's tools: ``safe_get_full_fp32_param`` and related functions, and files of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER
from lwopt_backend.engines.buffers.state import gathered, state_pieces
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups import Groups
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.groups.registry import new_state
from lwopt_backend.integrations.deepspeed.zero import StateKeys
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.buffers import BucketBuffers
from lwopt_backend.runtime.state import CHECKPOINT_KEY

METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")
MARK = "_hp_mapping"  # DeepSpeed calls these methods on a parameter that has this attribute


class OwnedTensors:
    """Whole weights, gradients and states of ``core``, by parameter.

    ``deepspeed.utils.safe_get_full_fp32_param`` and related functions call methods that DeepSpeed's optimizers set on
    the parameter. The methods here take the same arguments and are also called on all ranks. A missing key or gradient
    raises there.
    """

    def __init__(self, core: BufferCore, grouping: Grouping) -> None:
        self._core = core
        self._numbers = {id(member.param): number for number, member in enumerate(core.members)}
        self._ranges = {piece.member: slice(piece.start, piece.stop) for piece in state_pieces(core)}
        self._keys = StateKeys(grouping)

    def attach(self) -> None:
        """Set the methods on the parameters."""

        def get_full_hp_param(param: Tensor, optim_state_key: str | None = None) -> Tensor:
            return self._whole(param, self._value(param, optim_state_key))

        def set_full_hp_param(param: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
            self._put(param, self._value(param, optim_state_key), value)
            if optim_state_key is None:
                param.data.copy_(value)

        def get_full_hp_grad(param: Tensor) -> Tensor:
            return self._whole(param, self._grad(param))

        def set_full_hp_grad(param: Tensor, value: Tensor) -> None:
            self._put(param, self._grad(param), value)
            self._core.manager.assigned(self._numbers[id(param)])

        for member in self._core.members:
            setattr(member.param, MARK, None)
            for method in (get_full_hp_param, set_full_hp_param, get_full_hp_grad, set_full_hp_grad):
                setattr(member.param, method.__name__, MethodType(method, member.param))

    def detach(self) -> None:
        """Remove the methods from the parameters."""
        for member in self._core.members:
            for name in (MARK, *METHODS):
                delattr(member.param, name)

    def _value(self, param: Tensor, key: str | None) -> Tensor | None:
        """This rank's piece of the weights, or of a state; None if it owns nothing of the parameter."""
        number = self._numbers[id(param)]
        if key is not None:
            self._keys.check(param, key)
            return self._core.stepper.state.get(number, {}).get(key)
        return self._mine(number, BucketBuffers.owned_values)

    def _grad(self, param: Tensor) -> Tensor | None:
        number, manager = self._numbers[id(param)], self._core.manager
        if not manager.all_left:
            raise RuntimeError(
                f"parameter {self._core.members[number].name!r}: expected a gradient at its owner, found none; ask "
                "between the backward pass that completes a step and the step"
            )
        list(manager.settled())
        return self._mine(number, BucketBuffers.owned_grads)

    def _mine(self, number: int, tensors: Callable[[BucketBuffers], Sequence[Tensor]]) -> Tensor | None:
        """The parameter's tensor in ``tensors``, which are by piece of its bucket; None if this rank owns none."""
        bucket = self._core.manager.buckets[self._core.manager.bucket_of[number]]
        return next((tensor for piece, tensor in zip(bucket.pieces, tensors(bucket)) if piece.param == number), None)

    def _whole(self, param: Tensor, mine: Tensor | None) -> Tensor:
        rank_groups = self._core.planned_sets[0].rank_groups
        dtype = torch.float32 if param.dtype.itemsize < 4 else param.dtype
        whole = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        if mine is not None and (rank_groups.replicas is None or rank_groups.replicas.rank == 0):
            whole[self._ranges[self._numbers[id(param)]]] = mine
        rank_groups.everyone.start_all_reduce(whole).wait()
        return whole.view(param.shape)

    def _put(self, param: Tensor, mine: Tensor | None, value: Tensor) -> None:
        if mine is not None:
            mine.copy_(value.reshape(-1)[self._ranges[self._numbers[id(param)]]])


# Owned storage in DeepSpeed's checkpoints. At stages 1 and 2, every rank writes its pieces, one group per parameter:
# concatenated over the ranks, the pieces of a group are the parameter, in any layout. DeepSpeed's ``zero_to_fp32`` can
# therefore read them. At stage 0, the first rank writes everything, whole.


def mark(core: BufferCore) -> dict[str, Any]:
    """A checkpoint's description of itself: its parameters, and the pieces of them that this rank owns."""
    pieces = {core.members[piece.member].name: (piece.start, piece.stop) for piece in state_pieces(core)}
    members = [(m.name, tuple(m.param.shape), m.rule, list(map(str, m.blocks))) for m in core.members]
    return {"members": members, "pieces": pieces}


def saved_groups(core: BufferCore, groups: Groups) -> list[dict[str, Any]]:
    """The param groups, with names in place of parameters."""
    names = {id(member.param): member.name for member in core.members}
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in groups]


def _owner_states(core: BufferCore) -> dict[str, dict[int, dict[str, Any]]]:
    """The owner state on this rank, by parameter and matrix."""
    found = {core.members[piece.member].name: piece.owner for piece in state_pieces(core)}
    return {name: {place: nested.plain(s) for place, s in states.items()} for name, states in found.items() if states}


def save_parts(core: BufferCore, groups: Groups) -> dict[str, Any]:
    """This rank's pieces, under the keys that DeepSpeed's tools read. Only the first instance saves any."""
    pieces = {} if _is_copy(core) else {piece.member: piece for piece in state_pieces(core)}
    weights, states, places = [], {}, []
    for number, member in enumerate(core.members):
        value = pieces[number].value if number in pieces else torch.empty(0)
        assert value is not None
        # An empty piece also has a state: it shows the keys, and which of them are scalars.
        held = pieces[number].tensors if number in pieces else new_state(torch.empty(0), groups[member.group])
        weights.append(value.detach().clone())
        states[number] = {key: tensor for key, tensor in held.items() if key != MASTER}
        places.append({member.name: fragment_address(numel=value.numel(), start=0)} if number in pieces else {})
    count = len(core.members)
    return {
        "base_optimizer_state": {"state": states, "param_groups": saved_groups(core, groups)},
        "single_partition_of_fp32_groups": weights,
        "param_slice_mappings": places,
        "group_paddings": [0] * count,
        "partition_count": [core.everyone.world_size] * count,
        CHECKPOINT_KEY: _owner_states(core),
    }


def _is_copy(core: BufferCore) -> bool:
    """Whether another instance saves the pieces that this rank owns."""
    replicas = core.planned_sets[0].rank_groups.replicas
    return replicas is not None and replicas.rank > 0


def save_whole(core: BufferCore, groups: Groups) -> dict[str, Any]:
    """All weights and states by name, on the first rank. Called on all ranks."""
    everyone = core.everyone
    states: dict[str, dict[str, Tensor]] = {member.name: {} for member in core.members}
    for number, key, whole in gathered(core, groups):
        if everyone.rank == 0:
            states[core.members[number].name][key] = whole.to("cpu")
    of_ranks = everyone.gather_objects_to_first(_owner_states(core))
    if of_ranks is None:
        return {}
    owner: dict[str, dict[int, dict[str, Any]]] = {}
    for of_rank in of_ranks:
        for name, found in of_rank.items():
            owner.setdefault(name, {}).update(found)
    weights = {m.name: states[m.name].pop(MASTER, m.param).detach().to("cpu", copy=True) for m in core.members}
    return {"weights": weights, "state": states, "param_groups": saved_groups(core, groups), CHECKPOINT_KEY: owner}


@torch.no_grad()
def take_parts(core: BufferCore, saved: Mapping[str, Any], *, weights: bool, state: bool) -> None:
    """Load this rank's ``save_parts``: weights into masters, and state. Called on all ranks.

    Only the first instance saves, so it broadcasts its loaded state to the others.
    """
    replicas, states = core.planned_sets[0].rank_groups.replicas, saved["base_optimizer_state"]["state"]

    def take(into: Tensor, part: Tensor) -> None:
        if not _is_copy(core):
            into.copy_(part)
        if replicas is not None:
            replicas.broadcast(into)

    for piece in state_pieces(core):
        number = piece.member
        assert piece.value is not None
        if weights:
            take(piece.value, saved["single_partition_of_fp32_groups"][number])
        for key in [key for key in piece.tensors if key != MASTER] if state else ():
            with piece.changing(key) as into:
                take(into, states[number][key])
