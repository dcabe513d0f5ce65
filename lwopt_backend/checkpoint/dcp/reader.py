"""Reads folders of torch.distributed.checkpoint (DCP): tensors box by box, owner state, other objects."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import (
    CheckpointError,
    LazyTensor,
    shape_of,
)
from lwopt_backend.checkpoint.files import manifest, pickles, torch_files
from lwopt_backend.checkpoint.files.torch_files import Archive, Stored, StoredTensor
from lwopt_backend.plan.layouts import boxes_of

# DCP's file ``.metadata``: a folder's tensors with their chunks, other objects, and their places.

METADATA, FILE = ".metadata", ".distcp"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and its place. ``stored`` is None if the folder's metadata does not have it."""

    offsets: Sizes
    sizes: Sizes
    stored: Stored | None


@dataclass(frozen=True)
class Entry:
    """A tensor, and the boxes in which it was saved."""

    shape: Sizes
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def near(self, offsets: Sizes, sizes: Sizes) -> Sequence[Chunk]:
        """The chunks with rows in common with a box. A tensor may have a chunk of every rank, or of every layer."""
        if not self.shape:
            return self.chunks
        chunks, starts, ends = self._by_row
        return chunks[bisect.bisect_right(ends, offsets[0]) : bisect.bisect_left(starts, offsets[0] + sizes[0])]

    @functools.cached_property
    def _by_row(self) -> tuple[list[Chunk], list[int], list[int]]:
        """The chunks by their first rows; these; and for each chunk the last row up to it, plus one."""
        chunks = sorted(self.chunks, key=lambda chunk: chunk.offsets[0])
        ends = itertools.accumulate((chunk.offsets[0] + chunk.sizes[0] for chunk in chunks), max)
        return chunks, [chunk.offsets[0] for chunk in chunks], list(ends)


class DcpFolder:
    """The tensors and objects of one step's folder. Raises CheckpointError for files that are missing, truncated or of
    other sizes than the manifest's, for content that DCP does not write, and for places outside the folder.

    ``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts in the nested state dict, if it was
    flattened; ``extra`` is Megatron's note about tensors up to 0.15, None for other writers; ``stored`` are all places.
    Without ``with_files`` the files are first checked when they are read, because another rank checks them. While
    ``compares``, bytes are compared with their checksums as they are read.
    """

    def __init__(self, path: Path, with_files: bool = True) -> None:
        self.path, metadata, self.compares = path, path / METADATA, True
        try:
            if metadata.exists() and not metadata.is_file():  # a pipe would block
                raise OSError("not a file")
            content = metadata.read_bytes()
            manifest.check(metadata, lambda: zlib.crc32(content))
            saved = pickles.load(content, str(metadata))
        except OSError as error:
            raise CheckpointError(
                f"{metadata} cannot be read ({error}), and the folder's other files need it; copy it again"
            ) from error
        try:
            stored = _stored(metadata, saved)
            self.tensors = dict(_tensors(saved, stored))
            keys = [key for key in saved.state_dict_metadata if key not in self.tensors]
            self.objects = {key: stored.get((key, None)) for key in keys}
            self.paths: dict[str, tuple[Any, ...]] = {}
            for key, parts in (saved.planner_data or {}).items():
                if type(key) is not str or type(parts) is not tuple or not all(type(p) in (str, int) for p in parts):
                    raise ValueError("expected the path of a key as names and numbers, found others")
                self.paths.update({key: parts} if parts else {})
            self.extra = dict(saved.mcore_data or {}) if hasattr(saved, "mcore_data") else None
        except CheckpointError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{metadata} is not what DCP writes: {error}; copy it again") from error
        self.stored = tuple(stored.values())
        self._check_chunks()
        if with_files:
            self._check_files()
        self._saved: dict[Stored, tuple[StoredTensor, Archive]] = {}
        contents.finish_later(self)

    def finish(self) -> None:
        """Compare the chunks of which some was read. Raises CheckpointError for a wrong checksum."""
        for _, archive in list(self._saved.values()):
            archive.finish()

    def tensors_read(self) -> dict[str, bool]:
        return {
            key: not math.prod(entry.shape) or any(chunk.stored in self._saved for chunk in entry.chunks)
            for key, entry in self.tensors.items()
        }

    def check(self, rank: int, ranks: int) -> None:
        """Read a share of the folder, one of ``ranks``. Raises CheckpointError for a wrong checksum."""
        if (listed := manifest.read(self.path)) is not None:
            for name in sorted(listed.files)[rank::ranks]:
                listed.compare(name, manifest.crc_of(self.path / name))
            return
        places = sorted(self.stored, key=lambda place: (place.path, place.offset))
        for place in places[rank::ranks]:
            Archive(place, str(place.path)).check()

    def _check_files(self) -> None:
        """Raises CheckpointError for files that are missing or truncated."""
        folder, metadata = self.path, self.path / METADATA
        manifest.check_files(folder)
        ends: dict[Path, int] = {}
        used: dict[Path, int] = {}
        for place in self.stored:
            if place.offset < 0 or place.length < 0:
                raise CheckpointError(f"{metadata} is damaged: a negative place in {place.path.name}; copy it")
            ends[place.path] = max(ends.get(place.path, 0), place.offset + place.length)
            used[place.path] = used.get(place.path, 0) + place.length
        for path, end in sorted(ends.items()):
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; copy all files of {folder}")
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(f"{path} ends early: expected {end} bytes, found {size}; copy it again")
            if size < used[path]:
                raise CheckpointError(f"{metadata} is damaged: several tensors have one place in {path}; copy it again")

    def _check_chunks(self) -> None:
        """Raises CheckpointError for tensors with parts that the metadata lacks."""
        folder, metadata = self.path, self.path / METADATA
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.stored is None:
                    raise CheckpointError(f"{metadata}: expected the place of {key}, found none; copy it again")
                nbytes, found = math.prod(chunk.sizes) * entry.dtype.itemsize, chunk.stored.length
                if nbytes > found:
                    raise CheckpointError(
                        f"{metadata} is damaged: {key}: expected a chunk of {nbytes} bytes, found {found}"
                    )
            saved = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if saved < math.prod(entry.shape):
                start = (0,) * len(entry.shape)
                raise CheckpointError(incomplete(f"{key} in {folder}", saved, entry.shape, start))

    def add(self, other: DcpFolder) -> None:
        """Add the tensors and objects of another folder. Raises CheckpointError for a key that is in both."""
        if twice := {*self.tensors, *self.objects} & {*other.tensors, *other.objects}:
            raise CheckpointError(f"{other.path}: expected other keys than in {self.path}, found {min(twice)} in both")
        self.tensors.update(other.tensors)
        other.tensors = {}  # are read as this folder's
        self.objects.update(other.objects)
        self.paths.update(other.paths)
        self.stored += other.stored

    def tensor(self, key: str) -> LazyTensor:
        entry = self.tensors[key]
        return self.box(key, (0,) * len(entry.shape), entry.shape, entry.shape)

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> LazyTensor:
        """A box of a tensor, reshaped to ``shape``, of which ranges can be read."""
        offsets, sizes, shape = tuple(offsets), tuple(sizes), tuple(shape)

        def read() -> Tensor:
            return self.read_box(key, offsets, sizes).view(shape)

        def read_range(start: int, stop: int) -> Tensor:
            boxes = [([a + b for a, b in zip(offsets, begin)], part) for begin, part in boxes_of(sizes, start, stop)]
            inside = [self.read_box(key, begin, part).view(-1) for begin, part in boxes]
            return torch.cat(inside) if len(inside) > 1 else inside[0]

        return LazyTensor(shape, self.tensors[key].dtype, read, f"{key} in {self.path}", read_range)

    def read_box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The elements of tensor ``key`` from ``offsets`` on, ``sizes`` in each dimension; reads only these. Raises
        CheckpointError for damage, and if chunks are missing."""
        entry, where, sizes = self.tensors[key], f"{key} in {self.path}", tuple(sizes)
        found = None
        missing = math.prod(sizes)
        for chunk in entry.near(tuple(offsets), sizes):
            begin = [max(a, b) for a, b in zip(offsets, chunk.offsets)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)]
            shape = tuple(b - a for a, b in zip(begin, end))
            if any(size <= 0 for size in shape):
                continue
            saved = self._stored(chunk, entry, where)
            first = sum((a - b) * step for a, b, step in zip(begin, chunk.offsets, saved.stride))
            part = saved.box(first, shape, saved.stride)
            missing -= part.numel()
            if shape == sizes:
                found = part
                continue
            if found is None:
                found = torch.empty(sizes, dtype=entry.dtype)
            found[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets))] = part
        if missing:
            raise CheckpointError(incomplete(where, math.prod(sizes) - missing, sizes, offsets))
        return torch.empty(sizes, dtype=entry.dtype) if found is None else found

    def object(self, key: str) -> Any:
        """An object other than a tensor, with the tensors in it in memory."""
        stored = self.objects[key]
        if stored is None:
            raise CheckpointError(f"{self.path}: expected the place of {key} in {METADATA}, found none; copy it again")
        return torch_files.load_here(stored, f"{key} in {stored.path}")

    def _stored(self, chunk: Chunk, entry: Entry, where: str) -> StoredTensor:
        assert chunk.stored is not None  # checked before
        if chunk.stored not in self._saved:
            loaded = torch_files.load_part(chunk.stored, f"{where}/{chunk.stored.path.name}", self.compares)
            self._saved.setdefault(chunk.stored, loaded)
        saved, _ = self._saved[chunk.stored]
        if not isinstance(saved, StoredTensor) or (saved.shape, saved.dtype) != (chunk.sizes, entry.dtype):
            found = f"{saved.dtype} of {saved.shape}" if isinstance(saved, StoredTensor) else type(saved).__name__
            raise CheckpointError(
                f"{where}: expected {entry.dtype} of shape {chunk.sizes} at {chunk.offsets}, found {found} in "
                f"{chunk.stored.path.name}; the files are of different checkpoints: copy one again"
            )
        return saved


def _stored(path: Path, metadata: Any) -> dict[tuple[str, Sizes | None], Stored]:
    found = {}
    for index, info in metadata.storage_data.items():
        if type(index.fqn) is not str or not all(type(n) is int for n in (info.offset, info.length)):
            raise ValueError("expected a place in a file as a name and two numbers")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} in {path.parent}: expected uncompressed data, found {info.transform_descriptors}, which "
                "is not supported; save it again without storage extensions"
            )
        relative = info.relative_path
        if manifest.leads_out(relative):
            raise CheckpointError(
                f"{path}: expected {index.fqn} in this folder, found the place {relative!r} outside of it, which no "
                "writer of checkpoints makes; do not use it"
            )
        offset = vars(index).get("offset")  # None is not pickled
        offset = None if offset is None else shape_of(offset)
        found[index.fqn, offset] = Stored(path.parent / relative, info.offset, info.length)
    return found


def _tensors(metadata: Any, stored: Mapping[tuple[str, Sizes | None], Stored]) -> Iterator[tuple[str, Entry]]:
    for key, found in metadata.state_dict_metadata.items():
        if type(key) is not str or len(key) > contents.LONGEST_NAME:
            raise ValueError(f"expected a key as text, found a {type(key).__name__}, or a long one")
        if not hasattr(found, "chunks"):
            continue
        shape, whole = shape_of(found.size), stored.get((key, None))
        chunks = {}
        for chunk in found.chunks:
            offsets, sizes = shape_of(chunk.offsets), shape_of(chunk.sizes)
            inside = all(first + size <= end for first, size, end in zip(offsets, sizes, shape))
            if not len(offsets) == len(sizes) == len(shape) or not inside:
                raise ValueError(f"expected chunks of {key} within shape {shape}, found {sizes} at {offsets}")
            place = stored.get((key, offsets), whole if len(found.chunks) == 1 else None)
            chunks[offsets, sizes] = Chunk(offsets, sizes, place)
        dtype, *_ = found.properties.stub_state  # TensorProperties pickles itself as a tuple
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected a dtype of {key}, found a {type(dtype).__name__}")
        yield key, Entry(shape, dtype, tuple(chunks.values()))


def incomplete(where: str, saved: int, sizes: Sequence[int], offsets: Sequence[int]) -> str:
    """The error for a box with only ``saved`` elements."""
    return (
        f"{where}: expected {math.prod(sizes)} elements at {tuple(offsets)}, found {saved} in the saved chunks; copy "
        "every rank's file"
    )
