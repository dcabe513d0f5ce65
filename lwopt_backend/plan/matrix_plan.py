"""How one set of matrices is updated: who owns what, and in which buckets the rest travels."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from lwopt_backend.plan.machine import StepTime
from lwopt_backend.plan.owners import Ownership
from lwopt_backend.plan.storage import Layout
from lwopt_backend.plan.transfer import Transfer, to_fragments, to_owners
from lwopt_backend.plan.types import Atom


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How one group of matrices is updated: who owns what, and in which buckets the rest travels.

    ``buckets`` hold only atoms that are not whole at their owner; everything else is stepped in place. ``modelled``
    are the step times that were compared, the chosen policy's first. Without ``splits`` all buckets are compact.
    """

    atoms: tuple[Atom, ...]
    layout: Layout
    ownership: Ownership
    buckets: tuple[tuple[int, ...], ...]
    element_bytes: int
    modelled: tuple[tuple[str, StepTime], ...] = ()
    splits: tuple[int | None, ...] = ()  # per bucket: None for compact, else the length of its equal parts
    tensors: int = 1  # that travel to the owner: the direction, or the gradient and the weight

    def local_atoms(self, rank: int) -> list[int]:
        """Atoms that ``rank`` owns and stores whole."""
        return [i for i, owner in enumerate(self.ownership.owners) if owner == rank and is_whole(self.layout, i, owner)]

    def keeps_state(self, atom: int, rank: int) -> bool:
        """Whether ``rank`` keeps the state of a piece of ``atom``."""
        if self.layout.fragment(atom, rank) is None:
            return False
        return self.layout.copies_keep_state or self.ownership.owners[atom] == rank

    def stays(self, bucket: int) -> bool:
        """Whether the owners of the bucket's atoms store them whole already, so that nothing has to come to them."""
        alike = self._alike(self.buckets[bucket])
        return all(part.rank == owner for atom, owner, _ in alike for part in self.layout.sources(atom, owner))

    def trips(self, bucket: int) -> int:
        """How many all-to-alls the bucket takes: to the owners, unless it stays, and back."""
        return 1 if self.stays(bucket) else 1 + self.tensors

    def split(self, bucket: int) -> int | None:
        """The length of the equal parts in which the bucket travels, or None for parts as long as needed."""
        return self.splits[bucket] if self.splits else None

    def transfer(self, bucket: int, rank: int) -> Transfer:
        """Bucket ``bucket``'s way to the owners as ``rank`` sees it."""
        return to_owners(self.buckets[bucket], self.ownership.owners, self.layout, rank, self.split(bucket))

    def way_back(self, bucket: int, rank: int) -> Transfer:
        """The bucket's way from the owners to all ranks that store pieces, as ``rank`` sees it."""
        return to_fragments(self.buckets[bucket], self.ownership.owners, self.layout, rank, self.split(bucket))

    def lines(self) -> list[str]:
        """One line per atom: what all ranks must have decided alike before the first exchange."""
        return [
            f"{atom.name} {atom.shape[0]}x{atom.shape[1]} {self.layout.place(index)} owner {owner}"
            for index, (atom, owner) in enumerate(zip(self.atoms, self.ownership.owners))
        ] + [f"buckets {self.buckets} in parts {self.splits} of {self.tensors} x {self.element_bytes} bytes an element"]

    def owned_counts(self) -> list[int]:
        """Per rank, how many atoms it owns."""
        counts = [0] * self.layout.world_size
        for owner in self.ownership.owners:
            counts[owner] += 1
        return counts

    def owned_numels(self) -> list[int]:
        """Per rank, the elements of the atoms it owns."""
        numels = [0] * self.layout.world_size
        for atom, owner in zip(self.atoms, self.ownership.owners):
            numels[owner] += atom.numel
        return numels

    def moved_numel(self) -> list[int]:
        """Per rank, the elements it stores whose update is computed by another rank."""
        moved = [0] * self.layout.world_size
        for atom, owner, times in self._alike(atom for bucket in self.buckets for atom in bucket):
            for part in self.layout.fragments(atom):
                moved[part.rank] += part.numel * times if part.rank != owner else 0
        return moved

    def wire_bytes(self) -> list[int]:
        """Per rank, the bytes it sends in one step: fragments to owners, and updates back to fragments."""
        sent = [0] * self.layout.world_size
        compact: list[int] = []
        for number, bucket in enumerate(self.buckets):
            split = self.split(number)
            if split is None:
                compact += bucket
            else:
                sent = [numel + self.trips(number) * split * (len(sent) - 1) for numel in sent]
        for atom, owner, times in self._alike(compact):
            for part in self.layout.sources(atom, owner):
                sent[part.rank] += part.numel * times * self.tensors if part.rank != owner else 0
            for part in self.layout.fragments(atom):
                sent[owner] += part.numel * times if part.rank != owner else 0
        return [numel * self.element_bytes for numel in sent]

    def _alike(self, atoms: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """One of the atoms that lie alike and have one owner, that owner, and how many they are."""
        counts: dict[tuple[Hashable, int], list[int]] = {}
        for atom in atoms:
            counts.setdefault((self.layout.kind(atom), self.ownership.owners[atom]), []).append(atom)
        for (_, owner), alike in counts.items():
            yield alike[0], owner, len(alike)


def is_whole(layout: Layout, atom: int, rank: int) -> bool:
    """Whether ``rank`` stores every element of ``atom`` and nobody else any."""
    parts = layout.fragments(atom)
    return len(parts) == 1 and parts[0].rank == rank
