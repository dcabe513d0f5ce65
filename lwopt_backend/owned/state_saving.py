"""Writing the state of all ranks into a folder."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import Groups, check_between_steps, matrices_of, state_pieces
from lwopt_backend.owned.state_files import check_files, file_name, remove_others, write_whole
from lwopt_backend.owned.state_index import INDEX, Index
from lwopt_backend.owned.state_names import Names, common_options, names_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree

WHAT = "save_state_dict"


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
        nbytes = agree(everyone, WHAT, write)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    files = [entry for entry in everyone.gather_objects((path.name, nbytes, written)) if entry[1]]
    agree(everyone, WHAT, finish)


def _indexed(save_id: str, names: Names, files: list[Any], options: str) -> Index:
    pieces: dict[str, list[tuple[int, int, str]]] = {key: [] for key in names.params}
    for name, _, written in files:
        for key, (start, stop) in written.items():
            pieces[key].append((start, stop, name))
    params = {key: replace(param, pieces=tuple(sorted(pieces[key]))) for key, param in names.params.items()}
    return Index(save_id, {name: nbytes for name, nbytes, _ in files}, options, params)
