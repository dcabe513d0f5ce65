"""A checkpoint in one form, whatever its format: parameters with lazy tensors, groups, counters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lwopt_backend.checkpoint.choices import CheckpointError as CheckpointError

# Values compared bit by bit, and those that are no finite numbers.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal, bit for bit; much faster than ``unequal``."""
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Mask of the elements whose bits differ, except where both are NaN."""
    bits = _BITS[one.dtype.itemsize]
    differs = one.contiguous().view(bits) != other.contiguous().view(bits)
    if one.dtype.is_floating_point and bool(differs.any()):
        differs &= ~(one.isnan() & other.isnan())
    return differs


def infinite(values: Tensor) -> int:
    """How many elements are not finite. If the sum is finite all are, which is much faster to find; it may overflow."""
    if not values.is_floating_point():
        return 0
    wide = values if values.dtype.itemsize >= 4 or values.dtype == torch.bfloat16 else values.float()
    return 0 if bool(wide.sum().isfinite()) else int((~wide.isfinite()).sum())


# Tensors that are read when they are needed, one at a time.

BLOCK = 2**20  # elements that are read at once where a tensor is filled, or looked at, bit by bit
ReadRange = Callable[[int, int], Tensor]


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor in a file. ``read`` returns it, contiguous and owned by the caller; nothing is kept.

    ``where`` says, for messages, what it is and where: ``"exp_avg of decoder.layers.0... in __0_0.distcp"``.
    ``read_range`` returns the elements [start, stop) of it, flat, where that takes less than reading all. ``stride`` is
    that of the tensor that was saved, in elements, and ``place`` the file and the byte where it begins, where known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    where: str
    read_range: ReadRange | None = None
    stride: tuple[int, ...] | None = None
    place: tuple[str, int] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def blocks(self) -> Iterator[Tensor]:
        """All elements in their order, flat, ``BLOCK`` at a time; no more is in memory where ranges can be read."""
        for read in self.block_reads():
            yield from read().view(-1).split(BLOCK)

    def block_reads(self) -> Iterator[Callable[[], Tensor]]:
        """Calls that return the elements in their order: each a block, or one all, where ranges cannot be read."""
        if self.read_range is None:
            yield from [self.read] * (self.numel > 0)
            return
        for start in range(0, self.numel, BLOCK):
            yield partial(self.read_range, start, min(start + BLOCK, self.numel))

    def piece(self, start: int, stop: int) -> LazyTensor:
        """Elements [start, stop) of the flattened tensor, as a flat one."""
        ranged, shape = self.read_range, (stop - start,)
        if ranged is None:
            return LazyTensor(shape, self.dtype, lambda: self.read().view(-1)[start:stop].clone(), self.where)
        within = partial(_within, ranged, start)
        return LazyTensor(shape, self.dtype, lambda: ranged(start, stop), self.where, within)

    def view(self, shape: Sequence[int]) -> LazyTensor:
        """The same elements in the same order in another shape."""
        shape = tuple(shape)
        assert math.prod(shape) == self.numel, f"{self.where}: expected shape {shape}, found {self.shape}"
        return LazyTensor(shape, self.dtype, lambda: self.read().view(shape), self.where, self.read_range)

    def mapped(self, function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> LazyTensor:
        """The result of ``function``, which must only move elements; it has ``shape``."""
        return LazyTensor(tuple(shape), self.dtype, lambda: _contiguous(function(self.read()), shape), self.where)

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Converted when it is read, without its elements all being there in both dtypes where ranges can be read."""
        if dtype == self.dtype:
            return self
        ranged = self.read_range
        converted = None if ranged is None else lambda start, stop: ranged(start, stop).to(dtype)
        return LazyTensor(self.shape, dtype, lambda: _filled([self], self.shape, dtype), self.where, converted)


def _within(read_range: ReadRange, begin: int, start: int, stop: int) -> Tensor:
    return read_range(begin + start, begin + stop)


def _filled(parts: Sequence[LazyTensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    found, start = torch.empty(math.prod(shape), dtype=dtype), 0
    for block in itertools.chain.from_iterable(part.blocks() for part in parts):
        found[start : start + block.numel()] = block
        start += block.numel()
    return found.view(tuple(shape))


def held(tensor: Tensor, where: str) -> LazyTensor:
    """A tensor that is in memory."""
    copied = partial(tensor.detach().clone, memory_format=torch.contiguous_format)
    return LazyTensor(tuple(tensor.shape), tensor.dtype, copied, where)


def joined(parts: Sequence[LazyTensor], function: Callable[[list[Tensor]], Tensor], shape: Sequence[int]) -> LazyTensor:
    """``parts`` combined by ``function`` into a tensor of ``shape``. All parts are in memory while it is read."""
    first = parts[0]
    return LazyTensor(
        tuple(shape), first.dtype, lambda: _contiguous(function([part.read() for part in parts]), shape), first.where
    )


def end_to_end(parts: Sequence[LazyTensor], shape: Sequence[int]) -> LazyTensor:
    """The elements of ``parts`` one after the other, of ``shape``: as torch.cat makes them along the first dimension.

    It is filled part by part, from ranges of them where they can be read: no part is in memory besides.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.view(shape)
    ends = list(itertools.accumulate((part.numel for part in parts), initial=0))
    assert ends[-1] == math.prod(shape), f"{first.where}: expected shape {tuple(shape)}, found {ends[-1]} elements"

    def read_range(start: int, stop: int) -> Tensor:
        cuts = [
            part.piece(max(start - begin, 0), min(stop - begin, part.numel))
            for begin, part in zip(ends, parts)
            if begin < stop and begin + part.numel > start
        ]
        return torch.cat([cut.read() for cut in cuts]) if len(cuts) > 1 else cuts[0].read()

    ranged = None if any(part.read_range is None for part in parts) else read_range
    return LazyTensor(tuple(shape), first.dtype, lambda: _filled(parts, shape, first.dtype), first.where, ranged)


def _contiguous(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    assert tuple(tensor.shape) == tuple(shape), f"expected shape {tuple(shape)}, found {tuple(tensor.shape)}"
    return tensor.contiguous()


# What is in a checkpoint, whatever its format: the form between all readers and all writers.

T = TypeVar("T")
WEIGHT = "weight"
MASTER = "fp32"  # the key of master weights, as in DeepSpeed's universal format
LONGEST_NAME = 1000  # characters of a parameter's name, or of a key with it; what takes names apart need not be fast
MATRICES = "matrices"  # the argument that tells, by parameter, which elements its matrices are, in their order


@dataclass(frozen=True)
class Param:
    """One parameter, whole. ``weight`` is what the model has (bf16, say), ``states`` are as large as it: the fp32
    master weight under ``"fp32"``, ``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``, ... A frozen one has none.

    ``step`` counts the optimizer's steps where that is known by parameter; ``group`` is the number of its param group.
    ``owner_states`` is what a rule keeps of each matrix in it beside these, by the matrix's place: dictionaries and
    lists of tensors and numbers, in memory.
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
        """The weight, if there is one, under ``"weight"``, and the states."""
        return {**({} if self.weight is None else {WEIGHT: self.weight}), **self.states}

    @property
    def best(self) -> LazyTensor:
        """The master weight if there is one, else the weight."""
        found = self.states.get(MASTER, self.weight)
        assert found is not None
        return found


class OwnerStates(Mapping[int, Mapping[str, Any]]):
    """State by a matrix's place in its parameter; the call for it reads it, whenever it is asked for."""

    def __init__(self, reads: Mapping[int, Callable[[], Mapping[str, Any]]]) -> None:
        self._reads = reads

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._reads[place]()

    def __iter__(self) -> Iterator[int]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


@dataclass(frozen=True)
class Checkpoint:
    """What a reader found.

    - ``format``: e.g. ``"megatron torch_dist"``; ``version``: of what wrote it, as far as it says.
    - ``names``: the vocabulary of its parameter names: ``"megatron-core"``, ``"model"`` (the module's own), ...
    - ``params``: in the model's order where that is known.
    - ``groups``: the param groups' options as plain data, without parameters.
    - ``arguments``: how it was trained, as plain data (Megatron's ``args``, a ds_config).
    - ``iteration``, ``samples``: trained so far. ``scheduler``: its state as plain data, or None.
    - ``world``: sizes by name, e.g. ``{"dp": 2, "tp": 1}``.
    - ``replicas``: pairs of tensors that must be equal, e.g. a tied embedding's two copies, with what they are.
    - ``tied``: names under which a parameter is used once more, each with the name that is in ``params``.
    - ``buffers``: the module's, by name. ``client``: what the user's own program saved along, as plain data.
    - ``notes``: sentences on what was left out or looks odd; no reason to refuse.
    - ``proven``: whether its files themselves, or their manifest, say that they are of one save.
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
    proven: bool = False

    def __post_init__(self) -> None:
        """Raises CheckpointError where files have something else in place of names, numbers and dictionaries."""
        names = (*self.params, *self.tied, *self.tied.values(), *self.buffers)
        wrong = [name for name in names if type(name) is not str or len(name) > LONGEST_NAME]
        if wrong:
            raise CheckpointError(f"{self.format}: a parameter's name is a {type(wrong[0]).__name__}, or a long one")
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
                said = f"a {type(value).__name__}, no {kind[0].__name__}"
                raise CheckpointError(f"{self.format}: {what} is {said}; copy it again")


def read_as_expected(read: Callable[[], T], where: Path, writer: str, said: type[ValueError] = CheckpointError) -> T:
    """What ``read`` returns. Raises CheckpointError for whatever happens in files that ``writer`` did not form.

    It is the last resort: what is wrong with a file is better said where it is noticed, with an error that is ``said``.
    """
    try:
        return read()
    except (said, MemoryError, ImportError):
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        raise CheckpointError(
            f"{where} is not as {writer} writes it ({reason}); was it written by another version, or changed?"
        ) from error
