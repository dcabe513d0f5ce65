"""Owner state on its way: from the ranks that loaded it to the owners, in all-to-alls of limited size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Segment, Transfer
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import EXCHANGE_OUT, Collectives, phase
from lwopt_backend.runtime.exchange import Arrival, Way
from lwopt_backend.runtime.state import OwnerState

BUCKET_BYTES = 2**26  # of owner state in one all-to-all
Owned = Mapping[str, tuple[OwnerState, int]]  # by a matrix's name, where its owner keeps its state, and its atom there
Saved = Mapping[str, dict[str, Any]]  # owner state by a matrix's name


Segments = Iterable[tuple[Segment, Tensor]]  # with their flat part of a buffer


def exchange(ways: Iterable[Way], fetch: Callable[[Segment], Tensor], deliver: Callable[[Segments], object]) -> None:
    """Send the bytes that ``fetch`` returns, to ``deliver``. Each bucket leaves when the one before has arrived and is
    freed. Called on all ranks."""
    for way in ways:
        arrival = _sent(way, fetch).passed_on()
        with phase(way.label):
            deliver(zip(way.arriving, arrival.parts()))
        del arrival


def _sent(way: Way, fetch: Callable[[Segment], Tensor]) -> Arrival:
    with phase(way.label):
        packing = way.packing(torch.uint8)
        for segment, target in zip(way.transfer.sends, packing.parts):
            target.copy_(fetch(segment))
        return way.send(packing)


def bring(what: str, groups: Sequence[Collectives], owned: Sequence[Owned], saved: Saved) -> None:
    """Replace the owner state of matrices by what was ``saved`` on any rank that shares them. Called on all ranks.

    ``owned`` are, per group of ranks, the matrices that this rank owns. A rank receives the state that it owns and did
    not save, from the first rank that saved it. State that no rank of a group saved starts fresh. Raises ValueError on
    all ranks, before anything is changed, if a matrix has no state and others have, or state of another type.
    """
    found = [_find(ranks, of_group, saved) for ranks, of_group in zip(groups, owned, strict=True)]

    def check() -> tuple[list[dict[str, dict[str, Any]]], list[list[str]]]:
        if not isinstance(saved, Mapping):
            raise ValueError(f"owner state: expected a dict with every matrix's, found {saved!r}; {ANOTHER}")
        for name, state in saved.items():
            if not isinstance(state, dict):
                raise ValueError(f"owner state of matrix {name!r}: expected a dict, found {state!r}; {ANOTHER}")
            nested.check({name: state})
        made = []
        for ranks, of_group, (wanted, sources, any_saved) in zip(groups, owned, found):
            lost = [name for _, name in wanted if name not in sources]
            if lost and any_saved:
                raise ValueError(f"matrix {lost[0]!r}: expected owner state, as others have, found none; {ANOTHER}")
            mine = [name for owner, name in wanted if owner == ranks.rank and name in sources]
            made.append({name: of_group[name][0].empty_like(sources[name][1]) for name in mine})
        return made, [[] for _ in groups]

    for ranks, of_group, (wanted, sources, _), made in zip(groups, owned, found, agree_in_all(groups, what, check)):
        _send(ranks, [(owner, name) for owner, name in wanted if name in sources], sources, saved, made)
        for name, (owner_state, atom) in of_group.items():
            if name in made:
                owner_state.hold(atom, made[name])
            else:
                owner_state.take({atom: saved.get(name)})


ANOTHER = "a file is damaged or of another save; load another tag, or weights alone with load_optimizer_states=False"
Wanted = list[tuple[int, str]]  # matrices whose owner, a rank, did not save their state
Sources = dict[str, tuple[int, dict[str, Any]]]  # the first rank that saved a matrix's state, and that on meta


def _find(ranks: Collectives, owned: Owned, saved: Saved) -> tuple[Wanted, Sources, bool]:
    """What has to be sent, from where, and whether ranks saved state, which all can read. Called on all ranks of the
    group."""
    here = bool(saved) if isinstance(saved, Mapping) else None
    of_ranks = ranks.gather_objects(([name for name in owned if here is None or name not in saved], here))
    wanted = [(rank, name) for rank, (missing, _) in enumerate(of_ranks) for name in missing]
    sources: Sources = {}
    any_saved = any(has for _, has in of_ranks) and all(has is not None for _, has in of_ranks)
    if wanted and any_saved:
        mine = {name: nested.mapped(saved[name], _on_meta) for _, name in wanted if name in saved}
        for rank, offered in enumerate(ranks.gather_objects(mine)):
            for name, state in offered.items():
                sources.setdefault(name, (rank, state))
    return wanted, sources, any_saved


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor on its way."""

    source: int
    owner: int
    nbytes: int


def _send(ranks: Collectives, wanted: Wanted, sources: Sources, saved: Saved, made: Saved) -> None:
    """Fill what this rank has ``made`` with what others ``saved``. Called on all ranks of the group."""
    moved: list[Moved] = []
    here: dict[int, Tensor] = {}
    for owner, name in wanted:
        source, state = sources[name]
        ours = made if owner == ranks.rank else saved if source == ranks.rank else {}
        here.update(enumerate(nested.tensors(ours.get(name)), len(moved)))
        moved += [Moved(source, owner, like.nbytes) for like in nested.tensors(state)]

    def way(pieces: Sequence[tuple[int, int, int]]) -> Way:
        sends = [Segment(n, moved[n].owner, *at) for n, *at in pieces if moved[n].source == ranks.rank]
        receives = [Segment(n, moved[n].source, *at) for n, *at in pieces if moved[n].owner == ranks.rank]
        ordered = (tuple(sorted(some, key=lambda segment: segment.peer)) for some in (sends, receives))
        return Way(Transfer(ranks.world_size, *ordered), EXCHANGE_OUT, ranks, ranks.device)

    def part(segment: Segment) -> Tensor:
        return _bytes(here[segment.atom])[segment.start : segment.stop]

    exchange(
        map(way, rounds(moved, BUCKET_BYTES)), part, lambda segments: [part(at).copy_(data) for at, data in segments]
    )


def rounds(moved: Sequence[Moved], most: int) -> list[list[tuple[int, int, int]]]:
    """Pieces of tensors (number, start and stop in bytes) in rounds. In a round no rank sends more than ``most`` bytes,
    and none receives more."""
    found: list[tuple[list[tuple[int, int, int]], Counter[int], Counter[int]]] = []
    sends, receives = Counter[int](), Counter[int]()  # per rank, the first round in which it has room
    for number, tensor in enumerate(moved):
        start, place = 0, max(sends[tensor.source], receives[tensor.owner])
        while start < tensor.nbytes:
            if place == len(found):
                found.append(([], Counter(), Counter()))
            pieces, sent, received = found[place]
            fits = min(tensor.nbytes - start, most - sent[tensor.source], most - received[tensor.owner])
            if fits:
                pieces.append((number, start, start + fits))
                sent[tensor.source] += fits
                received[tensor.owner] += fits
            if sent[tensor.source] == most and sends[tensor.source] == place:
                sends[tensor.source] += 1
            if received[tensor.owner] == most and receives[tensor.owner] == place:
                receives[tensor.owner] += 1
            start, place = start + fits, place + 1
    return [pieces for pieces, *_ in found]


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its memory, on which the bits of a matrix product depend."""
    dense = tensor if tensor.stride() == _on_meta(tensor).stride() else tensor.clone()
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)
