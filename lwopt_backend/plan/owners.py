"""Who owns which matrix: the policies, the balance of work over ranks, and the resulting plan."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.cost import Machine, StepTime, per_rank
from lwopt_backend.plan.exchange import (
    Segment,
    Transfer,
    along_column,
    copied_numels,
    has_own_blocks,
    to_fragments,
    to_owners,
)
from lwopt_backend.plan.layouts import Fragment, Layout
from lwopt_backend.plan.mesh import MeshLayout, Rows

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


def longest_first(costs: Iterable[int], loads: Sequence[int]) -> int:
    """The busiest rank's work once all of ``costs`` are dealt to ranks that have ``loads``.

    The costliest comes first, and goes to the least loaded rank: within 4/3 of the best deal there is (Graham 1969).
    """
    heap, busiest = list(loads), max(loads)
    heapq.heapify(heap)
    for cost in sorted(costs, reverse=True):
        busiest = max(busiest, heap[0] + cost)
        heapq.heapreplace(heap, heap[0] + cost)
    return busiest


def stay(atoms: Sequence[Atom], layout: Layout) -> Ownership:
    """Every atom is owned by the rank that stores most of it (the lowest such rank on a tie).

    Moves the fewest elements possible: an atom stored whole on one rank is not sent at all.
    """
    owners = tuple(_largest(layout.fragments(i)).rank for i in range(len(atoms)))
    return Ownership("stay", owners, tuple(per_rank(owners, (atom.cost for atom in atoms), layout.world_size)))


def balance(atoms: Sequence[Atom], layout: Layout, loads: Sequence[int] = ()) -> Ownership:
    """Every atom stays where it is stored, as far as that delays nobody; the others go to the least loaded ranks.

    Nobody is delayed while a rank has no more work than the busiest of a deal in which nothing stays. An atom's home is
    the rank that stores all of it, or at least half. A rank with too much gives away costly atoms first, because these
    have the most work for their bytes. ``loads`` is each rank's work in other plans.
    """
    loads = list(loads or [0] * layout.world_size)
    most = longest_first((atom.cost for atom in atoms), loads)
    homes = _homes(atoms, layout)
    owners = [-1 if home is None else home for home in homes]
    at_home: list[list[int]] = [[] for _ in loads]  # per rank, the costliest last
    pool = []  # of atoms to deal: a heap, the costliest first
    for index in sorted(range(len(atoms)), key=lambda i: (atoms[i].cost, -i)):
        home = homes[index]
        if home is None:
            pool.append((-atoms[index].cost, index))
        else:
            at_home[home].append(index)
            loads[home] += atoms[index].cost

    def give_away(rank: int, least: int | None = None) -> None:
        """Put atoms of ``rank``, only those that cost less than ``least``, back into the pool until it has room."""
        kept: list[int] = []
        for index in reversed(at_home[rank]):
            cost = atoms[index].cost
            if 0 < cost <= loads[rank] - most and (least is None or cost < least):
                loads[rank] -= cost
                heapq.heappush(pool, (-cost, index))
            else:
                kept.append(index)
        if loads[rank] > most and kept and (least is None or atoms[kept[-1]].cost < least):
            index = kept.pop()
            loads[rank] -= atoms[index].cost
            heapq.heappush(pool, (-atoms[index].cost, index))
        at_home[rank] = kept[::-1]

    heapq.heapify(pool)
    for rank, load in enumerate(loads):
        if load > most:
            give_away(rank)
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(lightest)
    while pool:
        negative, index = heapq.heappop(pool)
        _, rank = lightest[0]
        owners[index] = rank
        loads[rank] -= negative
        if loads[rank] > most:
            give_away(rank, -negative)
        heapq.heapreplace(lightest, (loads[rank], rank))
    return Ownership("balance", tuple(owners), tuple(loads))


def _largest(parts: Sequence[Fragment]) -> Fragment:
    return max(parts, key=lambda part: (part.numel, -part.rank))


def _homes(atoms: Sequence[Atom], layout: Layout) -> list[int | None]:
    """Per atom, the rank that alone stores all of it, or at least half; None where there is no such rank."""
    of_kind: dict[Hashable, int | None] = {}
    for index, atom in enumerate(atoms):
        kind = layout.kind(index)
        if kind not in of_kind:
            parts = layout.fragments(index)
            largest = _largest(parts)
            alone = sum(part.numel for part in parts) == atom.numel  # there are no copies
            of_kind[kind] = largest.rank if alone and 2 * largest.numel >= atom.numel else None
    return [of_kind[layout.kind(index)] for index in range(len(atoms))]


# Buckets of the matrices that are exchanged, and owners bucket by bucket.
#
# Two buckets are in flight, and the ranks take part in every exchange in one order. So a bucket arrives when all ranks
# are done with the last but one before it. If a bucket has less work for some ranks than for others, those wait.

MATRICES_A_RANK = 2  # in a bucket, at least


def cut_buckets(
    atoms: Sequence[Atom],
    travelling: Sequence[int],
    ranks: int,
    *,
    matrices: int | None = None,
    numel: int | None = None,
    before: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms in buckets, of which each has work for all ``ranks`` at the same time.

    A bucket closes once it has two matrices a rank, and as much work as if every rank had its costliest matrix. The
    first one also makes up for the work ``before`` that some ranks have less of than others. What is left at the end
    joins the last bucket, unless it has a matrix a rank and as much work. A user's limits come first: ``matrices``
    close a bucket, and one never exceeds ``numel`` elements, unless a single matrix does.

    Buckets are filled from the first atom on or from the last, whichever makes the largest bucket smaller.
    """
    missing = sum(max(before) - load for load in before) if before else 0

    def is_full(bucket: _Bucket, least: int = MATRICES_A_RANK * ranks if matrices is None else matrices) -> bool:
        enough = ranks * bucket.costliest + bucket.missing if matrices is None else 0
        return len(bucket.members) >= least and bucket.work >= enough

    def filled(order: Sequence[int]) -> list[_Bucket]:
        found, bucket = [], _Bucket(missing)
        for index in order:
            atom = atoms[index]
            if numel is not None and bucket.members and bucket.numel + atom.numel > numel:
                found.append(bucket)
                bucket = _Bucket()
            bucket.add(index, atom)
            if is_full(bucket):
                found.append(bucket)
                bucket = _Bucket()
        while bucket.members and found and not is_full(bucket, least=matrices or ranks):
            if numel is not None and found[-1].numel + bucket.numel > numel:
                break
            last = found.pop()
            for index in bucket.members:
                last.add(index, atoms[index])
            bucket = last
        return [each for each in [*found, bucket] if each.members]

    found = filled(travelling)
    if matrices is None and numel is None and not missing:
        backwards = filled(travelling[::-1])
        if max((each.numel for each in backwards), default=0) < max((each.numel for each in found), default=0):
            return tuple(tuple(each.members[::-1]) for each in reversed(backwards))
    return tuple(tuple(each.members) for each in found)


@dataclass
class _Bucket:
    """A bucket that is being filled, and the work that ranks are ``missing`` before."""

    missing: int = 0
    members: list[int] = field(default_factory=list)
    work: int = 0
    costliest: int = 0
    numel: int = 0

    def add(self, index: int, atom: Atom) -> None:
        self.members.append(index)
        self.work += atom.cost
        self.costliest = max(self.costliest, atom.cost)
        self.numel += atom.numel


def critical_path(
    atoms: Sequence[Atom], buckets: Sequence[Sequence[int]], owners: Sequence[int], loads: Sequence[int]
) -> int:
    """Work (flops) until the last rank is done. ``loads`` is each rank's work before the first bucket.

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


def _deal(
    atoms: Sequence[Atom],
    buckets: Sequence[Sequence[int]],
    loads: Sequence[int],
    earlier: Sequence[int],
    homes: Sequence[int | None],
) -> dict[int, int]:
    """Owners of what is in buckets. In a bucket, the costliest comes first, and goes to the rank that is ready first.

    ``loads`` is each rank's work before the first bucket; among ranks that are ready at once, the one with the least
    ``earlier`` work is taken. An atom goes to its home if that has no more to do in this bucket than a rank on average.
    """
    done, total = list(loads), list(earlier)
    heap = [(done[rank], total[rank], rank) for rank in range(len(done))]
    heapq.heapify(heap)  # an entry is stale once the rank's time grew
    found: dict[int, int] = {}
    slowest_before, slowest = 0, max(done)
    for bucket in buckets:
        level = 0
        if any(homes[index] is not None for index in bucket):
            level = sum(max(time, slowest_before) for time in done) + sum(atoms[index].cost for index in bucket)
        slowest_now = slowest
        for index in sorted(bucket, key=lambda i: (-atoms[i].cost, i)):
            owner, cost = homes[index], atoms[index].cost
            if owner is None or (max(done[owner], slowest_before) + cost) * len(done) > level:
                while done[heap[0][2]] != heap[0][0]:
                    rank = heap[0][2]
                    heapq.heapreplace(heap, (done[rank], total[rank], rank))
                owner = heap[0][2]
            found[index] = owner
            done[owner] = max(done[owner], slowest_before) + cost
            total[owner] += cost
            slowest_now = max(slowest_now, done[owner])
        slowest_before, slowest = slowest, slowest_now
    return found


def _exchanged(
    atoms: Sequence[Atom],
    layout: Layout,
    chosen: Ownership,
    *,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
    bucket_matrices: int | None = None,
    bucket_numel: int | None = None,
    **wire: Any,
) -> MatrixPlan:
    """The plan in which atoms that are whole at their ``chosen`` owner stay, and the others are exchanged.

    Unless everything is to stay, what is exchanged gets other owners, which have work at the same time. What is not
    exchanged in every step has buckets of its own.
    """
    ranks, owners = layout.world_size, list(chosen.owners)
    whole = _whole_at(layout, len(atoms))
    travelling = [index for index, owner in enumerate(owners) if whole[index] != owner]
    work = list(loads or [0] * ranks)
    for index, owner in enumerate(owners):
        work[owner] += atoms[index].cost if whole[index] == owner else 0
    missing = work if any(work) else ()
    rarely = [i for i in travelling if wire.get("block_period", 1) > 1 and has_own_blocks(atoms[i], i, layout)]
    always = [i for i in travelling if i not in set(rarely)] if rarely else travelling
    buckets = cut_buckets(atoms, always, ranks, matrices=bucket_matrices, numel=bucket_numel, before=missing)
    buckets += cut_buckets(atoms, rarely, ranks, matrices=bucket_matrices, numel=bucket_numel)
    if chosen.policy != "stay":
        homes = _homes(atoms, layout)
        for index, owner in _deal(atoms, buckets, work, earlier or [0] * ranks, homes).items():
            owners[index] = owner
        left = (tuple(index for index in bucket if whole[index] != owners[index]) for bucket in buckets)
        buckets = tuple(filter(None, left))
    for index in travelling:
        work[owners[index]] += atoms[index].cost
    return MatrixPlan(tuple(atoms), layout, Ownership(chosen.policy, tuple(owners), tuple(work)), buckets, **wire)


def _whole_at(layout: Layout, atoms: int) -> list[int | None]:
    """Per atom, the only rank that stores any of it, if it stores all."""
    of_kind: dict[Hashable, int | None] = {}
    for index in range(atoms):
        kind = layout.kind(index)
        if kind not in of_kind:
            parts = layout.fragments(index)
            of_kind[kind] = parts[0].rank if len(parts) == 1 else None
    return [of_kind[layout.kind(index)] for index in range(atoms)]


def plan_spread(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    element_bytes: int = 2,
    tensors: int = 1,
    bucket_matrices: int | None = None,
    bucket_numel: int | None = None,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
    block_period: int = 1,
) -> MatrixPlan:
    """Plan matrices that hosts spread over all ranks (ZeRO-3, FSDP2), in the order in which they are exchanged.

    ``loads`` is each rank's work before the first bucket; ``earlier`` is work after which the ranks have met.
    ``bucket_matrices`` and ``bucket_numel`` are a user's limits, as in ``cut_buckets``.
    """
    return _exchanged(
        atoms,
        layout,
        balance(atoms, layout, loads),
        loads=loads,
        earlier=earlier,
        bucket_matrices=bucket_matrices,
        bucket_numel=bucket_numel,
        element_bytes=element_bytes,
        tensors=tensors,
        block_period=block_period,
    )


def plan_matrices(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    policy: str,
    machine: Machine,
    element_bytes: int,
    tensors: int = 1,
    bucket_numel: int | None = None,
    earlier: Sequence[int] = (),
    block_period: int = 1,
) -> MatrixPlan:
    """Plan matrices in flat partitions (ZeRO-1/2), where most are whole on one rank, with owners by ``policy``.

    ``auto`` models the step time of every policy on ``machine`` and takes the fastest, ``stay`` on a tie.
    ``element_bytes`` is the size of one element on the wire; ``tensors`` are sent to the owner; ``earlier`` and
    ``bucket_numel`` are as in ``plan_spread``. Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    makers = {"stay": stay, "balance": balance}
    more: dict[str, Any] = {
        "earlier": earlier,
        "bucket_numel": bucket_numel,
        "element_bytes": element_bytes,
        "tensors": tensors,
        "block_period": block_period,
    }
    timed = []
    for make in makers.values() if policy == "auto" else [makers[policy]]:
        plan = _exchanged(atoms, layout, make(atoms, layout), **more)
        timed.append((plan, modelled_time(plan, machine)))
    timed.sort(key=lambda pair: pair[1].total)
    modelled = tuple((plan.ownership.policy, time) for plan, time in timed)
    return replace(timed[0][0], modelled=modelled)


def modelled_time(plan: MatrixPlan, machine: Machine) -> StepTime:
    """Modelled seconds per step: work until the last rank is done, the busiest link's bytes, and the collectives.

    Matrices that are not exchanged are updated first, so what a rank sends to owners meanwhile costs it nothing.
    """
    rates = machine.bytes_per_second, machine.flops_per_second
    exposed = (
        back / rates[0] + max(0.0, forth / rates[0] - load / rates[1])
        for forth, back, load in zip(*plan.bytes_forth_and_back(), plan.loads_before)
    )
    trips = sum(map(plan.trips, range(len(plan.buckets))))
    return StepTime(plan.path / rates[1], max(exposed), trips * machine.latency_seconds)


FEW = 8  # pieces of a matrix, which are counted rank by rank


@dataclass(frozen=True, slots=True)
class _Parts:
    """A matrix's elements on all ranks, copies included; and its pieces, or the largest one's if there are many."""

    total: int
    largest: int
    few: tuple[Fragment, ...]


@dataclass(slots=True)
class _Buffers:
    """Elements of a bucket: of pieces on every rank, and of what returns to every rank; and by rank of further pieces,
    of what it owns, and returns."""

    pieces: int
    landed: int
    held: Counter[int]
    owned: Counter[int]
    returned: Counter[int]


@dataclass(frozen=True)
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
    block_period: int = 1  # steps from one update of whole matrices to the next; each rank's block in those between

    @cached_property
    def in_blocks(self) -> frozenset[int]:
        """The exchanged atoms of which each rank has a block, so that nothing of them travels in steps in blocks."""
        every = (atom for bucket in self.buckets for atom in bucket)
        return frozenset(i for i in every if has_own_blocks(self.atoms[i], i, self.layout))

    @cached_property
    def between(self) -> MatrixPlan:
        """What travels in a step in blocks."""
        return replace(self, buckets=tuple(each for each in self.buckets if not self.in_blocks.issuperset(each)))

    @cached_property
    def loads_before(self) -> tuple[int, ...]:
        """Per rank, the work before the first bucket: on matrices that are not exchanged, and in other plans."""
        loads = list(self.ownership.loads)
        for bucket in self.buckets:
            for atom in bucket:
                loads[self.ownership.owners[atom]] -= self.atoms[atom].cost
        return tuple(loads)

    @cached_property
    def path(self) -> int:
        """Work (flops) until the last rank is done, as in ``critical_path``."""
        return critical_path(self.atoms, self.buckets, self.ownership.owners, self.loads_before)

    def local_atoms(self, rank: int) -> list[int]:
        """Atoms that ``rank`` owns and stores whole."""
        exchanged = {atom for bucket in self.buckets for atom in bucket}
        return [i for i, owner in enumerate(self.ownership.owners) if owner == rank and i not in exchanged]

    def keeps_state(self, atom: int, rank: int) -> bool:
        """Whether ``rank`` keeps the state of a piece of ``atom``."""
        if self.layout.fragment(atom, rank) is None:
            return False
        return self.layout.keeps_state(atom, rank, self.ownership.owners[atom])

    def stays(self, bucket: int) -> bool:
        """Whether the owners of the bucket's atoms already store them whole, so that nothing is sent to them."""
        held = ((self.layout.fragment(i, self.ownership.owners[i]), self.atoms[i]) for i in self.buckets[bucket])
        return all(part is not None and part.numel == atom.numel for part, atom in held)

    @cached_property
    def rows(self) -> Rows | None:
        """Rows of ranks within which pieces travel to their owner and back; None if they travel between all ranks."""
        return self.layout.rows if isinstance(self.layout, MeshLayout) else None

    @property
    def copies(self) -> int:
        """The number of rows, 1 without any."""
        return 1 if self.rows is None else len(self.rows.of[0][1])

    def trips(self, bucket: int) -> int:
        """The number of the bucket's collectives: to the owners, unless it stays, back, and along columns."""
        return (0 if self.stays(bucket) else self.tensors) + (1 if self.rows is None else 2)

    def transfer(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer to the owners, as ``rank`` sees it; within its row if there are ``rows``."""
        return to_owners(self.buckets[bucket], self.ownership.owners, self.layout, rank, self.rows)

    def way_back(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer from the owners to the ranks of ``transfer`` that store pieces, as ``rank`` sees it."""
        return to_fragments(self.buckets[bucket], self.ownership.owners, self.layout, rank, self.rows)

    def pieces_of_column(self, bucket: int, rank: int) -> list[list[Segment]]:
        """Per rank of the column of ``rank``, the pieces that it gets in ``way_back``, in order, and then passes on."""
        everything = to_fragments(self.buckets[bucket], self.ownership.owners, self.layout, rank)
        return [] if self.rows is None else along_column(everything, self.rows, rank)

    def lines(self) -> list[str]:
        """The lines, one per atom, that must be equal on all ranks before the first exchange."""
        return [
            f"{atom.name} {atom.shape[0]}x{atom.shape[1]} {self.layout.place(index)} owner {owner}"
            for index, (atom, owner) in enumerate(zip(self.atoms, self.ownership.owners))
        ] + [
            f"buckets {self.buckets} of {self.tensors} x {self.element_bytes} bytes an element"
            + (f", whole in every step {self.block_period}" if self.block_period > 1 else "")
        ]

    def owned_counts(self) -> list[int]:
        """Per rank, the number of atoms that it owns."""
        return per_rank(self.ownership.owners, repeat(1), self.layout.world_size)

    def owned_numels(self) -> list[int]:
        """Per rank, the elements of the atoms that it owns."""
        return per_rank(self.ownership.owners, (atom.numel for atom in self.atoms), self.layout.world_size)

    def moved_numel(self) -> list[int]:
        """Per rank, the elements that it stores whose update another rank computes."""
        stored, own = self._stored()
        return [all_of_it - mine for all_of_it, mine in zip(stored, own)]

    def _stored(self) -> tuple[list[int], list[int]]:
        """Per rank, the elements that it stores of the exchanged atoms, and of those among them that it owns."""
        stored, own = ([0] * self.layout.world_size for _ in range(2))
        for atom, owners in self._alike():
            times = sum(owners.values())
            for part in self.layout.fragments(atom):
                stored[part.rank] += part.numel * times
                own[part.rank] += part.numel * owners.get(part.rank, 0)
        return stored, own

    def wire_bytes(self) -> list[int]:
        """Per rank, the bytes that it sends in one step: fragments to owners, and updates back."""
        return [*map(sum, zip(*self.bytes_forth_and_back()))]

    def bytes_forth_and_back(self) -> tuple[list[int], list[int]]:
        """Per rank, the bytes that it sends to owners in one step, and those that it returns or passes on."""
        forth, back = ([0] * self.layout.world_size for _ in range(2))
        for atom, owners in self._alike():
            copies: list[tuple[Sequence[Fragment], Counter[int]]] = []  # what is sent, and the owners it is sent to
            for owner, times in owners.items():
                for parts, served in copies:
                    if self.layout.is_source(atom, parts[0].rank, owner):
                        served[owner] = times
                        break
                else:
                    copies.append((self.layout.sources(atom, owner), Counter({owner: times})))
            for parts, served in copies:
                every = served.total()
                for part in parts:
                    forth[part.rank] += part.numel * self.tensors * (every - served[part.rank])
            held = {part.rank: part.numel for part in self.layout.fragments(atom)}
            whole = sum(held.values()) // self.copies
            for owner, times in owners.items():
                back[owner] += (whole - held.get(owner, 0)) * times
        for bucket in self.buckets:
            for rank, numel in enumerate(copied_numels(bucket, self.ownership.owners, self.layout, self.rows)):
                back[rank] += numel * (self.copies - 1)
        forth_and_back = ([numel * self.element_bytes for numel in some] for some in (forth, back))
        return next(forth_and_back), next(forth_and_back)

    def exchange_bytes(self) -> list[int]:
        """Per rank, the most bytes that the buffers of exchanges take at one time in a step.

        While a bucket is updated: what was sent and received of it and of the next, its matrices and their updates, or
        these and what returns, and what returns of the bucket before, with ``rows`` of the two before. A rank's pieces
        are counted as the largest ones where many ranks have some.
        """
        nothing = _Buffers(0, 0, Counter(), Counter(), Counter())
        buckets = [nothing, nothing, *map(self._buffers, self.buckets), nothing]
        found, everywhere = [0] * self.layout.world_size, 0
        for earlier, before, now, after in zip(buckets, buckets[1:], buckets[2:], buckets[3:]):
            least = self.tensors * (now.pieces + after.pieces) + now.landed + before.landed
            least += 0 if self.rows is None else earlier.landed
            everywhere = max(everywhere, least)
            for rank in {*before.held, *before.owned, *now.held, *now.owned, *after.held, *after.owned}:
                arrived = sum(self.tensors * (each.held[rank] + each.owned[rank]) for each in (now, after))
                made = now.owned[rank] + max(self.tensors * now.owned[rank], now.returned[rank] + now.held[rank])
                most = least + arrived + made + before.returned[rank] + before.held[rank]
                found[rank] = max(found[rank], most)
        return [max(numel, everywhere) * self.element_bytes for numel in found]

    def _buffers(self, bucket: Sequence[int]) -> _Buffers:
        """Elements of one bucket."""
        found = _Buffers(0, 0, Counter(), Counter(), Counter())
        for atom in bucket:
            owner, parts = self.ownership.owners[atom], self._parts_of(atom)
            found.owned[owner] += self.atoms[atom].numel
            found.returned[owner] += parts.total // self.copies
            found.pieces += parts.largest
            for part in parts.few:
                found.held[part.rank] += part.numel
        copied = copied_numels(bucket, self.ownership.owners, self.layout, self.rows)
        found.landed = max(copied, default=found.pieces) * self.copies
        return found

    def _parts_of(self, atom: int) -> _Parts:
        kind = self.layout.kind(atom)
        if kind not in self._kinds:
            parts = self.layout.fragments(atom)
            total = sum(part.numel for part in parts)
            many = len(parts) > FEW
            largest = max(part.numel for part in parts) if many else 0
            self._kinds[kind] = _Parts(total, largest, () if many else tuple(parts))
        return self._kinds[kind]

    @cached_property
    def _kinds(self) -> dict[Hashable, _Parts]:
        return {}

    def _alike(self) -> Iterator[tuple[int, Counter[int]]]:
        """Yield one of the exchanged atoms that are stored alike, and how many of them each rank owns."""
        first: dict[Hashable, int] = {}
        counts: dict[int, Counter[int]] = {}
        for bucket in self.buckets:
            for atom in bucket:
                found = counts.setdefault(first.setdefault(self.layout.kind(atom), atom), Counter())
                found[self.ownership.owners[atom]] += 1
        yield from counts.items()
