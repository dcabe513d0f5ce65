"""What a training program's own checkpoint says under names of its choice, or not at all: counters, tied weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import Checkpoint, Param
from lwopt_backend.checkpoint.lazy import LazyTensor

_KINDS = {"iteration": int, "samples": int, "scheduler": Mapping, "arguments": Mapping, "names": str}


def split(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved beside model and optimizer: what ``Checkpoint`` has a field for, by that name, and the rest."""
    known = {key: saved[key] for key, kind in _KINDS.items() if isinstance(saved.get(key), kind)}
    return known, {key: value for key, value in saved.items() if key not in known}


def iteration_of(params: Mapping[str, Param]) -> int | None:
    """The optimizer's count of steps, if all that are counted made as many."""
    steps = {int(param.step) for param in params.values() if param.step is not None}
    return steps.pop() if len(steps) == 1 else None


def weight_of(checkpoint: Checkpoint, param: Param) -> LazyTensor:
    """What the model has; made from the master weight where that alone is known, as DeepSpeed saves it at stage 3.

    In 16 bits if Megatron's arguments or DeepSpeed's configuration say that it was trained so.
    """
    if param.weight is not None:
        return param.weight
    arguments = checkpoint.arguments
    config = arguments.get("ds_config") or {}
    for kind, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if arguments.get(kind) is True or (config.get(kind) or {}).get("enabled") is True:
            return param.best.to(dtype)
    return param.best


def tied(params: Mapping[str, Param]) -> dict[str, str]:
    """Names of weights that no optimizer trains, but that have the values of one that is trained, each with its name.

    torch's model state dict has a tied weight under all its names, an optimizer's only under the first. Vectors are
    not compared: many are all ones.
    """
    trained: dict[Any, list[str]] = {}
    for name, param in params.items():
        if param.states and param.weight is not None and len(param.shape) > 1:
            trained.setdefault((param.shape, param.weight.dtype), []).append(name)
    found = {}
    begins: dict[Any, dict[bytes, list[str]]] = {}  # so that each is read once, however many there are
    for name, param in params.items():
        if param.states or param.group is not None or param.weight is None:
            continue
        kind = (param.shape, param.weight.dtype)
        if kind not in begins:
            begins[kind] = {}
            for of in trained.get(kind, ()):
                begins[kind].setdefault(_begin(params[of]), []).append(of)
        alike = begins[kind].get(_begin(param), []) if begins[kind] else []
        same = next((of for of in alike if _equal(param, params[of])), None)
        if same is not None:
            found[name] = same
    return found


def _begin(param: Param) -> bytes:
    """A digest of the first elements."""
    assert param.weight is not None
    first = next(param.weight.blocks(), torch.empty(0)).contiguous().view(torch.uint8)
    return hashlib.blake2b(first.numpy().data).digest()


def _equal(one: Param, other: Param) -> bool:
    assert one.weight is not None and other.weight is not None
    return all(torch.equal(a, b) for a, b in zip(one.weight.blocks(), other.weight.blocks(), strict=True))


def sentences(tied: Mapping[str, str], where: object, counted: int | None) -> list[str]:
    """What was inferred; ``counted``: the iteration, if it was."""
    found = [f"{name} has the values of {of} and no state of its own: taken for the same" for name, of in tied.items()]
    if counted is not None:
        found.append(f"{where} does not say how far training came: taken for {counted}, the optimizer's count of steps")
    return found
