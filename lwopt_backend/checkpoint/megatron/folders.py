"""Where Megatron keeps a checkpoint: the step's folder, and each rank's folder in it.

latest_checkpointed_iteration.txt          a number, or the word "release"
iter_0000003/mp_rank_TT[_PPP][_EEE]/       tensor, pipeline (if > 1), expert parallel rank (if > 1)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError

POINTER = "latest_checkpointed_iteration.txt"
MOST_RANKS = 2**20  # more is damage
_RANK = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,}){0,2})")
_STEP = re.compile(r"iter_(\d{7,})|release")
Coordinates = tuple[int, int, int]  # ranks: tensor, pipeline, expert parallel


def step_folder(path: Path) -> Path:
    """The folder of one step: ``path`` itself, or the one that the pointer in it names.

    Raises CheckpointError for a pointer that names none, or one that is not there.
    """
    pointer = path / POINTER
    if not pointer.is_file():
        return path
    try:
        text = pointer.read_bytes()[:100].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; name the step's folder itself") from error
    if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{pointer}: expected an iteration or 'release', found {text!r}; name the step's folder")
    found = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(
            f"{found} is missing, although {pointer} names it; copy it, or name another step's folder"
        )
    return found


def iteration_of(step: Path) -> int | None:
    """The iteration that the step folder's name says."""
    match = _STEP.fullmatch(step.name)
    return int(match[1]) if match and match[1] else None


def rank_folders(step: Path) -> dict[tuple[int, ...], Path]:
    """The ranks' folders by the numbers in their names."""
    found = {}
    for folder in sorted(step.iterdir()):
        match = _RANK.fullmatch(folder.name)
        if match and folder.is_dir():
            found[(int(match[1]), *(int(number) for number in match[2].split("_")[1:]))] = folder
    return found


def expected_folders(arguments: Mapping[str, Any]) -> dict[tuple[int, ...], Coordinates]:
    """The numbers in the names of all ranks' folders, and whose they are."""
    tensor, pipeline, expert = (world(arguments)[size] for size in ("tp", "pp", "ep"))
    return {
        (t, *((p,) if pipeline > 1 else ()), *((e,) if expert > 1 else ())): (t, p, e)
        for t in range(tensor)
        for p in range(pipeline)
        for e in range(expert)
    }


def world(arguments: Mapping[str, Any]) -> dict[str, int]:
    """How many ranks there are of each kind of parallelism. Raises CheckpointError for numbers that cannot be."""
    names = {
        "dp": "data_parallel_size",
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "cp": "context_parallel_size",
    }
    found = {short: int(arguments.get(name) or 1) for short, name in names.items()}
    of_model = math.prod(found[short] for short in ("tp", "pp", "ep"))
    if min(found.values()) < 1 or max(of_model, *found.values()) > MOST_RANKS:
        sizes = ", ".join(f"{name} {found[short]}" for short, name in names.items())
        raise CheckpointError(f"no checkpoint is of so many ranks as args say ({sizes}); copy it again")
    return found
