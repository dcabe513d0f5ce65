"""Names and shapes of files by torch.save, loaded on the meta device and without running what a pickle may hold."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lwopt_backend.model_shapes.types import Stored

# Keys under which training scripts, DeepSpeed, Lightning and torch's examples keep the model's state dict.
CONTAINERS = ("app", "model", "module", "state_dict", "model_state_dict")
OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers"})
SAVE_AGAIN = "torch.save(model.state_dict(), path)"

T = TypeVar("T")


def load_on_meta(path: Path) -> Any:
    """What was saved, with tensors that have no elements. Raises ValueError, also for more than plain data.

    None of the weights are read since pytorch#170619 (December 2025); an older torch reads them, one at a time, and
    lets them go. ``mmap=True`` would spare it that, but Linux does not map so a file that is larger than the memory.
    """
    if not zipfile.is_zipfile(path):  # the format before torch 1.6 would be loaded whole
        raise ValueError(
            f"{path}: expected a file by torch.save of torch 1.6 or newer, which is a zip archive, found another; "
            "download it again, or load and save it with a newer torch"
        )
    try:
        return torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error))
        found = f"an object of {culprit[1]}" if culprit else "something else"
        raise ValueError(
            f"{path}: expected tensors and plain data, found {found}; such a file is not loaded, because that can run "
            f"code. Save the weights alone: {SAVE_AGAIN}"
        ) from error
    except Exception as error:  # whatever a truncated or foreign file makes of the reader
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path}: expected a file by torch.save, found something else ({type(error).__name__}: {reason}); "
            "download it again"
        ) from error


def state_dict_in(saved: Any, where: Path, leaf: type[T]) -> dict[str, T]:
    """The model's state dict in what was saved: at the top, or under one of CONTAINERS. ``leaf`` is a tensor's type.

    Other branches, an optimizer's for one, are not looked into. Raises ValueError if there is no state dict.
    """
    tree = saved
    while isinstance(tree, Mapping):
        inner = next((tree[key] for key in CONTAINERS if isinstance(tree.get(key), Mapping)), None)
        if inner is None:
            break
        tree = inner
    named = {} if not isinstance(tree, Mapping) else {k: v for k, v in tree.items() if isinstance(v, leaf)}
    named = {k: v for k, v in named.items() if isinstance(k, str) and k.partition(".")[0] not in OPTIMIZERS}
    if not named:
        keys = f"the keys {list(tree)[:8]}" if isinstance(tree, Mapping) else f"an object of {type(tree).__name__}"
        raise ValueError(
            f"{where}: expected a state dict at the top or under one of {', '.join(CONTAINERS)}, found {keys}; "
            f"save it so: {SAVE_AGAIN}"
        )
    return named


def stored_tensors(named: Mapping[str, Tensor]) -> list[Stored]:
    """One entry per tensor; names that share their elements (tied weights) share an entry, under the first of them."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in named.items():
        # Where in its file; not known of a tensor without elements, nor with an older torch.
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if tensor.numel() else None
        place = (start, tensor.storage_offset(), tensor.shape, tensor.stride())
        names.setdefault((name,) if start is None else place, []).append(name)
    return [
        Stored(first, tuple(named[first].shape), named[first].is_floating_point(), aliases=tuple(others))
        for first, *others in names.values()
    ]
