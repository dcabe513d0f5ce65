"""One buffer of a study, as planned for one engine: owners, buckets, bytes, memory of every rank, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.buffers.step import BucketTime, Elements
from lwopt_backend.plan.cost import CostModel
from lwopt_backend.plan.machine import Machine, StepTime
from lwopt_backend.plan.types import Atom


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part is planned for. ``group_size`` None lets the planner choose, ``bucket_numel`` None is one bucket.

    ``gradient_bytes`` are those of an element of a gradient as it is kept and as it travels, the same in every system
    that is compared: 4 (summed in fp32) or 2 (bf16). Parameters are bf16, their masters and the state fp32.
    """

    engine: str
    layout: str
    bucket_numel: int | None
    machine: Machine
    cost: CostModel
    group_size: int | None = None
    gradient_bytes: int = 4

    @property
    def elements(self) -> Elements:
        return Elements(parameter=2, gradient=self.gradient_bytes, master=4, state=4)


@dataclass(frozen=True, slots=True)
class Collective:
    """A kind of collective that a step has: how many, and the bytes that the busiest rank sends in all of them."""

    what: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds between steps, and ``transient`` ones on top of them at the peak of a step."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    state: int = 0
    padding: int = 0
    transient: int = 0

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.masters + self.state + self.padding + self.transient

    def __add__(self, other: RankMemory) -> RankMemory:
        """Of two buffers on one rank; their transients do not coincide."""
        return RankMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.state + other.state,
            self.padding + other.padding,
            max(self.transient, other.transient),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """``atoms`` of one buffer over ``ranks`` ranks in instances of ``group_size``, each with its owner and bucket.

    ``loads`` (in the cost model's unit), ``owned_numels`` and ``memory`` are per rank of an instance.
    """

    name: str  # "dense" or "experts"
    ranks: int
    group_size: int
    layout: str
    strategy: str
    atoms: tuple[Atom, ...]
    owners: tuple[int, ...]
    buckets: tuple[int, ...]
    bucket_numels: tuple[int, ...]
    buffer_numel: int
    loads: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    collectives: tuple[Collective, ...]
    time: StepTime
    timeline: tuple[BucketTime, ...]

    @property
    def numel(self) -> int:
        return sum(atom.numel for atom in self.atoms)

    @property
    def padding(self) -> float:
        return self.buffer_numel / self.numel - 1 if self.atoms else 0.0

    @property
    def flops_imbalance(self) -> float:
        """Max over mean of the cost that was planned for."""
        return imbalance(self.loads)

    @property
    def owned_numels(self) -> list[int]:
        return self._per_rank([atom.numel for atom in self.atoms])

    @property
    def wire_bytes(self) -> int:
        """What the busiest rank sends in a step."""
        return sum(collective.nbytes for collective in self.collectives)

    def _per_rank(self, amounts: Sequence[int]) -> list[int]:
        sums = [0] * self.group_size
        for owner, amount in zip(self.owners, amounts):
            sums[owner] += amount
        return sums


def workspace(atoms: Sequence[Atom]) -> int:
    """Bytes of a Newton-Schulz of the largest of ``atoms``: X, B X and the update, A, A A and B, in bf16."""
    return max((2 * (3 * atom.numel + 3 * min(atom.shape) ** 2) for atom in atoms), default=0)


def owned_atoms(atoms: Sequence[Atom], owners: Sequence[int], ranks: int) -> list[list[Atom]]:
    """Per rank, what it owns."""
    owned: list[list[Atom]] = [[] for _ in range(ranks)]
    for atom, owner in zip(atoms, owners):
        owned[owner].append(atom)
    return owned
