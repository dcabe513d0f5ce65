"""Runs anybody's ``forward`` on the meta device: what needs data gets something of a likely shape.

No number is ever computed, so the choice matters only where code branches on data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
FOUND = 16  # positions that ``nonzero`` returns at most: code loops over them
# Operations whose factors must have one dtype, and where these are
OF_ONE_DTYPE = {aten.mm: (0, 2), aten.bmm: (0, 2), aten.addmm: (0, 3), aten.baddbmm: (0, 3), aten.convolution: (0, 3)}
OF_ONE_DTYPE |= {aten.mv: (0, 2), aten.dot: (0, 2), aten.addmv: (0, 3), aten._grouped_mm: (0, 2)}


def without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation; something, if it depends on the data of a tensor that has none."""
    packet = func.overloadpacket
    if packet in OF_ONE_DTYPE:
        args = _of_one_dtype(args, *OF_ONE_DTYPE[packet])
    given = args[0] if args and isinstance(args[0], Tensor) else None
    if given is not None and given.is_meta:
        if packet is aten._local_scalar_dense:
            return True if given.dtype == torch.bool else 1.0 if given.is_floating_point() else 1
        if packet is aten.nonzero:
            return given.new_empty(min(FOUND, given.numel()), given.ndim, dtype=torch.int64)
        if packet is aten.index and any(_is_mask(index) for index in args[1]):
            return func(given, _as_indices(args[1]), **kwargs)
        if packet is aten.index_put_ and any(_is_mask(index) for index in args[1]):
            return given
        if packet is aten.masked_select:
            return given.new_empty(given.numel())
        if packet in (aten._unique2, aten.unique_dim, aten.unique_consecutive):
            counts = given.new_empty(given.numel(), dtype=torch.int64)
            return given.flatten(), counts, counts
        if packet is aten.bincount:
            return given.new_empty(max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0)), dtype=torch.int64)
        if packet is aten.equal:
            return True
    return func(*args, **kwargs)


def _of_one_dtype(args: Any, start: int, stop: int) -> list[Any]:
    """Autocast, or a model's own casts, decide at other times."""
    tensors = [value for value in args[start:stop] if isinstance(value, Tensor)]
    if len({tensor.dtype for tensor in tensors}) < 2 or any(tensor.dtype.is_complex for tensor in tensors):
        return list(args)
    dtype = tensors[-1].dtype
    return [
        value.to(dtype) if start <= place < stop and isinstance(value, Tensor) and value.dtype != dtype else value
        for place, value in enumerate(args)
    ]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_meta and index.dtype in (torch.bool, torch.uint8)


def _as_indices(indices: Any) -> list[Any]:
    """Masks as the indices of all their elements."""
    found: list[Any] = []
    for index in indices:
        if _is_mask(index):
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


class OnMeta(TorchFunctionMode):
    """Keeps tensors on the meta device, whatever device code names, and takes lists as indices without forgetting them.

    ``x[..., [-2], :]`` is ``x[..., -2:-1, :]``, and ``x[:, [0, 2]]`` two of these side by side: torch would make a
    tensor of the list, which has no data there.
    """

    MOVES = {Tensor.cuda, Tensor.cpu, Tensor.pin_memory, Tensor.xpu}
    MAKES = {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.tensor, torch.rand),
        *(torch.randn, torch.randint, torch.eye, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
        *(torch.as_tensor, torch.randn_like, torch.rand_like, torch.randperm, torch.tril_indices, torch.triu_indices),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and isinstance(args[1], (tuple, list)):
            return _taken(args[0], args[1])
        if func in self.MOVES:
            return args[0]
        if func is Tensor.to:
            args, kwargs = _without_device(args), {k: v for k, v in kwargs.items() if k != "device"}
            if len(args) == 1 and not kwargs:
                return args[0]
        elif func in self.MAKES and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        elif func is Tensor.tolist and args[0].is_meta:
            return _ones(list(args[0].shape), args[0].is_floating_point())
        elif func is torch.is_autocast_enabled:
            return False
        return func(*args, **kwargs)


def _without_device(args: Any) -> Any:
    return (args[0], *(each for each in args[1:] if not _is_device(each)))


def _is_device(given: Any) -> bool:
    if isinstance(given, str):
        return True
    return isinstance(given, torch.device) or type(given) is int


def _ones(shape: list[int], floating: bool) -> Any:
    if not shape:
        return 1.0 if floating else 1
    if math.prod(shape) > 10**5:
        raise ValueError("a list of so many numbers is not made up")
    return [_ones(shape[1:], floating) for _ in range(shape[0])]


def _taken(tensor: Tensor, index: Any) -> Tensor:
    items = index if isinstance(index, tuple) else (index,)
    lists = [place for place, item in enumerate(items) if _is_list(item)]
    if len(lists) != 1 or any(isinstance(item, Tensor) for item in items):
        return Tensor.__getitem__(tensor, index)
    place = lists[0]
    if len(items[place]) == 1:
        return Tensor.__getitem__(tensor, (*items[:place], _as_slice(items[place][0]), *items[place + 1 :]))
    pieces = [Tensor.__getitem__(tensor, (*items[:place], _as_slice(i), *items[place + 1 :])) for i in items[place]]
    dims = list(_dims_of(items, place, tensor.ndim))
    return torch.cat(pieces, dims[0])


def _dims_of(items: Any, place: int, ndim: int) -> Iterator[int]:
    """The dimension of the result that item ``place`` of an index selects along."""
    if any(item is Ellipsis for item in items[:place]):
        after = sum(1 for item in items[place + 1 :] if item is None or isinstance(item, slice))
        rest = ndim - sum(1 for item in items if item is not None and item is not Ellipsis)
        before_all = sum(1 for item in items if isinstance(item, slice) or item is None) + 1 + rest
        yield before_all - after - 1
        return
    yield sum(1 for item in items[:place] if item is None or isinstance(item, slice))


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _as_slice(index: int) -> slice:
    return slice(index, index + 1 or None)
