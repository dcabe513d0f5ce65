"""The zip archives that torch.save writes, in a file or in a part of one: stored records, each with its checksum.

A local header, whose last two fields say how long name and padding after it are, then the record's bytes. Format:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import io
import struct
import threading
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError

CHUNK = 2**22  # bytes that are read at once: what the processor's cache holds
_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Stored:
    """Where something is in a file: ``length`` bytes from ``offset`` on."""

    path: Path
    offset: int
    length: int


class Record:
    """A tensor's bytes in a file. They are checked once: when they are first read whole, or before a part is read."""

    def __init__(self, stored: Stored, crc: int, where: str, checked: bool) -> None:
        self.stored, self._crc, self._where = stored, crc, where
        self._checked, self._lock = checked, threading.Lock()

    def check(self) -> None:
        """Read all of it, if it was not checked yet. Raises CheckpointError unless all is as it was written."""
        with self._lock:
            if not self._checked:
                self._compare(_crc_of(self.stored))

    def check_read(self, tensor: Tensor) -> None:
        """The same with what was read: all of it."""
        if not self._checked:
            self._compare(zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data))

    def _compare(self, found: int) -> None:
        if found != self._crc:
            raise _damaged(self._where, "a checksum is wrong")
        self._checked = True


class Archive:
    """The records of an archive by name, without the folder that they are in. Raises CheckpointError for damage.

    Those of tensors, which are called ``data/...``, are not read; ``checked`` says that they need not be checked.
    """

    def __init__(self, stored: Stored, where: str, checked: bool = False) -> None:
        self._where = where
        with PartOfFile(stored) as file:
            try:
                entries = zipfile.ZipFile(file).infolist()
                main = next((entry.filename for entry in entries if entry.filename.endswith("/data.pkl")), None)
                if main is None:
                    raise ValueError("it has no data.pkl")
                root = main.removesuffix("data.pkl")
                if sum(entry.file_size for entry in entries) > stored.length:
                    raise ValueError("its records overlap")
                self.records = {
                    entry.filename.removeprefix(root): Record(_place(file, entry, stored), entry.CRC, where, checked)
                    for entry in entries
                }
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, struct.error) as error:
                raise _damaged(where, error) from error
        for name, record in self.records.items():
            if not name.startswith("data/"):
                record.check()

    def bytes(self, name: str) -> bytes:
        """A record's, which is a small one."""
        stored = self.records[name].stored
        with PartOfFile(stored) as file:
            return file.read()

    def check(self) -> None:
        """Check every record. Raises CheckpointError."""
        for record in self.records.values():
            record.check()


class PartOfFile(io.BufferedReader):
    """A part of a file as if it were a file."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(_Part(stored))


class _Part(io.RawIOBase):
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


def _place(file: io.BufferedReader, entry: zipfile.ZipInfo, stored: Stored) -> Stored:
    """Where a record's bytes are. Raises ValueError for an archive of another kind, OSError and struct.error."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
        raise ValueError(f"{entry.filename} is compressed or encrypted, as torch.save does not write it")
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
