"""Reading from a folder what this rank owns, whatever ranks and layout have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import (
    Groups,
    StatePiece,
    check_between_steps,
    check_tensor,
    matrices_of,
    options_of,
    state_pieces,
)
from lwopt_backend.owned.state_files import check_files, open_file
from lwopt_backend.owned.state_index import Index, read_index
from lwopt_backend.owned.state_names import Names, group_key, names_of
from lwopt_backend.runtime.agreement import agree

WHAT = "load_state_dict_from"


@dataclass(frozen=True, slots=True)
class Read:
    """Parameter ``key``'s elements [start, stop), which a file has, where they overlap ``piece``."""

    piece: StatePiece
    key: str
    start: int
    stop: int


def load(core: OwnedCore, groups: Groups, folder: Path) -> list[dict[str, Any]]:
    """Take the state of what ``save`` wrote, whatever ranks and layout wrote it; the param groups to go on with.

    Called on all ranks. A rank reads the pieces that it owns, file by file. Raises, on all of them and before anything
    is changed, for a file that is missing or not of this save and for other parameters, rules or param groups.
    """
    everyone = core.holdings[0].sharers.everyone
    names = names_of(core, groups)

    def check() -> tuple[tuple[Index, dict[int, dict[str, Any]]], list[str]]:
        check_between_steps(core)
        index = read_index(folder)
        _check_params(names, index)
        reads = _reads(core, names, index)
        check_files(folder, index, [*reads, index.options])
        counters: dict[tuple[str, str], Tensor] = {}
        for name, wanted in reads.items():
            _check_pieces(core, folder, name, wanted, counters)
        options = _options_for(core, groups, names, index, open_file(folder, index.options)["options"])
        return (index, options), [index.save]

    def take() -> tuple[None, list[str]]:
        owner: dict[int, dict[int, dict[str, Any]]] = {}
        for name, wanted in _reads(core, names, index).items():
            _copy_pieces(folder, name, wanted, owner)
        for number, states in owner.items():
            core.stepper.take_owner_states(number, states)
        return None, []

    index, options = agree(everyone, WHAT, check)
    agree(everyone, WHAT, take)
    return [{**group, **options[number]} for number, group in enumerate(groups)]


def _check_params(names: Names, index: Index) -> None:
    """Raises ValueError for parameters that only one side has, and for other shapes, dtypes or rules."""
    for key in [*names.params, *index.params]:
        ours, theirs = names.params.get(key), index.params.get(key)
        if ours is None or theirs is None:
            where = "the checkpoint, and not trained here" if ours is None else "this model, and not in the checkpoint"
            raise ValueError(f"parameter {key!r} is in {where}; load a checkpoint of the same trained parameters")
        for what in ("shape", "dtype", "rule"):
            if getattr(ours, what) != getattr(theirs, what):
                found = getattr(theirs, what)
                raise ValueError(
                    f"parameter {key!r}: expected {what} {getattr(ours, what)}, the checkpoint has {found}"
                )


def _reads(core: OwnedCore, names: Names, index: Index) -> dict[str, list[Read]]:
    """By file, which saved pieces overlap which of this rank's."""
    reads: dict[str, list[Read]] = {}
    for piece in state_pieces(core):
        key = names.keys[piece.member]
        for start, stop, name in index.params[key].overlapping(piece.start, piece.stop):
            reads.setdefault(name, []).append(Read(piece, key, start, stop))
    return reads


def _check_pieces(
    core: OwnedCore, folder: Path, name: str, reads: Sequence[Read], counters: dict[tuple[str, str], Tensor]
) -> None:
    """Raises ValueError unless a file holds what the index says, in the form that this optimizer's state has."""
    pieces = open_file(folder, name)["pieces"]
    for read in reads:
        where, entry = f"{folder / name}: {read.key!r}", pieces.get(read.key)
        if entry is None or (entry["start"], entry["stop"]) != (read.start, read.stop):
            raise ValueError(f"{where}: elements [{read.start}, {read.stop}) are not there, where the index puts them")
        ours = matrices_of(core, read.piece.member)
        if entry.get("owner") and entry["matrices"] != ours:
            raise ValueError(
                f"{where}: its state is of the matrices {entry['matrices']}, here the parameter has {ours}; load it "
                "with the 'atoms' it was saved with"
            )
        saved, expected = entry["tensors"], read.piece.tensors
        if sorted(saved) != sorted(expected):
            raise ValueError(f"{where}: expected state {sorted(expected)}, found {sorted(saved)}")
        for key, tensor in expected.items():
            shape = (read.stop - read.start,) if tensor.ndim else ()
            check_tensor(f"{where}, {key!r}", saved[key], shape, tensor.dtype)
            if not tensor.ndim:
                first = counters.setdefault((read.key, key), saved[key].clone())
                if not torch.equal(first, saved[key]):
                    raise ValueError(f"{where}, {key!r}: found {saved[key].item()}, and {first.item()} in another file")


def _copy_pieces(folder: Path, name: str, reads: Sequence[Read], owner: dict[int, dict[int, dict[str, Any]]]) -> None:
    """``owner`` is filled with what rules keep beside tensors of the parameter's size, by member and matrix."""
    pieces = open_file(folder, name)["pieces"]
    for read in reads:
        owner.setdefault(read.piece.member, {}).update(pieces[read.key].get("owner", {}))
        piece, saved = read.piece, pieces[read.key]["tensors"]
        low, high = max(read.start, piece.start), min(read.stop, piece.stop)
        for key, tensor in piece.tensors.items():
            if tensor.ndim:
                into = tensor[low - piece.start : high - piece.start]
                into.copy_(saved[key][low - read.start : high - read.start])
            else:
                tensor.copy_(saved[key])


def _options_for(
    core: OwnedCore, groups: Groups, names: Names, index: Index, saved: Mapping[str, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """By a param group's number its saved hyperparameters. A group is the one that has the same members."""
    theirs: dict[int, set[str]] = {number: set() for number in range(len(groups))}
    for number, member in enumerate(core.members):
        theirs[member.group].add(index.params[names.keys[number]].group)
    ours: dict[str, set[str]] = {}
    for key, param in names.params.items():
        ours.setdefault(index.params[key].group, set()).add(param.group)
    for number, found in theirs.items():
        parts = {part for group in found for part in ours[group]}
        if len(found) > 1 or parts != {group_key(groups[number])}:
            raise ValueError(
                f"param group {number} ({groups[number]['rule']}) has the parameters of the checkpoint's groups "
                f"{sorted(found)}, which are here in {sorted(parts)}; make the same param groups"
            )
    return {number: options_of(saved[found.pop()]) for number, found in theirs.items()}
