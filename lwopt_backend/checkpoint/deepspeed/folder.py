"""Where the files of a DeepSpeed checkpoint are, by DeepSpeed 0.19.8's names.

::

    latest                                               the newest tag; latest_universal the same of universal ones
    global_step100/                                      a tag
      mp_rank_00_model_states.pt                           stages 0-2: the module, counters; at stage 0 the optimizer
      zero_pp_rank_1_mp_rank_00_model_states.pt            stage 3: of every rank, the module without weights
      [bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt     stages 1-3: of every rank, its part of the optimizer
      zero/<parameter>/<key>.pt                            a universal checkpoint
"""

from __future__ import annotations

import re
from pathlib import Path

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files.folders import read_pointer

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
UNIVERSAL_MARK = Path("zero", "optimizer_state.pt")
CONVERT = "convert it with DeepSpeed's ds_to_universal first, where that can, and give the folder it makes"


def tag_of(path: Path, pointer: str) -> Path:
    """The tag's folder: the one that ``pointer`` in ``path`` names, or ``path``. Raises CheckpointError."""
    file = path / pointer
    return read_pointer(file) if file.is_file() else path


def names_in(folder: Path) -> list[str]:
    """The files in a folder; none in what is no folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def model_files(tag: Path) -> list[Path]:
    """The files of model states, by data-parallel rank; one at stages 0 to 2.

    Raises CheckpointError for one of several model-parallel ranks or with experts apart, and if a file is missing.
    """
    names = names_in(tag)
    apart = [name for name in names if name.startswith(("layer_", "expp_rank_"))]
    if apart:
        raise CheckpointError(
            f"{tag} has parts of the model in files of their own ({apart[0]}), as pipelines and expert parallelism "
            f"write them, which are not read here; {CONVERT}"
        )
    found = {(int(m[1] or 0), int(m[2])): name for name in names if (m := MODEL.fullmatch(name))}
    parts = {part for _, part in found}
    if len(parts) > 1:
        raise CheckpointError(
            f"{tag} holds the parts of {len(parts)} model-parallel ranks; how they fit together is not in the "
            f"checkpoint. {CONVERT.capitalize()}"
        )
    return _complete(tag, {rank: name for (rank, _), name in found.items()}, "mp_rank_00_model_states.pt")


def optimizer_files(tag: Path, ranks: int) -> list[Path]:
    """The files of the optimizer's state by data-parallel rank. Raises CheckpointError if there are not ``ranks``."""
    found: dict[int, str] = {}
    for name in names_in(tag):
        if m := OPTIMIZER.fullmatch(name):
            if int(m[1]) in found:
                raise CheckpointError(
                    f"{tag} has two files for rank {int(m[1])}, {found[int(m[1])]} and {name}, of two savings; remove "
                    "those of the older one"
                )
            found[int(m[1])] = name
    files = _complete(tag, found, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if len(files) != ranks:
        raise CheckpointError(
            f"{tag}: expected the optimizer's files of {ranks} data-parallel ranks, found {len(files)}; copy the "
            "whole folder again"
        )
    return files


def _complete(tag: Path, found: dict[int, str], first: str) -> list[Path]:
    if not found:
        raise CheckpointError(f"{tag} has no file {first}; is it the folder of a DeepSpeed checkpoint?")
    for rank in range(max(found) + 1):
        if rank not in found:
            raise CheckpointError(
                f"{tag}: the file of rank {rank} is missing beside {found[max(found)]}; copy it again"
            )
    return [tag / found[rank] for rank in range(len(found))]
