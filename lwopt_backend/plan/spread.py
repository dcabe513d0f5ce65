"""Plans for storage that spreads every matrix over all ranks (FSDP2): all of them travel, so owners follow the work."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from lwopt_backend.plan.buffers.compact import plan_compact
from lwopt_backend.plan.matrix_plan import MatrixPlan, is_whole
from lwopt_backend.plan.owners import Ownership
from lwopt_backend.plan.storage import Layout
from lwopt_backend.plan.transfer import equal_split
from lwopt_backend.plan.types import Atom

LAYOUTS = ("auto", "padded", "compact")
MATRICES_A_RANK = 2  # in a bucket, by default: fewer, and some ranks idle while others work


def plan_spread(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    exchange_layout: str = "auto",
    element_bytes: int = 2,
    tensors: int = 1,
    bucket_matrices: int | None = None,
    bucket_numel: int | None = None,
    loads: Sequence[int] | None = None,
) -> MatrixPlan:
    """Plan matrices, given in backward order.

    A bucket holds at least ``bucket_matrices`` (by default twice as many as there are ranks), and at most
    ``bucket_numel`` elements where that is given. Owners are balanced over everything: ``loads`` is the work that each
    rank has elsewhere, and what it was given in one bucket counts in the next. A matrix that one rank stores whole
    stays there. ``exchange_layout`` as in ``bucket_split``. Raises ValueError for an unknown one.
    """
    if exchange_layout not in LAYOUTS:
        raise ValueError(f"unknown layout {exchange_layout!r}; expected one of {', '.join(LAYOUTS)}")
    world_size = layout.world_size
    loads = list(loads or [0] * world_size)
    owners = [-1] * len(atoms)
    holders: dict[Hashable, list[int]] = {}
    for index, atom in enumerate(atoms):
        kind = layout.kind(index)
        if kind not in holders:
            holders[kind] = [part.rank for part in layout.fragments(index)]
        if len(holders[kind]) == 1:
            owners[index] = holders[kind][0]
            loads[owners[index]] += atom.cost
    travelling = [index for index, owner in enumerate(owners) if owner < 0]
    buckets = cut_buckets(atoms, travelling, bucket_matrices or MATRICES_A_RANK * world_size, bucket_numel)
    best = min(_candidates(atoms, buckets, loads), key=lambda found: critical_path(atoms, buckets, found, loads))
    for index, owner in best.items():
        owners[index] = owner
        loads[owner] += atoms[index].cost
    ownership = Ownership("balance", tuple(owners), tuple(loads))
    assert all(is_whole(layout, i, owners[i]) for i in range(len(atoms)) if i not in best)
    splits = tuple(bucket_split(exchange_layout, bucket, atoms, owners, layout) for bucket in buckets)
    return MatrixPlan(tuple(atoms), layout, ownership, buckets, element_bytes, splits=splits, tensors=tensors)


def cut_buckets(
    atoms: Sequence[Atom], travelling: Sequence[int], matrices: int, numel: int | None
) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms in buckets of at least ``matrices``, as many buckets as that allows, nearly equal in number.

    Where one would hold more than ``numel`` elements it closes earlier; an atom of more has a bucket to itself.
    """
    count = max(1, len(travelling) // matrices)
    ends = {len(travelling) * (number + 1) // count for number in range(count)}
    buckets: list[list[int]] = []
    closed, filled = True, 0
    for position, index in enumerate(travelling):
        if closed or (numel is not None and filled + atoms[index].numel > numel):
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += atoms[index].numel
        closed = position + 1 in ends
    return tuple(map(tuple, buckets))


def bucket_split(
    choice: str, bucket: Sequence[int], atoms: Sequence[Atom], owners: Sequence[int], layout: Layout
) -> int | None:
    """How a bucket lies on the wire: the length of its equal parts (``padded``), or None (``compact``).

    ``auto`` takes equal parts where nothing has to be padded for it, because that is the plain all-to-all that every
    transport does best, and parts as long as needed everywhere else.
    """
    if choice == "compact":
        return None
    split = equal_split(bucket, owners, layout)
    travels = sum(atoms[atom].numel for atom in bucket)
    return split if choice == "padded" or split * layout.world_size**2 == travels else None


def critical_path(
    atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], owners: dict[int, int], loads: Sequence[int]
) -> int:
    """Work (flops) until the last rank is done, where no rank can be more than one bucket ahead of the slowest.

    A bucket leaves when its predecessor is about to be computed, so it has arrived when all ranks have got that far.
    """
    done = list(loads)
    slowest_before, slowest = 0, max(loads)
    for bucket in buckets:
        work = [0] * len(done)
        for index in bucket:
            work[owners[index]] += atoms[index].cost
        done = [max(time, slowest_before) + more for time, more in zip(done, work)]
        slowest_before, slowest = slowest, max(done)
    return max(done)


def _candidates(atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], loads: Sequence[int]) -> list[dict[int, int]]:
    """Owners bucket by bucket, and, where no rank has work elsewhere, owners for all of the matrices at once."""
    found = [_bucket_by_bucket(atoms, buckets, loads)]
    travelling = [index for bucket in buckets for index in bucket]
    if travelling and not any(loads):
        at_once = plan_compact([atoms[index] for index in reversed(travelling)], len(loads), bucket_numel=None)
        found.append(dict(zip(reversed(travelling), at_once.owners)))
    return found


def _bucket_by_bucket(atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], loads: Sequence[int]) -> dict[int, int]:
    """In every bucket the costliest matrix first, to the rank with the least work so far (Graham 1969)."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = {}
    for bucket in buckets:
        for index in sorted(bucket, key=lambda i: (-atoms[i].cost, i)):
            load, rank = heapq.heappop(heap)
            owners[index] = rank
            heapq.heappush(heap, (load + atoms[index].cost, rank))
    return owners
