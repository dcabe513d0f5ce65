"""Optimizer state in a folder, one file per rank, that any number of ranks with any layout can load.

::

    optimizer.json                    the index, written last: which files, where which piece lies
    optimizer-<save>-rank00000.pt     pieces of state and masters by parameter, and the param groups
    optimizer-<save>-rank00001.pt     pieces of state and masters

Every file is written under another name, flushed to the disk and renamed. Files carry their name, and with it the id of
their save; those of the one before are removed once the new index is in place, so the index, if there is one, is always
that of a whole save.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree, check_in_all
from lwopt_backend.storage.owned import OwnedCore
from lwopt_backend.storage.owned_state import (
    Groups,
    StatePiece,
    check_between_steps,
    check_tensor,
    matrices_of,
    options_of,
    state_pieces,
)


def file_name(save: str, rank: int) -> str:
    return f"optimizer-{save}-rank{rank:05d}.pt"


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> int:
    """Write a file so that under its name there is all of it or nothing, also after a crash; its bytes."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path.stat().st_size


def remove_others(folder: Path, index: Index) -> None:
    """Remove the files of all saves but that of ``index``."""
    for pattern in ("optimizer-*-rank*.pt", "optimizer-*-rank*.pt.tmp"):
        for path in folder.glob(pattern):
            if path.name not in index.files:
                path.unlink(missing_ok=True)


def check_files(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Raises FileNotFoundError or ValueError unless these files are there in full length."""
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; the folder has to be the same one for all ranks")
        found = path.stat().st_size
        if found != index.files[name]:
            raise ValueError(f"{path} is damaged: expected {index.files[name]} bytes, found {found}")


def open_file(folder: Path, name: str) -> Mapping[str, Any]:
    """A file's content, its tensors mapped into memory and not read yet."""
    try:
        content: Mapping[str, Any] = torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
        found = content["name"]
    except Exception as error:
        raise ValueError(f"{folder / name} is damaged or not a file of optimizer state: {error}") from error
    if found != name:
        raise ValueError(f"{folder / name} has the content of {found}, a file of another save or rank")
    return content


# The index of a folder of optimizer state: which save, which files, and in which of them lies which piece.
#
# It is written last, so a folder without one is not a checkpoint; it names the files of one save and no others.

INDEX = "optimizer.json"
FORMAT, VERSION = "lwopt_backend owned optimizer state", 1


@dataclass(frozen=True)
class SavedParam:
    """One parameter. ``group`` is the key of its param group; ``pieces`` are (start, stop, file)."""

    shape: tuple[int, ...]
    dtype: str
    rule: str
    group: str
    pieces: tuple[tuple[int, int, str], ...] = ()

    def overlapping(self, start: int, stop: int) -> list[tuple[int, int, str]]:
        return [piece for piece in self.pieces if piece[0] < stop and start < piece[1]]


@dataclass(frozen=True)
class Index:
    """``save`` is its id; ``files`` by name are their bytes, ``options`` the one with the param groups."""

    save: str
    files: Mapping[str, int]
    options: str
    params: Mapping[str, SavedParam]

    def __post_init__(self) -> None:
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"the file name {name!r} leads out of the folder")
        if self.options not in self.files:
            raise ValueError(f"the param groups' file {self.options!r} is not one of its files")
        for key, param in self.params.items():
            end = 0
            for start, stop, name in sorted(param.pieces):
                if start != end or name not in self.files:
                    raise ValueError(f"parameter {key!r}: element {end} is next, the piece [{start}, {stop}) of {name}")
                end = stop
            if end != math.prod(param.shape):
                raise ValueError(f"parameter {key!r} of shape {param.shape}: its pieces end at {end}")

    def text(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})


def read_index(folder: Path) -> Index:
    """Raises FileNotFoundError where there is none, ValueError for one that is not complete or not ours."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no optimizer state, or its saving was not finished: there is no {INDEX}, which is "
            "written last. A checkpoint that something else wrote is brought here with lwopt convert --to owned"
        )
    try:
        return _parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or not an index of optimizer state: {error}") from error


def _parse(content: Mapping[str, Any]) -> Index:
    if content["format"] != FORMAT:
        raise ValueError(f"expected the format {FORMAT!r}, found {content['format']!r}")
    if content["version"] != VERSION:
        raise ValueError(f"it is of version {content['version']}, this program reads version {VERSION}")
    params = {
        key: SavedParam(
            tuple(entry["shape"]),
            entry["dtype"],
            entry["rule"],
            entry["group"],
            tuple((int(start), int(stop), str(name)) for start, stop, name in entry["pieces"]),
        )
        for key, entry in content["params"].items()
    }
    return Index(content["save"], dict(content["files"]), content["options"], params)


# What a checkpoint calls the parameters and param groups of all ranks, whoever owns and shares them.


@dataclass(frozen=True)
class Names:
    """``keys`` of this rank's members by number; ``params`` are those of all ranks, without pieces."""

    keys: Mapping[int, str]
    params: Mapping[str, SavedParam]


def names_of(core: OwnedCore, groups: Groups) -> Names:
    """A parameter's key is its name. Where several sets of ranks have other experts under one name, it says whose.

    Sets are numbered by their lowest rank. Called on all ranks.
    """
    everyone = core.holdings[0].sharers.everyone
    places, mine = {}, []
    for share, held in enumerate(core.holdings):
        number = 0
        if share:
            lowest = min(held.sharers.everyone.gather_objects(everyone.rank))
            number = sorted(set(everyone.gather_objects(lowest))).index(lowest)
        for member in held.numbers:
            found = core.members[member]
            places[member] = (share, number, found.name)
            group = group_key(groups[found.group])
            if held.sharers.everyone.rank == 0:
                param = SavedParam(tuple(found.param.shape), found.dtype, found.rule, group)
                mine.append((places[member], param))
    entries = [entry for of_rank in everyone.gather_objects(mine) for entry in of_rank]
    count: dict[str, int] = {}
    for (_, _, name), _ in entries:
        count[name] = count.get(name, 0) + 1

    def key(place: tuple[int, int, str]) -> str:
        _, number, name = place
        return name if count[name] == 1 else f"{name} of expert set {number}"

    return Names({m: key(place) for m, place in places.items()}, {key(place): param for place, param in entries})


def group_key(group: Mapping[str, Any]) -> str:
    """The same on all ranks for the same half of the user's group, and different for others."""
    return f"{group['from_group']}.{group['rule']}"


def common_options(core: OwnedCore, groups: Groups) -> dict[str, dict[str, Any]]:
    """The hyperparameters of all ranks' param groups, by key. Called on all ranks.

    Raises ValueError, on all of them, if ranks have different ones or some that ``torch.load`` would not read.
    """
    everyone = core.holdings[0].sharers.everyone
    mine = {group_key(group): options_of(group) for group in groups}
    check_in_all([everyone], "save_state_dict", lambda: _check_readable(mine))
    common: dict[str, dict[str, Any]] = {}
    for rank, of_rank in enumerate(everyone.gather_objects(mine)):
        for key, options in of_rank.items():
            expected = common.setdefault(key, options)
            wrong = [
                o
                for o in {**expected, **options}
                if repr(expected.get(o, "nothing")) != repr(options.get(o, "nothing"))
            ]
            if wrong:
                raise ValueError(
                    f"param group {key}: ranks differ in {wrong[0]!r}, rank {rank} has "
                    f"{options.get(wrong[0], 'nothing')!r}, one before it {expected.get(wrong[0], 'nothing')!r}; set "
                    "it alike on all ranks"
                )
    return common


def _check_readable(options: Mapping[str, Mapping[str, Any]]) -> None:
    for group, entries in options.items():
        for key, value in entries.items():
            try:
                stored = io.BytesIO()
                torch.save(value, stored)
                stored.seek(0)
                torch.load(stored, weights_only=True)
            except Exception as error:
                raise ValueError(
                    f"param group {group}: the value {value!r} of {key!r} cannot be read back with "
                    f"torch.load(weights_only=True); keep it elsewhere. {error}"
                ) from error


# Reading from a folder what this rank owns, whatever ranks and layout have written it.

LOADING = "load_state_dict_from"


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

    index, options = agree(everyone, LOADING, check)
    agree(everyone, LOADING, take)
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


# Writing the state of all ranks into a folder.

SAVING = "save_state_dict"


def save(core: OwnedCore, groups: Groups, folder: Path) -> None:
    """Write the state of all ranks into ``folder``, which all of them see. Called on all ranks.

    Raises, on all of them, what went wrong on any. The save that the folder held can then still be loaded, and what is
    left of this one goes with the next.
    """
    everyone = core.holdings[0].sharers.everyone
    names, options = names_of(core, groups), common_options(core, groups)
    save_id = everyone.gather_objects(secrets.token_hex(8))[0]
    path = folder / file_name(save_id, everyone.rank)
    written: dict[str, tuple[int, int]] = {}

    def write() -> tuple[int, list[str]]:
        check_between_steps(core)
        folder.mkdir(parents=True, exist_ok=True)
        pieces = {}
        for piece in state_pieces(core, first_instance=True):
            key = names.keys[piece.member]
            owner = {place: nested.plain(state) for place, state in piece.owner.items()}
            pieces[key] = {"start": piece.start, "stop": piece.stop, "tensors": piece.tensors, "owner": owner}
            if owner:
                pieces[key]["matrices"] = matrices_of(core, piece.member)
            written[key] = (piece.start, piece.stop)
        if not pieces and everyone.rank > 0:
            return 0, []
        content = {"name": path.name, "pieces": pieces, "options": options if everyone.rank == 0 else {}}
        return write_whole(path, lambda file: torch.save(content, file)), []

    def finish() -> tuple[None, list[str]]:
        if everyone.rank == 0:
            index = _indexed(save_id, names, files, path.name)
            check_files(folder, index, index.files)
            write_whole(folder / INDEX, lambda file: file.write(index.text().encode()))
            remove_others(folder, index)
        return None, []

    try:
        nbytes = agree(everyone, SAVING, write)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    files = [entry for entry in everyone.gather_objects((path.name, nbytes, written)) if entry[1]]
    agree(everyone, SAVING, finish)


def _indexed(save_id: str, names: Names, files: list[Any], options: str) -> Index:
    pieces: dict[str, list[tuple[int, int, str]]] = {key: [] for key in names.params}
    for name, _, written in files:
        for key, (start, stop) in written.items():
            pieces[key].append((start, stop, name))
    params = {key: replace(param, pieces=tuple(sorted(pieces[key]))) for key, param in names.params.items()}
    return Index(save_id, {name: nbytes for name, nbytes, _ in files}, options, params)
