"""Writes what torch.distributed.checkpoint loads into an FSDP2 model and its optimizer; see ``dcp``:

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)

Every tensor is whole in the file; loading cuts it for any mesh. StateDictOptions are the defaults, so the optimizer's
state is nested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, held
from lwopt_backend.checkpoint.dcp.saving import Shards, flattened, one_box, save
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.state import MATRICES, STEPPED, STRUCTURE, owner_key


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, which is empty. ``workers`` tensors, or the owner state of as many matrices, are in memory.

    Weights are the master weights if there are any: FSDP2's parameters are the masters, and loading rounds them to
    parameters that are not. Besides ``model`` and ``optimizer`` it has ``iteration``, ``samples``, ``scheduler``,
    ``arguments`` and what the user's program saved, as far as these exist. Raises CheckpointError for a parameter
    without a known group, and for owner state of parts of a fused parameter if the checkpoint does not say which rows
    they are (``arguments["matrices"]``).
    """
    tensors: dict[tuple[Any, ...], LazyTensor] = {}
    for name, param in checkpoint.params.items():
        tensors["model", name] = param.best
        for key, tensor in states_of(name, param, (checkpoint.arguments.get(MATRICES) or {}).get(name)):
            tensors["optimizer", "state", name, key] = tensor
    tensors.update({("model", name): checkpoint.params[of].best for name, of in checkpoint.tied.items()})
    tensors.update({("model", name): buffer for name, buffer in checkpoint.buffers.items()})
    more = {
        "iteration": checkpoint.iteration,
        "samples": checkpoint.samples,
        "scheduler": checkpoint.scheduler,
        "names": None if checkpoint.names == "model" else checkpoint.names,
    }
    rest: dict[str, Any] = {**{k: value for k, value in more.items() if value is not None}, **checkpoint.client}
    if groups := _groups(checkpoint):
        rest["optimizer"] = {"param_groups": groups}
    objects = flattened(rest)
    if checkpoint.arguments:  # in one piece: no program loads them in place
        objects["arguments",] = dict(checkpoint.arguments)
    shards = Shards({path: one_box(tensor) for path, tensor in tensors.items()}, objects)
    save(folder, shards, workers=workers, step=checkpoint.iteration)


def states_of(name: str, param: Param, matrices: Sequence[str] | None) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the optimizer's state of a parameter, by key, without its master weight. ``matrices``: which elements the
    parameter's matrices have, if known."""
    for key, tensor in param.states.items():
        if key != MASTER:
            yield key, tensor
    if param.step is not None:
        yield "step", held(torch.tensor(float(param.step)), f"step of {name}")
    by_shape = list(map(str, matrices_of(param.shape))) if param.owner_states else []
    known = by_shape if matrices is None else list(matrices)
    if param.owner_states and known != by_shape:
        yield MATRICES, held(nested.described(known), f"matrices of {name}")
    for place in param.owner_states:
        if place >= len(known):
            raise CheckpointError(
                f"{name}: the owner of its matrix number {place} keeps state of a part of a fused parameter, and the "
                "checkpoint does not tell which rows it is: resume on the engine that wrote it"
            )
        for path, like in _of_owner(param, place).items():
            key = owner_key(path, place, len(known))
            yield key, _later(param, place, path, like, f"{key} of {name}")


def _of_owner(param: Param, place: int) -> dict[str, Tensor]:
    """Owner state as ``OwnerShards`` saves it: tensors of at least one dimension, and their structure and layout."""
    state = dict(param.owner_states[place])
    found = {key: tensor.reshape(tensor.shape or (1,)) for key, tensor in nested.leaves(state)}
    if not nested.is_plain(state) or not all(tensor.is_contiguous() for tensor in found.values()):
        found[STRUCTURE] = nested.described(state)
        found[STEPPED] = torch.tensor([True])
    return found


def _later(param: Param, place: int, key: str, like: Tensor, where: str) -> LazyTensor:
    """One tensor of owner state, which is read again when it is written."""
    return LazyTensor(tuple(like.shape), like.dtype, lambda: _of_owner(param, place)[key].contiguous(), where)


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Param groups with the names of their parameters, as ``get_optimizer_state_dict`` has them."""
    members: dict[int, list[str]] = {}
    for name, param in checkpoint.params.items():
        if param.group is not None:
            members.setdefault(param.group, []).append(name)
        elif set(param.states) - {MASTER} or param.owner_states:
            raise CheckpointError(
                f"{param.best.where}: which of the {len(checkpoint.groups)} param groups has {name} is not known, and "
                "the optimizer cannot load its state without; convert from a checkpoint that tells it"
            )
    count = max([len(checkpoint.groups), *(number + 1 for number in members)])
    given: list[Mapping[str, Any]] = [*checkpoint.groups, *({} for _ in range(count - len(checkpoint.groups)))]
    return [{**group, "params": members.get(number, [])} for number, group in enumerate(given)]
