"""Writes what ``torch.load`` reads, without having all tensors in memory; ``files.torch_files`` reads it."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import LazyTensor, held
from lwopt_backend.checkpoint.files.made import in_order
from lwopt_backend.checkpoint.files.manifest import Payload, crc_of

ALIGNMENT = 64  # bytes, so that files can be mapped into memory
FORMAT_VERSION = b"3\n"  # of PyTorch's archives: kProducedFileFormatVersion
PADDING = 0x4246  # "FB", the header's field that PyTorch pads with
_PADDING = struct.Struct("<HH")
_ZIP64 = struct.Struct("<HHQQ")


@dataclass(frozen=True, eq=False)
class _Storage:
    """Stands for a tensor's bytes while the structure is pickled."""

    tensor: LazyTensor
    key: str


class _Pickler(pickle.Pickler):
    """Pickles tensors, also lazy ones, as torch does: as a reference to a record of the file."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_Storage] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = held(value, "")
        if not isinstance(value, LazyTensor):
            return NotImplemented
        storage = _Storage(value, str(len(self.storages)))
        self.storages.append(storage)
        hooks: OrderedDict[str, Any] = OrderedDict()
        place = (storage, 0, torch.Size(value.shape), torch.empty(value.shape, device="meta").stride(), False, hooks)
        return torch._utils._rebuild_tensor_v2, place

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[value.tensor.dtype])
        return "storage", kind, value.key, "cpu", value.tensor.numel


def save(content: Any, path: Path, workers: int = 1) -> int:
    """Write ``content``, in which tensors may be lazy: ``workers`` blocks of them, or whole ones where ranges cannot be
    read, are in memory. They become contiguous. Returns the file's CRC32.

    The file is one that ``torch.load`` reads: an archive of stored records, each at a multiple of ``ALIGNMENT`` bytes,
    as PyTorch's own (torch/serialization.py, ``_save``; caffe2/serialize/inline_container.cc).
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    small = {"data.pkl": pickled.getvalue(), "byteorder": sys.byteorder.encode(), "version": FORMAT_VERSION}
    payloads = []
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in small.items():
            _write(archive, f"archive/{name}", len(data), [data])
        for storage in pickler.storages:
            read = in_order(storage.tensor.block_reads(), workers)
            blocks = (block.view(-1).view(torch.uint8).numpy().data for block in read)
            payloads.append(_write(archive, f"archive/data/{storage.key}", storage.tensor.nbytes, blocks))
            start_flush(file)
    return crc_of(path, payloads)


def start_flush(file: BinaryIO) -> None:
    """Start writing a file's bytes to disk, so that flushing it later takes less time.

    Linux starts to write pages that are declared unneeded (mm/fadvise.c); elsewhere this may have no effect.
    """
    file.flush()
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_as_it_lies(content: Any, file: BinaryIO) -> None:
    """``torch.save``, which keeps tensors' strides. Raises OSError if the disk is full, as all writing does."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's writer raises it when it ends
        first = error.__context__
        if isinstance(first, OSError):
            raise first from error
        raise


def _write(archive: zipfile.ZipFile, name: str, nbytes: int, blocks: Iterable[bytes | memoryview]) -> Payload:
    """Write a record; its checksum is computed block by block, while the block is in the processor's cache."""
    record = zipfile.ZipInfo(name)
    large = nbytes >= zipfile.ZIP64_LIMIT
    fixed: int = zipfile.sizeFileHeader  # type: ignore[attr-defined]  # typeshed leaves it out
    header = fixed + len(name) + (_ZIP64.size if large else 0) + _PADDING.size
    padding = -(archive.start_dir + header) % ALIGNMENT
    record.extra = _PADDING.pack(PADDING, padding) + bytes(padding)
    with archive.open(record, "w", force_zip64=large) as writing:
        for block in blocks:
            writing.write(block)
    return record.header_offset + header + padding, nbytes, record.CRC
