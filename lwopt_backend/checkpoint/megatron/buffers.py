"""The flat buffers of Megatron's DistributedOptimizer: ranges of parameters, and the buckets of dp_reshardable."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, CheckpointError, LazyTensor
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.megatron import conventions
from lwopt_backend.checkpoint.megatron.ranks import TPSplit, is_gated, local_shape, merge, tp_split_of

# The ranges of parameters in the flat buffers of Megatron's DistributedOptimizer. A buffer has the parameters of one
# dtype in reversed module order, in buckets (P = padding of a start to 64 elements, E = padding of a bucket's end,
# which checkpoints leave out):
#
#     bucket 0                          bucket 1
#     | last param |P| one before |E|   | the next |P| ... | first param |E|
#
# Source: ``_ParamAndGradBuffer`` in megatron/core/distributed/param_and_grad_buffer.py, ``bucket_size`` in
# distributed_data_parallel.py and megatron/training/training.py. The end's padding is a multiple of 64, so ranges
# inside a bucket do not depend on the number of ranks.

ALIGNMENT = 64  # elements: 128 bytes at 16 bits


@dataclass(frozen=True, slots=True)
class ParamRange:
    """Parameter ``name``, of ``shape`` (one rank's part of it), in elements [start, stop) of a bucket."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedBucket:
    """A bucket as it is saved: its ``numel`` without the padding at its end, and the parameters in it."""

    numel: int
    params: tuple[ParamRange, ...]


def bucket_numel(arguments: Mapping[str, Any], *, parameters: int, pipeline_rank: int, chunk: int = 0) -> int | None:
    """The number of elements that closes a bucket, or None for one bucket.

    ``arguments`` are Megatron's ``args``; ``parameters`` is the elements of all of the rank's parameters, experts
    included; ``chunk`` is of a virtual pipeline. Only the first stage's first chunk has several buckets.
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
    """Parameters with a separate bucket: the two copies of a tied embedding, if there are two."""
    several = int(arguments.get("pipeline_model_parallel_size") or 1) > 1
    return conventions.EMBEDDINGS if several and conventions.is_tied(arguments) else ()


def buckets(
    shapes: Mapping[str, Sequence[int]], *, closed_at: int | None, alone: Collection[str] = ()
) -> tuple[SavedBucket, ...]:
    """The buckets of a buffer. ``shapes`` are one rank's parameters in it, in module order."""
    done: list[SavedBucket] = []
    ranges: list[ParamRange] = []
    start = 0

    def close(numel: int) -> None:
        done.append(SavedBucket(numel, tuple(ranges)))
        ranges.clear()

    for name, shape in reversed(tuple(shapes.items())):
        start = _aligned(start)
        if name in alone and ranges:
            close(start)
            start = 0
        stop = start + math.prod(shape)
        ranges.append(ParamRange(name, start, stop, tuple(shape)))
        if name in alone or (closed_at is not None and stop >= closed_at):
            close(stop)
            stop = 0
        start = stop
    if ranges:
        close(ranges[-1].stop)
    return tuple(done)


def buckets_of(shapes: Mapping[str, Sequence[int]], numels: Sequence[int]) -> tuple[SavedBucket, ...]:
    """The buckets of a buffer, given their lengths without padding at the end. Raises ValueError if the parameters do
    not fill them exactly."""
    found: list[list[ParamRange]] = [[] for _ in numels]
    index, start = 0, 0
    for name, shape in reversed(tuple(shapes.items())):
        start = _aligned(start)
        if index < len(numels) and start >= numels[index] and found[index]:
            index, start = index + 1, 0
        stop = start + math.prod(shape)
        if index >= len(numels) or stop > numels[index]:
            raise ValueError(f"expected room for {name} of {tuple(shape)} in buckets of {list(numels)}, found none")
        found[index].append(ParamRange(name, start, stop, tuple(shape)))
        start = stop
    ends = [_aligned(ranges[-1].stop) if ranges else 0 for ranges in found]
    short = [i for i, (end, numel) in enumerate(zip(ends, numels)) if end < numel]
    if short:
        raise ValueError(f"expected parameters that fill buckets {short} of {list(numels)} elements, found {ends}")
    return tuple(SavedBucket(numel, tuple(ranges)) for numel, ranges in zip(numels, found))


def part(flat: LazyTensor, at: ParamRange, first: int = 0) -> LazyTensor:
    """The parameter in a range of the bucket that begins at element ``first`` of ``flat``."""
    return flat.piece(first + at.start, first + at.stop).view(at.shape)


def _aligned(start: int) -> int:
    return -(-start // ALIGNMENT) * ALIGNMENT


# The optimizer's state in ``dp_reshardable`` checkpoints: flat buckets, whose contents the files do not describe.
#
#     [chained_<k>.]optimizer.distributed.dp_group_idx_<m>.gbuf_idx_<g>
#         .dtype_(<of weights>, <of gradients>).bucket_idx_<b>.{param,exp_avg,exp_avg_sq}
#
# ``m`` counts model-parallel ranks, tensor parallel ones fastest, then (for experts' buffers) expert and pipeline
# parallel ones. Optimizers whose state is saved by name have no buffers.

BUCKET = re.compile(
    r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)"
)
Chain = tuple[int, ...]  # an optimizer's number in the chain, then in the chain in that, ...; () if it is alone
States = dict[str, dict[str, LazyTensor]]  # by parameter and state
Replicas = list[tuple[str, LazyTensor, LazyTensor]]
_Buffer = Mapping[str, Sequence[str]]  # the keys of each state's buckets
FIRST, LAST = "first", "last"  # the ends of the model, outside of layers


def chain_of(prefix: str) -> Chain:
    """``"chained_1."``: (1,)."""
    return tuple(map(int, re.findall(r"\d+", prefix)))


def states_in_buckets(
    folder: DcpFolder, weights: Mapping[str, LazyTensor], of_experts: Mapping[Chain, bool], arguments: Mapping[str, Any]
) -> tuple[States, Replicas]:
    """The states of ``weights``, whole parameters that have none by name; and pairs that must be equal.

    ``of_experts`` is, for each chained optimizer, whether its parameters are expert-parallel. Raises CheckpointError if
    parameters do not fill the buckets exactly, and for virtual pipelines.
    """
    found: States = {}
    replicas: Replicas = []
    for chain, ranks in _buffers(folder, arguments).items():
        experts = of_experts.get(chain, False)
        chosen = {name: w for name, w in weights.items() if conventions.is_sharded_expert(name, arguments) == experts}
        more, equal = _Optimizer(folder, chosen, ranks, experts, arguments).states()
        twice = sorted(found.keys() & more.keys())
        if twice:
            raise CheckpointError(f"{folder.path}: expected parameters in one optimizer, {twice[0]} is in two")
        found.update(more)
        replicas += equal
    return found, replicas


def _buffers(folder: DcpFolder, arguments: Mapping[str, Any]) -> dict[Chain, dict[int, dict[str, _Buffer]]]:
    """The buffers by chained optimizer, model-parallel rank and dtype of weights."""
    keys: dict[tuple[Chain, int, int, str], dict[str, dict[int, str]]] = {}  # by state and bucket
    for key in folder.tensors:
        if match := BUCKET.fullmatch(key):
            of_buffer = keys.setdefault((chain_of(match[1]), int(match[2]), int(match[3]), match[4]), {})
            of_buffer.setdefault(conventions.FLAT[match[6]], {})[int(match[5])] = key
    wanted = conventions.flat_states({state for states in keys.values() for state in states}, arguments).values()
    found: dict[Chain, dict[int, dict[str, _Buffer]]] = {}
    for (chain, rank, number, dtype), states in keys.items():
        of_rank = found.setdefault(chain, {}).setdefault(rank, {})
        if dtype in of_rank:
            raise CheckpointError(
                f"{folder.path}: expected one buffer of {dtype} on a rank, found several, as of virtual pipelines, "
                f"which are not read from dp_reshardable; {conventions.SAVED_WHOLE}"
            )
        numbers = {state: sorted(states.get(state, {})) for state in (*wanted, *states)}
        if any(of_state != list(range(len(numbers[MASTER]))) for of_state in numbers.values()):
            raise CheckpointError(
                f"{folder.path}: buffer {number}: expected the same buckets 0, 1, ... of each state that "
                f"{arguments.get('optimizer')} keeps ({', '.join(wanted)}), found {numbers}; copy all of its files"
            )
        of_rank[dtype] = {state: [buckets[bucket] for bucket in sorted(buckets)] for state, buckets in states.items()}
    return found


class _Optimizer:
    """The parameters and buffers of one optimizer, on all its model-parallel ranks."""

    def __init__(
        self,
        folder: DcpFolder,
        weights: Mapping[str, LazyTensor],
        ranks: Mapping[int, Mapping[str, _Buffer]],
        experts: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        self._folder, self._ranks = folder, ranks
        sizes = conventions.world(arguments)
        self._tensor, self._expert, self._stages = sizes["tp"], 1, sizes["pp"]
        if experts:
            self._tensor = int(arguments.get("expert_tensor_parallel_size") or sizes["tp"])
            self._expert = sizes["ep"]
        expected = range(self._tensor * self._expert * self._stages)
        if len(ranks) != len(expected) or sorted(ranks) != list(expected):
            raise CheckpointError(
                f"{folder.path}: expected the optimizer's buffers of {len(expected)} model-parallel ranks, found those "
                f"of {sorted(ranks)}; copy every rank's file"
            )
        tied = own_buckets(arguments) if not experts else ()  # the first stage's, and its copy on the last
        self._tied = tied if tied and tied[0] in weights else ()
        self._weights = {**weights, tied[1]: weights[tied[0]]} if self._tied else weights
        gated = is_gated(arguments)
        self._cuts = {
            name: tp_split_of(name, gated=gated) if self._tensor > 1 else TPSplit("whole") for name in self._weights
        }
        count = 1 + max((conventions.expert_of(name) or 0 for name in weights), default=0)
        self._layers = 1 + max((conventions.layer_of(name) or 0 for name in weights), default=0)
        if self._layers > 1 + len(weights):
            raise CheckpointError(f"{folder.path}: expected layers without gaps, found {self._layers - 1}")
        # In module order, by layer, or end of the model, and by expert-parallel rank: every rank looks for its own.
        self._names: dict[tuple[int | str, int], list[str]] = {}
        for name in conventions.module_order(weights, arguments):
            layer, expert = conventions.layer_of(name), conventions.expert_of(name) if experts else None
            end = FIRST if name.startswith("embedding.") else LAST
            of_expert = 0 if expert is None else expert * self._expert // count
            self._names.setdefault((end if layer is None else layer, of_expert), []).append(name)

    def states(self) -> tuple[States, Replicas]:
        """Whole states by parameter; and pairs that must be equal, because ranks have copies."""
        parts: dict[tuple[str, str], list[LazyTensor]] = {}
        for stage, (first, stop) in enumerate(self._layers_of_stages()):
            for place in range(self._tensor * self._expert):
                rank = stage * self._tensor * self._expert + place
                for dtype, layout in self._layout(rank, first, stop).items():
                    for state, keys in self._ranks[rank][dtype].items():
                        for key, bucket in zip(keys, layout):
                            flat = self._folder.tensor(key)
                            for param in bucket.params:
                                parts.setdefault((param.name, state), []).append(part(flat, param))
        found: States = {}
        replicas: Replicas = []
        for (name, state), of_ranks in parts.items():
            cut = self._cuts[name]
            if cut.kind == "whole":
                what = f"{state} of {name} on tensor-parallel ranks"
                replicas += [(what, of_ranks[0], other) for other in of_ranks[1:]]
            found.setdefault(name, {})[state] = merge(of_ranks, cut)
        if self._tied and self._tied[1] in found:
            for state, copy in found.pop(self._tied[1]).items():
                what = f"{state} of the tied embedding on the first and the last pipeline stage"
                replicas.append((what, found[self._tied[0]][state], copy))
        return found, replicas

    def _layers_of_stages(self) -> list[tuple[int, int]]:
        """Each stage's first layer and the next stage's: as many layers as fill its buckets exactly, in any split."""
        found: list[tuple[int, int]] = []
        for stage in range(self._stages):
            first = found[-1][1] if found else 0
            rank = stage * self._tensor * self._expert
            wrong = None
            for stop in range(first, self._layers + 1) if stage < self._stages - 1 else [self._layers]:
                try:
                    self._layout(rank, first, stop)
                except ValueError as error:
                    wrong = error
                else:
                    found.append((first, stop))
                    break
            else:
                raise CheckpointError(
                    f"{self._folder.path}: expected the model's parameters in the optimizer's buffers on "
                    f"model-parallel rank {rank} ({wrong}); {conventions.SAVED_WHOLE}"
                )
        return found

    def _layout(self, rank: int, first: int, stop: int) -> dict[str, tuple[SavedBucket, ...]]:
        """The content of a rank's buckets, by dtype, if it has layers [first, stop). Raises ValueError if not."""
        stage, of_expert = rank // (self._tensor * self._expert), rank // self._tensor % self._expert
        is_last = stage == self._stages - 1
        places = [*[FIRST] * (stage == 0), *range(first, stop), *[LAST] * is_last]
        names = [name for place in places for name in self._names.get((place, of_expert), ())]
        shapes: dict[str, dict[str, tuple[int, ...]]] = {dtype: {} for dtype in self._ranks[rank]}
        for name in (*names, *self._tied[1:]) if is_last else names:  # the last stage has a copy of a tied embedding
            weight = self._weights[name]
            dtype = str(weight.dtype).removeprefix("torch.")
            if dtype not in shapes:
                raise ValueError(f"expected a buffer of {dtype} for {name}, found those of {', '.join(shapes)}")
            shapes[dtype][name] = local_shape(weight.shape, self._cuts[name], self._tensor)
        found = {}
        for dtype, of_dtype in shapes.items():
            buffer, tensors = self._ranks[rank][dtype], self._folder.tensors
            saved = {state: [tensors[key].shape for key in keys] for state, keys in buffer.items()}
            if any(len(shape) != 1 for of_state in saved.values() for shape in of_state):
                raise ValueError(f"expected flat buckets of states, found shapes {saved}")
            if any(of_state != saved[MASTER] for of_state in saved.values()):
                raise ValueError(f"expected states' buckets of one length, found {saved}")
            found[dtype] = buckets_of(of_dtype, [numel for (numel,) in saved[MASTER]])
        return found
