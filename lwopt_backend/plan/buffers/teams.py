"""A team of ranks that shares one matrix's Newton-Schulz, where single owners would leave most ranks idle.

With more ranks than matrices the largest matrix sets the pace, however it is packed. A team of k ranks cuts the long
side of X in k: every member forms its part of X X^T, the parts are summed (an all-reduce of s x s), each member
computes s / k rows of b A + c A A, these are gathered (s x s again), and multiplies them with its own columns. So a
member's flops are those of the whole over k, and an iteration adds two collectives of s x s bf16 elements.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.cost import CostModel
from lwopt_backend.plan.machine import Machine, all_reduce_seconds, gather_seconds
from lwopt_backend.plan.types import Atom

STEPS = 5
WIRE_BYTES = 2  # bf16, as the iteration itself


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """``first[i]`` is the first rank of matrix i's team and ``sizes[i]`` its size; 1 is a single owner."""

    team_size: int
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]  # per rank

    @property
    def busiest(self) -> float:
        """Seconds of the busiest rank."""
        return max(self.seconds)

    @property
    def shared(self) -> int:
        """How many matrices have a team."""
        return sum(size > 1 for size in self.sizes)


def team_seconds(atom: Atom, size: int, machine: Machine, cost: CostModel) -> float:
    """Seconds that one matrix takes a team of ``size`` neighbouring ranks."""
    work = cost.seconds(atom.cost, machine.flops_per_second) / size
    if size == 1:
        return work
    square = min(atom.shape) ** 2 * WIRE_BYTES
    return work + STEPS * sum(all_reduce_seconds(machine, square, size) + gather_seconds(machine, square, size))


def plan_teams(atoms: Sequence[Atom], ranks: int, *, machine: Machine, cost: CostModel) -> TeamPlan:
    """The team size, a power of two that divides a node, with which the busiest rank is done first; 1 if none helps.

    Matrices that alone take longer than the mean rank's whole work get teams where a team is faster; the rest single
    owners. The longest go first: a team's to the aligned block of ranks that is free first, the others to the rank
    that is free first.
    """
    sizes = [1]
    while machine.node_size % (sizes[-1] * 2) == 0 and ranks % (sizes[-1] * 2) == 0:
        sizes.append(sizes[-1] * 2)
    return min((_with_teams(atoms, ranks, size, machine, cost) for size in sizes), key=lambda plan: plan.busiest)


def _with_teams(atoms: Sequence[Atom], ranks: int, size: int, machine: Machine, cost: CostModel) -> TeamPlan:
    alone = [team_seconds(atom, 1, machine, cost) for atom in atoms]
    together = [team_seconds(atom, size, machine, cost) for atom in atoms]
    mean = sum(alone) / ranks
    sizes = [size if mean < one and some < one else 1 for one, some in zip(alone, together)]
    busy = [0.0] * ranks
    first = [0] * len(atoms)
    blocks = [(0.0, rank) for rank in range(0, ranks, size)]
    for i in sorted((i for i in range(len(atoms)) if sizes[i] > 1), key=lambda i: (-together[i], i)):
        done, rank = heapq.heappop(blocks)
        first[i] = rank
        for member in range(rank, rank + size):
            busy[member] += together[i]
        heapq.heappush(blocks, (done + together[i], rank))
    free = [(seconds, rank) for rank, seconds in enumerate(busy)]
    heapq.heapify(free)
    for i in sorted((i for i in range(len(atoms)) if sizes[i] == 1), key=lambda i: (-alone[i], i)):
        seconds, rank = heapq.heappop(free)
        first[i] = rank
        busy[rank] = seconds + alone[i]
        heapq.heappush(free, (busy[rank], rank))
    return TeamPlan(size, tuple(first), tuple(sizes), tuple(busy))
