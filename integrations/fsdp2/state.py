"""Optimizer state of FSDP2 parameters: what may be loaded, and that it keeps its dtype."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lwopt_backend import torch_adamw
from lwopt_backend.integrations.fsdp2.meshes import describe, placed
from lwopt_backend.param_groups import of_another_optimizer


def check_loadable(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    rules: Sequence[str],
    made: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Raise ValueError for groups of other rules or sizes, and for state that is missing, foreign or of other shape."""
    saved = state_dict["param_groups"]
    _check_writer(state_dict, groups, made)
    ours, theirs = ([len(group["params"]) for group in some] for some in (groups, saved))
    if ours != theirs:
        raise ValueError(f"the checkpoint's param groups hold {theirs} parameters, this optimizer's hold {ours}")
    saved_rules = [group.get("rule", rule) for group, rule in zip(saved, rules)]
    if saved_rules != list(rules):
        raise ValueError(
            f"the checkpoint's param groups follow the rules {saved_rules}, this optimizer's {list(rules)}"
        )
    if torch_adamw.is_alone(groups):
        for number, group in enumerate(saved):
            torch_adamw.check(group, f"load_state_dict: param group {number}")
    if not state_dict["state"]:
        return  # saved by an optimizer that had not made its state yet
    missing = []
    for theirs_group, group, group_names in zip(saved, groups, names):
        for index, param, name in zip(theirs_group["params"], group["params"], group_names):
            found = state_dict["state"].get(index)
            if found:
                _check_state(found, made[param], name, param)
            else:
                missing.append(name)
    if missing:
        warnings.warn(f"the checkpoint has no state of {missing}; theirs is left as it is", stacklevel=3)


def _check_writer(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    made: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Raise ValueError for the state dict of another optimizer, unless it has our groups and our state."""
    saved = state_dict["param_groups"]
    theirs = {key for state in state_dict["state"].values() for key in state}
    ours = {key for state in made.values() for key in state}
    fits = len(saved) == len(groups) and theirs in (set(), ours)
    if of_another_optimizer(saved) and not fits:
        raise ValueError(
            f"the checkpoint was written by another optimizer: its {len(saved)} param group(s) have no 'rule', and its "
            f"state is {sorted(theirs)}; expected {len(groups)} groups and {sorted(ours)}. Load the model's weights "
            "alone and begin with new state, or take that of another Muon along with lwopt_backend.migration"
        )


def _check_state(found: Mapping[str, Any], expected: Mapping[str, Any], name: str, param: Tensor) -> None:
    where = f"the checkpoint's state of {describe(name, param)}"
    keys = sorted(found)
    if keys != sorted(expected):
        raise ValueError(f"{where}: expected {sorted(expected)}, found {keys}")
    for key, tensor in expected.items():
        value = found[key]
        if not isinstance(value, Tensor):
            if tensor.ndim == 0:
                continue  # a counter that was saved as a number
            raise ValueError(f"{where}, {key!r}: expected a tensor, found {value!r}")
        if value.shape != tensor.shape or (isinstance(value, DTensor) and not isinstance(tensor, DTensor)):
            raise ValueError(f"{where}, {key!r}: expected {_kind(tensor)}, found {_kind(value)}")
        if isinstance(value, DTensor) and value.placements != tensor.placements:
            raise ValueError(
                f"{where}, {key!r}: expected placements {tensor.placements}, found {value.placements}; load it with "
                "torch.distributed.checkpoint, which shards it anew"
            )


def _kind(tensor: Tensor) -> str:
    return f"a {'DTensor' if isinstance(tensor, DTensor) else 'plain tensor'} of shape {tuple(tensor.shape)}"


def with_shards(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], expected: Mapping[Tensor, Mapping[str, Any]]
) -> dict[str, Any]:
    """``state_dict`` with whole tensors cut to this rank's part, where the expected state is sharded."""
    params = {
        index: param
        for saved, group in zip(state_dict["param_groups"], groups)
        for index, param in zip(saved["params"], group["params"])
    }
    state = {}
    for index, entry in state_dict["state"].items():
        made = expected.get(params[index], {}) if index in params else {}
        state[index] = {key: _cut_like(value, made.get(key)) for key, value in entry.items()}
    return {**state_dict, "state": state}


def _cut_like(value: Any, made: Any) -> Any:
    if not isinstance(made, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    coordinate = made.device_mesh.get_coordinate()
    assert coordinate is not None
    box = placed(made).box(tuple(coordinate))
    part = value[tuple(slice(begin, begin + size) for begin, size in box)].contiguous()
    if not made.is_meta:
        part = part.to(made.device)
    return DTensor.from_local(
        part, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
    )


def restore_groups(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> None:
    """After ``Optimizer.load_state_dict``: options that the checkpoint lacks are kept, rules are never loaded."""
    for group, old, rule in zip(optimizer.param_groups, before, rules):
        for key in old.keys() - group.keys():
            group[key] = old[key]
        group["rule"] = rule


def restore_dtypes(
    optimizer: torch.optim.Optimizer, made: Mapping[Tensor, Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """After ``Optimizer.load_state_dict``, which casts state to the parameter's dtype: back to the state's own."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups):
        for index, param in zip(saved["params"], group["params"]):
            state = optimizer.state.get(param, {})
            for key, tensor in made.get(param, {}).items():
                if key not in state:
                    state[key] = tensor
                elif not isinstance(state[key], Tensor):
                    state[key] = torch.as_tensor(state[key], dtype=tensor.dtype)
                elif state[key].dtype != tensor.dtype:
                    state[key] = state_dict["state"][index][key].to(device=tensor.device, dtype=tensor.dtype)
            if state:
                optimizer.state[param] = state
