"""Universal checkpoints: of DeepSpeed 0.19.8's ds_to_universal and of this package, read and written."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import (
    MASTER,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    OwnerStates,
    Param,
    reader,
)
from lwopt_backend.checkpoint.deepspeed import files as ds
from lwopt_backend.checkpoint.deepspeed.files import STEP, ModelStates, load_mapping
from lwopt_backend.checkpoint.deepspeed.zero import MARK
from lwopt_backend.checkpoint.files import manifest, torch_files
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.files.threads import all_done
from lwopt_backend.checkpoint.files.torch_files import directory_crc, save, save_as_it_lies

#     latest_universal                             the tag
#     <tag>/mp_rank_00_model_states.pt             stage 3: zero_pp_rank_0_mp_rank_00_...
#     <tag>/zero/optimizer_state.pt                param groups, counters, loss scaling; this package adds ``OURS``
#     <tag>/zero/<parameter>/fp32.pt, <key>.pt     {"param": the whole tensor, ...}; from stage 3 the flat tensor itself
#     <tag>/zero/<parameter>/step.pt               the number itself
#     <tag>/owner_state/<parameter>.pt             this package: owner state of its matrices, by their place
#
# DeepSpeed reads every file in a parameter's folder with ``pt`` in its name as state of the parameter's size, so it has
# no other state.

POINTER = "latest_universal"
OWNERS = "owner_state"  # a sibling of the folder "zero"
OURS = "lwopt"  # the key in optimizer_state.pt for data outside the format


def recognises(path: Path) -> bool:
    return (ds.tag_of(path, POINTER) / ds.UNIVERSAL_MARK).is_file()


@reader("DeepSpeed", lambda path: ds.tag_of(path, POINTER))
def read(tag: Path) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that ``latest_universal`` names. Raises CheckpointError."""
    manifest.check_files(tag)
    common = load_mapping(tag / ds.UNIVERSAL_MARK)
    if MARK in common:
        raise CheckpointError(
            f'{tag}: expected "storage": "owned" converted by lwopt, found a conversion by DeepSpeed, which loses '
            "state other than Adam's; convert the original checkpoint with lwopt convert --to universal"
        )
    ours = plain(common.get(OURS) or {})
    states, parts = _model_states(tag)
    if ours and states.path.name.startswith("zero_pp"):
        raise CheckpointError(f"{tag}: expected mp_rank_00_model_states.pt, found none; copy the whole folder again")
    optimizer = common.get("optimizer_state_dict") or {}
    stage3 = optimizer if "param_groups" in optimizer else None
    groups = common.get("param_groups") or (stage3 or {})["param_groups"]
    group_of, shapes = _listed(states, stage3, ours)
    step = None
    if not ours and stage3 is not None and stage3.get("state"):
        step = ds.as_number(next(iter(stage3["state"].values())).get(STEP))
    folders = {name for name in ds.names_in(tag / "zero") if (tag / "zero" / name).is_dir()}
    there = dict.fromkeys((*(name for name in states.module if name in folders), *sorted(folders)))
    owned = ours.get("owner_states", ())
    found = {name: _param(tag, name, shapes.get(name), name in owned) for name in there}
    found |= {name: replace(found[name], step=0.0) for name in ours.get("never_stepped", ()) if name in found}
    params = {}
    for name, param in found.items():
        weight = states.weight(name, param.shape) if parts == 1 else None
        known = step if param.step is None else param.step
        params[name] = replace(param, weight=weight, step=known, group=group_of.get(name))
    missing = [name for name in shapes if name not in params]
    if missing:
        raise CheckpointError(f"{tag}: expected a folder zero/{missing[0]}, found none; copy the whole folder again")
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
        client={**checkpoint.client, **ours.get("client", {})},
    )


def _model_states(tag: Path) -> tuple[ModelStates, int]:
    """The model states of the first model-parallel rank, and the number of these ranks. In a pipeline, whose weights
    ds_to_universal omits, they have the shapes of all stages."""
    found: dict[int, dict[tuple[int, str], Path]] = {}
    for name in ds.names_in(tag):
        if m := ds.MODEL.fullmatch(name):
            found.setdefault(int(m[2]), {})[int(m[1] or -1), name] = tag / name
    if not found:
        raise CheckpointError(f"{tag}: expected a file mp_rank_00_model_states.pt; copy the whole folder")
    first = [path for _, path in sorted(found[min(found)].items())]
    if not first[0].name.startswith("zero_pp"):
        first = first[:1]
    saved = load_mapping(first[0])
    if saved.get("module", "") is not None:
        return ds.read_model_states(first, of_first=saved), len(found)
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


@dataclass(frozen=True)
class _Owners:
    """A file of owner state, opened when it is first read."""

    path: Path

    @cached_property
    def saved(self) -> Mapping[Any, Any]:
        return load_mapping(self.path)

    def read(self, place: int) -> Any:
        return ds.read_as_it_lay(self.saved[place])


def _param(tag: Path, name: str, shape: tuple[int, ...] | None, with_owners: bool) -> Param:
    folder = tag / "zero" / name
    found: dict[str, LazyTensor] = {}
    step = None
    for file in ds.names_in(folder):
        key, dot, ending = file.rpartition(".")
        if not dot or ending != "pt":
            raise CheckpointError(f"{folder / file}: expected state of a parameter; remove it")
        saved = torch_files.load(folder / file)
        if key == STEP:
            step = ds.as_number(saved)
        else:
            found[key] = state_in(saved, shape, folder / file)
    if MASTER not in found:
        raise CheckpointError(f"{folder}: expected a file fp32.pt, found none; copy the whole folder again")
    whole = found[MASTER].shape
    for key, tensor in found.items():
        if tensor.shape not in (whole, ()):
            raise CheckpointError(
                f"{folder / key}.pt: expected shape {whole}, as fp32.pt has it, found {tensor.shape}; the files are of "
                "different checkpoints"
            )
    ordered = {key: found[key] for key in sorted(found, key=lambda key: key != MASTER)}
    owners = _Owners(tag / OWNERS / f"{name}.pt")
    places = owners.saved if owners.path.is_file() or with_owners else {}
    return Param(None, ordered, step, owner_states=OwnerStates({p: partial(owners.read, p) for p in places}))


def state_in(saved: Any, shape: tuple[int, ...] | None, file: Path) -> LazyTensor:
    """The tensor in a parameter's ``file``. Raises CheckpointError for a flat one, unless it fits ``shape``."""
    tensor = saved.get("param") if isinstance(saved, Mapping) else saved
    if not isinstance(tensor, LazyTensor):
        raise CheckpointError(f"{file}: expected a tensor under 'param', found {type(tensor).__name__}")
    if isinstance(saved, Mapping):
        return tensor
    if shape is None or math.prod(shape) != tensor.numel:
        raise CheckpointError(
            f"{file}: expected shape {shape} by the model states, found a flat tensor of {tensor.numel} elements, as "
            "of stage 3; copy the *_model_states.pt files of this checkpoint next to the folder zero"
        )
    return tensor.view(shape)


# DeepSpeed 0.19.8 can load an AdamW checkpoint written here at ZeRO 1, 2 and 3 at any world size: stages 1 and 2 read
# ``param_groups``, stage 3 ``optimizer_state_dict`` and another file of model states. The loss scaler, an object of a
# class of DeepSpeed, is left out, and starts fresh there; this package's key has its numbers.

WHOLE = "mp_rank_00_model_states.pt"
LOADER_VERSION = "0.19.8"  # the version whose loader this fits; the loader requires version 0.3.17 or later
UNIVERSAL_VERSION = 0.4  # DeepSpeed's UNIVERSAL_CHECKPOINT_VERSION_VALUE


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, a tag's, which is empty. ``workers`` files are written at a time.

    Parameters without state, which are frozen, are written with the buffers into the files of model states; weights
    alone are written as trained. Raises CheckpointError for a parameter whose name cannot be a folder's.
    """
    trained = {name: param for name, param in checkpoint.params.items() if param.states or param.group is not None}
    trained = trained or dict(checkpoint.params)
    for name in trained:
        check_name(name, f"the parameter {name!r}, used as a folder's name")
    # As in torch's state dicts; the loaders pair them with the engine's by position.
    count = max([len(checkpoint.groups), *((param.group or 0) + 1 for param in trained.values())])
    given: list[Mapping[str, Any]] = [*checkpoint.groups, *[{}] * (count - len(checkpoint.groups))]
    groups = [{**group, "params": [number]} for number, group in enumerate(given)]
    frozen = {name: param.best for name, param in checkpoint.params.items() if name not in trained}
    of_model = {name: trained[name].weight if name in trained else frozen[name] for name in checkpoint.params}
    weights = [(n, w) for n, w in (*of_model.items(), *checkpoint.buffers.items()) if w is not None]
    states = _model_states_to_write(checkpoint, trained, frozen, len(groups))
    (folder / "zero").mkdir()
    files, common = Files(folder), _steps_in_common(trained)
    written = {name: replace(param, step=common.get(name, param.step)) for name, param in trained.items()}
    all_done([partial(_write_param, name, param, files) for name, param in written.items()], workers)
    # What the files have twice is read from the first one.
    module = {n: _again(folder, n, w) if n in trained and MASTER not in trained[n].states else w for n, w in weights}
    _save(files, WHOLE, {**states, "module": OrderedDict(module)})
    saved = load_mapping(folder / WHOLE)["module"]
    rest = {name: saved[name] for name in (*frozen, *checkpoint.buffers)}
    _save(files, f"zero_pp_rank_0_{WHOLE}", {**states, "module": OrderedDict(rest)})
    _save(files, str(ds.UNIVERSAL_MARK), _common(checkpoint, trained, groups, [*common]))
    manifest.write(folder, files.entries, checkpoint.iteration)


def _steps_in_common(trained: Mapping[str, Param]) -> dict[str, float]:
    """For stock DeepSpeed, which loads Adam's state alone and wants one count in a param group: that of its group for a
    parameter that was never stepped. Nothing if there is other state, which stock DeepSpeed cannot load."""
    if not all({"exp_avg", "exp_avg_sq"} <= param.states.keys() for param in trained.values()):
        return {}
    counts: dict[int | None, set[float]] = {}
    for param in trained.values():
        counts.setdefault(param.group, set()).update({param.step} if param.step else ())
    common = {group: min(steps) for group, steps in counts.items() if len(steps) == 1}
    return {n: common[p.group] for n, p in trained.items() if p.step == 0 and p.group in common}


def _again(folder: Path, name: str, weight: LazyTensor) -> LazyTensor:
    """A weight from the file of its master, which it was written as."""
    return state_in(torch_files.load(folder / "zero" / name / f"{MASTER}.pt"), None, folder).to(weight.dtype)


def _save(files: Files, name: str, content: Any) -> None:
    files.add(name, save(content, files.folder / name))


def _states_to_write(param: Param) -> dict[str, LazyTensor]:
    """State in 16 bits stays in 16 bits; the master weight is written in fp32, or in a wider dtype if it has that."""
    wide = torch.float32 if param.best.dtype.itemsize < 4 else param.best.dtype
    return {MASTER: param.best.to(wide), **{k: t for k, t in param.states.items() if k != MASTER}}


def _write_param(name: str, param: Param, files: Files) -> None:
    place = f"zero/{name}"
    (files.folder / place).mkdir(parents=True)
    for key, tensor in _states_to_write(param).items():
        check_name(key, f"the state {key!r} of parameter {name!r}")
        _save(files, f"{place}/{key}.pt", {"param": tensor, "cat_dim": 0})
    if param.step is not None:
        _save(files, f"{place}/{STEP}.pt", torch.tensor(float(param.step)))
    if param.owner_states:
        path = files.folder / OWNERS / f"{name}.pt"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            save_as_it_lies({place: dict(state) for place, state in param.owner_states.items()}, file)
        files.add(f"{OWNERS}/{name}.pt", directory_crc(path))


def _common(
    checkpoint: Checkpoint,
    trained: Mapping[str, Param],
    groups: list[dict[str, Any]],
    never_stepped: Sequence[str],
) -> dict[str, Any]:
    steps = [param.step for param in trained.values() if param.step is not None]
    step = {STEP: torch.tensor(max(steps))} if steps else {}
    arguments = {key: value for key, value in checkpoint.arguments.items() if key != "ds_config"}
    common = {
        "param_groups": groups,
        "ds_version": LOADER_VERSION,
        "optimizer_state_dict": {"state": {0: step}, "param_groups": groups},
        OURS: {
            "names": checkpoint.names,
            "source": f"{checkpoint.format} {checkpoint.version}",
            "world": dict(checkpoint.world),
            "params": {name: param.group for name, param in checkpoint.params.items()},
            "owner_states": [name for name, param in trained.items() if param.owner_states],
            "never_stepped": list(never_stepped),
            "client": {key: value for key, value in checkpoint.client.items() if key in ds.ENGINE_KEYS},
            "arguments": arguments,
        },
    }
    clip = checkpoint.arguments.get("clip_grad")
    return common if clip is None else {**common, "clip_grad": clip}


def _model_states_to_write(
    checkpoint: Checkpoint, trained: Mapping[str, Param], frozen: Mapping[str, LazyTensor], groups: int
) -> dict[str, Any]:
    shapes = [  # without those of unknown groups, which DeepSpeed would train with another group's options
        OrderedDict((name, torch.Size(p.shape)) for name, p in trained.items() if p.group == number)
        for number in range(groups)
    ]
    return {
        **{key: value for key, value in checkpoint.client.items() if key not in ds.ENGINE_KEYS},
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
