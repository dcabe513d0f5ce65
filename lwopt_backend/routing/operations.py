"""The operations of torch that are followed, by what they do with the numbers of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.routing.numbered import changes_along, none_of, spread

aten = torch.ops.aten
COPIES = {aten.clone, aten._to_copy, aten.detach, aten.alias, aten.lift_fresh, aten.native_dropout, aten.contiguous}
COPIES |= {aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training}
COPIES |= {aten._batch_norm_with_update, aten.cudnn_batch_norm}  # channel by channel
RESHAPES = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias}
MOVES = {aten.flip, aten.roll}
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.mv: 0, aten.dot: 0, aten._scaled_mm: 0}
PRODUCTS |= {aten.addmm: 1, aten.baddbmm: 1, aten.addbmm: 1, aten.addmv: 1}
NORMS = {aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm}
REDUCTIONS = {aten.sum, aten.mean, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.linalg_vector_norm, aten.norm}
REDUCTIONS |= {aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.logsumexp, aten.any, aten.all, aten.argmax}
REDUCTIONS |= {aten.argmin, aten.median, aten.nansum}
SUMS = {aten.sum, aten.mean, aten.nansum}
ALONG = {aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.cumsum, aten.cumprod, aten.sort}
ALONG |= {aten.topk, aten.cummax, aten.cummin, aten.logcumsumexp, aten._safe_softmax}
LOOKUPS = {aten.index, aten.index_select, aten.gather, aten.embedding, aten.take_along_dim}
WRITES = {aten.copy_, aten.fill_, aten.zero_}
MULTIPLIES = {aten.mul, aten.mul_, aten.div, aten.div_}
ADDS = {aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub}
LINEAR = {*MULTIPLIES, *ADDS, aten.neg, aten.neg_, aten.addcmul, aten.where, aten.masked_fill, aten.masked_fill_}
ROOTS = {aten.sqrt, aten.rsqrt, aten.sqrt_, aten.rsqrt_, aten.pow}
ACTIVATIONS = {"silu", "sigmoid", "gelu", "relu", "tanh", "softplus", "exp", "leaky_relu", "elu", "hardswish", "mish"}
BY_CHANNEL = ("upsample", "pool", "pad", "grid_sampler")  # in names of operations on (batch, channels, places)


def operands(packet: Any, args: Any) -> Sequence[Tensor] | None:
    """The factors of a product, a convolution or attention; None for any other operation."""
    if packet in PRODUCTS:
        factors: Sequence[Tensor] = args[PRODUCTS[packet] : PRODUCTS[packet] + 2]
        return factors
    if packet is aten.convolution:
        is_depthwise = args[1].shape[1] == 1 < args[-1]  # scales each channel's places
        return None if is_depthwise else args[:2]
    return args[:3] if "scaled_dot_product" in packet.__name__ else None


def concatenated(pieces: Sequence[Tensor | None], shapes: Sequence[Any], dim: int, stacked: bool) -> Tensor:
    """Compact numbers of pieces of ``shapes`` side by side; None is a piece without any."""
    given = [
        none_of(shape) if piece is None else piece.unsqueeze(dim) if stacked else piece
        for piece, shape in zip(pieces, shapes)
    ]
    sizes = [max(piece.shape[i] for piece in given) for i in range(len(shapes[0]))]
    if len(given) == 1 or (stacked and all(torch.equal(piece, given[0]) for piece in given)):
        return given[0]
    if not stacked and all(piece.shape[dim] == 1 and torch.equal(piece, given[0]) for piece in given):
        return given[0]
    lengths = ([shape[dim] if i == dim else size for i, size in enumerate(sizes)] for shape in shapes)
    full = [piece.expand(length) for piece, length in zip(given, lengths)]
    return torch.cat(full, dim)


def repeated(numbers: Tensor, repeats: Sequence[int]) -> Tensor:
    numbers = spread(numbers, repeats)
    return numbers.repeat([1 if size == 1 else times for size, times in zip(numbers.shape, repeats)])


def padded(numbers: Tensor, pad: Sequence[int]) -> Tensor:
    """Padding along a dimension in which no number changes is taken for more of the same."""
    amounts = list(pad)
    for place in range(len(pad) // 2):
        if numbers.shape[-1 - place] == 1:
            amounts[2 * place : 2 * place + 2] = [0, 0]
    padded: Tensor = aten.constant_pad_nd(numbers, amounts, -1)
    return padded


def looked_up(packet: Any, args: Any, result: Tensor) -> Callable[[Tensor], Tensor | None] | None:
    """How a lookup moves compact numbers; None if that is not known."""
    if packet is aten.index_select:
        dim = args[1]
        return lambda numbers: None if changes_along(numbers, dim) else numbers
    if packet in (aten.gather, aten.take_along_dim) and args[0].ndim == result.ndim:
        dim = args[1]
        return lambda numbers: None if numbers.ndim == 0 or changes_along(numbers, dim) else numbers
    if packet is aten.index:
        used = [dim for dim, index in enumerate(args[1]) if index is not None]
        sizes = torch.broadcast_shapes(*(args[1][dim].shape for dim in used))
        if used != [*range(used[0], used[-1] + 1)]:
            return None

        def move(numbers: Tensor) -> Tensor | None:
            if any(changes_along(numbers, dim) for dim in used):
                return None
            return numbers.reshape(*numbers.shape[: used[0]], *[1] * len(sizes), *numbers.shape[used[-1] + 1 :])

        return move
    return None


_DIMS: dict[Any, tuple[int, int]] = {}  # where an operation has its dimensions, and whether it keeps them


def dims_of(func: Any, args: Any, kwargs: Any, ndim: int) -> tuple[list[int], bool]:
    """The dimensions along which an operation reads, all if it names none; and whether the result keeps them."""
    if func not in _DIMS:
        names = [argument.name for argument in func._schema.arguments]
        at = next((i for i, name in enumerate(names) if name in ("dim", "dims")), -1)
        _DIMS[func] = at, names.index("keepdim") if "keepdim" in names else -1
    at, keeps = _DIMS[func]
    given = args[at] if 0 <= at < len(args) else kwargs.get("dim")
    kept = args[keeps] if 0 <= keeps < len(args) else kwargs.get("keepdim", False)
    if given is None or given == []:
        return list(range(ndim)), bool(kept)
    return [dim % max(1, ndim) for dim in ([given] if isinstance(given, int) else given)], bool(kept)


def flat(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat(value)


def all_tensors(result: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in what a ``forward`` returned, in objects with attributes as well."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        yield from (tensor for value in result.values() for tensor in all_tensors(value, depth))
    elif isinstance(result, (list, tuple)):
        yield from (tensor for value in result for tensor in all_tensors(value, depth))
    elif depth and hasattr(result, "__dict__"):
        yield from (tensor for value in vars(result).values() for tensor in all_tensors(value, depth - 1))


def is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
