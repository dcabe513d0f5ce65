"""Names and shapes of a DeepSpeed checkpoint, as DeepSpeed 0.19.8 writes it. DeepSpeed itself is not needed.

::

    latest                                      the name of the newest tag
    global_step100/                             a tag
      mp_rank_00_model_states.pt                  stages 0-2: "module", whole
      zero_pp_rank_0_mp_rank_00_model_states.pt   stage 3: "module" of empty tensors, shapes in "param_shapes"
      zero/<parameter>/fp32.pt                    a universal checkpoint (ds_to_universal), beside the files above
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lwopt_backend.model_shapes.torch_files import load_on_meta, stored_tensors
from lwopt_backend.model_shapes.types import NOT_IN_MODEL_ORDER, Contents, Stored, in_natural_order

POINTERS = ("latest", "latest_universal")
MODEL_STATES = "*mp_rank_*_model_states.pt"


def is_deepspeed_folder(folder: Path) -> bool:
    """Whether it is a tag, or a folder of tags."""
    return (
        any((folder / pointer).is_file() for pointer in POINTERS)
        or any(folder.glob(MODEL_STATES))
        or any(folder.glob("zero/*/fp32.pt"))
    )


def read_deepspeed_folder(folder: Path) -> Contents:
    """The parameters of the newest tag, in the module's order. Raises ValueError for pieces of model parallelism."""
    tag = _tag(folder)
    files = sorted(tag.glob(MODEL_STATES))
    apart = [file.name for file in files if "expert" in file.name]
    if apart:
        raise ValueError(
            f"{tag}: expected one file with the whole model, found experts in files of their own ({apart[0]}); list "
            "the shapes in a JSON file"
        )
    pieces = {re.search(r"mp_rank_(\d+)", file.name)[1] for file in files}  # type: ignore[index]  # MODEL_STATES has it
    if len(pieces) == 1:
        whole = min(files, key=lambda file: (len(file.name), file.name))  # data-parallel rank 0: the lowest number
        return Contents(f"DeepSpeed checkpoint {tag.name}", read_model_states(load_on_meta(whole), whole))
    if (tag / "zero").is_dir():
        return Contents(f"DeepSpeed universal checkpoint {tag.name}", _universal(tag), (NOT_IN_MODEL_ORDER,))
    found = f"the pieces of {len(pieces)} model-parallel ranks" if pieces else "none"
    raise ValueError(
        f"{tag}: expected a file mp_rank_00_model_states.pt with the whole model, found {found}; "
        "convert the checkpoint with deepspeed's ds_to_universal, or list the shapes in a JSON file"
    )


def _tag(folder: Path) -> Path:
    pointer = next((folder / name for name in POINTERS if (folder / name).is_file()), None)
    if pointer is None:
        return folder
    tag = folder / pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not tag.is_dir():
        raise ValueError(
            f"{pointer}: expected the name of a folder beside it, found {tag.name!r}; give the tag's folder"
        )
    return tag


def read_model_states(saved: Any, where: Path) -> tuple[Stored, ...]:
    """The parameters in a file of model states; those that no optimizer trained are frozen."""
    if not (isinstance(saved, Mapping) and isinstance(saved.get("module"), Mapping)):
        raise ValueError(
            f"{where}: expected DeepSpeed's model states with the weights under 'module', found none there, as with "
            "pipeline parallelism; list the shapes in a JSON file"
        )
    buffers, shared = set(saved.get("buffer_names") or ()), saved.get("shared_params") or {}
    groups = saved.get("param_shapes")  # one mapping per param group; None at stage 0
    trained = {name: shape for group in groups or () for name, shape in group.items()}
    shapes = {**trained, **(saved.get("frozen_param_shapes") or {})}
    tensors = stored_tensors({name: t for name, t in saved["module"].items() if isinstance(t, Tensor)})
    return tuple(
        Stored(
            t.name,
            tuple(shapes.get(t.name, t.shape)),
            t.floating,
            frozen=groups is not None and t.name not in trained,
            aliases=t.aliases or tuple(alias for alias, name in shared.items() if name == t.name),
        )
        for t in tensors
        if t.name not in buffers and t.name not in shared
    )


def _universal(tag: Path) -> tuple[Stored, ...]:
    tensors = []
    for file in tag.glob("zero/*/fp32.pt"):
        saved = load_on_meta(file)
        param = saved.get("param") if isinstance(saved, Mapping) else None
        if not isinstance(param, Tensor):
            raise ValueError(
                f"{file}: expected a parameter with its shape under 'param', found {type(saved).__name__}, as stage 3 "
                "writes it, flat; copy the *_model_states.pt files beside the folder zero, they hold the shapes"
            )
        tensors.append(Stored(file.parent.name, tuple(param.shape), param.is_floating_point()))
    return in_natural_order(tensors)
