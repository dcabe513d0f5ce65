"""Writes weights, without optimizer state, as safetensors, as ``from_pretrained`` reads them.

    model.safetensors                                 or, where that would be larger than a file may be:
    model-00001-of-00002.safetensors, ...             and
    model.safetensors.index.json                      {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

A file: length of the header (8 bytes), header (JSON; dtype, shape and place of each tensor), tensors. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.files.parallel import in_order
from lwopt_backend.checkpoint.lazy import LazyTensor

FILE_BYTES = 5 * 10**9  # of tensors in one file, as transformers has it by default
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
    """Fill ``folder``, which is empty. ``workers`` tensors are in memory at a time.

    Weights are as the model has them; in ``dtype``, if that is given, made from master weights where there are any.
    Buffers stay as they are. Tied names are left out, as transformers does. Raises CheckpointError for a dtype that
    the format lacks.
    """
    tensors = {name: _weight(param.weight, param.best, dtype) for name, param in checkpoint.params.items()}
    tensors.update(checkpoint.buffers)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{tensor.where}: safetensors has no {tensor.dtype}, which {name} is; give a dtype")
    files = _files(tensors, file_bytes)
    count = len(files)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    names = names if count > 1 else ["model.safetensors"]
    for name, content in zip(names, files):
        _write_file(folder / name, content, workers)
    if count > 1:
        place = {tensor: name for name, content in zip(names, files) for tensor in content}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        index = {"metadata": total, "weight_map": {name: place[name] for name in tensors}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _weight(weight: LazyTensor | None, best: LazyTensor, dtype: torch.dtype | None) -> LazyTensor:
    if weight is not None and dtype in (None, weight.dtype):
        return weight
    return best if dtype is None else best.to(dtype)


def _files(tensors: Mapping[str, LazyTensor], file_bytes: int) -> list[dict[str, LazyTensor]]:
    """In their order, as many in each file as it may have; one that is larger is by itself."""
    files: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


def _write_file(path: Path, tensors: Mapping[str, LazyTensor], workers: int) -> None:
    order = sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize)  # so that every tensor is aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in order:
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for read in in_order((tensor.read for _, tensor in order), workers):
            file.write(_bytes(read))
            del read


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
