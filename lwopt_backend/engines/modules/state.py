"""A state dict of all modules in a folder of torch.distributed.checkpoint, for any later split of ranks.

::

    <module>.state.<number>.<key>            each rank writes its boxes
    <module>.param_groups.<number>.<option>
    <module>.<fact>                          compared before state is loaded
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lwopt_backend.checkpoint.dcp import saving
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.engines.buffers.files import LOADING, SAVING, check_readable, opened
from lwopt_backend.engines.buffers.partial import PartialTensor
from lwopt_backend.engines.fsdp2.plan import as_shard
from lwopt_backend.engines.fsdp2.state import box_of
from lwopt_backend.runtime.agreement import check_on_all
from lwopt_backend.runtime.collectives import Collectives

STATE, GROUPS = "state", "param_groups"


def save(everyone: Collectives, state_dict: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write the state dicts of this rank's modules. Called on all ranks.

    An error on any rank is raised on all of them. The folder's earlier save can then still be loaded.
    """

    def check() -> None:
        for name, of_module in state_dict.items():
            for number, group in enumerate(of_module[GROUPS]):
                check_readable(f"module {name!r}, param group {number}", group)

    check_on_all(everyone, SAVING, check)
    saving.save(folder, _flat(state_dict), everyone, SAVING)


def read(
    everyone: Collectives, owned: Collection[str], state_dict: Mapping[str, Any], folder: Path, check: bool = True
) -> dict[str, dict[str, Any]]:
    """The contents of a save: all modules' names, and this rank's part of the modules in its ``state_dict``.

    ``owned`` are plain modules. Called on all ranks, which raise for a folder that cannot be read.
    """
    source = opened(everyone, folder, check)
    found: dict[str, dict[str, Any]] = {str(path[0]): {STATE: {}, GROUPS: {}} for path in source.paths.values()}

    def take() -> None:
        here = _flat(state_dict)
        some = {path[:3] for path, value in here.items() if isinstance(value, PartialTensor) and value.boxes}
        for key, path in source.paths.items():
            # A parameter, or a matrix in it, that other ranks own: they have the state that this rank lacks. Any other
            # key is unexpected, and the optimizer refuses it.
            is_theirs = path[0] in owned and path[1] == STATE and path not in here
            if is_theirs and (path[3].startswith("[") or path[:3] not in some):
                continue
            if path[0] in state_dict:
                place = found[path[0]]
                for step in path[1:-1]:
                    place = place.setdefault(step, {})
                place[path[-1]] = _read(source, key, here.get(path))
        for of_module in found.values():
            of_module[GROUPS] = [group for _, group in sorted(of_module[GROUPS].items())]

    check_on_all(everyone, LOADING, take)
    return found


def _flat(state_dict: Mapping[str, Mapping[str, Any]]) -> saving.Values:
    """Modules' state dicts by path."""
    flat: saving.Values = {}
    for name, of_module in state_dict.items():
        numbered = {STATE: of_module[STATE], GROUPS: dict(enumerate(of_module[GROUPS]))}
        for kind, entries in numbered.items():
            flat.update({(name, kind, n, key): value for n, entry in entries.items() for key, value in entry.items()})
        flat.update({(name, fact): value for fact, value in of_module.items() if fact not in numbered})
    return flat


def _read(folder: DcpFolder, key: str, like: Any) -> Any:
    """This rank's part of a saved value, as of ``like``; the whole value if ``like`` is not a tensor."""
    if key in folder.objects:
        return folder.object(key)
    saved = folder.tensors[key]
    if isinstance(like, Tensor) and saved.shape != tuple(like.shape):
        raise ValueError(f"{key} in {folder.path}: expected shape {tuple(like.shape)}, found {saved.shape}")
    if isinstance(like, PartialTensor):
        boxes = {at: folder.read_box(key, at, box.shape) for at, box in like.boxes.items()}
        return PartialTensor(saved.shape, saved.dtype, boxes)
    if hasattr(like, "to_local"):
        part = folder.read_box(key, *box_of(like))
        return as_shard(part if like.is_meta else part.to(like.device), like)
    return folder.tensor(key).read()
