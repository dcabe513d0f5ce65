"""Files and folders: what they must not contain; writing them whole or not at all; recovery."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files.made import Stub, all_done

NEW = ".lwopt-new"


def write_whole(path: str | Path, content: bytes) -> None:
    """Replace the file ``path`` by ``content`` atomically: no reader sees half of it, and a failure changes nothing.
    Creates its folder. The bytes are flushed to disk before the file gets its name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(path, NEW)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def beside(path: Path, ending: str) -> Path:
    """A unique name in the same folder for an unfinished file or folder, so that it can be renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ending}")


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_links(folder: Path) -> None:
    """Raises CheckpointError for a link that leads out of a folder, and for special files: reading a pipe blocks."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise CheckpointError(
                f"{path} is a link that leads out of the folder, to {os.readlink(path)}; put what it leads to in its "
                "place, if you know who made it"
            )
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path} is neither a file nor a folder; no checkpoint has such: remove it")


# Structures from files, limited so that any code may walk, print and compare them.

DEEPEST = 100  # levels; checkpoints have about 15, and Python's own limit is met at a few hundred
SHARED = 1  # times a file's bytes: the limit of elements if everything shared were written out
CHARACTERS = 64  # characters of a text that count as one element
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (dict, Stub, *_SEQUENCES)
_TEXTS = (str, bytes, bytearray)
_SINGLE = frozenset({int, float, bool, type(None), torch.dtype, torch.Size})  # the most frequent types


def check_tree(found: Any, nbytes: int) -> None:
    """Raises ValueError for a structure that contains itself, is nested too deep, or far exceeds its file's ``nbytes``.
    A pickle may use a part again and again: 60 lists, each of which is in the next one twice, have 2**60 elements."""
    most = SHARED * nbytes + 2**17
    done: dict[int, tuple[int, int]] = {}  # elements and levels, of containers by id; ``found`` keeps them alive
    open_now: set[int] = set()  # the containers around the current one

    def measured(value: Any, depth: int) -> tuple[int, int]:
        if id(value) in open_now:
            raise ValueError(f"a {type(value).__name__} in it holds itself")
        if depth < DEEPEST and id(value) not in done:
            open_now.add(id(value))
            count, inner = _contents(value)
            inside = [measured(part, depth + 1) for part in inner]
            open_now.remove(id(value))
            count += sum(elements for elements, _ in inside)
            if count > most:
                many = f"a {type(value).__name__} in it would have {count} elements"
                raise ValueError(f"{many}, as it uses parts again and again")
            done[id(value)] = count, 1 + max((levels for _, levels in inside), default=0)
        if depth + done.get(id(value), (0, DEEPEST))[1] > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        return done[id(value)]

    measured(found, 0)


def _contents(value: Any) -> tuple[int, list[Any]]:
    """The number of a value's own elements, and the containers in it."""
    parts: Iterable[Any] = value if isinstance(value, _SEQUENCES) else ()
    if isinstance(value, dict):
        parts = itertools.chain(value.keys(), value.values())
    elif isinstance(value, Stub):
        parts = vars(value).values()
    count, inner = 1, []
    for part in parts:
        if type(part) not in _SINGLE and isinstance(part, _CONTAINERS) and part:
            inner.append(part)
        else:
            count += 1 + (len(part) // CHARACTERS if isinstance(part, _TEXTS) else 0)
    return count, inner


# Folders that are written whole or not at all, and the small files that point to them.
# A folder is filled under a temporary name beside its own, flushed to disk, and renamed. A folder that it replaces is
# moved aside first and removed afterwards; ``recover`` restores it if the program ended between the two renames. So the
# old state or the new one always exists. Temporary names begin with a dot and end in ``.lwopt-new`` or ``.lwopt-old``;
# no pointer may name one. Pointers (``latest``, ``latest_universal``) are written last.
# If two programs write the same folder at once, the later one removes the unfinished folder of the earlier one, which
# then fails.

OLD = ".lwopt-old"
FLUSHES = 8  # files that are flushed at a time: a file system commits what waits together


def write_folder(
    target: Path, fill: Callable[[Path], None], *, force: bool = False, pointers: Mapping[str, str] | None = None
) -> None:
    """Make ``target`` a folder with what ``fill`` writes to an empty one; then write ``pointers`` beside it.

    Pointers are texts by file name, written in order. Raises CheckpointError if the target exists, unless ``force``,
    and for a name that leads elsewhere; also raises what ``fill`` raises. After an error, ``target`` is as it was, and
    nothing of the new folder is left.
    """
    for name in (target.name, *(pointers or {})):
        check_name(name, "a folder's or a pointer's name")
    recover(target)
    if not force:
        refuse_existing(target)
    missing = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for name in (target.name, *(pointers or {})):
            for path in _left_over(target.with_name(name)):
                _remove(path)
        new = beside(target, NEW)
        new.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made: {error}") from error
    try:
        fill(new)
        found = list(os.walk(new, topdown=False))
        all_done([partial(flush, Path(place, name)) for place, _, files in found for name in files], FLUSHES)
        for place, _, _ in found:
            flush(Path(place))
        if not force:
            refuse_existing(target)  # another program may have been faster
        _put_in_place(new, target)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in missing:  # from the innermost to the first that is not empty
                folder.rmdir()
        if isinstance(error, OSError):  # that of a full disk names no file
            raise CheckpointError(f"{target} is as it was, nothing is written: {error}") from error
        raise
    for name, text in (pointers or {}).items():
        path = target.with_name(name)
        try:
            write_whole(path, text.encode())
        except OSError as error:
            raise CheckpointError(f"{path} is not written: {error}; it has to name {text!r}") from error


def refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; choose another name, or replace it with --force")


def read_pointer(path: Path) -> Path:
    """The folder that a pointer names, which must lie beside it. Raises CheckpointError if there is none."""
    try:
        name = path.read_bytes()[:4096].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give the folder that it should name") from error
    check_name(name, str(path))
    found = path.with_name(name)
    if not found.is_dir():
        raise CheckpointError(
            f"{path}: expected the name of a folder beside it, found {name!r}; give one step's folder"
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
    """Whether it is the name of something unfinished or about to be removed."""
    return name.startswith(".") and name.endswith((NEW, OLD))


def recover(target: Path) -> None:
    """Restore the folder that a program moved aside, if it ended before the new one was in its place."""
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    for path in _left_over(target):
        if path.name.endswith(OLD):
            path.rename(target)
            flush(target.parent)
            return


def recover_within(folder: Path) -> None:
    """``recover`` for everything that was moved aside in a folder."""
    for path in folder.iterdir():
        if path.name.endswith(OLD) and _belongs_to(path.name):
            recover(path.with_name(_belongs_to(path.name)))


def _put_in_place(new: Path, target: Path) -> None:
    if not os.path.lexists(target):
        new.rename(target)
        flush(target.parent)
        return
    old = beside(target, OLD)
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    flush(target.parent)
    _remove(old)


def _belongs_to(temporary: str) -> str:
    """The final name of something unfinished or moved aside; empty for other names."""
    found = re.fullmatch(rf"\.(.+)\.[0-9a-f]+({NEW}|{OLD})", temporary, re.DOTALL)
    return found[1] if found else ""


def _left_over(target: Path) -> list[Path]:
    return [path for path in target.parent.iterdir() if _belongs_to(path.name) == target.name]


def _remove(path: Path) -> None:
    """Remove something unfinished or replaced, if possible; a later program removes what stays. It is renamed first, so
    that a program that still fills it cannot put a part of it in place."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            gone = beside(path.with_name(_belongs_to(path.name)), NEW)
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
