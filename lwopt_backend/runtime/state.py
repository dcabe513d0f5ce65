"""State that only owners keep: held by matrix, cut into shards for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout, Segment, Sharding
from lwopt_backend.plan.owners import Ownership, cut_buckets
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.exchange import Arrival, Fetch, Way, ways_back, ways_to_owners

# Owner-held state in a checkpoint of sharded tensors: cut by rows over the mesh, as parameters are, and back.
#
# So it is complete whoever asks for it, and can be loaded by other ranks with other owners.

BUCKET_BYTES = 2**26  # of state that travel together when it is saved or loaded
STRUCTURE, STEPPED = "structure", "stepped"  # beside the tensors, of state that is more than tensors by name
MATRICES = "matrices"  # beside them all, of a parameter with other matrices than its shape tells: which elements
Key = tuple[int, str]  # atom, and the path of a tensor in its state


@dataclass(frozen=True)
class Entry:
    """One tensor of a matrix's state."""

    atom: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class OwnerShards:
    """The state that owners keep of one plan's matrices, as every rank of it sees it. Made on all of them."""

    def __init__(
        self,
        plan: MatrixPlan,
        rules: Sequence[MatrixRule],
        held: OwnerState,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._held = held
        self._collectives = collectives
        self._device = device
        self._owned = [
            atom
            for atom, (rule, owner) in enumerate(zip(rules, plan.ownership.owners))
            if owner == collectives.rank and keeps_state(rule)
        ]
        self.entries: list[Entry] = []
        if not any(map(keeps_state, rules)):
            return
        held.make(self._owned, rules)
        mine = [
            Entry(atom, key, tuple(tensor.shape), tensor.dtype)
            for atom in self._owned
            for key, tensor in held.tensors(atom).items()
        ]
        self.entries = sorted(
            (entry for of_rank in collectives.gather_objects(mine) for entry in of_rank),
            key=lambda entry: (entry.atom, entry.key),
        )
        self._moving = [entry for entry in self.entries if entry.numel]
        self._plan = _plan_of(self._moving, plan)

    def save(self) -> dict[Key, tuple[torch.Size, Tensor]]:
        """Per atom and key the whole shape and this rank's rows. Called on all ranks of the plan."""
        tensors = {
            (atom, key): t.to(self._device) for atom in self._owned for key, t in self._held.tensors(atom).items()
        }
        parts = [torch.empty(self._bytes_here(i), dtype=torch.uint8, device=self._device) for i in self._places()]

        def fetch(segment: Segment) -> Tensor:
            entry = self._moving[segment.atom]
            return _bytes(tensors[entry.atom, entry.key])[segment.start : segment.stop]

        for arrival in self._exchange(ways_back, fetch):
            arrival.wait(lambda segment, data: parts[segment.atom].copy_(data))
        found = {}
        for entry, part in zip(self._moving, parts):
            rows = part.view(entry.dtype) if part.numel() else part.new_empty(0, dtype=entry.dtype)
            found[entry.atom, entry.key] = (torch.Size(entry.shape), rows.view(-1, *entry.shape[1:]))
        for entry in self.entries:
            if not entry.numel:
                empty = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
                found[entry.atom, entry.key] = (torch.Size(entry.shape), empty)
        return found

    def load(self, shards: Mapping[Key, Tensor]) -> None:
        """Bring what ``save`` returned, on these or other ranks, to the owners. Called on all ranks of the plan."""
        arrived: dict[Key, Tensor] = {
            (entry.atom, entry.key): torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            for entry in self.entries
            if entry.atom in self._owned
        }

        def fetch(segment: Segment) -> Tensor:
            entry = self._moving[segment.atom]
            return _bytes(shards[entry.atom, entry.key].to(self._device, entry.dtype))

        def deliver(segment: Segment, data: Tensor) -> None:
            entry = self._moving[segment.atom]
            _bytes(arrived[entry.atom, entry.key])[segment.start : segment.stop].copy_(data)

        for arrival in self._exchange(ways_to_owners, fetch):
            arrival.wait(deliver)
        for atom in self._owned:
            self._held.put_tensors(atom, {key: tensor for (of, key), tensor in arrived.items() if of == atom})

    def _places(self) -> range:
        return range(len(self._moving))

    def _bytes_here(self, index: int) -> int:
        held = self._plan.layout.fragment(index, self._collectives.rank)
        return held.numel if held is not None else 0

    def _exchange(self, ways: Callable[..., list[Way]], fetch: Fetch) -> list[Arrival]:
        if not self.entries:
            return []
        return [way.start(torch.uint8, fetch) for way in ways(self._plan, self._collectives, self._device)]


def _plan_of(entries: Sequence[Entry], plan: MatrixPlan) -> MatrixPlan:
    """Each tensor as a matrix of bytes with its parent's owner, cut by rows wherever the parameter is cut at all."""
    layout = plan.layout
    assert isinstance(layout, MeshLayout)
    atoms, shardings, owners = [], [], []
    for entry in entries:
        shape = (entry.shape[0], entry.numel // entry.shape[0] * entry.dtype.itemsize)
        parent = layout.shardings[entry.atom]
        atoms.append(Atom(f"{plan.atoms[entry.atom].name}.{entry.key}", shape, 0))
        dims = tuple(None if dim is None else 0 for dim in parent.dims)
        shardings.append(Sharding(shape, parent.mesh_shape, dims, (False,) * len(dims)))
        owners.append(plan.ownership.owners[entry.atom])
    buckets = cut_buckets(atoms, range(len(atoms)), max(1, len(atoms)), BUCKET_BYTES)
    ownership = Ownership("parent's", tuple(owners), (0,) * layout.world_size)
    return MatrixPlan(tuple(atoms), MeshLayout(layout.coordinates, tuple(shardings)), ownership, buckets, 1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# State that only the owner of a matrix keeps, whole: factors of SOAP or Shampoo, of whatever shapes and number.

CHECKPOINT_KEY = "owner_state"  # under which checkpoints of DeepSpeed have it


class OwnerState:
    """What this rank keeps of the ``atoms`` that it owns, by their number; on ``device``."""

    def __init__(self, atoms: Sequence[Atom], device: torch.device) -> None:
        self._atoms = atoms
        self._device = device
        self._held: dict[int, dict[str, Any]] = {}
        self._tried: set[int] = set()  # state as it will be after a first step, which has not been taken

    def of(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        """The state of a matrix for its next step; the rule changes it in place."""
        if atom in self._tried:
            self._tried.discard(atom)
            self._held[atom].clear()
        if atom not in self._held:
            self._held[atom] = self._new(atom, rule)
        return self._held[atom]

    def _new(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        if isinstance(rule, OwnerStateRule):
            return rule.new_owner_state(self._atoms[atom].rule_shape, self._device)
        return {}

    def held(self) -> Mapping[int, dict[str, Any]]:
        """What there is, by atom. Of a matrix that was never stepped there may be nothing."""
        return {atom: state for atom, state in self._held.items() if atom not in self._tried}

    def make(self, atoms: Iterable[int], rules: Sequence[MatrixRule]) -> None:
        """Have state for ``atoms``, so that a checkpoint knows its names and shapes before there was a step.

        A ``WeightRule`` has none before its first step; that is tried on other numbers, and forgotten at the real one.
        """
        for atom in atoms:
            rule = rules[atom]
            if not keeps_state(rule) or self._held.get(atom):
                continue
            self._held[atom] = self._new(atom, rule)
            if isinstance(rule, WeightRule):
                self._tried.add(atom)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    value, grad = (torch.randn(self._atoms[atom].rule_shape).to(self._device) for _ in range(2))
                    rule.step(value, grad, self._held[atom])

    def is_real(self, atom: int) -> bool:
        """Whether there was a step, or a checkpoint of one."""
        return atom in self._held and atom not in self._tried

    def put(self, atom: int, state: Mapping[str, Any]) -> None:
        """Take over what was loaded."""
        self._tried.discard(atom)
        self._held[atom] = nested.to_device(dict(state), self._device)

    def tensors(self, atom: int) -> dict[str, Tensor]:
        """A matrix's state, after ``make``, as tensors of at least one dimension by their path."""
        state = self._held[atom]
        found = {key: tensor.reshape(tensor.shape or (1,)) for key, tensor in nested.leaves(state)}
        if not nested.is_plain(state):
            found[STRUCTURE] = nested.described(state)
            found[STEPPED] = torch.tensor([self.is_real(atom)])
        return found

    def put_tensors(self, atom: int, found: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` returned, here or on another rank."""
        found = dict(found)
        stepped, described = found.pop(STEPPED, None), found.pop(STRUCTURE, None)
        if stepped is not None and not stepped.item():
            self.forget(atom)
        elif described is None:
            self.put(atom, found)
        else:
            before = dict(nested.leaves(self._held.get(atom, {})))
            shaped = {key: t.reshape(before[key].shape) if key in before else t for key, t in found.items()}
            self.put(atom, nested.rebuild(nested.description(described.cpu()), shaped))

    def forget(self, atom: int) -> None:
        """Begin anew."""
        self._tried.discard(atom)
        self._held.pop(atom, None)

    def by_name(self) -> dict[str, dict[str, Any]]:
        """What there is, by a matrix's name."""
        return {self._atoms[atom].name: state for atom, state in self.held().items()}

    def take(self, atoms: Iterable[int], states: Mapping[str, dict[str, Any]]) -> None:
        """Take over what was loaded, by name; matrices without any begin anew."""
        for atom in atoms:
            name = self._atoms[atom].name
            self.put(atom, states[name]) if name in states else self.forget(atom)

    def nbytes(self) -> int:
        """Of all tensors that are held."""
        tensors = (t for state in self.held().values() for _, t in nested.leaves(state) if isinstance(t, Tensor))
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def brought_here(
    saved: Mapping[str, dict[str, Any]], wanted: Sequence[str], ranks: Collectives
) -> dict[str, dict[str, Any]]:
    """The states of matrices ``wanted`` on this rank, of those that any rank has ``saved``. Called on all ranks.

    Owners may be others than when they were saved; what is saved elsewhere only is fetched.
    """
    missing = {name for names in ranks.gather_objects([n for n in wanted if n not in saved]) for name in names}
    offers = ranks.gather_objects({name: saved[name] for name in missing if name in saved}) if missing else []
    found = {name: state for offer in offers for name, state in offer.items()}
    return {name: saved[name] if name in saved else found[name] for name in wanted if name in saved or name in found}


def owner_key(path: str, place: int, matrices: int) -> str:
    """What a state dict calls a tensor of owner-held state: of several matrices in the parameter, which one's."""
    return f"[{place}].{path}" if matrices > 1 else path


def keeps_state(rule: MatrixRule) -> bool:
    """Whether a rule keeps state at owners at all."""
    return isinstance(rule, (OwnerStateRule, WeightRule))
