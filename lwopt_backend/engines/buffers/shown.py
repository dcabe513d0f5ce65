"""What ``param.grad`` shows from a backward pass on: a mean gradient whose elements are at their owners."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from lwopt_backend.engines.buffers.gradients import SCALES, BufferGradients

aten: Any = torch.ops.aten


class Reader(Protocol):
    """An optimizer whose parameters show reduced gradients. ``version`` changes with the gradients."""

    @property
    def version(self) -> int: ...

    def shown(self, *, order: float | None = None, together: bool = False, scales: bool = False) -> BufferGradients:
        """The gradients: to change some, for their norms of this ``order``, or for what all ranks do ``together``.
        Raises RuntimeError if they may not be used now. What ``scales`` may come before ranks add them up."""

    def zero(self, numbers: Sequence[int]) -> None:
        """Set the gradients of these parameters to zero."""


class ReducedGradient(Tensor):
    """The mean gradient of a parameter, without memory: its elements are at their owners.

    So a loop that was written for DDP finds a gradient. Norms are those of the whole gradient; scaling and bounding
    change it at its owners. All ranks call them. Anything else raises RuntimeError with the parameter's name.
    """

    _reader: weakref.ref[Reader] | None
    _name: str
    _number: int
    _copied: int | None  # if this is a copy, the version of the gradients then

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, like: Tensor, reader: weakref.ref[Reader] | None, name: str, number: int, **how: Any
    ) -> ReducedGradient:
        given = {"dtype": like.dtype, "device": like.device, "strides": like.stride(), **how}
        made: ReducedGradient = Tensor._make_wrapper_subclass(cls, like.shape, **given)
        made._reader, made._name, made._number, made._copied = reader, name, number, None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        target, *rest = args
        does, several, more = OPERATORS.get(func), isinstance(target, (list, tuple)), kwargs or {}
        tensors: Sequence[Tensor] = target if several else [target]
        if does is None or any(isinstance(each, cls) for each in rest):
            raise next(each for each in tree_leaves((args, more)) if isinstance(each, cls)).refusal(func)
        parts: dict[int, list[Any]] = {}  # a list may have gradients of other optimizers
        for each in tensors:
            parts.setdefault(id(each._reader) if isinstance(each, cls) else 0, []).append(each)
        results: dict[int, Tensor] = {}
        for reader, some in parts.items():
            found = does(some, func, *rest, **more) if reader else func(some, *rest, **more)
            results.update(zip(map(id, some), found or ()))
        if several:
            return [results[id(each)] for each in tensors] if results else None
        return results.get(id(target), target)

    def refusal(self, func: Any) -> RuntimeError:
        """The error of an operation that needs elements."""
        return RuntimeError(
            f"param.grad of {self._name!r}: {func._schema.name.partition('::')[2]!r} needs its elements, which only "
            "their owners have. Clipping by torch.nn.utils, norms, and scaling by a number work; for anything else set "
            "keep_full_grads=True when you make the optimizer"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReducedGradient({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, at its owners)"

    def share_memory_(self) -> ReducedGradient:
        """``model.share_memory()`` asks for it, and there is no memory."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal(aten.clone.default)


def gradients_shown(names: Sequence[str], params: Sequence[Tensor], reader: Reader) -> Sequence[Tensor]:
    """What each of the parameters shows."""
    shown = []
    for number, (name, param) in enumerate(zip(names, params)):
        dtype = getattr(param, "grad_dtype", None) or param.dtype
        shown.append(ReducedGradient(param, weakref.ref(reader), name, number, dtype=dtype))
    return shown


# What may be done to reduced gradients of one optimizer, by operator. Results take the gradients' places.

Marks = Sequence[ReducedGradient]
Does = Callable[..., Sequence[Tensor] | None]


def _reader(marks: Marks, func: Any, *, reads: bool = False) -> Reader:
    """Their optimizer. Raises RuntimeError if it is gone, and for a copy, unless it ``reads`` what has not changed."""
    reader = None if marks[0]._reader is None else marks[0]._reader()
    if reader is None:
        raise RuntimeError(f"param.grad of {marks[0]._name!r}: its optimizer is gone or its model has moved; drop it")
    for mark in marks:
        if mark._copied is not None and not (reads and mark._copied == reader.version):
            raise mark.refusal(func)
    return reader


def _numbers(marks: Marks) -> list[int]:
    return [mark._number for mark in marks]


def _view(marks: Marks, func: Any) -> list[ReducedGradient]:
    views = [ReducedGradient(mark, mark._reader, mark._name, mark._number) for mark in marks]
    for view, mark in zip(views, marks):
        view._copied = mark._copied
    return views


def _copy(marks: Marks, func: Any, *, dtype: Any = None, device: Any = None, **how: Any) -> list[ReducedGradient]:
    """In another precision, as autocast asks; or elsewhere, as a model asks that moves, where nobody reads it."""
    (mark,) = marks
    gone = mark._reader is None or mark._reader() is None
    if gone or (device is not None and torch.device(device) != mark.device):
        device = mark.device if device is None else device
        return [ReducedGradient(mark, None, mark._name, mark._number, dtype=dtype or mark.dtype, device=device)]
    copy = ReducedGradient(mark, mark._reader, mark._name, mark._number, dtype=dtype or mark.dtype)
    copy._copied = _reader(marks, func, reads=True).version
    return [copy]


def _norms(marks: Marks, func: Any, ord: float = 2.0, dim: Any = None, *rest: Any, **more: Any) -> list[Tensor]:
    order, dtype = float(ord), more.get("dtype") or torch.float32
    if dim is not None or any(rest) or order in (0.0, -math.inf):  # these are no roots of sums over pieces
        raise marks[0].refusal(func)
    norms = _reader(marks, func, reads=True).shown(order=order).norms(_numbers(marks), order)
    return [norm.to(dtype) for norm in norms]


def _change(marks: Marks, func: Any, *rest: Any, **more: Any) -> None:
    if any(isinstance(each, Tensor) and each.numel() > 1 for each in rest):
        raise marks[0].refusal(func)
    scales = func._schema.name.partition("::")[2].removeprefix("_foreach_") in SCALES
    _reader(marks, func).shown(scales=scales).change(_numbers(marks), func, *rest, **more)


def _unscale(marks: Marks, func: Any, found_inf: Tensor, inverse: Tensor) -> None:
    _reader(marks, func).shown(together=True).unscale(_numbers(marks), found_inf, inverse)


def _zero(marks: Marks, func: Any) -> None:
    _reader(marks, func).zero(_numbers(marks))


OPERATORS: Mapping[Any, Does] = {
    **dict.fromkeys([aten.detach.default, aten.alias.default], _view),
    aten._to_copy.default: _copy,
    **dict.fromkeys([aten.linalg_vector_norm.default, aten._foreach_norm.Scalar], _norms),
    **dict.fromkeys([aten.zero_.default, aten._foreach_zero_.default], _zero),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys([aten.mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor], _change),
    **dict.fromkeys([aten.div_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.Tensor], _change),
    **dict.fromkeys([aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default], _change),
    **dict.fromkeys([aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar], _change),
    aten.nan_to_num_.default: _change,
}

_types = getattr(_foreach_utils, "_foreach_supported_types", [])
if ReducedGradient not in _types:  # as torch's DTensor: torch.nn.utils then gives all gradients to one operator
    _types.append(ReducedGradient)
