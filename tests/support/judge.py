"""Which outputs of a linear a forward pass takes apart, seen from outside: by where the inputs of operations lie.

Views of a linear's output lie in its storage, so a view's strides say which outputs it has. Element-wise operations and
copies give every element the outputs of the elements that it is computed from. Nothing here is the package's.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (1, 2), aten.baddbmm.default: (1, 2)}
SAME = {aten.clone, aten._to_copy, aten.native_dropout}
LOOKED_AT = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_empty}
LARGEST, ROOM = 2**22, 2**28  # elements of one tensor, and of all, whose outputs are kept
Outputs = frozenset[int]


class Seen:
    """What happened to the outputs of one weight: ``taken`` together by an operation, or added to each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken: set[Outputs] = set()
        self.added: set[tuple[Outputs, ...]] = set()

    def groups(self) -> list[Outputs]:
        """Outputs that some operation takes together, or that are added to each other; disjoint, in order."""
        groups = [set(one) for one in self.taken if one] + [set().union(*pieces) for pieces in self.added]
        found: list[set[int]] = []
        for group in groups:
            touching = [one for one in found if one & group]
            found = [one for one in found if not one & group] + [group.union(*touching)]
        return sorted(map(frozenset, found), key=min)


class Judge(TorchDispatchMode):
    """Follows the outputs of all linears of ``model``. ``seen`` is by the weight's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, Seen] = {}
        self._names = {param.untyped_storage()._cdata: (name, param) for name, param in model.named_parameters()}
        self._maps: dict[int, dict[str, Tensor]] = {}  # by storage, the output of each of its elements, -1 for none
        self._alive: list[Tensor] = []  # so that no storage is used again
        self._room = ROOM

    def forget(self) -> None:
        """Forget what was computed: another forward pass follows."""
        self._maps, self._alive, self._room = {}, [], ROOM

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _without_values(func, args) if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        result = func(*args, **(kwargs or {})) if result is None else result
        given = [value for value in _tensors((args, kwargs)) if value.numel()]
        made = [value for value in _tensors(result)]
        if func in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[func])
            for value in (left, right):
                self._take(value)
            self._begin(right, result)
        elif func is aten.copy_.default:
            for name, at in self._of(args[1]).items():
                self._put(args[0], name, at.expand(args[0].shape))
        elif func.overloadpacket in LOOKED_AT or self._is_view(given, made) or not any(map(self._of, given)):
            pass
        elif func.overloadpacket in (aten.cat, aten.stack):
            self._join(func, args, result)
        elif func.overloadpacket is aten.convolution and args[8] == args[0].shape[1] == result.shape[1]:
            for name, at in self._of(args[0]).items():
                of_channel = at.flatten(2)[..., :1] if at.ndim > 2 else at
                self._put(result, name, of_channel.view(*at.shape[:2], *[1] * (result.ndim - 2)).expand(result.shape))
        elif func.overloadpacket in SAME or torch.Tag.pointwise in func.tags:
            self._pointwise(func, given, made[0])
        else:
            for value in given:
                self._take(value)
        return result

    def _is_view(self, given: list[Tensor], made: list[Tensor]) -> bool:
        known = {value.untyped_storage()._cdata for value in given}
        return bool(made) and all(value.untyped_storage()._cdata in known for value in made)

    def _begin(self, weight: Tensor, result: Tensor) -> None:
        found = self._names.get(weight.untyped_storage()._cdata)
        if found is None or found[1].ndim != 2 or weight.ndim != 2 or result.numel() > LARGEST:
            return
        name, param = found
        if weight.shape == param.shape[::-1] and weight.stride() == param.stride()[::-1] or weight.shape == param.shape:
            self.seen.setdefault(name, Seen(result.shape[-1]))
            self._put(
                result, name, torch.arange(result.shape[-1], dtype=torch.int32, device="cpu").expand(result.shape)
            )

    def _put(self, tensor: Tensor, name: str, outputs: Tensor) -> None:
        """Note the outputs of a new tensor's elements."""
        if 0 < tensor.numel() <= min(LARGEST, self._room):
            size = tensor.untyped_storage().nbytes() // tensor.itemsize
            maps = self._maps.setdefault(tensor.untyped_storage()._cdata, {})
            flat = maps.setdefault(name, torch.full((size,), -1, dtype=torch.int32, device="cpu"))
            self._room -= size
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(outputs)
            self._alive.append(tensor)

    def _of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The outputs of a tensor's elements, by the weight's name."""
        maps = self._maps.get(tensor.untyped_storage()._cdata, {})
        where = tensor.shape, tensor.stride(), tensor.storage_offset()
        return {name: at for name, flat in maps.items() if bool((at := flat.as_strided(*where)).ge(0).any())}

    def _take(self, tensor: Tensor) -> None:
        for name, at in self._of(tensor).items():
            self.seen[name].taken.add(_set(at))

    def _join(self, func: Any, args: Any, result: Tensor) -> None:
        pieces, *more = args
        for name in {name for piece in pieces for name in self._of(piece)}:
            of_pieces = [self._of(piece).get(name) for piece in pieces]
            nothing = [torch.full(piece.shape, -1, dtype=torch.int32, device="cpu") for piece in pieces]
            self._put(result, name, func([no if at is None else at for no, at in zip(nothing, of_pieces)], *more))

    def _pointwise(self, func: Any, given: list[Tensor], result: Tensor) -> None:
        found = defaultdict(list)
        for value in given:
            for name, at in self._of(value).items():
                found[name].append(at.expand(result.shape) if at.ndim <= result.ndim else at)
        for name, maps in found.items():
            sets = tuple(map(_set, maps))
            if len({*sets}) == 1 and maps[0].shape == result.shape:
                self._put(result, name, maps[0])
            elif func.overloadpacket in (aten.add, aten.sub):
                self.seen[name].added.add(sets)
                self._put(result, name, maps[0])
            else:
                self.seen[name].taken.update(sets)


def _without_values(func: Any, args: Any) -> Any:
    """What an operation that reads a tensor returns for one on the meta device: something."""
    if func is aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
    if func is aten.nonzero.default:
        return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
    return None


def _set(at: Tensor) -> Outputs:
    return frozenset(torch.bincount(at.reshape(-1) + 1)[1:].nonzero().flatten().tolist())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
