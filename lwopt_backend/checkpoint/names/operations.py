"""What maps of names do with tensors, without reading: cut q, k and v apart, gate and up, rows, and transpose.

They do not compute with elements, so an operation on a weight is also right for every state of its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, end_to_end
from lwopt_backend.checkpoint.formats import Numbers


@dataclass(frozen=True)
class Model:
    """What a map of names knows of the model: its numbers, Megatron's arguments, and whether linear_qkv has the gates
    of a gated attention in addition to q, k and v."""

    numbers: Numbers
    arguments: Mapping[str, Any]
    gated_attention: bool


Moved = dict[str, LazyTensor]
Family = Callable[[str, LazyTensor, Model], Moved | None]
"""A map of names: from a parameter's name, one of its tensors (the weight or a state), and the model, the tensors that
it becomes, by their names. {} drops it, None says that there is no name for it. A name that ends in ``[3]`` is number 3
of a stack of tensors: ``{"experts.down_proj[3]": tensor}``."""


def qkv_of(fused: LazyTensor, model: Model) -> tuple[int, tuple[int, int, int]]:
    """The division of Megatron's rows: the number of query groups, and in each the rows of q, of k and of v. Raises
    CheckpointError if two of heads, groups and channels are not known, if the rows do not divide, and for rows that
    also have a gated attention's gates."""
    if model.gated_attention:
        raise CheckpointError(
            f"{fused.where} has the gates of a gated attention in addition to q, k and v (Megatron's "
            "--attention-output-gate), for which the map has no name; convert with --names megatron-core, for a model "
            "with its own class"
        )
    numbers, rows = model.numbers, fused.shape[0]
    heads, groups, channels = numbers.heads or 0, numbers.query_groups or 0, numbers.kv_channels or 0
    known = f"heads {heads or 'unknown'}, query_groups {groups or 'unknown'}, kv_channels {channels or 'unknown'}"
    if (heads > 0) + (groups > 0) + (channels > 0) < 2:
        raise CheckpointError(
            f"{fused.where}: expected two of heads, query_groups and kv_channels, to divide q, k and v; found {known}; "
            "give them"
        )
    if not heads:
        heads = rows // channels - 2 * groups
    groups = groups or (rows // channels - heads) // 2
    channels = channels or rows // (heads + 2 * groups)
    if min(heads, groups) < 1 or heads % groups or (heads + 2 * groups) * channels != rows:
        raise CheckpointError(
            f"{fused.where}: expected (heads + 2 * query_groups) * kv_channels rows of q, k and v, found {rows}, which "
            f"do not divide by {known}; give the numbers of this model"
        )
    return groups, (heads // groups * channels, channels, channels)


def split_qkv(fused: LazyTensor, model: Model) -> list[LazyTensor]:
    """Three tensors, all q, all k, all v, of Megatron's rows (q, k, v of each query group in turn)."""
    groups, sizes = qkv_of(fused, model)
    total, parts, start = sum(sizes), [], 0
    for size in sizes:
        parts.append(rows(fused, [(g * total + start, g * total + start + size) for g in range(groups)]))
        start += size
    return parts


def qkv_blocks(fused: LazyTensor, model: Model) -> LazyTensor:
    """The same rows as all q, all k, all v in one tensor."""
    groups, sizes = qkv_of(fused, model)

    def function(whole: Tensor) -> Tensor:
        parts = whole.unflatten(0, (groups, -1)).split(sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return fused.mapped(function, fused.shape)


def split_gate_up(fused: LazyTensor, model: Model) -> list[LazyTensor]:
    """The first and the second half of the rows. Raises CheckpointError if ``fused`` is not gate and up."""
    count = fused.shape[0]
    if model.arguments.get("swiglu") is False and not model.arguments.get("quick_geglu"):
        raise CheckpointError(
            f"{fused.where}: expected a gated fc1, of which the map divides gate and up, found the argument swiglu "
            "False: its fc1 is one matrix; give the names of another family"
        )
    if count % 2:
        raise CheckpointError(f"{fused.where}: expected gate and up of equal size, found {count} rows")
    return [rows(fused, [(0, count // 2)]), rows(fused, [(count // 2, count)])]


def transpose(tensor: LazyTensor) -> LazyTensor:
    """A matrix with its outputs and inputs swapped; a bias does not change."""
    if len(tensor.shape) < 2:
        return tensor
    return tensor.mapped(
        lambda whole: whole.transpose(-2, -1), (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    )


def rows(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    """The rows of these ranges, concatenated; only these are read if the file allows it."""
    inner = tensor.shape[1:]
    shape, width = (sum(stop - start for start, stop in ranges), *inner), math.prod(inner)
    if tensor.read_range is None:
        return tensor.mapped(lambda whole: torch.cat([whole[start:stop] for start, stop in ranges]), shape)
    return end_to_end([tensor.piece(start * width, stop * width) for start, stop in ranges], shape)


def first_rows(tensor: LazyTensor, count: int) -> LazyTensor:
    """The first rows, of a vocabulary. Raises CheckpointError if there are fewer."""
    if count > tensor.shape[0]:
        raise CheckpointError(
            f"{tensor.where}: expected at least {count} rows, the given vocabulary, found {tensor.shape[0]}; correct it"
        )
    return rows(tensor, [(0, count)]) if count < tensor.shape[0] else tensor
