"""Hugging Face's safetensors: weights read and written, shard by shard, by its own library."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lwopt_backend.checkpoint.contents import (
    Checkpoint,
    CheckpointError,
    LazyTensor,
    Param,
    aliases,
    finish_later,
    is_trained,
    memory,
    reader,
    shape_of,
)
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.threads import in_order
from lwopt_backend.checkpoint.files.torch_files import Record, Stored, StoredTensor

# Writes weights, without optimizer state, as safetensors for ``from_pretrained``.
#
#     model.safetensors                                 or, if that would exceed the largest size of a file:
#     model-00001-of-00002.safetensors, ...             and
#     model.safetensors.index.json                      {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

FILE_BYTES = 5 * 10**9  # of tensors in one file, transformers' default
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64"},
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
    tensors = {name: param.exported(dtype) for name, param in checkpoint.params.items()} | dict(checkpoint.buffers)
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


def _write_file(files: Files, name: str, tensors: Mapping[str, LazyTensor], workers: int) -> None:
    path = files.folder / name
    content = dict(zip(tensors, in_order((tensor.read for tensor in tensors.values()), workers)))
    try:
        save_file(content, path, {"format": "pt"})
    except SafetensorError as error:  # also raised for a full disk
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        first = file.read(8)
        header = file.read(int.from_bytes(first, "little"))
    places = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name in content}
    crc = zlib.crc32(header, zlib.crc32(first))
    for tensor in sorted(places, key=places.__getitem__):
        crc = zlib.crc32(memory(content[tensor]), crc)
    files.add(name, crc)


# Reads, as Hugging Face's libraries and the writer above write them:
#
#     model.safetensors, or files that model.safetensors.index.json names    weights and buffers
#     config.json, where there is one                                       how the model was built
#
# The format has no checksums. If a manifest has a file's, it is compared as the file is read. Damage to other files
# shows only if the header does not fit the size.

ONE_FILE, CONFIG = "model.safetensors", "config.json"
_DTYPES = {word: dtype for dtype, word in DTYPES.items()}


def recognises(path: Path) -> bool:
    return (path / ONE_FILE).is_file() or (path / INDEX).is_file()


@reader("safetensors")
def read(path: Path) -> Checkpoint:
    """The weights in a folder, without state. Raises CheckpointError if files are damaged, missing or not listed."""
    manifest.check_files(path)
    return weights("safetensors", path, *sharded(path, ONE_FILE, INDEX, _load))


def sharded(
    path: Path, one_file: str, index: str, load: Callable[[Path], Mapping[str, LazyTensor]]
) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """The tensors of ``one_file`` in a folder, or of the files that ``index`` names, and notes. Raises CheckpointError
    for tensors that a file lacks; as in transformers, the index decides about others and about repeated ones."""
    if not (path / index).is_file():
        return dict(load(path / one_file)), ()
    places = _json(path / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{path / index}: expected files by tensors' names under 'weight_map'; copy it again")
    files, found = dict[str, Mapping[str, LazyTensor]](), dict[str, LazyTensor]()
    for name, file in places.items():
        if file not in files:
            check_name(file, f"{path / index}")
            files[file] = load(path / file)
        if name not in files[file]:
            raise CheckpointError(
                f"{path / file}: expected {name!r}, as in {index}, found none; copy all files of one checkpoint"
            )
        found[name] = files[file][name]
    more = sorted({name for of_file in files.values() for name in of_file} - found.keys())
    notes = (f"{len(more)} tensor(s) that {index} does not list are left out, such as {more[0]!r}",) if more else ()
    return found, notes


def weights(format: str, path: Path, tensors: Mapping[str, LazyTensor], notes: tuple[str, ...]) -> Checkpoint:
    """A checkpoint of weights and buffers alone, with the folder's config.json."""
    tied = aliases(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return Checkpoint(
        format=format,
        version="",
        names="model",
        params={name: Param(tensor) for name, tensor in tensors.items() if is_trained(tensor.dtype)},
        arguments=_json(path / CONFIG) if (path / CONFIG).is_file() else {},
        tied=tied,
        buffers={name: tensor for name, tensor in tensors.items() if not is_trained(tensor.dtype)},
        notes=notes,
    )


def _load(path: Path) -> dict[str, LazyTensor]:
    """The lazy tensors of one file, in the file's order, from its header alone. Raises CheckpointError if it is damaged
    or has unknown dtypes."""
    listed = manifest.read(path.parent)
    entry = None if listed is None else listed.files.get(path.name)
    try:
        with safe_open(path, framework="numpy") as file:  # which checks that the tensors fill the file
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            forms = {name: (each.get_dtype(), shape_of(each.get_shape())) for name, each in slices}
        record = Record(Stored(path, 0, path.stat().st_size), None if entry is None else entry.crc32, str(path))
        size = int.from_bytes(bytes(memory(record.read(0, 8))), "little")
        header = json.loads(bytes(memory(record.read(8, size))))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy all files of {path.parent}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; copy or download it again (a Git LFS pointer has some 130 bytes)"
        ) from error
    finish_later(record)
    found = {}
    for name, (dtype, shape) in forms.items():
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(
                f"{name} in {path}: expected a dtype of {known}, found {dtype}, which is not supported"
            )
        start = 8 + size + int(header[name]["data_offsets"][0])
        stride = torch.empty(shape, device="meta").stride()
        found[name] = StoredTensor(record, start, shape, stride, _DTYPES[dtype]).lazy()
    return found


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
