"""Writes and describes DCP's folders: their ``.metadata``, and the planner that lays tensors out."""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lwopt_backend.checkpoint.contents import LONGEST_NAME, CheckpointError, LazyTensor
from lwopt_backend.checkpoint.files import manifest, pickles
from lwopt_backend.checkpoint.files.folders import flush
from lwopt_backend.checkpoint.files.made import in_order, shape_of
from lwopt_backend.checkpoint.files.manifest import Entry as FileEntry
from lwopt_backend.checkpoint.files.manifest import Files, Manifest
from lwopt_backend.checkpoint.files.torch_files import Stored, save_as_it_lies
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.collectives import Alone, Collectives

# DCP's file ``.metadata``: a folder's tensors with their chunks, other objects, and where they are.

METADATA, FILE = ".metadata", ".distcp"
ANY_FILE = f"__*{FILE}"
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

    def near(self, offsets: Sizes, sizes: Sizes) -> Iterable[Chunk]:
        """The chunks that may overlap a box; of a stack of layers, not those of other layers."""
        if not self.shape or sizes[0] >= len(self._rows):
            return self.chunks
        rows = range(offsets[0], offsets[0] + sizes[0])
        return itertools.chain(*(self._rows.get(row, ()) for row in (-1, *rows)))

    @functools.cached_property
    def _rows(self) -> dict[int, list[Chunk]]:
        """Chunks by their only row; those of several are under -1."""
        found: dict[int, list[Chunk]] = {-1: []}
        for chunk in self.chunks:
            found.setdefault(chunk.offsets[0] if chunk.sizes[0] == 1 else -1, []).append(chunk)
        return found


@dataclass(frozen=True)
class FolderMetadata:
    """``tensors`` and ``objects`` are by key; ``paths`` are the keys' parts in the nested state dict, if it was
    flattened; ``extra`` is what Megatron up to 0.15 noted about tensors, None for other writers."""

    path: Path
    tensors: Mapping[str, Entry]
    objects: Mapping[str, Stored | None]
    paths: Mapping[str, tuple[Any, ...]]
    extra: Mapping[str, Mapping[str, Any]] | None
    stored: tuple[Stored, ...]

    def check_files(self) -> bool:
        """Return whether there is a manifest. Raises CheckpointError for files that are missing, too short, or of
        another save than the manifest's, and for a tensor that they lack a part of."""
        folder = self.path.parent
        listed = manifest.check_files(folder)
        if listed is not None:
            _check_marks(listed)
        ends: dict[Path, int] = {}
        used: dict[Path, int] = {}
        for place in self.stored:
            if place.offset < 0 or place.length < 0:
                raise CheckpointError(f"{self.path} is damaged: a negative place in {place.path.name}")
            ends[place.path] = max(ends.get(place.path, 0), place.offset + place.length)
            used[place.path] = used.get(place.path, 0) + place.length
        for path, end in sorted(ends.items()):
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; copy all files of {folder}")
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(f"{path} ends early: expected {end} bytes, found {size}; copy it again")
            if size < used[path]:
                raise CheckpointError(f"{self.path} is damaged: several tensors are at one place in {path}")
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.stored is None:
                    raise CheckpointError(f"{self.path} does not say where {key} is; copy it again")
                nbytes, found = math.prod(chunk.sizes) * entry.dtype.itemsize, chunk.stored.length
                if nbytes > found:
                    raise CheckpointError(
                        f"{self.path} is damaged: {key} has a chunk of {nbytes} bytes, but {found} are stored"
                    )
            saved = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if saved < math.prod(entry.shape):
                start = (0,) * len(entry.shape)
                raise CheckpointError(incomplete(f"{key} in {folder}", saved, entry.shape, start))
        return listed is not None


def read_metadata(folder: Path) -> FolderMetadata:
    """Raises CheckpointError for content that DCP does not write, and for places outside the folder."""
    path = folder / METADATA
    try:
        content = path.read_bytes()
        manifest.check(path, lambda: zlib.crc32(content))
        saved = pickles.load(content, str(path))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); without it the folder's files are of no use"
        ) from error
    try:
        stored = _stored(path, saved)
        tensors = dict(_tensors(saved, stored))
        objects = {key: stored.get((key, None)) for key in saved.state_dict_metadata if key not in tensors}
        paths = saved.planner_data or {}
        for key, parts in paths.items():
            if type(key) is not str or type(parts) is not tuple or not all(type(p) in (str, int) for p in parts):
                raise ValueError("the path of a key is not made of names and numbers")
        extra = dict(saved.mcore_data or {}) if hasattr(saved, "mcore_data") else None
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not what DCP writes ({error}); copy it again") from error
    paths = {key: parts for key, parts in paths.items() if parts}
    return FolderMetadata(path, tensors, objects, paths, extra, tuple(stored.values()))


def _stored(path: Path, metadata: Any) -> dict[tuple[str, Sizes | None], Stored]:
    found = {}
    for index, info in metadata.storage_data.items():
        if type(index.fqn) is not str or not all(type(n) is int for n in (info.offset, info.length)):
            raise ValueError("a place in a file is not a name and two numbers")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} in {path.parent} is compressed ({info.transform_descriptors}), which is not supported; "
                "save it again without storage extensions"
            )
        relative = info.relative_path
        if manifest.leads_out(relative):
            raise CheckpointError(
                f"{path} says that {index.fqn} is in {relative!r}, outside the folder; no checkpoint is written so: do "
                "not use it"
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


MARK = 64  # bytes at the start of a file of ours: the save that it is of, and the rank


def _mark(save_id: str, rank: int) -> bytes:
    return f"lwopt save {save_id} rank {rank}\n".encode().ljust(MARK)


def _check_marks(listed: Manifest) -> None:
    """Raises CheckpointError for a file of another save, or of another rank than its name says."""
    for name, entry in listed.files.items():
        if name.endswith(FILE):
            with (listed.folder / name).open("rb") as file:
                found = file.read(MARK)
            expected = _mark(listed.save_id, entry.rank)
            if found != expected:
                words, said = (text.decode(errors="replace").strip() for text in (expected, found))
                raise CheckpointError(
                    f"{listed.folder / name}: expected {words!r} at its start, found {said!r}; it is of another save "
                    f"or another rank; {listed.advice}"
                )


def incomplete(where: str, saved: int, sizes: Sequence[int], offsets: Sequence[int]) -> str:
    """The sentence about a box of which only ``saved`` elements were saved."""
    return (
        f"{where}: the chunks saved have {saved} of the {math.prod(sizes)} elements at {tuple(offsets)}; was every "
        "rank's file copied?"
    )


# Writes what torch.distributed.checkpoint reads, one tensor in memory at a time; ``dcp.reader`` reads it.
# Metadata and the form of files are PyTorch's (torch/distributed/checkpoint/filesystem.py, ``_write_item``).

Place = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Boxes:
    """A tensor of ``shape``, made of boxes by the place of their first element. They fill it, and have one dtype."""

    shape: tuple[int, ...]
    parts: Mapping[Place, LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype

    def sizes(self, part: LazyTensor) -> tuple[int, ...]:
        """A box's size in each dimension; dimensions that it lacks are leading, of size 1."""
        return (1,) * (len(self.shape) - len(part.shape)) + part.shape


def stacked(parts: Mapping[Place, LazyTensor], where: str) -> Boxes:
    """Tensors of one shape and dtype along new leading axes, each at its place. Raises CheckpointError for a gap."""
    first = next(iter(parts.values()))
    counts = tuple(max(numbers) + 1 for numbers in zip(*parts))
    for part in parts.values():
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{part.where}: {where}: expected {first.dtype} of shape {first.shape} as in {first.where}, found "
                f"{part.dtype} of {part.shape}"
            )
    if len(parts) != math.prod(counts):
        raise CheckpointError(
            f"{where}: expected {math.prod(counts)} of it in all layers and experts, {len(parts)} are there"
        )
    return Boxes(
        (*counts, *first.shape), {(*place, *(0,) * len(first.shape)): part for place, part in sorted(parts.items())}
    )


@dataclass
class Shards:
    """What one rank writes, by path: its boxes of tensors, whose other boxes other ranks have, and objects."""

    tensors: dict[tuple[Any, ...], Boxes] = field(default_factory=dict)
    objects: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class _Writer(FileSystemWriter):
    """PyTorch's writer, except that it keeps no box after it is written, and replaces the metadata atomically."""

    def __init__(self, files: Files, name: str, save_id: str, rank: int, workers: int) -> None:
        super().__init__(files.folder)
        self.save_id, self._rank = save_id, rank
        self._files, self._name, self._workers = files, name, workers
        self.fs = _Replacing()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with self._files.open(self._name) as file:
            file.write(_mark(self.save_id, self._rank))
            read = in_order((partial(planner.resolve_data, item) for item in plan.items), self._workers)
            for item, data in zip(plan.items, read):
                start = file.tell()
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    save_as_it_lies(data, file)
                del data
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(self._name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _Replacing(FileSystem):
    """Renaming replaces an existing file atomically; PyTorch's writer would remove that first."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.replace(path, new_path)


class _Planner(DefaultSavePlanner):
    def __init__(self, shards: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        paths = {".".join(map(str, path)): path for path in (*shards.tensors, *shards.objects)}
        keys = {path: key for key, path in paths.items()}
        for path in (*shards.tensors, *shards.objects):
            if path not in keys:
                other = paths[".".join(map(str, path))]
                raise ValueError(f"{path} and {other} have one name in a checkpoint; rename one")
        self._tensors = {keys[path]: boxes for path, boxes in shards.tensors.items()}
        self._objects = {keys[path]: value for path, value in shards.objects.items()}
        self._paths = paths if any(len(path) > 1 for path in keys) else None  # where a state dict was nested

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for key, boxes in self._tensors.items():
            items += write_items(
                key, boxes.shape, {p: (boxes.sizes(part), boxes.dtype) for p, part in boxes.parts.items()}
            )
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        paths = {key: path for plan in all_plans for key, path in (plan.planner_data or {}).items()}
        plans, metadata = super().create_global_plan(all_plans)
        found = metadata.state_dict_metadata
        in_order = {key: found[key] for key in (*paths, *found) if key in found}  # as the first rank has them
        return plans, replace(metadata, state_dict_metadata=in_order, planner_data=paths or None)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self._objects[index.fqn], data)
            return data
        assert index.offset is not None
        boxes = self._tensors[index.fqn]
        part = boxes.parts[tuple(index.offset)]
        return part.read().view(boxes.sizes(part))


def chunk(place: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(place), torch.Size(sizes))


def write_items(
    key: str, shape: Sequence[int], boxes: Mapping[Place, tuple[Sequence[int], torch.dtype]]
) -> list[WriteItem]:
    """DCP's write items for boxes of a tensor of ``shape``: by place, their sizes and dtype."""
    return [
        WriteItem(
            MetadataIndex(key, torch.Size(place)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk(place, sizes), TensorProperties(dtype=dtype), torch.Size(shape)),
        )
        for place, (sizes, dtype) in boxes.items()
    ]


def later(part: Tensor, shape: Sequence[int], where: str) -> LazyTensor:
    """A lazy tensor of ``part``, reshaped; it is copied when it is written, so it must not change before."""

    def read() -> Tensor:
        return part.detach().to("cpu", copy=True).reshape(tuple(shape)).contiguous()

    return LazyTensor(tuple(shape), part.dtype, read, where)


def one_box(tensor: LazyTensor) -> Boxes:
    return Boxes(tensor.shape, {(0,) * len(tensor.shape): tensor})


def whole(tensor: Tensor, where: str) -> Boxes:
    return one_box(later(tensor, tensor.shape, where))


def flattened(values: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Nested values by their paths, as DCP flattens a state dict."""
    flat, paths = flatten_state_dict(dict(values))
    return {paths[key]: value for key, value in flat.items()}


def save(
    folder: Path,
    shards: Shards,
    ranks: Collectives | None = None,
    what: str = "save",
    workers: int = 1,
    *,
    step: int | None = None,
    others: Mapping[str, FileEntry] | None = None,
) -> None:
    """Write the shards of all ``ranks`` into ``folder``, which all of them see, replacing the checkpoint in it.

    Called on all ranks; each writes its own boxes into its own file, and one of those that several have. ``workers``
    boxes are in memory: one is written while others are read. An error on any rank is raised on all; the folder then
    has its earlier checkpoint, and the next save removes the files of this one. The manifest takes rank 0's ``step``
    and ``others``, the entries of files that rank 0 has already written there.
    """
    target = folder if ranks is not None else None  # who converts writes into a temporary one, and names the target
    ranks = ranks or Alone()

    def in_all(decide: Callable[[], T]) -> T:
        return agree(ranks, what, lambda: (_naming(target, decide), []))

    numbers = in_all(lambda: [path.stem.rpartition("_")[2] for path in folder.glob(ANY_FILE)])
    unused = max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
    number, save_id = ranks.gather_objects((unused, manifest.new_save_id()))[0]
    name = f"__{ranks.rank}_{number}{FILE}"
    files = Files(folder, ranks.rank)
    writer = _Writer(files, name, save_id, ranks.rank, workers)

    def planned() -> tuple[_Planner, SavePlan]:
        folder.mkdir(parents=True, exist_ok=True)
        planner = _Planner(shards)
        return planner, planner.create_local_plan()

    planner, plan = in_all(planned)
    all_plans = ranks.gather_objects(plan)

    def write() -> tuple[Metadata, list[WriteResult]]:
        plans, metadata = planner.create_global_plan(all_plans)
        own = plans[ranks.rank]
        return metadata, writer.write_data(own, planner).value() if own.items else []

    def finish() -> None:
        if ranks.rank == 0:
            listed = {name: entry for _, entries in results for name, entry in entries.items()}
            _finish(writer, folder, metadata, [written for written, _ in results])
            path = folder / METADATA
            listed = {**(others or {}), **listed, METADATA: FileEntry(path.stat().st_size, manifest.crc_of(path))}
            manifest.write(folder, listed, step, save_id=save_id, world=ranks.world_size)

    try:
        metadata, written = in_all(write)
    except BaseException:
        with suppress(OSError):
            (folder / name).unlink()
        raise
    results = ranks.gather_objects((written, files.entries))
    in_all(finish)


def _naming(target: Path | None, decide: Callable[[], T]) -> T:
    """Call ``decide``; an error of the disk names the target, because a full disk's error names no file."""
    try:
        return decide()
    except OSError as error:
        if target is None:
            raise
        raise type(error)(f"{target} is as it was, nothing is written: {error}") from error


def _finish(writer: _Writer, folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the metadata, last, and remove the files of other saves."""
    ends: dict[str, int] = {}
    for info in (result.storage_data for of_rank in results for result in of_rank):
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != end:
            raise FileNotFoundError(f"{path} is missing; the folder has to be the same one for all ranks")
    (folder / manifest.NAME).unlink(missing_ok=True)  # it is of the save before: if this ends here, there is none
    flush(folder)
    writer.finish(metadata, results)
    flush(folder)
    for path in (*folder.glob(ANY_FILE), *folder.glob(f".{manifest.NAME}.*")):
        if path.name not in ends:
            path.unlink(missing_ok=True)
