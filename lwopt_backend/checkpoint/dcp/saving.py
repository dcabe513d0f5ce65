"""Writes folders for torch.distributed.checkpoint, one tensor in memory at a time; ``dcp.reader`` reads them.

Metadata and the form of files are PyTorch's (torch/distributed/checkpoint/filesystem.py, ``_write_item``).
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, held
from lwopt_backend.checkpoint.dcp.reader import FILE, METADATA
from lwopt_backend.checkpoint.dcp.state_dicts import ENTRIES
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import flush
from lwopt_backend.checkpoint.files.manifest import Entry as FileEntry
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.pickles import in_memory
from lwopt_backend.checkpoint.files.threads import in_order
from lwopt_backend.checkpoint.files.torch_files import save_as_it_lies
from lwopt_backend.checkpoint.ties import RECORD
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.state import MATRICES, as_tensors, owner_key

ANY_FILE = f"__*{FILE}"
Place = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Boxes:
    """A tensor of ``shape``, made of boxes by the place of their first element, which fill it and have one dtype."""

    shape: tuple[int, ...]
    parts: Mapping[Place, LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype

    def sizes(self, part: LazyTensor) -> tuple[int, ...]:
        """A box's size in each dimension; missing leading dimensions have size 1."""
        return (1,) * (len(self.shape) - len(part.shape)) + part.shape


@dataclass
class Shards:
    """One rank's part of a save, by path: its boxes of tensors, and objects."""

    tensors: dict[tuple[Any, ...], Boxes] = field(default_factory=dict)
    objects: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class _Writer(FileSystemWriter):
    """PyTorch's writer, except that it drops each written box, and replaces the metadata atomically."""

    def __init__(self, files: Files, name: str, save_id: str, rank: int, workers: int) -> None:
        super().__init__(files.folder)
        self.save_id, self._rank = save_id, rank
        self._files, self._name, self._workers = files, name, workers
        self.fs = _Replacing()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with self._files.open(self._name) as file:
            file.write(manifest.mark(self.save_id, self._rank))
            file.flush()  # if this save is killed, the next one removes files with the mark
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
                raise ValueError(f"expected different names, found one for {path} and {other}; rename one")
        self._tensors = {keys[path]: boxes for path, boxes in shards.tensors.items()}
        self._objects = {keys[path]: value for path, value in shards.objects.items()}
        self._paths = paths if any(len(path) > 1 for path in keys) else None  # if a state dict was nested

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
            torch.save(in_memory(self._objects[index.fqn]), data)
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


def entries_of(values: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """A program's entries, flattened for torch's loaders, and those without tensors as they are under ``ENTRIES``:
    flattening makes text of a number that is a key, drops an empty dictionary, and forgets a Counter."""

    def has_tensor(value: Any) -> bool:
        if isinstance(value, (Mapping, list, tuple)):
            return any(map(has_tensor, value.values() if isinstance(value, Mapping) else value))
        return isinstance(value, (Tensor, LazyTensor))

    return {**flattened(values), (ENTRIES,): {key: value for key, value in values.items() if not has_tensor(value)}}


def save(
    folder: Path,
    shards: Shards,
    ranks: Collectives | None = None,
    what: str = "save",
    workers: int = 1,
    *,
    step: int | None = None,
) -> None:
    """Write the shards of all ``ranks`` into ``folder``, which all of them see, replacing the checkpoint in it.

    Called on all ranks; each writes its own boxes, and one of those that several ranks have, into its own file.
    ``workers`` boxes are in memory: one is written while others are read. An error on any rank is raised on all; the
    folder then has its earlier checkpoint, and the next save removes the files of this one. Another program's
    checkpoint in the folder is an error before anything is written. The manifest takes rank 0's ``step``.
    """
    target = folder if ranks is not None else None  # a conversion writes into a temporary folder, and names the target
    ranks = ranks or Collectives()

    def in_all(decide: Callable[[], T]) -> T:
        return agree(ranks, what, lambda: (_naming(target, decide), []))

    unused = in_all(lambda: _unused_number(folder) if ranks.rank == 0 else 0)
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
            listed[METADATA] = FileEntry(path.stat().st_size, manifest.crc_of(path))
            manifest.write(folder, listed, step, save_id=save_id, world=ranks.world_size)

    try:
        metadata, written = in_all(write)
    except BaseException:
        with suppress(OSError):
            (folder / name).unlink()
        raise
    results = ranks.gather_objects_to_first((written, files.entries)) or []
    in_all(finish)


def _unused_number(folder: Path) -> int:
    """A number that no file of a save has. Raises CheckpointError for another program's files, which this save would
    remove. This package's files are those of its manifest, or, after an interrupted save, those with its mark."""
    found = sorted(folder.glob(f"*{FILE}"))
    for path in [] if _has_manifest(folder) else found:
        with path.open("rb") as file:
            if not manifest.is_marked(file.read(manifest.MARK)):
                raise CheckpointError(
                    f"{path}: expected a folder without other programs' files, because this save would remove them; "
                    "save to another folder, or empty this one"
                )
    numbers = [path.stem.rpartition("_")[2] for path in found]
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _has_manifest(folder: Path) -> bool:
    """Whether there is a manifest of this metadata: another program replaces only the metadata."""
    with suppress(CheckpointError, OSError, KeyError):
        listed = manifest.read(folder)
        return listed is not None and manifest.crc_of(folder / METADATA) == listed.files[METADATA].crc32
    return False


def _naming(target: Path | None, decide: Callable[[], T]) -> T:
    """Call ``decide``; add the target to errors of the disk, because a full disk's error names no file."""
    try:
        return decide()
    except OSError as error:
        if target is None:
            raise
        raise type(error)(f"{target} is unchanged, and nothing was written: {error}") from error


def _finish(writer: _Writer, folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the metadata, last, and remove the files of other saves."""
    ends: dict[str, int] = {}
    for info in (result.storage_data for of_rank in results for result in of_rank):
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    os.listdir(folder)
    for name, end in ends.items():  # NFS may cache an old folder or size until these are opened
        path = folder / name
        with suppress(FileNotFoundError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == end:
                continue
        raise FileNotFoundError(f"{path}: expected a file of every rank; save to one folder that all see")
    (folder / manifest.NAME).unlink(missing_ok=True)  # the last save's: an interruption here leaves none
    flush(folder)
    writer.finish(metadata, results)
    flush(folder)
    for path in (*folder.glob(ANY_FILE), *folder.glob(f".{manifest.NAME}.*")):
        if path.name not in ends:
            path.unlink(missing_ok=True)


# Whole checkpoints, for an FSDP2 model and its optimizer, loaded by
#
#     state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
#     torch.distributed.checkpoint.load(state, checkpoint_id=folder)
#
# Every tensor is whole in the file; loading cuts it for any mesh. StateDictOptions are the defaults, so the optimizer's
# state is nested.


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, which is empty. ``workers`` tensors, or the owner state of as many matrices, are in memory.

    Weights are the master weights if there are any: FSDP2's parameters are the masters, and loading rounds them to
    narrower parameters. Besides ``model`` and ``optimizer`` it has ``iteration``, ``samples``, ``scheduler``,
    ``arguments`` and the user's entries, if these exist. Raises CheckpointError for a parameter without a known group,
    and for owner state of parts of a fused parameter whose rows are not in the checkpoint (``arguments["matrices"]``).
    """

    @functools.lru_cache(workers)  # a matrix's tensors are written one after another, from one reading
    def owner_state(name: str, place: int) -> dict[str, Tensor]:
        return as_tensors(dict(checkpoint.params[name].owner_states[place]))

    tensors: dict[tuple[Any, ...], LazyTensor] = {}
    for name, param in checkpoint.params.items():
        tensors["model", name] = param.best
        matrices = (checkpoint.arguments.get(MATRICES) or {}).get(name)
        for key, tensor in states_of(name, param, matrices, partial(owner_state, name)):
            tensors["optimizer", "state", name, key] = tensor
    tensors.update({("model", name): checkpoint.params[of].best for name, of in checkpoint.tied.items()})
    tensors.update({("model", name): buffer for name, buffer in checkpoint.buffers.items()})
    more = {
        "iteration": checkpoint.iteration,
        "samples": checkpoint.samples,
        "scheduler": checkpoint.scheduler,
        "names": None if checkpoint.names == "model" else checkpoint.names,
    }
    objects = entries_of({**{key: value for key, value in more.items() if value is not None}, **checkpoint.client})
    if groups := _groups(checkpoint):
        objects |= flattened({"optimizer": {"param_groups": groups}})
    tensors.update({path: value for path, value in objects.items() if isinstance(value, LazyTensor)})
    objects = {path: value for path, value in objects.items() if path not in tensors}
    if checkpoint.arguments:  # as one object: no program loads them in place
        objects["arguments",] = dict(checkpoint.arguments)
    objects[RECORD,] = dict(checkpoint.tied)
    shards = Shards({path: one_box(tensor) for path, tensor in tensors.items()}, objects)
    save(folder, shards, workers=workers, step=checkpoint.iteration)


def states_of(
    name: str, param: Param, matrices: Sequence[str] | None, owner_state: Callable[[int], dict[str, Tensor]]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the optimizer's state of a parameter, by key, without its master weight. ``matrices`` are the elements of
    the parameter's matrices, if known; ``owner_state`` reads that of a matrix, by its place."""
    for key, tensor in param.states.items():
        if key != MASTER:
            yield key, tensor
    if param.step is not None:
        yield "step", held(torch.tensor(float(param.step)), f"step of {name}")
    by_shape = list(map(str, matrices_of(param.shape))) if param.owner_states else []
    known = by_shape if matrices is None else list(matrices)
    if param.owner_states and known != by_shape:
        yield MATRICES, held(nested.described(known), f"matrices of {name}")
    for place in param.owner_states:
        if place >= len(known):
            raise CheckpointError(
                f"{name}: expected the rows of matrix number {place} in a fused parameter, found none in the "
                "checkpoint; resume on the engine that wrote the checkpoint"
            )
        for path, like in owner_state(place).items():
            key = owner_key(path, place, len(known))
            read = partial(_contiguous, owner_state, place, path)
            yield key, LazyTensor(tuple(like.shape), like.dtype, read, f"{key} of {name}")


def _contiguous(owner_state: Callable[[int], dict[str, Tensor]], place: int, path: str) -> Tensor:
    return owner_state(place)[path].contiguous()


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Param groups with the names of their parameters, as ``get_optimizer_state_dict`` has them."""
    members: dict[int, list[str]] = {}
    for name, param in checkpoint.params.items():
        if param.group is not None:
            members.setdefault(param.group, []).append(name)
        elif set(param.states) - {MASTER} or param.owner_states:
            raise CheckpointError(
                f"{param.best.where}: expected the param group of {name}, one of {len(checkpoint.groups)}, which "
                "loading its state needs; the checkpoint does not record it; convert from a checkpoint that does"
            )
    count = max([len(checkpoint.groups), *(number + 1 for number in members)])
    given: list[Mapping[str, Any]] = [*checkpoint.groups, *({} for _ in range(count - len(checkpoint.groups)))]
    return [{**group, "params": members.get(number, [])} for number, group in enumerate(given)]
