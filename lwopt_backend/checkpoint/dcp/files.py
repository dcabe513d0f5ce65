"""A folder that torch.distributed.checkpoint (DCP) wrote: its tensors, read box by box, and its other objects."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import pickles, torch_files
from lwopt_backend.checkpoint.files.torch_files import StoredTensor
from lwopt_backend.checkpoint.files.zip_records import Stored
from lwopt_backend.checkpoint.lazy import LazyTensor

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


class DcpFolder:
    """The tensors and objects of one step's folder. Raises CheckpointError for files that are missing or too short.

    ``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts as the state dict was nested, where it
    was flattened; ``extra`` is what Megatron up to 0.15 noted about tensors. With ``metadata_only`` other files need
    not be there: nothing can be read then.
    """

    def __init__(self, path: Path, metadata_only: bool = False) -> None:
        self.path = path
        metadata = self._metadata()
        self._saved: dict[Stored, StoredTensor] = {}
        try:
            stored = self._stored(metadata)
            self.tensors = dict(_tensors(metadata, stored))
            self.objects = {
                key: stored.get((key, None)) for key in metadata.state_dict_metadata if key not in self.tensors
            }
            self.paths: Mapping[str, tuple[Any, ...]] = dict(metadata.planner_data or {})
            self.extra: Mapping[str, Mapping[str, Any]] = dict(vars(metadata).get("mcore_data") or {})
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path / METADATA} is not what DCP writes ({error}); copy it again") from error
        self.has_extra = hasattr(metadata, "mcore_data")
        if not metadata_only:
            self._check_files(stored.values())

    def _metadata(self) -> Any:
        path = self.path / METADATA
        try:
            return pickles.load(path.read_bytes(), str(path))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); without it the folder's files are of no use"
            ) from error

    def _stored(self, metadata: Any) -> dict[tuple[str, Sizes | None], Stored]:
        found = {}
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{index.fqn} in {self.path} is compressed ({info.transform_descriptors}), which is not supported; "
                    "save it again without storage extensions"
                )
            relative = info.relative_path
            for kind in (PurePosixPath, PureWindowsPath):
                if kind(relative).is_absolute() or kind(relative).drive or ".." in kind(relative).parts:
                    raise CheckpointError(
                        f"{self.path / METADATA} says that {index.fqn} is in {relative!r}, outside the folder; "
                        "no checkpoint is written so: do not use it"
                    )
            offset = vars(index).get("offset")  # what is None is not pickled
            offset = None if offset is None else tuple(map(int, offset))
            found[index.fqn, offset] = Stored(self.path / relative, int(info.offset), int(info.length))
        return found

    def _check_files(self, stored: Iterable[Stored]) -> None:
        ends: dict[Path, int] = {}
        for place in stored:
            if place.offset < 0 or place.length < 0:
                raise CheckpointError(f"{self.path / METADATA} is damaged: a negative place in {place.path.name}")
            ends[place.path] = max(ends.get(place.path, 0), place.offset + place.length)
        for path, end in sorted(ends.items()):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise CheckpointError(f"{path} is missing; copy all files of {self.path}") from error
            if size < end:
                raise CheckpointError(f"{path} ends early: expected {end} bytes, found {size}; copy it again")

    def tensor(self, key: str) -> LazyTensor:
        """A whole tensor."""
        entry = self.tensors[key]
        return self.box(key, (0,) * len(entry.shape), entry.shape, entry.shape)

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> LazyTensor:
        """A box of a tensor, reshaped to ``shape``; its ranges are read alone where it is flat."""
        offsets, sizes, shape = tuple(offsets), tuple(sizes), tuple(shape)

        def read() -> Tensor:
            return self.read_box(key, offsets, sizes).view(shape)

        def read_range(start: int, stop: int) -> Tensor:
            inside = [
                self.read_box(key, [a + b for a, b in zip(offsets, begin)], part).view(-1)
                for begin, part in _boxes(sizes, start, stop)
            ]
            return torch.cat(inside) if len(inside) > 1 else inside[0]

        return LazyTensor(shape, self.tensors[key].dtype, read, f"{key} in {self.path}", read_range)

    def read_box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The elements of tensor ``key`` from ``offsets`` on, as many as ``sizes`` in each dimension.

        Only those parts of chunks are read that are in the box. Raises CheckpointError for damage, and where chunks
        are missing.
        """
        entry, where = self.tensors[key], f"{key} in {self.path}"
        found = None
        missing = math.prod(sizes)
        for chunk in entry.near(tuple(offsets), tuple(sizes)):
            begin = [max(a, b) for a, b in zip(offsets, chunk.offsets)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)]
            shape = tuple(b - a for a, b in zip(begin, end))
            if any(size <= 0 for size in shape):
                continue
            part = self._part(chunk, entry, tuple(a - b for a, b in zip(begin, chunk.offsets)), shape, where)
            missing -= part.numel()
            if shape == tuple(sizes):
                found = part
                continue
            if found is None:
                found = torch.empty(tuple(sizes), dtype=entry.dtype)
            found[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets))] = part
        if missing:
            raise CheckpointError(
                f"{where}: the chunks saved have {math.prod(sizes) - missing} of the {math.prod(sizes)} elements at "
                f"{tuple(offsets)}; was every rank's file copied?"
            )
        return torch.empty(tuple(sizes), dtype=entry.dtype) if found is None else found

    def object(self, key: str) -> Any:
        """What is no tensor, with the tensors in it, in memory."""
        stored = self.objects[key]
        if stored is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {key} is; copy it again")
        return torch_files.load_here(stored, f"{key} in {stored.path}")

    def _part(self, chunk: Chunk, entry: Entry, begin: Sizes, shape: Sizes, where: str) -> Tensor:
        if chunk.stored is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {where} is; copy it again")
        saved = self._saved.get(chunk.stored)
        if saved is None:
            loaded = torch_files.load_part(chunk.stored, f"{where}/{chunk.stored.path.name}")
            saved = self._saved.setdefault(chunk.stored, loaded)
        if not isinstance(saved, StoredTensor) or (saved.shape, saved.dtype) != (chunk.sizes, entry.dtype):
            found = f"{saved.dtype} of {saved.shape}" if isinstance(saved, StoredTensor) else type(saved).__name__
            raise CheckpointError(
                f"{where}: expected {entry.dtype} of shape {chunk.sizes} at {chunk.offsets}, found {found} in "
                f"{chunk.stored.path.name}; its files are not of one checkpoint"
            )
        return saved.box(sum(a * b for a, b in zip(begin, saved.stride)), shape, saved.stride)


def _boxes(sizes: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """The boxes, as (offsets, sizes), that the elements [start, stop) of a flattened tensor are, in their order."""
    if start >= stop or not sizes:  # nothing, or one element
        yield (0,) * len(sizes), (0,) * len(sizes)
        return
    inner = math.prod(sizes[1:])
    row, first = divmod(start, inner)
    if first or stop - start < inner:  # a part of one row
        end = min(stop, (row + 1) * inner)
        for begin, part in _boxes(sizes[1:], first, end - row * inner):
            yield (row, *begin), (1, *part)
    else:
        end = stop - stop % inner
        yield (row, *(0,) * (len(sizes) - 1)), ((end - start) // inner, *sizes[1:])
    if end < stop:
        yield from _boxes(sizes, end, stop)


def _tensors(metadata: Any, stored: Mapping[tuple[str, Sizes | None], Stored]) -> Iterator[tuple[str, Entry]]:
    for key, found in metadata.state_dict_metadata.items():
        if not hasattr(found, "chunks"):
            continue
        shape = tuple(map(int, found.size))
        chunks = {}
        for chunk in found.chunks:
            offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
            if not len(offsets) == len(sizes) == len(shape):
                raise ValueError(f"{key} of shape {shape} has a chunk of {sizes} at {offsets}")
            chunks[offsets, sizes] = Chunk(offsets, sizes, stored.get((key, offsets), stored.get((key, None))))
        dtype, *_ = found.properties.stub_state  # TensorProperties pickles itself as a tuple
        yield key, Entry(shape, dtype, tuple(chunks.values()))
