"""Writes DeepSpeed's universal format; what is where is told in ``deepspeed.universal_reader``.

For AdamW it is one that DeepSpeed 0.19.8 loads at ZeRO 1, 2 and 3 at any world size: the first two read
``param_groups``, stage 3 ``optimizer_state_dict`` and another file of model states. The loss scaler, an object of a
class of DeepSpeed, is left out, and begins anew there; our own key has its numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, Param
from lwopt_backend.checkpoint.deepspeed.universal_reader import OURS, OWNERS, STEP
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.parallel import all_done
from lwopt_backend.checkpoint.files.torch_saving import save, save_as_it_lies
from lwopt_backend.checkpoint.lazy import LazyTensor

LOADER_VERSION = "0.19.8"  # whose loader this is made for; it asks for a version of 0.3.17 or later
UNIVERSAL_VERSION = 0.4  # DeepSpeed's UNIVERSAL_CHECKPOINT_VERSION_VALUE


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Fill ``folder``, a tag's, which is empty. ``workers`` files are written at a time.

    Parameters without state, which are frozen, go with the buffers into the files of model states. Raises
    CheckpointError for a parameter whose name cannot be that of a folder.
    """
    trained = {name: param for name, param in checkpoint.params.items() if param.states or param.group is not None}
    for name in trained:
        check_name(name, f"the parameter {name!r}, which becomes a folder's name")
    groups = _groups(checkpoint, trained)
    frozen = {name: param.best for name, param in checkpoint.params.items() if name not in trained}
    rest = {**frozen, **checkpoint.buffers}
    weights = {name: param.weight for name, param in trained.items() if param.weight is not None}
    module = {name: weights.get(name, frozen.get(name)) for name in checkpoint.params if name in {**weights, **frozen}}
    states = _model_states(checkpoint, trained, frozen, len(groups))
    whole = {**states, "module": OrderedDict({**module, **rest})}
    by_rank = {**states, "module": OrderedDict(rest)}
    (folder / "zero").mkdir()
    all_done(
        [
            partial(save, whole, folder / "mp_rank_00_model_states.pt"),  # the largest file
            partial(save, by_rank, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"),
            partial(save, _common(checkpoint, trained, groups), folder / "zero" / "optimizer_state.pt"),
            *(partial(_write_param, name, param, folder) for name, param in trained.items()),
        ],
        workers,
    )


def _write_param(name: str, param: Param, folder: Path) -> None:
    """Its files; what is saved in 16 bits stays so, but for the master weight."""
    place = folder / "zero" / name
    place.mkdir(parents=True)
    tensors = {MASTER: param.best.to(torch.float32), **{k: t for k, t in param.states.items() if k != MASTER}}
    for key, tensor in tensors.items():
        check_name(key, f"the state {key!r} of parameter {name!r}")
        save({"param": tensor, "cat_dim": 0}, place / f"{key}.pt")
    if param.step is not None:
        save(torch.tensor(float(param.step)), place / f"{STEP}.pt")
    if param.owner_states:
        owners = folder / OWNERS
        owners.mkdir(exist_ok=True)
        with (owners / f"{name}.pt").open("wb") as file:
            save_as_it_lies({place: dict(state) for place, state in param.owner_states.items()}, file)


def _files(param: Param) -> list[str]:
    """What ``_write_param`` writes, by key, so that a reader knows what is missing."""
    steps, owners = [STEP] * (param.step is not None), [OWNERS] * bool(param.owner_states)
    return [*dict.fromkeys((MASTER, *param.states)), *steps, *owners]


def _groups(checkpoint: Checkpoint, trained: Mapping[str, Param]) -> list[dict[str, Any]]:
    """Param groups as torch's state dicts have them; the loaders pair them with the engine's by position."""
    count = max([len(checkpoint.groups), *((param.group or 0) + 1 for param in trained.values())])
    given = [dict(group) for group in checkpoint.groups] + [{} for _ in range(count - len(checkpoint.groups))]
    return [{**group, "params": [number]} for number, group in enumerate(given)]


def _common(checkpoint: Checkpoint, trained: Mapping[str, Param], groups: list[dict[str, Any]]) -> dict[str, Any]:
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
            "files": {name: _files(param) for name, param in trained.items()},
            "arguments": arguments,
        },
    }
    clip = checkpoint.arguments.get("clip_grad")
    return common if clip is None else {**common, "clip_grad": clip}


def _model_states(
    checkpoint: Checkpoint, trained: Mapping[str, Param], frozen: Mapping[str, LazyTensor], groups: int
) -> dict[str, Any]:
    shapes = [
        OrderedDict((name, torch.Size(p.shape)) for name, p in trained.items() if (p.group or 0) == number)
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
