"""Names and shapes of a folder by torch.distributed.checkpoint (DCP), from its file ``.metadata``.

The file is a pickle, and unpickling can run code. So nothing that it names is ever looked up: every class in it becomes
an inert stand-in that only remembers its state, which is where the names and shapes are.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.model_shapes.torch_files import state_dict_in
from lwopt_backend.model_shapes.types import Contents, Stored

METADATA = ".metadata"


class _Inert:
    """Stands for an object of any class: takes what unpickling gives it, and does nothing."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def __getitem__(self, key: str) -> Any:
        """A field of the dataclass this stands for."""
        return self.state[key]


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        known = getattr(torch, name, None) if module == "torch" else None
        return known if isinstance(known, torch.dtype) else type(name, (_Inert,), {})


def read_dcp_folder(folder: Path) -> Contents:
    """The model's tensors, whole, in the order of the state dict that was saved. Raises ValueError."""
    path = folder / METADATA
    try:
        metadata = _InertUnpickler(io.BytesIO(path.read_bytes())).load()
        tensors = {name: _stored(entry) for name, entry in metadata["state_dict_metadata"].items() if _is_tensor(entry)}
        tree = _nested(tensors, metadata["planner_data"])
    except Exception as error:  # whatever a truncated or foreign pickle makes of the reader
        raise ValueError(
            f"{path}: expected the metadata of torch.distributed.checkpoint, found something else "
            f"({type(error).__name__}: {error}); copy the folder again"
        ) from error
    named = state_dict_in(tree, path, Stored)
    found = [Stored(name, stored.shape, stored.floating) for name, stored in named.items()]
    return Contents(f"torch.distributed.checkpoint folder {folder.name}", tuple(found))


def _is_tensor(entry: Any) -> bool:
    return type(entry).__name__ == "TensorStorageMetadata"


def _stored(entry: Any) -> Stored:
    dtype = entry["properties"].state[0]  # TensorProperties pickles itself as a tuple
    return Stored("", tuple(entry["size"]), dtype.is_floating_point)


def _nested(tensors: Mapping[str, Stored], paths: Any) -> dict[str, Any]:
    """The saved dictionary of dictionaries. ``paths``: its way to each flat name, if the writer flattened one."""
    paths = paths if isinstance(paths, Mapping) else {}
    tree: dict[str, Any] = {}
    for name in [name for name in paths if name in tensors] + [name for name in tensors if name not in paths]:
        *outer, key = map(str, paths.get(name, (name,)))
        branch = tree
        for part in outer:
            branch = branch.setdefault(part, {})
        branch[key] = tensors[name]
    return tree
