"""Names and shapes of a DeepSpeed checkpoint, as DeepSpeed 0.19.8 writes it. DeepSpeed itself is not needed.

::

    latest                                      the name of the newest tag
    global_step100/                             a tag
      mp_rank_00_model_states.pt                  stages 0-2: "module", whole
      zero_pp_rank_0_mp_rank_00_model_states.pt   stage 3: "module" of empty tensors, shapes in "param_shapes"
      zero/<parameter>/fp32.pt                    a universal checkpoint (ds_to_universal), beside the files above
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.deepspeed.folder import MODEL, model_files, names_in, tag_of
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.model_shapes.torch_files import load_without_elements, stored, stored_tensors
from lwopt_backend.model_shapes.types import NOT_IN_MODEL_ORDER, Contents, Stored, in_natural_order

POINTERS = ("latest", "latest_universal")


def is_deepspeed_folder(folder: Path) -> bool:
    """Whether it is a tag, or a folder of tags."""
    return (
        any((folder / pointer).is_file() for pointer in POINTERS)
        or any(map(MODEL.fullmatch, names_in(folder)))
        or any(folder.glob("zero/*/fp32.pt"))
    )


def read_deepspeed_folder(folder: Path) -> Contents:
    """The parameters of the newest tag, in the module's order. Raises ValueError for pieces of model parallelism."""
    tag = tag_of(folder, next((name for name in POINTERS if (folder / name).is_file()), POINTERS[0]))
    if any(map(MODEL.fullmatch, names_in(tag))) or not (tag / "zero").is_dir():
        first, *_ = model_files(tag)
        return Contents(f"DeepSpeed checkpoint {tag.name}", read_model_states(load_without_elements(first), first))
    return Contents(f"DeepSpeed universal checkpoint {tag.name}", _universal(tag), (NOT_IN_MODEL_ORDER,))


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
    tensors = stored_tensors({name: t for name, t in saved["module"].items() if isinstance(t, LazyTensor)})
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
        saved = load_without_elements(file)
        param = saved.get("param") if isinstance(saved, Mapping) else None
        if not isinstance(param, LazyTensor):
            raise ValueError(
                f"{file}: expected a parameter with its shape under 'param', found {type(saved).__name__}, as stage 3 "
                "writes it, flat; copy the *_model_states.pt files beside the folder zero, they hold the shapes"
            )
        tensors.append(stored(file.parent.name, param))
    return in_natural_order(tensors)
