"""The state that a rank owns, piece by piece, and a ``state_dict`` of it.

It is this rank's own part and fits nowhere else. ``owned_files`` writes what any ranks can load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import linked_rates
from lwopt_backend.config.param_groups import of_another_optimizer
from lwopt_backend.config.registry import new_state
from lwopt_backend.plan.layouts import View
from lwopt_backend.runtime.agreement import agree, check_in_all, digest
from lwopt_backend.runtime.buckets import BucketBuffers
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.state import OwnerStates, StatePiece, TrainedParam, checked, fill
from lwopt_backend.storage.owned import OwnedCore

MASTER = "master"  # the key of fp32 masters, beside those of the rule's state
PLAN = "plan"  # the key of the plan's fingerprint, in a state_dict of a rank's own part
OWNER = "owner"  # the key of what a rule keeps beside tensors of the parameter's size, in a state_dict
DECIDED = frozenset({"params", "rule", "from_group"})  # keys of a param group that no checkpoint changes
Groups = Sequence[dict[str, Any]]


def state_pieces(core: OwnedCore) -> list[StatePiece]:
    """What this rank owns: ranges of flattened parameters. Masters of 16-bit ones are among ``tensors``, too."""
    found = []
    for bucket in core.manager.buckets:
        for piece, value in zip(bucket.pieces, bucket.owned_values()):
            masters = {} if bucket.masters is None else {MASTER: value}
            tensors = {**core.stepper.state[piece.param], **masters}
            view, owner = View.of_range(piece.start, piece.stop), core.stepper.owner_states(piece.param)
            found.append(StatePiece(piece.param, view, value, tensors, owner))
    return found


def matrices_of(core: OwnedCore, member: int) -> list[str]:
    """Which matrices are in a parameter, for comparison; state beside tensors of its size is by matrix."""
    return [str(block) for block in core.members[member].blocks]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's hyperparameters, and whatever else somebody has put there."""
    return {key: value for key, value in group.items() if key not in DECIDED}


def check_between_steps(core: OwnedCore) -> None:
    """Raises RuntimeError if a part of the state is a step ahead of the rest."""
    if core.stepper.updated:
        raise RuntimeError(
            "step_in_backward has stepped some buckets already; save or load optimizer state after step()"
        )


def own_state(core: OwnedCore, groups: Groups) -> dict[str, Any]:
    """This rank's own state by parameter name, in flat tensors that are not copied; param groups name parameters."""
    check_between_steps(core)
    state = {
        core.members[piece.member].name: {**piece.tensors, **({OWNER: piece.owner} if piece.owner else {})}
        for piece in state_pieces(core)
    }
    return {"state": state, "param_groups": _named_groups(core, groups), PLAN: _fingerprint(core)}


def take_own_state(core: OwnedCore, groups: Groups, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Take what ``own_state`` returned on this rank under the same plan; the param groups to go on with.

    Called on all ranks. Raises ValueError, on all of them and before anything is changed, for anything else.
    """
    check_in_all([core.holdings[0].sharers.everyone], "load_state_dict", lambda: _check(core, groups, state_dict))
    for piece in state_pieces(core):
        found = state_dict["state"][core.members[piece.member].name]
        for key, tensor in piece.tensors.items():
            tensor.copy_(found[key])
        core.stepper.take_owner_states(piece.member, found.get(OWNER, {}))
    return [{**group, **options_of(saved)} for group, saved in zip(groups, state_dict["param_groups"])]


def _named_groups(core: OwnedCore, groups: Groups) -> list[dict[str, Any]]:
    members: list[list[str]] = [[] for _ in groups]
    for member in core.members:
        members[member.group].append(member.name)
    return [{**group, "params": names} for group, names in zip(groups, members)]


def _fingerprint(core: OwnedCore) -> str:
    """Equal for equal parameters, rules and plans on the same rank of an instance."""
    lines = []
    for held in core.holdings:
        members = [core.members[number] for number in held.numbers]
        lines += [f"{m.name} {tuple(m.param.shape)} {m.dtype} {m.rule}" for m in members]
        lines += [*held.plan.lines(), f"rank {held.sharers.instance.rank}"]
    return digest(lines)


def _check(core: OwnedCore, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    check_between_steps(core)
    if of_another_optimizer(state_dict.get("param_groups")):
        raise ValueError(
            "this state_dict was written by another optimizer: its param groups have no 'rule'; load the model's "
            "weights alone and begin with new state, or take that of another Muon along with lwopt_backend.migration"
        )
    missing = [key for key in ("state", "param_groups", PLAN) if key not in state_dict]
    if missing or state_dict[PLAN] != _fingerprint(core):
        what = f"has no {missing[0]!r}" if missing else "was made by another rank, or under another plan"
        raise ValueError(
            f"this state_dict {what}; it holds one rank's own part and can only be loaded there, by as many ranks with "
            "the same layout, group size and bucket size. To change any of these, save with "
            "optimizer.save_state_dict(folder) and load with optimizer.load_state_dict_from(folder)"
        )
    ours, theirs = (
        [group["params"] for group in some] for some in (_named_groups(core, groups), state_dict["param_groups"])
    )
    if ours != theirs:
        raise ValueError(f"the state_dict's param groups hold {theirs}, this optimizer's hold {ours}")
    for piece in state_pieces(core):
        name = core.members[piece.member].name
        found = state_dict["state"].get(name, {})
        for key, tensor in piece.tensors.items():
            check_tensor(f"the state_dict's {key!r} of {name!r}", found.get(key), tensor.shape, tensor.dtype)


def check_tensor(what: str, found: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError unless ``found`` is a tensor of this shape and dtype."""
    if not isinstance(found, Tensor):
        raise ValueError(f"{what}: expected a tensor, found {found!r}")
    if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        expected, is_there = (f"{tuple(s)} of {d}" for s, d in ((shape, dtype), (found.shape, found.dtype)))
        raise ValueError(f"{what}: expected shape {expected}, found {is_there}")


class OwnedStore:
    """What this rank owns of ``core``, under the names of ``names_of``: a ``StateStore``. Made on all ranks."""

    ambiguous: str | None = None

    def __init__(self, core: OwnedCore, groups: Groups, names: Names | None = None) -> None:
        names = names_of(core, groups) if names is None else names
        self._core = core
        self.ranks: Sequence[Collectives] = [core.holdings[0].sharers.everyone]
        self.groups = groups
        self.params: Sequence[TrainedParam] = [
            TrainedParam(names.keys[number], tuple(m.param.shape), m.group, m.rule, m.blocks, number)
            for number, m in enumerate(core.members)
        ]
        self.elsewhere: Collection[str] = names.params.keys()

    def pieces(self) -> list[StatePiece]:
        check_between_steps(self._core)
        return state_pieces(self._core)

    def take_owner_states(self, states: OwnerStates) -> None:
        """Take what is kept of the matrices that this rank owns; those without any begin anew."""
        for piece in state_pieces(self._core):
            self._core.stepper.take_owner_states(piece.member, states.get(self.params[piece.member].name, {}))

    def publish(self) -> None:
        """Bring the owners' weights into all ranks' parameters. Called on all ranks."""
        for number, bucket in enumerate(self._core.manager.buckets):
            bucket.publish_masters()
            self._core.manager.send_values(number)
        self._core.manager.receive_values()


# What a checkpoint calls the parameters and param groups of all ranks, whoever owns and shares them.


@dataclass(frozen=True)
class KnownParam:
    """One parameter. ``group`` is the key of its param group."""

    shape: tuple[int, ...]
    dtype: str
    rule: str
    group: str


@dataclass(frozen=True)
class Names:
    """``keys`` of this rank's members by number; ``params`` are those of all ranks."""

    keys: Mapping[int, str]
    params: Mapping[str, KnownParam]


def names_of(core: OwnedCore, groups: Groups) -> Names:
    """A parameter's key is its name. Where several sets of ranks have other experts under one name, it says whose.

    Sets are numbered by their lowest rank. Called on all ranks.
    """
    everyone = core.holdings[0].sharers.everyone
    places, mine = {}, []
    for share, held in enumerate(core.holdings):
        number = 0
        if share:
            lowest = min(held.sharers.everyone.gather_objects(everyone.rank))
            number = sorted(set(everyone.gather_objects(lowest))).index(lowest)
        for member in held.numbers:
            found = core.members[member]
            places[member] = (share, number, found.name)
            group = group_key(groups[found.group])
            if held.sharers.everyone.rank == 0:
                param = KnownParam(tuple(found.param.shape), found.dtype, found.rule, group)
                mine.append((places[member], param))
    entries = [entry for of_rank in everyone.gather_objects(mine) for entry in of_rank]
    count: dict[str, int] = {}
    for (_, _, name), _ in entries:
        count[name] = count.get(name, 0) + 1

    def key(place: tuple[int, int, str]) -> str:
        _, number, name = place
        return name if count[name] == 1 else f"{name} of expert set {number}"

    return Names({m: key(place) for m, place in places.items()}, {key(place): param for place, param in entries})


def group_key(group: Mapping[str, Any]) -> str:
    """The same on all ranks for the same half of the user's group, and different for others."""
    return f"{group['from_group']}.{group['rule']}"


# torch.optim.AdamW's state dict, in whole tensors on all ranks, where AdamW trains everything.

WHAT = "load_state_dict"


def reduced(bucket: BucketBuffers, mine: Sequence[Tensor | None]) -> Tensor:
    """A buffer of what ranks own of a bucket, each giving it by piece. Called on all ranks that share the bucket."""
    buffer = torch.zeros(bucket.bucket.numel, dtype=bucket.owned_dtype, device=bucket.values.device)
    if bucket.sharers.replicas is None or bucket.sharers.replicas.rank == 0:
        for piece, tensor in zip(bucket.pieces, mine):
            if tensor is not None:
                buffer.narrow(0, piece.offset, piece.numel).copy_(tensor)
    bucket.sharers.everyone.start_all_reduce(buffer).wait()
    return buffer


def held_state(core: OwnedCore, groups: Groups) -> dict[Tensor, dict[str, Tensor]]:
    """By parameter what this rank owns of its state; where it owns none, tensors without memory.

    All keys are there on all ranks: torch.distributed.checkpoint steps an optimizer that has no state to make it some,
    and reads a flattened state dict by the keys that it has.
    """
    mine = {piece.member: piece.tensors for piece in state_pieces(core)}
    kept = [of_member for bucket in core.manager.buckets for of_member in _kept(core, bucket, groups).items()]
    return {
        core.members[number].param: mine.get(number) or {key: like.to("meta") for key, like in of_member.items()}
        for number, of_member in kept
    }


def _kept(core: OwnedCore, bucket: BucketBuffers, groups: Groups) -> dict[int, dict[str, Tensor]]:
    """By member, the keys of its state, with tensors without elements where they are no counters."""
    empty = torch.empty(0, dtype=bucket.owned_dtype, device=bucket.values.device)
    masters = {} if bucket.masters is None else {MASTER: empty}
    numbers = [slot.param for slot in bucket.bucket.slots]
    return {number: {**new_state(empty, groups[core.members[number].group]), **masters} for number in numbers}


def gathered(core: OwnedCore, groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """By a member's number and key its state, whole, masters included; each for the caller. Called on all ranks."""
    own = {piece.member: piece.tensors for piece in state_pieces(core)}
    for bucket in core.manager.buckets:
        kept = _kept(core, bucket, groups)
        for key, like in {key: like for of_member in kept.values() for key, like in of_member.items()}.items():
            mine = [own[piece.param].get(key) for piece in bucket.pieces]
            whole = reduced(bucket, mine) if like.ndim else _counts(bucket, mine)
            for place, number in enumerate(kept):
                if key in kept[number]:
                    found = bucket.view(whole, number).clone() if like.ndim else whole[place].to(like.device, copy=True)
                    yield number, key, found


def whole_state(core: OwnedCore, groups: Groups) -> dict[str, Any]:
    """As torch.optim.AdamW's; with fp32 masters beside its keys where parameters have 16 bits. Called on all ranks."""
    check_between_steps(core)
    indices = {id(param): index for index, param in enumerate(p for group in groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {index: {} for index in indices.values()}
    for number, key, whole in gathered(core, groups):
        state[indices[id(core.members[number].param)]][key] = whole
    return {"state": state, "param_groups": [_numbered(group, indices) for group in groups]}


def _numbered(group: Mapping[str, Any], indices: Mapping[int, int]) -> dict[str, Any]:
    return {**group, "params": [indices[id(param)] for param in group["params"]]}


def _counts(bucket: BucketBuffers, mine: Sequence[Tensor | None]) -> Tensor:
    """What was counted of each of a bucket's parameters; all ranks that own a piece of one have the same."""
    counts = torch.zeros(len(bucket.bucket.slots), device=bucket.values.device)
    places = {slot.param: place for place, slot in enumerate(bucket.bucket.slots)}
    for piece, count in zip(bucket.pieces, mine):
        if count is not None:
            counts[places[piece.param]] = count
    bucket.sharers.everyone.all_reduce_max(counts).wait()
    return counts


def take_whole_state(core: OwnedCore, groups: Groups, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Take what this rank owns of ``whole_state``, or of torch.optim.AdamW's; the param groups to go on with.

    Parameters are told by their place in the param groups. One without state begins anew. Called on all ranks, whatever
    ranks have saved it. Raises ValueError, on all of them and before anything is changed, for what does not fit.
    """
    taken = agree(core.holdings[0].sharers.everyone, WHAT, lambda: (_checked(core, groups, state_dict), []))
    for piece in state_pieces(core):
        for key, tensor in piece.tensors.items():
            value = taken[piece.member].get(key)
            if value is not None:
                fill(tensor, value, piece.view)
            elif key != MASTER:  # which follows the weights
                tensor.zero_()
    return [{**group, **options_of(saved)} for group, saved in zip(groups, state_dict["param_groups"])]


def _checked(core: OwnedCore, groups: Groups, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Tensor]]:
    """By member its state, whole."""
    check_between_steps(core)
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(f"{WHAT}: expected a state dict with 'state' and 'param_groups'; found {list(state_dict)}")
    saved = state_dict["param_groups"]
    ours, theirs = ([len(group["params"]) for group in some] for some in (groups, saved))
    if ours != theirs:
        raise ValueError(f"{WHAT}: its param groups hold {theirs} parameters, this optimizer's hold {ours}")
    for number, group in enumerate(saved):
        linked_rates.check(group, f"{WHAT}: param group {number}")
    indices = {
        id(param): index
        for group, of_group in zip(groups, saved)
        for param, index in zip(group["params"], of_group["params"])
    }
    kept = [of_member for bucket in core.manager.buckets for of_member in _kept(core, bucket, groups).items()]
    return {n: _of_member(core, n, state_dict["state"].get(indices[id(core.members[n].param)], {}), k) for n, k in kept}


def _of_member(core: OwnedCore, number: int, found: Mapping[str, Any], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    name, shape = core.members[number].name, tuple(core.members[number].param.shape)
    where = f"{WHAT}: state of parameter {name!r}"
    values = {key: value for key, value in found.items() if value is not None and not isinstance(value, Mapping)}
    if not values:
        return {}
    both = values.keys() & kept.keys()
    like = {key: tensor for key, tensor in kept.items() if key != MASTER or key in both}
    taken = checked(where, {key: v for key, v in values.items() if key != MASTER or key in both}, like, shape)
    for key, value in taken.items():
        if hasattr(value, "full_tensor"):
            raise ValueError(f"{where}, {key!r}: expected a whole tensor, found a DTensor; save a full state dict")
    return taken


# ``state_dict`` and ``load_state_dict``: of which form they are, and the hooks around them.


def state_dict_of(optimizer: torch.optim.Optimizer, core: OwnedCore) -> dict[str, Any]:
    """This rank's own part; where AdamW trains everything, torch.optim.AdamW's. Called on all ranks."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    read = whole_state if linked_rates.is_alone(optimizer.param_groups) else own_state
    state_dict = read(core, optimizer.param_groups)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


def load_state_dict_into(
    optimizer: torch.optim.Optimizer,
    core: OwnedCore,
    state_dict: Mapping[str, Any],
    link: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Take what ``state_dict_of`` returned; ``link`` takes the param groups. Called on all ranks.

    Raises ValueError, on all of them and before anything is changed, for anything else.
    """
    state_dict = dict(state_dict)  # torch's hooks may change the one they are given
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    alone = linked_rates.is_alone(optimizer.param_groups)
    take = take_whole_state if alone and PLAN not in state_dict else take_own_state
    link(take(core, optimizer.param_groups, state_dict))
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
