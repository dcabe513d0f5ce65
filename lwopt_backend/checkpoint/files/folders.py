"""Files and folders: checks of their paths, and writing them whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files.threads import all_done

NEW = ".lwopt-new"
Content = str | bytes | Path  # of a file; a path is of one to copy


def write_whole(path: str | Path, content: bytes) -> None:
    """Replace the file ``path`` by ``content`` atomically: no reader sees half of it, and a failure changes nothing.
    Creates its folder. The bytes are flushed to disk before the file gets its name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda file: file.write(content))


def put_whole(path: Path, content: Content) -> None:
    """As ``write_whole``; a file to copy may have any size."""
    if not isinstance(content, Path):
        write_whole(path, content.encode() if isinstance(content, str) else content)
        return
    with content.open("rb") as source:
        _replace(path, lambda file: shutil.copyfileobj(source, file))


def _replace(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    temporary = temporary_of(path, NEW)
    try:
        with temporary.open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(path: Path, ending: str) -> Path:
    """A unique name in the same folder for an unfinished file or folder, so that it can be renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ending}")


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Folders that are written whole or not at all, and the small files that point to them.
# A folder is filled under a temporary name in the same parent, flushed to disk, and renamed; no folder is replaced.
# Pointers (``latest``, ``latest_universal``) are written last. Temporary names begin with a dot and end in
# ``.lwopt-new``; no pointer may name one. A killed program leaves its temporary folder, which is never read.

FLUSHES = 8  # files flushed at a time: a file system commits waiting ones together


def write_folder(target: Path, fill: Callable[[Path], None], *, beside: Mapping[str, Content] | None = None) -> None:
    """Make ``target`` a folder with what ``fill`` writes to an empty one; then write what is ``beside`` it, by file
    name and in order.

    Raises CheckpointError if the target exists, and for a name outside the folder; also raises the errors of ``fill``.
    After an error, nothing of the new folder remains.
    """
    for name in (target.name, *(beside or {})):
        check_name(name, "a folder's or a pointer's name")
    refuse_existing(target)
    missing = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = temporary_of(target, NEW)
        new.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made: {error}") from error
    try:
        fill(new)
        found = list(os.walk(new, topdown=False))
        all_done([partial(flush, Path(place, name)) for place, _, files in found for name in files], FLUSHES)
        for place, _, _ in found:
            flush(Path(place))
        refuse_existing(target)  # another program may have been faster
        new.rename(target)
        flush(target.parent)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in missing:  # from the innermost to the first that is not empty
                folder.rmdir()
        if isinstance(error, OSError):  # a full disk's error names no file
            raise CheckpointError(f"{target} was not written: {error}") from error
        raise
    for name, content in (beside or {}).items():
        path = target.with_name(name)
        try:
            put_whole(path, content)
        except OSError as error:
            to_do = f"write {content!r} into it" if isinstance(content, str) else "write it again"
            raise CheckpointError(f"{path} was not written: {error}; {to_do}") from error


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError if there is anything at ``target``, including a broken link."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists, and nothing is replaced; choose another name, or remove it")


def read_pointer(path: Path) -> Path:
    """The folder that a pointer names, in the pointer's own folder. Raises CheckpointError if there is none."""
    try:
        name = path.read_bytes()[:4096].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give the folder that it should name") from error
    if not name:
        raise CheckpointError(f"{path} is empty, because its save was interrupted; give one step's folder")
    check_name(name, str(path))
    found = path.with_name(name)
    if not found.is_dir():
        raise CheckpointError(
            f"{path}: expected the name of a folder in {path.parent}, found {name!r}; give one step's folder"
        )
    return found


def check_name(name: str, where: str) -> None:
    """Raises CheckpointError unless a name from a file stays in the folder in which it is used."""
    if not name or name in (".", "..") or any(sign in name for sign in ("/", "\\", "\0")) or is_temporary(name):
        raise CheckpointError(
            f"{where}: expected the name of one file or folder, found {name!r}, which leads elsewhere; do not use this "
            "checkpoint unless you know who made it"
        )


def is_temporary(name: str) -> bool:
    """Whether it is the name of an unfinished file or folder."""
    return name.startswith(".") and name.endswith(NEW)
