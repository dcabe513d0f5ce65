"""Tensors that are read when they are needed, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

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
        """The elements [start, stop) of it flattened."""

        def read() -> Tensor:
            if self.read_range is not None:
                return self.read_range(start, stop)
            return self.read().view(-1)[start:stop].clone()

        ranged = _shifted(self.read_range, start)
        return LazyTensor((stop - start,), self.dtype, read, self.where, ranged)

    def view(self, shape: Sequence[int]) -> LazyTensor:
        """The same elements in the same order in another shape."""
        shape = tuple(shape)
        assert math.prod(shape) == self.numel, f"{self.where}: expected shape {shape}, found {self.shape}"
        return LazyTensor(shape, self.dtype, lambda: self.read().view(shape), self.where, self.read_range)

    def mapped(self, function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> LazyTensor:
        """What ``function`` makes of it, which must move elements only; of ``shape``."""
        return LazyTensor(tuple(shape), self.dtype, lambda: _contiguous(function(self.read()), shape), self.where)

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """Converted when it is read, without its elements all being there in both dtypes where ranges can be read."""
        ranged = self.read_range
        if dtype == self.dtype:
            return self
        if ranged is None:
            return LazyTensor(self.shape, dtype, lambda: self.read().to(dtype), self.where)
        return _from_ranges(self.shape, dtype, lambda start, stop: ranged(start, stop).to(dtype), self.where)


def held(tensor: Tensor, where: str) -> LazyTensor:
    """A tensor that is in memory."""

    def read() -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return LazyTensor(tuple(tensor.shape), tensor.dtype, read, where)


def joined(parts: Sequence[LazyTensor], function: Callable[[list[Tensor]], Tensor], shape: Sequence[int]) -> LazyTensor:
    """What ``function`` puts together from ``parts``; of ``shape``. All parts are in memory while it is read."""
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
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.numel)
    assert ends[-1] == math.prod(shape), f"{first.where}: expected shape {tuple(shape)}, found {ends[-1]} elements"

    def read() -> Tensor:
        found = torch.empty(ends[-1], dtype=first.dtype)
        for start, part in zip(ends, parts):
            _fill(found[start : start + part.numel], part)
        return found.view(tuple(shape))

    def read_range(start: int, stop: int) -> Tensor:
        cuts = [
            part.piece(max(start - begin, 0), min(stop - begin, part.numel))
            for begin, part in zip(ends, parts)
            if begin < stop and begin + part.numel > start
        ]
        return torch.cat([cut.read() for cut in cuts]) if len(cuts) > 1 else cuts[0].read()

    ranged = None if any(part.read_range is None for part in parts) else read_range
    return LazyTensor(tuple(shape), first.dtype, read, first.where, ranged)


def _from_ranges(shape: tuple[int, ...], dtype: torch.dtype, read_range: ReadRange, where: str) -> LazyTensor:
    def read() -> Tensor:
        found = torch.empty(math.prod(shape), dtype=dtype)
        _fill(found, lazy)
        return found.view(shape)

    lazy = LazyTensor(shape, dtype, read, where, read_range)
    return lazy


def _fill(found: Tensor, part: LazyTensor) -> None:
    start = 0
    for block in part.blocks():
        found[start : start + block.numel()] = block
        start += block.numel()


def _shifted(read_range: ReadRange | None, by: int) -> ReadRange | None:
    return None if read_range is None else lambda start, stop: read_range(by + start, by + stop)


def _contiguous(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    assert tuple(tensor.shape) == tuple(shape), f"expected shape {tuple(shape)}, found {tuple(tensor.shape)}"
    return tensor.contiguous()
