"""Hugging Face's safetensors: weights read and written, shard by shard."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param, reader
from lwopt_backend.checkpoint.files import manifest, torch_files
from lwopt_backend.checkpoint.files.folders import check_name
from lwopt_backend.checkpoint.files.made import in_order, shape_of
from lwopt_backend.checkpoint.files.manifest import Files, crc_of
from lwopt_backend.checkpoint.files.torch_files import Stored, StoredTensor

# Writes weights, without optimizer state, as safetensors, as ``from_pretrained`` reads them.
#
#     model.safetensors                                 or, if that would exceed the largest size of a file:
#     model-00001-of-00002.safetensors, ...             and
#     model.safetensors.index.json                      {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
#
# A file: length of the header (8 bytes), header (JSON; dtype, shape and place of each tensor), tensors. The library
# would need all tensors of a file in memory; this keeps one at a time. Format:
# https://github.com/huggingface/safetensors#format

FILE_BYTES = 5 * 10**9  # of tensors in one file, transformers' default
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
INDEX = "model.safetensors.index.json"
CRCS = "lwopt_crc32"  # in our headers: checksums of the tensors that have bytes, 8 digits each, in their order


def write(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    workers: int = 1,
) -> None:
    """Write to ``folder``, which is empty. ``workers`` tensors are in memory at a time.

    Weights are the model's; in ``dtype``, if given, they are made from master weights if there are any. Buffers stay as
    they are. Tied names are left out, as in transformers. Raises CheckpointError for a dtype that the format lacks.
    """
    tensors = {name: exported(param, dtype) for name, param in checkpoint.params.items()} | dict(checkpoint.buffers)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{tensor.where}: safetensors has no {tensor.dtype}, which {name} is; give a dtype")
    files: list[dict[str, LazyTensor]] = [{}]  # tensors in order; one that is larger than a file may be is by itself
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
    order = sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize)  # so that every tensor is aligned
    unknown = "0" * 8 * sum(tensor.nbytes > 0 for _, tensor in order)
    header: dict[str, object] = {"__metadata__": {"format": "pt", CRCS: unknown}}
    end = 0
    for tensor_name, tensor in order:
        said = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[tensor_name] = {**said, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    payloads, path = [], files.folder / name
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for read in in_order((tensor.read for _, tensor in order), workers):
            read = read.contiguous()
            if read.numel():
                payloads.append((file.tell(), read.nbytes, contents.crc32(read)))
            file.write(contents.memory(read))
            del read
        file.seek(8)
        crcs = "".join(f"{crc:08x}" for *_, crc in payloads)
        file.write(text.replace(unknown.encode(), crcs.encode(), 1))
    files.add(name, crc_of(path, payloads))


# Reads, as Hugging Face's libraries and the writer above write them:
#
#     model.safetensors, or files that model.safetensors.index.json names    weights and buffers
#     config.json, where there is one                                       how the model was built
#
# The library reads the header. Only ours has checksums: what a damaged one of others shows is that its header does not
# fit its size. Elements are read from the file, as the library would map all of it, for which large files lack memory.

ONE_FILE, CONFIG = "model.safetensors", "config.json"
_DTYPES = {word: dtype for dtype, word in DTYPES.items()}


def recognises(path: Path) -> bool:
    return (path / ONE_FILE).is_file() or (path / INDEX).is_file()


@reader("safetensors")
def read(path: Path) -> Checkpoint:
    """The weights in a folder, without state. Raises CheckpointError if files are damaged, missing or not listed."""
    manifest.check_files(path)
    if not (path / INDEX).is_file():
        tensors = load(path / ONE_FILE)
    else:
        places = _json(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError(f"{path / INDEX}: expected files by tensors' names under 'weight_map'; copy it again")
        found: dict[str, LazyTensor] = {}
        for file in dict.fromkeys(places.values()):
            check_name(file, f"{path / INDEX}")
            of_file = load(path / file)
            listed = {name for name, place in places.items() if place == file}
            if different := sorted(listed ^ set(of_file)):
                where = "its header" if different[0] in listed else INDEX
                said = f"{different[0]!r} is missing in {where}"
                raise CheckpointError(f"{path / file}: {said}; the files are of different checkpoints")
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its dtype by the format's word, the byte where it begins, and its CRC32, if that is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    crc32: int | None


def entries(path: Path) -> list[Entry]:
    """The tensors of one file in order, from its header alone. Raises CheckpointError if it is damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            tensors = [(name, each.get_dtype(), shape_of(each.get_shape())) for name, each in slices]
            crcs = bytes.fromhex((file.metadata() or {}).get(CRCS, ""))
        nbytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy all files of {path.parent}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; copy or download it again (a Git LFS pointer has some 130 bytes)"
        ) from error
    found: list[Entry] = []
    end = nbytes  # tensors follow each other up to the end of the file, as the library has made sure
    for name, dtype, shape in reversed(tensors):
        bits = 8 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0])  # F32, BF16, F8_E4M3
        size = math.prod(shape) * bits // 8
        end -= size
        known = size and crcs
        found.append(Entry(name, dtype, shape, end, size, int.from_bytes(crcs[-4:], "big") if known else None))
        crcs = crcs[:-4] if known else crcs
    manifest.check(path, lambda: crc_of(path, [(e.start, e.nbytes, e.crc32) for e in found if e.crc32 is not None]))
    return found[::-1]


def load(path: Path) -> dict[str, LazyTensor]:
    """The lazy tensors of one file. Raises CheckpointError if it is damaged or has unknown dtypes."""
    found = {}
    for entry in entries(path):
        where = f"{entry.name} in {path}"
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{where} has the dtype {entry.dtype}; known are {', '.join(_DTYPES)}")
        place, unknown = Stored(path, entry.start, entry.nbytes), entry.crc32 is None
        record = torch_files.Record(place, entry.crc32 or 0, where, unknown, torch_files.as_read())
        strides = torch.empty(entry.shape, device="meta").stride()
        found[entry.name] = StoredTensor(record, 0, entry.shape, strides, _DTYPES[entry.dtype], where).lazy()
    return found


def _json(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{name!r} is there twice")
        return found

    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=once)
        if not isinstance(found, dict):
            raise ValueError(f"expected an object in JSON, found {type(found).__name__}")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again") from error
