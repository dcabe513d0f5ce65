"""Names and shapes of a folder by torch.distributed.checkpoint (DCP), from its file ``.metadata`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.dcp.files import METADATA, DcpFolder
from lwopt_backend.model_shapes.torch_files import state_dict_in
from lwopt_backend.model_shapes.types import Contents, Stored


def is_dcp_folder(folder: Path) -> bool:
    """Whether DCP wrote it; Megatron's formats, which it also writes, are to be asked first."""
    return (folder / METADATA).is_file()


def read_dcp_folder(folder: Path) -> Contents:
    """The model's tensors, whole, in the order of the state dict that was saved. Raises ValueError."""
    found = DcpFolder(folder, metadata_only=True)
    tensors = {name: Stored(name, entry.shape, entry.dtype.is_floating_point) for name, entry in found.tensors.items()}
    named = state_dict_in(_nested(tensors, found.paths), folder / METADATA, Stored)
    return Contents(
        f"torch.distributed.checkpoint folder {folder.name}",
        tuple(Stored(name, stored.shape, stored.floating) for name, stored in named.items()),
    )


def _nested(tensors: Mapping[str, Stored], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The saved dictionary of dictionaries. ``paths``: its way to each flat name, if the writer flattened one."""
    tree: dict[str, Any] = {}
    for name in [name for name in paths if name in tensors] + [name for name in tensors if name not in paths]:
        *outer, key = map(str, paths.get(name, (name,)))
        branch = tree
        for part in outer:
            branch = branch.setdefault(part, {})
        branch[key] = tensors[name]
    return tree
