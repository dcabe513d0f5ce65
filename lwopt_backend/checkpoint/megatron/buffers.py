"""Where each parameter lies in the flat buffers of Megatron's DistributedOptimizer.

A buffer holds the parameters of one dtype in reversed module order, in buckets (P = padding of a start to 64 elements,
E = padding of a bucket's end, which checkpoints leave out):

    bucket 0                          bucket 1
    | last param |P| one before |E|   | the next |P| ... | first param |E|

Source: ``_ParamAndGradBuffer`` in megatron/core/distributed/param_and_grad_buffer.py, ``bucket_size`` in
distributed_data_parallel.py and megatron/training/training.py. The end's padding is a multiple of 64, so places inside
a bucket do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.names import EMBEDDING, OUTPUT, is_tied

ALIGNMENT = 64  # elements: 128 bytes at 16 bits


@dataclass(frozen=True, slots=True)
class Place:
    """Elements [start, stop) of a bucket are the parameter ``name``, of ``shape`` (one rank's part of it)."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: its ``numel`` without the padding at its end, and what is in it."""

    numel: int
    places: tuple[Place, ...]


def bucket_numel(arguments: Mapping[str, Any], *, parameters: int, pipeline_rank: int, chunk: int = 0) -> int | None:
    """At how many elements a bucket is closed, or None for one bucket.

    ``arguments`` are Megatron's ``args``; ``parameters``: elements of all of the rank's parameters, experts too;
    ``chunk``: of a virtual pipeline. Only the first stage's first chunk has several buckets.
    """
    if not arguments.get("overlap_grad_reduce") or pipeline_rank > 0 or chunk > 0:
        return None
    if arguments.get("overlap_param_gather_with_optimizer_step"):
        return None
    if arguments.get("ddp_num_buckets") is not None:
        return parameters // int(arguments["ddp_num_buckets"])
    if arguments.get("ddp_bucket_size") is not None:
        return int(arguments["ddp_bucket_size"])
    ranks = int(arguments["data_parallel_size"]) * int(arguments.get("context_parallel_size") or 1)
    return max(40_000_000, 1_000_000 * ranks)


def own_buckets(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters that get a bucket of their own: the two copies of a tied embedding, if there are two."""
    several = int(arguments.get("pipeline_model_parallel_size") or 1) > 1
    return (EMBEDDING, OUTPUT) if several and is_tied(arguments) else ()


def buckets(
    shapes: Mapping[str, Sequence[int]], *, closed_at: int | None, alone: Collection[str] = ()
) -> tuple[Bucket, ...]:
    """The buckets of a buffer. ``shapes``: one rank's parameters of the buffer, in module order."""
    done: list[Bucket] = []
    places: list[Place] = []
    start = 0

    def close(numel: int) -> None:
        done.append(Bucket(numel, tuple(places)))
        places.clear()

    for name, shape in reversed(tuple(shapes.items())):
        start = _aligned(start)
        if name in alone and places:
            close(start)
            start = 0
        stop = start + math.prod(shape)
        places.append(Place(name, start, stop, tuple(shape)))
        if name in alone or (closed_at is not None and stop >= closed_at):
            close(stop)
            stop = 0
        start = stop
    if places:
        close(places[-1].stop)
    return tuple(done)


def buckets_of(shapes: Mapping[str, Sequence[int]], numels: Sequence[int]) -> tuple[Bucket, ...]:
    """The buckets of a buffer whose buckets' lengths (without the end's padding) are known.

    Raises ValueError if the parameters do not fill them exactly.
    """
    found: list[list[Place]] = [[] for _ in numels]
    index, start = 0, 0
    for name, shape in reversed(tuple(shapes.items())):
        start = _aligned(start)
        if index < len(numels) and start >= numels[index] and found[index]:
            index, start = index + 1, 0
        stop = start + math.prod(shape)
        if index >= len(numels) or stop > numels[index]:
            raise ValueError(f"{name} of shape {tuple(shape)} does not fit: buckets of {list(numels)} elements")
        found[index].append(Place(name, start, stop, tuple(shape)))
        start = stop
    ends = [_aligned(places[-1].stop) if places else 0 for places in found]
    short = [i for i, (end, numel) in enumerate(zip(ends, numels)) if end < numel]
    if short:
        raise ValueError(f"buckets {short} of {list(numels)} elements are not filled by the parameters: {ends}")
    return tuple(Bucket(numel, tuple(places)) for numel, places in zip(numels, found))


def part(flat: LazyTensor, place: Place, first: int = 0) -> LazyTensor:
    """The parameter at a place of the bucket that begins at element ``first`` of ``flat``."""
    return flat.piece(first + place.start, first + place.stop).view(place.shape)


def _aligned(start: int) -> int:
    return -(-start // ALIGNMENT) * ALIGNMENT
