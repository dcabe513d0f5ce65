"""State that only the owner of a matrix keeps, whole: factors of SOAP or Shampoo, of shapes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout, Segment, Sharding
from lwopt_backend.plan.owners import Ownership
from lwopt_backend.plan.spread import cut_buckets
from lwopt_backend.rules import MatrixRule, OwnerStateRule
from lwopt_backend.runtime.exchange import ExchangeBuckets
from lwopt_backend.runtime.ranks import Collectives

BUCKET_NUMEL = 2**24  # elements of state that travel together when it is saved or loaded


class OwnerState:
    """The owner-held state of one plan's matrices on one rank.

    Between steps it lies at the owners. For a checkpoint it is cut by rows over the mesh, as parameters are, so that it
    is complete whoever asks for it and can be loaded by other ranks with other owners.
    """

    def __init__(
        self, plan: MatrixPlan, rules: Sequence[MatrixRule], collectives: Collectives, device: torch.device
    ) -> None:
        self._collectives = collectives
        self._device = device
        self._held: dict[int, dict[str, Tensor]] = {}
        self._keys: list[tuple[int, str]] = []  # of every state tensor of every matrix, in an order that ranks share
        self._like: list[Tensor] = []  # its shape and dtype
        for atom, (rule, owner) in enumerate(zip(rules, plan.ownership.owners)):
            if not isinstance(rule, OwnerStateRule):
                continue
            shape = plan.atoms[atom].rule_shape
            if owner == collectives.rank:
                self._held[atom] = rule.new_owner_state(shape, device)
            for key, tensor in sorted(rule.new_owner_state(shape, torch.device("meta")).items()):
                self._keys.append((atom, key))
                self._like.append(tensor)
        self._plan = _plan_of(self._keys, self._like, plan) if self._keys else None

    def holds(self, atom: int) -> bool:
        """Whether there is any state of a matrix that this rank owns; of a batch by one rule, all or none have some."""
        return atom in self._held

    def of(self, atom: int) -> dict[str, Tensor]:
        """The state of a matrix that this rank owns; the rule changes it in place."""
        return self._held[atom]

    def shapes(self) -> dict[tuple[int, str], Tensor]:
        """Per atom and key, on every rank, a tensor without memory of the state's shape and dtype."""
        return dict(zip(self._keys, self._like))

    def shards(self) -> dict[tuple[int, str], tuple[torch.Size, Tensor]]:
        """Per atom and key the whole shape and this rank's rows. Called on all ranks of the plan."""
        if self._plan is None:
            return {}
        parts = self._empty_parts()
        manager = ExchangeBuckets(self._plan, self._collectives, self._device)

        def fetch(segment: Segment) -> Tensor:
            atom, key = self._keys[segment.atom]
            return _rows(self._held[atom][key], segment)

        for bucket in range(len(manager)):
            manager.to_fragments(bucket, torch.float32, fetch).wait(lambda s, data: parts[s.atom].view(-1).copy_(data))
        return {
            key: (like.shape, part.to(like.dtype).view(-1, *like.shape[1:]))
            for key, like, part in zip(self._keys, self._like, parts)
        }

    def load(self, shards: Mapping[tuple[int, str], Tensor]) -> None:
        """Bring what ``shards`` returned, on these or other ranks, to the owners. Called on all ranks of the plan."""
        if self._plan is None:
            return
        manager = ExchangeBuckets(self._plan, self._collectives, self._device)

        def deliver(segment: Segment, data: Tensor) -> None:
            atom, key = self._keys[segment.atom]
            _rows(self._held[atom][key], segment).copy_(data.view(1, -1))

        for bucket in range(len(manager)):
            manager.to_owners(bucket, torch.float32, lambda s: shards[self._keys[s.atom]].reshape(-1)).wait(deliver)

    def _empty_parts(self) -> list[Tensor]:
        assert self._plan is not None
        layout = self._plan.layout
        parts = []
        for index, atom in enumerate(self._plan.atoms):
            held = layout.fragment(index, self._collectives.rank)
            rows = held.numel // atom.shape[1] if held is not None else 0
            parts.append(torch.empty(rows, atom.shape[1], device=self._device))
        return parts


def _plan_of(keys: Sequence[tuple[int, str]], like: Sequence[Tensor], plan: MatrixPlan) -> MatrixPlan:
    """Each state tensor as a matrix with its parent's owner, cut by rows wherever the parameter is cut at all."""
    layout = plan.layout
    assert isinstance(layout, MeshLayout)
    atoms, shardings, owners = [], [], []
    for (atom, key), tensor in zip(keys, like):
        shape = (tensor.shape[0], tensor.numel() // max(1, tensor.shape[0]))
        parent = layout.shardings[atom]
        atoms.append(Atom(f"{plan.atoms[atom].name}.{key}", shape, 0))
        dims = tuple(None if dim is None else 0 for dim in parent.dims)
        shardings.append(Sharding(shape, parent.mesh_shape, dims, (False,) * len(dims)))
        owners.append(plan.ownership.owners[atom])
    buckets = cut_buckets(atoms, range(len(atoms)), len(atoms), BUCKET_NUMEL)
    ownership = Ownership("parent's", tuple(owners), (0,) * layout.world_size)
    return MatrixPlan(tuple(atoms), MeshLayout(layout.coordinates, tuple(shardings)), ownership, buckets, 4)


def _rows(tensor: Tensor, segment: Segment) -> Tensor:
    """The segment's elements, whole rows, as a view of one row."""
    return tensor.view(-1).narrow(0, segment.start, segment.numel).view(1, -1)
