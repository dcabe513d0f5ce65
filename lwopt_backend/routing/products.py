"""Products, convolutions and attention: what they do with outputs of weights, and how they use the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.routing.numbered import LARGEST, changes_along, every, outputs_of, spread
from lwopt_backend.routing.tracks import (
    ACTIVATED,
    CHANNELS,
    KERNEL,
    LEADS,
    MIXED,
    SLICES,
    End,
    Ends,
    SliceUse,
    Source,
    Track,
    Tracks,
    UsedAs,
    Value,
    once_along,
    union,
)


def product(known: Tracks, left: Tensor, right: Tensor, result: Tensor) -> None:
    """A product's elements belong to outputs over which it does not sum."""
    _note_uses(known, left, right)
    ndim = max(2, result.ndim)
    found: dict[Source, list[Track]] = {}
    mixed: dict[Source, Tensor] = {}
    for tensor, other, summed, kept in ((left, right, -1, -2), (right, left, -2, -1)):
        value = known.values.get(id(tensor))
        vector = tensor.ndim == 1
        column = vector and tensor is right  # (inputs, 1), or (1, inputs) on the left

        def at(numbers: Tensor, vector: bool = vector, column: bool = column) -> Tensor:
            return numbers.unsqueeze(1 if column else 0) if vector else numbers

        if value is not None and value.weight:
            mixed.update(_use_weight(known, value, at, summed, kept, other, found, ndim))
        for source, tracks in known.of(tensor).items():
            for track in tracks:
                _contract(known, source, track, at, (summed, kept), (tensor, other), found, ndim)
    _end_pairs(known, left, right)
    known.keep(
        result, {source: [_shaped(track, result) for track in tracks] for source, tracks in found.items() if tracks}
    )
    known.values[id(result)].weight.update(mixed)
    known.values[id(result)].looked_up = bool(mixed)
    _factors(known, left, right, result)


def _factors(known: Tracks, left: Tensor, right: Tensor, result: Tensor) -> None:
    """Note the rows of one weight and the columns of another that a product of both has."""
    values = known.values.get(id(left)), known.values.get(id(right))
    if result.ndim != 2 or any(value is None or value.data or len(value.weight) != 2 for value in values):
        return
    for value, summed in zip(values, (-1, -2)):
        for source, numbers in value.weight.items() if value is not None else ():
            if not changes_along(numbers, summed):
                known.values[id(result)].factors[source] = numbers


def _note_uses(known: Tracks, left: Tensor, right: Tensor) -> None:
    for tensor, other in ((left, right), (right, left)):
        value = known.values.get(id(other))
        by_linear = value is not None and any(number not in known.uses for number, _ in value.weight)
        known.note(tensor, "added" if by_linear else "combined" if _is_of_weights(value) else "multiplied")


def _is_of_weights(value: Value | None) -> bool:
    """Whether a tensor is computed from weights alone."""
    return value is not None and not value.data and value.behind > 0


def _use_weight(
    known: Tracks,
    value: Value,
    at: Callable[[Tensor], Tensor],
    summed: int,
    kept: int,
    other: Tensor,
    found: dict[Source, list[Track]],
    ndim: int,
) -> dict[Source, Tensor]:
    """Note how a product uses a weight: what it sums over, and what is left.

    Returns the rows and columns in the result that are still those of a weight: of a stack whose slices other weights
    have mixed, as relations mix bases.
    """
    slices: dict[int, dict[int, set[str]]] = {}
    theirs = known.values.get(id(other))
    of_weight = dict(value.weight)
    for dim in range(max(n.ndim for n in of_weight.values())) if value.looked_up else ():  # where it was divided again
        of_weight = {source: once_along(numbers, dim) for source, numbers in of_weight.items()}
    for source, numbers in of_weight.items():
        placed = at(numbers)
        roles = {"c"} if changes_along(placed, summed) else set()
        roles |= {"k"} if changes_along(placed, kept) else set()
        roles |= {"b"} if any(changes_along(placed, dim) for dim in range(placed.ndim - 2)) else set()
        slices.setdefault(source[0], {})[source[1]] = roles
    mixes = {number for number, roles_of in slices.items() if roles_of.get(SLICES) == {"c"} and _is_of_weights(theirs)}
    still = {source: numbers for source, numbers in of_weight.items() if source[0] in mixes and source[1] < SLICES}
    for source, numbers in of_weight.items():
        placed, roles = at(numbers), slices[source[0]][source[1]]
        if source[0] in mixes:
            continue
        if roles == {"c"} and theirs is not None and theirs.data:
            known.contracted.add(source)
        if "k" in roles and "c" not in roles:
            known.ends.setdefault(source, Ends(known.counts[source]))
            ours = _placed(placed.narrow(summed, 0, 1), ndim)
            track = Track(ours, outputs_of(ours, known.counts[source]))
            if source in found:  # a product of two of its views
                continue
            found[source] = [track]
    for number, roles_of in slices.items():
        if number in mixes:
            continue
        _note_slices(known, number, roles_of, value, at)
        if (kernel := _kernel(known, number, roles_of, value, at)) is not None:
            source = number, KERNEL
            known.ends.setdefault(source, Ends(known.counts[source]))
            ours = _placed(kernel.narrow(summed, 0, 1), ndim)
            found[source] = [Track(ours, every(known.counts[source]))]
    return {source: _placed(at(numbers).narrow(summed, 0, 1), ndim) for source, numbers in still.items()}


def summed(known: Tracks, tensor: Tensor, dims: Sequence[int]) -> int:
    """A sum over ``dims`` of what was multiplied element by element, which is a product where both factors vary.

    Data times a weight is taken as a product with the weight if outputs of others vary there, or all data does, and the
    data is the same along what is left of a weight of two dimensions. Data times data is one if outputs of two weights
    vary there, as queries and keys do. Returns a bit each for weights whose outputs the result has from now on; -1 if
    it is no product.
    """
    value = known.values[id(tensor)]
    tracks = known.tracks(value)
    along = [
        (source[0], track)
        for source, some in tracks.items()
        for track in some
        if any(changes_along(track.numbers, dim) for dim in dims)
    ]
    if value.paired:
        return 0 if len({number for number, track in along if not track.treated & ACTIVATED}) > 1 else -1
    if value.weighed is None:
        return -1
    numbers, shape, behind = value.weighed
    varies = {
        source: [dim for dim in range(tensor.ndim) if changes_along(some, dim)] for source, some in numbers.items()
    }
    over = [dim for dims_of in varies.values() for dim in dims_of if dim in dims]
    left = [dim for dims_of in varies.values() for dim in dims_of if dim not in dims]
    if not any(shape[dim] > 1 for dim in over):
        return -1
    if len(varies) == 2 and len(over) == len(left) == 1 and shape[left[0]] == 1 < shape[over[0]]:
        inputs, outputs = (next(source for source in varies if one[0] in varies[source]) for one in (over, left))
        known.contracted.add(inputs)
        known.ends.setdefault(outputs, Ends(known.counts[outputs]))
        known.uses.get(outputs[0], set[UsedAs]()).add("multiplied")
        return behind
    return behind if along else -1


def _kernel(
    known: Tracks, number: int, roles_of: Mapping[int, set[str]], value: Value, at: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The numbers of the outputs of a kernel, if several of its dimensions are outputs; None for any other weight."""
    leads = sorted(dim for dim in roles_of if dim >= LEADS) or [SLICES]
    kept = [dim for dim in (*leads, 2, 1) if roles_of.get(dim) == {"k"}]
    if len(kept) < 2 or len(roles_of) < 3:
        return None
    count, numbers = 1, torch.zeros((), dtype=torch.int32, device="cpu")
    for dim in kept:
        size = known.counts[number, dim]
        count, numbers = count * size, numbers * size + at(value.weight[number, dim])
    if count > LARGEST:
        return None
    known.counts[number, KERNEL] = count
    return numbers


def _note_slices(
    known: Tracks, number: int, roles_of: Mapping[int, set[str]], value: Value, at: Callable[[Tensor], Tensor]
) -> None:
    use = known.slices.setdefault(number, SliceUse())
    if LEADS in roles_of:
        leads = sorted(dim for dim in roles_of if dim >= LEADS)
        use.dims.add("".join(_letter(roles_of[dim], at(value.weight[number, dim])) for dim in (*leads, 2, 1)))
    if value.looked_up:  # slices that an index chose
        use.taken = True
        return
    if SLICES in roles_of:
        roles = roles_of[SLICES]
        many = known.counts[number, SLICES] > 1
        use.taken = use.taken or (many and roles <= {"b"})
        use.mixed = use.mixed or ("b" in roles and len(roles) > 1)
        use.across = use.across or ("b" not in roles and any("b" in roles_of.get(dim, ()) for dim in (1, 2)))
        if roles and "b" not in roles:
            kept = "k" in roles, "k" in roles_of.get(2, ()), "k" in roles_of.get(1, ())
            use.ways.add(kept)
        return
    rows = value.weight.get((number, 2))
    if rows is None:
        return
    roles = roles_of.get(2, set())
    if "b" in roles:  # a slice at a time, of a view of equal slices
        batch = [dim for dim in range(rows.ndim - 2) if changes_along(rows, dim)]
        for some in rows.movedim(batch, list(range(len(batch)))).flatten(0, len(batch) - 1):
            use.rows[outputs_of(some, known.counts[number, 2]), "c" in roles] = None
    elif rows.numel() < known.counts[number, 2]:
        use.rows[outputs_of(rows, known.counts[number, 2]), "c" in roles] = None


def _letter(roles: set[str], numbers: Tensor) -> str:
    """How a product takes a dimension of a weight; one of size one, or of which it has one index, is the first's."""
    return {"b": "e", "k": "o", "c": "i"}.get("".join(roles), "?") if numbers.numel() > 1 else "e"


def _contract(
    known: Tracks,
    source: Source,
    track: Track,
    at: Callable[[Tensor], Tensor],
    axes: tuple[int, int],
    factors: tuple[Tensor, Tensor],
    found: dict[Source, list[Track]],
    ndim: int,
) -> None:
    """Carry outputs over which a product does not sum, and end the others."""
    (summed, _), (ours, other) = axes, factors
    numbers, size = at(track.numbers), ours.shape[summed if ours.ndim > 1 else 0]
    theirs = known.values.get(id(other))
    by_weight = theirs is not None and not theirs.data and theirs.behind > 0
    if changes_along(numbers, summed) or size == 1:
        if source[1] == SLICES:
            if not changes_along(once_along(numbers, summed), summed):  # else several of them in each product
                _slices_read(known, source, numbers, theirs)
            return
        batched = by_weight and theirs is not None and _slice_by_slice(theirs)
        if batched and numbers.ndim == 3 and changes_along(numbers, 0) and _is_sliced(known, source):
            for one in range(numbers.shape[0]):
                of_one = numbers[one]
                known.ends[source].end(End(outputs_of(of_one, known.counts[source]), of_one, summed))
            return
        known.end_track(source, replace(track, numbers=numbers), summed)
        return
    if source[1] == SLICES:
        _slices_read(known, source, numbers, theirs)
    treated = track.treated | (0 if by_weight or theirs is None or not theirs.data else MIXED)

    def move(n: Tensor) -> Tensor:
        return _placed(at(n).narrow(summed, 0, 1), ndim)

    moved = replace(track, numbers=move(track.numbers), others=tuple(map(move, track.others)), treated=treated)
    if source in found and found[source] and not any(torch.equal(one.numbers, moved.numbers) for one in found[source]):
        for earlier in found.pop(source):  # of channels with channels
            known.end_track(source, earlier)
            if not earlier.outputs & moved.outputs:
                known.ends[source].part(earlier.outputs, moved.outputs)
        known.end_track(source, moved)
        return
    found.setdefault(source, []).append(moved)


def _is_sliced(known: Tracks, source: Source) -> bool:
    use = known.slices.get(source[0])
    return use is not None and (bool(use.ways) or bool(use.rows))


def _slices_read(known: Tracks, source: Source, numbers: Tensor, other: Value | None) -> None:
    """A product of what has outputs of all slices: one at a time, if the other factor is a weight's slices."""
    along = any(changes_along(numbers, dim) for dim in range(numbers.ndim - 2))
    if along and other is not None and not other.data and _slice_by_slice(other):
        known.slices[source[0]].taken = True


def _end_pairs(known: Tracks, left: Tensor, right: Tensor) -> None:
    """Queries and keys of one weight, contracted with each other."""
    ours, theirs = known.of(left), known.of(right)
    for source in ours.keys() & theirs.keys():
        one, other = union(ours[source]), union(theirs[source])
        if not one & other:
            known.ends[source].part(one, other)


def attend(known: Tracks, query: Tensor, key: Tensor, value: Tensor, *, result: Tensor) -> None:
    for tensor in (query, key):
        for source, tracks in known.of(tensor).items():
            for track in tracks:
                known.end_track(source, track, -1)
    _end_pairs(known, query, key)
    for tensor in (query, key, value):
        known.note(tensor, "multiplied")
    if value.ndim == result.ndim:
        known.carry(value, [result], lambda numbers: [numbers], treated=MIXED)
    else:
        known.end(value)


def convolution(known: Tracks, tensor: Tensor, weight: Tensor, *args: Any, result: Tensor) -> None:
    groups = args[-1]
    value = known.values.get(id(weight))
    for number in {number for number, _ in value.weight} if value is not None else ():
        known.convolved[number] = groups, bool(args[4])
    if groups == tensor.shape[1] == result.shape[1]:  # each channel by itself
        _by_channel_of(known, tensor, result)
        known.note(weight, "added")
        return
    for source, tracks in known.of(tensor).items():
        for track in tracks:
            known.end_track(source, track, 1)
    known.note(weight, "multiplied")
    found = {}
    for number in {number for number, _ in value.weight} if value is not None else ():
        source, count = (number, CHANNELS), result.shape[1]
        known.counts[source] = count
        known.ends.setdefault(source, Ends(count))
        ours = torch.arange(count, dtype=torch.int32, device="cpu").view(1, -1, *[1] * (result.ndim - 2))
        found[source] = [Track(ours, every(count))]
    known.keep(result, found)


def _by_channel_of(known: Tracks, tensor: Tensor, result: Tensor) -> None:
    def move(numbers: Tensor) -> list[Tensor]:
        first = numbers
        for dim in range(2, numbers.ndim):
            first = first.narrow(dim, 0, 1)
        return [first]

    known.carry(tensor, [result], move, same=True)


def _slice_by_slice(value: Value) -> bool:
    """Whether a weight, or what was computed from weights, changes along the dimensions of a batch."""
    return any(changes_along(n, dim) for n in value.weight.values() for dim in range(n.ndim - 2))


def _placed(numbers: Tensor, ndim: int) -> Tensor:
    """With as many dimensions as a product's result has."""
    while numbers.ndim > ndim:
        numbers = numbers[0]
    return spread(numbers, [1] * ndim)


def _shaped(track: Track, result: Tensor) -> Track:
    """In the shape of the result of a product with vectors."""
    if result.ndim >= 2:
        return track
    flat = (track.numbers, *track.others)
    first, *others = (numbers.reshape(-1) if result.ndim else numbers.reshape(-1)[:1].reshape(()) for numbers in flat)
    return replace(track, numbers=first, others=tuple(others))
