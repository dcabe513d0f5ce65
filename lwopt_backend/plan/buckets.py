"""Buckets of the matrices that are exchanged: where they are cut, owners bucket by bucket, and seconds.

Two buckets are in flight, and all ranks take part in every exchange in one order. A bucket therefore arrives when all
ranks are done with the last but one before it. Ranks with less work in a bucket than others wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.cost import Machine, Shape

MATRICES_A_RANK = 2  # the minimum of a bucket


def cut_buckets(
    atoms: Sequence[Atom],
    travelling: Sequence[int],
    ranks: int,
    *,
    matrices: int | None = None,
    numel: int | None = None,
    before: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms in buckets, each with work for all ``ranks`` at the same time.

    A bucket closes once it has two matrices a rank, and as much work as if every rank had its costliest matrix. The
    first one also balances the work ``before``, which differs between ranks. The remaining atoms join the last bucket,
    unless they are a matrix a rank and as much work. A user's limits take precedence: ``matrices`` close a bucket, and
    one never exceeds ``numel`` elements, unless a single matrix does.

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

    A bucket is sent when its predecessor is about to be computed, so it arrives when all ranks have reached that point.
    """
    done = list(loads)  # per rank, the end of its last work
    slowest_before, slowest = 0, max(loads)
    for bucket in buckets:
        work: dict[int, int] = {}
        for index in bucket:
            work[owners[index]] = work.get(owners[index], 0) + atoms[index].cost
        for rank, more in work.items():
            done[rank] = max(done[rank], slowest_before) + more
        slowest_before, slowest = slowest, max([slowest, *(done[rank] for rank in work)])
    return slowest


def deal_buckets(
    atoms: Sequence[Atom],
    buckets: Sequence[Sequence[int]],
    loads: Sequence[int],
    earlier: Sequence[int],
    homes: Sequence[int | None],
    turns: Sequence[int],
) -> dict[int, int]:
    """Owners of the atoms in buckets. In a bucket, the costliest comes first, and goes to the rank that is ready first.

    ``loads`` is each rank's work before the first bucket. Among ranks that are ready at once, the one with the least
    ``earlier`` work is taken, and among these the one with the lowest of ``turns``. An atom goes to its home if that
    has at most the mean work of a rank in this bucket.
    """
    costs = [atom.cost for atom in atoms]
    done, total = list(loads), list(earlier)
    heap = [(done[rank], total[rank], turns[rank], rank) for rank in range(len(done))]
    heapq.heapify(heap)  # an entry is stale once the rank's time grew
    found: dict[int, int] = {}
    slowest_before, slowest = 0, max(done)
    for bucket in buckets:
        level = 0
        if any(homes[index] is not None for index in bucket):
            level = sum(max(time, slowest_before) for time in done) + sum(map(costs.__getitem__, bucket))
        slowest_now = slowest
        for index in sorted(sorted(bucket), key=costs.__getitem__, reverse=True):  # which keeps the order of equal ones
            owner, cost = homes[index], costs[index]
            if owner is None or (max(done[owner], slowest_before) + cost) * len(done) > level:
                while done[heap[0][3]] != heap[0][0]:
                    rank = heap[0][3]
                    heapq.heapreplace(heap, (done[rank], total[rank], turns[rank], rank))
                owner = heap[0][3]
            found[index] = owner
            done[owner] = max(done[owner], slowest_before) + cost
            total[owner] += cost
            slowest_now = max(slowest_now, done[owner])
        slowest_before, slowest = slowest, slowest_now
    return found


# Seconds of a step. The transfers of the first bucket to the owners and of the last one back are not hidden. With many
# buckets both are short, but ranks wait for each other more often, and their devices for launches of small batches.

NUMBERS = (1, *(number << more for more in range(8) for number in (2, 3)))  # of buckets to try, up to 384
FREE_BYTES = 2**28  # always allowed for the buffers of a rank, even if those of ``cut_buckets`` take less
BUCKET_LAUNCHES = 25  # of a bucket: momentum, packing, unpacking, the update, and two collectives at 5 each
BATCH_LAUNCHES = 26  # of a batch of equal matrices, in five steps of Newton-Schulz


def equal_buckets(atoms: Sequence[Atom], travelling: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms in at most ``count`` buckets of nearly equal work; a bucket's last atom completes its share."""
    total, done = sum(atoms[index].cost for index in travelling), 0
    found: list[list[int]] = [[] for _ in range(count)]
    for index in travelling:
        cost = atoms[index].cost
        found[min(count - 1, (2 * done + cost) * count // (2 * total or 1))].append(index)
        done += cost
    return tuple(tuple(bucket) for bucket in found if bucket)


@dataclass(frozen=True, slots=True)
class BucketSeconds:
    """One bucket on its way: seconds on the wire to the owners and back, and by owner on its device and its host."""

    out: float
    back: float
    work: Mapping[int, tuple[float, float]]


def bucket_work(
    owned: Iterable[tuple[int, Atom, int]], machine: Machine, batch_numel: int
) -> dict[int, tuple[float, float]]:
    """By owner, the seconds of its device and its host, which take ``batch_numel`` elements at once.

    ``owned`` are owners of matrices, each with an atom, and how many like it the owner has.
    """
    costs: dict[int, int] = {}
    shapes: dict[int, dict[Shape, int]] = {}
    for owner, atom, times in owned:
        costs[owner] = costs.get(owner, 0) + atom.cost * times
        of_owner = shapes.setdefault(owner, {})
        of_owner[atom.shape] = of_owner.get(atom.shape, 0) + times
    rate, launch = machine.flops_per_second, machine.launch_seconds * BATCH_LAUNCHES
    return {owner: (cost / rate, launch * _batches(shapes[owner], batch_numel)) for owner, cost in costs.items()}


def _batches(shapes: Mapping[Shape, int], batch_numel: int) -> int:
    """The number of batches in which a rule takes that many matrices of each shape."""
    return sum(-(-times // max(1, batch_numel // (m * n))) for (m, n), times in shapes.items())


Span = tuple[float, float]  # from begin to end


@dataclass(frozen=True, slots=True)
class BucketTime:
    """When one bucket is on the wire to its owners, when the first to the last of them work, and when it returns."""

    out: Span
    work: Span
    back: Span

    def later(self, seconds: float) -> BucketTime:
        """The same, that much later."""
        spans = ((begin + seconds, end + seconds) for begin, end in (self.out, self.work, self.back))
        return BucketTime(*spans)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Modelled seconds of a step, and the times of its buckets, the last of which ends the step."""

    seconds: float = 0.0
    buckets: tuple[BucketTime, ...] = ()

    def then(self, following: Timeline) -> Timeline:
        """This one, and after it the ``following`` one."""
        shifted = (bucket.later(self.seconds) for bucket in following.buckets)
        return Timeline(self.seconds + following.seconds, (*self.buckets, *shifted))


def pipeline(
    buckets: Sequence[BucketSeconds], local: Sequence[float], host: float, *, reduced: bool = False
) -> Timeline:
    """A step, from the time when all gradients are ready until all ranks have the last update.

    This follows ``MatrixStepper.step``: two buckets leave, then ranks work for ``local`` seconds. For every bucket they
    wait for it, work on it, send it back, and wait for the one before. The wire carries one collective at a time, which
    begins when all ranks have started it. ``host`` are the seconds that a bucket costs every rank's host, which waits
    for no device.

    If ``reduced``, the buckets are gradients in plain PyTorch: all are at their owners before the first is worked on,
    and no rank waits for what returns.
    """
    outs: list[Span] = []
    wire = 0.0
    for bucket in buckets if reduced else buckets[:2]:
        outs.append((wire, wire + bucket.out))
        wire += bucket.out
    done, hosts = list(local), [0.0] * len(local)
    slowest, floor, returned = max(local), wire if reduced else 0.0, 0.0
    times = []
    for number, bucket in enumerate(buckets):
        if len(outs) <= number + 1 < len(buckets):  # the next bucket leaves when all ranks have got here
            leaves = max(wire, slowest)
            wire = leaves + buckets[number + 1].out
            outs.append((leaves, wire))
        floor = max(floor, outs[number][1])
        slowest = max(slowest, floor)
        begins = min((max(done[rank], floor) for rank in bucket.work), default=floor)
        ends = begins
        for rank, (seconds, launches) in bucket.work.items():
            hosts[rank] += launches
            done[rank] = max(max(done[rank], floor) + seconds, hosts[rank] + (number + 1) * host)
            ends = max(ends, done[rank])
        slowest = max(slowest, ends)
        leaves = max(wire, slowest)
        floor, returned = floor if reduced else max(floor, returned), leaves + bucket.back
        times.append(BucketTime(outs[number], (begins, ends), (leaves, returned)))
        wire = returned
        slowest = max(slowest, floor)
    return Timeline(max(slowest, returned), tuple(times))
