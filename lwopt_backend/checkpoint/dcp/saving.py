"""Writes folders with torch.distributed.checkpoint (DCP), one tensor in memory at a time; ``dcp.reader`` reads them.

The files of a save have names of their own. They replace an earlier save when ``.metadata`` is renamed, after all ranks
have written; then the manifest is written, and the files of other saves are removed.
"""

from __future__ import annotations

import functools
import io
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_all
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, held
from lwopt_backend.checkpoint.dcp.reader import FILE, METADATA
from lwopt_backend.checkpoint.dcp.state_dicts import ENTRIES, FORMS, PLACE
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import flush
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.pickles import in_memory
from lwopt_backend.checkpoint.files.threads import in_order
from lwopt_backend.checkpoint.files.torch_files import save_as_it_lies
from lwopt_backend.checkpoint.ties import RECORD
from lwopt_backend.groups import registry
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import from_first
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.state import MATRICES, as_tensors, owner_key

OURS = re.compile(r"lwopt_([0-9a-z]+)_\d+\.distcp")  # the name of a file, with its save's
Values = dict[tuple[Any, ...], Any]  # by their paths in a nested state dict


def save(
    folder: Path,
    values: Values,
    ranks: Collectives | None = None,
    what: str = "save",
    workers: int = 1,
    *,
    step: int | None = None,
) -> None:
    """Write the values of all ``ranks`` into ``folder``, which all of them see, replacing this package's save in it.

    Called on all ranks; each writes its tensors, or pieces of them, and one of those that several ranks have, into its
    own file. ``workers`` lazy tensors are in memory. An error on any rank is raised on all, and the folder then has its
    earlier save. Another program's files in the folder are an error. The manifest takes rank 0's ``step``.
    """
    group = ranks.process_group if isinstance(ranks, TorchCollectives) else None
    writer = _Writer(folder, workers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process saves alone
            save_all(values, storage_writer=writer, planner=_Planner(), process_group=group, no_dist=group is None)
    except CheckpointException as failed:  # before the metadata is renamed
        writer.remove()
        _, (error, _) = min(failed.failures.items())
        if isinstance(error, OSError) and ranks is not None:  # a full disk's error names no file
            error = type(error)(f"{folder} is unchanged, and nothing was written: {error}")
        raise error from failed
    ranks = ranks or Collectives()
    entries = ranks.gather_objects_to_first(writer.files.entries) or []
    from_first(ranks, what, lambda: writer.seal(entries, step))


class _Writer(FileSystemWriter):
    """PyTorch's writer, except that it keeps no tensor in memory that is written, and replaces a save atomically."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder)
        self.files, self._workers, self._save_id = Files(folder), workers, manifest.new_save_id()
        self.fs = _Replacing()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.files.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        for path in sorted(self.files.folder.glob(f"*{FILE}")):
            if not OURS.fullmatch(path.name):
                raise CheckpointError(
                    f"{path}: expected a folder without other programs' files, because this save would replace them; "
                    "save to another folder, or empty this one"
                )
        return [replace(plan, storage_data=f"lwopt_{self._save_id}_{n}{FILE}") for n, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, name = list[WriteResult](), plan.storage_data
        items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)  # objects first, as PyTorch's
        with self.files.open(name) as file:
            read = in_order((partial(planner.resolve_data, item) for item in items), self._workers)
            for item, data in zip(items, read):
                start = file.tell()
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    save_as_it_lies(data, file)
                del data
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        folder, ends = self.files.folder, dict[str, int]()
        for info in (result.storage_data for of_rank in results for result in of_rank):
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        os.listdir(folder)
        for name, end in ends.items():  # NFS may cache an old folder or size until these are opened
            with suppress(FileNotFoundError), (folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size == end:
                    continue
            raise FileNotFoundError(f"{folder / name}: expected a file of every rank; save to one folder that all see")
        (folder / manifest.NAME).unlink(missing_ok=True)  # the last save's: an interruption here leaves none
        flush(folder)
        super().finish(metadata, results)

    def remove(self) -> None:
        """Remove the files of all ranks, which have the name that the first has given. Called on all."""
        folder = self.files.folder
        for path in (*folder.glob(f"lwopt_{self._save_id}_*"), folder / f"{METADATA}.tmp"):
            with suppress(OSError):
                path.unlink()

    def seal(self, entries: list[dict[str, manifest.FileEntry]], step: int | None) -> None:
        """Write the manifest of the files of all ranks, and remove those of other saves. Called on the first rank."""
        folder = self.files.folder
        try:
            flush(folder)
            self.files.add(METADATA, manifest.crc_of(folder / METADATA))
            listed = {name: entry for of_rank in (*entries, self.files.entries) for name, entry in of_rank.items()}
            manifest.write(folder, listed, step, save_id=self._save_id)
        except OSError as error:
            raise OSError(f"{folder} has a new save without its {manifest.NAME}: {error}") from error
        for path in (*folder.glob(f"*{FILE}"), *folder.glob(f".{manifest.NAME}.*")):
            if path.name not in listed:
                path.unlink(missing_ok=True)


class _Replacing(FileSystem):
    """Renaming replaces an existing file atomically; PyTorch's writer would remove that first."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass


class _Planner(DefaultSavePlanner):
    """PyTorch's planner, for values by path, some of them lazy tensors, and with the first rank's order of keys."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.mappings, self._values = {}, dict[str, Any]()
        for path, value in state_dict.items():
            key = ".".join(map(str, path))
            if key in self.mappings:
                raise ValueError(f"expected different names, found one for {path} and {self.mappings[key]}; rename one")
            self.mappings[key], self._values[key] = path, value  # type: ignore[assignment]
        forms = {key: _form(value) for key, value in self._values.items()}
        super().set_up_planner(forms, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        paths = {key: path for plan in all_plans for key, path in plan.planner_data.items()}
        plans, metadata = super().create_global_plan(all_plans)
        found = metadata.state_dict_metadata
        paths = {key: path for key, path in paths.items() if key in found}
        return plans, replace(metadata, state_dict_metadata={key: found[key] for key in paths}, planner_data=paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._values[index.fqn]
        if not isinstance(value, Tensor):
            return in_memory(value)
        part = super().lookup_object(index).detach().cpu()
        return part if part.nbytes == part.untyped_storage().nbytes() else part.clone()  # not what it is a part of


def _form(value: Any) -> Any:
    is_lazy = isinstance(value, LazyTensor)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_lazy else value


def write_item(key: str, shape: torch.Size, dtype: torch.dtype, chunk: ChunkStorageMetadata) -> WriteItem:
    """DCP's write item for a chunk of a tensor of ``shape``."""
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), shape)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def flattened(values: Mapping[str, Any]) -> Values:
    """Nested values by their paths, as DCP flattens a state dict."""
    flat, paths = flatten_state_dict(dict(values))
    return {paths[key]: value for key, value in flat.items()}


def entries_of(values: Mapping[str, Any]) -> Values:
    """A program's entries, flattened for torch's loaders, and as they are for this package's reader: under ``ENTRIES``
    those without tensors, and under ``FORMS`` the others, with a place for each tensor. Flattening makes text of a
    number that is a key, a list of a tuple, and drops an empty dictionary."""
    whole = {key: value for key, value in values.items() if not _has_tensor(value)}
    forms, found, taken = dict[str, Any](), Values(), set[str]()
    for key, value in values.items():
        try:
            flat = flattened({key: value})
        except ValueError:  # two of its names are one with dots between
            flat = {}
        names = {".".join(map(str, path)) for path in flat}
        if key not in whole and (not flat or names & taken):
            whole[key] = value  # as one object, for which torch's loaders have no place
        elif not names & taken:
            found |= flat
            taken |= names
            if key not in whole:
                forms[key] = _with_places(value, names, (key,))
    return {(ENTRIES,): whole, **({(FORMS,): forms} if forms else {}), **found}


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_has_tensor, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (Tensor, LazyTensor))


def _with_places(value: Any, keys: Collection[str], path: tuple[Any, ...]) -> Any:
    """``value`` with ``{PLACE: key}`` for each part with tensors that is alone under one of the folder's ``keys``."""
    if (key := ".".join(map(str, path))) in keys:
        return {PLACE: key} if _has_tensor(value) else value
    if isinstance(value, Mapping):
        return nested.with_values(value, lambda at, entry: _with_places(entry, keys, (*path, at)))
    if isinstance(value, list):
        return [_with_places(entry, keys, (*path, at)) for at, entry in enumerate(value)]
    return value


# Whole checkpoints, for an FSDP2 model and its optimizer, loaded by
#
#     state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
#     torch.distributed.checkpoint.load(state, checkpoint_id=folder)
#
# Every tensor is whole in the file; loading cuts it for any mesh. StateDictOptions are the defaults, so the optimizer's
# state is nested.


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, which is empty. ``workers`` tensors, or the owner state of as many matrices, are in
    memory."""
    save(folder, values_of(checkpoint, workers), workers=workers, step=checkpoint.iteration)


def values_of(checkpoint: Checkpoint, workers: int) -> Values:
    """What a folder has of a checkpoint, with the owner state of ``workers`` matrices in memory.

    Weights are the master weights if there are any: FSDP2's parameters are the masters, and loading rounds them to
    narrower parameters. Besides ``model`` and ``optimizer`` it has ``iteration``, ``samples``, ``scheduler``,
    ``arguments`` and the user's entries, if these exist. Raises CheckpointError for a parameter without a known group,
    and for owner state of parts of a fused parameter whose rows are not in the checkpoint (``arguments["matrices"]``).
    """

    @functools.lru_cache(workers)  # a matrix's tensors are written one after another, from one reading
    def owner_state(name: str, place: int) -> dict[str, Tensor]:
        return as_tensors(dict(checkpoint.params[name].owner_states[place]))

    values: Values = {}
    counters: dict[int | None, torch.dtype] = dict(enumerate(map(registry.dtype_of_steps, checkpoint.groups)))
    for name, param in checkpoint.params.items():
        values["model", name] = param.best
        matrices = (checkpoint.arguments.get(MATRICES) or {}).get(name)
        counter = counters.get(param.group, torch.float32)
        for key, tensor in states_of(name, param, matrices, partial(owner_state, name), counter):
            values["optimizer", "state", name, key] = tensor
    values.update({("model", name): checkpoint.params[of].best for name, of in checkpoint.tied.items()})
    values.update({("model", name): buffer for name, buffer in checkpoint.buffers.items()})
    more = {
        "iteration": checkpoint.iteration,
        "samples": checkpoint.samples,
        "scheduler": checkpoint.scheduler,
        "names": None if checkpoint.names == "model" else checkpoint.names,
    }
    if groups := _groups(checkpoint):
        values |= flattened({"optimizer": {"param_groups": groups}})
    if checkpoint.arguments:  # as one object: no program loads them in place
        values["arguments",] = dict(checkpoint.arguments)
    values |= entries_of({**{key: value for key, value in more.items() if value is not None}, **checkpoint.client})
    values[RECORD,] = dict(checkpoint.tied)
    return values


def states_of(
    name: str,
    param: Param,
    matrices: Sequence[str] | None,
    owner_state: Callable[[int], dict[str, Tensor]],
    counter: torch.dtype,
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the optimizer's state of a parameter, by key, without its master weight. ``matrices`` are the elements of
    the parameter's matrices, if known; ``owner_state`` reads that of a matrix, by its place; ``counter`` is the dtype
    of the count of steps."""
    for key, tensor in param.states.items():
        if key != MASTER:
            yield key, tensor
    if param.step is not None:
        yield "step", held(torch.tensor(float(param.step)).to(counter), f"step of {name}")
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
