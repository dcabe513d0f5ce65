"""Hugging Face's safetensors: weights read and written, shard by shard, by its own library."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param, reader, shape_of
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.manifest import Files, crc_of
from lwopt_backend.checkpoint.files.threads import in_order
from lwopt_backend.checkpoint.files.torch_files import Record, Stored

# Writes weights, without optimizer state, as safetensors for ``from_pretrained``.
#
#     model.safetensors                                 or, if that would exceed the largest size of a file:
#     model-00001-of-00002.safetensors, ...             and
#     model.safetensors.index.json                      {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

FILE_BYTES = 5 * 10**9  # of tensors in one file, transformers' default
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
INDEX = "model.safetensors.index.json"


def write(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    workers: int = 1,
) -> None:
    """Write to ``folder``, which is empty. All tensors of a file are in memory; ``workers`` are read at a time.

    Weights are the model's; in ``dtype``, if given, they are made from master weights if there are any. Buffers do not
    change. Tied names are left out, as in transformers. Raises CheckpointError for a dtype that the format lacks.
    """
    tensors = {name: exported(param, dtype) for name, param in checkpoint.params.items()} | dict(checkpoint.buffers)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name}: expected a dtype of safetensors, found {tensor.dtype}; give --dtype")
    files: list[dict[str, LazyTensor]] = [{}]  # tensors in order; one above the size of a file is alone
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    count = len(files)
    numbered = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    names = numbered if count > 1 else [ONE_FILE]
    written = Files(folder)
    for name, content in zip(names, files):
        _write_file(written, name, content, workers)
    if count > 1:
        place = {tensor: name for name, content in zip(names, files) for tensor in content}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        index = {"metadata": total, "weight_map": {name: place[name] for name in tensors}}
        with written.open(INDEX) as file:
            file.write((json.dumps(index, indent=2) + "\n").encode())
    manifest.write(folder, written.entries, checkpoint.iteration)


def exported(param: Param, dtype: torch.dtype | None) -> LazyTensor:
    """The weight, in ``dtype`` if given; a conversion starts from the master weight."""
    if param.weight is not None and dtype in (None, param.weight.dtype):
        return param.weight
    return param.best if dtype is None else param.best.to(dtype)


def _write_file(files: Files, name: str, tensors: Mapping[str, LazyTensor], workers: int) -> None:
    path = files.folder / name
    found = in_order((tensor.read for tensor in tensors.values()), workers)
    try:
        save_file(dict(zip(tensors, found)), path, {"format": "pt"})
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(str(error)) from error
    files.add(name, crc_of(path))


# Reads, as Hugging Face's libraries and the writer above write them:
#
#     model.safetensors, or files that model.safetensors.index.json names    weights and buffers
#     config.json, where there is one                                       how the model was built
#
# The format has no checksums. If a manifest has a file's, it is compared before the file's first tensor is used. Damage
# to other files shows only if the header does not fit the size.

ONE_FILE, CONFIG = "model.safetensors", "config.json"
OPEN = 4  # files that stay open: opening one parses its header, which may list thousands of tensors
_DTYPES = {word: dtype for dtype, word in DTYPES.items()}


def recognises(path: Path) -> bool:
    return (path / ONE_FILE).is_file() or (path / INDEX).is_file()


@reader("safetensors")
def read(path: Path) -> Checkpoint:
    """The weights in a folder, without state. Raises CheckpointError if files are damaged, missing or not listed."""
    manifest.check_files(path)
    opened = lru_cache(OPEN)(partial(safe_open, framework="pt"))
    if not (path / INDEX).is_file():
        tensors = _load(path / ONE_FILE, opened)
    else:
        places = _json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError(f"{path / INDEX}: expected files by tensors' names under 'weight_map'; copy it again")
        found: dict[str, LazyTensor] = {}
        for file in dict.fromkeys(places.values()):
            check_name(file, f"{path / INDEX}")
            of_file = _load(path / file, opened)
            listed = {name for name, place in places.items() if place == file}
            if different := sorted(listed ^ set(of_file)):
                where = "its header" if different[0] in listed else INDEX
                said = f"expected {different[0]!r} in {where}, found none"
                raise CheckpointError(f"{path / file}: {said}; copy all files of one checkpoint")
            found |= of_file
        tensors = {name: found[name] for name in places}
    config = _json(path / CONFIG) if (path / CONFIG).is_file() else {}
    return Checkpoint(
        format="safetensors",
        version="",
        names="model",
        params={name: Param(tensor) for name, tensor in tensors.items() if tensor.dtype.is_floating_point},
        arguments=config,
        buffers={name: tensor for name, tensor in tensors.items() if not tensor.dtype.is_floating_point},
    )


def _load(path: Path, opened: Callable[[Path], Any]) -> dict[str, LazyTensor]:
    """The lazy tensors of one file, in the file's order, from its header alone. ``opened`` maps a file into memory.
    Raises CheckpointError if it is damaged or has unknown dtypes."""
    found, listed = {}, manifest.read(path.parent)
    entry = None if listed is None else listed.files.get(path.name)
    whole = None
    if entry is not None:
        whole = Record(Stored(path, 0, entry.nbytes), (entry.crc32,), max(entry.nbytes, 1), str(path))
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            forms = {name: (each.get_dtype(), shape_of(each.get_shape())) for name, each in slices}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy all files of {path.parent}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; copy or download it again (a Git LFS pointer has some 130 bytes)"
        ) from error
    for name, (dtype, shape) in forms.items():
        where = f"{name} in {path}"
        if dtype not in _DTYPES:
            raise CheckpointError(f"{where}: expected a dtype of {', '.join(_DTYPES)}, found {dtype}; copy it again")
        mapped = partial(_mapped, opened, path, name, whole)
        found[name] = LazyTensor(shape, _DTYPES[dtype], partial(_read, mapped), where, partial(_read_range, mapped))
    return found


def _mapped(opened: Callable[[Path], Any], path: Path, name: str, whole: Record | None) -> Tensor:
    """A tensor of the mapped file, of which ``whole`` checks all bytes once, if their checksum is known."""
    if whole is not None:
        whole.check()
    found: Tensor = opened(path).get_tensor(name)
    return found


def _read(mapped: Callable[[], Tensor]) -> Tensor:
    return mapped().clone()


def _read_range(mapped: Callable[[], Tensor], start: int, stop: int) -> Tensor:
    return mapped().view(-1)[start:stop].clone()


def _json(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"expected {name!r} once, found it twice")
        return found

    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=once)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object in JSON, found {type(found).__name__}")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again") from error
