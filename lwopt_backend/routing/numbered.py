"""Numbers of the elements of a tensor without memory: which output of a weight, or which of its rows, each one is of.

Numbers are kept compact: a dimension along which they do not change has size 1, so that a tensor of 4 x 4096 tokens
takes as little as one token. -1 is the number of an element that is of none. Sets of outputs are integers, a bit for
each, because these compare and combine at once, however many outputs there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

Outputs = int  # a set of outputs: bit i is set if output i is in it
LARGEST = 2**24  # numbers that are kept of one tensor


def every(count: int) -> Outputs:
    """The set of all of ``count`` outputs."""
    return (1 << count) - 1


def some(outputs: Iterator[int] | Sequence[int]) -> Outputs:
    found = 0
    for output in outputs:
        found |= 1 << output
    return found


def first(outputs: Outputs) -> int:
    """The lowest output of a set that is not empty."""
    return (outputs & -outputs).bit_length() - 1


def places(outputs: Outputs) -> np.ndarray:
    """The outputs of a set, in order."""
    bits = np.frombuffer(outputs.to_bytes((outputs.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def outputs_of(numbers: Tensor, count: int) -> Outputs:
    """The set of the numbers in a tensor, of ``count`` outputs."""
    seen = np.zeros(count + 1, dtype=bool)
    seen[numbers.numpy()] = True  # -1 is the last, which is left out
    return int.from_bytes(np.packbits(seen[:count], bitorder="little").tobytes(), "little")


def runs_of(outputs: Outputs) -> list[tuple[int, int]]:
    """Start and stop of every run of consecutive outputs."""
    at = places(outputs)
    breaks = np.flatnonzero(np.diff(at) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(at, breaks)]


def compact(numbers: Tensor) -> Tensor:
    """Without the repetitions of ``expand``."""
    for dim, (size, stride) in enumerate(zip(numbers.shape, numbers.stride())):
        if stride == 0 and size > 1:
            numbers = numbers.narrow(dim, 0, 1)
    return numbers


def changes_along(numbers: Tensor, dim: int) -> bool:
    """Whether compact numbers differ along a dimension."""
    return numbers.shape[dim] > 1


def reshaped(numbers: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor | None:
    """Compact numbers of a tensor of shape ``old`` that becomes ``new``; None if they would be too many.

    Dimensions are taken in the smallest groups that both shapes divide into. A group in which no number changes keeps
    size 1.
    """
    sizes, shape = [], []
    for theirs, ours in _groups(old, new):
        if all(numbers.shape[dim] == 1 for dim in theirs):
            sizes += [1] * len(theirs)
            shape += [1] * len(ours)
        else:
            sizes += [old[dim] for dim in theirs]
            shape += [new[dim] for dim in ours]
    if math.prod(sizes) > LARGEST:
        return None
    return numbers.expand(sizes).reshape(shape)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The dimensions of two shapes of equally many elements, in groups of equally many elements, in order."""
    left, right = 0, 0
    while left < len(old) or right < len(new):
        theirs, ours = [*range(left, min(left + 1, len(old)))], [*range(right, min(right + 1, len(new)))]
        left, right = left + len(theirs), right + len(ours)
        sizes = math.prod(old[i] for i in theirs), math.prod(new[i] for i in ours)
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1] or not ours:
                theirs.append(left)
                sizes, left = (sizes[0] * old[left], sizes[1]), left + 1
            else:
                ours.append(right)
                sizes, right = (sizes[0], sizes[1] * new[right]), right + 1
        while left < len(old) and old[left] == 1 and (right >= len(new) or new[right] != 1):
            theirs.append(left)
            left += 1
        while right < len(new) and new[right] == 1 and (left >= len(old) or old[left] != 1):
            ours.append(right)
            right += 1
        yield theirs, ours


def spread(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """Compact numbers for a tensor of ``shape`` that an element-wise operation broadcasts to."""
    lead = len(shape) - numbers.ndim
    return numbers.reshape(*[1] * lead, *numbers.shape) if lead > 0 else numbers


def none_of(shape: Sequence[int]) -> Tensor:
    return torch.full([1] * len(shape), -1, dtype=torch.int32, device="cpu")
