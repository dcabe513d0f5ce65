"""Reads DeepSpeed's universal checkpoints: those of ds_to_universal, of DeepSpeed 0.19.8, and ours.

::

    latest_universal                             the tag
    <tag>/mp_rank_00_model_states.pt             as ``deepspeed.model`` reads it; stage 3: zero_pp_rank_0_mp_rank_00_...
    <tag>/zero/optimizer_state.pt                param groups, counters, loss scaling; ours adds ``OURS``
    <tag>/zero/<parameter>/fp32.pt, <key>.pt     {"param": the whole tensor, ...}; from stage 3 the flat tensor itself
    <tag>/zero/<parameter>/step.pt               the number itself
    <tag>/owner_state/<parameter>.pt             ours: what owners keep of its matrices, by their place

DeepSpeed takes every file in a parameter's folder whose name has ``pt`` in it for state of the parameter's size, so
what is not of that size is not in there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param, read_as_expected
from lwopt_backend.checkpoint.deepspeed.folder import MODEL, UNIVERSAL_MARK, names_in, tag_of
from lwopt_backend.checkpoint.deepspeed.model import (
    ModelStates,
    checkpoint_of,
    groups_of,
    load_mapping,
    as_number,
    plain,
    read_model_states,
    scaler_of,
)
from lwopt_backend.checkpoint.deepspeed.owned import MARK, as_marked, matrices_in
from lwopt_backend.checkpoint.deepspeed.owners import OwnerStates
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.lazy import LazyTensor

POINTER = "latest_universal"
OWNERS = "owner_state"  # the folder beside "zero"
OURS = "lwopt"  # the key in optimizer_state.pt under which our writer says what the format has no place for
STEP = "step"


def recognises(path: Path) -> bool:
    """Whether it is the tag of a universal checkpoint, or a folder with a pointer to one."""
    try:
        return (tag_of(path, POINTER) / UNIVERSAL_MARK).is_file()
    except (CheckpointError, OSError):
        return False


def read(path: Path) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that ``latest_universal`` names. Raises CheckpointError."""
    tag = tag_of(path, POINTER)
    return read_as_expected(lambda: _read(tag), tag, "DeepSpeed")


def _read(tag: Path) -> Checkpoint:
    common = load_mapping(tag / UNIVERSAL_MARK)
    ours = plain(common.get(OURS) or {}, [])
    states, parts = _model_states(tag)
    if ours and states.path.name.startswith("zero_pp"):
        raise CheckpointError(f"{tag}: mp_rank_00_model_states.pt is missing; copy the whole folder again")
    stage3 = (
        common.get("optimizer_state_dict") if "param_groups" in (common.get("optimizer_state_dict") or {}) else None
    )
    groups = common.get("param_groups") or (stage3 or {})["param_groups"]
    group_of, shapes = _listed(states, stage3, ours)
    step = None
    if not ours and stage3 is not None and stage3.get("state"):
        step = as_number(next(iter(stage3["state"].values())).get(STEP))
    params = {}
    for name in _ordered(tag, ours, states):
        _check_files(tag, name, ours.get("files", {}).get(name, ()))
        found = _param(tag, name, shapes.get(name), states if parts == 1 else None)
        params[name] = replace(found, step=step if found.step is None else found.step, group=group_of.get(name))
    missing = [name for name in shapes if name not in params]
    if missing:
        raise CheckpointError(f"{tag} has no folder zero/{missing[0]}; copy the whole folder again")
    if parts > 1:
        states = replace(states, frozen={}, buffers={})
    arguments = {"clip_grad": common.get("clip_grad"), "loss_scaler": scaler_of(common)}
    if MARK in common:
        params = as_marked(params, common[MARK], groups)
        arguments["matrices"] = matrices_in(common[MARK])
    checkpoint = checkpoint_of(
        states,
        "deepspeed universal",
        params,
        groups_of(groups),
        arguments,
        names=ours.get("names", "model"),
        world=ours.get("world", {}),
        notes=["model states of several model-parallel ranks: frozen parameters and buffers are not read"][: parts - 1],
    )
    order = [name for name in ours.get("params", ()) if name in checkpoint.params]
    return replace(
        checkpoint,
        params={name: checkpoint.params[name] for name in order or checkpoint.params},
        arguments={**checkpoint.arguments, **ours.get("arguments", {})},
    )


def _model_states(tag: Path) -> tuple[ModelStates, int]:
    """The model states, and how many model-parallel ranks there are; those of the first of them."""
    found: dict[int, dict[tuple[int, str], Path]] = {}
    for name in names_in(tag):
        if m := MODEL.fullmatch(name):
            found.setdefault(int(m[2]), {})[int(m[1] or -1), name] = tag / name
    if not found:
        raise CheckpointError(f"{tag} has no file mp_rank_00_model_states.pt; copy the whole folder again")
    first = [path for _, path in sorted(found[min(found)].items())]
    if not first[0].name.startswith("zero_pp"):
        first = first[:1]
    return read_model_states(first), len(found)


def _listed(
    states: ModelStates, stage3: Mapping[str, Any] | None, ours: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Parameters' groups and shapes, as far as the files tell."""
    shapes = {name: shape for group in states.shapes or () for name, shape in group.items()}
    if "params" in ours:
        return {name: group for name, group in ours["params"].items() if group is not None}, shapes
    lists = {index: number for number, g in enumerate((stage3 or {}).get("param_groups", ())) for index in g["params"]}
    group_of = {
        name: lists.get(index, 0) if stage3 is not None else index
        for index, group in enumerate(states.shapes or ())
        for name in group
    }
    return group_of, shapes


def _ordered(tag: Path, ours: Mapping[str, Any], states: ModelStates) -> Iterator[str]:
    """The parameters that have a folder."""
    folders = {name for name in names_in(tag / "zero") if (tag / "zero" / name).is_dir()}
    listed = [name for name in (*ours.get("params", ()), *states.module) if name in folders]
    yield from dict.fromkeys((*listed, *sorted(folders)))


def _check_files(tag: Path, name: str, keys: Iterable[str]) -> None:
    """Raises CheckpointError if a file is missing that our writer says it wrote."""
    for key in keys:
        file = tag / OWNERS / f"{name}.pt" if key == OWNERS else tag / "zero" / name / f"{key}.pt"
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; copy the whole folder again")


def _param(tag: Path, name: str, shape: tuple[int, ...] | None, states: ModelStates | None) -> Param:
    folder = tag / "zero" / name
    found: dict[str, LazyTensor] = {}
    step = None
    for file in names_in(folder):
        key, dot, ending = file.rpartition(".")
        if not dot or ending != "pt":
            raise CheckpointError(f"{folder / file} is no state of a parameter; remove it, or copy the folder again")
        saved = torch_files.load(folder / file)
        if key == STEP:
            step = as_number(saved)
        else:
            found[key] = _tensor(saved, shape, folder / file)
    if MASTER not in found:
        raise CheckpointError(f"{folder} has no file fp32.pt; copy the whole folder again")
    whole = found[MASTER].shape
    for key, tensor in found.items():
        if tensor.shape not in (whole, ()):
            raise CheckpointError(
                f"{folder / key}.pt: expected shape {whole}, as fp32.pt has it, found {tensor.shape}; the files are of "
                "different checkpoints"
            )
    owners = tag / OWNERS / f"{name}.pt"
    owner = OwnerStates(load_mapping(owners)) if owners.is_file() else {}
    ordered = {key: found[key] for key in sorted(found, key=lambda key: key != MASTER)}
    return Param(states.weight(name, whole) if states else None, ordered, step, owner_states=owner)


def _tensor(saved: Any, shape: tuple[int, ...] | None, file: Path) -> LazyTensor:
    tensor = saved.get("param") if isinstance(saved, Mapping) else saved
    if not isinstance(tensor, LazyTensor):
        raise CheckpointError(f"{file}: expected a tensor under 'param', found {type(tensor).__name__}")
    if isinstance(saved, Mapping):
        return tensor
    if shape is None or math.prod(shape) != tensor.numel:
        raise CheckpointError(
            f"{file} holds a flat tensor of {tensor.numel} elements, as stage 3 writes it, and the model states say "
            f"that its shape is {shape}; copy the *_model_states.pt files of the same checkpoint beside the folder zero"
        )
    return tensor.view(shape)
