"""What is in checkpoints, to be compared."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import Checkpoint, LazyTensor


def same(ours: Any, theirs: Any) -> bool:
    """Tensors bit for bit, of one dtype, with one memory layout; also those in dictionaries and lists."""
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor) or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
        return torch.equal(*bits) and (ours.stride() == theirs.stride() or 1 in ours.shape)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def params_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Weight, states, step, group and what owners keep, by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for name, param in checkpoint.params.items():
        tensors = {"weight": param.weight, **param.states}
        read = {key: None if tensor is None else tensor.read() for key, tensor in tensors.items()}
        assert all(tensor is None or tensor.shape == read[key].shape for key, tensor in tensors.items()), name
        owners = {place: dict(state) for place, state in param.owner_states.items()}
        found[name] = {**read, "step": param.step, "group": param.group, "owners": owners}
    return found


def changed(source: Checkpoint, name: str, **changes: Any) -> Checkpoint:
    """With another entry of a parameter."""
    return replace(source, params={**source.params, name: replace(source.params[name], **changes)})


def watched(tensor: Tensor, reads: list[tuple[int, int]], first: int = 0) -> LazyTensor:
    """As in a file; the ranges that are read of it are listed, counted from ``first`` on."""

    def part(start: int, stop: int) -> Tensor:
        reads.append((first + start, first + stop))
        return tensor.flatten()[start:stop]

    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: part(0, tensor.numel()).view(tensor.shape), "a", part)
