"""The state that a rank owns, piece by piece, and a ``state_dict`` of it.

It is this rank's own part and fits nowhere else. ``state_saving`` writes what any ranks can load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.param_groups import of_another_optimizer
from lwopt_backend.runtime.agreement import check_in_all, digest

MASTER = "master"  # the key of fp32 masters, beside those of the rule's state
PLAN = "plan"  # the key of the plan's fingerprint, in a state_dict of a rank's own part
OWNER = "owner"  # the key of what a rule keeps beside tensors of the parameter's size, in a state_dict
DECIDED = frozenset({"params", "rule", "from_group"})  # keys of a param group that no checkpoint changes
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements [start, stop) of a flattened parameter on the rank that owns them.

    ``tensors`` are those that are stepped, by key: each of as many elements, or a counter without dimensions.
    ``owner`` is what the rule keeps beside them, by a matrix's place in the parameter.
    """

    member: int
    start: int
    stop: int
    tensors: dict[str, Tensor]
    owner: dict[int, dict[str, Any]]


def state_pieces(core: OwnedCore, *, first_instance: bool = False) -> list[StatePiece]:
    """What this rank owns; with ``first_instance`` only what is not the same as on a rank of an earlier instance."""
    found = []
    for bucket in core.manager.buckets:
        replicas = bucket.sharers.replicas
        if first_instance and replicas is not None and replicas.rank > 0:
            continue
        for piece, value in zip(bucket.pieces, bucket.owned_values()):
            masters = {} if bucket.masters is None else {MASTER: value}
            tensors = {**core.stepper.state[piece.param], **masters}
            owner = core.stepper.owner_states(piece.param)
            found.append(StatePiece(piece.param, piece.start, piece.stop, tensors, owner))
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
