"""From atoms and their storage to a plan: owners, buckets and transfers of one group of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lwopt_backend.plan.machine import Machine, StepTime, step_time
from lwopt_backend.plan.owners import POLICIES, Ownership, balance, stay
from lwopt_backend.plan.storage import FlatPartition
from lwopt_backend.plan.transfer import Transfer, to_owners
from lwopt_backend.plan.types import Atom


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one group of matrices is updated: who owns what, and in which buckets the rest travels.

    ``buckets`` hold only atoms that are not whole at their owner; everything else is stepped in place. ``modelled``
    are the step times that were compared, the chosen policy's first.
    """

    atoms: tuple[Atom, ...]
    layout: FlatPartition
    ownership: Ownership
    buckets: tuple[tuple[int, ...], ...]
    element_bytes: int
    modelled: tuple[tuple[str, StepTime], ...] = ()

    def local_atoms(self, rank: int) -> list[int]:
        """Atoms that ``rank`` owns and stores whole."""
        return [i for i, owner in enumerate(self.ownership.owners) if owner == rank and is_whole(self.layout, i, owner)]

    def transfer(self, bucket: int, rank: int) -> Transfer:
        """Bucket ``bucket``'s way to the owners as ``rank`` sees it; ``.reversed()`` is the way back."""
        return to_owners(self.buckets[bucket], self.ownership.owners, self.layout, rank)

    def lines(self) -> list[str]:
        """One line per atom: what all ranks must have decided alike before the first exchange."""
        return [
            f"{atom.name} {atom.shape[0]}x{atom.shape[1]} at {offset} of {self.layout.partition_numel} owner {owner}"
            for atom, offset, owner in zip(self.atoms, self.layout.offsets, self.ownership.owners)
        ] + [f"buckets {self.buckets} of {self.element_bytes} bytes an element"]

    def owned_counts(self) -> list[int]:
        """Per rank, how many atoms it owns."""
        counts = [0] * self.layout.world_size
        for owner in self.ownership.owners:
            counts[owner] += 1
        return counts

    def moved_numel(self) -> list[int]:
        """Per rank, the elements it stores whose update is computed by another rank."""
        moved = [0] * self.layout.world_size
        for bucket in self.buckets:
            for atom in bucket:
                for part in self.layout.fragments(atom):
                    moved[part.rank] += part.numel if part.rank != self.ownership.owners[atom] else 0
        return moved

    def wire_bytes(self) -> list[int]:
        """Per rank, the bytes it sends in one step: fragments to owners, and updates back to fragments."""
        sent = [0] * self.layout.world_size
        for bucket in self.buckets:
            for atom in bucket:
                owner = self.ownership.owners[atom]
                for part in self.layout.fragments(atom):
                    if part.rank != owner:
                        sent[part.rank] += part.numel
                        sent[owner] += part.numel
        return [numel * self.element_bytes for numel in sent]


def plan_matrices(
    atoms: Sequence[Atom],
    layout: FlatPartition,
    *,
    policy: str,
    machine: Machine,
    bucket_numel: int,
    element_bytes: int,
) -> MatrixPlan:
    """Choose owners by ``policy`` and put what has to travel into buckets of at most ``bucket_numel`` elements.

    ``auto`` models the step time of every policy on ``machine`` and takes the fastest, ``stay`` on a tie.
    ``element_bytes`` is the size of one element on the wire. Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    makers = {"stay": stay, "balance": balance}
    wanted = makers if policy == "auto" else {policy: makers[policy]}
    plans = [_with_buckets(make(atoms, layout), atoms, layout, bucket_numel, element_bytes) for make in wanted.values()]
    timed = sorted(((plan, modelled_time(plan, machine)) for plan in plans), key=lambda pair: pair[1].total)
    modelled = tuple((plan.ownership.policy, time) for plan, time in timed)
    best = timed[0][0]
    return MatrixPlan(best.atoms, layout, best.ownership, best.buckets, element_bytes, modelled)


def modelled_time(plan: MatrixPlan, machine: Machine) -> StepTime:
    """Modelled seconds per step: the busiest rank's work, the busiest link's bytes, and two collectives a bucket."""
    return step_time(
        machine,
        flops=max(plan.ownership.loads),
        nbytes=max(plan.wire_bytes()),
        collectives=2 * len(plan.buckets),
    )


def is_whole(layout: FlatPartition, atom: int, rank: int) -> bool:
    """Whether ``rank`` stores every element of ``atom``."""
    parts = layout.fragments(atom)
    return len(parts) == 1 and parts[0].rank == rank


def fill_buckets(travelling: Sequence[int], atoms: Sequence[Atom], bucket_numel: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms until a bucket would exceed ``bucket_numel`` elements; a larger atom has a bucket to itself."""
    buckets: list[list[int]] = []
    filled = 0
    for index in travelling:
        if not buckets or filled + atoms[index].numel > bucket_numel:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += atoms[index].numel
    return tuple(map(tuple, buckets))


def _with_buckets(
    ownership: Ownership, atoms: Sequence[Atom], layout: FlatPartition, bucket_numel: int, element_bytes: int
) -> MatrixPlan:
    travelling = [i for i, owner in enumerate(ownership.owners) if not is_whole(layout, i, owner)]
    buckets = fill_buckets(travelling, atoms, bucket_numel)
    return MatrixPlan(tuple(atoms), layout, ownership, buckets, element_bytes)
