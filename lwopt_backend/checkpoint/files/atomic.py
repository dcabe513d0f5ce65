"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

NEW = ".lwopt-new"


def write_whole(path: str | Path, content: bytes) -> None:
    """Make ``path`` a file with ``content``: nobody sees half of it, and if it fails, what was there stays.

    Makes its folder. The bytes are on the disk before they get the name.
    """
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
    """A name of its own for something unfinished, in the same folder, so that it can be renamed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{ending}")


def flush(path: Path) -> None:
    """Have the disk hold a file's bytes, or a folder's names."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
