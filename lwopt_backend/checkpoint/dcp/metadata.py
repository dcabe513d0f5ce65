"""What DCP's file ``.metadata`` says: a folder's tensors with their chunks, other objects, and where they are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import LONGEST_NAME, CheckpointError
from lwopt_backend.checkpoint.files import pickles
from lwopt_backend.checkpoint.files.made import shape_of
from lwopt_backend.checkpoint.files.zip_records import Stored

METADATA = ".metadata"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it is. ``stored`` is None where the folder's metadata does not say."""

    offsets: Sizes
    sizes: Sizes
    stored: Stored | None


@dataclass(frozen=True)
class Entry:
    """A tensor: what it is, and the boxes that it was saved in."""

    shape: Sizes
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def near(self, offsets: Sizes, sizes: Sizes) -> Iterable[Chunk]:
        """All chunks that may have something of a box; of a stack of layers not those of other layers."""
        if not self.shape or sizes[0] > len(self._rows):
            return self.chunks
        rows = range(offsets[0], offsets[0] + sizes[0])
        return itertools.chain(self._wide, *(self._rows.get(row, ()) for row in rows))

    @functools.cached_property
    def _rows(self) -> dict[int, list[Chunk]]:
        found: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            if chunk.sizes[0] == 1:
                found.setdefault(chunk.offsets[0], []).append(chunk)
        return found

    @functools.cached_property
    def _wide(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.sizes[0] != 1]


@dataclass(frozen=True)
class Metadata:
    """``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts as the state dict was nested, where
    it was flattened; ``extra`` is what Megatron up to 0.15 noted about tensors, None in what others wrote."""

    path: Path
    tensors: Mapping[str, Entry]
    objects: Mapping[str, Stored | None]
    paths: Mapping[str, tuple[Any, ...]]
    extra: Mapping[str, Mapping[str, Any]] | None
    stored: tuple[Stored, ...]

    def check_files(self) -> None:
        """Raises CheckpointError for files that are missing or too short, and for a tensor that is not all in them."""
        _check_files(self.path, self.stored)
        for key, entry in self.tensors.items():
            _check_size(self.path, key, entry)


def read_metadata(folder: Path) -> Metadata:
    """Raises CheckpointError for what DCP does not write, and for places outside the folder."""
    path = folder / METADATA
    try:
        saved = pickles.load(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); without it the folder's files are of no use"
        ) from error
    try:
        stored = _stored(path, saved)
        tensors = dict(_tensors(saved, stored))
        objects = {key: stored.get((key, None)) for key in saved.state_dict_metadata if key not in tensors}
        paths = dict(_paths(saved.planner_data or {}))
        extra = dict(saved.mcore_data or {}) if hasattr(saved, "mcore_data") else None
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not what DCP writes ({error}); copy it again") from error
    return Metadata(path, tensors, objects, paths, extra, tuple(stored.values()))


def _stored(path: Path, metadata: Any) -> dict[tuple[str, Sizes | None], Stored]:
    found = {}
    for index, info in metadata.storage_data.items():
        if type(index.fqn) is not str or not all(type(n) is int for n in (info.offset, info.length)):
            raise ValueError("a place in a file is none")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} in {path.parent} is compressed ({info.transform_descriptors}), which is not supported; "
                "save it again without storage extensions"
            )
        relative = info.relative_path
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(relative).is_absolute() or kind(relative).drive or ".." in kind(relative).parts:
                raise CheckpointError(
                    f"{path} says that {index.fqn} is in {relative!r}, outside the folder; "
                    "no checkpoint is written so: do not use it"
                )
        offset = vars(index).get("offset")  # what is None is not pickled
        offset = None if offset is None else shape_of(offset)
        found[index.fqn, offset] = Stored(path.parent / relative, info.offset, info.length)
    return found


def _tensors(metadata: Any, stored: Mapping[tuple[str, Sizes | None], Stored]) -> Iterator[tuple[str, Entry]]:
    for key, found in metadata.state_dict_metadata.items():
        if type(key) is not str or len(key) > LONGEST_NAME:
            raise ValueError(f"a key is a {type(key).__name__}, or a long one")
        if not hasattr(found, "chunks"):
            continue
        shape, whole = shape_of(found.size), stored.get((key, None))
        chunks = {}
        for chunk in found.chunks:
            offsets, sizes = shape_of(chunk.offsets), shape_of(chunk.sizes)
            inside = all(first + size <= end for first, size, end in zip(offsets, sizes, shape))
            if not len(offsets) == len(sizes) == len(shape) or not inside:
                raise ValueError(f"{key} of shape {shape} has a chunk of {sizes} at {offsets}")
            place = stored.get((key, offsets), whole if len(found.chunks) == 1 else None)
            chunks[offsets, sizes] = Chunk(offsets, sizes, place)
        dtype, *_ = found.properties.stub_state  # TensorProperties pickles itself as a tuple
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has a {type(dtype).__name__} for its dtype")
        yield key, Entry(shape, dtype, tuple(chunks.values()))


def _paths(saved: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The parts of keys."""
    for key, path in saved.items():
        if type(key) is not str or type(path) is not tuple or not all(type(part) in (str, int) for part in path):
            raise ValueError("the path of a key is none")
        if path:
            yield key, path


def _check_files(metadata: Path, stored: Iterable[Stored]) -> None:
    ends: dict[Path, int] = {}
    used: dict[Path, int] = {}
    for place in stored:
        if place.offset < 0 or place.length < 0:
            raise CheckpointError(f"{metadata} is damaged: a negative place in {place.path.name}")
        ends[place.path] = max(ends.get(place.path, 0), place.offset + place.length)
        used[place.path] = used.get(place.path, 0) + place.length
    for path, end in sorted(ends.items()):
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing; copy all files of {metadata.parent}") from error
        if size < end:
            raise CheckpointError(f"{path} ends early: expected {end} bytes, found {size}; copy it again")
        if size < used[path]:
            raise CheckpointError(f"{metadata} is damaged: several tensors are at one place in {path}")


def _check_size(metadata: Path, key: str, entry: Entry) -> None:
    for chunk in entry.chunks:
        if chunk.stored is None:
            raise CheckpointError(f"{metadata} does not say where {key} is; copy it again")
        nbytes = math.prod(chunk.sizes) * entry.dtype.itemsize
        if nbytes > chunk.stored.length:
            raise CheckpointError(
                f"{metadata} is damaged: {key} has a chunk of {nbytes} bytes, but {chunk.stored.length} are stored"
            )
    saved = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if saved < math.prod(entry.shape):
        raise CheckpointError(incomplete(f"{key} in {metadata.parent}", saved, entry.shape, (0,) * len(entry.shape)))


def incomplete(where: str, saved: int, sizes: Sequence[int], offsets: Sequence[int]) -> str:
    """What is said of a box of which only so many elements were saved."""
    return (
        f"{where}: the chunks saved have {saved} of the {math.prod(sizes)} elements at {tuple(offsets)}; was every "
        "rank's file copied?"
    )
