"""What is known of each tensor while a ``forward`` is followed: the outputs of weights in it, and where these ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lwopt_backend.routing.numbered import LARGEST, Outputs, every, outputs_of, spread

# A weight's number, and what is followed: its rows or columns (dimension 2 or 1, from the end), one of which are its
# outputs; the slices of a stack; the outputs of a kernel of several dimensions, numbered as they are stored; the
# channels that a convolution makes; each leading dimension of several by itself, from LEADS on.
Source = tuple[int, int]
SLICES, KERNEL, CHANNELS, LEADS = 3, 4, 0, 5
# Of a weight that no linear has: "combined" in a product with weights alone, "lost" by an unknown operation
UsedAs = Literal["multiplied", "combined", "added", "lost"]
ACTIVATED, MIXED, SCALED = 1, 2, 4  # how outputs were treated: by an activation, attention, data


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Outputs of one weight in a tensor: compact ``numbers``, as in ``numbered``.

    Where outputs were added to each other, position by position, ``others`` are the numbers of further ones.
    ``treated`` is how; ``stream`` if something else was added.
    """

    numbers: Tensor
    outputs: Outputs
    others: tuple[Tensor, ...] = ()
    treated: int = 0
    stream: bool = False

    def moved(self, move: Callable[[Tensor], Tensor | None], count: int, *, same: bool = False) -> Track | None:
        """With numbers elsewhere; ``same`` if all of them are kept. None if there is nothing left."""
        every_one = [move(numbers) for numbers in (self.numbers, *self.others)]
        found = [numbers for numbers in every_one if numbers is not None]
        if len(found) < len(every_one):
            return None
        if same:
            outputs = self.outputs
        else:
            outputs = outputs_of(found[0], count)
            for other in found[1:]:
                outputs |= outputs_of(other, count)
        if not outputs:
            return None
        return replace(self, numbers=found[0], outputs=outputs, others=tuple(found[1:]))


class Weighed(NamedTuple):
    """Data times a weight, element by element: the ``numbers`` of the weight, and the ``shape`` of the data, both with
    as many dimensions as the result; ``behind`` is the weight's bit."""

    numbers: dict[Source, Tensor]
    shape: tuple[int, ...]
    behind: int


@dataclass(slots=True)
class Value:
    """What is known of a tensor.

    ``tracks`` are the outputs that it has; ``weight`` are the numbers of the elements of weights of which it is a view.
    ``behind`` are the weights on which it depends, a bit each; ``heads`` those whose outputs it still is, although
    activated, scaled or averaged. ``root`` are those of which it is a root of a sum, as a norm takes it. ``data`` if it
    depends on the input, ``arguments`` are those on which it does. ``looked_up`` if slices of the weight were chosen by
    an index. ``derived`` are the weights from which an unknown operation computed it, such as a transform or a power.
    ``factors`` are the rows of one weight and the columns of another whose product it is. ``weighed`` is of data times
    a weight, element by element, ``paired`` if it is data times data: a sum is then a product.
    """

    tensor: Tensor
    tracks: dict[Source, tuple[Track, ...]] = field(default_factory=dict)
    weight: dict[Source, Tensor] = field(default_factory=dict)
    behind: int = 0
    heads: int = 0
    reduced: int = 0
    root: int = 0
    data: bool = False
    looked_up: bool = False
    arguments: int = 0
    derived: frozenset[int] = frozenset()
    factors: dict[Source, Tensor] = field(default_factory=dict)
    weighed: Weighed | None = None
    paired: bool = False
    read: tuple[int, dict[Source, tuple[Track, ...]]] | None = None  # of a storage, after so many writes


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """Outputs that one step read together: along ``axis`` of ``numbers``, or the whole tensor, if there is none."""

    outputs: Outputs
    numbers: Tensor | None = None
    axis: int = 0

    @property
    def is_one_run(self) -> bool:
        """Whether all of them were read along one axis, and not, say, by head."""
        numbers = self.numbers
        return numbers is not None and numbers.numel() == numbers.shape[self.axis]


@dataclass(slots=True)
class Ends:
    """What became of the outputs of a weight of ``count`` outputs.

    ``ends`` are where they ended, ``apart`` pairs that were paired or contracted with each other, ``multiplied`` those
    of them in a product. ``links`` are outputs that were summed over, as arrays of pairs. ``rejoined`` are pieces that
    were concatenated. ``activated`` went through an activation. ``names`` are those of variables, ``added`` those of
    variables in which something was added to outputs, ``left`` what
    variables had where the ``forward`` failed. ``returned``: some left the module. ``whose`` is the class of the module
    that took the first of them from the others, by methods with these ``codes``, ``latent`` the sizes that it has
    as latent attention.
    """

    count: int
    ends: list[End] = field(default_factory=list)
    apart: list[tuple[Outputs, Outputs]] = field(default_factory=list)
    multiplied: list[tuple[Outputs, Outputs]] = field(default_factory=list)
    links: list[np.ndarray] = field(default_factory=list)
    rejoined: list[tuple[Outputs, ...]] = field(default_factory=list)
    activated: list[Outputs] = field(default_factory=list)
    names: dict[str, Outputs] = field(default_factory=dict)
    added: dict[str, Outputs] = field(default_factory=dict)
    left: list[Outputs] = field(default_factory=list)
    returned: bool = False
    settled: bool = False  # all outputs were read along one axis
    whose: str = ""
    codes: frozenset[CodeType] = frozenset()
    latent: tuple[int, ...] = ()
    read: dict[Any, Any] = field(default_factory=dict)  # what was found out from it, once nothing is added

    def end(self, one: End) -> None:
        known = (other for other in self.ends if other.outputs == one.outputs)
        if one.outputs and not any(other.numbers is not None or one.numbers is None for other in known):
            self.ends.append(one)
        self.settled = self.settled or (one.is_one_run and one.outputs == every(self.count) and not self.apart)

    def part(self, ours: Outputs, theirs: Outputs, *, product: bool = False) -> None:
        pair = (ours, theirs)
        if pair not in self.apart and pair[::-1] not in self.apart:
            self.apart.append(pair)
        if product and pair not in self.multiplied:
            self.multiplied.append(pair)


@dataclass(slots=True)
class SliceUse:
    """How products use a weight of which each step may take one slice: the leading index of three dimensions or more,
    or equal runs of the rows of two.

    ``taken``: by one, or slice by slice, by a product or by a further step on what one made; ``across``: one at a time
    along another dimension than the first. ``ways`` are the other ways of products: whether slices, rows and columns
    are among their outputs (otherwise their inputs). ``rows`` are those that one product took, if not all, with whether
    they are its inputs. ``mixed``: of several leading dimensions, some are slices and others the outputs or inputs of
    each; ``dims`` are then the ways of products by dimension, a letter each: one at a time (e), outputs (o), inputs
    (i), or something else (?).
    """

    taken: bool = False
    across: bool = False
    mixed: bool = False
    dims: set[str] = field(default_factory=set)
    ways: set[tuple[bool, bool, bool]] = field(default_factory=set)
    rows: dict[tuple[Outputs, bool], None] = field(default_factory=dict)


class Tracks:
    """Follows the outputs of ``weights``.

    ``uses`` are those of weights that are not among ``linears``, which are known to be multiplied. ``convolved`` has,
    by weight, the groups of its convolution, and whether that is transposed. ``contracted`` are rows or columns over
    which a product with data summed, ``looked_up`` the weights of which an index took rows or elements.
    """

    def __init__(self, weights: Sequence[Tensor], linears: Collection[int] = ()) -> None:
        self.ends: dict[Source, Ends] = {}
        self.slices: dict[int, SliceUse] = {}
        self.uses: dict[int, set[UsedAs]] = {n: set() for n in range(len(weights)) if n not in linears}
        self.convolved: dict[int, tuple[int, bool]] = {}
        self.contracted: set[Source] = set()
        self.looked_up: set[int] = set()
        self.counts: dict[Source, int] = {}
        self.values: dict[int, Value] = {}  # by a tensor's id; a value keeps its tensor
        self.stored: dict[int, dict[Source, Tensor]] = {}  # numbers by storage, if views of it were written
        self._alive: list[Tensor] = []  # whose storages these are
        self._writes = 0
        for number, weight in enumerate(weights):
            found = dict(_places(number, weight))
            self.counts.update({source: numbers.numel() for source, numbers in found.items()})
            self.values[id(weight)] = Value(weight, weight=found, behind=1 << number)

    def is_partial(self, value: Value) -> bool:
        """Whether a tensor has some outputs of a weight, and not all."""
        for source, tracks in value.tracks.items():
            for track in tracks:
                if track.outputs.bit_count() < self.counts[source]:
                    return True
        return False

    def key(self, tensor: Tensor) -> int:
        found: int = tensor.untyped_storage()._cdata
        return found

    def tracks(self, value: Value) -> dict[Source, tuple[Track, ...]]:
        """The outputs of weights in a tensor, but those of which all that matters is known."""
        if self.stored and (found := self.stored.get(self.key(value.tensor))) is not None:
            tensor = value.tensor
            if value.read is not None and value.read[0] == self._writes:
                return value.read[1]
            tracks: dict[Source, tuple[Track, ...]] = {}
            for source, flat in found.items():
                numbers = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                for dim in range(numbers.ndim):
                    numbers = once_along(numbers, dim)
                if outputs := outputs_of(numbers, self.counts[source]):
                    tracks[source] = (Track(numbers, outputs),)
            value.read = self._writes, tracks
            return tracks
        if any(self.ends[source].settled for source in value.tracks):
            value.tracks = {source: tracks for source, tracks in value.tracks.items() if not self.ends[source].settled}
        return value.tracks

    def of(self, tensor: Tensor) -> dict[Source, tuple[Track, ...]]:
        value = self.values.get(id(tensor))
        if value is None:
            if not self.stored or self.key(tensor) not in self.stored:
                return {}
            value = self.values[id(tensor)] = Value(tensor)
        return self.tracks(value)

    def keep(self, tensor: Tensor, tracks: Mapping[Source, Iterable[Track]]) -> None:
        value = self.values.setdefault(id(tensor), Value(tensor))
        found = {
            source: tuple(track for track in some if track.outputs and track.numbers.numel() <= LARGEST)
            for source, some in tracks.items()
        }
        value.tracks = {source: some for source, some in found.items() if some}

    def write(self, target: Tensor, tracks: Mapping[Source, Sequence[Track]]) -> None:
        """Note what was copied into a tensor, which may be a part of another."""
        size = target.untyped_storage().nbytes() // target.itemsize
        if target.numel() == size and self.key(target) not in self.stored:
            self.keep(target, tracks)
            return
        for source, some in tracks.items():
            if size > LARGEST:
                for track in some:
                    self.end_track(source, track)
                continue
            stored = self.stored.setdefault(self.key(target), {})
            if source not in stored:
                stored[source] = torch.full((size,), -1, dtype=torch.int32, device="cpu")
            place = stored[source].as_strided(target.shape, target.stride(), target.storage_offset())
            for track in some:
                numbers = spread(track.numbers, target.shape)
                every_one = bool((numbers >= 0).all())
                place.copy_(numbers if every_one else torch.where(numbers >= 0, numbers, place))
        self._alive.append(target)
        self._writes += 1

    def outputs(self, value: Any, *, alone: bool = False) -> Iterator[tuple[Source, Outputs]]:
        """The outputs that a tensor has elements of; ``alone``, if they were not added to anything."""
        if isinstance(value, Tensor) and id(value) in self.values:
            for source, tracks in self.tracks(self.values[id(value)]).items():
                outputs = union(track for track in tracks if not (alone and track.stream))
                if outputs and source[1] != SLICES and source[1] < LEADS:
                    yield source, outputs

    def note(self, tensor: Tensor, use: UsedAs) -> None:
        value = self.values.get(id(tensor))
        for number in {*value.derived, *(number for number, _ in value.weight)} if value is not None else ():
            if number in self.uses:
                self.uses[number].add(use)

    def end(self, tensor: Tensor) -> None:
        for source, tracks in self.of(tensor).items():
            for track in tracks:
                self.end_track(source, track)

    def end_track(self, source: Source, track: Track, axis: int | None = None) -> None:
        """Outputs end together; those that were added to each other only if as many positions are left as outputs."""
        ends = self.ends[source]
        if not track.others:
            ends.end(End(track.outputs, None if axis is None else track.numbers, 0 if axis is None else axis))
            return
        members = (track.numbers, *track.others)
        positions, outputs = _one_run(members, axis, self.counts[source])
        if positions >= outputs:
            ends.end(End(track.outputs))
            ends.links += [pairs(members[0], other) for other in members[1:]]
            return
        parts = [outputs_of(numbers, self.counts[source]) for numbers in members]
        for number, ours in enumerate(parts):
            ends.end(End(ours))
            for theirs in parts[:number]:
                if not ours & theirs:
                    ends.part(theirs, ours)

    def carry(
        self,
        tensor: Tensor,
        made: Sequence[Tensor],
        move: Callable[[Tensor], Sequence[Tensor | None]],
        *,
        same: bool = False,
        treated: int = 0,
    ) -> None:
        """``made`` have the elements of ``tensor``, where ``move`` puts its numbers."""
        value = self.values.get(id(tensor))
        if value is None and not self.stored:
            return
        for source, tracks in self.of(tensor).items():
            count = self.counts[source]
            for place, one in enumerate(made):
                there = member_of(move, place)
                moved = (track.moved(there, count, same=same) for track in tracks)
                kept = [replace(track, treated=track.treated | treated) for track in moved if track is not None]
                self.keep(one, {**self.values[id(one)].tracks, source: kept})
        for source, numbers in value.weight.items() if value is not None else ():
            for one, its in zip(made, move(numbers)):
                if its is not None:
                    self.values[id(one)].weight[source] = its
                    self.values[id(one)].looked_up = value.looked_up if value is not None else False


def _places(number: int, weight: Tensor) -> Iterator[tuple[Source, Tensor]]:
    """The numbers of a weight's rows, columns and, if it has more than two dimensions, slices."""
    shape = weight.shape
    for dim in (1, 2)[: weight.ndim]:
        view = [1] * weight.ndim
        view[-dim] = shape[-dim]
        yield (number, dim), torch.arange(shape[-dim], dtype=torch.int32, device="cpu").view(view)
    if weight.ndim > 2:
        slices = torch.arange(math.prod(shape[:-2]), dtype=torch.int32, device="cpu")
        yield (number, SLICES), slices.view(*shape[:-2], 1, 1)
    for lead in range(weight.ndim - 2) if weight.ndim > 3 else ():
        places = torch.arange(shape[lead], dtype=torch.int32, device="cpu")
        yield (number, LEADS + lead), places.view([-1 if dim == lead else 1 for dim in range(weight.ndim)])


def once_along(numbers: Tensor, dim: int) -> Tensor:
    """With one place along a dimension along which they do not change; two places tell most that they do."""
    if numbers.shape[dim] < 2 or not torch.equal(numbers.select(dim, 0), numbers.select(dim, -1)):
        return numbers
    only = numbers.narrow(dim, 0, 1)
    return only if bool((numbers == only).all()) else numbers


def _one_run(members: Sequence[Tensor], axis: int | None, count: int) -> tuple[int, int]:
    """Of one run along an axis, or of everything: the positions in which different outputs were added, and these
    outputs."""
    shape = torch.broadcast_shapes(*(numbers.shape for numbers in members))
    full = [numbers.expand(shape) for numbers in members]
    if axis is not None:
        full = [numbers.movedim(axis, -1).flatten(0, -2)[:1] if numbers.ndim > 1 else numbers for numbers in full]
    alike = torch.stack([numbers == full[0] for numbers in full]).all(0)
    outputs = 0
    for numbers in full:
        outputs |= outputs_of(numbers.masked_fill(alike, -1), count)
    return int(((full[0] >= 0) & ~alike).sum()), outputs.bit_count()


def pairs(one: Tensor, other: Tensor) -> np.ndarray:
    """Outputs that belong together, as an array of two rows."""
    shape = torch.broadcast_shapes(one.shape, other.shape)
    both = torch.stack([one.expand(shape).flatten(), other.expand(shape).flatten()])
    both = both[:, (both >= 0).all(0)]
    return np.unique(both.numpy(), axis=1)


def union(tracks: Iterable[Track]) -> Outputs:
    outputs = 0
    for track in tracks:
        outputs |= track.outputs
    return outputs


def member_of(move: Callable[[Tensor], Sequence[Tensor | None]], place: int) -> Callable[[Tensor], Tensor | None]:
    return lambda numbers: move(numbers)[place]
