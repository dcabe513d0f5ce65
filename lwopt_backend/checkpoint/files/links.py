"""What a checkpoint's folder must not have in it."""

from __future__ import annotations

import os
from pathlib import Path

from lwopt_backend.checkpoint.contents import CheckpointError


def check_links(folder: Path) -> None:
    """Raises CheckpointError for a link that leads out of a folder, and for what is no file: reading a pipe waits."""
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise CheckpointError(
                f"{path} is a link that leads out of the folder, to {os.readlink(path)}; put what it leads to in its "
                "place, if you know who made it"
            )
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path} is neither a file nor a folder; no checkpoint has such: remove it")
