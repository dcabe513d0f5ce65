"""The common form of a checkpoint for readers and writers: parameters with lazy tensors, groups, counters."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import os
import traceback
from array import array
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, overload

import torch
from torch import Tensor

from lwopt_backend.checkpoint.errors import DEBUG
from lwopt_backend.checkpoint.errors import CheckpointError as CheckpointError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_BITS[real.dtype.itemsize])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal bit for bit; much faster than ``unequal``."""
    return torch.equal(_bits(one), _bits(other))


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """A mask of the elements whose bits differ, except where both are NaN."""
    differs = _bits(one) != _bits(other)
    differs = differs.any(-1) if one.is_complex() else differs
    if is_trained(one.dtype) and bool(differs.any()):
        differs &= ~(one.isnan() & other.isnan())
    return differs


def is_trained(dtype: torch.dtype) -> bool:
    """Whether parameters have this dtype; all others are buffers'."""
    return dtype.is_floating_point or dtype.is_complex


def infinite(values: Tensor) -> int:
    """The number of non-finite elements. A finite sum proves quickly that all are; an infinite one proves nothing."""
    if not is_trained(values.dtype):
        return 0
    wide = values if values.dtype.itemsize >= 4 or values.dtype == torch.bfloat16 else values.float()
    return 0 if bool(wide.sum().isfinite()) else int((~wide.isfinite()).sum())


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


BLOCK = 2**19  # elements read at once to fill or compare a tensor: 2 MB of fp32; more costs page faults
ReadRange = Callable[[int, int], Tensor]


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor in a file. ``read`` returns it, contiguous and owned by the caller, and keeps nothing.

    One in a file of torch.save can be pickled, as can its pieces and views, so that ranks can exchange them.

    ``where`` describes it in messages: ``"exp_avg of decoder.layers.0... in __0_0.distcp"``. ``read_range`` returns the
    elements [start, stop), flat, if that costs less than reading all. ``stride`` is the saved tensor's, in elements,
    and ``place`` the file and its first byte, if known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    where: str
    read_range: ReadRange | None = None
    stride: tuple[int, ...] | None = None
    place: tuple[str, int] | None = None

    def __reduce__(self) -> Any:
        return LazyTensor, tuple(getattr(self, each.name) for each in fields(self))

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("expected a tensor of the file as it is, found attributes for it")  # in a pickle that is read

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def blocks(self) -> Iterator[Tensor]:
        """Yield all elements in order, flat, ``BLOCK`` at a time; with ``read_range``, no more is in memory."""
        for read in self.block_reads():
            yield from read().view(-1).split(BLOCK)

    def block_reads(self) -> Iterator[Callable[[], Tensor]]:
        """Yield calls that return the elements in order: one per block, or one for all without ``read_range``."""
        if self.read_range is None:
            yield from [self.read] * (self.numel > 0)
            return
        for start in range(0, self.numel, BLOCK):
            yield partial(self.read_range, start, min(start + BLOCK, self.numel))

    def piece(self, start: int, stop: int) -> LazyTensor:
        """Elements [start, stop) of the flattened tensor, as a flat tensor."""
        shape, ranged = (stop - start,), None if self.read_range is None else partial(self._range_of_piece, start)
        return LazyTensor(shape, self.dtype, partial(self._range, start, stop), self.where, ranged)

    def _range(self, start: int, stop: int) -> Tensor:
        return self.read_range(start, stop) if self.read_range else self.read().view(-1)[start:stop].clone()

    def _range_of_piece(self, begin: int, start: int, stop: int) -> Tensor:
        return self._range(begin + start, begin + stop)

    def view(self, shape: Sequence[int]) -> LazyTensor:
        shape = tuple(shape)
        assert math.prod(shape) == self.numel, f"{self.where}: expected shape {shape}, found {self.shape}"
        return LazyTensor(shape, self.dtype, partial(self._viewed, shape), self.where, self.read_range)

    def _viewed(self, shape: tuple[int, ...]) -> Tensor:
        return self.read().view(shape)

    def mapped(self, function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> LazyTensor:
        """The result of ``function``, of ``shape``; the function must only move elements."""
        return joined([self], lambda parts: function(parts[0]), shape)

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Convert when read; with ``read_range``, the whole tensor is never in memory in both dtypes."""
        if dtype == self.dtype:
            return self
        ranged = self.read_range
        converted = None if ranged is None else lambda start, stop: ranged(start, stop).to(dtype)
        return LazyTensor(self.shape, dtype, lambda: _filled([self], self.shape, dtype), self.where, converted)

    def times(self, factor: float) -> LazyTensor:
        """Multiplied when read, as ``to`` converts."""

        def scaled(found: Tensor) -> Tensor:
            return found.mul_(factor)

        ranged = self.read_range
        of_range = None if ranged is None else lambda start, stop: scaled(ranged(start, stop))
        return LazyTensor(self.shape, self.dtype, lambda: scaled(self.read()), self.where, of_range)


def _filled(parts: Sequence[LazyTensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    found, start = torch.empty(math.prod(shape), dtype=dtype), 0
    for block in itertools.chain.from_iterable(part.blocks() for part in parts):
        found[start : start + block.numel()] = block
        start += block.numel()
    return found.view(tuple(shape))


def held(tensor: Tensor, where: str) -> LazyTensor:
    """A lazy tensor of a tensor in memory."""
    copied = partial(tensor.detach().clone, memory_format=torch.contiguous_format)
    return LazyTensor(tuple(tensor.shape), tensor.dtype, copied, where)


def aliases(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """The names of tensors with the bytes of an earlier one, each with that one's name."""
    first: dict[Any, str] = {}
    places = {name: (tensor.place, tensor.shape) for name, tensor in tensors.items() if tensor.place and tensor.numel}
    named = {name: first.setdefault(place, name) for name, place in places.items()}
    return {name: other for name, other in named.items() if name != other}


def zeros(shape: Sequence[int], dtype: torch.dtype, where: str) -> LazyTensor:
    """A lazy tensor of zeros."""
    return LazyTensor(
        tuple(shape), dtype, partial(torch.zeros, tuple(shape), dtype=dtype), where, partial(_zeros, dtype)
    )


def _zeros(dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start, dtype=dtype)


def differing(a: LazyTensor, b: LazyTensor) -> tuple[int, int, float]:
    """The number of elements that differ of two tensors of one shape, the first one's place, and how far two are apart
    at most. Bits are compared, after the narrower tensor is widened; NaN equals NaN."""
    count, first, start, largest = 0, 0, 0, 0.0
    wide = a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)
    for one, other in zip(a.blocks(), b.blocks(), strict=True):
        one, other = one.to(wide), other.to(wide)
        differs = unequal(one, other) if not same(one, other) else None
        if differs is not None and bool(differs.any()):
            first = first if count else start + int(differs.to(torch.uint8).argmax())
            count += int(differs.sum())
            apart = (one[differs].double() - other[differs].double()).abs()
            largest = max(largest, float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
        start += one.numel()
    return count, first, largest


def joined(parts: Sequence[LazyTensor], function: Callable[[list[Tensor]], Tensor], shape: Sequence[int]) -> LazyTensor:
    """``function`` of ``parts``, of ``shape``. All parts are in memory while it is read."""
    first, shape = parts[0], tuple(shape)

    def read() -> Tensor:
        found = function([part.read() for part in parts])
        assert found.shape == shape, f"expected shape {shape}, found {tuple(found.shape)}"
        return found.contiguous()

    return LazyTensor(shape, first.dtype, read, first.where)


class FlatPieces(Sequence[LazyTensor]):
    """Pieces of flat tensors, each given as its first element, their number and the tensor. A piece is made when it is
    accessed, because 1,000 ranks have millions."""

    def __init__(self, pieces: Iterable[tuple[int, int, LazyTensor]]) -> None:
        self._tensors: list[LazyTensor] = []
        self._starts, self._stops = array("q"), array("q")
        for first, numel, tensor in pieces:
            self._tensors.append(tensor)
            self._starts.append(first)
            self._stops.append(first + numel)

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, at: int) -> LazyTensor: ...
    @overload
    def __getitem__(self, at: slice) -> list[LazyTensor]: ...
    def __getitem__(self, at: int | slice) -> LazyTensor | list[LazyTensor]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        return self._tensors[at].piece(self._starts[at], self._stops[at])


def end_to_end(parts: Sequence[LazyTensor], shape: Sequence[int]) -> LazyTensor:
    """The elements of ``parts`` one after the other, in ``shape``, as in torch.cat along the first dimension. It is
    filled part by part, from ranges if these can be read, so that no whole part is in memory as well."""
    first = parts[0]
    if len(parts) == 1:
        return first.view(shape)
    ends = array("q", itertools.accumulate((part.numel for part in parts), initial=0))
    assert ends[-1] == math.prod(shape), f"{first.where}: expected shape {tuple(shape)}, found {ends[-1]} elements"
    ranged = None if any(part.read_range is None for part in parts) else partial(_range_of, parts, ends)
    return LazyTensor(tuple(shape), first.dtype, partial(_filled, parts, shape, first.dtype), first.where, ranged)


def _range_of(parts: Sequence[LazyTensor], ends: Sequence[int], start: int, stop: int) -> Tensor:
    """Elements [start, stop) of parts of which part ``i`` is [ends[i], ends[i + 1]); 1,000 ranks have a part each."""
    numbers = range(bisect.bisect_right(ends, start) - 1, bisect.bisect_left(ends, stop))
    cuts = [parts[i].piece(max(start - ends[i], 0), min(stop, ends[i + 1]) - ends[i]) for i in numbers]
    cuts = [cut for cut in cuts if cut.numel]
    return torch.cat([cut.read() for cut in cuts]) if len(cuts) > 1 else cuts[0].read()


def uncut(shards: Sequence[LazyTensor], dim: int, sizes: Sequence[int] = ()) -> LazyTensor:
    """The tensor that was cut in dimension ``dim``; in a fused one, every shard has parts of these ``sizes``."""
    first, sizes = shards[0], list(sizes) or [shards[0].shape[dim]]
    shape = [size * len(shards) if at == dim else size for at, size in enumerate(first.shape)]
    if dim == 0:
        ends = [end * math.prod(first.shape[1:]) for end in itertools.accumulate(sizes, initial=0)]
        places = itertools.pairwise(ends)
        return end_to_end([shard.piece(start, stop) for start, stop in places for shard in shards], shape)

    def join(tensors: list[Tensor]) -> Tensor:
        pieces = [tensor.split(sizes, dim) for tensor in tensors]
        return torch.cat([piece for of_part in zip(*pieces) for piece in of_part], dim)

    return joined(shards, join, shape)


def shape_of(sizes: Any) -> tuple[int, ...]:
    """Sizes in a file as a shape. Raises ValueError for anything else, and for too many elements."""
    if type(sizes) not in (tuple, list, torch.Size) or len(sizes) > 32:  # numpy's own limit, up to version 1
        raise ValueError("expected a shape as a tuple of at most 32 sizes")
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(max(n, 1) for n in sizes) >= 2**48:
        raise ValueError("expected sizes of 0 or more and at most 2**48 elements")
    return tuple(sizes)


SHOWN = 20  # problems in a message


def listed(problems: Sequence[str]) -> str:
    """The first problems, one on each line, and the number of the others."""
    more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "".join(f"\n  {line}" for line in (*problems[:SHOWN], *more))


def some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    return ", ".join(map(repr, names[:5])) + f" and {len(names) - 5} more" * (len(names) > 5)


T = TypeVar("T")
WEIGHT = "weight"
MASTER = "fp32"  # the key of master weights, as in DeepSpeed's universal format
LONGEST_NAME = 1000  # characters of a parameter's name or key; bounds the time of parsing names
MATRICES = "matrices"  # the argument with the elements of each parameter's matrices, in order


@dataclass(frozen=True)
class Param:
    """One parameter, whole. ``weight`` is the model's (bf16, say); ``states`` have its shape: the fp32 master weight
    under ``"fp32"``, ``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``, ... A frozen parameter has none.

    ``step`` is the optimizer's count of steps, if known by parameter; ``group`` is the number of its param group.
    ``owner_states`` is owner state by the matrix's place: dictionaries and lists of tensors and numbers, in memory.
    """

    weight: LazyTensor | None
    states: Mapping[str, LazyTensor] = field(default_factory=dict)
    step: float | None = None
    group: int | None = None
    owner_states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.tensors.values())).shape

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """The weight, if any, under ``"weight"``, and the states."""
        return {**({} if self.weight is None else {WEIGHT: self.weight}), **self.states}

    def changed(self, tensors: Mapping[str, LazyTensor]) -> Param:
        """The parameter with these in place of its ``tensors``."""
        states = {key: tensor for key, tensor in tensors.items() if key != WEIGHT}
        return replace(self, weight=tensors.get(WEIGHT), states=states)

    def exported(self, dtype: torch.dtype | None = None) -> LazyTensor:
        """The weight, in ``dtype`` if given; a conversion starts from the master weight."""
        if self.weight is not None and dtype in (None, self.weight.dtype):
            return self.weight
        return self.best if dtype is None else self.best.to(dtype)

    @property
    def best(self) -> LazyTensor:
        """The master weight if there is one, otherwise the weight."""
        found = self.states.get(MASTER, self.weight)
        assert found is not None
        return found


class OwnerStates(UserDict[int, Any]):
    """Owner state by a matrix's place in its parameter, whose values are read at each access."""

    def __getitem__(self, place: int) -> Any:
        return self.data[place]()


@dataclass(frozen=True)
class Checkpoint:
    """The result of a reader.

    - ``format``: e.g. ``"megatron torch_dist"``; ``version``: of the program that wrote it, if known.
    - ``names``: the vocabulary of its parameter names: ``"megatron-core"``, ``"model"`` (the module's own), ...
    - ``params``: in the model's order, if that is known.
    - ``groups``: the param groups' options as plain data, without parameters.
    - ``arguments``: how it was trained, as plain data (Megatron's ``args``, a ds_config).
    - ``iteration``, ``samples``: trained so far. ``scheduler``: its state as plain data, or None.
    - ``world``: sizes by name, e.g. ``{"dp": 2, "tp": 1}``.
    - ``replicas``: pairs of tensors that must be equal, e.g. a tied embedding's two copies, with a description.
    - ``tied``: further names of parameters, each with the name in ``params``.
    - ``buffers``: the module's, by name. ``client``: other entries of the user's program, as plain data.
    - ``notes``: sentences on omissions and oddities that are no reason to refuse.
    - ``left_out``: the folder's own names of tensors that the reader left out, each with the reason.
    - ``files``: those that were opened; ``finish`` compares the checksums of all that was read.
    """

    format: str
    version: str
    names: str
    params: Mapping[str, Param]
    groups: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    samples: int | None = None
    scheduler: Mapping[str, Any] | None = None
    world: Mapping[str, int] = field(default_factory=dict)
    replicas: tuple[tuple[str, LazyTensor, LazyTensor], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, LazyTensor] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Checked, ...] = field(default=(), compare=False, repr=False)

    def finish(self) -> None:
        """Raises CheckpointError for a wrong checksum of anything that was read since the files were opened."""
        for file in self.files:
            file.finish()

    def name_of(self, name: str) -> str:
        """The name in ``params`` of a parameter with this name, which may be one in ``tied``."""
        return name if name in self.params else self.tied.get(name, name)

    def __post_init__(self) -> None:
        """Raises CheckpointError if names, numbers and dictionaries have other types."""
        names = (*self.params, *self.tied, *self.tied.values(), *self.buffers)
        wrong = [name for name in names if type(name) is not str or len(name) > LONGEST_NAME]
        if wrong:
            raise CheckpointError(
                f"{self.format}: expected a parameter's name as text, found a {type(wrong[0]).__name__}, or a long one"
            )
        nothing, mapping = type(None), (Mapping,)
        kinds: dict[str, tuple[type, ...]] = {
            **{"iteration": (int, nothing), "samples": (int, nothing), "scheduler": (Mapping, nothing)},
            **{"arguments": mapping, "client": mapping, "version": (str,), "names": (str,)},
        }
        found = [(name, getattr(self, name), kind) for name, kind in kinds.items()]
        found += [("a param group", group, mapping) for group in self.groups]
        found += [(f"the number of {name} ranks", size, (int,)) for name, size in self.world.items()]
        for what, value, kind in found:
            if not isinstance(value, kind):
                said = f"expected {what} as a {kind[0].__name__}, found a {type(value).__name__}"
                raise CheckpointError(f"{self.format}: {said}; copy it again")


def watched(checkpoint: Checkpoint, *watchers: Callable[[LazyTensor, int, Tensor], None]) -> Checkpoint:
    """The same checkpoint; ``watchers`` are called with the elements that are read of a parameter's tensor: the tensor,
    the first one's place, and all of them."""

    def seen(tensor: LazyTensor, start: int, found: Tensor) -> Tensor:
        for watcher in watchers:
            watcher(tensor, start, found)
        return found

    def watch(tensor: LazyTensor) -> LazyTensor:
        whole, part = tensor.read, tensor.read_range
        ranged = None if part is None else lambda start, stop: seen(tensor, start, part(start, stop))
        return replace(tensor, read=lambda: seen(tensor, 0, whole()), read_range=ranged)

    params = {}
    for name, param in checkpoint.params.items():
        params[name] = param.changed({key: watch(tensor) for key, tensor in param.tensors.items()})
    return replace(checkpoint, params=params)


def lazy_tensors(value: Any) -> Iterator[LazyTensor]:
    """Yield the lazy tensors in containers."""
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, set, deque)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from lazy_tensors(entry)


def nbytes(checkpoint: Checkpoint) -> int:
    """Bytes of all parameters' tensors."""
    return sum(tensor.nbytes for param in checkpoint.params.values() for tensor in param.tensors.values())


class Checked(Protocol):
    """A file whose checksums are compared as it is read."""

    def finish(self) -> None:
        """Raises CheckpointError for a wrong checksum of what was read."""

    def tensors_read(self) -> Mapping[str, bool]:
        """The tensors that have names in the file, and whether any of it was read."""


_read: ContextVar[list[Checked] | None] = ContextVar("files that a reader has opened", default=None)


def finish_later(file: Checked) -> None:
    """Add a file to the ``files`` of the checkpoint that is being read."""
    found = _read.get()
    if found is not None:
        found.append(file)


def reader(
    writer: str, folder_of: Callable[[Path], Path] = Path
) -> Callable[[Callable[[Path], Checkpoint]], Callable[[Path], Checkpoint]]:
    """Decorates a function of a folder, which is then called with ``folder_of(path)``, a step's folder, by
    ``read_as_expected``; the result gets the files that it opened."""

    def decorated(read: Callable[[Path], Checkpoint]) -> Callable[[Path], Checkpoint]:
        @functools.wraps(read)
        def read_folder(path: Path) -> Checkpoint:
            folder, files = folder_of(path), list[Checked]()
            token = _read.set(files)
            try:
                found = read_as_expected(lambda: read(folder), folder, writer)
            finally:
                _read.reset(token)
            return replace(found, files=tuple(files))

        read_folder.folder_of = folder_of  # type: ignore[attr-defined]
        return read_folder

    return decorated


def read_as_expected(read: Callable[[], T], where: Path, writer: str, said: type[ValueError] = CheckpointError) -> T:
    """The result of ``read``. Raises CheckpointError for any error in files that ``writer`` cannot have written. This
    is the last resort: a reader that notices a problem itself raises a better error, of type ``said``."""
    try:
        return read()
    except (said, MemoryError, ImportError):
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        raise CheckpointError(
            f"{where} cannot be read as {writer} writes it ({reason}): a bug, or a file of another version; {DEBUG}=1 "
            "shows the traceback"
        ) from error
