"""How Megatron-core cuts each parameter over its tensor-parallel ranks, and how the parts become one tensor again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.lazy import LazyTensor, end_to_end, joined

# What stands before a role; experts and shared experts are cut as a dense MLP is.
_PREFIX = re.compile(
    r"^(?:decoder\.layers\.\d+\.)?(?:mlp\.(?:experts\.local_experts\.\d+|shared_experts)\.(?=linear_fc))?"
)
_ROLES: tuple[tuple[str, str], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)", "columns"),
    (
        r"self_attention\.linear_qkv\.(weight|bias)",
        "columns",
    ),  # whole query groups: [q, k, v] of each, one after another
    (r"(self_attention\.linear_proj|(mlp\.)?linear_fc2)\.weight", "rows"),
    (r"(self_attention\.linear_proj|(mlp\.)?linear_fc2)\.bias", "replicated"),
    (r"(mlp\.)?linear_fc1\.(weight|bias)", "fc1"),
    (r"embedding\.(position|tokentype)_embeddings\.weight", "replicated"),
    (r"([\w.]*\.)?\w*(layer)?norm\.(weight|bias)", "replicated"),
    (r"mlp\.router\.(weight|bias|expert_bias)|mlp\.shared_experts\.gate_weight", "replicated"),
)


@dataclass(frozen=True)
class Cut:
    """How a parameter lies on tensor-parallel ranks: ``whole`` on each, ``split`` along ``dim``, or ``gated``: rank r
    holds [gate_r; up_r] and the whole tensor is [gate; up], both along dimension 0."""

    kind: Literal["whole", "split", "gated"]
    dim: int = 0


def cut_of(name: str, *, gated: bool) -> Cut:
    """How a parameter, by its local-spec name, is cut; ``gated``: fc1 holds gate and up (SwiGLU).

    The rules are those which Megatron's parameters declare (``partition_dim``, ``partition_stride``). Raises
    CheckpointError for a parameter that is none of those of a GPT model.
    """
    role = _PREFIX.sub("", name, count=1)
    kind = next((kind for pattern, kind in _ROLES if re.fullmatch(pattern, role)), None)
    if kind is None:
        raise CheckpointError(
            f"{name}: how it is cut over tensor-parallel ranks is not known; save with tensor parallel size 1, or in "
            "the torch_dist format"
        )
    if kind == "fc1":
        return Cut("gated" if gated else "split", 0)
    return Cut("whole") if kind == "replicated" else Cut("split", 0 if kind == "columns" else 1)


def is_gated(arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron's ``args`` say that fc1 holds gate and up."""
    return bool(arguments.get("swiglu") or arguments.get("quick_geglu"))


def merge(parts: Sequence[LazyTensor], cut: Cut) -> LazyTensor:
    """The whole tensor, from all ranks' parts in the order of ranks; of a ``whole`` one rank 0's copy.

    Raises CheckpointError if the parts are of different shapes or dtypes.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise CheckpointError(
                f"{part.where}: expected shape {first.shape} in {first.dtype}, as in {first.where}, "
                f"found {part.shape} in {part.dtype}; the ranks' files are not of one checkpoint"
            )
    if len(parts) == 1 or cut.kind == "whole":
        return first
    shape = list(first.shape)
    shape[cut.dim] *= len(parts)
    if cut.kind == "split":
        return (
            end_to_end(parts, shape) if cut.dim == 0 else joined(parts, lambda found: torch.cat(found, cut.dim), shape)
        )
    if first.shape[0] % 2:
        raise CheckpointError(f"{first.where}: expected gate and up of one size, found shape {first.shape}")
    half = first.numel // 2
    gates, ups = [part.piece(0, half) for part in parts], [part.piece(half, 2 * half) for part in parts]
    return end_to_end([*gates, *ups], shape)


def local_shape(shape: Sequence[int], cut: Cut, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor of ``shape``. Raises ValueError if it does not divide."""
    if cut.kind == "whole" or ranks == 1:
        return tuple(shape)
    halves = 2 if cut.kind == "gated" else 1
    if shape[cut.dim] % (halves * ranks):
        raise ValueError(f"shape {tuple(shape)} does not divide into {ranks} parts along dimension {cut.dim}")
    return tuple(size // ranks if dim == cut.dim else size for dim, size in enumerate(shape))
