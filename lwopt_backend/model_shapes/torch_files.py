"""Names and shapes of files by torch.save, of which no weights are read."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.model_shapes.types import Stored

# Keys under which training scripts, DeepSpeed, Lightning and torch's examples keep the model's state dict.
CONTAINERS = ("app", "model", "module", "state_dict", "model_state_dict")
OPTIMIZERS = frozenset({"optim", "optimizer", "optimizers"})
SAVE_AGAIN = "torch.save(model.state_dict(), path)"

T = TypeVar("T")


def load_without_elements(path: Path) -> Any:
    """What was saved, with a LazyTensor for every tensor. Raises ValueError."""
    if not zipfile.is_zipfile(path):  # the format before torch 1.6 would be loaded whole
        raise ValueError(
            f"{path}: expected a file by torch.save of torch 1.6 or newer, which is a zip archive, found another; "
            "download it again, or load and save it with a newer torch"
        )
    return torch_files.load(path)


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


def stored_tensors(named: Mapping[str, LazyTensor]) -> list[Stored]:
    """One entry per tensor; names that share their elements (tied weights) share an entry, under the first of them."""
    names: dict[Any, list[str]] = {}
    for name, tensor in named.items():
        place = (tensor.place, tensor.shape, tensor.stride) if tensor.numel else name
        names.setdefault(place, []).append(name)
    return [stored(first, named[first], tuple(others)) for first, *others in names.values()]


def stored(name: str, tensor: LazyTensor, aliases: tuple[str, ...] = ()) -> Stored:
    """A tensor without its elements."""
    return Stored(name, tensor.shape, tensor.dtype.is_floating_point, aliases=aliases)
