"""Reads optimizer state of our owned storage: a folder with ``optimizer.json`` and a file per rank.

The model saves its weights itself, the program its counters; they are read where one file beside the folder or in it
has them, counters ``training.pt`` with ``iteration``, ``samples`` and ``scheduler``, weights as
``torch.save(model.state_dict())`` or safetensors write it, and are whole. fp32 parameters have no masters: they
are their own. See ``lwopt_backend.storage.owned_files``.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint import convert
from lwopt_backend.checkpoint.contents import (
    MASTER,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    Param,
    held,
    read_as_expected,
)
from lwopt_backend.checkpoint.convert import weight_of
from lwopt_backend.checkpoint.deepspeed.files import OwnerStates, as_number, groups_of, whole
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.made import shape_of
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.files.torch_saving import save, save_as_it_lies
from lwopt_backend.checkpoint.safetensors import ONE_FILE
from lwopt_backend.checkpoint.safetensors import load as load_safetensors
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.storage.owned_files import (
    FORMAT,
    INDEX,
    VERSION,
    Index,
    SavedParam,
    check_files,
    file_name,
    read_index,
)
from lwopt_backend.storage.owned_state import MASTER as OWN_MASTER

MODEL, TRAINING = "model.pt", "training.pt"
WEIGHTS = (MODEL, "pytorch_model.bin")  # beside the folder, or in it
STEP = "step"


def recognises(path: Path) -> bool:
    """Whether the index is there, which is written last."""
    return (path / INDEX).is_file()


def read(path: Path) -> Checkpoint:
    """The state in a folder, and the model's weights where they are beside it. Raises CheckpointError."""
    return read_as_expected(lambda: _read(path), path, "owned storage")


def _read(path: Path) -> Checkpoint:
    try:
        index = read_index(path)
        check_files(path, index, index.files)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    contents = {name: _content(path / name) for name in index.files}
    options = contents[index.options]["options"]
    keys = list(options)
    weights = _weights(path, index.params)
    params, matrices = {}, {}
    for name, saved in index.params.items():
        params[name] = _param(path, name, saved, contents, keys.index(saved.group), weights.get(name))
        found = [contents[file]["pieces"][name].get("matrices") for _, _, file in saved.pieces]
        if any(found):
            matrices[name] = next(filter(None, found))
    rest = {name: tensor for name, tensor in weights.items() if name not in params}
    params |= {name: Param(tensor) for name, tensor in rest.items() if tensor.dtype.is_floating_point}
    tied = convert.tied(params)
    known, client = convert.split(_training(path))
    counted = convert.iteration_of(params) if "iteration" not in known else None
    notes = convert.sentences(tied, path, counted)
    if not weights:
        notes.append(f"no weights beside {path}: only the optimizer's state is here, and masters if there are")
    in_order = dict.fromkeys([name for name in weights if name in params] + list(params))
    return Checkpoint(
        FORMAT,
        str(VERSION),
        "model",
        {name: params[name] for name in in_order if name not in tied},
        groups_of(
            {"from_group": int(key.partition(".")[0]), "rule": key.partition(".")[2], **options[key]} for key in keys
        ),
        {"matrices": matrices} if matrices else {},
        iteration=known.get("iteration", counted),
        samples=known.get("samples"),
        scheduler=known.get("scheduler"),
        world={"dp": len(index.files)},
        tied=tied,
        buffers={name: tensor for name, tensor in rest.items() if not tensor.dtype.is_floating_point},
        client=client,
        notes=tuple(notes),
    )


def _training(folder: Path) -> dict[str, Any]:
    """What the program saved of itself in ``training.pt``, in the folder or beside it; nothing if there is no file."""
    for place in (folder, folder.parent):
        if (place / TRAINING).is_file():
            saved = torch_files.load(place / TRAINING)
            return dict(plain(saved)) if isinstance(saved, Mapping) else {}
    return {}


def _content(file: Path) -> Mapping[str, Any]:
    content = torch_files.load(file)
    if not isinstance(content, Mapping) or content.get("name") != file.name:
        raise CheckpointError(f"{file} is a file of another save or rank, or of something else; copy the folder again")
    return content


def _param(
    folder: Path,
    name: str,
    saved: SavedParam,
    contents: Mapping[str, Mapping[str, Any]],
    group: int,
    weight: LazyTensor | None,
) -> Param:
    """Its pieces end to end, in the order of the index, which says that they are all there."""
    if weight is not None and weight.shape != shape_of(saved.shape):
        raise CheckpointError(f"{weight.where}: expected {name!r} of shape {saved.shape}, found {weight.shape}")
    found: dict[str, list[LazyTensor]] = {}
    step, owner = None, {}
    for start, stop, file in sorted(saved.pieces):
        piece = contents[file]["pieces"].get(name)
        if piece is None or (piece["start"], piece["stop"]) != (start, stop):
            raise CheckpointError(f"{folder / file}: expected elements {start} to {stop} of {name!r}; copy it again")
        owner.update(piece["owner"])
        for key, tensor in piece["tensors"].items():
            if key == STEP and not tensor.shape:
                step = as_number(tensor)
            elif not tensor.shape:
                found[key] = [tensor]
            elif tensor.numel != stop - start:
                raise CheckpointError(
                    f"{folder / file}: {key} of {name!r} has {tensor.numel} elements for {start}:{stop}"
                )
            else:
                found.setdefault(key, []).append(tensor)
    count = len(saved.pieces)
    states = {}
    for key, pieces in found.items():
        if pieces[0].shape and len(pieces) != count:
            raise CheckpointError(f"{folder}: {count} pieces of {name!r}, but {len(pieces)} of its {key}")
        states[MASTER if key == OWN_MASTER else key] = whole(pieces, saved.shape) if pieces[0].shape else pieces[0]
    if MASTER not in states and saved.dtype == "float32":
        if weight is None:
            raise CheckpointError(
                f"{folder}: the weight {name!r} is missing: an fp32 parameter has no other master weight, and no "
                f"{MODEL} in the folder or beside it has it; save it: torch.save(model.state_dict(), {MODEL!r})"
            )
        states[MASTER] = weight
    if MASTER not in states and saved.dtype != "float32":
        raise CheckpointError(
            f"{folder}: {name!r} is {saved.dtype} and has no master weight; was it saved by our optimizer?"
        )
    ordered = {key: states[key] for key in sorted(states, key=lambda key: key != MASTER)}
    return Param(weight, ordered, step, group, OwnerStates(dict(sorted(owner.items()))))


def _weights(folder: Path, expected: Collection[str]) -> dict[str, LazyTensor]:
    """The model's state, of the first file that is there; nothing if there is none.

    Raises CheckpointError for a file with none of the ``expected`` parameters.
    """
    for place in (folder, folder.parent):
        for name in (*WEIGHTS, ONE_FILE):
            file = place / name
            if file.is_file():
                saved = load_safetensors(file) if name == ONE_FILE else torch_files.load(file)
                found = saved if isinstance(saved, Mapping) else {}
                tensors = {key: value for key, value in found.items() if isinstance(value, LazyTensor)}
                if not tensors.keys() & set(expected):
                    raise CheckpointError(
                        f"{file}: expected the model's state dict, with {next(iter(expected), 'its weights')!r}, found "
                        f"{f'the keys {list(found)[:4]}' if found else type(saved).__name__}; save it so: "
                        f"torch.save(model.state_dict(), {name!r})"
                    )
                return tensors
    return {}


# Writes what a run in plain PyTorch with ``lwopt_backend.LayerWiseOptimizer`` goes on from; see ``owned``.
#
# ::
#
#     model.pt         the model's state dict: model.load_state_dict(torch.load("model.pt"))
#     optimizer.json   with files beside it, for any number of ranks: optimizer.load_state_dict_from(folder)
#     training.pt      "iteration", "samples", "scheduler" as far as known, and what the user's program saved along


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
            piece = _read_piece(piece, checkpoint, name, param)
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


def _read_piece(piece: Mapping[str, Any], checkpoint: Checkpoint, name: str, param: Param) -> dict[str, Any]:
    """In memory, as tensors of owners must lie as they did; with the matrices that these are of."""
    matrices = (checkpoint.arguments.get("matrices") or {}).get(name) or list(map(str, matrices_of(param.shape)))
    return {
        **piece,
        "tensors": {key: tensor.read() for key, tensor in piece["tensors"].items()},
        "owner": {place: dict(state) for place, state in param.owner_states.items()},
        "matrices": matrices,
    }
