"""Manifests: the files that one save wrote, with their sizes and CRC32s, so that readers notice any other file.

``lwopt_manifest.json`` is in the folder of the files and is written last::

    {"save_id": "9f0c...", "step": 100,
     "files": {"zero/wte.weight/fp32.pt": {"bytes": 4736, "crc32": "8d1f..."}, ...},
     "crc32": "..."}                                                                of all the above

The CRC32 of a file of torch.save is that of its directory, which has the CRC32s of its contents, so it is known without
reading the tensors. Files that the manifest does not list are ignored, because other tools may add some.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.checkpoint.files.folders import write_whole

NAME = "lwopt_manifest.json"
DEPTH = 4  # parent folders to search for a file's manifest: the third for <tag>/zero/<parameter>/<key>.pt
CHUNK = 2**22  # bytes that are read at once


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as it was written: its size and its CRC32."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """``files`` are by path relative to ``folder``, with ``/``. ``step`` is None if the writer had none."""

    folder: Path
    save_id: str
    step: int | None
    files: Mapping[str, FileEntry]

    @property
    def advice(self) -> str:
        return f"copy all of {self.folder} again, or, if another program has saved there since, remove its {NAME}"

    def check_sizes(self) -> None:
        """Raises CheckpointError for a file that is missing or has another size."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                found = path.stat()
            except OSError:
                found = None
            if found is None or not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path} is missing; {self.advice}")
            if found.st_size != entry.nbytes:
                said = "ends early" if found.st_size < entry.nbytes else "is too long"
                raise CheckpointError(
                    f"{path} {said}: expected {entry.nbytes} bytes, found {found.st_size}; {self.advice}"
                )

    def compare(self, name: str, crc32: int) -> None:
        """Raises CheckpointError if a file's CRC32 is not the one that was written."""
        expected = self.files[name].crc32
        if crc32 == expected:
            return
        raise CheckpointError(
            f"{self.folder / name}: expected the saved file with CRC32 {expected:08x}, found {crc32:08x}; it is "
            f"damaged, or of another save or rank; {self.advice}"
        )


# Writing: CRC32s are computed from the bytes as they are written.


class Summing(io.BufferedWriter):
    """A new file that computes its own CRC32."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class Files:
    """The files that one rank writes into a folder; threads may write several at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[Summing]:
        """Open a new file; closing it adds its entry."""
        with Summing(self.folder / name) as file:
            yield file
        self.add(name, file.crc32)

    def add(self, name: str, crc32: int) -> None:
        """Add the entry of a file that has been written."""
        self.entries[name] = FileEntry((self.folder / name).stat().st_size, crc32)


def new_save_id() -> str:
    """A random name for one save, shared by the files of all ranks."""
    return secrets.token_hex(8)


def write(folder: Path, files: Mapping[str, FileEntry], step: int | None, *, save_id: str | None = None) -> None:
    """Write the manifest of ``files``, all of which must exist. The default ``save_id`` is a hash of their entries."""
    listed = {n: {"bytes": e.nbytes, "crc32": f"{e.crc32:08x}"} for n, e in sorted(files.items())}
    save_id = save_id or hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
    content = {"save_id": save_id, "step": step, "files": listed}
    write_whole(folder / NAME, (json.dumps({**content, "crc32": _own_crc(content)}, indent=1) + "\n").encode())


def _own_crc(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def read(folder: Path) -> Manifest | None:
    """A folder's manifest; None if there is none. Raises CheckpointError for a damaged manifest."""
    path = folder / NAME
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):  # a pipe would block
        raise CheckpointError(f"{path}: expected a file, found something else; copy it again")
    return _parsed(path, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, *_: int) -> Manifest:
    try:
        content = json.loads(path.read_bytes())
        if content.pop("crc32") != _own_crc(content):
            raise ValueError("its own CRC32 is wrong")
        save_id, step, listed = (content[key] for key in ("save_id", "step", "files"))
        files = {name: FileEntry(of["bytes"], int(of["crc32"], 16)) for name, of in listed.items()}
        numbers = [*(entry.nbytes for entry in files.values()), step or 0]
        if not isinstance(save_id, str) or not all(type(number) is int for number in numbers):
            raise ValueError("a number or the save's name has another type")
        for name in filter(leads_out, files):
            raise ValueError(f"it names {name!r}, outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from error
    return Manifest(path.parent, save_id, step, files)


def leads_out(name: str) -> bool:
    """Whether a path is not below the folder to which it is relative, on any system."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def check_files(folder: Path) -> None:
    """Raises CheckpointError for files of the folder's manifest, if any, that are missing or of another size."""
    if (manifest := read(folder)) is not None:
        manifest.check_sizes()


def check(path: Path, crc32: Callable[[], int]) -> None:
    """Raises CheckpointError if a manifest lists the file with another CRC32."""
    for folder in path.parents[:DEPTH]:
        manifest = read(folder)
        if manifest is not None:
            name = path.relative_to(folder).as_posix()
            if name in manifest.files:
                manifest.compare(name, crc32())
            return


def crc_of(path: Path) -> int:
    """The CRC32 of a whole file."""
    crc = 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            crc = zlib.crc32(data, crc)
    return crc
