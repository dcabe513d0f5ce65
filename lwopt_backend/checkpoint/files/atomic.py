"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

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
