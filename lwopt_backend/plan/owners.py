"""Who owns which matrix: the policies ``stay`` and ``balance``."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.storage import Layout
from lwopt_backend.plan.types import Atom

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
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def stay(atoms: Sequence[Atom], layout: Layout) -> Ownership:
    """Every atom is owned by the rank that already stores most of it (the lowest such rank on a tie).

    Moves the fewest elements possible: an atom that lies whole in one partition does not travel at all.
    """
    owners = tuple(max(layout.fragments(i), key=lambda part: (part.numel, -part.rank)).rank for i in range(len(atoms)))
    loads = [0] * layout.world_size
    for atom, owner in zip(atoms, owners):
        loads[owner] += atom.cost
    return Ownership("stay", owners, tuple(loads))


def balance(atoms: Sequence[Atom], layout: Layout) -> Ownership:
    """Longest processing time first: the costliest atom goes to the least loaded rank (Graham 1969, within 4/3).

    Among equally loaded ranks the one that stores most of the atom wins, then the lowest: fewer elements travel
    and the result does not depend on anything but the input.
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
