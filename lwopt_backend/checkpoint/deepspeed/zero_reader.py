"""Reads DeepSpeed's native checkpoints: ZeRO 1, 2, 3 and stage 0, of AdamW, of DeepSpeed's Muon, and of ours.

Names are the module's own. DeepSpeed itself is not needed, and no class of it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, read_as_expected
from lwopt_backend.checkpoint.deepspeed.folder import (
    MODEL,
    UNIVERSAL_MARK,
    model_files,
    names_in,
    optimizer_files,
    tag_of,
)
from lwopt_backend.checkpoint.deepspeed.model import load_mapping, read_model_states
from lwopt_backend.checkpoint.deepspeed.owned import MARK, read_owned
from lwopt_backend.checkpoint.deepspeed.partitions import read_partitions
from lwopt_backend.checkpoint.deepspeed.stage0 import read_stage0
from lwopt_backend.checkpoint.deepspeed.stage3 import read_stage3

POINTER = "latest"


def recognises(path: Path) -> bool:
    """Whether it is a tag of a native checkpoint, or a folder with a pointer to one."""
    try:
        tag = tag_of(path, POINTER)
    except CheckpointError:
        return False
    return not (tag / UNIVERSAL_MARK).is_file() and any(map(MODEL.fullmatch, names_in(tag)))


def read(path: Path) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that ``latest`` in a folder names. Raises CheckpointError."""
    tag = tag_of(path, POINTER)
    files = model_files(tag)
    return read_as_expected(lambda: _read(tag, files), tag, "DeepSpeed")


def _read(tag: Path, files: list[Path]) -> Checkpoint:
    states = read_model_states(files)
    if states.shapes is None:
        optimizer = states.saved.get("optimizer")
        if not isinstance(optimizer, Mapping):
            raise CheckpointError(f"{states.path} holds no optimizer; there is nothing to read but weights")
        if MARK in optimizer:
            return read_owned(states, [(states.path, optimizer)])
        return read_stage0(states)
    of_ranks = [(file, _optimizer_state(file)) for file in optimizer_files(tag, states.ranks)]
    if all(MARK in saved for _, saved in of_ranks):
        return read_owned(states, of_ranks)
    if all("fp32_flat_groups" in saved for _, saved in of_ranks):
        if len(files) != states.ranks:
            raise CheckpointError(
                f"{tag}: expected the model states' files of {states.ranks} ranks, found {len(files)}; copy it again"
            )
        return read_stage3(states, of_ranks)
    return read_partitions(states, of_ranks)


def _optimizer_state(file: Path) -> Mapping[str, Any]:
    saved = load_mapping(file).get("optimizer_state_dict")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{file} holds no 'optimizer_state_dict'; it is no file of ZeRO's optimizer state")
    return saved
