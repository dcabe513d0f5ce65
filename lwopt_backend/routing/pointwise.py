"""Element-wise operations: what they do with outputs of weights, where outputs meet position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.routing.numbered import spread
from lwopt_backend.routing.operations import ACTIVATIONS, ADDS, LINEAR, MULTIPLIES, aten
from lwopt_backend.routing.tracks import ACTIVATED, SCALED, Source, Track, Tracks, Value, Weighed, pairs

PRODUCTS_BY_ELEMENT = {aten.mul, aten.mul_}
MOST_JOINED = 4  # outputs of one weight in one position that a rotation may have


def pointwise(known: Tracks, packet: Any, func: Any, given: Sequence[Tensor], result: Tensor) -> None:
    values = [known.values.get(id(tensor)) for tensor in given]
    tracks_of = [known.of(tensor) for tensor in given]
    _weights_pointwise(known, given, values, result)
    if packet in PRODUCTS_BY_ELEMENT and len(given) == 2:
        _note_product(known, given, values, result)
    multiplies, adds = packet in MULTIPLIES, packet in ADDS
    activates = packet not in LINEAR
    named = packet.__name__.rstrip("_") in ACTIVATIONS
    found: dict[Source, list[Track]] = {}
    for source in {source: None for tracks in tracks_of for source in tracks}:
        mine: list[Track] = []
        for tracks in tracks_of:
            placed = [_broadcast(track, result) for track in tracks.get(source, ())]
            mine = _combined(known, source, mine, placed, "*" if multiplies else "+" if adds else "?")
        foreign = any(
            value is not None and value.data and source not in tracks for value, tracks in zip(values, tracks_of)
        )
        marks = (ACTIVATED if activates else 0) | (SCALED if foreign and multiplies else 0)
        found[source] = [
            replace(track, treated=track.treated | marks, stream=track.stream or (foreign and adds)) for track in mine
        ]
        if named:
            known.ends[source].activated += [track.outputs for track in mine]
    if found or id(result) in known.values:
        of_factors = known.values[id(result)].weight.keys() if id(result) in known.values else ()
        known.keep(result, {source: mine for source, mine in found.items() if source not in of_factors})


def _note_product(known: Tracks, given: Sequence[Tensor], values: Sequence[Value | None], result: Tensor) -> None:
    """Of a product element by element, note what a sum of it would be."""
    one, other = values
    if one is None or other is None:
        return
    ours = known.values[id(result)]
    ours.paired = one.data and other.data and one is not other
    for weight, data, of_data in ((one, other, given[1]), (other, one, given[0])):
        if weight.weight and not weight.data and data.data:
            numbers = {source: spread(some, result.shape) for source, some in weight.weight.items()}
            shape = (*[1] * (result.ndim - of_data.ndim), *of_data.shape)
            ours.weighed = Weighed(numbers, shape, weight.behind)


def _combined(known: Tracks, source: Source, mine: list[Track], more: list[Track], how: str) -> list[Track]:
    """The tracks of two operands of an element-wise operation, where they meet."""
    for other in more:
        for place, one in enumerate(mine):
            met = _met(known, source, one, other, how)
            if met is not None:
                mine = [*mine[:place], *met, *mine[place + 1 :]]
                break
        else:
            mine = [*mine, other]
    return mine


def _met(known: Tracks, source: Source, one: Track, other: Track, how: str) -> list[Track] | None:
    """What becomes of two tracks; None if they have no position in common."""
    ends = known.ends[source]
    treated, stream = one.treated | other.treated, one.stream or other.stream
    if how == "*" and bool(one.others) != bool(other.others) and one.outputs & other.outputs:
        known.end_track(source, one)  # a sum that one of its own summands scales, which is no rotation
        known.end_track(source, other)
        return []
    if (again := _again(one, other)) is not None:
        return [replace(again, treated=treated | (ACTIVATED if how == "*" else 0), stream=stream)]
    if not bool(((one.numbers >= 0) & (other.numbers >= 0)).any()):
        if one.others or other.others:
            return None
        numbers = torch.where(one.numbers >= 0, one.numbers, other.numbers)
        return [Track(numbers, one.outputs | other.outputs, (), treated, stream)]
    if one.outputs & other.outputs:  # a rotation in place, or a sum that is taken off
        ends.links.append(pairs(one.numbers, other.numbers))
        return [replace(one, treated=treated, stream=stream)]
    alike = one.treated & SCALED == other.treated & SCALED and not stream
    if how == "+" and alike and len(one.others) + len(other.others) + 2 <= MOST_JOINED:
        others = *one.others, other.numbers, *other.others
        return [Track(one.numbers, one.outputs | other.outputs, others, treated, stream)]
    ends.part(one.outputs, other.outputs, product=how == "*")
    known.end_track(source, one)
    known.end_track(source, other)
    return []


def _again(one: Track, other: Track) -> Track | None:
    """The track that has the outputs of both, if one of them is, or was added to, the other."""
    for more, less in ((one, other), (other, one)):
        if not less.others and any(_are_equal(less.numbers, member) for member in (more.numbers, *more.others)):
            return more
    return one if _are_equal(one.numbers, other.numbers) else None


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _weights_pointwise(known: Tracks, given: Sequence[Tensor], values: Sequence[Value | None], result: Tensor) -> None:
    data = any(value is not None and value.data for value in values)
    to_weight = any(value is not None and value.weight for value in values)
    for tensor, value in zip(given, values):
        if value is not None and value.factors and not data:  # which are a weight once they are added to one
            ours = known.values[id(result)]
            (ours.weight if to_weight else ours.factors).update(value.factors)
        if value is None or not (value.weight or value.derived):
            continue
        if data or tensor.numel() < result.numel():
            known.note(tensor, "added")
        if not data and tensor.numel() == result.numel() and tensor.ndim == result.ndim:
            known.values[id(result)].weight.update(value.weight)


def _broadcast(track: Track, result: Tensor) -> Track:
    if track.numbers.ndim == result.ndim:
        return track
    first, *others = (spread(numbers, result.shape) for numbers in (track.numbers, *track.others))
    return replace(track, numbers=first, others=tuple(others))
