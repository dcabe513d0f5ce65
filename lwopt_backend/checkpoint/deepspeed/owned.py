"""Checkpoints of our owned storage under DeepSpeed, ``"storage": "owned"``, stages 0 to 2; see the mark in the file.

At stages 1 and 2 a rank's file has the pieces of parameters that it owns, each in a group of its own; at stage 0 the
file of model states has everything whole. Both name parameters, and say which matrices are in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.deepspeed.model import ModelStates, checkpoint_of, groups_of, scaler_of
from lwopt_backend.checkpoint.deepspeed.owners import KEY, OwnerStates
from lwopt_backend.checkpoint.deepspeed.pieces import Gathered, cut, params_of
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.registry import MATRIX_RULES, new_state

MARK = "lwopt.owned"  # the key by which a checkpoint says what it is
READABLE = ("exp_avg", "exp_avg_sq")  # that DeepSpeed's converter asks for, put last where the rule has none


def read_owned(states: ModelStates, of_ranks: list[tuple[Path, Mapping[str, Any]]]) -> Checkpoint:
    """``of_ranks`` are the files with the optimizer's state they hold: one, at stage 0. Raises CheckpointError."""
    file, first = of_ranks[0]
    whole = "weights" in first
    groups = first["param_groups"] if whole else first["base_optimizer_state"]["param_groups"]
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    members = first[MARK]["members"]
    gathered = {name: Gathered(tuple(shape), group_of[name]) for name, shape, _, _ in members}
    for file, saved in of_ranks:
        for number, (name, _, rule, _) in enumerate(members):
            if whole:
                _add(gathered, name, rule, 0, saved["weights"][name], saved["state"][name], file)
            else:
                start, stop = saved[MARK]["pieces"].get(name, (0, 0))
                weights = saved["single_partition_of_fp32_groups"][number]
                if weights.numel != 0:
                    _check_piece(name, weights, stop - start, file)
                    _add(gathered, name, rule, start, weights, saved["base_optimizer_state"]["state"][number], file)
        for name, of_places in (saved.get(KEY) or {}).items():
            gathered[name].owner = OwnerStates(of_places)
    if whole:  # at stage 0 DeepSpeed does not list what is frozen
        known = {*gathered, *states.buffers, *states.tied}
        states = replace(states, frozen={name: t for name, t in states.module.items() if name not in known})
    return checkpoint_of(
        states,
        f"lwopt owned storage in deepspeed, stage {first.get('zero_stage')}",
        params_of(gathered, states),
        groups_of(groups),
        {
            "clip_grad": first.get("clip_grad"),
            "loss_scaler": scaler_of(first),
            "matrices": matrices_in(first[MARK]),
        },
    )


def _check_piece(name: str, weights: LazyTensor, numel: int, file: Path) -> None:
    if weights.numel != numel:
        raise CheckpointError(f"{file}: of {name!r} it says it owns {numel} elements, and it has {weights.numel}")


def _add(
    gathered: Mapping[str, Gathered],
    name: str,
    rule: str,
    start: int,
    weights: LazyTensor,
    state: Mapping[str, Any],
    file: Path,
) -> None:
    found = gathered[name]
    added = READABLE if _was_added(state, rule) else ()
    for key, value in {MASTER: weights, **state}.items():
        if key in added:
            continue
        if isinstance(value, LazyTensor) and value.shape:
            flat = value.view((value.numel,))
            found.add(key, start, cut(flat, 0, weights.numel, f"{key} of {name!r}", file))
        else:
            found.add_number(name, key, value, file)


def _was_added(state: Mapping[str, Any], rule: str) -> bool:
    """Whether the moments are not the rule's: they come last, behind others, or they are nothing but zeros."""
    if tuple(state)[-2:] != READABLE:
        return False
    tensors = [key for key, value in state.items() if isinstance(value, LazyTensor) and value.shape]
    if tensors[:1] != ["exp_avg"]:
        return True
    moments = [state[key] for key in READABLE]
    expanded = all(t.stride == (0,) or t.numel == 1 and not t.read().any() for t in moments)
    return rule in MATRIX_RULES and expanded


def as_marked(
    params: Mapping[str, Param], mark: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Param]:
    """What ds_to_universal made of a checkpoint of ours: ``params`` with their groups and the states of their rules.

    It knows no group but a parameter's own, and takes along ``READABLE`` only, the first of which is a matrix's
    momentum if its rule keeps one. What owners keep is lost.
    """
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    found = dict(params)
    for name, _, rule, _ in mark["members"]:
        group, states = groups[group_of[name]], dict(params[name].states)
        if rule in MATRIX_RULES:
            first, _ = states.pop(READABLE[0], None), states.pop(READABLE[1], None)
            # A class that the file names is not imported; all its state is at owners.
            kept = [] if "class" in group else list(new_state(torch.empty(1, device="meta"), group))
            if first is not None and len(kept) == 1:
                states[kept[0]] = first
        found[name] = replace(params[name], states=states, group=group_of[name])
    return found


def matrices_in(mark: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which matrices are in each parameter, in the order of their places."""
    return {name: list(matrices) for name, _, _, matrices in mark["members"]}
