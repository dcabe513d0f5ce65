"""Named states out of ``distrib_optim.pt``: the flat buffers of Megatron's DistributedOptimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.buffers import Bucket, bucket_numel, buckets, own_buckets, part
from lwopt_backend.checkpoint.megatron.groups import is_sharded_expert, step_of
from lwopt_backend.checkpoint.megatron.optimizers import Kept
from lwopt_backend.checkpoint.megatron.ranks import Rank
from lwopt_backend.checkpoint.megatron.states import FLAT

FLAT_FILE = "distrib_optim.pt"


def from_buffers(
    rank: Rank, arguments: Mapping[str, Any], numbers: Mapping[str, int | None], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Kept]:
    """What the rank's file keeps, by parameter; ``numbers``: the group of each.

    Bucket sizes are not in the file: they are computed from ``arguments`` and compared with the buffers' lengths.
    Raises CheckpointError if these differ, for states that are not known, and for a file of another format.
    """
    path = rank.file.with_name(FLAT_FILE)
    saved = torch_files.load(path)
    found: dict[str, Kept] = {}
    for key, buffer, shapes, chunk in _buffers(saved, rank, arguments, str(path)):
        closed_at = bucket_numel(
            arguments,
            parameters=sum(weight.numel for weight in rank.weights.values()),
            pipeline_rank=rank.coordinates[1],
            chunk=chunk,
        )
        layout = buckets(shapes, closed_at=closed_at, alone=own_buckets(arguments))
        for name, states in _states(buffer, layout, f"{key} in {path}").items():
            number = numbers[name]
            found[name] = Kept(states, step_of(groups, number), number)
    return found


def _buffers(
    saved: Any, rank: Rank, arguments: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Mapping[str, Any], dict[str, tuple[int, ...]], int]]:
    """Each buffer in the file: its key, what it has, the shapes of its parameters in module order, virtual stage.

    A file has a list of two if experts are sharded: those of the dense parameters, None where another rank has them,
    and those of the rank's experts.
    """
    expected = 1 + (bool(arguments.get("num_experts")) and int(arguments.get("expert_model_parallel_size") or 1) > 1)
    entries = saved if isinstance(saved, list) else [saved]
    if len(entries) != expected or arguments.get("overlap_param_gather_with_optimizer_step"):
        raise CheckpointError(
            f"{where}: expected the buffers of {expected} optimizers, found {len(entries)}; those split for "
            "--overlap-param-gather-with-optimizer-step are not read: save as torch_dist"
        )
    for entry, sharded in zip(entries, (False, True)):
        if entry is None:
            continue
        if not isinstance(entry, dict) or not entry.get("buckets_coalesced"):
            raise CheckpointError(
                f"{where}: expected buffers with 'buckets_coalesced', found none; files of before 2024 are not read: "
                "load and save them with a newer Megatron"
            )
        wanted = _parameters(rank, arguments, sharded=sharded)
        indices = [key for key in entry if key != "buckets_coalesced"]
        if indices != list(range(len(wanted))):
            raise CheckpointError(f"{where}: expected buffers {list(range(len(wanted)))}, found {indices}")
        for index, (chunk, dtype, shapes) in enumerate(wanted):
            keys = list(entry[index])
            if len(keys) != 1 or keys[0][0] != dtype:
                raise CheckpointError(f"{where}: expected buffer {index} to hold {dtype}, found {keys}")
            yield f"buffer {index}", entry[index][keys[0]], shapes, chunk


def _parameters(
    rank: Rank, arguments: Mapping[str, Any], *, sharded: bool
) -> list[tuple[int, torch.dtype, dict[str, tuple[int, ...]]]]:
    """(virtual stage, dtype, shapes) of each buffer: one for each dtype of each virtual stage."""
    found = []
    for chunk, weights in enumerate(rank.chunks):
        by_dtype: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
        for name, weight in weights.items():
            if is_sharded_expert(name, arguments) == sharded:
                by_dtype.setdefault(weight.dtype, {})[name] = weight.shape
        found += [(chunk, dtype, shapes) for dtype, shapes in by_dtype.items()]
    return found


def _states(buffer: Mapping[str, Any], layout: Sequence[Bucket], where: str) -> dict[str, dict[str, LazyTensor]]:
    """The states of each parameter in a buffer whose buckets follow one another without padding."""
    flats = {key: value for key, value in buffer.items() if key != "numel_unpadded"}
    if set(flats) != set(FLAT):
        raise CheckpointError(f"{where}: expected the states {sorted(FLAT)}, found {sorted(map(str, flats))}")
    numels = [bucket.numel for bucket in layout]
    lengths = {key: math.prod(flat.shape) for key, flat in flats.items()} | {"numel_unpadded": buffer["numel_unpadded"]}
    if set(lengths.values()) != {sum(numels)}:
        raise CheckpointError(
            f"{where}: expected {sum(numels)} elements in buckets of {numels}, by args.overlap_grad_reduce, "
            f"ddp_num_buckets, ddp_bucket_size, found {lengths}; what lies where cannot be told: save as torch_dist"
        )
    found: dict[str, dict[str, LazyTensor]] = {}
    first = 0
    for bucket in layout:
        for place in bucket.places:
            found[place.name] = {FLAT[key]: part(flat, place, first) for key, flat in flats.items()}
        first += bucket.numel
    return found
