"""The matrices of a buffer in backward order, the order in which gradients become ready."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from lwopt_backend.plan.cost import max_min_squared
from lwopt_backend.plan.types import Atom

MOST_KINDS = 64  # packing tells so many kinds of matrices apart; models have about ten
ALIGNMENT = 64  # elements; every matrix starts on a multiple, as in Megatron-Core (cuBLASLt wants 128 bytes in bf16)


def aligned(numel: int) -> int:
    """``numel`` rounded up to the alignment of a matrix's start."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def shard_multiple(world_size: int) -> int:
    """What a shard's size is a multiple of, so that a bucket ends on lcm(world_size, 128) elements."""
    return math.lcm(ALIGNMENT, math.lcm(world_size, 128) // world_size)


@dataclass(frozen=True, slots=True)
class Kind:
    """What packing sees of a matrix: matrices of one kind are alike to it."""

    numel: int  # aligned
    cost: int  # by the cost model that is planned for
    estimate: int  # by Megatron-Core's estimate


def _kinds(seen: Sequence[Kind]) -> tuple[list[Kind], array[int]]:
    """The kinds, largest first, and each matrix's. Where there are too many, a kind is a class of similar sizes.

    A class stands for its largest member in every measure, so what is packed by classes fits.
    """
    kinds = sorted(set(seen), key=lambda kind: (-kind.numel, -kind.cost, -kind.estimate))
    class_of = {kind: index for index, kind in enumerate(kinds)}
    if len(kinds) > MOST_KINDS:
        width = math.log(kinds[0].numel / kinds[-1].numel) / MOST_KINDS or 1.0
        steps = [int(math.log(kinds[0].numel / kind.numel) / width) for kind in kinds]
        places = {step: index for index, step in enumerate(sorted(set(steps)))}
        class_of = {kind: places[step] for kind, step in zip(kinds, steps)}
        members: list[list[Kind]] = [[] for _ in places]
        for kind in kinds:
            members[class_of[kind]].append(kind)
        kinds = [Kind(*(max(measure) for measure in zip(*map(astuple, some)))) for some in members]
    return kinds, array("H", (class_of[kind] for kind in seen))


class Stream:
    """Atoms in backward order, with their kinds (largest first) and running sums, so that any range is quick to judge.

    ``atoms`` are given in model order; position 0 of the stream is the last of them. ``layer_starts`` are the positions
    at which the first number in the names changes.
    """

    def __init__(self, atoms: Sequence[Atom]) -> None:
        seen = [Kind(aligned(a.numel), a.cost, max_min_squared(a.shape)) for a in reversed(atoms)]
        self.numels = [kind.numel for kind in seen]
        self.costs = [kind.cost for kind in seen]
        self.estimates = [kind.estimate for kind in seen]
        self.kinds, self.kind_of = _kinds(seen)
        self.numel_before = list(accumulate(self.numels, initial=0))
        self._counts_before = self._running_counts()
        numbers = [re.search(r"\d+", atom.name) for atom in reversed(atoms)]
        layers = [number and number.group() for number in numbers]
        self.layer_starts = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]

    def __len__(self) -> int:
        return len(self.numels)

    def numel(self, start: int, stop: int) -> int:
        """Aligned elements of positions [start, stop)."""
        return self.numel_before[stop] - self.numel_before[start]

    def counts(self, start: int, stop: int) -> tuple[int, ...]:
        """Per kind, how many matrices lie in positions [start, stop)."""
        return tuple(after[stop] - after[start] for after in self._counts_before)

    def _running_counts(self) -> list[array[int]]:
        running = [array("L", bytes(8 * (len(self) + 1))) for _ in self.kinds]
        for kind, counts in enumerate(running):
            total = 0
            for position, here in enumerate(self.kind_of):
                total += here == kind
                counts[position + 1] = total
        return running
