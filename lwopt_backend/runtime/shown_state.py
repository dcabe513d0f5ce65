"""What ``optimizer.state`` shows of state that no tensor of it holds: in 8 bits, or on other ranks.

It is shown on the meta device, because the tensor has no memory of its own. Loops that trainers and users write do what
they mean, or raise::

    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to(device)  # or value.zero_(), or state[key] = value * 0.5

A move changes nothing: what is held stays on its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten: Any = torch.ops.aten
META = torch.device("meta")


class Holder(Protocol):
    """What keeps the state that a tensor stands for. ``read`` makes a tensor, ``write`` takes one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def read(self) -> Tensor: ...

    def write(self, whole: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """State that this rank cannot read by itself; reading and writing raise RuntimeError, which says ``why``."""

    why: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = META

    def read(self) -> Tensor:
        raise RuntimeError(f"optimizer.state: {self.why}")

    def write(self, whole: Tensor) -> None:
        self.read()


class ShownTensor(Tensor):
    """Stands for what a ``Holder`` keeps. Operators compute with what it reads, and what they change in place is
    written there. A view of a part would be a copy, and raises RuntimeError."""

    holder: Holder

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, holder: Holder) -> ShownTensor:
        made: ShownTensor = Tensor._make_wrapper_subclass(cls, holder.shape, dtype=holder.dtype, device=META)
        made.holder = holder
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        more = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls) and _is_whole(func, first, *args[1:], **more):
            return cls(first.holder)
        aliases = [each.alias_info for each in func._schema.arguments]
        if any(alias is not None and not alias.is_write for alias in aliases):
            name = func._schema.name.partition("::")[2]
            raise RuntimeError(
                f"optimizer.state: {name!r} takes a part of state that lies elsewhere; clone() the whole first, and "
                "assign it to the key to change it"
            )
        read: dict[int, Tensor] = {}
        real_args, real_more = tree_map(lambda leaf: _read(leaf, read), (args, more))
        found = func(*real_args, **real_more)
        given = dict(zip((each.name for each in func._schema.arguments), args)) | more
        changed = [given.get(each.name) for each in func._schema.arguments if each.alias_info is not None]
        shown = {id(read[id(each)]): each for each in tree_leaves(changed) if isinstance(each, cls)}
        for each in shown.values():
            each.holder.write(read[id(each)])
        return tree_map(lambda leaf: shown.get(id(leaf), leaf), found)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShownTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.holder.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.holder.read().__reduce_ex__(protocol)


def _is_whole(func: Any, shown: ShownTensor, *rest: Any, **more: Any) -> bool:
    """Whether an operator returns the same state: an alias, or a move or copy of what cannot be read here."""
    if func in (aten.alias.default, aten.detach.default):
        return True
    if func is aten.view.default:
        return tuple(rest[0]) == tuple(shown.shape)
    return func in (aten._to_copy.default, aten.clone.default) and isinstance(shown.holder, Elsewhere)


def _read(leaf: Any, read: dict[int, Tensor]) -> Any:
    if not isinstance(leaf, ShownTensor):
        return leaf
    if id(leaf) not in read:
        read[id(leaf)] = leaf.holder.read()
    return read[id(leaf)]


class ShownState(MutableMapping[str, Any]):
    """A parameter's state by key: ``stored`` tensors, and ``shown`` ones, whose holders take what is assigned."""

    def __init__(self, stored: Mapping[str, Any], shown: Mapping[str, Tensor] | None = None) -> None:
        self.stored, self.shown = dict(stored), dict(shown or {})

    def __getitem__(self, key: str) -> Any:
        return self.shown[key] if key in self.shown else self.stored[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.shown:
            self.stored[key] = value
            return
        into: Any = self.shown[key]  # a DTensor's local tensor, or itself
        part, holder = getattr(value, "_local_tensor", value), getattr(into, "_local_tensor", into).holder
        if isinstance(part, ShownTensor) and part.holder is holder:
            return
        if not isinstance(part, Tensor) or part.shape != holder.shape:
            found = f"{tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)
            raise ValueError(f"optimizer.state: {key!r}: expected this rank's {holder.shape}, found {found}")
        holder.write(part.to(holder.device, holder.dtype))

    def __delitem__(self, key: str) -> None:
        if key in self.shown:
            raise RuntimeError(f"optimizer.state: {key!r} cannot be taken out; reset_state() sets it to zero")
        del self.stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.shown, *self.stored))

    def __len__(self) -> int:
        return len(self.shown) + len(self.stored)

    def __repr__(self) -> str:
        return repr({**self})


def stored(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What tensors hold of a parameter's state."""
    return state.stored if isinstance(state, ShownState) else state
