"""Who owns which matrix: the policies, the balance of work over ranks, and the resulting plan."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, TypedDict

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buckets import (
    BUCKET_LAUNCHES,
    FREE_BYTES,
    NUMBERS,
    BucketSeconds,
    Timeline,
    bucket_work,
    critical_path,
    cut_buckets,
    deal_buckets,
    equal_buckets,
    pipeline,
)
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.cost import (
    MEMORY_BYTES_PER_SECOND,
    MUON_IN_FP32,
    ElementwiseBytes,
    Machine,
    StepTime,
    per_rank,
)
from lwopt_backend.plan.exchange import (
    Segment,
    Transfer,
    along_column,
    copied_numels,
    transfer_of,
    with_own_blocks,
)
from lwopt_backend.plan.layouts import Alike, Fragment, Layout, by_kind
from lwopt_backend.plan.mesh import MeshLayout, MeshRows, rows_of

if TYPE_CHECKING:
    from typing import Unpack  # from Python 3.11 on

POLICIES = ("auto", "stay", "balance")


class Wire(TypedDict, total=False):
    """The fields of ``MatrixPlan`` that describe a rule's exchange."""

    element_bytes: int
    tensors: int
    block_period: int


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

    The costliest comes first, and goes to the least loaded rank: within 4/3 of the best deal (Graham 1969).
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
    """Every atom stays where it is stored, unless that delays a rank; the others go to the least loaded ranks.

    No rank is delayed while it has no more work than the busiest of a deal in which nothing stays. An atom's home is
    the rank that stores all of it, or at least half. A rank with too much work gives away costly atoms first, because
    these have the most work for their bytes. ``loads`` is each rank's work in other plans.
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


def _homes(atoms: Sequence[Atom], layout: Layout, share: int = 2) -> list[int | None]:
    """Per atom, the only rank that stores all of it, or at least 1 / ``share``; None if no rank does."""

    def home(index: int) -> int | None:
        parts, numel = layout.fragments(index), atoms[index].numel
        largest = _largest(parts)
        alone = sum(part.numel for part in parts) == numel  # there are no copies
        return largest.rank if alone and share * largest.numel >= numel else None

    return by_kind(layout, range(len(atoms)), home)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of buckets: a user's, as in ``cut_buckets``; without any, the modelled seconds on a ``machine`` whose
    rule takes ``batch_numel`` elements at once."""

    matrices: int | None = None
    numel: int | None = None
    machine: Machine | None = None
    batch_numel: int = 0

    @property
    def choose(self) -> bool:
        """Whether seconds decide. They do not on a CPU, which launches nothing and hides little."""
        machine = self.machine
        return machine is not None and machine.launch_seconds > 0 and self.matrices is None and self.numel is None


def _exchanged(
    atoms: Sequence[Atom],
    layout: Layout,
    chosen: Ownership,
    limits: Limits,
    *,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
    **wire: Unpack[Wire],
) -> MatrixPlan:
    """The plan in which atoms that are whole at their ``chosen`` owner stay, and the others are exchanged.

    Unless everything is to stay, exchanged atoms get new owners, which have work at the same time. Atoms that are not
    exchanged in every step have separate buckets.
    """
    ranks = layout.world_size
    whole = _homes(atoms, layout, share=1)
    travelling = [index for index, owner in enumerate(chosen.owners) if whole[index] != owner]
    work = list(loads or [0] * ranks)
    for index, owner in enumerate(chosen.owners):
        work[owner] += atoms[index].cost if whole[index] == owner else 0
    missing = work if any(work) else ()
    homes = _homes(atoms, layout) if chosen.policy != "stay" else ()
    rows = rows_of(layout)
    turns = range(ranks) if rows is None else rows.turns()
    in_order = tuple(atoms)
    alike = Alike(in_order, layout)

    def planned(buckets: tuple[tuple[int, ...], ...]) -> MatrixPlan:
        owners, done = list(chosen.owners), list(work)
        if homes:
            for index, owner in deal_buckets(atoms, buckets, work, earlier or [0] * ranks, homes, turns).items():
                owners[index] = owner
            left = (tuple(index for index in bucket if whole[index] != owners[index]) for bucket in buckets)
            buckets = tuple(filter(None, left))
        for index in travelling:
            done[owners[index]] += atoms[index].cost
        ownership = Ownership(chosen.policy, tuple(owners), tuple(done))
        return MatrixPlan(in_order, layout, ownership, buckets, alike=alike, **wire)

    rarely = with_own_blocks(atoms, travelling, layout) if wire.get("block_period", 1) > 1 else frozenset()
    always, seldom = ([i for i in travelling if (i in rarely) == rare] for rare in (False, True))
    cut = cut_buckets(atoms, always, ranks, matrices=limits.matrices, numel=limits.numel, before=missing)
    cut += cut_buckets(atoms, seldom, ranks, matrices=limits.matrices, numel=limits.numel)
    plan = planned(cut)
    if limits.choose and ranks > 1 and plan.buckets and not rarely:
        numbers = [number for number in NUMBERS if number != len(cut) and number <= len(travelling)]
        return _fastest(plan, (equal_buckets(atoms, travelling, number) for number in numbers), planned, limits)
    return plan


def _fastest(
    plan: MatrixPlan,
    cuts: Iterable[tuple[tuple[int, ...], ...]],
    planned: Callable[[tuple[tuple[int, ...], ...]], MatrixPlan],
    limits: Limits,
) -> MatrixPlan:
    """The plan with the least modelled seconds among ``plan`` and those of ``cuts``, with the fewest buckets on a tie.

    A plan counts only if its buffers take no more than those of ``plan``, or ``FREE_BYTES``. ``cuts`` have increasing
    numbers of buckets; the search ends when two in a row are slower than the best before.
    """

    numels = [atom.numel for atom in plan.atoms]

    def largest(buckets: Sequence[Sequence[int]]) -> int:
        return max(sum(map(numels.__getitem__, bucket)) for bucket in buckets)

    taken, numel = max(plan.exchange_bytes()), largest(plan.buckets)
    most, slower = max(taken, FREE_BYTES), 0
    best: tuple[float, MatrixPlan] | None = None
    for cut in cuts:
        if taken * largest(cut) > 1.5 * most * numel:  # it cannot fit
            continue
        candidate = planned(cut)
        if not candidate.buckets or max(candidate.exchange_bytes()) > most:
            continue
        seconds = exchange_timeline(candidate, limits).seconds
        slower = 0 if best is None or seconds < best[0] else slower + 1
        best = best if slower else (seconds, candidate)
        if slower == 2:
            break
    if best is None:
        return plan
    timed = [(exchange_timeline(plan, limits).seconds, plan), best]
    return min(timed, key=lambda each: (each[0], len(each[1].buckets)))[1]


def exchange_timeline(plan: MatrixPlan, limits: Limits) -> Timeline:
    """The modelled step, overlapping as ``pipeline`` does."""
    machine, ranks = limits.machine, plan.layout.world_size
    assert machine is not None
    row, column = (range(ranks), range(1)) if plan.rows is None else plan.rows.of[0]
    if plan.instances is not None:
        row, ranks = plan.instances.of[0][0], len(plan.instances.of)

    def seconds(nbytes: int, among: Sequence[int], *, direct: bool) -> float:
        stride = among[1] - among[0] if len(among) > 1 else 1
        return sum(machine.collective(nbytes, len(among), stride=stride, of=ranks, direct=direct))

    buckets = []
    for number in range(len(plan.buckets)):
        forth, back, passed_on = map(max, plan.bucket_bytes([number]))
        stays = plan.stays(number)
        ways = [seconds(nbytes, row, direct=True) for nbytes in (max(forth, back), back)]
        along = seconds(passed_on, column, direct=False)
        work = bucket_work(plan.work(number), machine, limits.batch_numel)
        buckets.append(BucketSeconds(0.0 if stays else ways[0], ways[stays] + along, work))
    local = [load / machine.flops_per_second for load in plan.loads_before]
    return pipeline(buckets, local, BUCKET_LAUNCHES * machine.launch_seconds)


def plan_spread(
    atoms: Sequence[Atom],
    layout: Layout,
    limits: Limits = Limits(),
    *,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
    **wire: Unpack[Wire],
) -> MatrixPlan:
    """Plan matrices that hosts spread over all ranks (ZeRO-3, FSDP2), in the order in which they are exchanged.

    ``loads`` is each rank's work before the first bucket; ``earlier`` is work before an earlier synchronization.
    """
    return _exchanged(atoms, layout, balance(atoms, layout, loads), limits, loads=loads, earlier=earlier, **wire)


def plan_copies(
    atoms: Sequence[Atom],
    layout: MeshLayout,
    limits: Limits,
    *,
    share: bool | None = None,
    elementwise: ElementwiseBytes = MUON_IN_FP32,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
    **wire: Unpack[Wire],
) -> MatrixPlan:
    """Plan matrices on a mesh, whose copies (HSDP) ``share`` the work, or each do all of it by themselves.

    Sharing asks each rank for less work, and sends each update to the other copies. None: what has the shorter step by
    ``device_bound`` with ``elementwise`` work, unless that needs larger buffers; without seconds, and on a tie, copies
    share. ``loads`` and ``earlier`` are as in ``plan_spread``, of all ranks of the mesh.
    """
    rows = layout.rows

    def together() -> MatrixPlan:
        return plan_spread(atoms, layout, limits, loads=loads, earlier=earlier, **wire)

    if rows is None or share or (share is None and not limits.choose):
        return together()

    def of_instance(work: Sequence[int]) -> list[int]:
        """The most work of any copy, so that all plan alike."""
        return [max(work[rank] for rank in rows.of[first][1]) for first in rows.of[0][0]] if work else []

    of_each = {"loads": of_instance(loads), "earlier": of_instance(earlier)}
    alone = replace(plan_spread(atoms, layout.instance, limits, **of_each, **wire), instances=rows)
    if share is not None:
        return alone
    plans = together(), alone
    seconds = [device_bound(plan, limits, elementwise) for plan in plans]
    needed = [max(plan.exchange_bytes()) for plan in plans]
    chosen = plans[seconds[1] < seconds[0] and needed[1] <= max(needed[0], FREE_BYTES)]
    return replace(chosen, compared=(seconds[0], seconds[1]))


def device_bound(plan: MatrixPlan, limits: Limits, elementwise: ElementwiseBytes = MUON_IN_FP32) -> float:
    """The modelled seconds, or those of the busiest device with its element-wise work, if they are more.

    ``exchange_timeline`` counts products alone. That is enough to compare plans whose ranks store and own equally much.
    """
    timeline, machine = exchange_timeline(plan, limits), limits.machine
    assert machine is not None
    nbytes = elementwise.stored * max(plan.stored_numels()) + elementwise.owned * max(plan.owned_numels())
    device = max(plan.ownership.loads) / machine.flops_per_second + nbytes / MEMORY_BYTES_PER_SECOND
    begin, end = timeline.buckets[-1].back if timeline.buckets else (0.0, 0.0)  # nothing hides it
    return max(timeline.seconds, device + end - begin)


def plan_matrices(
    atoms: Sequence[Atom],
    layout: Layout,
    limits: Limits = Limits(),
    *,
    policy: str,
    machine: Machine,
    earlier: Sequence[int] = (),
    **wire: Unpack[Wire],
) -> MatrixPlan:
    """Plan matrices in flat partitions (ZeRO-1/2), where most are whole on one rank, with owners by ``policy``.

    ``auto`` models the step time of every policy on ``machine`` and takes the fastest, ``stay`` on a tie.
    ``earlier`` is as in ``plan_spread``. Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    makers = {"stay": stay, "balance": balance}
    timed = []
    for make in makers.values() if policy == "auto" else [makers[policy]]:
        plan = _exchanged(atoms, layout, make(atoms, layout), limits, earlier=earlier, **wire)
        timed.append((plan, modelled_time(plan, machine)))
    timed.sort(key=lambda pair: pair[1].total)
    modelled = tuple((plan.ownership.policy, time) for plan, time in timed)
    return replace(timed[0][0], modelled=modelled)


def modelled_time(plan: MatrixPlan, machine: Machine) -> StepTime:
    """Modelled seconds per step: work until the last rank is done, the busiest link's bytes, and the collectives.

    Matrices that are not exchanged are updated first, which hides a rank's transfers to owners.
    """

    def sent(nbytes: int) -> float:
        return machine.collective(nbytes, plan.layout.world_size, direct=True)[0]

    exposed = (
        sent(back) + max(0.0, sent(forth) - load / machine.flops_per_second)
        for forth, back, load in zip(*plan.bytes_forth_and_back(), plan.loads_before)
    )
    trips = sum(map(plan.trips, range(len(plan.buckets))))
    return StepTime(plan.path / machine.flops_per_second, max(exposed), trips * machine.latency_seconds)


@dataclass(slots=True)
class _Buffers:
    """Elements of a bucket: of pieces on every rank, and of returns to every rank; and by rank, of further pieces,
    owned matrices and their returns."""

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
    element_bytes: int = 2  # of one element on the wire
    modelled: tuple[tuple[str, StepTime], ...] = ()
    tensors: int = 1  # sent to the owner: the direction, or the gradient and the weight
    instances: MeshRows | None = None  # of a mesh whose copies each follow this plan by themselves, one row an instance
    compared: tuple[float, float] | None = None  # modelled seconds: work shared over copies, and each by itself
    block_period: int = 1  # steps from one update of whole matrices to the next; each rank's block in those between
    alike: Alike | None = field(default=None, compare=False, repr=False)

    @cached_property
    def in_blocks(self) -> frozenset[int]:
        """The exchanged atoms of which each rank has a block, so that nothing of them travels in steps in blocks."""
        return with_own_blocks(self.atoms, chain.from_iterable(self.buckets), self.layout)

    @cached_property
    def between(self) -> MatrixPlan:
        """The plan of the exchange in a step in blocks."""
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
    def rows(self) -> MeshRows | None:
        """Rows of ranks within which pieces travel to their owner and back; None if they travel between all ranks."""
        return rows_of(self.layout)

    @property
    def copies(self) -> int:
        """The number of rows, 1 without any."""
        return 1 if self.rows is None else len(self.rows.of[0][1])

    @property
    def is_copied(self) -> bool:
        """Whether a mesh copies all matrices (HSDP)."""
        return self.rows is not None or self.instances is not None

    def trips(self, bucket: int) -> int:
        """The number of the bucket's collectives: to the owners, unless it stays, back, and along columns."""
        return (0 if self.stays(bucket) else self.tensors) + (1 if self.rows is None else 2)

    def transfer(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer to the owners, as ``rank`` sees it; within its row if there are ``rows``."""
        return self._transfer(bucket, rank, self.rows, back=False)

    def way_back(self, bucket: int, rank: int) -> Transfer:
        """The bucket's transfer from the owners to the ranks of ``transfer`` that store pieces, as ``rank`` sees it."""
        return self._transfer(bucket, rank, self.rows, back=True)

    def pieces_of_column(self, bucket: int, rank: int) -> list[list[Segment]]:
        """Per rank of the column of ``rank``, the pieces that it gets in ``way_back``, in order, and then passes on."""
        everything = self._transfer(bucket, rank, None, back=True)
        return [] if self.rows is None else along_column(everything, self.rows, rank)

    def _transfer(self, bucket: int, rank: int, rows: MeshRows | None, *, back: bool) -> Transfer:
        return transfer_of(self.buckets[bucket], self.ownership.owners, self.layout, rank, rows, back=back)

    def lines(self) -> list[str]:
        """The lines, one per atom, that must be equal on all ranks before the first exchange."""
        return [
            f"{atom.name} {atom.shape[0]}x{atom.shape[1]} {self.layout.place(index)} owner {owner}"
            for index, (atom, owner) in enumerate(zip(self.atoms, self.ownership.owners))
        ] + [
            f"buckets {self.buckets} of {self.tensors} x {self.element_bytes} bytes an element"
            + (f", whole in every step {self.block_period}" if self.block_period > 1 else "")
            + (f", in each of {self.instances.groups()[0]}" if self.instances is not None else "")
        ]

    def of_mesh(self, of_ranks: Sequence[int]) -> list[int]:
        """By rank of the mesh, what is ``of_ranks`` of the plan."""
        if self.instances is None:
            return [*of_ranks]
        return [of_ranks[self.instances.place(rank)] for rank in range(len(self.instances.of))]

    def owned_counts(self) -> list[int]:
        """Per rank, the number of atoms that it owns."""
        return per_rank(self.ownership.owners, repeat(1), self.layout.world_size)

    def owned_numels(self) -> list[int]:
        """Per rank, the elements of the atoms that it owns."""
        return per_rank(self.ownership.owners, (atom.numel for atom in self.atoms), self.layout.world_size)

    def stored_numels(self) -> list[int]:
        """Per rank, the elements of the matrices that it stores."""
        stored = [0] * self.layout.world_size
        for number, times in Counter(self._alike.numbers).items():
            for rank, numel in self._alike.numels(number).items():
                stored[rank] += numel * times
        return stored

    def moved_numel(self) -> list[int]:
        """Per rank, the elements that it stores whose update another rank computes."""
        moved = [0] * self.layout.world_size
        for number, owners in self._owners_of_alike(range(len(self.buckets))):
            times = owners.total()
            for rank, numel in self._alike.numels(number).items():
                moved[rank] += numel * (times - owners.get(rank, 0))
        return moved

    def wire_bytes(self) -> list[int]:
        """Per rank, the bytes that it sends in one step: fragments to owners, and updates back."""
        return [*map(sum, zip(*self.bucket_bytes(range(len(self.buckets)))))]

    def peers(self) -> int:
        """The most other ranks that one rank exchanges pieces with in a step, or has copies in common with."""
        met = [0] * self.layout.world_size  # a bit of each rank, as there are many ranks
        for number, owners in self._owners_of_alike(range(len(self.buckets))):
            held = self._alike.numels(number)
            holding, owning = (sum(1 << rank for rank in some) for some in (held, owners))
            for some, others in ((owners, holding), (held, owning)):
                for rank in some:
                    met[rank] |= others
        if self.rows is not None:
            bits = [[sum(1 << rank for rank in some) for some in both] for both in self.rows.of]
            met = [others & row | column if others else 0 for others, (row, column) in zip(met, bits)]
        return max((others & ~(1 << rank)).bit_count() for rank, others in enumerate(met))

    def bytes_forth_and_back(self) -> tuple[list[int], list[int]]:
        """Per rank, the bytes that it sends to owners in one step, and those that it returns or passes on."""
        forth, *both = self.bucket_bytes(range(len(self.buckets)))
        return forth, [*map(sum, zip(*both))]

    def bucket_bytes(self, numbers: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Per rank, the bytes of these buckets that it sends to owners, that it returns as an owner, and that it passes
        on along its column of copies."""
        forth, back, passed_on = ([0] * self.layout.world_size for _ in range(3))
        for number, owners in self._owners_of_alike(numbers):
            atom = self._alike.firsts[number]
            held = self._alike.numels(number)
            copies: list[tuple[Sequence[Fragment], Counter[int]]] = []  # pieces, and their owners
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
                    forth[part.rank] += held[part.rank] * self.tensors * (every - served.get(part.rank, 0))
            whole = sum(held.values()) // self.copies
            for owner, times in owners.items():
                back[owner] += (whole - held.get(owner, 0)) * times
        for number in numbers:
            for rank, numel in enumerate(self._copied[number]):
                passed_on[rank] += numel * (self.copies - 1)
        numels = ([numel * self.element_bytes for numel in some] for some in (forth, back, passed_on))
        return next(numels), next(numels), next(numels)

    @cached_property
    def _copied(self) -> list[list[int]]:
        """By bucket, each rank's part of its column's all-gather."""
        return [copied_numels(bucket, self.ownership.owners, self.layout, self.rows) for bucket in self.buckets]

    def exchange_bytes(self) -> list[int]:
        """Per rank, the most bytes that the buffers of exchanges take at one time in a step."""
        return [buffers for _, buffers in self.largest_phases({})]

    def largest_phases(self, works: Mapping[int, Mapping[int, int]]) -> list[tuple[int, int]]:
        """Per rank, the phase of a step that needs most: bytes of a rule at work, and of the buffers of exchanges.
        ``works`` are by bucket, -1 for what does not travel, and rank, what its rules need.

        When a bucket's pieces have arrived, they and its matrices are there; then its matrices while a rule computes;
        then these, their updates and the returns. All the while the next bucket's pieces are on their way to the
        owners, and the returns of the bucket before on theirs, with ``rows`` those of the two before. Matrices that do
        not travel are stepped while the first two buckets are on their way. Every rank's pieces are counted as the
        largest ones where many ranks have some.
        """
        nothing = _Buffers(0, 0, Counter(), Counter(), Counter())
        buckets = [nothing, nothing, *map(self._buffers, self._counted, self._copied), nothing]

        def out(of: _Buffers, rank: int) -> int:
            return self.tensors * (of.pieces + of.held[rank] + of.owned[rank])

        def back(of: _Buffers, rank: int) -> int:
            return of.landed + of.held[rank] + of.returned[rank]

        found, everywhere, size = dict[int, tuple[int, int]](), (0, 0), self.element_bytes
        for rank, work in works.get(-1, {}).items():
            found[rank] = work, size * sum(out(each, rank) for each in buckets[2:4])
        for number, (earlier, before, now, after) in enumerate(zip(buckets, buckets[1:], buckets[2:], buckets[3:])):
            of_rules, passed_on = works.get(number, {}), 0 if self.rows is None else earlier.landed
            involved = set[int]().union(*({*each.held, *each.owned} for each in (before, now, after)))
            for rank in (*involved, -1):  # and one that has no further piece and no matrix of these
                others = out(after, rank) + back(before, rank) + passed_on
                matrices = self.tensors * now.owned[rank]
                most = others + max(out(now, rank) + matrices, now.owned[rank] + back(now, rank) + now.owned[rank])
                phases = (0, size * most), (of_rules.get(rank, 0), size * (others + matrices))
                if rank < 0:
                    everywhere = max(everywhere, *phases, key=sum)
                else:
                    found[rank] = max(found.get(rank, (0, 0)), *phases, key=sum)
        return [max(found.get(rank, (0, 0)), everywhere, key=sum) for rank in range(self.layout.world_size)]

    def _buffers(self, counted: Mapping[tuple[int, int], int], copied: Sequence[int]) -> _Buffers:
        """Elements of one bucket, whose parts of columns' all-gathers are ``copied``."""
        found = _Buffers(0, 0, Counter(), Counter(), Counter())
        for (number, owner), times in counted.items():
            spread = self._alike.spread(number)
            found.owned[owner] += self.atoms[self._alike.firsts[number]].numel * times
            found.returned[owner] += spread.total // self.copies * times
            found.pieces += spread.largest * times
            for rank, numel in spread.few:
                found.held[rank] += numel * times
        found.landed = max(copied, default=found.pieces) * self.copies
        return found

    @cached_property
    def _alike(self) -> Alike:
        if self.alike is None or self.alike.atoms is not self.atoms:  # ``replace`` has changed their costs
            return Alike(self.atoms, self.layout)
        return self.alike

    @cached_property
    def _counted(self) -> list[Counter[tuple[int, int]]]:
        """By bucket, how many alike matrices each rank owns, by number and rank."""
        numbers, owners = self._alike.numbers.__getitem__, self.ownership.owners.__getitem__
        return [Counter(zip(map(numbers, bucket), map(owners, bucket))) for bucket in self.buckets]

    def work(self, bucket: int) -> Iterator[tuple[int, Atom, int]]:
        """The owners of a bucket's matrices, each with an atom, and how many like it the owner has."""
        for (number, owner), times in self._counted[bucket].items():
            yield owner, self.atoms[self._alike.firsts[number]], times

    def _owners_of_alike(self, numbers: Iterable[int]) -> Iterator[tuple[int, Counter[int]]]:
        """The numbers of alike matrices in these buckets, and how many of them each rank owns."""
        counts: dict[int, Counter[int]] = {}
        for bucket in numbers:
            for (number, owner), times in self._counted[bucket].items():
                counts.setdefault(number, Counter())[owner] += times
        yield from counts.items()
