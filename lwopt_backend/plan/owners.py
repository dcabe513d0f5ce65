"""Who owns which matrix: the policies, the balance of work over ranks, and the resulting plan."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.buffers.packing import plan_compact
from lwopt_backend.plan.cost import Machine, StepTime, per_rank, step_time
from lwopt_backend.plan.exchange import Transfer, to_fragments, to_owners
from lwopt_backend.plan.layouts import Layout

POLICIES = ("auto", "stay", "balance")


@dataclass(frozen=True, slots=True)
class Ownership:
    """``owners[i]`` is the rank that updates atom i; ``loads[r]`` is the work (flops) rank r does per step."""

    policy: str
    owners: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1.0 is perfect."""
        return imbalance(self.loads)


def stay(atoms: Sequence[Atom], layout: Layout) -> Ownership:
    """Every atom is owned by the rank that stores most of it (the lowest such rank on a tie).

    Moves the fewest elements possible: an atom stored whole on one rank is not sent at all.
    """
    owners = tuple(max(layout.fragments(i), key=lambda part: (part.numel, -part.rank)).rank for i in range(len(atoms)))
    loads = per_rank(owners, (atom.cost for atom in atoms), layout.world_size)
    return Ownership("stay", owners, tuple(loads))


def balance(atoms: Sequence[Atom], layout: Layout) -> Ownership:
    """Longest processing time first: the costliest atom goes to the least loaded rank (Graham 1969, within 4/3).

    Among equally loaded ranks, the one that stores most of the atom wins, then the lowest: fewer elements are sent, and
    the result depends on nothing but the input.
    """
    loads = [0] * layout.world_size
    owners = [0] * len(atoms)
    lightest = [(0, rank) for rank in range(layout.world_size)]  # a heap; an entry is stale once the rank's load grew
    for index in sorted(range(len(atoms)), key=lambda i: (-atoms[i].cost, i)):
        while loads[lightest[0][1]] != lightest[0][0]:
            heapq.heappop(lightest)
        least, owner = lightest[0]
        holders = [part for part in layout.fragments(index) if loads[part.rank] == least]
        if holders:
            owner = max(holders, key=lambda part: (part.numel, -part.rank)).rank
        owners[index] = owner
        loads[owner] += atoms[index].cost
        heapq.heappush(lightest, (loads[owner], owner))
    return Ownership("balance", tuple(owners), tuple(loads))


# Plans for storage that spreads every matrix over all ranks (FSDP2): all are exchanged, so owners follow the work.

MATRICES_A_RANK = 2  # in a bucket, by default: fewer, and some ranks idle while others work


def plan_spread(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    element_bytes: int = 2,
    tensors: int = 1,
    bucket_matrices: int | None = None,
    bucket_numel: int | None = None,
    loads: Sequence[int] | None = None,
) -> MatrixPlan:
    """Plan matrices, given in backward order.

    A bucket has at least ``bucket_matrices`` (by default twice the number of ranks) and, if given, at most
    ``bucket_numel`` elements. Owners are balanced over all buckets: ``loads`` is each rank's work from other plans, and
    its work in one bucket counts in the next. A matrix that one rank stores whole stays there.
    """
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
    return MatrixPlan(tuple(atoms), layout, ownership, buckets, element_bytes, tensors=tensors)


def cut_buckets(
    atoms: Sequence[Atom], travelling: Sequence[int], matrices: int, numel: int | None
) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms in buckets of at least ``matrices``: as many buckets as possible, nearly equal in number.

    A bucket closes earlier if it would exceed ``numel`` elements; an atom of more has a bucket to itself.
    """
    count = max(1, len(travelling) // matrices)
    ends = {len(travelling) * (number + 1) // count for number in range(count)}
    buckets: list[list[int]] = []
    closed, filled = True, 0
    for position, index in enumerate(travelling):
        more = atoms[index].numel
        if closed or (numel is not None and filled + more > numel):
            buckets.append([])
            closed, filled = False, 0
        filled += more
        buckets[-1].append(index)
        closed = closed or position + 1 in ends
    return tuple(map(tuple, buckets))


def critical_path(
    atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], owners: dict[int, int], loads: Sequence[int]
) -> int:
    """Work (flops) until the last rank is done, if no rank can be more than one bucket ahead of the slowest.

    A bucket is sent when its predecessor is about to be computed, so it arrives when all ranks have got that far.
    """
    done = list(loads)  # of the ranks that have had work since, when they were done with it
    slowest_before, slowest = 0, max(loads)
    for bucket in buckets:
        work: dict[int, int] = {}
        for index in bucket:
            work[owners[index]] = work.get(owners[index], 0) + atoms[index].cost
        for rank, more in work.items():
            done[rank] = max(done[rank], slowest_before) + more
        slowest_before, slowest = slowest, max([slowest, *(done[rank] for rank in work)])
    return slowest


def _candidates(atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], loads: Sequence[int]) -> list[dict[int, int]]:
    """Owners bucket by bucket and, if no rank has work from other plans, owners for all matrices at once.

    In a bucket, the costliest matrix comes first, and goes to the rank with the least work so far (Graham 1969).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = {}
    for bucket in buckets:
        for index in sorted(bucket, key=lambda i: (-atoms[i].cost, i)):
            least, owner = heap[0]
            heapq.heapreplace(heap, (least + atoms[index].cost, owner))
            owners[index] = owner
    found = [owners]
    travelling = [index for bucket in buckets for index in bucket]
    if travelling and not any(loads):
        at_once = plan_compact([atoms[index] for index in reversed(travelling)], len(loads), bucket_numel=None)
        found.append(dict(zip(reversed(travelling), at_once.owners)))
    return found


# Plans for flat partitions (ZeRO-1/2), where most matrices are whole on one rank and only the others are exchanged.


def plan_matrices(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    policy: str,
    machine: Machine,
    bucket_numel: int,
    element_bytes: int,
    tensors: int = 1,
) -> MatrixPlan:
    """Choose owners by ``policy``, and put what must be exchanged into buckets of at most ``bucket_numel`` elements.

    ``auto`` models the step time of every policy on ``machine`` and takes the fastest, ``stay`` on a tie.
    ``element_bytes`` is the size of one element on the wire; ``tensors`` are sent to the owner. Raises ValueError for
    an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    makers = {"stay": stay, "balance": balance}
    timed = []
    for make in makers.values() if policy == "auto" else [makers[policy]]:
        ownership = make(atoms, layout)
        travelling = [i for i, owner in enumerate(ownership.owners) if not is_whole(layout, i, owner)]
        buckets = cut_buckets(atoms, travelling, max(1, len(travelling)), bucket_numel)
        plan = MatrixPlan(tuple(atoms), layout, ownership, buckets, element_bytes, tensors=tensors)
        timed.append((plan, modelled_time(plan, machine)))
    timed.sort(key=lambda pair: pair[1].total)
    modelled = tuple((plan.ownership.policy, time) for plan, time in timed)
    return replace(timed[0][0], modelled=modelled)


def modelled_time(plan: MatrixPlan, machine: Machine) -> StepTime:
    """Modelled seconds per step: the busiest rank's work, the busiest link's bytes, and the buckets' collectives."""
    return step_time(
        machine,
        flops=max(plan.ownership.loads),
        nbytes=max(plan.wire_bytes()),
        collectives=sum(map(plan.trips, range(len(plan.buckets)))),
    )


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one group of matrices is updated: who owns what, and the buckets in which the rest is exchanged.

    ``buckets`` have only atoms that are not whole at their owner; all others are stepped in place. ``modelled`` are the
    step times that were compared, the chosen policy's first.
    """

    atoms: tuple[Atom, ...]
    layout: Layout
    ownership: Ownership
    buckets: tuple[tuple[int, ...], ...]
    element_bytes: int
    modelled: tuple[tuple[str, StepTime], ...] = ()
    tensors: int = 1  # sent to the owner: the direction, or the gradient and the weight

    @property
    def length(self) -> int:
        """Work (flops) until the last rank is done, as in ``critical_path``."""
        in_buckets = {atom for bucket in self.buckets for atom in bucket}
        before = list(self.ownership.loads)
        for atom in in_buckets:
            before[self.ownership.owners[atom]] -= self.atoms[atom].cost
        return critical_path(self.atoms, self.buckets, dict(enumerate(self.ownership.owners)), before)

    def local_atoms(self, rank: int) -> list[int]:
        """Atoms that ``rank`` owns and stores whole."""
        return [i for i, owner in enumerate(self.ownership.owners) if owner == rank and is_whole(self.layout, i, owner)]

    def keeps_state(self, atom: int, rank: int) -> bool:
        """Whether ``rank`` keeps the state of a piece of ``atom``."""
        if self.layout.fragment(atom, rank) is None:
            return False
        return self.layout.keeps_state(atom, rank, self.ownership.owners[atom])

    def stays(self, bucket: int) -> bool:
        """Whether the owners of the bucket's atoms already store them whole, so that nothing is sent to them."""
        held = ((self.layout.fragment(i, self.ownership.owners[i]), self.atoms[i]) for i in self.buckets[bucket])
        return all(part is not None and part.numel == atom.numel for part, atom in held)

    def trips(self, bucket: int) -> int:
        """The number of the bucket's all-to-alls: to the owners, unless it stays, and back."""
        return 1 if self.stays(bucket) else 1 + self.tensors

    def transfer(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer to the owners, as ``rank`` sees it."""
        return to_owners(self.buckets[bucket], self.ownership.owners, self.layout, rank)

    def way_back(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer from the owners to all ranks that store pieces, as ``rank`` sees it."""
        return to_fragments(self.buckets[bucket], self.ownership.owners, self.layout, rank)

    def lines(self) -> list[str]:
        """The lines, one per atom, that must be equal on all ranks before the first exchange."""
        return [
            f"{atom.name} {atom.shape[0]}x{atom.shape[1]} {self.layout.place(index)} owner {owner}"
            for index, (atom, owner) in enumerate(zip(self.atoms, self.ownership.owners))
        ] + [f"buckets {self.buckets} of {self.tensors} x {self.element_bytes} bytes an element"]

    def owned_counts(self) -> list[int]:
        """Per rank, the number of atoms that it owns."""
        return per_rank(self.ownership.owners, repeat(1), self.layout.world_size)

    def owned_numels(self) -> list[int]:
        """Per rank, the elements of the atoms that it owns."""
        return per_rank(self.ownership.owners, (atom.numel for atom in self.atoms), self.layout.world_size)

    def moved_numel(self) -> list[int]:
        """Per rank, the elements that it stores whose update another rank computes."""
        moved = [0] * self.layout.world_size
        for atom, owner, times in self._alike(atom for bucket in self.buckets for atom in bucket):
            for part in self.layout.fragments(atom):
                moved[part.rank] += part.numel * times if part.rank != owner else 0
        return moved

    def wire_bytes(self) -> list[int]:
        """Per rank, the bytes that it sends in one step: fragments to owners, and updates back."""
        sent = [0] * self.layout.world_size
        for atom, owner, times in self._alike(atom for bucket in self.buckets for atom in bucket):
            for part in self.layout.sources(atom, owner):
                sent[part.rank] += part.numel * times * self.tensors if part.rank != owner else 0
            for part in self.layout.fragments(atom):
                sent[owner] += part.numel * times if part.rank != owner else 0
        return [numel * self.element_bytes for numel in sent]

    def _alike(self, atoms: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield one of the atoms that are stored alike and have one owner, that owner, and the number of such atoms."""
        first: dict[Hashable, int] = {}
        counts = Counter((first.setdefault(self.layout.kind(i), i), self.ownership.owners[i]) for i in atoms)
        for (atom, owner), times in counts.items():
            yield atom, owner, times


def is_whole(layout: Layout, atom: int, rank: int) -> bool:
    """Whether ``rank`` stores every element of ``atom``, and no other rank any."""
    parts = layout.fragments(atom)
    return len(parts) == 1 and parts[0].rank == rank
