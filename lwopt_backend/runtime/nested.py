"""Nested state (dictionaries and lists of tensors and numbers) as named tensors and a description, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor, and every number as a tensor, with its path, e.g. ``"state.GG.0"``.

    Raises TypeError, with the path, for a value that checkpoints cannot store.
    """
    if isinstance(state, Tensor):
        yield path, state.detach()
    elif type(state) in NUMBERS:
        yield path, torch.tensor(state, dtype=NUMBERS[type(state)])
    elif isinstance(state, (dict, list, tuple)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in pairs:
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif not (state is None or isinstance(state, str)):
        raise TypeError(
            f"the optimizer's state: expected tensors, numbers, strings, None, and dictionaries, lists and tuples of "
            f"them, found a {type(state).__name__} at {path!r}, which checkpoints do not hold"
        )


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield every tensor, in an order that depends on the structure alone."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors(value)


def check(state: Any) -> None:
    """Raises TypeError as ``leaves`` does."""
    for _ in leaves(state):
        pass


def structure(state: Any) -> Any:
    """The input of ``rebuild`` besides the leaves, as JSON values; its length does not depend on the leaves' values.

    For a tensor, this is the order of its dimensions in memory, on which the bits of a matrix product depend.
    """
    if isinstance(state, Tensor):
        return f"tensor {_order(state)}"
    if type(state) in NUMBERS:
        return type(state).__name__
    if isinstance(state, dict):
        return ["dict", [[key, structure(value)] for key, value in state.items()]]
    if isinstance(state, (list, tuple)):
        return ["tuple" if isinstance(state, tuple) else "list", [structure(value) for value in state]]
    return ["value", state]


def rebuild(described: Any, found: dict[str, Tensor], path: str = "") -> Any:
    """The state with the structure ``described``, from its leaves ``found``. Raises KeyError if a leaf is missing."""
    if isinstance(described, str) and described.startswith("tensor"):
        dims = [int(dim) for dim in described.split(" ")[1]]
        if not dims:  # scalars are saved with one dimension
            return found[path].view(())
        return found[path].permute(dims).contiguous().permute([dims.index(dim) for dim in range(len(dims))])
    if isinstance(described, str):
        return found[path].item()
    kind, content = described
    if kind == "value":
        return content

    def inner(key: Any, part: Any) -> Any:
        return rebuild(part, found, f"{path}.{key}" if path else str(key))

    if kind == "dict":
        return {key: inner(key, part) for key, part in content}
    parts = [inner(number, part) for number, part in enumerate(content)]
    return tuple(parts) if kind == "tuple" else parts


def _order(tensor: Tensor) -> str:
    """The dimensions from the slowest to the fastest, e.g. "10" for a matrix stored by columns."""
    strides = tensor.stride()
    dims = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return "".join(map(str, dims if tensor.permute(dims).is_contiguous() else range(tensor.ndim)))


def is_plain(state: dict[str, Any]) -> bool:
    """Whether a state is tensors of at least one dimension, by name, and needs no description."""
    return all(isinstance(key, str) and isinstance(value, Tensor) and value.ndim for key, value in state.items())


def described(state: Any) -> Tensor:
    """``structure`` as JSON in a uint8 tensor."""
    return torch.tensor(list(json.dumps(structure(state)).encode()), dtype=torch.uint8)


def description(stored: Tensor) -> Any:
    """The structure that ``described`` stored."""
    return json.loads(bytes(stored.tolist()))


def rebuilt(stored: Tensor) -> Any:
    """The state that ``described`` stored, without tensors."""
    return rebuild(description(stored.cpu()), {})


def plain(state: Any) -> Any:
    """The state in containers that ``torch.load(weights_only=True)`` reads. Raises TypeError as ``leaves`` does."""
    check(state)
    return mapped(state, lambda leaf: leaf)


def to_device(state: Any, device: torch.device | str) -> Any:
    """The state with copies of its tensors on ``device``; scalars stay on their own device, the CPU."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device if leaf.ndim else leaf.device, copy=True)

    return mapped(state, moved)


def mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """The state with its leaves changed."""
    if isinstance(state, dict):
        return {key: mapped(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        parts = [mapped(value, change) for value in state]
        return tuple(parts) if isinstance(state, tuple) else parts
    return change(state)


def with_values(found: Mapping[Any, Any], change: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """A dictionary of the same type and order, with ``change(key, value)`` for its values."""
    made = copy.copy(found) if isinstance(found, dict) else {}  # a Counter's own constructor would count pairs
    for key, value in found.items():
        made[key] = change(key, value)
    return made
