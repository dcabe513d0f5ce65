"""Writes what torch.distributed.checkpoint reads, one tensor in memory at a time: the counterpart of ``dcp.files``.

Metadata, and the files' form, are PyTorch's own (torch/distributed/checkpoint/filesystem.py, ``_write_item``).
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files.parallel import in_order
from lwopt_backend.checkpoint.files.torch_saving import save_as_it_lies
from lwopt_backend.checkpoint.lazy import LazyTensor

Place = tuple[int, ...]


@dataclass(frozen=True)
class Boxes:
    """A tensor of ``shape``, made of boxes by the place of their first element. They fill it, each of one dtype."""

    shape: tuple[int, ...]
    parts: Mapping[Place, LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parts.values())).dtype

    def sizes(self, part: LazyTensor) -> tuple[int, ...]:
        """How large a box is in each dimension; dimensions that it lacks are first, and 1."""
        return (1,) * (len(self.shape) - len(part.shape)) + part.shape


def stacked(parts: Mapping[Place, LazyTensor], where: str) -> Boxes:
    """Tensors of one shape and dtype along new first axes, each at its place. Raises CheckpointError for a gap."""
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


def save(
    folder: Path,
    tensors: Mapping[str, Boxes],
    objects: Mapping[str, Any],
    paths: Mapping[str, tuple[Any, ...]] | None = None,
    workers: int = 1,
) -> None:
    """Fill ``folder`` with tensors and other objects by their keys; ``paths`` are keys' parts, of nested state.

    ``workers`` boxes are in memory: one is being written, and others are read meanwhile.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant
        try:
            dcp_save(
                {}, storage_writer=_Writer(folder, workers), planner=_Planner(tensors, objects, paths), no_dist=True
            )
        except CheckpointException as error:  # DCP's own, which has the tracebacks of all ranks for its text
            failed, _ = next(iter(error.failures.values()))
            raise failed from error


class _Writer(FileSystemWriter):
    """PyTorch's, but for one thing: that keeps the last box of every tensor until the file is written."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__(folder)
        self._workers = workers

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path = Path(self.path, f"{plan.storage_data.prefix}0.distcp")
        results = []
        with path.open("wb") as file:
            read = in_order((partial(planner.resolve_data, item) for item in plan.items), self._workers)
            for item, data in zip(plan.items, read):
                start = file.tell()
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    save_as_it_lies(data, file)
                del data
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


class _Planner(DefaultSavePlanner):
    def __init__(
        self, tensors: Mapping[str, Boxes], objects: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]] | None
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._objects, self._paths = tensors, objects, paths

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for key, boxes in self._tensors.items():
            for place, part in boxes.parts.items():
                offsets = torch.Size(place)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(boxes.sizes(part))),
                    TensorProperties(dtype=boxes.dtype),
                    torch.Size(boxes.shape),
                )
                items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=self._paths)

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
