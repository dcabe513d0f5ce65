"""Manifests: the files that one save wrote, with their sizes and CRC32s, so that readers notice any other file.

``lwopt_manifest.json`` is in the folder of the files and is written last::

    {"save_id": "9f0c...", "step": 100, "world": 2,
     "files": {"zero/wte.weight/fp32.pt": {"bytes": 4736, "crc32": "8d1f...", "rank": 0}, ...},
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
class Entry:
    """A file as it was written: its size, its CRC32, and the rank that wrote it."""

    nbytes: int
    crc32: int
    rank: int = 0


@dataclass(frozen=True)
class Manifest:
    """``files`` are by path relative to ``folder``, with ``/``. ``step`` is None if the writer had none."""

    folder: Path
    save_id: str
    step: int | None
    world: int
    files: Mapping[str, Entry]

    @property
    def advice(self) -> str:
        return f"copy all of {self.folder} again, or, if another program has saved there since, remove its {NAME}"

    def wrong_sizes(self) -> Iterator[str]:
        """A sentence for each file that is missing or has another size."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                found = path.stat()
            except OSError:
                found = None
            size = found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None
            if size is None:
                yield f"{path} is missing; {self.advice}"
            elif size != entry.nbytes:
                said = f"expected {entry.nbytes} bytes, found {size}"
                yield f"{path} {'ends early' if size < entry.nbytes else 'is too long'}: {said}; {self.advice}"

    def compare(self, name: str, crc32: int) -> None:
        """Raises CheckpointError if a file's CRC32 is not the one that was written."""
        expected = self.files[name].crc32
        if crc32 == expected:
            return
        twin = next((other for other, entry in self.files.items() if entry.crc32 == crc32), None)
        found = f"{twin}" if twin else f"CRC32 {crc32:08x}"
        raise CheckpointError(
            f"{self.folder / name}: expected the saved file with CRC32 {expected:08x}, found {found}; it is damaged, "
            f"or of another save or rank; {self.advice}"
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

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self._rank = folder, rank
        self.entries: dict[str, Entry] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[Summing]:
        """Open a new file; closing it adds its entry."""
        with Summing(self.folder / name) as file:
            yield file
        self.add(name, file.crc32)

    def add(self, name: str, crc32: int) -> None:
        """Add the entry of a file that has been written."""
        self.entries[name] = Entry((self.folder / name).stat().st_size, crc32, self._rank)


def new_save_id() -> str:
    """A random name for one save, shared by the files of all ranks."""
    return secrets.token_hex(8)


def write(
    folder: Path, files: Mapping[str, Entry], step: int | None, *, save_id: str | None = None, world: int = 1
) -> None:
    """Write the manifest of ``files``, all of which must exist. The default ``save_id`` is a hash of their entries."""
    listed = {n: {"bytes": e.nbytes, "crc32": f"{e.crc32:08x}", "rank": e.rank} for n, e in sorted(files.items())}
    save_id = save_id or hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
    content = {"save_id": save_id, "step": step, "world": world, "files": listed}
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
        save_id, step, world, listed = (content[key] for key in ("save_id", "step", "world", "files"))
        files = {name: Entry(of["bytes"], int(of["crc32"], 16), of["rank"]) for name, of in listed.items()}
        numbers = [world, *(n for entry in files.values() for n in (entry.nbytes, entry.rank)), step or 0]
        if not isinstance(save_id, str) or not all(type(number) is int for number in numbers):
            raise ValueError("a number or the save's name has another type")
        for name in filter(leads_out, files):
            raise ValueError(f"it names {name!r}, outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from error
    return Manifest(path.parent, save_id, step, world, files)


def leads_out(name: str) -> bool:
    """Whether a path is not below the folder to which it is relative, on any system."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def check_files(folder: Path) -> Manifest | None:
    """The folder's manifest, if it has one. Raises CheckpointError for files that are missing or of another size."""
    manifest = read(folder)
    if manifest is not None:
        for wrong in manifest.wrong_sizes():
            raise CheckpointError(wrong)
    return manifest


MARK = 64  # bytes at the start of a file of DCP by this package: its save and its rank


def mark(save_id: str, rank: int) -> bytes:
    return f"lwopt save {save_id} rank {rank}\n".encode().ljust(MARK)


def is_marked(start: bytes) -> bool:
    """Whether a file that begins with these bytes was written by this package, in any save."""
    return len(start) == MARK and start.startswith(b"lwopt save ")


def check_marks(listed: Manifest, ending: str) -> None:
    """Raises CheckpointError for a file with this ending that is of another save or rank."""
    for name, entry in listed.files.items():
        if name.endswith(ending):
            with (listed.folder / name).open("rb") as file:
                found = file.read(MARK)
            expected = mark(listed.save_id, entry.rank)
            if found != expected:
                words, said = (text.decode(errors="replace").strip() for text in (expected, found))
                raise CheckpointError(
                    f"{listed.folder / name}: expected {words!r} at its start, found {said!r}; it is of another save "
                    f"or another rank; {listed.advice}"
                )


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
    crc = 0
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            crc = zlib.crc32(data, crc)
    return crc
