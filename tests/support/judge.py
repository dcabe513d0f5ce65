"""What a forward pass does with each weight, seen from outside: by where the inputs of operations lie.

A view lies in the storage of what it is a view of, so its strides say which elements it has. The judge keeps, for each
element of a storage, the number of the weight's element that it is, or of the output that it is computed from, and runs
what moves elements on the numbers as well. A product begins outputs; the rules below say which outputs are one matrix.
Nothing here is the package's.

1. What one operation takes in one operand, a product, a norm or a convolution, is one matrix, along every axis; along
   the batch of a product with a stack of weights, each slice by itself. What a model returns in one tensor as well.
2. Element-wise operations pair: their result has the outputs of all operands, position by position, and what takes it
   takes the outputs of each operand apart, so that gates, shifts and what is added to a stream do not join.
3. Unless as many positions have a set of outputs as it has outputs: a rotation, which maps one space to itself.
4. Slices of a weight that different products, or different places in a batch, multiply are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# By the name of an operation, which of its arguments are multiplied
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "addmv": (1, 2)}
PRODUCTS |= {"_grouped_mm": (0, 1), "addbmm": (1, 2), "addmm_": (1, 2), "baddbmm_": (1, 2), "dot": (0, 1)}
PRODUCTS |= {"_addmm_activation": (1, 2)}
MAKES_NEW = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty"}
MAKES_NEW |= {"new_ones", "new_full", "new_empty_strided", "randint_like", "argmax", "argmin", "argsort", "bincount"}
MAKES_NEW |= {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique_dim", "_unique2", "searchsorted"}
ELEMENTWISE = {"hardswish", "hardswish_", "_prelu_kernel", "native_dropout", "tril", "triu", "nan_to_num", "complex"}
ELEMENTWISE |= {"polar", "_to_copy", "where", "log_sigmoid_forward", "masked_fill", "masked_fill_", "clamp_", "_conj"}
ELEMENTWISE |= {"lift_fresh", "contiguous", "hardsigmoid", "hardtanh", "hardtanh_", "rrelu_with_noise", "bernoulli"}
ELEMENTWISE |= {"glu", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "_conj_physical"}
MOVES = {"roll", "flip", "repeat", "cat", "stack", "index", "index_select", "gather", "constant_pad_nd", "im2col"}
MOVES |= {"reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d"}
MOVES |= {"slice_scatter", "select_scatter", "pixel_shuffle", "pixel_unshuffle", "unfold_copy", "masked_select"}
MOVES |= {"repeat_interleave", "upsample_nearest2d", "upsample_nearest1d", "upsample_nearest3d", "index_put"}
MOVES |= {"index_put_", "_unsafe_index", "channel_shuffle", "scatter", "scatter_", "unfold", "diagonal_copy"}
BY_CHANNEL = {"avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
BY_CHANNEL |= {"upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "avg_pool1d"}
BY_CHANNEL |= {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}
BY_CHANNEL |= {"max_pool3d_with_indices", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "adaptive_max_pool2d"}
BY_CHANNEL |= {
    "grid_sampler_2d",
    "_native_batch_norm_legit_functional",
    "batch_norm_with_update",
    "adaptive_avg_pool1d",
}
NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "_weight_norm_interface"}
ALONG = {"_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "sort", "topk"}  # along a dimension
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "logsumexp", "var", "std", "var_mean", "prod", "median"}
REDUCTIONS |= {"linalg_vector_norm", "norm", "any", "all", "aminmax", "nansum"}
FEW = 8  # runs that a reduction may pair
MOST_PLANES = 6  # after which outputs of different positions share one
LARGEST = 2**24  # elements of a tensor whose outputs are kept
WHOLE = 2**16  # elements of a weight that are all kept
Outputs = frozenset[int]
Planes = list[Tensor]  # numbers of an element's outputs, one for each of several, from one; zero for none


@dataclass
class Origin:
    """What is known of the elements of one storage, which have ``itemsize`` bytes each.

    ``level``: 0 for constants and weights, 1 for what is computed from inputs, 2 from weights as well. ``fresh`` are
    the weights of which this is the output, after element-wise operations and moves alone; ``mixed`` if more is in it,
    ``reduced`` if a reduction is.
    """

    ref: StorageWeakRef
    itemsize: int
    level: int = 0
    fresh: frozenset[str] = frozenset()
    mixed: bool = False
    reduced: bool = False
    outputs: dict[str, Planes] = field(default_factory=dict)  # flat, over the storage
    elements: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Seen:
    """What operations did with one weight.

    ``blocks``: the numbers of its elements in each product, as (outputs, inputs), of a large weight the first, the
    second and the last input. ``taken``: outputs, by the numbers of
    their first elements plus one, that are one matrix. ``uses``: other than products.
    """

    shape: torch.Size
    blocks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    taken: set[Outputs] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    returned: bool = False
    consumed: bool = False  # an output was read by a product, a norm, an attention, or joins a stream
    with_others: set[str] = field(default_factory=set)  # weights whose outputs are summed with its own

    def matrices(self) -> list[Tensor] | None:
        """Which elements each matrix has, as (outputs, inputs); None if an output ends nowhere, or is in two ways.

        A stack's slices that no product multiplied, such as experts that no token chose, have none.
        """
        rows: dict[int, Tensor] = {}
        for block in self.blocks.values():
            for row in block:
                if not torch.equal(rows.setdefault(int(row[0]) + 1, row), row):
                    return None
        groups = self.groups()
        elements = torch.cat([row for row in rows.values()])
        if sum(map(len, groups)) != len(rows) or len(elements.unique()) != len(elements):
            return None
        return [torch.stack([rows[label] for label in sorted(group)]) for group in groups]

    def groups(self) -> list[Outputs]:
        """Outputs that are one matrix; disjoint, in order."""
        found: list[set[int]] = []
        for apart in _joined(frozenset((block[:, 0] + 1).tolist()) for block in self.blocks.values()):
            found += _joined(one & apart for one in self.taken if one & apart)
        return sorted(map(frozenset, found), key=min)


def _joined(sets: Any) -> list[set[int]]:
    """Sets that have common members, joined."""
    found: list[set[int]] = []
    for one in sorted({*sets}, key=len, reverse=True):
        touching = [other for other in found if other & one]
        found = [other for other in found if not other & one] + [one.union(*touching)]
    return found


class JudgeFailed(BaseException):
    """The judge, and not the model, is wrong; no model's own ``except Exception`` hides it."""


class Judge(TorchDispatchMode):
    """Follows the weights of ``model``; ``seen`` is by their names. Call ``begins`` and ``ends`` around a pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = {name: param for name, param in model.named_parameters() if param.ndim > 1}
        self.seen = {name: Seen(param.shape) for name, param in named.items()}
        self._named = {param.untyped_storage()._cdata: (name, param) for name, param in named.items()}
        self._origins: dict[int, Origin] = {}
        self._settled = set[str]()
        self._numbers = torch.arange(1, LARGEST + 1, dtype=torch.int32, device="cpu")
        self._all = {param.untyped_storage()._cdata for param in model.parameters()}

    def begins(self, *inputs: Any) -> None:
        """Forget what was computed: a pass with these inputs follows."""
        self._origins = {}
        for value in _tensors(inputs):
            self._origin(value).level = 1

    def ends(self, result: Any) -> None:
        """Note what the pass returned."""
        for value in _tensors(result) if not isinstance(result, Tensor) else [result]:
            if (origin := self._known(value)) is not None and value.is_floating_point():
                self._take(value)
                for name in origin.fresh:
                    self.seen[name].returned = True

    def is_head(self, name: str) -> bool:
        """Whether a pass returned its outputs, and nothing but another such weight's was added or read them before."""
        seen = self.seen[name]
        return seen.returned and not any(self.seen[one].consumed for one in (name, *seen.with_others))

    # Origins

    def _known(self, tensor: Tensor) -> Origin | None:
        found = self._origins.get(tensor.untyped_storage()._cdata)
        return None if found is None or found.ref.expired() else found

    def _origin(self, tensor: Tensor) -> Origin:
        """What is known of a tensor's storage, begun here."""
        found = self._known(tensor)
        if found is None:
            if len(self._origins) % 500 == 499:
                self._origins = {key: one for key, one in self._origins.items() if not one.ref.expired()}
            found = Origin(StorageWeakRef(tensor.untyped_storage()), tensor.itemsize)
            self._origins[tensor.untyped_storage()._cdata] = found
        return found

    def _level(self, tensor: Tensor) -> int:
        origin = self._known(tensor)
        return 0 if origin is None else origin.level

    def _outputs(self, tensor: Tensor) -> dict[str, Planes]:
        origin = self._known(tensor)
        if origin is None or tensor.numel() > LARGEST:
            return {}
        seen = {
            name: [_seen_as(tensor, one) for one in planes]
            for name, planes in _at(origin, tensor).items()
            if name not in self._settled
        }
        kept = {name: [one for one in planes if bool(one.any())] for name, planes in seen.items()}
        return {name: planes for name, planes in kept.items() if planes}

    def _elements(self, tensor: Tensor) -> dict[str, Tensor]:
        """The numbers of a weight's elements, plus one, where ``tensor`` is a view or a copy of some."""
        found = self._named.get(tensor.untyped_storage()._cdata)
        if found is not None and found[1].numel() <= LARGEST:
            name, param = found
            numbers = self._numbers[: param.numel()]
            start = tensor.storage_offset() - param.storage_offset()
            return {name: numbers.as_strided(tensor.shape, tensor.stride(), start)}
        origin = self._known(tensor)
        if origin is None or found is not None:
            return {}
        return {name: _seen_as(tensor, flat) for name, flat in origin.elements.items()}

    def _put(self, tensor: Tensor, of: dict[str, Planes], elements: Mapping[str, Tensor] = {}) -> None:  # noqa: B006
        """Note the outputs and elements that a tensor's elements have from now on."""
        if not 0 < tensor.numel() <= LARGEST or not (of or elements or self._known(tensor)):
            return
        origin = self._origin(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        origin.itemsize = tensor.itemsize
        for name in {*of, *origin.outputs}:
            flat = origin.outputs.setdefault(name, [])
            while len(flat) < len(of.get(name, ())):
                flat.append(torch.zeros(size, dtype=torch.int32, device="cpu"))
            for plane, one in zip(flat, [*of.get(name, ()), *[torch.zeros((), dtype=torch.int32)] * len(flat)]):
                _seen_as(tensor, plane).copy_(one)
        for name, one in elements.items():
            flat_one = origin.elements.setdefault(name, torch.zeros(size, dtype=torch.int32, device="cpu"))
            _seen_as(tensor, flat_one).copy_(one)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = without_values(func, args)
        result = func(*args, **kwargs) if result is None else result
        given = [value for value in _tensors((args, kwargs)) if value.numel()]
        if any(self._known(value) or value.untyped_storage()._cdata in self._all for value in given):
            try:
                with torch.device("cpu"):
                    self._note(func, given, args, kwargs, result)
            except Exception as error:
                raise JudgeFailed(f"{func}: {error!r}") from error
        return result

    def _note(self, func: Any, given: list[Tensor], args: Any, kwargs: Any, result: Any) -> None:
        name, made = func.overloadpacket.__name__, [value for value in _tensors(result)]
        stores = {value.untyped_storage()._cdata for value in given}
        changes = func._schema.is_mutable
        if name in MAKES_NEW or not made:
            return
        if all(value.untyped_storage()._cdata in stores for value in made) and not changes:
            return  # views
        arguments = _bound(func, args, kwargs)
        if name in PRODUCTS or name == "linear":
            self._product(name, args, made[0])
        elif name == "convolution":
            self._convolution(args, made[0])
        elif name in ("embedding", "_embedding_bag", "embedding_bag"):
            self._mark(args[:1], "looked up")
            self._make(made, 2, mixed=True)
        elif "scaled_dot_product" in name or "flash_attention" in name:
            self._end(made, given[:3])
        elif name == "copy_":
            self._like(
                args[0], [args[1]], {n: [_fit(p, args[0]) for p in ps] for n, ps in self._outputs(args[1]).items()}
            )
            if not self._level(args[1]):
                elements = {n: one.expand(args[0].shape) for n, one in self._elements(args[1]).items()}
                self._put(args[0], self._outputs(args[0]), elements)
        elif name in MOVES:
            self._move(func, name, args, kwargs, given, made[0])
        elif (
            name in ELEMENTWISE or torch.Tag.pointwise in func.tags or name.rstrip("_") in ("add", "mul", "sub", "div")
        ):
            self._pointwise(name, args, given, made[0])
        elif name in BY_CHANNEL:
            self._by_channel(name, given, made[0])
        elif name in NORMS:
            self._end(made, given[:1])
            self._mark(given[1:], "scaled")
        elif name in ALONG:
            self._along(arguments, given[0], made)
        elif name in REDUCTIONS and not changes:
            self._reduce(arguments, given[0], made)
        else:
            self._mark(given, "computed")
            self._end(made, given)

    def _make(
        self, made: Sequence[Tensor], level: int, fresh: frozenset[str] = frozenset(), mixed: bool = False
    ) -> None:
        for value in made:
            origin = self._origin(value)
            origin.level, origin.fresh, origin.mixed = level, fresh, mixed

    def _mark(self, given: Sequence[Tensor], use: str) -> None:
        for value in given:
            found = self._named.get(value.untyped_storage()._cdata)
            for name in self._elements(value) if found is None else found[:1]:
                self.seen[name].uses.add(use)

    def _consume(self, value: Tensor) -> None:
        if (origin := self._known(value)) is not None:
            for name in origin.fresh:
                self.seen[name].consumed = True

    def _end(self, made: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """An operation takes what each operand has; nothing of it goes on."""
        for value in given:
            self._take(value)
            self._consume(value)
        if any(map(self._level, given)):
            self._make(made, 2, mixed=True)

    def _like(self, made: Tensor, given: Sequence[Tensor], of: dict[str, Planes]) -> None:
        """``made`` is of the operands' level, and has these outputs."""
        known = [origin for origin in map(self._known, given) if origin is not None]
        if known:
            level = max(origin.level for origin in known)
            fresh, mixed = frozenset[str]().union(*(origin.fresh for origin in known)), any(o.mixed for o in known)
            self._make([made], level, fresh, mixed)
            self._origin(made).reduced = any(origin.reduced for origin in known)
        self._put(made, of)

    # Products

    def _product(self, name: str, args: Any, result: Tensor) -> None:
        left, right = (args[0], args[1].mT) if name == "linear" else (args[place] for place in PRODUCTS[name])
        if right.ndim == 1:
            right, result = right[:, None], result[..., None]
        left = left[None] if left.ndim == 1 else left
        if name not in ("linear", "mm", "bmm", "mv", "dot", "_grouped_mm"):
            self._mark(args[:1], "added")
        of_left, of_right = self._multiplied(left, -1), self._multiplied(right, -2)
        if of_left and of_right:  # a table as an input, or a weight made of two
            if not _repeats(of_left) and not _is_stored_outputs_first(right):
                self._mark([left, right], "computed")
                return
            self._mark([left], "joined")
            of_left = {}
        goes_on: dict[str, Planes] = {}
        fresh, passes = frozenset[str](), False
        for value, other, of_other, axis in ((left, right, of_right, -1), (right, left, of_left, -2)):
            if of_other or self._level(value):
                by_slice = value.ndim == 3 and any(_varies(numbers, 0) for numbers in of_other.values())
                contracted, others = _split(self._outputs(value), axis)
                self._taken(contracted, by_slice)
                for weight, planes in others.items() if value.ndim == result.ndim else ():
                    goes_on.setdefault(weight, []).extend(p.amax(axis, True).expand(result.shape) for p in planes)
                if of_other or self._level(other) > 1:
                    self._consume(value)
                elif (origin := self._known(value)) is not None and not contracted:
                    fresh, passes = origin.fresh, True
        begun = frozenset({*of_left, *of_right})
        if begun or self._level(left) or self._level(right):
            self._make([result], 2, begun or fresh, mixed=not begun and not passes)
        for weight, numbers in (of_right or of_left).items():
            if name == "_grouped_mm" and numbers.ndim > 2:
                numbers = numbers[0]  # of the first group; the others are alike
            outputs_first = numbers.transpose(-1, -2) if of_right else numbers
            self._begin(weight, outputs_first, result)
            first = outputs_first[..., 0]
            labels = first.unsqueeze(-2 if of_right else -1)
            goes_on[weight] = [labels.expand(result.shape)]
        self._put(result, goes_on)

    def _multiplied(self, value: Tensor, axis: int) -> dict[str, Tensor]:
        """The elements of weights that are contracted along an axis; of large weights the ends of that axis alone."""
        if self._level(value):
            return {}
        found = self._named.get(value.untyped_storage()._cdata)
        if found is not None and found[1].numel() > WHOLE:
            name, param = found
            numbers = torch.full((1,) * value.ndim, value.storage_offset() - param.storage_offset() + 1)
            for place, (size, stride) in enumerate(zip(value.shape, value.stride())):
                ends = place == axis % value.ndim and size > 3
                along = torch.tensor([0, 1, size - 1]) if ends else torch.arange(size)
                numbers = numbers + (along * stride).view([-1 if n == place else 1 for n in range(value.ndim)])
            elements = {name: numbers.int()}
        else:
            elements = self._elements(value)
        return {n: one for n, one in elements.items() if value.shape[axis] == 1 or _varies(one, axis)}

    def _begin(self, weight: str, outputs_first: Tensor, result: Tensor) -> None:
        slices = [outputs_first] if outputs_first.ndim == 2 else [*outputs_first]
        if outputs_first.ndim == 3 and not _varies(outputs_first, 0):
            slices = slices[:1]
        for block in slices:
            key = tuple(block.shape), int(block[0, 0]), int(block[-1, 0]), int(block[0, -1])
            self.seen[weight].blocks.setdefault(key, block - 1)

    def _convolution(self, args: Any, result: Tensor) -> None:
        """Depthwise ones take channels on; the outputs of convolutions themselves are not followed."""
        value, weight, transposed, groups = args[0], args[1], args[6], args[8]
        kept, channels = self._outputs(value), value.shape[1]
        goes_on: dict[str, Planes] = {}
        if groups == channels and not transposed:
            for name, planes in kept.items():
                flat = [one.flatten(2)[..., :1].repeat_interleave(result.shape[1] // channels, 1) for one in planes]
                goes_on[name] = [_fit(one.view(*one.shape[:2], *[1] * (result.ndim - 2)), result) for one in flat]
        else:
            self._take(value)
        self._consume(value)
        if self._level(weight):
            self._take(weight)
            self._consume(weight)
        else:
            self._mark([weight], "convolved")
        self._make([result], 2, mixed=True)
        self._put(result, goes_on)

    # Element by element

    def _pointwise(self, name: str, args: Any, given: list[Tensor], result: Tensor) -> None:
        if name == "glu":
            given = [*args[0].chunk(2, args[1] if len(args) > 1 else -1)]
        elif name.startswith(("index_add", "scatter_add", "scatter_reduce")):
            self._scattered(name, args, result)
            return
        if not any(map(self._level, given)):  # weights and constants
            elements: dict[str, Tensor] = {}
            for value in given:
                elements |= {n: _fit(numbers, result) for n, numbers in self._elements(value).items()}
            self._put(result, {}, elements)
            return
        weighs = name.rstrip("_") in ("mul", "div", "addcmul")
        self._mark([value for value in given if not self._level(value)], "scaled" if weighs else "added")
        self._note_sums(given, weighs)
        of: dict[str, Planes] = {}
        for value in given:
            for weight, planes in self._outputs(value).items():
                for one in planes:
                    _add_plane(of.setdefault(weight, []), _fit(one, result))
        reduced = any(origin is not None and origin.reduced for origin in map(self._known, given))
        self._like(result, given, of)
        self._origin(result).reduced = reduced

    def _note_sums(self, given: Sequence[Tensor], weighs: bool) -> None:
        """Which outputs meet others here. Those that meet something mixed, or their own norm, are no head's."""
        known = [origin for origin in map(self._known, given) if origin is not None and origin.level > 1]
        for origin in known:
            for other in known:
                for name in origin.fresh if other is not origin else ():
                    self.seen[name].with_others |= other.fresh - {name}
                    if other.mixed or weighs and other.reduced and name in other.fresh:
                        self.seen[name].consumed = True

    def _scattered(self, name: str, args: Any, result: Tensor) -> None:
        into, dim, index, source = args[:4]
        of = {weight: list(planes) for weight, planes in self._outputs(into).items()}
        self._note_sums([into, source], False)
        for weight, planes in self._outputs(source).items():
            for one in planes:
                new = torch.zeros(result.shape, dtype=torch.int32, device="cpu")
                if index.is_meta:
                    self._take(source)
                elif name.startswith("index_add"):
                    new.index_copy_(dim, index, one.contiguous())
                else:
                    new.scatter_(dim, index, one.contiguous())
                _add_plane(of.setdefault(weight, []), new)
        self._like(result, [into, source], of)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], result: Tensor) -> None:
        moved = [value for value in given if value.is_floating_point() or value.is_complex()]
        if not moved:  # indices
            self._like(result, given, {})
            return
        if name == "constant_pad_nd":
            args = (*args[:2], 0)
        if _reads_meta(given, moved):
            self._moved_on_meta(args, moved, result)
            return
        of: dict[str, Planes] = {}
        outputs = {id(value): self._outputs(value) for value in moved}
        for weight in {weight for planes in outputs.values() for weight in planes}:
            for number in range(max(len(planes.get(weight, ())) for planes in outputs.values())):

                def plane(value: Tensor, weight: str = weight, number: int = number) -> Tensor:
                    planes = outputs.get(id(value), {}).get(weight, [])
                    none = torch.zeros(value.shape, dtype=torch.int32, device="cpu")
                    return planes[number].contiguous() if number < len(planes) else none

                of.setdefault(weight, []).append(_run(func, args, kwargs, plane))
            if name == "cat":
                of[weight] = [*_side_by_side(of[weight], args)]
        elements: dict[str, Tensor] = {}
        if any(map(self._level, moved)):
            self._mark([value for value in moved if not self._level(value)], "joined")
        else:
            numbers = {id(value): self._elements(value) for value in moved}
            for weight in {weight for one in numbers.values() for weight in one}:

                def element(value: Tensor, weight: str = weight) -> Tensor:
                    none = torch.zeros(value.shape, dtype=torch.int32, device="cpu")
                    return numbers.get(id(value), {}).get(weight, none).contiguous()

                elements[weight] = _run(func, args, kwargs, element)
        self._like(result, moved, of)
        self._put(result, of, elements)

    def _moved_on_meta(self, args: Any, moved: Sequence[Tensor], result: Tensor) -> None:
        """Indices without values: outputs go on where they do not vary along what is indexed."""
        of: dict[str, Planes] = {}
        for name, planes in self._outputs(moved[0]).items():
            if moved[0].ndim == result.ndim and moved[0].shape[-1] == result.shape[-1]:
                last = [one.flatten(0, -2).amax(0) for one in planes]
                if not any(_varies(one.flatten(0, -2), 0) for one in planes):
                    of[name] = [one.expand(result.shape) for one in last]
        for value in moved:
            self._take(value, self._outputs(value).keys() - of.keys())
        self._mark(moved, "looked up")
        self._like(result, moved, of)

    def _by_channel(self, name: str, given: list[Tensor], result: Tensor) -> None:
        value, of = given[0], dict[str, Planes]()
        for weight, planes in self._outputs(value).items():
            per = [one.flatten(2).amax(-1) if one.ndim > 2 else one for one in planes]
            if value.ndim == result.ndim and value.shape[:2] == result.shape[:2]:
                of[weight] = [_fit(one.view(*one.shape, *[1] * (result.ndim - 2)), result) for one in per]
            else:
                self._take(value, {weight})
        if "norm" in name:
            self._consume(value)
            self._mark(given[1:], "scaled")
            self._make([result], 2, mixed=True)
            self._put(result, of)
        else:
            self._like(result, [value], of)

    def _along(self, arguments: Mapping[str, Any], value: Tensor, made: Sequence[Tensor]) -> None:
        outputs = self._outputs(value)
        self._taken(_split(outputs, arguments.get("dim", -1))[0])
        for one in made:
            self._like(one, [value], outputs if one.shape == value.shape else {})

    def _reduce(self, arguments: Mapping[str, Any], value: Tensor, made: Sequence[Tensor]) -> None:
        if not self._level(value):
            self._mark([value], "computed")
            return
        dims = arguments.get("dim")
        dims = [*range(value.ndim)] if dims is None or dims == [] else [dims] if isinstance(dims, int) else [*dims]
        dims, of = [dim % max(value.ndim, 1) for dim in dims], dict[str, Planes]()
        for name, planes in self._outputs(value).items():
            vary = [dim for dim in dims if any(_varies(one, dim) for one in planes)]
            others = [dim for dim in range(value.ndim) if dim not in dims and any(_varies(one, dim) for one in planes)]
            if not vary:
                of[name] = [one.amax(dims, keepdim=arguments.get("keepdim", False)) for one in planes]
            elif (
                len(dims) == 1 and others and value.shape[dims[0]] < min(FEW, prod(value.shape[dim] for dim in others))
            ):
                for one in planes:
                    for each in one.split(1, dims[0]):
                        _add_plane(of.setdefault(name, []), each if arguments.get("keepdim") else each.squeeze(dims[0]))
            else:
                self._take(value, {name})
        for one in made:
            self._like(one, [value], {n: [_fit(p, one) for p in planes] for n, planes in of.items()})
            self._origin(one).reduced = True

    # Outputs that are one

    def _take(self, value: Tensor, names: Any = None) -> None:
        """An operation takes an operand; ``names`` are those of weights whose outputs count, all by default."""
        outputs = self._outputs(value)
        self._taken({name: planes for name, planes in outputs.items() if names is None or name in names})

    def _taken(self, outputs: Mapping[str, Planes], by_slice: bool = False) -> None:
        for name, planes in outputs.items():
            numbers = torch.stack(planes)
            for axis in range(1, numbers.ndim):
                if not (by_slice and axis == 1) and not _varies(numbers, axis):
                    numbers = numbers.amax(axis, keepdim=True)
            for one in numbers.unbind(1) if by_slice else [numbers]:
                self.seen[name].taken |= {*_one_matrix(one.reshape(len(planes), -1))}
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Follow a weight no further of which one operation took all outputs: whatever follows, it is one matrix."""
        seen = self.seen[name]
        if len(seen.shape) == 2 and len(seen.blocks) == 1:
            outputs = len(next(iter(seen.blocks.values())))
            if outputs in seen.shape and any(len(one) == outputs for one in seen.taken):
                self._settled.add(name)


def judged(model: nn.Module, args: Any, kwargs: Any) -> Judge:
    """The judge, after one pass of a model with memory."""
    judge = Judge(model)
    with torch.no_grad(), plain_operations():
        judge.begins(args, kwargs)
        with judge:
            result = model.eval()(*args, **kwargs)
        judge.ends(result)
    return judge


@contextmanager
def plain_operations() -> Iterator[None]:
    """Without torch's fused encoder layer and oneDNN's recurrent modules, which take all weights at once."""
    before = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch._C._set_mkldnn_enabled(before[1])


def _one_matrix(planes: Tensor) -> Iterator[Outputs]:
    """Outputs that are one matrix if an operation takes positions with these: (outputs of a position, positions)."""
    for plane in planes:
        if numbers := {*plane.unique().tolist()} - {0}:
            yield frozenset(numbers)
    if len(planes) > 1:
        sets, counts = planes.sort(0).values.unique(dim=1, return_counts=True)
        for column, count in zip(sets.T.tolist(), counts.tolist()):
            numbers = {*column} - {0}
            if 1 < len(numbers) <= count:
                yield frozenset(numbers)


def _side_by_side(planes: Planes, args: Any) -> Iterator[Tensor]:
    """Outputs of pieces that are joined along an axis along which no piece's vary, e.g. of tokens, are not one run."""
    pieces, axis = args[0], args[1] if len(args) > 1 else 0
    for plane in planes:
        of_pieces = plane.split([piece.shape[axis] for piece in pieces if piece.numel()], axis)
        found = [{*one.unique().tolist()} - {0} for one in of_pieces]
        some = [one for one in found if one]
        apart = sum(map(len, some)) == len(set().union(*some)) and not any(_varies(one, axis) for one in of_pieces)
        if len(some) < 2 or not apart:
            yield plane
            continue
        for number, one in enumerate(found):
            if one:
                yield torch.cat(
                    [each if n == number else torch.zeros_like(each) for n, each in enumerate(of_pieces)], axis
                )


def _repeats(elements: Mapping[str, Tensor]) -> bool:
    return any(len(one.unique()) < one.numel() for one in elements.values())


def _is_stored_outputs_first(right: Tensor) -> bool:
    """Whether the right operand of a product is the transpose of what is stored, as a linear's weight is."""
    return right.ndim == 2 and right.stride(0) == 1 and right.stride(1) >= right.shape[0] and min(right.shape) > 1


def _add_plane(planes: Planes, new: Tensor) -> None:
    """Add outputs, where an element does not have them already."""
    for one in planes:
        new = torch.where(new == one, 0, new)
    if not bool(new.any()):
        return
    for number, one in enumerate(planes) if len(planes) >= MOST_PLANES else ():
        if not bool((one.bool() & new.bool()).any()):
            planes[number] = one + new
            return
    planes.append(new)


def _split(outputs: Mapping[str, Planes], axis: int) -> tuple[dict[str, Planes], dict[str, Planes]]:
    """Outputs that differ along an axis, and those that do not."""
    differ: dict[str, Planes] = {}
    others: dict[str, Planes] = {}
    for name, planes in outputs.items():
        for one in planes:
            (differ if _varies(one, axis) else others).setdefault(name, []).append(one)
    return differ, others


def _varies(numbers: Tensor, axis: int) -> bool:
    """Whether outputs differ along an axis; elements without outputs do not count."""
    if numbers.shape[axis] < 2:
        return False
    most = numbers.amax(axis)
    least = torch.where(numbers == 0, 2**31 - 1, numbers).amin(axis)
    return bool(((most > 0) & (least != most)).any())


def _fit(numbers: Tensor, to: Tensor) -> Tensor:
    return numbers.expand(to.shape) if numbers.ndim <= to.ndim and numbers.shape != to.shape else numbers


def _seen_as(tensor: Tensor, flat: Tensor) -> Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _at(origin: Origin, tensor: Tensor) -> dict[str, Planes]:
    """Flat outputs, by elements of the tensor's size: complex ones have those of both parts."""
    if tensor.itemsize == origin.itemsize:
        return origin.outputs
    if tensor.itemsize == 2 * origin.itemsize:
        return {name: [one[part::2] for one in planes for part in (0, 1)] for name, planes in origin.outputs.items()}
    if 2 * tensor.itemsize == origin.itemsize:
        return {name: [one.repeat_interleave(2) for one in planes] for name, planes in origin.outputs.items()}
    return {}


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


def _run(func: Any, args: Any, kwargs: Any, number: Callable[[Tensor], Tensor]) -> Tensor:
    """An operation that moves elements, on the numbers in their place."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return number(value).double() if value.is_floating_point() or value.is_complex() else value
        return type(value)(map(replaced, value)) if isinstance(value, (list, tuple)) else value

    result = _functional(func)(*replaced(list(args)), **kwargs)
    return (result if isinstance(result, Tensor) else result[0]).int()


def _functional(func: Any) -> Any:
    name = func.overloadpacket.__name__
    if name.endswith("_"):
        return getattr(getattr(aten, name[:-1]), func._overloadname)
    return func


def _reads_meta(given: Sequence[Tensor], moved: Sequence[Tensor]) -> bool:
    known = {id(value) for value in moved}
    return any(value.is_meta for value in given if id(value) not in known)


def without_values(func: Any, args: Any) -> Any:
    """What an operation that reads a tensor returns for one on the meta device: something."""
    if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
        return None
    if func is aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
    if func is aten.nonzero.default:
        return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.int64)
    if func is aten.equal.default:
        return True
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors([getattr(value, key) for key in value.__dataclass_fields__])
