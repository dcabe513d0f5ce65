"""Files that torch.save wrote, read tensor by tensor: when a tensor is needed, and checked then.

Pickled structure goes through torch's weights-only unpickler; where that does not know a class, through ours, which
makes stubs. Tensors have no elements there: their storages are on the meta device, and stand for records of the file.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import pickles
from lwopt_backend.checkpoint.files.zip_records import Archive, Record, Stored
from lwopt_backend.checkpoint.lazy import LazyTensor

_unchecked: ContextVar[set[Path] | None] = ContextVar("unchecked", default=None)


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
        """Elements from number ``begin`` of it on. Raises CheckpointError for bytes that are not as they were saved."""
        start, stored = self.start + begin * self.dtype.itemsize, self.record.stored
        whole = start == 0 and torch.Size(shape).numel() * self.dtype.itemsize == stored.length
        if not whole:
            self.record.check()
        found = read_strided(stored.path, stored.offset + start, shape, stride, self.dtype, self.where)
        if whole and stride == found.stride():
            self.record.check_read(found)
        elif whole:
            self.record.check()
        return found

    def lazy(self) -> LazyTensor:
        """The whole tensor."""

        def read_range(start: int, stop: int) -> Tensor:
            return self.box(start, (stop - start,), (1,))

        ranged = read_range if torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous() else None
        place = str(self.record.stored.path), self.record.stored.offset + self.start
        return LazyTensor(
            self.shape, self.dtype, lambda: self.box(0, self.shape, self.stride), self.where, ranged, self.stride, place
        )


def load(path: Path) -> Any:
    """What is in a file, with a ``LazyTensor`` for every tensor and a ``Stub`` for objects of classes we do not have.

    A tensor's bytes are checked when they are read. Raises CheckpointError for a file that is damaged, or that asks
    for something that is not allowed.
    """
    later = _unchecked.get()
    if later is not None:
        later.add(path)
    return _load(_whole(path), str(path), later is not None, StoredTensor.lazy)


@contextlib.contextmanager
def checked_later() -> Iterator[set[Path]]:
    """What is loaded inside does not check bytes of tensors; the files, for several ranks to share ``check``."""
    files: set[Path] = set()
    token = _unchecked.set(files)
    try:
        yield files
    finally:
        _unchecked.reset(token)


def check(path: Path) -> None:
    """Raises CheckpointError unless every byte of a file that torch.save wrote is as it was written."""
    Archive(_whole(path), str(path)).check()


def load_part(stored: Stored, where: str) -> Any:
    """What torch.save wrote into a part of a file, with a ``StoredTensor`` for every tensor."""
    return _load(stored, where, False, lambda tensor: tensor)


def load_here(stored: Stored, where: str) -> Any:
    """The same with its tensors, in memory."""
    return _load(stored, where, False, lambda tensor: tensor.lazy().read())


def read_strided(
    path: Path, start: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, where: str
) -> Tensor:
    """A tensor whose first element is at byte ``start`` of a file; strides are in elements."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    flat = torch.empty(count, dtype=dtype)
    data = flat.view(torch.uint8).numpy().data
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
        return Stored(path, 0, path.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{path} is missing") from error


def _load(stored: Stored, where: str, checked: bool, make: Callable[[StoredTensor], Any]) -> Any:
    archive = Archive(stored, where, checked)
    order = archive.bytes("byteorder").decode() if "byteorder" in archive.records else "little"
    if order != sys.byteorder:
        raise CheckpointError(f"{where} was written on a machine of byte order {order}; save it again on one like this")
    loader = _Loader(archive)
    try:
        return loader.with_tensors(loader.structure(where), "", f"{stored.path}", make)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of itself
        raise CheckpointError(f"{where} cannot be read ({type(error).__name__}: {error}); is it whole?") from error


class _Loader:
    """Unpickles an archive's structure, with tensors that have no elements, and then finds these tensors' records."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._storages: dict[
            str, torch.UntypedStorage
        ] = {}  # by record; they are kept, so that no two are at one place
        self._records: dict[int, Record] = {}

    def structure(self, where: str) -> Any:
        data = self._archive.bytes("data.pkl")
        try:
            harmless = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
            harmless.persistent_load = self._storage  # type: ignore[method-assign]  # as torch.load does
            return harmless.load()
        except pickle.UnpicklingError:  # classes that torch does not know to be harmless
            return pickles.load(io.BytesIO(data), where, self._storage)

    def _storage(self, saved: Any) -> torch.storage.TypedStorage:
        kind, storage_type, key, _, numel = saved
        dtype = getattr(storage_type, "dtype", torch.uint8)  # torch.UntypedStorage has none
        record, nbytes = self._archive.records.get(f"data/{key}"), numel * dtype.itemsize
        if kind != "storage" or record is None or record.stored.length != nbytes:
            found = "none" if record is None else f"one of {record.stored.length}"
            raise ValueError(f"expected a record data/{key} of {nbytes} bytes, found {found}")
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(nbytes, device="meta")
            self._records[self._storages[key]._cdata] = record
        return torch.storage.TypedStorage(wrap_storage=self._storages[key], dtype=dtype, _internal=True)

    def with_tensors(self, found: Any, key: str, where: str, make: Callable[[StoredTensor], Any]) -> Any:
        """The same with what ``make`` makes of tensors."""

        def inner(name: Any, value: Any) -> Any:
            return self.with_tensors(value, f"{key}.{name}" if key else str(name), where, make)

        if isinstance(found, Tensor):
            return make(self._tensor(found, f"{key} in {where}"))
        if isinstance(found, dict):
            pairs = {k: inner(k, v) for k, v in found.items()}
            return OrderedDict(pairs) if isinstance(found, OrderedDict) else pairs
        if isinstance(found, (list, tuple)) and not isinstance(found, torch.Size):
            entries = [inner(i, v) for i, v in enumerate(found)]
            return entries if isinstance(found, list) else tuple(entries)
        if isinstance(found, pickles.Stub):
            vars(found).update({k: inner(k, v) for k, v in vars(found).items()})
        return found

    def _tensor(self, tensor: Tensor, where: str) -> StoredTensor:
        shape, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize
        record = self._records[tensor.untyped_storage()._cdata]
        start = int(tensor.storage_offset()) * itemsize
        end = start + (1 + sum((size - 1) * step for size, step in zip(shape, stride))) * itemsize
        if 0 not in shape and end > record.stored.length:
            raise ValueError(f"{where} is said to have more elements than are stored")
        return StoredTensor(record, start, shape, stride, tensor.dtype, where)
