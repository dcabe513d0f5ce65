"""The formats that can be read, and how a folder's format is recognised."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.choices import AUTO, FORMATS
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.config.options import suggestion


def find(path: Path, format: str = AUTO) -> str:
    """The name in FORMATS of a folder's format: ``format``, or the first whose reader recognises the folder.

    Raises CheckpointError if there is none.
    """
    if format != AUTO and format not in FORMATS:
        raise CheckpointError(f"unknown format {format!r}; {suggestion(format, (AUTO, *FORMATS))}")
    if not path.is_dir():
        found = "something else" if path.exists() else "nothing"
        raise CheckpointError(f"{path}: expected a checkpoint's folder, found {found}; give the folder")
    kind = format if format != AUTO else next((name for name in FORMATS if _reader(name).recognises(path)), None)
    if kind is None:
        hint = ""
        if any(path.glob("*.distcp")):
            hint = ": it has .distcp files, but no .metadata with their contents; copy all files"
        pointers = [format.pointer for format in FORMATS.values() if format.pointer]
        if name := next((name for name in pointers if (path / name).is_file()), None):
            hint = f": its file {name} names {(path / name).read_bytes()[:100]!r}, which is missing; copy all of it"
        known = "; ".join(f"{name} ({of_name.help})" for name, of_name in FORMATS.items())
        raise CheckpointError(
            f"{path}: expected a checkpoint of a known format, found none{hint}. Known formats: {known}"
        )
    return kind


def read(path: Path, format: str = AUTO) -> Checkpoint:
    """The checkpoint in a folder, of the given or the recognised format. Raises CheckpointError."""
    checkpoint: Checkpoint = _reader(find(path, format)).read(path)
    return checkpoint


def _reader(name: str) -> Any:
    return importlib.import_module(FORMATS[name].reader)
