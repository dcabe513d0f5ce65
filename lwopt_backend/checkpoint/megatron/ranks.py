"""Megatron's ranks: the cuts of parameters over tensor-parallel ranks, and the content of each rank's files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import MASTER, CheckpointError, LazyTensor, Param, uncut
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.pickles import plain, scalar
from lwopt_backend.checkpoint.megatron import conventions
from lwopt_backend.checkpoint.megatron.conventions import STATES, Coordinates, world

# Megatron-core's cuts of parameters over tensor-parallel ranks, and merging the parts.

# The prefix of a role; experts and shared experts are cut like a dense MLP.
_PREFIX = re.compile(
    r"^(?:decoder\.layers\.\d+\.)?(?:mlp\.(?:experts\.local_experts\.\d+|shared_experts)\.(?=linear_fc))?"
)
_ROLES: tuple[tuple[str, str], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)", "columns"),
    (r"self_attention\.linear_qkv\.(weight|bias)", "columns"),  # whole query groups: [q, k, v] of each in turn
    (r"(self_attention\.linear_proj|(mlp\.)?linear_fc2)\.weight", "rows"),
    (r"(self_attention\.linear_proj|(mlp\.)?linear_fc2)\.bias", "replicated"),
    (r"(mlp\.)?linear_fc1\.(weight|bias)", "fc1"),
    (r"embedding\.(position|tokentype)_embeddings\.weight", "replicated"),
    (r"([\w.]*\.)?\w*(layer)?norm\.(weight|bias)", "replicated"),
    (r"mlp\.router\.(weight|bias|expert_bias)|mlp\.shared_experts\.gate_weight", "replicated"),
)


@dataclass(frozen=True)
class TPSplit:
    """How tensor-parallel ranks store a parameter: ``whole`` on each, ``split`` along ``dim``, or ``gated``: rank r has
    [gate_r; up_r] of the whole [gate; up], along dimension 0."""

    kind: Literal["whole", "split", "gated"]
    dim: int = 0


def tp_split_of(name: str, *, gated: bool) -> TPSplit:
    """The cut of a parameter, by its local-spec name; with ``gated``, fc1 has gate and up (SwiGLU).

    The rules are those of Megatron's parameters (``partition_dim``, ``partition_stride``). Raises CheckpointError for a
    parameter that is not of a GPT model.
    """
    role = _PREFIX.sub("", name, count=1)
    kind = next((kind for pattern, kind in _ROLES if re.fullmatch(pattern, role)), None)
    if kind is None:
        raise CheckpointError(
            f"{name}: expected a parameter with a known cut over tensor-parallel ranks; save with tensor parallel size "
            "1, or in the torch_dist format"
        )
    if kind == "fc1":
        return TPSplit("gated" if gated else "split", 0)
    return TPSplit("whole") if kind == "replicated" else TPSplit("split", 0 if kind == "columns" else 1)


def is_gated(arguments: Mapping[str, Any]) -> bool:
    """Whether fc1 has gate and up by Megatron's ``args``."""
    return bool(arguments.get("swiglu") or arguments.get("quick_geglu"))


def merge(parts: Sequence[LazyTensor], cut: TPSplit) -> LazyTensor:
    """The whole tensor from all ranks' parts, in rank order; rank 0's copy of a ``whole`` one. Raises CheckpointError
    if the parts have different shapes or dtypes."""
    first = parts[0]
    for part in parts[1:]:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise CheckpointError(
                f"{part.where}: expected shape {first.shape} in {first.dtype}, as in {first.where}, "
                f"found {part.shape} in {part.dtype}; copy all ranks' files of one checkpoint"
            )
    if len(parts) == 1 or cut.kind == "whole":
        return first
    if cut.kind == "gated" and first.shape[0] % 2:
        raise CheckpointError(f"{first.where}: expected gate and up of one size, found {first.shape}; copy it")
    return uncut(parts, cut.dim, [first.shape[0] // 2] * 2 if cut.kind == "gated" else ())


def local_shape(shape: Sequence[int], cut: TPSplit, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor of ``shape``. Raises ValueError if it does not divide."""
    if cut.kind == "whole" or ranks == 1:
        return tuple(shape)
    halves = 2 if cut.kind == "gated" else 1
    if shape[cut.dim] % (halves * ranks):
        raise ValueError(f"expected a shape with {ranks} equal parts along dimension {cut.dim}, found {tuple(shape)}")
    return tuple(size // ranks if dim == cut.dim else size for dim, size in enumerate(shape))


Kept = Mapping[str, Param]  # one rank's optimizer state of its parts of parameters, without weights


@dataclass(frozen=True)
class Inner:
    """One torch optimizer in a rank's state_dict: ``masters`` by group, None if there are none."""

    where: str
    state: Mapping[Any, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Sequence[LazyTensor]] | None
    others: Mapping[str, Any] = field(default_factory=dict)


def inner_optimizers(saved: Any, where: str) -> list[Inner]:
    """The torch optimizers in an optimizer's state_dict, a list or a single one. Raises CheckpointError for unknown
    keys."""
    found = []
    for number, entry in enumerate(saved if isinstance(saved, list) else [saved]):
        said = f"optimizer {number} in {where}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{said}: expected an optimizer's state_dict, found {type(entry).__name__}")
        wrapped: dict[str, Any] = entry if "optimizer" in entry else {"optimizer": entry}  # FP32Optimizer wraps none
        inner, masters = wrapped["optimizer"], wrapped.get("fp32_from_fp16_params")
        others = {key: value for key, value in wrapped.items() if key not in ("optimizer", "fp32_from_fp16_params")}
        unknown = sorted({*map(str, others)} - {"grad_scaler"} | {*map(str, inner)} - {"state", "param_groups"})
        if unknown or "param_groups" not in inner:
            expected = "param_groups, state and fp32_from_fp16_params"
            raise CheckpointError(f"{said}: expected {expected} only, found {unknown} as well; save as torch_dist")
        found.append(Inner(said, inner.get("state", {}), inner["param_groups"], masters, others))
    return found


def named(inners: Sequence[Inner], names: Sequence[Sequence[str]], weights: Mapping[str, LazyTensor]) -> Kept:
    """The optimizers' state by parameter. ``names`` are each group's, over all optimizers, in its order.

    A master weight is compared with the weight when it is read (see ``_rounding``). Raises CheckpointError for other
    counts or shapes, and for unknown states.
    """
    found: dict[str, Param] = {}
    groups = [(inner, local, group) for inner in inners for local, group in enumerate(inner.groups)]
    for number, (inner, local, group) in enumerate(groups):
        of_group, identifiers = names[number], group.get("params", [])
        half = [name for name in of_group if weights[name].dtype in (torch.bfloat16, torch.float16)]
        masters = inner.masters[local] if inner.masters is not None and local < len(inner.masters) else []
        if len(identifiers) != len(of_group) or len(masters) != len(half):
            raise CheckpointError(
                f"param group {local} of {inner.where}: expected {len(of_group)} parameters, {len(half)} with master "
                f"weights, by the rules of Megatron's assignment ({', '.join(of_group[:3])}, ...), found "
                f"{len(identifiers)} and {len(masters)}, so names cannot be assigned; save this checkpoint in the "
                "torch_dist format"
            )
        master_of = dict(zip(half, masters))
        for name, identifier in zip(of_group, identifiers):
            state = inner.state.get(identifier, {})
            states = {key: value for key, value in state.items() if key != "step"}
            conventions.check_states({name: states}, weights, inner.where, STATES)  # master weights are elsewhere
            if name in master_of:
                states = {MASTER: _rounding(master_of[name], weights[name], name), **states}
            step = scalar(state.get("step", group.get("step")))
            found[name] = Param(None, states, None if step is None else float(step), number)
    return found


def _rounding(master: LazyTensor, weight: LazyTensor, name: str) -> LazyTensor:
    """A master weight, compared bit for bit with the weight when it is read: a wrong name is then an error and cannot
    mix up state. Raises CheckpointError at once for another shape."""

    def wrong() -> CheckpointError:
        return CheckpointError(
            f"{name}: expected a master weight of shape {weight.shape} that rounds to {weight.where}, found "
            f"{master.where} of shape {master.shape} that does not; the files are of different steps, or the "
            "assignment of parameters to ranks is not that of this Megatron: save it in the torch_dist format"
        )

    def compared(found: Tensor, start: int = 0) -> Tensor:
        saved = weight.piece(start, start + found.numel()).blocks()
        for block, rounded in zip(found.view(-1).split(contents.BLOCK), saved):
            if not contents.same(block.to(weight.dtype), rounded):
                raise wrong()
        return found

    if master.shape != weight.shape:
        raise wrong()
    ranged = master.read_range
    part = None if ranged is None else lambda start, stop: compared(ranged(start, stop), start)
    return replace(master, read=lambda: compared(master.read()), read_range=part)


MODEL_FILE = "model_optim_rng.pt"
Weights = dict[str, LazyTensor]


@dataclass(frozen=True)
class Rank:
    """The content of one rank's file: its model by global names in module order, one dictionary per virtual stage."""

    coordinates: Coordinates
    file: Path
    saved: Mapping[str, Any]
    chunks: tuple[Weights, ...]
    buffers: Weights

    @property
    def weights(self) -> Weights:
        """The weights of all virtual stages."""
        return {name: weight for chunk in self.chunks for name, weight in chunk.items()}


@dataclass(frozen=True)
class Ranks:
    """All ranks, by tensor, pipeline and expert parallel rank; ``arguments`` are Megatron's ``args``."""

    arguments: Mapping[str, Any]
    world: Mapping[str, int]
    ranks: tuple[Rank, ...]


def read_ranks(step: Path) -> Ranks:
    """Read all ranks' files in a step's folder. Raises CheckpointError for ranks that are missing, extra, or of another
    iteration or model, and if the format has too little information."""
    folders = conventions.rank_folders(step)
    if not folders:
        raise CheckpointError(f"{step}: expected folders mp_rank_*, found none; name their parent folder")
    loaded = {}
    for numbers, folder in folders.items():
        found = loaded[numbers] = torch_files.load(folder / MODEL_FILE)
        if not isinstance(found, dict) or "args" not in found:
            raise CheckpointError(
                f"{folder / MODEL_FILE}: expected Megatron's args, found {type(found).__name__}; copy it again"
            )
    arguments = _arguments(next(iter(loaded.values())), step)
    sizes, expected = world(arguments), conventions.expected_folders(arguments)
    missing, extra = sorted(set(expected) - set(folders)), sorted(set(folders) - set(expected))
    if missing or extra:
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise CheckpointError(
            f"{step}: expected {len(expected)} folders of ranks ({said}), found {len(folders)}, missing "
            f"{_some(missing)}, unexpected {_some(extra)}; copy one whole checkpoint"
        )
    saved = {expected[numbers]: found for numbers, found in loaded.items()}
    files = {expected[numbers]: folder / MODEL_FILE for numbers, folder in folders.items()}
    _check_one_checkpoint(saved, files, step)
    models = {place: _models(found, files[place]) for place, found in saved.items()}
    firsts = _first_layers(models, files, arguments)
    ranks = []
    for place in sorted(saved):
        first_expert = place[2] * (int(arguments.get("num_experts") or 0) // sizes["ep"])
        chunks, buffers = [], {}
        for chunk, weights in enumerate(models[place]):
            first = firsts[place[1], chunk]
            named = {conventions.global_name(name, first, first_expert): weight for name, weight in weights.items()}
            buffers.update({name: weight for name, weight in named.items() if conventions.is_buffer(name)})
            chunks.append({name: weight for name, weight in named.items() if not conventions.is_buffer(name)})
        ranks.append(Rank(place, files[place], saved[place], tuple(chunks), buffers))
    return Ranks(arguments, sizes, tuple(ranks))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8) or "none"


def _arguments(saved: Mapping[str, Any], step: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = plain(saved["args"])
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "num_layers"):
        if not isinstance(found.get(name), int):
            raise CheckpointError(f"{step}: expected args.{name} as a number, found {found.get(name)!r}; copy it again")
    if found.get("num_experts"):
        inner, outer = found.get("expert_tensor_parallel_size"), found["tensor_model_parallel_size"]
        if inner is not None and inner != outer:
            raise CheckpointError(
                f"{step}: expected equal tensor and expert tensor parallel sizes, found {outer} and {inner}; "
                "a torch checkpoint then misses some experts, so save as torch_dist"
            )
    groups, tensor = found.get("num_query_groups"), found["tensor_model_parallel_size"]
    if found.get("group_query_attention") and isinstance(groups, int) and groups % tensor:
        raise CheckpointError(f"{step}: expected {tensor} to divide {groups} query groups; save as torch_dist")
    if found.get("mtp_num_layers"):
        raise CheckpointError(f"{step}: expected no mtp_num_layers (multi-token prediction); save as torch_dist")
    return found


def _check_one_checkpoint(
    saved: Mapping[Coordinates, Mapping[str, Any]], files: Mapping[Coordinates, Path], step: Path
) -> None:
    advice = "copy all ranks' files of one checkpoint"
    named, first = conventions.iteration_of(step), saved[min(saved)]
    expected = named if named is not None else first.get("iteration")
    sizes = world(plain(first["args"]))
    for place, found in saved.items():
        if found.get("iteration") != expected:
            raise CheckpointError(
                f"{files[place]}: expected iteration {expected}, found {found.get('iteration')}; {advice}"
            )
        if (others := world(plain(found["args"]))) != sizes:
            raise CheckpointError(
                f"{files[place]}: expected parallel sizes {sizes}, as in {files[min(files)]}, found {others}; {advice}"
            )


def _models(saved: Mapping[str, Any], file: Path) -> tuple[Weights, ...]:
    """The rank's model, one per virtual stage, with its own layer and expert numbers."""
    keys = ["model"] if "model" in saved else [f"model{i}" for i in range(len(saved)) if f"model{i}" in saved]
    if not keys:
        raise CheckpointError(f"{file}: expected a model, found only {sorted(map(str, saved))}; copy it again")
    chunks = []
    for key in keys:
        found = {}
        for name, value in saved[key].items():
            if name.endswith("_extra_state"):
                continue
            if not isinstance(value, LazyTensor):
                raise CheckpointError(
                    f"{file}: expected {key}.{name} as a tensor, found {type(value).__name__}; models of before "
                    "Megatron-core (--use-legacy-models), and weights in fp8, are not read"
                )
            spelled = conventions.respelled(name)
            if ".mlp.experts." in spelled and not conventions.EXPERT.search(spelled):
                raise CheckpointError(f"{spelled}: expected separate experts, found one tensor; save as torch_dist")
            found[spelled] = value
        chunks.append(found)
    return tuple(chunks)


def _first_layers(
    models: Mapping[Coordinates, tuple[Weights, ...]], files: Mapping[Coordinates, Path], arguments: Mapping[str, Any]
) -> dict[tuple[int, int], int]:
    """The number of the first layer of each (pipeline rank, virtual stage).

    Layers are numbered through all ranks' first stages, then through their second ones. Counting the existing layers is
    right for uneven splits (``get_transformer_layer_offset`` in transformer_layer.py).
    """
    counts: dict[tuple[int, int], int] = {}
    for place, chunks in models.items():
        for chunk, weights in enumerate(chunks):
            numbers = {layer for name in weights if (layer := conventions.layer_of(name)) is not None}
            count = len(numbers)
            if numbers != set(range(count)):
                raise CheckpointError(
                    f"{files[place]}: expected layers numbered from 0, found {sorted(numbers)}; copy the whole file"
                )
            if counts.setdefault((place[1], chunk), count) != count:
                raise CheckpointError(
                    f"{files[place]}: expected {counts[place[1], chunk]} layers, as in this pipeline rank's other "
                    f"files, found {count}; copy all of one checkpoint"
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
