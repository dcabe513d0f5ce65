"""Which checkpoints owned storage may load, found out on all ranks before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations.deepspeed_checkpoints import (
    Saved,
    check_world_size,
    check_writer,
    latest,
    read,
    wrong_stage,
)
from lwopt_backend.integrations.deepspeed_owned_state import mark
from lwopt_backend.owned.core import OwnedCore

CONVERT = (
    "Another number of ranks or another layout needs DeepSpeed's universal format: convert the folder with lwopt "
    'convert SRC DST --to universal, and set "checkpoint": {"load_universal": true}'
)


def check(engine: DeepSpeedEngine, core: OwnedCore, load_dir: str, tag: str | None, with_state: bool) -> list[str]:
    """Raises ValueError if DeepSpeed's own checkpoint cannot be loaded; what all ranks must see alike."""
    found = latest(load_dir) if tag is None else tag
    if found is None:
        return ["no checkpoint"]
    folder = Path(load_dir) / str(found)
    stage = engine.zero_optimization_stage()
    saved = read(folder, engine, with_state)
    if with_state:
        check_writer(folder, saved)
    if with_state and (saved.groups is None) != (stage == 0):
        raise wrong_stage(folder, "0" if saved.groups is None else "1 or 2", stage)
    check_world_size(folder, saved.world_size, engine, with_state, CONVERT)
    if with_state:
        _check_storage(folder, saved.owned)
        _check_members(folder, saved, core)
        if stage > 0:
            _check_pieces(folder, saved.owned or {}, core)
    return [f"{folder.name}, saved on {saved.world_size} ranks"]


def _check_storage(folder: Path, owned: Mapping[str, Any] | None) -> None:
    if owned is None:
        raise ValueError(
            f'the checkpoint {str(folder)!r} was not saved with "storage": "owned", which holds the optimizer\'s state '
            "in other pieces; load it with the storage it was saved with, convert it with lwopt convert SRC DST --to "
            'universal and set "checkpoint": {"load_universal": true}, or load its weights alone, with '
            "load_optimizer_states=False"
        )


def _check_members(folder: Path, saved: Saved, core: OwnedCore) -> None:
    theirs, ours = (saved.owned or {})["members"], mark(core)["members"]
    advice = "load it with the model, the param groups, the 'include', 'exclude' and 'atoms' it was saved with"
    for their, our in zip([*theirs, None], [*ours, None]):
        if their != our:
            raise ValueError(
                f"the checkpoint {str(folder)!r} holds other parameters: {_spell(our)} here, {_spell(their)} there; "
                f"{advice}"
            )


def _check_pieces(folder: Path, owned: Mapping[str, Any], core: OwnedCore) -> None:
    theirs, ours = owned["pieces"], mark(core)["pieces"]
    for name in ours.keys() | theirs.keys():
        if theirs.get(name) != ours.get(name):
            here, there = (f"elements {x[0]} to {x[1]}" if x else "nothing" for x in (ours.get(name), theirs.get(name)))
            raise ValueError(
                f"the checkpoint {str(folder)!r} is laid out otherwise: of parameter {name!r} this rank owns {here}, "
                f"there it owned {there}; load with the layout, bucket_mb and group_size it was saved with. {CONVERT}"
            )


def _spell(member: tuple[str, tuple[int, ...], str, list[str]] | None) -> str:
    if member is None:
        return "no further parameter"
    name, shape, rule, matrices = member
    return f"{name!r} {shape} by {rule}" + (f" as the matrices {matrices}" if len(matrices) > 1 else "")
