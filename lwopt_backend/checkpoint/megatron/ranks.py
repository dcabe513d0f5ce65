"""The ``model_optim_rng.pt`` of all ranks of a Megatron checkpoint, checked to be of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.plain_data import plain
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron import names as naming
from lwopt_backend.checkpoint.megatron.folders import Coordinates, expected_folders, iteration_of, rank_folders, world

MODEL_FILE = "model_optim_rng.pt"
Weights = dict[str, LazyTensor]


@dataclass(frozen=True)
class Rank:
    """What one rank's file holds: its model by global names in module order, one dictionary per virtual stage."""

    coordinates: Coordinates
    file: Path
    saved: Mapping[str, Any]
    chunks: tuple[Weights, ...]
    buffers: Weights

    @property
    def weights(self) -> Weights:
        """Of all virtual stages."""
        return {name: weight for chunk in self.chunks for name, weight in chunk.items()}


@dataclass(frozen=True)
class Ranks:
    """All of them, by tensor, pipeline and expert parallel rank; ``arguments``: Megatron's ``args``."""

    arguments: Mapping[str, Any]
    world: Mapping[str, int]
    ranks: tuple[Rank, ...]


def read_ranks(step: Path) -> Ranks:
    """Everybody's file in a step's folder.

    Raises CheckpointError for ranks that are missing, too many, or of another iteration or model, and for what the
    format does not tell enough about.
    """
    folders = rank_folders(step)
    if not folders:
        raise CheckpointError(f"{step}: expected folders mp_rank_*, found none; name the folder that has them")
    loaded = {numbers: _load(folder) for numbers, folder in folders.items()}
    arguments = _arguments(next(iter(loaded.values())), step)
    expected = expected_folders(arguments)
    missing = sorted(set(expected) - set(folders))
    if missing or set(folders) - set(expected):
        sizes = ", ".join(f"{name} {size}" for name, size in world(arguments).items())
        raise CheckpointError(
            f"{step}: expected {len(expected)} folders of ranks ({sizes}), found {len(folders)}, "
            f"missing are those of {_some(missing)}, too many {_some(sorted(set(folders) - set(expected)))}; copy one "
            "checkpoint"
        )
    saved = {expected[numbers]: found for numbers, found in loaded.items()}
    files = {expected[numbers]: folder / MODEL_FILE for numbers, folder in folders.items()}
    _check_one_checkpoint(saved, files, step)
    models = {place: _models(found, files[place]) for place, found in saved.items()}
    firsts = _first_layers(models, files, arguments)
    ranks = tuple(_rank(place, files[place], saved[place], models[place], firsts, arguments) for place in sorted(saved))
    return Ranks(arguments, world(arguments), ranks)


def _some(numbers: Sequence[tuple[int, ...]]) -> str:
    return f"{list(numbers[:8])}" + f" and {len(numbers) - 8} more" * (len(numbers) > 8)


def _load(folder: Path) -> Mapping[str, Any]:
    found = torch_files.load(folder / MODEL_FILE)
    if not isinstance(found, dict) or "args" not in found:
        raise CheckpointError(
            f"{folder / MODEL_FILE}: expected Megatron's checkpoint with its args, found {type(found)}"
        )
    return found


def _arguments(saved: Mapping[str, Any], step: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = plain(saved["args"])
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "num_layers"):
        if not isinstance(found.get(name), int):
            raise CheckpointError(f"{step}: expected args.{name} to be a number, found {found.get(name)!r}")
    if found.get("num_experts"):
        inner, outer = found.get("expert_tensor_parallel_size"), found["tensor_model_parallel_size"]
        if inner is not None and inner != outer:
            raise CheckpointError(
                f"{step}: expert tensor parallel size {inner} beside tensor parallel size {outer} is not read from "
                "torch checkpoints, which miss some experts then; save as torch_dist"
            )
    groups, tensor = found.get("num_query_groups"), found["tensor_model_parallel_size"]
    if found.get("group_query_attention") and isinstance(groups, int) and groups % tensor:
        raise CheckpointError(f"{step}: {groups} query groups on {tensor} tensor parallel ranks are not read")
    if found.get("mtp_num_layers"):
        raise CheckpointError(f"{step}: multi-token prediction (mtp_num_layers) is not read from torch checkpoints")
    return found


def _check_one_checkpoint(
    saved: Mapping[Coordinates, Mapping[str, Any]], files: Mapping[Coordinates, Path], step: Path
) -> None:
    iterations = {place: found.get("iteration") for place, found in saved.items()}
    named = iteration_of(step)
    expected = named if named is not None else iterations[min(iterations)]
    for place, iteration in iterations.items():
        if iteration != expected:
            raise CheckpointError(
                f"{files[place]}: expected iteration {expected}, found {iteration}; the ranks' files are of different "
                "checkpoints: copy them again"
            )
        sizes = [world(plain(found["args"])) for found in (saved[place], saved[min(saved)])]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"{files[place]}: expected parallel sizes {sizes[1]}, as in {files[min(files)]}, found {sizes[0]}; the "
                "ranks' files are of different checkpoints: copy them again"
            )


def _models(saved: Mapping[str, Any], file: Path) -> tuple[Weights, ...]:
    """The rank's model, one per virtual stage, with its own layer and expert numbers."""
    keys = ["model"] if "model" in saved else [f"model{i}" for i in range(len(saved)) if f"model{i}" in saved]
    if not keys:
        raise CheckpointError(f"{file}: expected a model, found only {sorted(map(str, saved))}")
    chunks = []
    for key in keys:
        found = {}
        for name, value in saved[key].items():
            if name.endswith("_extra_state"):
                continue
            if not isinstance(value, LazyTensor):
                raise CheckpointError(
                    f"{file}: expected {key}.{name} to be a tensor, found {type(value).__name__}; models of before "
                    "Megatron-core (--use-legacy-models), and weights in fp8, are not read"
                )
            found[naming.local_spec(name)] = value
        chunks.append(found)
    return tuple(chunks)


def _first_layers(
    models: Mapping[Coordinates, tuple[Weights, ...]], files: Mapping[Coordinates, Path], arguments: Mapping[str, Any]
) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (pipeline rank, virtual stage).

    Layers go through all ranks' first stages, then through all their second ones, whatever the split: counting those
    that are there is right for uneven splits, too (``get_transformer_layer_offset`` in transformer_layer.py).
    """
    counts: dict[tuple[int, int], int] = {}
    for place, chunks in models.items():
        for chunk, weights in enumerate(chunks):
            count = naming.layers_in(weights, str(files[place]))
            if counts.setdefault((place[1], chunk), count) != count:
                raise CheckpointError(
                    f"{files[place]}: expected {counts[place[1], chunk]} layers, as this pipeline rank's other files "
                    f"have, found {count}; copy all of one checkpoint"
                )
    firsts, total = {}, 0
    for pipeline, chunk in sorted(counts, key=lambda key: (key[1], key[0])):
        firsts[pipeline, chunk] = total
        total += counts[pipeline, chunk]
    if total != arguments["num_layers"]:
        raise CheckpointError(
            f"{files[min(files)].parent.parent}: expected {arguments['num_layers']} layers (args.num_layers), found "
            f"{total}; copy all of one checkpoint"
        )
    return firsts


def _rank(
    place: Coordinates,
    file: Path,
    saved: Mapping[str, Any],
    models: tuple[Weights, ...],
    firsts: Mapping[tuple[int, int], int],
    arguments: Mapping[str, Any],
) -> Rank:
    experts = int(arguments.get("num_experts") or 0) // world(arguments)["ep"]
    chunks, buffers = [], {}
    for chunk, weights in enumerate(models):
        named = {
            naming.global_name(name, first_layer=firsts[place[1], chunk], first_expert=place[2] * experts): weight
            for name, weight in weights.items()
        }
        buffers.update({name: weight for name, weight in named.items() if naming.is_buffer(name)})
        chunks.append({name: weight for name, weight in named.items() if not naming.is_buffer(name)})
    return Rank(place, file, saved, tuple(chunks), buffers)
