"""Writes what a run in plain PyTorch with ``lwopt_backend.LayerWiseOptimizer`` goes on from; see ``owned``.

::

    model.pt         the model's state dict: model.load_state_dict(torch.load("model.pt"))
    optimizer.json   with files beside it, for any number of ranks: optimizer.load_state_dict_from(folder)
    training.pt      "iteration", "samples", "scheduler" as far as known, and what the user's program saved along
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.files.torch_saving import save, save_as_it_lies
from lwopt_backend.checkpoint.inferred import weight_of
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.owned.reader import MODEL, STEP, TRAINING
from lwopt_backend.owned.state import MASTER as OWN_MASTER
from lwopt_backend.owned.state_files import file_name
from lwopt_backend.owned.state_index import INDEX, Index, SavedParam
from lwopt_backend.plan.blocks import matrices_of


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Fill ``folder``, which is empty. ``workers`` tensors, or what owners keep of one parameter, are in memory.

    Raises CheckpointError for groups without a rule of ours, which ``groups.as_ours`` gives them.
    """
    weights = {name: weight_of(checkpoint, param) for name, param in checkpoint.params.items()}
    tied = {name: weights[of] for name, of in checkpoint.tied.items()}
    save({**weights, **tied, **checkpoint.buffers}, folder / MODEL, workers)
    scheduler = None if checkpoint.scheduler is None else dict(checkpoint.scheduler)
    known = {"iteration": checkpoint.iteration, "samples": checkpoint.samples, "scheduler": scheduler}
    save({**checkpoint.client, **{key: value for key, value in known.items() if value is not None}}, folder / TRAINING)
    numbers = _numbers(checkpoint)
    saved_as = secrets.token_hex(8)
    first = folder / file_name(saved_as, 0)
    params: dict[str, SavedParam] = {}
    together: dict[str, Any] = {}
    files = [first]
    for name, param in checkpoint.params.items():
        if not param.states and not param.owner_states:
            continue
        rule, dtype = _rule(checkpoint, name, param), str(weights[name].dtype).removeprefix("torch.")
        piece = {"start": 0, "stop": weights[name].numel, "tensors": _tensors(param, weights[name]), "owner": {}}
        if param.owner_states:
            files.append(folder / file_name(saved_as, len(files)))
            piece = _read(piece, checkpoint, name, param)
            with files[-1].open("wb") as file:
                save_as_it_lies({"name": files[-1].name, "pieces": {name: piece}, "options": {}}, file)
        else:
            together[name] = piece
        place = (0, weights[name].numel, files[-1].name if param.owner_states else first.name)
        params[name] = SavedParam(tuple(param.shape), dtype, rule, f"{numbers[param.group]}.{rule}", (place,))
    options = {
        f"{number}.{group['rule']}": {key: value for key, value in group.items() if key != "rule"}
        for of, group in enumerate(checkpoint.groups)
        if (number := numbers.get(of)) is not None
    }
    save({"name": first.name, "pieces": together, "options": options}, first, workers)
    index = Index(saved_as, {file.name: file.stat().st_size for file in files}, first.name, params)
    (folder / INDEX).write_text(index.text())


def _numbers(checkpoint: Checkpoint) -> dict[int | None, int]:
    """A number for each group that has parameters: of a rule's first group 0, of its second 1, ..."""
    found: dict[int | None, int] = {}
    counts: dict[str, int] = {}
    used = {param.group for param in checkpoint.params.values()}
    for number, group in enumerate(checkpoint.groups):
        if number in used and "rule" in group:
            found[number] = counts[group["rule"]] = counts.get(group["rule"], -1) + 1
    return found


def _rule(checkpoint: Checkpoint, name: str, param: Param) -> str:
    number = len(checkpoint.groups) if param.group is None else param.group
    group = checkpoint.groups[number] if number in range(len(checkpoint.groups)) else {}
    if "rule" not in group:
        raise CheckpointError(
            f"{param.best.where}: which rule of ours trains {name!r} is not known, its param group has "
            f"{sorted(group)}; convert the weights alone, with --to safetensors"
        )
    return str(group["rule"])


def _tensors(param: Param, weight: LazyTensor) -> dict[str, LazyTensor]:
    """Flat, under the keys that an owner has."""
    found = {key: state.view((state.numel,)) for key, state in param.states.items() if key != MASTER}
    if param.step is not None:
        found[STEP] = held(torch.tensor(float(param.step)), STEP)
    if weight.dtype.itemsize < 4:
        found[OWN_MASTER] = param.best.view((weight.numel,))
    return found


def _read(piece: Mapping[str, Any], checkpoint: Checkpoint, name: str, param: Param) -> dict[str, Any]:
    """In memory, as tensors of owners must lie as they did; with the matrices that these are of."""
    matrices = (checkpoint.arguments.get("matrices") or {}).get(name) or list(map(str, matrices_of(param.shape)))
    return {
        **piece,
        "tensors": {key: tensor.read() for key, tensor in piece["tensors"].items()},
        "owner": {place: dict(state) for place, state in param.owner_states.items()},
        "matrices": matrices,
    }
