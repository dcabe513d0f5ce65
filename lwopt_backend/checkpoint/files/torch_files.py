"""Files of torch.save: read lazily, with their checksums, and written without all tensors in memory."""

from __future__ import annotations

import io
import os
import pickle
import stat
import struct
import sys
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, held
from lwopt_backend.checkpoint.files import manifest, pickles
from lwopt_backend.checkpoint.files.folders import check_inside
from lwopt_backend.checkpoint.files.threads import in_order

# The zip archives of torch.save, in a file or in a part of one: stored records, each with its checksum. The last two
# fields of a local header are the lengths of the name and the padding after it; then come the record's bytes. Format:
# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT

CHUNK = 2**22  # bytes read at once; they fit into the processor's cache
_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Stored:
    """A place in a file: ``length`` bytes from ``offset`` on. If ``folder`` is given, the file must be in it; the first
    reader checks."""

    path: Path
    offset: int
    length: int
    folder: Path | None = None


class Record:
    """Bytes in a file with their CRC32s, one for every ``block`` bytes. A block is read and checked once, on first
    use."""

    def __init__(self, stored: Stored, crcs: Sequence[int], block: int, where: str) -> None:
        self.stored, self.crcs, self.block, self._where = stored, crcs, block, where
        self._checked, self._lock = set[int](), threading.Lock()

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Check the bytes [start, stop), by default all. Raises CheckpointError for a wrong checksum."""
        stop = self.stored.length if stop is None else stop
        with self._lock:
            for number in {*range(start // self.block, -(-stop // self.block))} - self._checked:
                first = number * self.block
                length = min(self.block, self.stored.length - first)
                self._compare(number, _crc_of(Stored(self.stored.path, self.stored.offset + first, length)))

    def check_read(self, data: memoryview) -> None:
        """Check ``data``, the bytes of the whole record."""
        for number in range(len(self.crcs)):
            if number not in self._checked:
                self._compare(number, zlib.crc32(data[number * self.block : (number + 1) * self.block]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self.stored, self.crcs, self.block, self._where)

    def _compare(self, number: int, found: int) -> None:
        if found != self.crcs[number]:
            raise _damaged(self._where, "a checksum is wrong")
        self._checked.add(number)


class Archive:
    """The records of an archive, by name without their folder; ``crc32`` is that of its directory, which has the
    records' checksums. Raises CheckpointError for damage. Records of tensors, named ``data/...``, are not read."""

    def __init__(self, stored: Stored, where: str) -> None:
        self.stored, self.where = stored, where
        whole = max(stored.length, 1)  # each record has one checksum
        with io.BufferedReader(_Part(stored)) as file:
            try:
                archive = zipfile.ZipFile(file)
                entries = archive.infolist()
                main = next((entry.filename for entry in entries if entry.filename.endswith("/data.pkl")), None)
                if main is None:
                    raise ValueError("it has no data.pkl")
                root = main.removesuffix("data.pkl")
                if sum(entry.file_size for entry in entries) > stored.length:
                    raise ValueError("its records overlap")
                self.records = {
                    entry.filename.removeprefix(root): Record(_place(file, entry, stored), (entry.CRC,), whole, where)
                    for entry in entries
                }
                file.seek(archive.start_dir)
                self.crc32 = zlib.crc32(file.read())
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
                raise _damaged(where, error) from error
        for name, record in self.records.items():
            if not name.startswith("data/"):
                record.check()

    def bytes(self, name: str) -> bytes:
        stored = self.records[name].stored
        with io.BufferedReader(_Part(stored)) as file:
            return file.read()


class _Part(io.RawIOBase):
    """A part of a file as if it were a file."""

    def __init__(self, stored: Stored) -> None:
        try:
            self._file = stored.path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{stored.path} cannot be read: {error}") from error
        self._stored, self._at = stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.length}[whence]
        if base + offset < 0:
            raise OSError("a place before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._stored.length - self._at))
        self._file.seek(self._stored.offset + self._at)
        read = self._file.readinto(memoryview(buffer)[:count])
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


def _place(file: io.BufferedReader[_Part], entry: zipfile.ZipInfo, stored: Stored) -> Stored:
    """The place of a record's bytes. Raises ValueError for another kind of archive, OSError and struct.error."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        raise ValueError(f"expected {entry.filename} stored as torch.save does, found it compressed or encrypted")
    file.seek(entry.header_offset)
    signature, name, padding = _HEADER.unpack(file.read(_HEADER.size))
    if signature != b"PK\x03\x04" or file.read(name) != entry.orig_filename.encode():
        raise ValueError(f"{entry.filename} is not where the directory says")
    start = entry.header_offset + _HEADER.size + name + padding
    if start + entry.file_size > stored.length:
        raise ValueError(f"{entry.filename} ends after the file")
    return Stored(stored.path, stored.offset + start, entry.file_size)


def _crc_of(stored: Stored) -> int:
    crc, left, buffer = 0, stored.length, memoryview(bytearray(min(CHUNK, max(stored.length, 1))))
    with stored.path.open("rb", buffering=0) as file:
        file.seek(stored.offset)
        while left:
            read = file.readinto(buffer[: min(left, len(buffer))])
            if not read:
                raise _damaged(str(stored.path), "it ends early")
            crc = zlib.crc32(buffer[:read], crc)
            left -= read
    return crc


def _damaged(where: str, reason: object) -> CheckpointError:
    return CheckpointError(f"{where} is damaged: {reason}; copy it again")


# torch reads the pickled structure, with stubs for classes of other programs. Tensors become places in the file's
# records, whose lengths must fit; each tensor is read and checked on first use.


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place: its first element is at byte ``start`` of a record; strides are in elements."""

    record: Record
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    where: str

    def box(self, begin: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Elements from number ``begin`` on. Raises CheckpointError for a wrong checksum."""
        start, stored = self.start + begin * self.dtype.itemsize, self.record.stored
        if stored.folder is not None:
            check_inside(stored.path, stored.folder)
        count = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        is_whole = count * self.dtype.itemsize == stored.length and _is_contiguous(shape, stride)
        if count and not is_whole:
            self.record.check(start, start + count * self.dtype.itemsize)
        found = read_strided(stored.path, stored.offset + start, shape, stride, self.dtype, self.where)
        if is_whole:
            self.record.check_read(contents.memory(found))
        return found

    def lazy(self) -> LazyTensor:
        ranged = self._range if _is_contiguous(self.shape, self.stride) else None
        place = str(self.record.stored.path), self.record.stored.offset + self.start
        read = partial(self.box, 0, self.shape, self.stride)
        return LazyTensor(self.shape, self.dtype, read, self.where, ranged, self.stride, place)

    def _range(self, start: int, stop: int) -> Tensor:
        return self.box(start, (stop - start,), (1,))


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def load(path: Path, folder: Path | None = None) -> Any:
    """The content of a file, with a ``LazyTensor`` for every tensor and a ``Stub`` for objects of classes that are not
    here. ``folder`` is the checkpoint's, which must contain the file; by default, the file's own folder.

    A tensor's bytes are checked when they are read. Raises CheckpointError for a file that is damaged, or that names a
    class that is not allowed.
    """
    check_inside(path, folder or path.parent)
    archive = Archive(_whole(path), str(path))
    manifest.check(path, lambda: archive.crc32)
    return _load(archive, StoredTensor.lazy)


def load_part(stored: Stored, where: str) -> Any:
    """The content of a part of a file, with a ``StoredTensor`` for every tensor."""
    return _load(Archive(stored, where), lambda tensor: tensor)


def load_here(stored: Stored, where: str) -> Any:
    """Like ``load_part``, with the tensors themselves, in memory."""
    return _load(Archive(stored, where), lambda tensor: tensor.lazy().read())


def read_strided(
    path: Path, start: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, where: str
) -> Tensor:
    """A tensor whose first element is at byte ``start`` of a file; strides are in elements."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    flat = torch.empty(count, dtype=dtype)
    data = contents.memory(flat)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while data:
            read = file.readinto(data)
            if not read:
                raise CheckpointError(f"{where} ends early: {path} is not whole; copy it again")
            data = data[read:]
    return torch.as_strided(flat, shape, stride).contiguous()


def _whole(path: Path) -> Stored:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is missing") from error
    if not stat.S_ISREG(found.st_mode):  # a pipe would block
        raise CheckpointError(f"{path}: expected a file, found something else; copy it again")
    return Stored(path, 0, found.st_size)


def _load(archive: Archive, make: Callable[[StoredTensor], Any]) -> Any:
    stored, where = archive.stored, archive.where
    order = archive.bytes("byteorder").decode() if "byteorder" in archive.records else "little"
    if order != sys.byteorder:
        raise CheckpointError(f"{where}: expected this byte order, found {order}; save it again on such a machine")

    def storage(key: str, nbytes: int) -> torch.UntypedStorage:
        record = archive.records.get(f"data/{key}")
        if record is None or record.stored.length != nbytes:
            there = "none" if record is None else f"one of {record.stored.length}"
            raise ValueError(f"expected a record data/{key} of {nbytes} bytes, found {there}")
        made = torch.UntypedStorage(nbytes, device="meta")
        vars(made)["record"] = record
        return made

    found = pickles.load(archive.bytes("data.pkl"), where, storage)
    try:
        return pickles.replaced(found, lambda tensor, key: make(_place_of(tensor, f"{key} in {stored.path}")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be unpickled ({error}); copy it again") from error


def _place_of(tensor: Tensor, where: str) -> StoredTensor:
    """The place of a tensor's bytes. Raises ValueError for a tensor with more elements than its record."""
    shape, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize
    record: Record | None = vars(tensor.untyped_storage()).get("record")
    if record is None:
        raise ValueError(f"expected a record of {where}, found none")
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    if 0 not in shape and end * itemsize > record.stored.length:
        raise ValueError(f"expected the elements of {where} of shape {shape}, found fewer")
    return StoredTensor(record, int(tensor.storage_offset()) * itemsize, shape, stride, tensor.dtype, where)


ALIGNMENT = 64  # bytes, so that files can be mapped into memory
FORMAT_VERSION = b"3\n"  # of PyTorch's archives: kProducedFileFormatVersion
PADDING = 0x4246  # "FB", the header's field that PyTorch pads with
_PADDING = struct.Struct("<HH")
_ZIP64 = struct.Struct("<HHQQ")
SMALLEST_BLOCK, MOST_BLOCKS = 2**16, 256


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
        if value.dtype in torch.storage._dtype_to_storage_type_map():
            return torch._utils._rebuild_tensor_v2, place
        return torch._utils._rebuild_tensor_v3, (*place, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        tensor, kind = value.tensor, torch.storage._dtype_to_storage_type_map().get(value.tensor.dtype)
        if kind is None:  # a newer dtype, such as float8's, whose storage is bytes
            return "storage", torch.UntypedStorage, value.key, "cpu", tensor.nbytes
        return "storage", getattr(torch, kind), value.key, "cpu", tensor.numel


@dataclass(frozen=True)
class Written:
    """A file that was written: its directory's CRC32, and each tensor's record, in their order."""

    crc32: int
    records: tuple[Record, ...]


def save(content: Any, path: Path, workers: int = 1) -> Written:
    """Write ``content``, in which tensors may be lazy: ``workers`` blocks of them, or whole ones if ranges cannot be
    read, are in memory. They become contiguous.

    ``torch.load`` reads the file: an archive of stored records, each at a multiple of ``ALIGNMENT`` bytes, as in
    PyTorch's own (torch/serialization.py, ``_save``; caffe2/serialize/inline_container.cc).
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    small = {"data.pkl": pickled.getvalue(), "byteorder": sys.byteorder.encode(), "version": FORMAT_VERSION}
    records = []
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in small.items():
            _write(archive, path, name, len(data), [data])
        for storage in pickler.storages:
            tensor = storage.tensor
            blocks = map(contents.memory, in_order(tensor.block_reads(), workers))
            records.append(_write(archive, path, f"data/{storage.key}", tensor.nbytes, blocks))
            if hasattr(os, "posix_fadvise"):  # Linux starts to write pages that are declared unneeded (mm/fadvise.c)
                place = records[-1].stored
                os.posix_fadvise(file.fileno(), place.offset, place.length, os.POSIX_FADV_DONTNEED)
    return Written(directory_crc(path), tuple(records))


def directory_crc(path: Path) -> int:
    """The CRC32 of the directory of an archive that has just been written, for its manifest."""
    return Archive(_whole(path), str(path)).crc32


def save_as_it_lies(content: Any, file: BinaryIO) -> None:
    """``torch.save``, which keeps tensors' strides. Raises OSError if the disk is full."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's writer raises it when it ends
        first = error.__context__
        if isinstance(first, OSError):
            raise first from error
        raise


def _write(
    archive: zipfile.ZipFile, path: Path, name: str, nbytes: int, blocks: Iterable[bytes | memoryview]
) -> Record:
    """Write a record of blocks, which begins at a multiple of ``ALIGNMENT``."""
    entry = zipfile.ZipInfo(f"archive/{name}")
    entry.file_size = nbytes
    is_large = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as in zipfile
    header = _HEADER.size + len(entry.filename) + (_ZIP64.size if is_large else 0) + _PADDING.size
    padding = -(archive.start_dir + header) % ALIGNMENT
    entry.extra = _PADDING.pack(PADDING, padding) + bytes(padding)
    start, sums = archive.start_dir + header + padding, Sums(nbytes)
    with archive.open(entry, "w", force_zip64=is_large) as file:
        for data in blocks:
            file.write(data)
            sums.add(data)
    assert archive.start_dir == start + nbytes, f"{name}: expected {nbytes} bytes, found {archive.start_dir - start}"
    return Record(Stored(path, start, nbytes), sums.crcs, sums.block, name)


class Sums:
    """The CRC32s of ``nbytes`` bytes, one for every ``block``; data is added in any lengths.

    Blocks are small compared with a tensor, because at stage 3 a rank reads a part of every tensor, and checks whole
    blocks. There are at most ``MOST_BLOCKS``, because the CRC32s of all tensors are read at once.
    """

    def __init__(self, nbytes: int) -> None:
        self.block = max(SMALLEST_BLOCK, -(-nbytes // MOST_BLOCKS))
        self.crcs: list[int] = []
        self._end = 0

    def add(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            if self._end % self.block == 0:
                self.crcs.append(0)
            taken = left[: self.block - self._end % self.block]
            self.crcs[-1] = zlib.crc32(taken, self.crcs[-1])
            self._end += len(taken)
            left = left[len(taken) :]
