"""torch.optim.AdamW's state dict, in whole tensors on all ranks, where AdamW trains everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend import torch_adamw
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import MASTER, Groups, check_between_steps, options_of, state_pieces
from lwopt_backend.registry import new_state
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.bucket_buffers import BucketBuffers

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


def whole_state(core: OwnedCore, groups: Groups) -> dict[str, Any]:
    """As torch.optim.AdamW's; with fp32 masters beside its keys where parameters have 16 bits. Called on all ranks."""
    check_between_steps(core)
    own = {piece.member: piece.tensors for piece in state_pieces(core)}
    indices = {id(param): index for index, param in enumerate(p for group in groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {index: {} for index in indices.values()}
    for bucket in core.manager.buckets:
        kept = _kept(core, bucket, groups)
        for key, like in {key: like for of_member in kept.values() for key, like in of_member.items()}.items():
            mine = [own[piece.param].get(key) for piece in bucket.pieces]
            whole = reduced(bucket, mine) if like.ndim else _counts(bucket, mine)
            for place, number in enumerate(kept):
                if key in kept[number]:
                    found = bucket.view(whole, number).clone() if like.ndim else whole[place].to(like.device, copy=True)
                    state[indices[id(core.members[number].param)]][key] = found
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
                tensor.copy_(value.reshape(-1)[piece.start : piece.stop] if tensor.ndim else value)
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
        torch_adamw.check(group, f"{WHAT}: param group {number}")
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
    if values and sorted({*values} - {MASTER}) != sorted({*kept} - {MASTER}):
        raise ValueError(f"{where}: expected {sorted({*kept} - {MASTER})}, found {sorted(values)}")
    taken = {}
    for key, like in kept.items():
        if key not in values:
            continue
        value = torch.as_tensor(values[key])
        expected = shape if like.ndim else ()
        if tuple(value.shape) != expected:
            raise ValueError(f"{where}, {key!r}: expected shape {expected}, found {tuple(value.shape)}")
        if hasattr(value, "full_tensor"):
            raise ValueError(f"{where}, {key!r}: expected a whole tensor, found a DTensor; save a full state dict")
        taken[key] = value
    return taken
