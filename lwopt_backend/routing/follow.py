"""Follows the outputs of weights through a module's ``forward``, to see which of them are one matrix.

Every output of a weight has its number. Views, copies and element-wise operations carry the numbers on; what is
computed from several outputs at once, such as the product of queries and keys, ends them. Outputs that end together are
one matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lwopt_backend.runtime import nested

Outputs = frozenset[int]
Source = tuple[int, int]  # the number of a weight, and which of its dimensions, from the end, are outputs: 2 or 1
Numbers = Mapping[Source, Tensor]  # of the elements of a tensor, -1 for others
LARGEST = 2**25  # numbers in one tensor

aten = torch.ops.aten
COPIES = {aten.clone, aten._to_copy, aten.detach, aten.alias, aten.lift_fresh, aten.native_dropout}
COPIES |= {aten.native_batch_norm, aten._native_batch_norm_legit}  # channel by channel
RESHAPES = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias}
MOVES = {aten.flip, aten.roll, aten.repeat}
WRITES = {aten.copy_, aten.fill_, aten.zero_}
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.addbmm: 1}
ROWS_TAKEN = {aten.index, aten.index_select, aten.embedding, aten.gather, aten.native_layer_norm}
Use = Literal["multiplied", "added", "lost"]  # of a weight that no linear has: the last by an unknown operation
MULTIPLIES = {aten.mul, aten.mul_, aten.div, aten.div_}
ACTIVATIONS = {"silu", "sigmoid", "gelu", "relu", "tanh", "softplus", "exp", "leaky_relu", "elu", "hardswish", "mish"}


@dataclass
class Ends:
    """What became of the outputs of a weight of ``count`` outputs.

    ``used`` are those that ended together, ``rejoined`` pieces that were concatenated, ``added`` pairs that were added
    to each other. ``activated`` went through an activation. ``names`` are those of variables, ``left`` what variables
    had where the ``forward`` failed. ``returned``: some left the module.
    """

    count: int
    used: list[Outputs] = field(default_factory=list)
    rejoined: list[tuple[Outputs, ...]] = field(default_factory=list)
    added: list[tuple[Outputs, Outputs]] = field(default_factory=list)
    activated: list[Outputs] = field(default_factory=list)
    names: dict[str, Outputs] = field(default_factory=dict)
    left: list[Outputs] = field(default_factory=list)
    returned: bool = False


class Follow(TorchDispatchMode):
    """Follows the outputs of ``weights``; ``codes`` are those of the module's methods.

    ``linears`` are the numbers of weights that are known to be multiplied. ``uses`` are those of the other matrices.
    """

    def __init__(self, weights: Sequence[Tensor], codes: Collection[CodeType], linears: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ends: dict[Source, Ends] = {}
        bare = [number for number, weight in enumerate(weights) if number not in linears and weight.ndim == 2]
        self.uses: dict[int, set[Use]] = {number: set() for number in bare}
        self._codes, self._counts = codes, dict[Source, int]()
        self._at = 0, 0  # the last place in a method
        self.steps = 0  # operations on what is followed
        self._made: Any = WeakIdKeyDictionary()  # the numbers of what was computed, by tensor
        self._weights: Any = WeakIdKeyDictionary()  # and those of weights and views of them
        self._sets: Any = WeakIdKeyDictionary()
        for number, weight in enumerate(weights):
            rows, columns = (torch.arange(size, dtype=torch.int32, device="cpu") for size in weight.shape[-2:])
            of_rows, of_columns = rows[:, None].expand(weight.shape), columns.expand(weight.shape)
            self._weights[weight] = {(number, 2): of_rows, (number, 1): of_columns}
            self._counts.update({(number, 2): len(rows), (number, 1): len(columns)})

    def returned(self, result: Any) -> None:
        """Note what a ``forward`` returned."""
        for value in nested.tensors(result):
            for source in self._made.get(value, ()):
                self.ends[source].returned = True
            self._end(value)

    def failed(self, trace: TracebackType | None) -> None:
        """Note what the variables of a ``forward`` that failed have."""
        while trace is not None:
            if trace.tb_frame.f_code in self._codes:
                for value in trace.tb_frame.f_locals.values():
                    for source, outputs in self._outputs(value).items():
                        self.ends[source].left.append(outputs)
            trace = trace.tb_next

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _without_data(func, args)
        result = func(*args, **kwargs) if result is None else result
        given = [*nested.tensors((args, kwargs))]
        if any(value in self._made or value in self._weights for value in given):
            self.steps += 1
            self._note_names()
            self._pass_on(func, given, args, kwargs, result)
        return result

    def _pass_on(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any, result: Any) -> None:
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if packet in PRODUCTS:
            left, right = args[PRODUCTS[packet] : PRODUCTS[packet] + 2]
            self._product(left, right, result)
        elif packet in RESHAPES:
            self._carry(args[0], result, lambda numbers: numbers.reshape(result.shape))
        elif packet in COPIES:
            self._carry(args[0], result[0] if isinstance(result, tuple) else result, lambda numbers: numbers)
        elif packet is aten.constant_pad_nd:
            self._carry(args[0], result, lambda numbers: func(numbers, args[1], -1))
        elif packet in (aten.cat, aten.stack):
            self._join(func, args, kwargs, result)
        elif packet is aten.glu:
            for source, numbers in self._made.get(args[0], {}).items():
                for half in numbers.chunk(2, *(args[1:] or (-1,))):
                    self._end_of(source, _set(half))
        elif packet in (aten.view_as_complex, aten.view_as_real):
            self._end(args[0])
        elif packet is aten.sum and len(args) > 1 and args[1] and len(args[1]) == 1 and not kwargs:
            self._sum(*args, result=result)
        elif packet is aten.convolution:
            self._convolution(*args, result=result)
        elif packet in MOVES or _is_view(func):
            self._carry(args[0], result, lambda numbers: func(numbers, *args[1:], **kwargs))
        elif torch.Tag.pointwise in func.tags and isinstance(result, Tensor):
            self._pointwise(packet, given, result)
        elif not name.endswith("_like") and not name.startswith("new_"):
            for value in given[1:] if packet in WRITES else given:
                self._end(value)
                self._note(value, "added" if packet in ROWS_TAKEN else "lost")

    def _outputs(self, value: Any) -> dict[Source, Outputs]:
        """The outputs that a tensor has elements of."""
        if not isinstance(value, Tensor) or value not in self._made:
            return {}
        if value not in self._sets:
            self._sets[value] = {source: _set(numbers) for source, numbers in self._made[value].items()}
        found: dict[Source, Outputs] = self._sets[value]
        return found

    def _note_names(self) -> None:
        """Note the names under which the innermost method of the module has outputs."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or (id(frame), frame.f_lasti) == self._at:
            return
        self._at = id(frame), frame.f_lasti
        for name, value in frame.f_locals.items():
            for source, outputs in self._outputs(value).items():
                self.ends[source].names.setdefault(name, outputs)

    def _note(self, value: Tensor, use: Use) -> None:
        for number, _ in self._weights.get(value, ()):
            if number in self.uses:
                self.uses[number].add(use)

    def _end(self, value: Tensor) -> None:
        for source, outputs in self._outputs(value).items():
            self._end_of(source, outputs)

    def _end_of(self, source: Source, outputs: Outputs) -> None:
        if outputs and outputs not in self.ends[source].used:
            self.ends[source].used.append(outputs)

    def _carry(self, value: Tensor, result: Any, move: Callable[[Tensor], Any]) -> None:
        """``result`` has the elements of ``value``, where ``move`` puts its numbers."""
        for known in (self._made, self._weights):
            for source, numbers in known.get(value, {}).items():
                moved = move(numbers)
                several = isinstance(result, (list, tuple))
                for one, its in zip(result, moved) if several else [(result, moved)]:
                    if its.numel() <= LARGEST or known is self._weights:
                        known[one] = {**known.get(one, {}), source: its}

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> None:
        """A product's elements belong to outputs over which it does not sum."""
        found: dict[Source, Tensor] = {}
        for value, other in ((left, right), (right, left)):
            is_input = any(number not in self.uses for number, _ in self._weights.get(other, ()))
            self._note(value, "added" if is_input else "multiplied")
        for value, summed in ((left, -1), (right, -2)):
            for known in (self._made, self._weights):
                for source, numbers in known.get(value, {}).items():
                    first, last = numbers.select(summed, 0), numbers.select(summed, -1)
                    if torch.equal(first, last) and numbers.shape[summed] > 1:
                        kept = first.unsqueeze(summed)
                        ours = (kept[0] if kept.ndim > result.ndim else kept).expand(result.shape)
                        if source in found and known is self._made:  # of channels with channels
                            self._end_of(source, _set(ours))
                            self._end_of(source, _set(found.pop(source)))
                            continue
                        found[source] = ours
                        if known is self._weights:
                            self.ends.setdefault(source, Ends(self._counts[source]))
                    elif known is self._made:
                        self._end_of(source, _set(numbers))
        self._keep(result, found)

    def _keep(self, result: Tensor, found: Numbers) -> None:
        kept = {
            source: numbers for source, numbers in found.items() if numbers.numel() <= LARGEST or 0 in numbers.stride()
        }
        if kept:
            self._made[result] = kept
            self._sets.pop(result, None)

    def _join(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        values, *more = args
        for known in (self._made, self._weights):
            found = {}
            for value in values if any(value not in self._weights for value in values) else ():
                self._note(value, "added")
            for source in {source for value in values for source in known.get(value, ())}:
                pieces = [known.get(value, {}).get(source) for value in values]
                some = tuple(_set(piece) for piece in pieces if piece is not None)
                if known is self._made and len(some) > 1 and not frozenset.intersection(*some):
                    self.ends[source].rejoined.append(some)
                every = [_nothing(value.shape) if p is None else p for value, p in zip(values, pieces)]
                found[source] = func(every, *more, **kwargs)
            if known is self._made:
                self._keep(result, found)
            elif found:
                known[result] = found

    def _convolution(self, value: Tensor, weight: Tensor, *args: Any, result: Tensor) -> None:
        if args[-1] == value.shape[1] == result.shape[1]:  # each channel by itself
            ones = (1,) * (value.ndim - 2)
            self._carry(value, result, lambda n: n.flatten(2)[..., :1].view(*n.shape[:2], *ones).expand(result.shape))
            self._note(weight, "added")
        else:
            self._end(value)
            self._note(weight, "multiplied")

    def _sum(self, value: Tensor, dims: Sequence[int], *_: bool, result: Tensor) -> None:
        """An element that is a sum of outputs has the number of the last, to which the others are added."""
        self._note(value, "lost")
        found = {}
        for source, numbers in self._made.get(value, {}).items():
            moved = numbers.movedim(dims[0], -1)
            once = _once(moved)
            last = once.amax(-1)
            found[source] = last.expand(moved.shape[:-1]).reshape(result.shape)
            rows = once.reshape(-1, once.shape[-1])
            for row in torch.unique(rows[(rows != last.reshape(-1, 1)).any(-1)], dim=0):
                self.ends[source].added.append((_set(row.amax()), _set(row)))
        self._keep(result, found)

    def _pointwise(self, packet: Any, given: Sequence[Tensor], result: Tensor) -> None:
        found: dict[Source, Tensor] = {}
        ended: set[Source] = set()
        for value in given:
            for source, numbers in self._made.get(value, {}).items():
                numbers = numbers.expand(result.shape) if numbers.ndim <= result.ndim else numbers
                other = found.setdefault(source, numbers)
                ours, theirs = _set(numbers), _set(other)
                if ours != theirs and packet in MULTIPLIES:  # a gate and what goes through it
                    self._end_of(source, ours)
                    self._end_of(source, theirs)
                    ended.add(source)
                elif ours != theirs:
                    self.ends[source].added.append((ours, theirs))
        if packet.__name__.rstrip("_") in ACTIVATIONS:
            for source, numbers in found.items():
                self.ends[source].activated.append(_set(numbers))
        of_weights = {}
        for value in given:
            added = value.numel() < result.numel() or value.ndim > 2
            if added:
                self._note(value, "added")
            its = self._weights.get(value, {})
            of_weights.update({s: numbers for s, numbers in its.items() if not (added and s[0] in self.uses)})
        if of_weights and not found:
            self._weights[result] = {source: numbers.expand(result.shape) for source, numbers in of_weights.items()}
        self._keep(result, {source: numbers for source, numbers in found.items() if source not in ended})


class Lists(TorchFunctionMode):
    """``x[..., [-2], :]`` as ``x[..., -2:-1, :]``: on the meta device, torch forgets what is in a list."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(_as_slice(index) for index in args[1])
        return func(*args, **(kwargs or {}))


def _as_slice(index: Any) -> Any:
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


def _without_data(func: Any, args: Any) -> Any:
    """Some result of an operation that needs the data of a tensor; None for any other."""
    if func.overloadpacket is aten._local_scalar_dense and args[0].is_meta:
        return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
    if func.overloadpacket is aten.nonzero and args[0].is_meta:
        return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
    return None


def _set(numbers: Tensor) -> Outputs:
    return frozenset(torch.bincount(_once(numbers).flatten() + 1)[1:].nonzero().flatten().tolist())


def _once(numbers: Tensor) -> Tensor:
    """The numbers without the repetitions of ``expand``."""
    for dim, stride in enumerate(numbers.stride()):
        if stride == 0:
            numbers = numbers.narrow(dim, 0, min(1, numbers.shape[dim]))
    return numbers


def _nothing(shape: Sequence[int]) -> Tensor:
    return torch.tensor(-1, dtype=torch.int32, device="cpu").expand(tuple(shape))


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


# The parts of a weight's outputs

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim")  # of MLA, whose queries are joined again after the rotation


def partition(ends: Ends, module: nn.Module) -> list[Outputs]:
    """The outputs of each matrix in a weight, in their order; nothing if the ``forward`` did not show them.

    The matrices of latent attention are those of DeepSeek's report (arXiv 2405.04434, 2.1): W_UQ and W_QR in the
    queries' weight, W_DKV and W_KR in the one that compresses, W_UK and W_UV in the one that expands.
    """
    found = _exact(_largest(linked(ends.used, ends.added)), ends.count)
    left = [piece for piece in (*ends.used, *ends.left) if len(piece) < ends.count]
    if not found and ends.left:
        joined = [pair for pieces in ends.rejoined for pair in zip(pieces, pieces[1:])]
        found = _exact(_coarsest(linked(left, [*ends.added, *joined])), ends.count)
    sizes = [size for name in LATENT if type(size := getattr(module, name, None)) is int and size > 0]
    if len(found) < 2 and len(sizes) == 2:
        for pieces in (_exact(pieces, ends.count) for pieces in (*ends.rejoined, _coarsest(left))):
            if sorted(len(piece) * sum(sizes) for piece in pieces) == sorted(size * ends.count for size in sizes):
                return pieces
    return found


def linked(sets: Sequence[Outputs], pairs: Sequence[tuple[Outputs, Outputs]]) -> list[Outputs]:
    """The sets, those of outputs that were added to each other as one."""
    found = [*dict.fromkeys(sets)]
    for pair in pairs:
        both = [one for one in found if any(not one.isdisjoint(other) for other in pair)]
        if both:
            found = [one for one in found if one not in both] + [frozenset().union(*both, *pair)]
    return found


def _largest(sets: Sequence[Outputs]) -> list[Outputs]:
    return [one for one in sets if not any(one < other for other in sets)]


def _coarsest(sets: Sequence[Outputs]) -> list[Outputs]:
    """Sets without common outputs, the largest first."""
    found: list[Outputs] = []
    for one in sorted(sets, key=len, reverse=True):
        if all(one.isdisjoint(other) for other in found):
            found.append(one)
    return found


def _exact(sets: Sequence[Outputs], count: int) -> list[Outputs]:
    """The sets in the order of the outputs, if each of ``count`` outputs is in one of them."""
    some = [one for one in sets if one]
    exact = sum(map(len, some)) == count == len(frozenset().union(*some))
    return sorted(some, key=min) if exact else []
