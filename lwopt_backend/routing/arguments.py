"""Arguments for a ``forward`` whose caller is not known: shapes that make it complete, tried on tensors without memory.

Names and defaults suggest the first ones. Where a run stops, the operation that failed says what it wanted: a product
its inputs, a convolution its channels, an embedding integers, a sum equal sizes. The arguments from which its operands
were computed are given that, one change at a time, and a change stays if the next run comes further.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.routing.models import modules_of

TOKENS = 7
MANY = 4096  # for modules that cut what they are given into windows
WIDTHS = 4  # sizes of inputs that are tried
LARGEST = 2**31  # elements of an argument
IMAGES = (
    224,
    64,
    32,
    256,
    84,
    28,
    96,
    384,
    128,
    299,
    512,
    112,
    48,
    160,
    192,
    240,
    16,
)  # heights and widths that are tried, after those that the model names
OF_IMAGES = ("image_size", "img_size", "input_size", "sample_size", "input_resolution", "resolution")
ROTATIONS = ("position_embedding", "rotary", "freqs", "rope")
LIKE_INPUT = ("hidden", "states", "input", "query", "key", "value", "residual", "embeds", "context")
NOT_INPUT = ("past", "cache", "mask", "output", "position")
OF_HEADS = ("qk_rope_head_dim", "rotary_ndims", "rotary_dim", "head_dim", "head_size", "attention_head_size")
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


@dataclass(frozen=True, slots=True)
class Empty:
    """A tensor of ``shape`` on the meta device, by default of the dtype of the module that is given it.

    ``data`` unless it is known to be none, as angles of a rotation.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    data: bool = True

    def made(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype or dtype, device="meta")


@dataclass(frozen=True, slots=True)
class CallArguments:
    """What a ``forward`` is called with, by name; ``Empty`` stands for a tensor. ``first`` are given by position."""

    by_name: Mapping[str, Any]
    first: tuple[str, ...] = ()

    def made(self, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any], dict[int, str], set[int]]:
        """Arguments by position and by name, of that dtype where none is given; the name of the argument of each
        tensor, by id; and the ids of what is no data."""
        whose: dict[int, str] = {}
        constant: set[int] = set()

        def of(value: Any, name: str) -> Any:
            if isinstance(value, Empty):
                tensor = value.made(dtype)
                whose[id(tensor)] = name
                if not value.data:
                    constant.add(id(tensor))
                return tensor
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(of(each, name) for each in value))
            if isinstance(value, (list, tuple)):
                return type(value)(of(each, name) for each in value)
            if isinstance(value, dict):
                made = copy.copy(value)
                for key, each in value.items():
                    made[key] = of(each, name)
                return made
            inside = getattr(value, "__dict__", None)
            if inside and any(isinstance(each, (Empty, list, tuple, dict)) for each in inside.values()):
                changed = copy.copy(value)
                vars(changed).update({key: of(each, name) for key, each in inside.items()})
                return changed
            return value

        made = {name: of(value, name) for name, value in self.by_name.items()}
        return [made.pop(name) for name in self.first], made, whose, constant

    def filled(self, other: CallArguments) -> CallArguments:
        """With the values of another where this one has None, other than rotations, of which there may be none."""
        missing = {
            name: value
            for name, value in other.by_name.items()
            if self.by_name.get(name, value) is None and not any(word in name for word in ROTATIONS)
        }
        return replace(self, by_name={**self.by_name, **missing}) if missing else self

    def changed(self, name: str, value: Any) -> CallArguments:
        return replace(self, by_name={**self.by_name, name: value})

    @property
    def is_huge(self) -> bool:
        """Whether a tensor is larger than anybody's, as changes of changes may become."""
        return any(isinstance(value, Empty) and math.prod(value.shape) > LARGEST for value in self.by_name.values())

    @property
    def key(self) -> Any:
        return tuple((name, repr(value)) for name, value in self.by_name.items())


def taken(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments that its ``forward`` takes."""
    every = inspect.signature(module.forward).parameters.values()
    return [each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def likely(module: nn.Module, params: Sequence[inspect.Parameter], width: int) -> Iterator[CallArguments]:
    """Likely arguments, the likeliest first."""
    inside = (getattr(one, name, None) for one in modules_of(module).values() for name in OF_HEADS)
    size = next((size for size in inside if type(size) is int and size > 0), 2)
    layer = next((key for of in vars(module).values() if type(of) is dict for key in of if type(key) is int), 0)
    turning = any(word in each.name for each in params for word in ROTATIONS)
    full, one, half = (Empty((1, TOKENS, n), data=False) for n in (size, 1, size // 2))
    pairs = [(each, each) for each in (full, one, half)]
    flat, half_flat = (Empty((TOKENS, n), data=False) for n in (size, size // 2))
    matrices = Empty((1, 1, 1, 1, 2, 2), data=False)  # of two numbers each, as Flux has them
    rotations: list[Any] = [*pairs, one, half_flat, (flat, flat), None, matrices] if turning else [None]
    optional = any(is_input(each) and each.default is None for each in params[1:])
    rows = {(1, len(param)) for param in module._parameters.values() if param is not None and param.ndim == 2}
    leads = [(1, TOKENS), (TOKENS,), (1, TOKENS, TOKENS), (1, MANY), *sorted(rows)]
    positional = tuple(each.name for each in params if each.kind is each.POSITIONAL_ONLY)
    for filled, lead, rotation in product((False, True) if optional else (False,), leads, rotations):
        value = Empty((*lead, width))
        given = {each.name: _value(each, number, value, rotation, layer) for number, each in enumerate(params)}
        given.update((each.name, value) for each in params if filled and given[each.name] is None and is_input(each))
        yield CallArguments(given, positional)


def _value(param: inspect.Parameter, number: int, value: Empty, rotation: Any, layer: int) -> Any:
    if number == 0:
        return value
    if param.name.endswith(("idx", "index")) and "Tensor" not in str(param.annotation):
        return layer if param.default is param.empty or "layer" in param.name else param.default
    if any(word in param.name for word in ROTATIONS) and param.default in (None, param.empty):
        return rotation
    if param.default is not param.empty:
        return param.default
    if "seqlens" in param.name or "lengths" in param.name:
        return Empty((2,), torch.int32)
    if "mask" in param.name or "cache" in param.name or "past" in param.name:
        return None
    if "position" in param.name:
        return Empty((1, TOKENS), torch.int64)
    return value if is_input(param) else None


def is_input(param: inspect.Parameter) -> bool:
    return any(word in param.name for word in LIKE_INPUT) and not any(word in param.name for word in NOT_INPUT)


def input_sizes(module: nn.Module, matrices: Sequence[Tensor], shape: Any) -> list[int]:
    """Likely sizes of the inputs: those of the first linears' inputs, then those of the first weights."""
    linears = (one for one in modules_of(module).values() if isinstance(one, nn.Linear))
    inputs = [shape(one.weight)[-1] for one in linears][: WIDTHS // 2]
    sizes = [size for param in matrices for size in (shape(param)[-1], shape(param)[-2])]
    return [*dict.fromkeys([*inputs, *sizes])][:WIDTHS]


# Repairs


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run stopped: the operation with what it was given, and the arguments behind each of its tensors; and the
    ``channels`` that the module's convolutions take."""

    error: Exception
    packet: Any = None
    channels: tuple[int, ...] = ()
    operands: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()  # shapes, and names of arguments

    @property
    def names(self) -> list[str]:
        """The arguments to blame, those of the last operand first."""
        return [*dict.fromkeys(name for _, names in reversed(self.operands) for name in names)]


def repairs(
    given: CallArguments,
    failure: Failure,
    params: Sequence[inspect.Parameter],
    sizes: Sequence[int],
    images: Sequence[int] = (),
) -> Iterator[CallArguments]:
    """Changes of one argument that may bring the next run further, the likeliest first.

    ``sizes`` are likely widths, the module's own first, ``images`` likely heights.
    """
    yield from _asked_for(given, failure, images)
    yield from _unpacked(given, failure, images)
    for each in params:  # which a forward may do without
        if each.name in failure.names and each.default is None and any(word in each.name for word in ROTATIONS):
            yield given.changed(each.name, None)
    empty = [each for each in params if given.by_name.get(each.name) is None and _may_be_tensor(each)]
    needed = sorted(empty, key=lambda each: each.default is not each.empty)
    if needed and (not failure.names or "NoneType" in str(failure.error)):
        required = [each for each in needed if each.default is each.empty]
        for some in [some for some in (required, needed) if some]:
            for way in range(3):
                yield replace(given, by_name={**given.by_name, **{one.name: _first(one, sizes, way) for one in some}})
        for each in needed:
            yield from (given.changed(each.name, value) for value in _anything(each, sizes))
    by_name = {each.name: each for each in params}
    for name in [*failure.names, *(name for name in given.by_name if name not in failure.names)]:
        old = given.by_name.get(name)
        if isinstance(old, Empty) and old.data and name in by_name:
            yield from (given.changed(name, value) for value in _anything(by_name[name], sizes, old) if value != old)


def _may_be_tensor(param: inspect.Parameter) -> bool:
    """Whether its annotation, if it has one, allows a tensor, a list of them, or a number that is needed."""
    said = str(param.annotation)
    if param.annotation is param.empty or "Tensor" in said or "Any" in said:
        return True
    return param.default is param.empty and not any(word in said for word in ("dict", "Mapping", "Callable", "str"))


def _first(param: inspect.Parameter, sizes: Sequence[int], way: int) -> Any:
    found = [*islice(_anything(param, sizes), way + 1)]
    return found[-1]


def _asked_for(given: CallArguments, failure: Failure, images: Sequence[int]) -> Iterator[CallArguments]:
    """What the operation that failed wanted."""
    shapes = [shape for shape, _ in failure.operands]
    if failure.packet is aten.im2col:
        for name in failure.names:
            for size in dict.fromkeys((*images, *IMAGES)):
                yield given.changed(name, Empty((1, 1, size, size)))
    if failure.packet is aten.convolution and len(shapes) > 1:
        weight = shapes[1]
        for name in failure.operands[0][1]:
            for size in dict.fromkeys((*images, *IMAGES)):
                yield given.changed(name, Empty((1, weight[1], *[size] * (len(weight) - 2))))
    elif failure.packet is aten.embedding and len(shapes) > 1:
        for name in failure.operands[1][1]:
            old = given.by_name.get(name)
            if isinstance(old, Empty):
                for shape in ((1, TOKENS), (1,), old.shape[:-1]):
                    yield given.changed(name, Empty(shape, torch.int64))
    if failure.packet in PRODUCTS and len(shapes) > 1 and len(shapes[-2]) > 1 and len(shapes[-1]) > 1:
        have, want = shapes[-2][-1], shapes[-1][-2]
        for name in failure.operands[-2][1]:
            yield from _as_a_part(given, name, have, want)
        for name in failure.operands[-1][1]:
            yield from _as_a_part(given, name, want, have)
    if "used as indices" in str(failure.error):  # rows of a table, table[ids]
        for name in failure.names or given.by_name:
            old = given.by_name.get(name)
            if isinstance(old, Empty) and old.data and old.dtype is None:
                for shape in ((1, TOKENS), (1,), old.shape[:-1]):
                    yield given.changed(name, Empty(shape, torch.int64))
    for name in failure.names:
        old = given.by_name.get(name)
        if isinstance(old, Empty) and len(old.shape) > 3 and len({*old.shape[2:]}) == 1:  # an image
            for size in dict.fromkeys((*images, *IMAGES)):
                yield given.changed(name, replace(old, shape=(*old.shape[:2], *[size] * len(old.shape[2:]))))
    if "channels" in str(failure.error) and failure.packet is None:  # a norm of channels, before any convolution
        for name, old in given.by_name.items():
            for channels in failure.channels if isinstance(old, Empty) and old.data else ():
                yield from (given.changed(name, Empty((1, channels, *[IMAGES[1]] * dims))) for dims in (2, 1))
    if (said := BEYOND.search(str(failure.error))) is not None:
        for name, old in given.by_name.items():  # pairs of numbers, such as a graph's edges
            if isinstance(old, Empty) and old.shape[:1] == (int(said[2]),):
                yield given.changed(name, Empty((int(said[1]) + 1, TOKENS), torch.int64))
    for (ours, names), (theirs, _) in product(failure.operands, failure.operands):
        for have, want in dict.fromkeys(_unequal(failure.packet, ours, theirs)):
            for name in names:
                yield from _resized(given, name, have, want, batched=failure.packet is aten.convolution)


BEYOND = re.compile(r"index (\d) is out of bounds for dimension 0 with size (\d+)")
UNPACKED = re.compile(r"not enough values to unpack \(expected (\d), got (\d)\)")


def _unpacked(given: CallArguments, failure: Failure, images: Sequence[int]) -> Iterator[CallArguments]:
    """Images and videos, where code takes the dimensions of what it is given apart."""
    if (said := UNPACKED.search(str(failure.error))) is None:
        return
    want, have = map(int, said.groups())
    height = next(iter(images), IMAGES[1])
    for name, old in given.by_name.items():
        if isinstance(old, Empty) and len(old.shape) == have and want in (4, 5):
            for channels in dict.fromkeys((*failure.channels, old.shape[-1])):
                for frames in ((), (1,))[want - 4 : want - 3]:
                    yield given.changed(name, replace(old, shape=(1, *frames, channels, height, height)))
                    yield given.changed(name, replace(old, shape=(1, channels, *frames, height, height)))


def _unequal(packet: Any, ours: Sequence[int], theirs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sizes that differ where an operation needs equal ones, and what they would have to be."""
    if packet in PRODUCTS and len(ours) > 1 and len(theirs) > 1:
        yield ours[-1], theirs[-2]
        yield ours[-2], theirs[-1]
    for have, want in zip(reversed(ours), reversed(theirs)):
        if have != want and want > 1:
            yield have, want


def _resized(given: CallArguments, name: str, have: int, want: int, batched: bool) -> Iterator[CallArguments]:
    """An argument, or the members of a pair, with ``want`` in place of one dimension of ``have``.

    Not of the first of three or more, if it is ``batched``: a convolution would take one image for a batch of channels.
    """
    old = given.by_name.get(name)
    several = isinstance(old, (list, tuple)) and bool(old) and all(isinstance(each, Empty) for each in old)
    of: Any = old[0] if several else old  # type: ignore[index]
    for dim, size in enumerate(of.shape) if isinstance(of, Empty) and have != want else ():
        if size == have and not (batched and dim == 0 and len(of.shape) > 2):
            made = replace(of, shape=(*of.shape[:dim], want, *of.shape[dim + 1 :]))
            yield given.changed(name, type(old)(made for _ in old) if several else made)  # type: ignore[misc,union-attr]


def _as_a_part(given: CallArguments, name: str, have: int, want: int) -> Iterator[CallArguments]:
    """An argument that makes ``want`` inputs of ``have``, where these are a concatenation of it with something else, or
    the patches of an image with all its channels."""
    old = given.by_name.get(name)
    if not isinstance(old, Empty) or have == want or not old.shape:
        return
    if len(old.shape) > 3 and old.shape[1] * want % have == 0:
        yield given.changed(name, replace(old, shape=(old.shape[0], old.shape[1] * want // have, *old.shape[2:])))
    if len(old.shape) < 4 and old.shape[-1] + want - have > 0:
        yield given.changed(name, replace(old, shape=(*old.shape[:-1], old.shape[-1] + want - have)))


def _anything(param: inspect.Parameter, sizes: Sequence[int], old: Empty | None = None) -> Iterator[Any]:
    """Values for an argument of which only the name and the annotation are known; in place of an ``old`` one, those
    like it first."""
    leads = ((1,), (1, TOKENS), (1, 1), (TOKENS,))
    wide = [Empty((*lead, size)) for size in sizes for lead in leads]
    wide += [Empty((1, TOKENS, TOKENS, size)) for size in sizes]
    integers = [Empty(shape, torch.int64) for shape in ((1,), (1, TOKENS), (TOKENS, 2))]
    masks = [Empty(shape, torch.bool) for shape in ((1, TOKENS), (1, 1, TOKENS, TOKENS), (TOKENS, TOKENS))]
    one = [Empty((1,))]
    lists: list[Any] = [[each] for each in wide[:2]]
    rotation = Empty((1, TOKENS, 2), data=False)
    others: list[Any] = [*lists, (rotation, rotation), 1, 1.0]
    name, said = param.name.lower(), str(param.annotation)
    if (
        "Tensor" not in said
        and param.annotation is not param.empty
        and any(w in said for w in ("int", "float", "bool"))
    ):
        yield from (1, 1.0)
        return
    if "mask" in name:
        order = [*masks, *one, *wide, *integers]
    elif name.startswith(("t", "sigma", "time", "step")) and "temb" not in name and "text" not in name:
        order = [*one, *integers, *wide, *masks]
    elif (
        name in ("y", "labels", "label")
        or "class" in name
        or name.endswith(("ids", "idx", "index", "indices", "tokens"))
    ):
        order = [*integers, *wide, *one, *masks]
    else:
        order = [*wide, *one, *integers, *masks]
    if old is not None:
        order = sorted(order, key=lambda each: (each.dtype != old.dtype, len(each.shape) != len(old.shape)))
        others = []
    in_lists = not old and "list" in said.lower() and "Tensor" in said
    yield from [*others, *order] if in_lists else [*order, *others]


def image_sizes(module: nn.Module) -> Iterator[int]:
    """Heights of images that the modules or a configuration name."""
    for one in modules_of(module).values():
        for of in (one, getattr(one, "config", None), getattr(one, "default_cfg", None)):
            for name in OF_IMAGES:
                size = of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
                size = size[-1] if isinstance(size, (list, tuple)) and size else size
                if type(size) is int and size > 0:
                    yield size
