"""Reads optimizer state of our owned storage: a folder with ``optimizer.json`` and a file per rank.

The model saves its weights itself, the program its counters; they are read where one file beside the folder or in it
has them, counters ``training.pt`` with ``iteration``, ``samples`` and ``scheduler``, weights as
``torch.save(model.state_dict())`` or safetensors write it, and are whole. fp32 parameters have no masters: they
are their own. See ``lwopt_backend.owned.state_files``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint import inferred
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param, read_as_expected
from lwopt_backend.checkpoint.deepspeed.model import groups_of, as_number, whole
from lwopt_backend.checkpoint.deepspeed.owners import OwnerStates
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.made import shape_of
from lwopt_backend.checkpoint.files.plain_data import plain
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.safetensors.reader import ONE_FILE
from lwopt_backend.checkpoint.safetensors.reader import load as load_safetensors
from lwopt_backend.owned.state import MASTER as OWN_MASTER
from lwopt_backend.owned.state_files import check_files
from lwopt_backend.owned.state_index import FORMAT, INDEX, VERSION, SavedParam, read_index

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
    tied = inferred.tied(params)
    known, client = inferred.split(_training(path))
    counted = inferred.iteration_of(params) if "iteration" not in known else None
    notes = inferred.sentences(tied, path, counted)
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
