"""A checkpoint that DeepSpeed cannot load into an engine is refused on all ranks, before anything of it is loaded.

DeepSpeed finds out late and rank by rank: it has put the weights into the model when it compares the world sizes, and
at stage 3 ranks whose files are missing leave while the others wait for them. Some checkpoints it loads in part and
says nothing. The file of the model's states tells enough, and is read here without its tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.ranks import Collectives

NAME = "LayerWiseMuon"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of itself. ``groups`` has the parameters' names, one list per param group of the optimizer
    (stages 1 and 2) or per sub-group (stage 3); it is None at stage 0."""

    world_size: int
    groups: list[list[str]] | None


def guard_loading(engine: DeepSpeedEngine, ranks: Sequence[Collectives]) -> None:
    """Make ``engine.load_checkpoint`` check first. ``ranks`` are the groups that share parameters with this rank.

    Called once for an engine, on all ranks. From then on its ``load_checkpoint`` raises on every rank if it would on
    one: ValueError for a checkpoint of another world size, ZeRO stage or optimizer. One that does not exist is left to
    DeepSpeed, which warns and returns (None, None).
    """
    load = engine.load_checkpoint
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        choice = call.arguments
        with_state = choice["load_optimizer_states"] and not choice["load_module_only"]

        def check() -> tuple[None, list[list[str]]]:
            return None, [_check(engine, choice["load_dir"], choice["tag"], with_state)] * len(ranks)

        agree_in_all(ranks, NAME, check)
        if engine.zero_optimization_stage() == 3:
            # With load_module_only alone DeepSpeed reads the weights from a file that has none, and says nothing.
            choice["load_optimizer_states"] = with_state
        return load(*call.args, **call.kwargs)

    engine.load_checkpoint = load_checkpoint


def _check(engine: DeepSpeedEngine, load_dir: str, tag: str | None, with_state: bool) -> list[str]:
    """Raises ValueError if the checkpoint cannot be loaded; what all ranks must see alike."""
    if engine.load_universal_checkpoint():
        raise ValueError(
            "checkpoint.load_universal is on, and LayerWiseMuon cannot load universal checkpoints yet; switch it off "
            "and load DeepSpeed's own checkpoint on as many ranks as it was saved on"
        )
    latest = _latest(load_dir)
    if tag is None and latest is None:
        return ["no checkpoint"]
    folder = Path(load_dir) / str(latest if tag is None else tag)
    stage = engine.zero_optimization_stage()
    saved = _read(folder, engine)
    if with_state and (saved.groups is None) != (stage == 0):
        raise _wrong_stage(folder, "0" if saved.groups is None else "1 or 2", stage)
    _check_world_size(folder, saved.world_size, engine, with_state)
    if stage == 3 and not with_state and folder.name != latest:
        raise ValueError(
            f"only the weights of tag {folder.name!r} are asked for, but at stage 3 DeepSpeed takes them from the tag "
            f"that the file 'latest' names, here {latest!r}; write {folder.name!r} into that file"
        )
    if with_state and saved.groups is not None:
        _check_groups(saved.groups, [list(group) for group in engine._get_zero_param_shapes()])
    return [f"{folder.name}, saved on {saved.world_size} ranks"]


def _check_world_size(folder: Path, saved_on: int, engine: DeepSpeedEngine, with_state: bool) -> None:
    stage, here = engine.zero_optimization_stage(), engine.seq_dp_world_size
    weights_can_be_loaded = stage < 3 or here <= saved_on  # at stage 3 every rank reads a file of its own
    if stage == 0 or here == saved_on or (not with_state and weights_can_be_loaded):
        return
    raise ValueError(
        f"the checkpoint {str(folder)!r} was saved on {saved_on} data-parallel ranks and is loaded on {here}; load it "
        f"on {saved_on}. Another number of ranks needs DeepSpeed's universal format "
        '("checkpoint": {"load_universal": true}), and this version cannot convert a checkpoint to it yet'
        + ("; the weights alone can be loaded, with load_optimizer_states=False" if weights_can_be_loaded else "")
    )


def _latest(load_dir: str) -> str | None:
    file = Path(load_dir) / "latest"
    return file.read_text().strip() if file.is_file() else None


def _read(folder: Path, engine: DeepSpeedEngine) -> Saved:
    """What the file of this rank's model-parallel part says."""
    stage = engine.zero_optimization_stage()
    name = f"mp_rank_{engine.checkpoint_mp_rank:02d}_model_states.pt"
    by_rank = f"zero_pp_rank_0_{name}"
    file, other = (folder / by_rank, folder / name) if stage == 3 else (folder / name, folder / by_rank)
    if not file.is_file():
        if other.is_file():
            raise _wrong_stage(folder, "0, 1 or 2" if stage == 3 else "3", stage)
        raise ValueError(f"the checkpoint {str(folder)!r} has no file {file.name!r}, so there is nothing to load")
    # On meta no weights are kept, and since pytorch#170619 none are read. Client states may be any objects; DeepSpeed
    # unpickles the same file next.
    states: Mapping[str, Any] = torch.load(file, map_location="meta", weights_only=False)
    shapes = states.get("param_shapes")
    return Saved(states["dp_world_size"], None if shapes is None else [list(group) for group in shapes])


def _wrong_stage(folder: Path, saved_at: str, stage: int) -> ValueError:
    return ValueError(
        f"the checkpoint {str(folder)!r} was saved at ZeRO stage {saved_at} and is loaded at stage {stage}; load it "
        "at the stage it was saved at (1 and 2 can load each other's)"
    )


def _check_groups(saved: list[list[str]], ours: list[list[str]]) -> None:
    """DeepSpeed copies by position; it notices other lengths only, and speaks of alignment then."""
    advice = (
        "load it with the optimizer, the model, the param groups, the 'include' and the 'exclude' it was saved with"
    )
    for number, (theirs, here) in enumerate(zip(saved, ours)):
        if theirs != here:
            theirs, here = ([*group, None] for group in (theirs, here))
            found, expected = next(pair for pair in zip(theirs, here) if pair[0] != pair[1])
            raise ValueError(
                f"group {number} holds other parameters than in the checkpoint: {_named(expected)} here, "
                f"{_named(found)} there; {advice}"
            )
    if len(saved) != len(ours):
        raise ValueError(f"the checkpoint has {len(saved)} groups of parameters, this optimizer {len(ours)}; {advice}")


def _named(name: str | None) -> str:
    return "no further parameter" if name is None else repr(name)
