"""Reads Megatron's ``torch`` checkpoints: ``mp_rank_*/model_optim_rng.pt`` and the optimizers' files beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, read_as_expected
from lwopt_backend.checkpoint.files.plain_data import plain
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.flat import FLAT_FILE, from_buffers
from lwopt_backend.checkpoint.megatron.folders import Coordinates, rank_folders, step_folder
from lwopt_backend.checkpoint.megatron.groups import common_groups, groups_of, names_by_group
from lwopt_backend.checkpoint.megatron.layerwise import from_layer_wise, is_layer_wise
from lwopt_backend.checkpoint.megatron.merge import merged
from lwopt_backend.checkpoint.megatron.optimizers import Inner, Kept, inner_optimizers, named
from lwopt_backend.checkpoint.megatron.ranks import Rank, Ranks, read_ranks

_READ = {"args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler", "lr_scheduler"}
_NOT_OURS = {"rng_state", "rerun_state_machine", "num_floating_point_operations_so_far", "content_metadata"}


def recognises(path: Path) -> bool:
    """Whether a folder, or the step in it that its pointer names, has folders of ranks."""
    try:
        return bool(rank_folders(step_folder(path)))
    except (OSError, CheckpointError):
        return False


def read(path: Path) -> Checkpoint:
    """The whole checkpoint in a folder: of one step, or with the pointer to it.

    Weights and states are whole (tensor, pipeline, expert and data parallel ranks put together) and named as
    Megatron-core's local spec does, layers and experts numbered through. Raises CheckpointError for a checkpoint that
    is damaged, not complete, or of a kind that is not read.
    """
    step = step_folder(path)
    return read_as_expected(lambda: _read(step), step, "Megatron")


def _read(step: Path) -> Checkpoint:
    ranks = read_ranks(step)
    kept, groups, notes = _optimizers(ranks)
    _check_the_rest(ranks)
    params, replicas, tied = merged(ranks, kept)
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
        notes=(*notes, *_left_out(ranks.ranks)),
    )


def read_weights(path: Path) -> Mapping[str, Param]:
    """The parameters without the optimizer's state, for which no tensor is read. Raises CheckpointError."""
    step = step_folder(path)
    return read_as_expected(lambda: _read_weights(step), step, "Megatron")


def _read_weights(step: Path) -> Mapping[str, Param]:
    ranks = read_ranks(step)
    return merged(ranks, {rank.coordinates: {} for rank in ranks.ranks})[0]


_ByRank = dict[Coordinates, dict[str, Kept]]


def _optimizers(ranks: Ranks) -> tuple[_ByRank, tuple[dict[str, Any], ...], list[str]]:
    """What the optimizers keep on each rank, the param groups, and notes."""
    found: _ByRank = {rank.coordinates: {} for rank in ranks.ranks}
    where = str(ranks.ranks[0].file.parent.parent)
    if not any("optimizer" in rank.saved for rank in ranks.ranks):
        return found, (), [f"{where} has no optimizer state (--no-save-optim)"]
    has_flat = any(rank.file.with_name(FLAT_FILE).exists() for rank in ranks.ranks)
    flat = has_flat or bool(ranks.arguments.get("use_distributed_optimizer"))
    groups: list[list[Mapping[str, Any]]] = []
    inners: list[Inner] = []
    if is_layer_wise(ranks):
        if has_flat:
            raise CheckpointError(
                f"{where}: a LayerWise optimizer beside a distributed one is not read from torch checkpoints, which no "
                "Megatron writes whole; save with torch_dist, or with --no-use-layer-wise-param-layout"
            )
        for rank, of_file, kept in from_layer_wise(ranks):
            found[rank.coordinates].update(kept)
            groups.append([group for inner in of_file for group in inner.groups])
            inners += of_file
    else:
        for rank in ranks.ranks:
            of_rank = inner_optimizers(rank.saved.get("optimizer"), str(rank.file))
            groups.append([group for inner in of_rank for group in inner.groups])
            inners += of_rank
            found[rank.coordinates] = (_flat if flat else _plain)(rank, of_rank, groups[-1], ranks.arguments)
    return found, common_groups(groups, where), _notes(inners)


def _flat(
    rank: Rank, _: list[Inner], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, Kept]:
    shapes = {name: weight.shape for name, weight in rank.weights.items()}
    return from_buffers(rank, arguments, groups_of(shapes, groups, arguments), groups)


def _plain(
    rank: Rank, inners: list[Inner], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, Kept]:
    return named(inners, names_by_group(rank.weights, groups, arguments, str(rank.file)), rank.weights)


def _check_the_rest(ranks: Ranks) -> None:
    """Read the tensors that have no use, so that damage to them is noticed, too: random states, and of LayerWise's
    optimizers the share that the model's file repeats."""
    used = {"model"} if is_layer_wise(ranks) else {"model", "optimizer"}
    for rank in ranks.ranks:
        for key, value in rank.saved.items():
            if str(key).rstrip("0123456789") not in used:
                for tensor in _tensors_in(value):
                    tensor.read()


def _tensors_in(value: Any) -> Iterator[LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(entry)


def _notes(inners: Sequence[Inner]) -> list[str]:
    notes = []
    if any(inner.others for inner in inners):
        notes.append("the loss scaler's state (grad_scaler) was left out")
    if any(inner.masters is None and inner.state for inner in inners):
        notes.append(
            "the optimizer has no master weights of its own, so its states' names could not be checked by value"
        )
    return notes


def _left_out(ranks: Sequence[Rank]) -> list[str]:
    """Notes on what is in the files and not in the result."""
    keys = {str(key) for rank in ranks for key in rank.saved if not str(key).removeprefix("model").isdigit()}
    return [f"{key!r} in model_optim_rng.pt was left out" for key in sorted(keys - _READ - _NOT_OURS)]
