"""Follows the outputs of weights through a ``forward``, to see which of them are one matrix, and what weights are for.

The principle. Outputs are *together* where one step reads them along one axis: where the next weight contracts them,
where a norm or a softmax reduces them, where they are returned. Outputs are *apart* where they are paired position by
position, A[i] with B[i], in a product, a sum or a comparison (gate and up, shift and scale), or are contracted with
each other (queries and keys). Outputs that are together are one matrix, those that are apart or end in different places
are different ones. Three things look like the one and are the other:

- A rotation adds the halves of a head to each other twice, and the results lie side by side again: as many positions as
  outputs. It maps one space to itself, so the halves stay together. A sum that leaves half as many positions does not.
- What is added to the residual stream ends there for this purpose: two gates that are added to it are apart, although
  the stream has both.
- Runs that were treated in different ways (attention, activation, scaling by data) and then lie side by side for one
  weight are different ones: values of attention beside the outputs of an MLP.

Some things cannot be told apart so and stay together: positions that are folded into channels (a pixel shuffle), groups
that are only summed over (a mean over heads), copies of grouped heads. Together and apart at once is unclear, and is
left whole, with a word.

How: a dispatch mode sees each operation on tensors without memory, and carries along which output of which weight every
element is (``numbered``). Views and copies move these numbers as they move elements.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lwopt_backend.routing import steps
from lwopt_backend.routing.arguments import Failure
from lwopt_backend.routing.copies import codes_of
from lwopt_backend.routing.meta import without_data
from lwopt_backend.routing.numbered import every, reshaped
from lwopt_backend.routing.operations import (
    ADDS,
    ALONG,
    BY_CHANNEL,
    COPIES,
    LINEAR,
    LOOKUPS,
    MOVES,
    MULTIPLIES,
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    ROOTS,
    SUMS,
    WRITES,
    all_tensors,
    aten,
    dims_of,
    flat,
    is_view,
    operands,
    padded,
    repeated,
)
from lwopt_backend.routing.pointwise import pointwise
from lwopt_backend.routing.products import attend, convolution, product, summed
from lwopt_backend.routing.tracks import Tracks, Value

COLLECTIVES = ("c10d", "_c10d_functional")  # in which no other rank would take part


class Stopped(Exception):
    """A followed ``forward`` took more operations than are followed, or meets other ranks."""


class Follow(TorchDispatchMode):
    """Follows the outputs of ``weights``; ``codes`` are those of methods whose variables have the names of parts.

    ``linears`` are the numbers of weights that are known to be multiplied. ``limit`` is the number of operations after
    which ``Stopped`` is raised: unlike a limit of time, it stops all ranks at the same place.
    """

    def __init__(
        self, weights: Sequence[Tensor], codes: Collection[CodeType], linears: Collection[int] = (), limit: int = 10**6
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = Tracks(weights, linears)
        self.steps = 0  # operations on what is followed
        self.operations = self.computations = 0  # the latter are no views, of which more dimensions take more
        self.returned_heads = self.consumed = 0  # weights, a bit each
        self.reads = False  # whether an argument is looked up in an embedding, or goes through a convolution first
        self._packet: Any = None  # the last operation, if it failed
        self._last: Sequence[Tensor] = ()  # what the last one was given
        self._names: list[str] = []
        self._codes, self._limit, self._at = codes, limit, (0, 0)  # the last place in a method

    def begin(self, arguments: Any, whose: Mapping[int, str], constant: Collection[int] = ()) -> None:
        """Note the tensors that the ``forward`` is given: by id, of which argument they are, and those that are no
        data, as angles."""
        self._names = [*dict.fromkeys(whose.values())]
        for tensor in all_tensors(arguments):
            named = 1 << self._names.index(whose[id(tensor)]) if id(tensor) in whose else 0
            self.known.values[id(tensor)] = Value(tensor, data=id(tensor) not in constant, arguments=named)

    def failure(self, error: Exception) -> Failure:
        """Where the ``forward`` stopped, and the arguments behind what the last operation was given."""
        operands = []
        for tensor in self._last:
            value = self.known.values.get(id(tensor))
            mask = value.arguments if value is not None else 0
            names = tuple(name for place, name in enumerate(self._names) if mask >> place & 1)
            operands.append((tuple(tensor.shape), names))
        return Failure(error, self._packet, operands=tuple(operands))

    def returned(self, result: Any) -> None:
        """Note what a ``forward`` returned."""
        for tensor in all_tensors(result):
            value = self.known.values.get(id(tensor))
            if value is not None:
                self.returned_heads |= value.heads
                for source, tracks in self.known.tracks(value).items():
                    self.known.ends[source].returned = True
                    for track in tracks:
                        self.known.end_track(source, track)

    @property
    def heads(self) -> set[int]:
        """The weights whose outputs were returned, and that nothing else reads."""
        found = self.returned_heads & ~self.consumed
        return {number for number in range(found.bit_length()) if found >> number & 1}

    def failed(self, trace: TracebackType | None) -> None:
        """Note what the variables of a ``forward`` that failed have."""
        while trace is not None:
            if trace.tb_frame.f_code in self._codes:
                for value in trace.tb_frame.f_locals.values():
                    for source, outputs in self.known.outputs(value):
                        self.known.ends[source].left.append(outputs)
            trace = trace.tb_next

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.operations >= self._limit:
            raise Stopped(f"more than {self._limit} operations")
        if func.namespace in COLLECTIVES:
            raise Stopped(f"expected a forward of one rank alone, found the collective {func}")
        given = [*flat(args), *flat(kwargs.values())]
        known = [value for tensor in given if (value := self.known.values.get(id(tensor))) is not None]
        self._packet, self._last = func.overloadpacket, given
        result = without_data(func, args, kwargs)
        self.operations += 1
        self.computations += not (is_view(func) or self._packet in RESHAPES)
        self._packet = None
        if known or (self.known.stored and any(self.known.key(tensor) in self.known.stored for tensor in given)):
            with torch._C.DisableTorchFunction():
                self._pass_on(func, given, args, kwargs, result)
        return result

    def _pass_on(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        made = [*flat((result,))]
        self._depend(packet, func, args, kwargs, given, made)
        values = [value for tensor in given if (value := self.known.values.get(id(tensor))) is not None]
        if not any(value.tracks or value.weight or value.derived for value in values) and not self.known.stored:
            return
        self.steps += 1
        is_partial = any(self.known.is_partial(value) for value in values)
        if is_partial:
            self._note_names(given)
        self._carry_on(packet, func, given, args, kwargs, result, made)
        if not is_partial and self._note_owners(made):
            self._note_names(given)

    def _carry_on(
        self, packet: Any, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any, result: Any, made: list[Tensor]
    ) -> None:
        name = packet.__name__
        if packet in PRODUCTS:
            left, right = args[PRODUCTS[packet] : PRODUCTS[packet] + 2]
            product(self.known, left, right, result)
            if PRODUCTS[packet] and id(args[0]) in self.known.values:  # what is added to it, such as a bias
                pointwise(self.known, aten.add, func, [args[0], result], result)
        elif packet in RESHAPES and not isinstance(args[1], torch.dtype):
            old, new = args[0].shape, result.shape
            self.known.carry(args[0], [result], lambda numbers: [reshaped(numbers, old, new)], same=True)
        elif packet in (aten.squeeze_, aten.unsqueeze_):  # as a linear does with one row of inputs
            steps.in_place(self.known, func, args, result)
        elif packet in COPIES:
            self.known.carry(args[0], made[:1], lambda numbers: [numbers], same=True)
        elif packet in MOVES:
            self.known.carry(args[0], [result], lambda numbers: [func(numbers, *args[1:], **kwargs)], same=True)
        elif packet is aten.repeat:
            self.known.carry(args[0], [result], lambda numbers: [repeated(numbers, args[1])], same=True)
        elif packet is aten.constant_pad_nd:
            self.known.carry(args[0], [result], lambda numbers: [padded(numbers, args[1])], same=min(args[1]) >= 0)
        elif packet in (aten.cat, aten.stack):
            steps.join(self.known, packet, args, kwargs, result)
        elif packet is aten.glu:
            steps.gated(self.known, args[0], *args[1:])
        elif packet in NORMS:
            steps.normed(self.known, packet, args, made[0])
        elif packet in REDUCTIONS:
            steps.reduce(self.known, packet, func, args, kwargs, made)
        elif packet in ALONG:
            steps.along(self.known, packet, func, args, kwargs, made)
        elif packet in LOOKUPS:
            steps.look_up(self.known, packet, args, result)
        elif packet in WRITES:
            if packet is aten.copy_ and (value := self.known.values.get(id(args[1]))) is not None:
                self.known.write(args[0], self.known.tracks(value))
        elif packet is aten.convolution:
            convolution(self.known, *args, result=result)
        elif "scaled_dot_product" in name:
            attend(self.known, *args[:3], result=made[0])
        elif any(word in name for word in BY_CHANNEL) and not name.endswith("backward"):
            steps.by_channel(self.known, args[0], made[0])
        elif packet in (aten.index_add_, aten.index_add, aten.scatter_add_, aten.scatter_add):
            steps.add_rows(self.known, args[0], args[1], args[3], result)
        elif packet is aten.view_as_complex:
            steps.as_complex(self.known, args[0], result)
        elif packet is aten.view_as_real:
            self.known.carry(args[0], [result], lambda numbers: [numbers.unsqueeze(-1)], same=True)
        elif is_view(func) and packet is not aten.as_strided:
            steps.view(self.known, func, args, kwargs, made)
        elif (torch.Tag.pointwise in func.tags or packet in LINEAR) and isinstance(result, Tensor):
            pointwise(self.known, packet, func, given, result)
        elif not name.endswith("_like") and not name.startswith("new_"):
            self._unknown(given, made)

    def _unknown(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """An unknown operation ends outputs; what a weight is for is seen in what is done with the result."""
        values = [value for tensor in given if (value := self.known.values.get(id(tensor))) is not None]
        derived = frozenset(number for value in values for number in (*value.derived, *(n for n, _ in value.weight)))
        with_data = any(value.data for value in values)
        for tensor in given:
            self.known.end(tensor)
            if with_data:
                self.known.note(tensor, "lost")
        for tensor in made if not with_data else ():
            self.known.values[id(tensor)].derived = derived

    def _summed(self, func: Any, given: Sequence[Tensor], args: Any, kwargs: Any) -> int:
        """As ``products.summed``; -1 for what was not multiplied element by element."""
        value = self.known.values.get(id(given[0]))
        if value is None or not (value.paired or value.weighed):
            return -1
        return summed(self.known, given[0], dims_of(func, args, kwargs, given[0].ndim)[0])

    def _depend(
        self, packet: Any, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        factors_given = operands(packet, args)
        values = [value for tensor in given if (value := self.known.values.get(id(tensor))) is not None]
        behind = heads = reduced = root = arguments = 0
        data = False
        for value in values:
            arguments |= value.arguments
            behind |= value.behind
            heads |= value.heads
            reduced |= value.reduced
            root |= value.root
            data = data or value.data
        paired = (is_view(func) or packet in RESHAPES) and any(value.paired for value in values)
        is_product = factors_given is not None
        begins = packet is aten.convolution and is_product and any(v.data and not v.behind for v in values)
        if packet is aten.embedding or begins:
            self.reads = self.reads or data
        if factors_given is not None:
            factors = [self.known.values.get(id(tensor)) for tensor in factors_given]
            weights = [value for value in factors if value is not None and not value.data and value.behind]
            first, last = factors[0], factors[-1]
            if packet in PRODUCTS and first is not None and last is not None and _is_given(first) and last.data:
                pass  # sums over positions with weights that the model is given, as a graph's edges
            elif weights or all(value is not None and value.data for value in factors):  # else a constant
                self.consumed |= heads
                heads = 0
                for weight in weights if data else ():
                    heads |= weight.behind
            reduced = root = 0
        elif packet in NORMS:
            self.consumed |= heads
            heads = reduced = root = 0
        elif packet in SUMS and (of_product := self._summed(func, given, args, kwargs)) >= 0:
            self.consumed |= heads
            heads, reduced, root = of_product, 0, 0
        elif packet in REDUCTIONS:
            reduced = heads
            root = heads if packet in (aten.linalg_vector_norm, aten.norm, aten.std) else root
        elif packet in ROOTS:
            root |= reduced
        elif packet in MULTIPLIES and any(a.root & b.heads for a in values for b in values if a is not b):
            self.consumed |= heads
            heads = reduced = root = 0
        elif packet in ADDS and made and made[0].ndim > 1 and self._is_residual(values):
            self.consumed |= heads
            heads = 0
        derived = frozenset() if data else frozenset(n for value in values for n in value.derived)
        for tensor in made:
            value = self.known.values.get(id(tensor))
            if value is None:
                value = self.known.values[id(tensor)] = Value(tensor)
            value.derived, value.weighed, value.paired = derived, None, paired
            value.behind, value.heads, value.reduced, value.root, value.data = behind, heads, reduced, root, data
            value.arguments = arguments

    @staticmethod
    def _is_residual(values: Sequence[Value]) -> bool:
        """Whether a sum adds to what one of its summands was computed from, or to a stream."""
        summands = [value for value in values if value.data and value.behind]
        return any(
            not other.heads or (other.heads & ~value.heads) & value.behind
            for value in summands
            for other in summands
            if other is not value
        )

    def _note_owners(self, made: Sequence[Tensor]) -> bool:
        """Note whose method takes the first outputs of a weight from the others; whether one did."""
        found = False
        for tensor in made:
            for source, outputs in self.known.outputs(tensor):
                ends = self.known.ends[source]
                if not ends.whose and outputs != every(ends.count):
                    frame = self._frame(self._codes)
                    if frame is None:
                        return False
                    owner = frame.f_locals.get(frame.f_code.co_varnames[0])
                    ends.whose, ends.codes = type(owner).__name__, frozenset(codes_of(type(owner)))
                    ends.latent, found = _latent_sizes(owner), True
        return found

    def _note_names(self, given: Sequence[Tensor]) -> None:
        """Note the names under which the method that took outputs apart has them."""
        sources = {source for tensor in given for source, _ in self.known.outputs(tensor)}
        codes = frozenset().union(*(self.known.ends[source].codes for source in sources))
        frame = self._frame(codes)
        if frame is None or (id(frame), frame.f_lasti) == self._at:
            return
        self._at = id(frame), frame.f_lasti
        variables = frame.f_locals
        pairs = ((name, value, alone) for alone in (True, False) for name, value in variables.items())
        for name, value, alone in pairs:
            for source, outputs in self.known.outputs(value, alone=alone):
                ends = self.known.ends[source]
                if frame.f_code in ends.codes:
                    (ends.names if alone else ends.added).setdefault(name, outputs)

    @staticmethod
    def _frame(codes: Collection[CodeType]) -> FrameType | None:
        """The innermost frame of one of these codes."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        return frame


def _is_given(value: Value) -> bool:
    """Whether a tensor is an argument, or was computed from arguments alone."""
    return value.data and not value.behind


# Latent attention

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")


def _latent_sizes(module: Any) -> tuple[int, ...]:
    """The sizes by which a module is latent attention: of queries alone, or of all its weights; none if it is not."""
    sizes = [getattr(module, name, 0) for name in LATENT]
    found = tuple(size if type(size) is int and size > 0 else 0 for size in sizes)
    return found if all(found[:2]) else ()
