"""Megatron's ``torch`` format, with flat buffers or the layer-wise optimizer, merged from all ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param, reader
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.megatron import conventions
from lwopt_backend.checkpoint.megatron import ranks as of_ranks
from lwopt_backend.checkpoint.megatron.buffers import bucket_numel, buckets, own_buckets, part
from lwopt_backend.checkpoint.megatron.conventions import EMBEDDING, FLAT, HEAD, Coordinates
from lwopt_backend.checkpoint.megatron.ranks import Inner, Kept, Rank, Ranks, TPSplit

# The assignment of parameters to ranks in Megatron's LayerWiseDistributedOptimizer, replayed. The parameters of all
# param groups, one group after another and each in module order, are sorted by size (equal sizes keep their order) and
# dealt to the ranks back and forth: 0, 1, ..., n-1, n-1, ..., 1, 0, 0, 1, ... Experts that are sharded over
# expert-parallel ranks are dealt separately in the same way, to the ranks that hold the same experts. Source:
# ``shard_params`` in megatron/core/optimizer/layer_wise_optimizer.py of 0.16, the ping-pong path in later ones.


def dealt(
    groups: Sequence[Sequence[str]],
    numels: Mapping[str, int],
    *,
    ranks: int,
    expert_groups: Set[int] = frozenset(),
    expert_ranks: int = 1,
) -> list[list[list[str]]]:
    """``[group][rank]``: the names that the rank has of the group, in its optimizer's order. For a group in
    ``expert_groups``, the rank is one of ``expert_ranks``. With one rank, the groups' order is kept."""
    if ranks == 1:
        return [[list(names)] for names in groups]
    sizes = {False: ranks, True: expert_ranks}
    turns = {expert: itertools.cycle([*range(size), *reversed(range(size))]) for expert, size in sizes.items()}
    found: list[list[list[str]]] = [[[] for _ in range(sizes[g in expert_groups])] for g in range(len(groups))]
    entries = [(name, group) for group, names in enumerate(groups) for name in names]
    for name, group in sorted(entries, key=lambda entry: numels[entry[0]]):
        found[group][next(turns[group in expert_groups])].append(name)
    return found


_FILE = re.compile(r"layer_wise_optimizer_(\d+)\.pt")


def is_layer_wise(ranks: Ranks) -> bool:
    """Whether the checkpoint has files of a LayerWiseDistributedOptimizer, or must have by its ``args``."""
    arguments = ranks.arguments
    says = str(arguments.get("optimizer", "")).startswith("dist_")
    says = says or bool(arguments.get("use_layer_wise_distributed_optimizer"))
    return says or any(_files(rank) for rank in ranks.ranks)


def from_layer_wise(ranks: Ranks) -> list[tuple[Rank, list[Inner], Kept]]:
    """The state in every file, by parameter, with the rank of its folder and the file's optimizers.

    Data-parallel rank r is in the folder of expert-parallel rank r % ep, at place r // ep among those with the same
    experts. Raises CheckpointError for missing or extra files, for context parallelism, and for names that cannot be
    inferred (``ranks.named``).
    """
    data, experts = ranks.world["dp"], ranks.world["ep"]
    if ranks.world["cp"] > 1:
        raise CheckpointError(
            f"expected context parallel size 1, found {ranks.world['cp']}, with which ranks overwrite one another's "
            "layer_wise_optimizer_*.pt and lose optimizer state; save in the torch_dist format"
        )
    if data % experts:
        raise CheckpointError(f"expected {experts} expert parallel ranks to divide data parallel size {data}")
    found = []
    for rank in ranks.ranks:
        files = _files(rank)
        expected = {number for number in range(data) if number % experts == rank.coordinates[2]}
        if set(files) != expected:
            raise CheckpointError(
                f"{rank.file.parent}: expected layer_wise_optimizer_*.pt of data parallel ranks {sorted(expected)}, "
                f"found those of {sorted(files)}; copy the files of all ranks of one checkpoint"
            )
        weights = rank.weights
        for number, path in sorted(files.items()):
            inners = of_ranks.inner_optimizers(torch_files.load(path), str(path))
            groups = [group for inner in inners for group in inner.groups]
            sharded = {index for index, group in enumerate(groups) if group.get("is_expert_parallel", False)}
            shares = dealt(
                conventions.names_by_group(weights, groups, ranks.arguments, inners[0].where),
                {name: weight.numel for name, weight in weights.items()},
                ranks=data,
                expert_groups=sharded,
                expert_ranks=data // experts,
            )
            names = [share[number // experts if group in sharded else number] for group, share in enumerate(shares)]
            found.append((rank, inners, of_ranks.named(inners, names, weights)))
    return found


def _files(rank: Rank) -> Mapping[int, Path]:
    matches = {path: _FILE.fullmatch(path.name) for path in rank.file.parent.iterdir()}
    return {int(match[1]): path for path, match in matches.items() if match}


FLAT_FILE = "distrib_optim.pt"  # the flat buffers of Megatron's DistributedOptimizer


def from_buffers(
    rank: Rank, arguments: Mapping[str, Any], numbers: Mapping[str, int | None], groups: Sequence[Mapping[str, Any]]
) -> Kept:
    """The state in the rank's file, by parameter; ``numbers`` has the group of each.

    Bucket sizes are not in the file: they are computed from ``arguments`` and compared with the buffers' lengths.
    Raises CheckpointError if these differ, for unknown states, and for a file of another format.
    """
    path = rank.file.with_name(FLAT_FILE)
    total = sum(weight.numel for weight in rank.weights.values())
    found: dict[str, Param] = {}
    for key, buffer, shapes, chunk in _buffers(torch_files.load(path), rank, arguments, str(path)):
        where = f"{key} in {path}"
        flats = {state: flat for state, flat in buffer.items() if state != "numel_unpadded"}
        if set(flats) != set(wanted := conventions.flat_states(flats, arguments)):
            raise CheckpointError(f"{where}: expected the states {sorted(wanted)}, found {sorted(map(str, flats))}")
        closed_at = bucket_numel(arguments, parameters=total, pipeline_rank=rank.coordinates[1], chunk=chunk)
        layout = buckets(shapes, closed_at=closed_at, alone=own_buckets(arguments))
        numels = [bucket.numel for bucket in layout]
        lengths = {state: math.prod(flat.shape) for state, flat in flats.items()}
        lengths["numel_unpadded"] = buffer["numel_unpadded"]
        if set(lengths.values()) != {sum(numels)}:
            raise CheckpointError(
                f"{where}: expected {sum(numels)} elements in buckets of {numels}, by args.overlap_grad_reduce, "
                f"ddp_num_buckets, ddp_bucket_size, found {lengths}; parameters cannot be located; save as torch_dist"
            )
        first = 0  # the buckets follow one another without padding
        for bucket in layout:
            for param in bucket.params:
                number, states = numbers[param.name], {FLAT[s]: part(flat, param, first) for s, flat in flats.items()}
                found[param.name] = Param(None, states, conventions.step_of(groups, number), number)
            first += bucket.numel
    return found


def _buffers(
    saved: Any, rank: Rank, arguments: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Mapping[str, Any], dict[str, tuple[int, ...]], int]]:
    """Yield each buffer in the file: its key, its content, its parameters' shapes in module order, its virtual stage.

    If experts are sharded, a file has a list of two: the dense parameters' buffers, None if another rank has them, and
    those of the rank's experts.
    """
    expected = 1 + (bool(arguments.get("num_experts")) and int(arguments.get("expert_model_parallel_size") or 1) > 1)
    entries = saved if isinstance(saved, list) else [saved]
    if len(entries) != expected or arguments.get("overlap_param_gather_with_optimizer_step"):
        raise CheckpointError(
            f"{where}: expected the buffers of {expected} optimizers, found {len(entries)}; a split for "
            "--overlap-param-gather-with-optimizer-step is not read: save as torch_dist"
        )
    for entry, sharded in zip(entries, (False, True)):
        if entry is None:
            continue
        if not isinstance(entry, dict) or not entry.get("buckets_coalesced"):
            raise CheckpointError(
                f"{where}: expected buffers with 'buckets_coalesced', found none, as before 2024; load and save them "
                "with a newer Megatron"
            )
        wanted: list[tuple[int, torch.dtype, dict[str, tuple[int, ...]]]] = []  # one of each virtual stage and dtype
        for chunk, weights in enumerate(rank.chunks):
            by_dtype: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
            for name, weight in weights.items():
                if conventions.is_sharded_expert(name, arguments) == sharded:
                    by_dtype.setdefault(weight.dtype, {})[name] = weight.shape
            wanted += [(chunk, dtype, shapes) for dtype, shapes in by_dtype.items()]
        indices = [key for key in entry if key != "buckets_coalesced"]
        if indices != list(range(len(wanted))):
            raise CheckpointError(f"{where}: expected buffers {list(range(len(wanted)))}, found {indices}")
        for index, (chunk, dtype, shapes) in enumerate(wanted):
            keys = list(entry[index])
            if len(keys) != 1 or keys[0][0] != dtype:
                raise CheckpointError(f"{where}: expected buffer {index} of {dtype}, found {keys}; copy it again")
            yield f"buffer {index}", entry[index][keys[0]], shapes, chunk


# Whole parameters from the parts that Megatron's tensor, pipeline and expert parallel ranks store.

Pair = tuple[str, LazyTensor, LazyTensor]
_PLACES = ("embedding.", "decoder.layers.", "decoder.", "")


def merged(ranks: Ranks, kept: Mapping[Coordinates, Kept]) -> tuple[dict[str, Param], tuple[Pair, ...], dict[str, str]]:
    """Whole parameters in the model's order; pairs of copies that must be equal; the tied embedding's other name.
    ``kept`` is the optimizers' state, by rank. Raises CheckpointError for parameters or states that a rank lacks."""
    held: dict[str, dict[Coordinates, LazyTensor]] = {}
    for rank in ranks.ranks:
        for name, weight in rank.weights.items():
            held.setdefault(name, {})[rank.coordinates] = weight
    pairs: list[Pair] = []

    def place(name: str) -> tuple[int, int]:
        return next(i for i, start in enumerate(_PLACES) if name.startswith(start)), conventions.layer_of(name) or 0

    params = {name: _param(name, held[name], kept, ranks, pairs) for name in sorted(held, key=place)}
    if conventions.is_tied(ranks.arguments) and {EMBEDDING, HEAD} <= params.keys():  # the last stage's is a copy
        first, last = params[EMBEDDING].tensors, params.pop(HEAD).tensors
        what = f"{EMBEDDING} and {HEAD}, which are tied"
        pairs += [(f"{key} of {what}", first[key], last[key]) for key in first if key in last]
    return params, tuple(pairs), conventions.tied(params, ranks.arguments)


def _param(
    name: str,
    weights: Mapping[Coordinates, LazyTensor],
    kept: Mapping[Coordinates, Kept],
    ranks: Ranks,
    pairs: list[Pair],
) -> Param:
    size = ranks.world["tp"]
    cut = of_ranks.tp_split_of(name, gated=of_ranks.is_gated(ranks.arguments)) if size > 1 else TPSplit("whole")
    if len({place[1] for place in weights}) > 1:
        raise CheckpointError(
            f"{name}: expected on one pipeline rank, found on {sorted({place[1] for place in weights})}; copy all "
            "ranks' files of one checkpoint"
        )
    mine = {place: kept[place][name] for place in weights if name in kept[place]}
    keys = {key: None for found in mine.values() for key in found.states}
    states = {key: {place: found.states[key] for place, found in mine.items() if key in found.states} for key in keys}
    steps, groups = {found.step for found in mine.values()}, {found.group for found in mine.values()}
    if len(steps) > 1 or len(groups) > 1:
        raise CheckpointError(
            f"{name}: expected one step and param group, found steps {sorted(map(str, steps))} and groups "
            f"{sorted(map(str, groups))} on ranks {sorted(mine)}; copy all ranks' files of one checkpoint"
        )
    return Param(
        weight=_whole(f"weight of {name}", weights, size, cut, pairs),
        states={key: _whole(f"{key} of {name}", parts, size, cut, pairs) for key, parts in states.items()},
        step=next(iter(steps), None),
        group=next(iter(groups), None),
    )


def _whole(
    what: str, parts: Mapping[Coordinates, LazyTensor], size: int, cut: TPSplit, pairs: list[Pair]
) -> LazyTensor:
    """One tensor from the ranks' parts; adds equal copies of a part to ``pairs``."""
    by_rank: list[list[tuple[Coordinates, LazyTensor]]] = [
        [(place, part) for place, part in sorted(parts.items()) if place[0] == rank] for rank in range(size)
    ]
    missing = [rank for rank, copies in enumerate(by_rank) if not copies]
    if missing:
        raise CheckpointError(
            f"{what}: expected a part on each of {size} tensor parallel ranks, found none on {missing}; copy all "
            "ranks' files of one checkpoint"
        )
    same = [[entry for copies in by_rank for entry in copies]] if cut.kind == "whole" else by_rank
    for copies in same:
        first = copies[0]
        pairs += [(f"{what} on ranks {first[0]} and {place}", first[1], part) for place, part in copies[1:]]
    return of_ranks.merge([copies[0][1] for copies in by_rank], cut)


_READ = {"args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler", "lr_scheduler"}
_NOT_OURS = {"rng_state", "rerun_state_machine", "num_floating_point_operations_so_far", "content_metadata"}


def recognises(path: Path) -> bool:
    return bool(conventions.rank_folders(conventions.step_folder(path)))


@reader("Megatron", conventions.step_folder)
def read(step: Path) -> Checkpoint:
    """The whole checkpoint in a folder, of one step or with the pointer to it.

    Weights and states are whole (tensor, pipeline, expert and data parallel ranks merged), with the names of
    Megatron-core's local spec and global layer and expert numbers. Raises CheckpointError for a checkpoint that is
    damaged, incomplete, or of an unsupported kind.
    """
    ranks = of_ranks.read_ranks(step)
    kept, groups, inners, notes = _optimizers(ranks)
    params, replicas, tied = merged(ranks, kept)
    if any(inner.others for inner in inners):
        notes.append("the loss scaler's state (grad_scaler) was left out")
    if any(inner.masters is None and inner.state for inner in inners):
        notes.append("the optimizer has no master weights, so states' names could not be checked by value")
    keys = {str(key) for rank in ranks.ranks for key in rank.saved if not str(key).removeprefix("model").isdigit()}
    notes += [f"{key!r} in model_optim_rng.pt was left out" for key in sorted(keys - _READ - _NOT_OURS)]
    first = ranks.ranks[0].saved
    return Checkpoint(
        format="megatron torch",
        version=str(first.get("checkpoint_version", "")),
        names="megatron-core",
        params=params,
        groups=groups,
        arguments=ranks.arguments,
        iteration=first["iteration"] if isinstance(first.get("iteration"), int) else None,
        samples=ranks.arguments.get("consumed_train_samples"),
        scheduler=plain(first.get("opt_param_scheduler", first.get("lr_scheduler"))),
        world=ranks.world,
        replicas=replicas,
        tied=tied,
        buffers={name: buffer for rank in ranks.ranks for name, buffer in rank.buffers.items()},
        notes=(*notes, *conventions.training_notes(ranks.arguments, params)),
    )


def _optimizers(ranks: Ranks) -> tuple[dict[Coordinates, Kept], tuple[dict[str, Any], ...], list[Inner], list[str]]:
    """The optimizers' state on each rank, the param groups, the optimizers, and notes."""
    found: dict[Coordinates, Kept] = {rank.coordinates: {} for rank in ranks.ranks}
    where = str(ranks.ranks[0].file.parent.parent)
    if not any("optimizer" in rank.saved for rank in ranks.ranks):
        return found, (), [], [f"{where} has no optimizer state (--no-save-optim)"]
    has_flat = any(rank.file.with_name(FLAT_FILE).exists() for rank in ranks.ranks)
    flat = has_flat or bool(ranks.arguments.get("use_distributed_optimizer"))
    groups: list[list[Mapping[str, Any]]] = []
    inners: list[Inner] = []
    if is_layer_wise(ranks):
        if has_flat:
            raise CheckpointError(
                f"{where}: expected a LayerWise optimizer alone, found a distributed optimizer as well, and Megatron "
                "writes neither whole; save with torch_dist, or with --no-use-layer-wise-param-layout"
            )
        for rank, of_file, kept in from_layer_wise(ranks):
            found[rank.coordinates] = {**found[rank.coordinates], **kept}
            groups.append([group for inner in of_file for group in inner.groups])
            inners += of_file
    else:
        for rank in ranks.ranks:
            of_file = of_ranks.inner_optimizers(rank.saved.get("optimizer"), str(rank.file))
            groups.append([group for inner in of_file for group in inner.groups])
            inners += of_file
            weights = rank.weights
            if flat:
                shapes = {name: weight.shape for name, weight in weights.items()}
                numbers = conventions.groups_of(shapes, groups[-1], ranks.arguments)
                found[rank.coordinates] = from_buffers(rank, ranks.arguments, numbers, groups[-1])
            else:
                names = conventions.names_by_group(weights, groups[-1], ranks.arguments, str(rank.file))
                found[rank.coordinates] = of_ranks.named(of_file, names, weights)
    return found, conventions.common_groups(groups, where), inners, []
