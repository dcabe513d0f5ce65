"""Views, concatenations, norms, sums and lookups: what they do with outputs of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import Tensor

from lwopt_backend.routing.numbered import Outputs, changes_along, compact, outputs_of
from lwopt_backend.routing.operations import SUMS, aten, concatenated, dims_of, flat, looked_up
from lwopt_backend.routing.tracks import ACTIVATED, SCALED, SLICES, End, Source, Track, Tracks, pairs, union


def view(known: Tracks, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    def move(numbers: Tensor) -> list[Tensor]:
        found = func(numbers.expand(args[0].shape), *args[1:], **kwargs)
        return [compact(one) for one in flat((found,))]

    moves = {aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.expand}
    known.carry(args[0], made, move, same=func.overloadpacket in moves)


def in_place(known: Tracks, func: Any, args: Any, result: Tensor) -> None:
    """A tensor that has one dimension fewer or more from now on; the shape that it had is that of its numbers."""
    view_of = getattr(getattr(aten, func.overloadpacket.__name__.removesuffix("_")), func._overloadname)

    def move(numbers: Tensor) -> list[Tensor | None]:
        if numbers.ndim == result.ndim:  # there was nothing to squeeze
            return [numbers]
        return [view_of(numbers, *args[1:]) if len(args) > 1 else None]

    known.carry(args[0], [result], move, same=True)


def as_complex(known: Tracks, tensor: Tensor, result: Tensor) -> None:
    """Real and imaginary parts are one plane, of which the first has the number. A weight of both is nothing known."""
    value = known.values.get(id(tensor))
    if value is not None and value.weight:
        known.values[id(result)].derived = value.derived | {number for number, _ in value.weight}
        return
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            known.ends[source].links += [pairs(n.narrow(-1, 0, 1), n) for n in (track.numbers, *track.others)]
    known.carry(tensor, [result], lambda numbers: [numbers.select(-1, 0)])


def by_channel(known: Tracks, tensor: Tensor, result: Tensor) -> None:
    """An operation on places, (batch, channels, places): the numbers of channels are carried on."""
    if tensor.ndim != result.ndim:
        known.end(tensor)
        return
    fixed = [dim for dim in range(tensor.ndim) if tensor.shape[dim] != result.shape[dim]]

    def move(numbers: Tensor) -> list[Tensor | None]:
        return [None if any(changes_along(numbers, dim) for dim in fixed) else numbers]

    for source, tracks in known.of(tensor).items():
        for track in tracks:
            if any(changes_along(track.numbers, dim) for dim in fixed):
                known.end_track(source, track)
    known.carry(tensor, [result], move, same=True)


def join(known: Tracks, packet: Any, args: Any, kwargs: Any, result: Tensor) -> None:
    tensors, *more = args
    dim = kwargs.get("dim", more[0] if more else 0) % result.ndim
    if packet is aten.stack:
        shapes = [(*t.shape[:dim], 1, *t.shape[dim:]) for t in tensors]
    else:  # which takes empty tensors of one dimension, as torch does
        tensors = [t for t in tensors if t.ndim == result.ndim]
        shapes = [tuple(t.shape) for t in tensors]
    every_weight = all(_is_weight(known, tensor) for tensor in tensors)
    if every_weight:
        of_weights = [known.values[id(tensor)].weight for tensor in tensors]
        for source in {source for one in of_weights for source in one}:
            pieces = [one.get(source) for one in of_weights]
            known.values[id(result)].weight[source] = concatenated(pieces, shapes, dim, packet is aten.stack)
    else:
        for tensor in tensors:
            known.note(tensor, "added")
    found: dict[Source, list[Track]] = {}
    of_tensors = [known.of(tensor) for tensor in tensors]
    for source in {source: None for one in of_tensors for source in one}:
        joined = _joined(known, [one.get(source, ()) for one in of_tensors], shapes, dim, packet is aten.stack, source)
        found[source] = joined
    known.keep(result, found)


def _is_weight(known: Tracks, tensor: Tensor) -> bool:
    value = known.values.get(id(tensor))
    return value is not None and bool(value.weight)


def _joined(
    known: Tracks, pieces: Sequence[Sequence[Track]], shapes: Sequence[Any], dim: int, stacked: bool, source: Source
) -> list[Track]:
    """The tracks of pieces side by side: one of all pieces that were treated alike, or not at all."""
    apart = [union(tracks) for tracks in pieces if tracks]
    if len(apart) > 1 and not _intersection(apart) and tuple(apart) not in known.ends[source].rejoined:
        known.ends[source].rejoined.append(tuple(apart))
    ways = {track.treated for tracks in pieces for track in tracks}
    untreated = len(ways - {0}) < 2
    slots: dict[tuple[int, int, int], list[Track | None]] = {}
    # Two streams that go on in one tensor, such as tokens of a text and of an image: no step reads both in one run.
    disjoint = len(apart) > 1 and not any(one & other for one, other in combinations(apart, 2))
    streams = disjoint and not stacked and not any(changes_along(t.numbers, dim) for one in pieces for t in one)
    for place, tracks in enumerate(pieces):
        for number, track in enumerate(tracks):
            key = (0 if untreated else track.treated), number, place if streams else 0
            slots.setdefault(key, [None] * len(pieces))[place] = track
    found = []
    for some in slots.values():
        members = max(1 + len(track.others) for track in some if track is not None)
        numbers = [
            concatenated([_member(track, number) for track in some], shapes, dim, stacked) for number in range(members)
        ]
        present = [track for track in some if track is not None]
        treated = 0
        for track in present:
            treated |= track.treated
        found.append(
            Track(numbers[0], union(present), tuple(numbers[1:]), treated, any(track.stream for track in present))
        )
    return found


def gated(known: Tracks, tensor: Tensor, dim: int = -1) -> None:
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            halves = [
                outputs_of(half, known.counts[source])
                for half in _full_along(track.numbers, tensor.shape, dim).chunk(2, dim)
            ]
            for half in halves:
                known.ends[source].end(End(half))
            known.ends[source].activated.append(halves[-1])
            if not halves[0] & halves[-1]:
                known.ends[source].part(halves[0], halves[-1], product=True)


def normed(known: Tracks, packet: Any, args: Any, result: Tensor) -> None:
    tensor = args[0]
    dims = range(1, tensor.ndim) if packet is aten.native_group_norm else range(-len(args[1]), 0)
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            along = [dim for dim in dims if changes_along(track.numbers, dim)]
            if along:
                known.end_track(source, track, along[-1])
    for tensor in flat(args):
        known.note(tensor, "added")


def reduce(known: Tracks, packet: Any, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    tensor, result = args[0], made[0]
    dims, keep = dims_of(func, args, kwargs, tensor.ndim)
    known.note(tensor, "lost")
    found: dict[Source, list[Track]] = {}
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            along = [dim for dim in dims if changes_along(track.numbers, dim)]
            rest = [d for d in range(tensor.ndim) if d not in dims and changes_along(track.numbers, d)]
            if not along:
                found.setdefault(source, []).append(_reduced(track, dims, keep))
            elif source[1] == SLICES:
                others = (track.numbers != track.numbers.narrow(dim, 0, 1) for dim in rest)
                if packet in SUMS and track.treated & SCALED and not any(bool(other.any()) for other in others):
                    known.slices[source[0]].taken = True
            elif packet in SUMS and len(along) == 1 and rest and not track.others:
                numbers = track.numbers.movedim(along[0], -1)
                last = numbers[..., -1:]
                known.ends[source].links.append(pairs(numbers, last))
                kept = replace(track, numbers=last.movedim(-1, along[0]))
                kept = replace(kept, outputs=outputs_of(kept.numbers, known.counts[source]))
                found.setdefault(source, []).append(_reduced(kept, dims, keep))
            elif len(dims) == tensor.ndim > 1:  # a loss over everything, which is no norm
                known.end_track(source, track)
            else:
                known.end_track(source, track, along[-1])
    for one in made:
        if one.ndim == result.ndim:
            known.keep(one, found)


def along(known: Tracks, packet: Any, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    tensor = args[0]
    dims, _ = dims_of(func, args, kwargs, tensor.ndim)
    treated = 0 if packet is aten.cumsum else ACTIVATED
    found: dict[Source, list[Track]] = {}
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            if any(changes_along(track.numbers, dim) for dim in dims):
                known.end_track(source, track, dims[-1])
            else:
                found.setdefault(source, []).append(replace(track, treated=track.treated | treated))
    known.note(tensor, "lost")
    known.keep(made[0], found)


def look_up(known: Tracks, packet: Any, args: Any, result: Tensor) -> None:
    """Rows by number: what does not change along the dimension that is looked up in is carried on."""
    tensor = args[0]
    value = known.values.get(id(tensor))
    move = looked_up(packet, args, result)
    if value is not None and value.weight:
        known.note(tensor, "added")
        known.looked_up |= {number for number, _ in value.weight}
        if move is None or (len(value.weight) < 3 and not value.looked_up):
            return
        for source, numbers in value.weight.items():
            there = move(numbers)
            if there is not None and source[1] < SLICES:
                known.values[id(result)].weight[source] = there
                known.values[id(result)].looked_up = True
    found: dict[Source, list[Track]] = {}
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            moved = None if move is None else track.moved(move, known.counts[source], same=True)
            if moved is None:
                known.end_track(source, track)
            else:
                found.setdefault(source, []).append(moved)
    for one in args[1:]:
        for tensor in flat((one,)):
            known.end(tensor)
    if found:
        known.keep(result, found)


def add_rows(known: Tracks, target: Tensor, dim: int, added: Tensor, result: Tensor) -> None:
    """Rows that are added to those of another tensor, by number."""
    found = {source: list(tracks) for source, tracks in known.of(target).items()}
    for source, tracks in known.of(added).items():
        for track in tracks:
            if changes_along(track.numbers, dim % added.ndim) or added.ndim != result.ndim:
                known.end_track(source, track)
            elif source not in found:
                found[source] = [replace(track, stream=True)]
    known.keep(result, found)


def _reduced(track: Track, dims: Sequence[int], keep: bool) -> Track:
    members = [track.numbers, *track.others]
    for dim in sorted(dims, reverse=True):
        members = [n.narrow(dim, 0, 1) if keep else n.select(dim, 0) for n in members]
    return replace(track, numbers=members[0], others=tuple(members[1:]))


def _full_along(numbers: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    sizes = list(numbers.shape)
    sizes[dim] = shape[dim]
    return numbers.expand(sizes)


def _member(track: Track | None, number: int) -> Tensor | None:
    """The numbers of one of the outputs that were added, or of the only one."""
    if track is None:
        return None
    return track.others[number - 1] if 0 < number <= len(track.others) else track.numbers


def _intersection(sets: Sequence[Outputs]) -> Outputs:
    found = sets[0]
    for one in sets[1:]:
        found &= one
    return found
