"""A folder that torch.distributed.checkpoint (DCP) wrote: its tensors, read box by box, and its other objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.dcp.metadata import METADATA, Chunk, Entry, Sizes, incomplete, read_metadata
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.torch_files import StoredTensor
from lwopt_backend.checkpoint.files.zip_records import Stored
from lwopt_backend.checkpoint.lazy import LazyTensor

__all__ = ["METADATA", "DcpFolder"]


class DcpFolder:
    """The tensors and objects of one step's folder. Raises CheckpointError for files that are missing or too short.

    ``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts as the state dict was nested, where it
    was flattened; ``extra`` is what Megatron up to 0.15 noted about tensors. With ``metadata_only`` other files need
    not be there: nothing can be read then.
    """

    def __init__(self, path: Path, metadata_only: bool = False) -> None:
        metadata = read_metadata(path)
        if not metadata_only:
            metadata.check_files()
        self.path, self.tensors, self.objects, self.paths = path, metadata.tensors, metadata.objects, metadata.paths
        self.extra: Mapping[str, Mapping[str, Any]] = metadata.extra or {}
        self.has_extra = metadata.extra is not None
        self._saved: dict[Stored, StoredTensor] = {}

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
            raise CheckpointError(incomplete(where, math.prod(sizes) - missing, sizes, offsets))
        return torch.empty(tuple(sizes), dtype=entry.dtype) if found is None else found

    def object(self, key: str) -> Any:
        """What is no tensor, with the tensors in it, in memory."""
        stored = self.objects[key]
        if stored is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {key} is; copy it again")
        return torch_files.load_here(stored, f"{key} in {stored.path}")

    def _part(self, chunk: Chunk, entry: Entry, begin: Sizes, shape: Sizes, where: str) -> Tensor:
        assert chunk.stored is not None  # as was checked
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
