"""Universal checkpoints: those of ds_to_universal, of DeepSpeed 0.19.8, and ours, read and written."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, reader
from lwopt_backend.checkpoint.deepspeed import files as ds
from lwopt_backend.checkpoint.deepspeed.files import STEP, ModelStates, load_mapping
from lwopt_backend.checkpoint.deepspeed.zero import MARK
from lwopt_backend.checkpoint.files import manifest, torch_files
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.made import all_done
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.files.torch_files import save, save_as_it_lies

#     latest_universal                             the tag
#     <tag>/mp_rank_00_model_states.pt             stage 3: zero_pp_rank_0_mp_rank_00_...
#     <tag>/zero/optimizer_state.pt                param groups, counters, loss scaling; ours adds ``OURS``
#     <tag>/zero/<parameter>/fp32.pt, <key>.pt     {"param": the whole tensor, ...}; from stage 3 the flat tensor itself
#     <tag>/zero/<parameter>/step.pt               the number itself
#     <tag>/owner_state/<parameter>.pt             ours: what owners keep of its matrices, by their place
#
# DeepSpeed takes every file in a parameter's folder whose name has ``pt`` in it for state of the parameter's size, so
# what is not of that size is not in there.

POINTER = "latest_universal"
OWNERS = "owner_state"  # the folder beside "zero"
OURS = "lwopt"  # the key in optimizer_state.pt for what the format has no place for


def recognises(path: Path) -> bool:
    try:
        return (ds.tag_of(path, POINTER) / ds.UNIVERSAL_MARK).is_file()
    except (CheckpointError, OSError):
        return False


@reader("DeepSpeed", lambda path: ds.tag_of(path, POINTER))
def read(tag: Path) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that ``latest_universal`` names. Raises CheckpointError."""
    manifest.check_files(tag)
    common = load_mapping(tag / ds.UNIVERSAL_MARK, tag)
    if MARK in common:
        raise CheckpointError(
            f"{tag} is of owned storage, and was converted by DeepSpeed, which loses what is not Adam's; convert the "
            "checkpoint that was saved with lwopt convert --to universal"
        )
    ours = plain(common.get(OURS) or {})
    states, parts = _model_states(tag)
    if ours and states.path.name.startswith("zero_pp"):
        raise CheckpointError(f"{tag}: mp_rank_00_model_states.pt is missing; copy the whole folder again")
    optimizer = common.get("optimizer_state_dict") or {}
    stage3 = optimizer if "param_groups" in optimizer else None
    groups = common.get("param_groups") or (stage3 or {})["param_groups"]
    group_of, shapes = _listed(states, stage3, ours)
    step = None
    if not ours and stage3 is not None and stage3.get("state"):
        step = ds.as_number(next(iter(stage3["state"].values())).get(STEP))
    params = {}
    folders = {name for name in ds.names_in(tag / "zero") if (tag / "zero" / name).is_dir()}
    listed = [name for name in (*ours.get("params", ()), *states.module) if name in folders]
    for name in dict.fromkeys((*listed, *sorted(folders))):
        for key in ours.get("files", {}).get(name, ()):  # the files that our writer has listed
            file = tag / OWNERS / f"{name}.pt" if key == OWNERS else tag / "zero" / name / f"{key}.pt"
            if not file.is_file():
                raise CheckpointError(f"{file} is missing; copy the whole folder again")
        found = _param(tag, name, shapes.get(name), states if parts == 1 else None)
        params[name] = replace(found, step=step if found.step is None else found.step, group=group_of.get(name))
    missing = [name for name in shapes if name not in params]
    if missing:
        raise CheckpointError(f"{tag} has no folder zero/{missing[0]}; copy the whole folder again")
    notes = []
    if parts > 1:
        states = replace(states, frozen={}, buffers={})
        notes = ["model states of several model-parallel ranks: frozen parameters and buffers are not read"]
    names, world = ours.get("names", "model"), ours.get("world", {})
    checkpoint = ds.checkpoint_of(
        states, "deepspeed universal", params, groups, common, None, names=names, world=world, notes=notes
    )
    order = [name for name in ours.get("params", ()) if name in checkpoint.params]
    return replace(
        checkpoint,
        params={name: checkpoint.params[name] for name in order or checkpoint.params},
        arguments={**checkpoint.arguments, **ours.get("arguments", {})},
    )


def _model_states(tag: Path) -> tuple[ModelStates, int]:
    """The model states of the first model-parallel rank, and the number of these ranks; of a pipeline, whose weights
    ds_to_universal leaves behind, with the shapes of all stages."""
    found: dict[int, dict[tuple[int, str], Path]] = {}
    for name in ds.names_in(tag):
        if m := ds.MODEL.fullmatch(name):
            found.setdefault(int(m[2]), {})[int(m[1] or -1), name] = tag / name
    if not found:
        raise CheckpointError(f"{tag} has no file mp_rank_00_model_states.pt; copy the whole folder again")
    first = [path for _, path in sorted(found[min(found)].items())]
    if not first[0].name.startswith("zero_pp"):
        first = first[:1]
    if load_mapping(first[0]).get("module", "") is not None:
        return ds.read_model_states(first), len(found)
    stages = [ds.read_model_states(sorted(found[stage].values()), {}) for stage in sorted(found)]
    groups = zip_longest(*(stage.shapes or () for stage in stages), fillvalue={})
    shapes = [{name: shape for of_stage in group for name, shape in of_stage.items()} for group in groups]
    return replace(stages[0], shapes=shapes), len(found)


def _listed(
    states: ModelStates, stage3: Mapping[str, Any] | None, ours: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Parameters' groups and shapes, as far as the files have them."""
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


def _param(tag: Path, name: str, shape: tuple[int, ...] | None, states: ModelStates | None) -> Param:
    folder = tag / "zero" / name
    found: dict[str, LazyTensor] = {}
    step = None
    for file in ds.names_in(folder):
        key, dot, ending = file.rpartition(".")
        if not dot or ending != "pt":
            raise CheckpointError(f"{folder / file} is no state of a parameter; remove it, or copy the folder again")
        saved = torch_files.load(folder / file, tag)
        if key == STEP:
            step = ds.as_number(saved)
        else:
            found[key] = state_in(saved, shape, folder / file)
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
    owner = ds.owner_states(load_mapping(owners, tag)) if owners.is_file() else {}
    ordered = {key: found[key] for key in sorted(found, key=lambda key: key != MASTER)}
    return Param(states.weight(name, whole) if states else None, ordered, step, owner_states=owner)


def state_in(saved: Any, shape: tuple[int, ...] | None, file: Path) -> LazyTensor:
    """The tensor in a parameter's ``file``. Raises CheckpointError for a flat one, unless it fits ``shape``."""
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


# What is written for AdamW is one that DeepSpeed 0.19.8 loads at ZeRO 1, 2 and 3 at any world size: the first two read
# ``param_groups``, stage 3 ``optimizer_state_dict`` and another file of model states. The loss scaler, an object of a
# class of DeepSpeed, is left out, and begins anew there; our own key has its numbers.

LOADER_VERSION = "0.19.8"  # the version whose loader this fits; the loader requires version 0.3.17 or later
UNIVERSAL_VERSION = 0.4  # DeepSpeed's UNIVERSAL_CHECKPOINT_VERSION_VALUE


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, a tag's, which is empty. ``workers`` files are written at a time.

    Parameters without state, which are frozen, are written with the buffers into the files of model states. Raises
    CheckpointError for a parameter whose name cannot be a folder's.
    """
    trained = {name: param for name, param in checkpoint.params.items() if param.states or param.group is not None}
    for name in trained:
        check_name(name, f"the parameter {name!r}, which becomes a folder's name")
    # As torch's state dicts have them; the loaders pair them with the engine's by position.
    count = max([len(checkpoint.groups), *((param.group or 0) + 1 for param in trained.values())])
    given: list[Mapping[str, Any]] = [*checkpoint.groups, *[{}] * (count - len(checkpoint.groups))]
    groups = [{**group, "params": [number]} for number, group in enumerate(given)]
    frozen = {name: param.best for name, param in checkpoint.params.items() if name not in trained}
    rest = {**frozen, **checkpoint.buffers}
    weights = {name: param.weight for name, param in trained.items() if param.weight is not None}
    module = {name: weights.get(name, frozen.get(name)) for name in checkpoint.params if name in {**weights, **frozen}}
    states = _model_states_to_write(checkpoint, trained, frozen, len(groups))
    whole = {**states, "module": OrderedDict({**module, **rest})}
    by_rank = {**states, "module": OrderedDict(rest)}
    (folder / "zero").mkdir()
    files = Files(folder)

    def save_file(name: str, content: Any) -> None:
        files.add(name, save(content, folder / name))

    all_done(
        [
            partial(save_file, "mp_rank_00_model_states.pt", whole),  # the largest file
            partial(save_file, "zero_pp_rank_0_mp_rank_00_model_states.pt", by_rank),
            partial(save_file, "zero/optimizer_state.pt", _common(checkpoint, trained, groups)),
            *(partial(_write_param, name, param, files, save_file) for name, param in trained.items()),
        ],
        workers,
    )
    manifest.write(folder, files.entries, checkpoint.iteration)


def _write_param(name: str, param: Param, files: Files, save_file: Callable[[str, Any], None]) -> None:
    """Write a parameter's files. State in 16 bits stays in 16 bits; the master weight is written in fp32."""
    place = f"zero/{name}"
    (files.folder / place).mkdir(parents=True)
    tensors = {MASTER: param.best.to(torch.float32), **{k: t for k, t in param.states.items() if k != MASTER}}
    for key, tensor in tensors.items():
        check_name(key, f"the state {key!r} of parameter {name!r}")
        save_file(f"{place}/{key}.pt", {"param": tensor, "cat_dim": 0})
    if param.step is not None:
        save_file(f"{place}/{STEP}.pt", torch.tensor(float(param.step)))
    if param.owner_states:
        (files.folder / OWNERS).mkdir(exist_ok=True)
        with files.open(f"{OWNERS}/{name}.pt") as file:
            save_as_it_lies({place: dict(state) for place, state in param.owner_states.items()}, file)


def _common(checkpoint: Checkpoint, trained: Mapping[str, Param], groups: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [param.step for param in trained.values() if param.step is not None]
    step = {STEP: torch.tensor(max(steps))} if steps else {}
    arguments = {key: value for key, value in checkpoint.arguments.items() if key != "ds_config"}
    files = {  # what ``_write_param`` writes, by key, so that a reader knows what is missing
        name: [*dict.fromkeys((MASTER, *p.states)), *[STEP] * (p.step is not None), *[OWNERS] * bool(p.owner_states)]
        for name, p in trained.items()
    }
    common = {
        "param_groups": groups,
        "ds_version": LOADER_VERSION,
        "optimizer_state_dict": {"state": {0: step}, "param_groups": groups},
        OURS: {
            "names": checkpoint.names,
            "source": f"{checkpoint.format} {checkpoint.version}",
            "world": dict(checkpoint.world),
            "params": {name: param.group for name, param in checkpoint.params.items()},
            "files": files,
            "arguments": arguments,
        },
    }
    clip = checkpoint.arguments.get("clip_grad")
    return common if clip is None else {**common, "clip_grad": clip}


def _model_states_to_write(
    checkpoint: Checkpoint, trained: Mapping[str, Param], frozen: Mapping[str, LazyTensor], groups: int
) -> dict[str, Any]:
    shapes = [  # without those whose group is not known, which DeepSpeed would train with another group's options
        OrderedDict((name, torch.Size(p.shape)) for name, p in trained.items() if p.group == number)
        for number in range(groups)
    ]
    return {
        **checkpoint.client,
        "buffer_names": list(checkpoint.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, torch.Size(tensor.shape)) for name, tensor in frozen.items()),
        "frozen_param_fragments": None,
        "shared_params": dict(checkpoint.tied),
        "lr_scheduler": checkpoint.scheduler,
        "skipped_steps": checkpoint.arguments.get("skipped_steps", 0),
        "global_steps": checkpoint.iteration or 0,
        "global_samples": checkpoint.samples or 0,
        "dp_world_size": checkpoint.world.get("dp", 1),
        "mp_world_size": 1,
        "ds_config": checkpoint.arguments.get("ds_config", {}),
        "ds_version": LOADER_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
