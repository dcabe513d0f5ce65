"""A part of a model on the ranks that share it: the plan's owners, work, memory and bytes of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lwopt_backend.engines.report import Note
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buckets import Timeline
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.cost import RankMemory, StepTime, per_rank
from lwopt_backend.plan.owners import longest_first
from lwopt_backend.planner.seconds import Placed
from lwopt_backend.planner.setting import Share


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective in a step: their number, and the bytes that the busiest rank sends in all of them.

    They are among ``ranks`` ranks, ``stride`` apart; 0 are all that share the parameters.
    """

    what: str
    count: int
    nbytes: int
    ranks: int = 0
    stride: int = 1


Assignment = tuple[str, int, int | None]  # a matrix, its owner, and its bucket, None if it is not exchanged


@dataclass(frozen=True, slots=True)
class Part:
    """The matrices that ``ranks`` ranks share, in instances of ``group_size``, each with its owner and bucket.

    ``loads`` (in the cost model's unit), ``owned_numels`` and ``memory``, what a step needs in addition to what is
    kept, are per rank of an instance. ``path`` is the cost until the last rank is done, if ranks wait for buckets only;
    ``before`` is each rank's earlier cost in other parts. ``notes`` are on the plan. ``timeline`` is the
    modelled step of the optimizer, with transfers behind work where they can be; ``time`` adds everything, the host's
    own collectives included.
    """

    name: str  # "dense" or "experts"
    ranks: int
    layout: str
    strategy: str
    placed: Placed
    buffer_numel: int
    memory: tuple[RankMemory, ...]
    collectives: tuple[Collective, ...]
    time: StepTime
    timeline: Timeline
    assignments: tuple[Assignment, ...]
    path: int
    before: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def group_size(self) -> int:
        return self.placed.shards

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return self.placed.atoms

    @property
    def owners(self) -> tuple[int, ...]:
        return self.placed.owners

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.placed.buckets

    @property
    def bucket_numels(self) -> tuple[int, ...]:
        return self.placed.bucket_numels

    @property
    def loads(self) -> list[int]:
        return self.placed.loads()

    @property
    def numel(self) -> int:
        return sum(atom.numel for atom in self.atoms)

    @property
    def padding(self) -> float:
        return self.buffer_numel / self.numel - 1 if self.atoms else 0.0

    @property
    def path_over_longest_first(self) -> float:
        """The path over the busiest rank's cost in one longest-first deal of all matrices."""
        loads = self.before or (0,) * self.group_size
        return self.path / max(1, longest_first((atom.cost for atom in self.atoms), loads))

    @property
    def flops_imbalance(self) -> float:
        """Max over mean of the work."""
        return imbalance(self.loads)

    @property
    def owned_numels(self) -> list[int]:
        return per_rank(self.owners, [atom.numel for atom in self.atoms], self.group_size)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The parameters other than matrices that the same ranks share."""

    numel: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Planned:
    """An engine's plan for the parameters that ``ranks`` ranks share. ``part`` is None if none is a matrix. ``kept`` is
    the memory of all parameters, per rank of an instance.

    ``lines`` are those of the engine's plan, ``loads`` the work that it balanced, per rank of an instance. The plan is
    for ``shared``, in addition to each rank's work ``base``. ``before`` is the work of the ranks before each of an
    engine's plans, if it makes several.
    """

    name: str
    ranks: int
    group_size: int
    part: Part | None
    elementwise: Elementwise
    kept: tuple[RankMemory, ...]
    lines: tuple[str, ...]
    loads: tuple[int, ...]
    shared: Share
    base: tuple[int, ...] | None = None
    before: tuple[tuple[int, ...], ...] = ()

    def memory(self, place: int) -> RankMemory:
        """The memory of one rank of an instance."""
        return self.kept[place] if self.part is None else self.kept[place] + self.part.memory[place]


def workspaces(placed: Placed, batch_numel: int = 0, *, travel: bool) -> Mapping[int, Mapping[int, int]]:
    """By bucket and rank, bytes that Newton-Schulz needs for its largest batch: X, B X, and A and A A or B, in bf16.

    Matrices with a bucket, from 0 on, ``travel`` or not. What arrived is in a buffer of the exchange; of other matrices
    come the direction in fp32, and X before its norm is one. A batch has equal matrices of one bucket, of at most
    ``batch_numel`` elements, or one matrix.
    """
    found = dict[int, dict[int, int]]()
    alike = Counter(zip(placed.owners, placed.buckets, (atom.shape for atom in placed.atoms)))
    for (owner, bucket, shape), count in alike.items():
        numel = shape[0] * shape[1]
        batch = max(1, min(count, batch_numel // numel))
        needed = iteration = 2 * (2 * numel + 2 * min(shape) ** 2)
        if not travel or bucket < 0:
            needed = 4 * numel + max(iteration, 2 * 3 * numel)
        of_bucket = found.setdefault(bucket, {})
        of_bucket[owner] = max(of_bucket.get(owner, 0), batch * needed)
    return found
