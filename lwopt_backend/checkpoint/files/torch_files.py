"""Files of torch.save: read lazily, compared with their checksums as they are read, and written block by block."""

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, held
from lwopt_backend.checkpoint.files import manifest, pickles
from lwopt_backend.checkpoint.files.threads import in_order

# torch.load is not used. It runs TorchScript's archives, unpacks tar files wherever their names lead, may write source
# code next to the program, and compares no checksum. zipfile finds the records of an archive, and pickles.Unpickler
# reads the structure, in which a tensor is a place in a record: no byte of a tensor is read before it is needed.


@dataclass(frozen=True)
class Stored:
    """A place in a file: ``length`` bytes from ``offset`` on."""

    path: Path
    offset: int
    length: int


class Record:
    """Bytes in a file with their CRC32, None if the writer wrote none. All that is read of them is added to the sum;
    ``finish`` adds the rest and compares. What is read in one piece is compared at once."""

    def __init__(self, stored: Stored, crc32: int | None, where: str) -> None:
        self.stored, self.crc32, self.where = stored, crc32, where
        self._runs: dict[int, tuple[int, int]] = {}  # by their ends: the start and the CRC32 of what was read
        self._lock = threading.Lock()
        self._compared = crc32 is None

    def __reduce__(self) -> Any:  # other ranks read parts of it, which nobody can compare
        return Record, (self.stored, None, self.where)

    def read(self, first: int, count: int) -> Tensor:
        """The bytes from ``first`` on. Raises CheckpointError if the file ends early, or for a wrong checksum."""
        found = torch.empty(count, dtype=torch.uint8)
        _fill(self.stored, first, contents.memory(found), self.where)
        if not self._compared:
            self._add(first, contents.memory(found))
        return found

    def _add(self, first: int, data: memoryview) -> None:
        with self._lock:
            start, crc = self._runs.pop(first, (first, 0))
        crc = zlib.crc32(data, crc)
        with self._lock:
            self._runs[first + len(data)] = start, crc
        if start == 0 and first + len(data) == self.stored.length:
            self._compare(crc)

    def _compare(self, found: int) -> None:
        if found != self.crc32:
            raise damaged(self.where, "a checksum is wrong")
        self._compared = True

    def tensors_read(self) -> dict[str, bool]:
        return {}

    def finish(self) -> None:
        """Compare the whole, if some of it was read. Raises CheckpointError for a wrong checksum."""
        if self._compared or not self._runs:
            return
        runs = sorted((start, stop, crc) for stop, (start, crc) in self._runs.items())
        total, done = 0, 0
        for start, stop, crc in [*runs, (self.stored.length, self.stored.length, 0)]:
            for begin in range(done, start, CHUNK):  # what nobody has read
                data = memoryview(bytearray(min(CHUNK, start - begin)))
                _fill(self.stored, begin, data, self.where)
                total = zlib.crc32(data, total)
            if done <= start < stop:
                total, done = _combined(total, crc, stop - start), stop
        self._compare(total)


CHUNK = 2**21  # bytes read at once; they fit into the processor's cache


def _fill(stored: Stored, first: int, data: memoryview, where: str) -> None:
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset + first)
            while data:
                read = file.readinto(data)
                if not read:
                    raise CheckpointError(f"{where} ends early: {stored.path} is not whole; copy it again")
                data = data[read:]
    except OSError as error:
        raise CheckpointError(f"{stored.path} cannot be read: {error}") from error


# The CRC32 of two pieces together, as in zlib's crc32_combine: polynomials over two elements, the lowest power last.
POLYNOMIAL = 0xEDB88320


def _product(a: int, b: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return found


@lru_cache(4096)
def _shift(nbytes: int) -> int:
    """x to the power of the number of bits."""
    found, square = 1 << 31, 1 << 23  # 1, and x**8
    while nbytes:
        if nbytes & 1:
            found = _product(found, square)
        square, nbytes = _product(square, square), nbytes >> 1
    return found


def _combined(first: int, second: int, nbytes: int) -> int:
    """The CRC32 of bytes with ``first`` and then ``nbytes`` with ``second``."""
    return _product(_shift(nbytes), first) ^ second


# Archives, in a file or in a part of one: stored records, each with its checksum. The last two fields of a local header
# are the lengths of the name and the padding after it; then come the record's bytes. Format:
# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT

_HEADER = struct.Struct("<4s22xHH")


class Archive:
    """The records of an archive, by name without their folder; ``crc32`` is that of its directory, which has the
    records' checksums. Raises CheckpointError for damage. Records of tensors, named ``data/...``, are not read."""

    def __init__(self, stored: Stored, where: str, compares: bool = True) -> None:
        self.stored, self.where = stored, where
        with io.BufferedReader(_Part(stored)) as file:
            try:
                archive = zipfile.ZipFile(file)
                entries = archive.infolist()
                main = next((entry.filename for entry in entries if entry.filename.endswith("/data.pkl")), None)
                if main is None:
                    raise ValueError("it has no data.pkl")
                root = main.removesuffix("data.pkl")
                if f"{root}constants.pkl" in archive.namelist():
                    raise CheckpointError(
                        f"{where}: expected a file of torch.save, found TorchScript's, which is a program; save the "
                        "module's state_dict()"
                    )
                if sum(entry.compress_size for entry in entries) > stored.length:
                    raise ValueError("its records overlap")
                self.records = {
                    entry.filename.removeprefix(root): Record(
                        _place(file, entry, stored), entry.CRC or None if compares else None, where
                    )
                    for entry in entries  # without checksums, torch writes 0
                }
                file.seek(archive.start_dir)
                self.crc32 = zlib.crc32(file.read())
            except CheckpointError:
                raise
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
                raise damaged(where, error) from error

    def tensors_read(self) -> dict[str, bool]:
        return {}

    def finish(self) -> None:
        """Compare the records of which some was read. Raises CheckpointError for a wrong checksum."""
        for record in self.records.values():
            record.finish()

    def check(self) -> None:
        """Read all records and compare them. Raises CheckpointError for a wrong checksum."""
        for record in self.records.values():
            for start in range(0, record.stored.length if record.crc32 is not None else 0, CHUNK):
                record.read(start, min(CHUNK, record.stored.length - start))

    def bytes(self, name: str) -> bytes:
        record = self.records[name]
        return bytes(contents.memory(record.read(0, record.stored.length)))


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
    """The place of a record's bytes. Raises CheckpointError for another kind of archive, and ValueError, OSError and
    struct.error for damage."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        raise CheckpointError(
            f"{stored.path}: expected {entry.filename} stored as torch.save does, found it compressed or encrypted; "
            "unpack the file and save it with torch.save"
        )
    file.seek(entry.header_offset)
    signature, name, padding = _HEADER.unpack(file.read(_HEADER.size))
    if signature != b"PK\x03\x04" or file.read(name) != entry.orig_filename.encode():
        raise ValueError(f"{entry.filename} is not where the directory says")
    start = entry.header_offset + _HEADER.size + name + padding
    if start + entry.file_size > stored.length:
        raise ValueError(f"{entry.filename} ends after the file")
    return Stored(stored.path, stored.offset + start, entry.file_size)


def damaged(where: str, reason: object) -> CheckpointError:
    return CheckpointError(f"{where} is damaged: {reason}; copy it again")


# Reading


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place: its first element is at byte ``start`` of a record; strides are in elements."""

    record: Record
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __reduce__(self) -> Any:
        return StoredTensor, tuple(getattr(self, each.name) for each in fields(self))

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("expected a tensor of the file as it is, found attributes for it")  # in a pickle that is read

    def box(self, begin: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Elements from number ``begin`` on. Raises CheckpointError for a wrong checksum."""
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        size = self.dtype.itemsize
        flat = self.record.read(self.start + begin * size, count * size).view(self.dtype)
        return torch.as_strided(flat, shape, stride).contiguous()

    def lazy(self) -> LazyTensor:
        record, read = self.record, partial(self.box, 0, self.shape, self.stride)
        where, place = f"a tensor in {record.where}", (str(record.stored.path), record.stored.offset + self.start)
        ranged = self._range if _is_contiguous(self.shape, self.stride) else None
        return LazyTensor(self.shape, self.dtype, read, where, ranged, self.stride, place)

    def _range(self, start: int, stop: int) -> Tensor:
        return self.box(start, (stop - start,), (1,))


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


Make = Callable[[StoredTensor], Any]


def load(path: Path) -> Any:
    """The content of a file, with a ``LazyTensor`` for every tensor and a ``Stub`` for objects of classes that are not
    here. Raises CheckpointError for a file that is damaged, or that a manifest lists with another checksum.

    A tensor's bytes are added to their record's checksum as they are read; ``contents.reader`` finishes the checksums.
    """
    stored, where = _whole(path), str(path)
    with path.open("rb") as file:
        start = file.read(32)
    if start[:1] == pickle.PROTO and OLDER in start:
        return _older_content(stored, where, StoredTensor.lazy)
    if start[:4] != b"PK\x03\x04":
        raise CheckpointError(
            f"{where}: expected a file of torch.save, found another or half of one; copy or save it again"
        )
    archive = Archive(stored, where)
    manifest.check(path, lambda: archive.crc32)
    contents.finish_later(archive)
    return _content(archive, StoredTensor.lazy)


def check_files(paths: Iterable[Path]) -> None:
    """Read whole files of torch.save. Raises CheckpointError for a wrong checksum; the older form has none."""
    for path in filter(zipfile.is_zipfile, paths):
        Archive(_whole(path), str(path)).check()


def load_part(stored: Stored, where: str, compares: bool = True) -> tuple[Any, Archive]:
    """The content of a part of a file, with a ``StoredTensor`` for every tensor, and its records."""
    archive = Archive(stored, where, compares)
    return _content(archive, lambda tensor: tensor), archive


def load_here(stored: Stored, where: str) -> Any:
    """The content of a part of a file, with the tensors in memory."""
    return _content(Archive(stored, where), lambda tensor: tensor.lazy().read())


def _content(archive: Archive, make: Make) -> Any:
    order = archive.bytes("byteorder").decode() if "byteorder" in archive.records else "little"
    _check_order(archive.where, order)

    def record(key: str, nbytes: int) -> Record:
        return _of_length(archive.records.get(f"data/{key}"), key, nbytes)

    with pickles.naming(archive.where):
        return pickles.Unpickler(io.BytesIO(archive.bytes("data.pkl")), record, partial(_tensor, make)).load()


def _check_order(where: str, order: str) -> None:
    if order != sys.byteorder:
        raise CheckpointError(f"{where}: expected this byte order, found {order}; save it again on such a machine")


def _of_length(record: Record | None, key: str, nbytes: int) -> Record:
    if record is None or record.stored.length != nbytes:
        there = "none" if record is None else f"one of {record.stored.length}"
        raise ValueError(f"expected a record data/{key} of {nbytes} bytes, found {there}")
    return record


def _tensor(
    make: Make, record: Record, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """The tensor at a place. Raises ValueError for one with more elements than its record."""
    end = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and end * dtype.itemsize > record.stored.length:
        raise ValueError(f"expected the elements of a tensor of shape {shape}, found fewer")
    return make(StoredTensor(record, offset * dtype.itemsize, shape, stride, dtype))


# The form before torch 1.6, of checkpoint_serialization false in ds_config: five pickles (a number, the form, facts of
# the machine, the content, the storages' keys), then the storages in this order, each after its number of elements.

OLDER = pickle.dumps(0x1950A86A20F9469CFC6C, 2)[2:]  # after the protocol, and in newer ones a frame


def _older_content(stored: Stored, where: str, make: Make) -> Any:
    with io.BufferedReader(_Part(stored)) as file, pickles.naming(where):
        _, form, machine = (pickles.Unpickler(file).load() for _ in range(3))
        if form != 1001:
            raise ValueError(f"expected form 1001, found {str(form)[:20]}")
        _check_order(where, "little" if machine["little_endian"] else "big")
        begin, sizes = file.tell(), dict[str, int]()
        pickles.Unpickler(file, sizes.setdefault, lambda *_: None).load()
        records = dict[str, Record]()
        keys, at = pickles.Unpickler(file).load(), file.tell()
        for key in keys:
            records[key] = Record(Stored(stored.path, stored.offset + at + 8, sizes[key]), None, where)
            at += 8 + sizes[key]
        if at > stored.length:
            raise damaged(where, "it ends early")
        file.seek(begin)
        record = lambda key, nbytes: _of_length(records.get(key), key, nbytes)  # noqa: E731
        return pickles.Unpickler(file, record, partial(_tensor, make)).load()


def _whole(path: Path) -> Stored:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is missing") from error
    if not stat.S_ISREG(found.st_mode):  # a pipe would block
        raise CheckpointError(f"{path}: expected a file, found something else; copy it again")
    return Stored(path, 0, found.st_size)


# Writing

ALIGNMENT = 64  # bytes, so that files can be mapped into memory
FORMAT_VERSION = b"3\n"  # of PyTorch's archives: kProducedFileFormatVersion
PADDING = 0x4246  # "FB", the header's field that PyTorch pads with
_PADDING = struct.Struct("<HH")
_ZIP64 = struct.Struct("<HHQQ")


@dataclass(frozen=True, eq=False)
class _StorageReference:
    """A tensor's storage in the pickled structure, which has a reference to a record of the file in its place."""

    tensor: LazyTensor
    kind: Any
    key: str
    count: int


class _Pickler(pickle.Pickler):
    """Pickles tensors, also lazy ones, as torch does: as a reference to a record of the file."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_StorageReference] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = held(value, "")
        if not isinstance(value, LazyTensor):
            return NotImplemented
        make, (_, _, _, _, *rest) = torch.empty(0, dtype=value.dtype).__reduce_ex__(2)  # in torch's form
        kind = next((name for name, dtype in pickles.STORAGES.items() if dtype == value.dtype), None)
        of = (torch.UntypedStorage, value.nbytes) if kind is None else (getattr(torch, kind), value.numel)
        storage = _StorageReference(value, of[0], str(len(self.storages)), of[1])
        self.storages.append(storage)
        stride = torch.empty(value.shape, device="meta").stride()
        return make, (storage, 0, torch.Size(value.shape), stride, *rest)

    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, _StorageReference) else None


def save(content: Any, path: Path, workers: int = 1) -> int:
    """Write ``content``, in which tensors may be lazy: ``workers`` blocks of them, or whole ones if ranges cannot be
    read, are in memory, where torch.save needs all of them. Returns the CRC32 of the file's directory.

    ``torch.load`` reads the file: an archive of stored records, each at a multiple of ``ALIGNMENT`` bytes, as in
    PyTorch's own (torch/serialization.py, ``_save``; caffe2/serialize/inline_container.cc).
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    small = {"data.pkl": pickled.getvalue(), "byteorder": sys.byteorder.encode(), "version": FORMAT_VERSION}
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in small.items():
            _write(archive, name, len(data), [data])
        for storage in pickler.storages:
            blocks = map(contents.memory, in_order(storage.tensor.block_reads(), workers))
            start = _write(archive, f"data/{storage.key}", storage.tensor.nbytes, blocks)
            if hasattr(os, "posix_fadvise"):  # Linux starts to write pages that are declared unneeded (mm/fadvise.c)
                os.posix_fadvise(file.fileno(), start, storage.tensor.nbytes, os.POSIX_FADV_DONTNEED)
    return directory_crc(path)


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


def _write(archive: zipfile.ZipFile, name: str, nbytes: int, blocks: Iterable[bytes | memoryview]) -> int:
    """Write a record of blocks, which begins at a multiple of ``ALIGNMENT``; returns its place."""
    entry = zipfile.ZipInfo(f"archive/{name}")
    entry.file_size = nbytes
    is_large = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as in zipfile
    header = _HEADER.size + len(entry.filename) + (_ZIP64.size if is_large else 0) + _PADDING.size
    padding = -(archive.start_dir + header) % ALIGNMENT
    entry.extra = _PADDING.pack(PADDING, padding) + bytes(padding)
    start = archive.start_dir + header + padding
    with archive.open(entry, "w", force_zip64=is_large) as file:
        for data in blocks:
            file.write(data)
    assert archive.start_dir == start + nbytes, f"{name}: expected {nbytes} bytes, found {archive.start_dir - start}"
    return start
