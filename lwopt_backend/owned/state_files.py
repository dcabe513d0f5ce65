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

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lwopt_backend.owned.state_index import Index


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
