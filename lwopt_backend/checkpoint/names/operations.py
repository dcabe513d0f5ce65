"""Operations of rules on tensors: split, join, permute, transpose, and pad or cut the vocabulary, without reading.

They do not compute with elements, so an operation on a weight is also right for every state of its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, end_to_end, joined
from lwopt_backend.checkpoint.formats import Numbers

Tensors = Sequence[LazyTensor]
Run = Callable[[Tensors, Numbers], list[LazyTensor]]


@dataclass(frozen=True, slots=True)
class Operation:
    """Makes ``gives`` tensors from ``takes``; ``back`` is the name of the inverse operation."""

    takes: int
    gives: int
    run: Run
    back: str


@dataclass(frozen=True, slots=True)
class QKV:
    """The outputs of q, k and v: ``groups`` times ``queries`` of q, then ``channels`` each of k and v."""

    groups: int
    queries: int
    channels: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.queries, self.channels, self.channels

    @property
    def rows(self) -> int:
        return self.groups * sum(self.sizes)


def qkv_of_fused(numbers: Numbers, rows: int, where: str) -> QKV:
    """The division of a fused matrix's rows, given two of heads, groups and channels. Raises CheckpointError."""
    heads, groups, channels = numbers.heads or 0, numbers.query_groups or 0, numbers.kv_channels or 0
    if (heads > 0) + (groups > 0) + (channels > 0) < 2:
        raise CheckpointError(
            f"{where}: expected two of heads, query_groups and kv_channels, to divide q, k and v; found "
            f"{_known(numbers)}; give them"
        )
    if heads and groups:
        channels = channels or rows // (heads + 2 * groups)
    elif heads:
        groups = (rows // channels - heads) // 2
    else:
        heads = rows // channels - 2 * groups
    return _fitting(QKV(groups, heads * channels // max(groups, 1), channels), rows, numbers, where)


def qkv_of_parts(numbers: Numbers, q: int, k: int, where: str) -> QKV:
    """The division of the rows of separate q and k, given one of heads, groups and channels. Raises CheckpointError."""
    heads, groups, channels = numbers.heads, numbers.query_groups, numbers.kv_channels
    if not (heads or groups or channels):
        raise CheckpointError(
            f"{where}: expected one of heads, query_groups and kv_channels, to divide q, k and v; found "
            f"{_known(numbers)}; give them"
        )
    if not channels:
        channels = k // groups if groups else q // (heads or 1)
    groups = groups or k // max(channels, 1)
    return _fitting(QKV(groups, q // max(groups, 1), channels), q + 2 * k, numbers, where)


def _fitting(found: QKV, rows: int, numbers: Numbers, where: str) -> QKV:
    heads = found.groups * found.queries // max(found.channels, 1)
    whole = min(found.groups, found.queries, found.channels) > 0 and found.queries % found.channels == 0
    if not whole or found.rows != rows or numbers.heads not in (None, heads):
        raise CheckpointError(
            f"{where}: expected (heads + 2 * query_groups) * kv_channels rows of q, k and v, found {rows}, which do "
            f"not divide by {_known(numbers)}; give the numbers of this model"
        )
    return found


def _known(numbers: Numbers) -> str:
    keys = ("heads", "query_groups", "kv_channels")
    return ", ".join(f"{key} {getattr(numbers, key) or 'unknown'}" for key in keys)


def _split_qkv(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    """Split Megatron's rows (q, k, v group by group) into three tensors: all q, all k, all v."""
    fused = tensors[0]
    qkv = qkv_of_fused(numbers, fused.shape[0], fused.where)
    total, parts, start = sum(qkv.sizes), [], 0
    for size in qkv.sizes:
        parts.append(_gathered(fused, [(g * total + start, g * total + start + size) for g in range(qkv.groups)]))
        start += size
    return parts


def _join_qkv(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    q, k, v = tensors
    _check_alike(tensors, first_dimension=False)
    if k.shape != v.shape:
        raise CheckpointError(f"expected k and v alike, found {k.shape} of {k.where}, {v.shape} of {v.where}")
    groups = qkv_of_parts(numbers, q.shape[0], k.shape[0], q.where).groups

    def function(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    return [joined(tensors, function, (q.shape[0] + 2 * k.shape[0], *q.shape[1:]))]


def _qkv_blocks(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    """Reorder q, k, v group by group into all q, all k, all v."""
    return [_regrouped(tensors[0], qkv_of_fused(numbers, tensors[0].shape[0], tensors[0].where), 1)]


def _qkv_groups(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    fused = tensors[0]
    qkv = qkv_of_fused(numbers, fused.shape[0], fused.where)
    return [_regrouped(fused, QKV(1, qkv.queries * qkv.groups, qkv.channels * qkv.groups), qkv.groups)]


def _regrouped(fused: LazyTensor, qkv: QKV, groups: int) -> LazyTensor:
    """Reorder rows that ``qkv`` describes into ``groups`` groups."""

    def function(whole: Tensor) -> Tensor:
        parts = whole.unflatten(0, (qkv.groups, -1)).split(qkv.sizes, dim=1)
        parts = [part.flatten(0, 1).unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)

    return fused.mapped(function, fused.shape)


def _split_gate_up(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    fused = tensors[0]
    rows = fused.shape[0]
    if rows % 2:
        raise CheckpointError(f"{fused.where}: expected gate and up of equal size, found {rows} rows")
    return [_gathered(fused, [(0, rows // 2)]), _gathered(fused, [(rows // 2, rows)])]


def _join_gate_up(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    gate = tensors[0]
    _check_alike(tensors)
    return [end_to_end(tensors, (2 * gate.shape[0], *gate.shape[1:]))]


def _transpose(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    """Transpose a matrix, or each of a stack; a bias does not change."""
    tensor = tensors[0]
    if len(tensor.shape) < 2:
        return [tensor]
    *outer, rows, columns = tensor.shape
    return [tensor.mapped(lambda whole: whole.transpose(-2, -1), (*outer, columns, rows))]


def _vocabulary(tensors: Tensors, numbers: Numbers) -> list[LazyTensor]:
    """The first ``vocab_size`` rows, or all."""
    tensor, rows = tensors[0], tensors[0].shape[0]
    kept = numbers.vocab_size or rows
    if kept > rows:
        raise CheckpointError(
            f"{tensor.where}: expected at least {kept} rows, the given vocabulary, found {rows}; correct it"
        )
    return [_gathered(tensor, [(0, kept)]) if kept < rows else tensor]


OPERATIONS: Mapping[str, Operation] = {
    "split_qkv": Operation(1, 3, _split_qkv, "join_qkv"),
    "join_qkv": Operation(3, 1, _join_qkv, "split_qkv"),
    "qkv_blocks": Operation(1, 1, _qkv_blocks, "qkv_groups"),
    "qkv_groups": Operation(1, 1, _qkv_groups, "qkv_blocks"),
    "split_gate_up": Operation(1, 2, _split_gate_up, "join_gate_up"),
    "join_gate_up": Operation(2, 1, _join_gate_up, "split_gate_up"),
    "transpose": Operation(1, 1, _transpose, "transpose"),
    "vocabulary": Operation(1, 1, _vocabulary, "vocabulary"),
}


def stacked(tensors: Tensors, sizes: Sequence[int]) -> LazyTensor:
    """One tensor with these leading dimensions; the last of them varies fastest in ``tensors``."""
    _check_alike(tensors)
    return end_to_end(tensors, (*sizes, *tensors[0].shape))


def unstacked(tensor: LazyTensor, leading: int) -> list[LazyTensor]:
    """The slices along the leading dimensions, each read separately if the file allows it."""
    shape = tensor.shape[leading:]
    size = math.prod(shape)
    starts = [number * size for number in range(math.prod(tensor.shape[:leading]))]
    return [tensor.piece(start, start + size).view(shape) for start in starts]


def _gathered(tensor: LazyTensor, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
    """The rows of these ranges, concatenated; only these are read if the file allows it."""
    inner = tensor.shape[1:]
    shape, width = (sum(stop - start for start, stop in ranges), *inner), math.prod(inner)
    if tensor.read_range is None:
        return tensor.mapped(lambda whole: torch.cat([whole[start:stop] for start, stop in ranges]), shape)
    return end_to_end([tensor.piece(start * width, stop * width) for start, stop in ranges], shape)


def _check_alike(tensors: Tensors, first_dimension: bool = True) -> None:
    """Raises CheckpointError unless these tensors can be joined into one."""
    first = tensors[0]
    skipped = 0 if first_dimension else 1
    for other in tensors[1:]:
        if (other.dtype, other.shape[skipped:]) != (first.dtype, first.shape[skipped:]):
            raise CheckpointError(
                f"expected tensors that can be joined, found {first.dtype} of shape {first.shape} in {first.where} and "
                f"{other.dtype} of shape {other.shape} in {other.where}; give a map that keeps them apart"
            )
