"""FSDP2's state: a rank's pieces, checks of a state dict, and owner state."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lwopt_backend.engines.fsdp2.plan import MeshStepper, States, as_shard, local, placed
from lwopt_backend.groups.members import Members
from lwopt_backend.groups.param_groups import check_saved_groups, of_another_optimizer
from lwopt_backend.groups.registry import quantized_keys, rule_of
from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout, Segment, Sharding, Transfer
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.plan.layouts import View
from lwopt_backend.plan.owners import Ownership
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import check_on_all
from lwopt_backend.runtime.exchange import Way, ways_back, ways_to_owners
from lwopt_backend.runtime.owner_state import BUCKET_BYTES, Segments, exchange
from lwopt_backend.runtime.shown_state import Elsewhere, ShownState, ShownTensor, stored
from lwopt_backend.runtime.state import (
    MATRICES,
    StatePiece,
    StateStore,
    check_fits,
    form_of,
    keeps_state,
    owner_key,
    part_of,
)


class MeshStore(StateStore):
    """This rank's boxes of the parameters of ``steppers`` and of their ``states``.

    ``different`` is whether their ranks have different parameters (experts) under one name.
    """

    def __init__(
        self, steppers: Sequence[MeshStepper], groups: Sequence[dict[str, Any]], states: States, different: bool
    ) -> None:
        self._steppers, self._states = steppers, states
        units = [[member] for stepper in steppers for member in stepper.members]
        why = "ranks have different parameters (experts) under the same names; name copies in the optimizer's 'copies'"
        ambiguous = why if different else None
        super().__init__([stepper.collectives for stepper in steppers], groups, units, ambiguous=ambiguous)

    def pieces(self) -> list[StatePiece]:
        found: list[StatePiece] = []
        for stepper in self._steppers:
            found += stepper.pieces(self._states, len(found))
        return found

    def forget_owner_states(self, names: Collection[str]) -> None:
        for stepper in self._steppers:
            for atom, index in enumerate(stepper.member_of_atom):
                if stepper.members[index].name in names:
                    stepper.matrix_stepper.owner_state.forget(atom)


# The check of a state dict before it is loaded.

WHAT = "load_state_dict"
ANEW = "load it into the same model with torch.distributed.checkpoint, which reshards it"


def check_loadable(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    states: Mapping[Tensor, Mapping[str, Any]],
    shards: Sequence[OwnerShards],
    members: Members | None,
) -> None:
    """Raises ValueError for groups with other rules, sizes or ``members``, and for state with other keys, shapes or
    matrices than ``states``; warns of missing state."""
    saved, state = state_dict["param_groups"], state_dict["state"]
    if not of_another_optimizer(saved):  # a group without a rule is trained by the same group here
        saved = [{"rule": rule_of(group), **theirs} for group, theirs in zip(groups, saved)] + saved[len(groups) :]
    check_saved_groups(WHAT, groups, saved, members=members)
    if not state:
        return  # saved by an optimizer that had no state yet
    params = [(name, p) for group, of_group in zip(groups, names) for p, name in zip(group["params"], of_group)]
    indices = [index for group in saved for index in group["params"]]
    found = {name: (p, state[index]) for (name, p), index in zip(params, indices) if state.get(index)}
    matrices = {param: elements for of_mesh in shards for param, elements in of_mesh.matrices.items()}
    here, there = dict[str, Any](), dict[str, Any]()
    for name, (param, of_param) in found.items():
        here[name], there[name] = _facts(of_param, states[param], matrices.get(param))
    check_fits(WHAT, here, there, advice=ANEW)
    missing = [name for name, _ in params if name not in found]
    if missing:
        warnings.warn(
            f"the checkpoint has no state of {missing}; the state of these parameters does not change", stacklevel=3
        )


def _facts(
    found: Mapping[str, Any], made: Mapping[str, Tensor], matrices: list[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of a parameter's state, here and in a state dict, which has equal shards or whole tensors."""
    here: dict[str, Any] = {"matrices": matrices, "state": sorted(made)}
    there: dict[str, Any] = {"state": sorted(found)}
    if matrices is not None and MATRICES in found:
        there["matrices"] = nested.rebuilt(found[MATRICES])
    for key in made.keys() & found.keys():
        value, like = found[key], made[key]
        if isinstance(value, Tensor) or like.ndim:  # a counter may be a number
            whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            here[f"{key!r} as"] = form_of(torch.empty(like.shape, device="meta") if whole else like)
            there[f"{key!r} as"] = form_of(value)
    return here, there


def view_of(tensor: Tensor) -> View:
    """This rank's elements of a tensor: a box of a DTensor, all of a plain tensor."""
    begin, sizes = box_of(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tensor.shape)
    return View.of_box(tensor.shape, list(zip(begin, sizes)))


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The start and the sizes of this rank's box of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    box = placed(tensor).box(tuple(coordinate))
    return tuple(begin for begin, _ in box), tuple(size for _, size in box)


# Owner state in an optimizer's state dict: DTensors, cut by rows over the parameter's mesh.
#
# Every rank saves its shards, and ranks with different owners load them. If a parameter has several matrices, keys
# begin with a matrix's place in it, ``"[1].GG.0"``. If its shape does not define the matrices (q, k, v), a further key
# does.

Groups = Sequence[Sequence[Tensor]]
AT_OWNER = (
    "{!r} of {!r} is at the owner of a matrix; optimizer.state_dict(), which all ranks call, has it, and "
    "load_state_dict() and reset_state() change it"
)


@dataclass(frozen=True, eq=False)
class OwnerEntry:
    """A tensor of a matrix's owner state, at ``path`` in it and ``key`` in the parameter's; ``like`` is on meta."""

    atom: int
    path: str
    param: Tensor
    key: str
    like: Tensor


class OwnerShards:
    """The owner state of one mesh's matrices, cut into shards. Made on all ranks of the mesh.

    ``matrices`` are those that a parameter's shape does not define.
    """

    def __init__(self, stepper: MeshStepper, rules: Mapping[int, MatrixRule]) -> None:
        self._held, self._ranks, self._device = stepper.matrix_stepper.owner_state, stepper.exchanging, stepper.device
        kept = {atom: rule for atom, rule in enumerate(stepper.rules_of(rules)) if keeps_state(rule)}
        self._owned = {a: rule for a, rule in kept.items() if stepper.plan.ownership.owners[a] == self._ranks.rank}
        self.entries = self._entries(stepper) if kept else []  # on all ranks of the mesh, or on none
        cut = (stepper.members[stepper.member_of_atom[entry.atom]] for entry in self.entries)
        self.matrices = {m.param: m.matrices for m in cut if m.blocks != matrices_of(m.sharding.shape)}
        self._moving = [entry for entry in self.entries if entry.like.numel()]
        self._plan = _plan_of(self._moving, stepper.plan)

    def _entries(self, stepper: MeshStepper) -> list[OwnerEntry]:
        """The tensors of all owners."""
        check_on_all(stepper.collectives, "the rule's first step", lambda: self._held.make(self._owned))
        mine = [(a, path, tuple(t.shape), t.dtype) for a in self._owned for path, t in self._held.tensors(a).items()]
        of_all = (entry for of_rank in self._ranks.gather_objects(mine) for entry in of_rank)
        found = []
        for atom, path, shape, dtype in sorted(of_all, key=lambda entry: entry[:2]):
            member = stepper.members[stepper.member_of_atom[atom]]
            key = owner_key(path, stepper.places[atom], len(member.blocks))
            found.append(OwnerEntry(atom, path, member.param, key, torch.empty(shape, dtype=dtype, device="meta")))
        return found

    def save(self) -> Iterator[tuple[OwnerEntry, Tensor]]:
        """Yield each tensor as a DTensor, or whole if the parameter is none. Called on all ranks."""
        tensors = {atom: {p: t.to(self._device) for p, t in self._held.tensors(atom).items()} for atom in self._owned}
        parts: dict[OwnerEntry, Tensor] = {}
        for index, entry in enumerate(self._moving):
            here = self._plan.layout.fragment(index, self._ranks.rank)
            parts[entry] = torch.empty(here.numel if here else 0, dtype=torch.uint8, device=self._device)

        def fetch(segment: Segment, entry: OwnerEntry) -> Tensor:
            return _bytes_in(tensors[entry.atom][entry.path], entry.like.dtype, slice(segment.start, segment.stop))

        def deliver(segments: Segments) -> None:
            for segment, data in segments:
                parts[self._moving[segment.atom]][self._of_rows(segment)].copy_(data)

        self._exchange(ways_back, fetch, deliver)
        for entry in self.entries:
            rows = torch.empty_like(entry.like, device=self._device)
            if entry in parts:
                rows = parts[entry].view(entry.like.dtype).view(-1, *entry.like.shape[1:])
            yield entry, _as_dtensor(rows, entry.like.shape, entry.param)

    def load(self, rows: Mapping[OwnerEntry, Tensor]) -> None:
        """Send this rank's rows of all tensors to the owners. Called on all ranks."""
        arrived: dict[int, dict[str, Tensor]] = {atom: {} for atom in self._owned}
        for entry in self.entries:
            if entry.atom in arrived:
                arrived[entry.atom][entry.path] = torch.empty_like(entry.like, device=self._device)

        def fetch(segment: Segment, entry: OwnerEntry) -> Tensor:
            return _bytes_in(rows[entry], entry.like.dtype, self._of_rows(segment))

        def deliver(segments: Segments) -> None:
            for segment, data in segments:
                entry = self._moving[segment.atom]
                _bytes(arrived[entry.atom][entry.path])[segment.start : segment.stop].copy_(data)

        self._exchange(ways_to_owners, fetch, deliver)
        for atom in self._owned:
            self._held.put_tensors(atom, arrived.pop(atom))

    def _of_rows(self, segment: Segment) -> slice:
        """The place of a segment in this rank's rows of its tensor."""
        here = self._plan.layout.fragment(segment.atom, self._ranks.rank)
        assert here is not None
        return slice(segment.start - here.start, segment.stop - here.start)

    def _exchange(
        self,
        ways: Callable[..., list[Way]],
        fetch: Callable[[Segment, OwnerEntry], Tensor],
        deliver: Callable[[Segments], object],
    ) -> None:
        if self.entries:
            buckets = ways(self._plan, self._ranks, self._device)
            exchange(buckets, lambda segment: fetch(segment, self._moving[segment.atom]), deliver)


@dataclass(frozen=True)
class BytesInRounds(MatrixPlan):
    """Tensors as matrices of bytes. Bucket n has the n-th ``most`` bytes of every owner, cut across tensors.

    Owner state goes between owners and shards on the ways of a plan's matrices, whatever its shapes and dtypes: the
    bytes of a tensor's row are a row of a matrix.

    A bucket's part of a tensor is the same part of every rank's rows, so that no rank sends or receives much more
    than others. ``begins`` is each tensor's place in the bytes of its owner.
    """

    begins: tuple[int, ...] = ()
    most: int = 0

    def transfer(self, bucket: int, rank: int) -> Transfer:
        return self._cut(bucket, super().transfer(bucket, rank))

    def way_back(self, bucket: int, rank: int) -> Transfer:
        return self._cut(bucket, super().way_back(bucket, rank))

    def pieces_of_column(self, bucket: int, rank: int) -> list[list[Segment]]:
        of_column = super().pieces_of_column(bucket, rank)
        return [[self._part(bucket, segment) for segment in pieces] for pieces in of_column]

    def _cut(self, bucket: int, whole: Transfer) -> Transfer:
        both = (whole.sends, whole.receives)
        sends, receives = (tuple(self._part(bucket, segment) for segment in segments) for segments in both)
        return Transfer(whole.world_size, sends, receives)

    def _part(self, bucket: int, rows: Segment) -> Segment:
        """The bucket's part of a rank's rows of one tensor."""
        begin, nbytes = self.begins[rows.atom], self.atoms[rows.atom].numel
        start, stop = (min(max(0, number * self.most - begin), nbytes) for number in (bucket, bucket + 1))
        parts = (rows.start + rows.numel * place // nbytes for place in (start, stop))
        return Segment(rows.atom, rows.peer, *parts)


def _plan_of(entries: Sequence[OwnerEntry], plan: MatrixPlan) -> BytesInRounds:
    """Plan each tensor as a matrix of bytes with its atom's owner, cut by rows over the dimensions that cut it.

    A rank sends at most ``BUCKET_BYTES`` at once. With copies, what all rows of ranks send is in one buffer.
    """
    layout = plan.layout
    assert isinstance(layout, MeshLayout)
    atoms, shardings, owners, begins = [], [], [], []
    most, buckets = max(1, BUCKET_BYTES // plan.copies), defaultdict[int, list[int]](list)
    ends = Counter[int]()  # by owner
    for number, entry in enumerate(entries):
        shape = (entry.like.shape[0], entry.like.nbytes // entry.like.shape[0])
        parent, owner = layout.shardings[entry.atom], plan.ownership.owners[entry.atom]
        atoms.append(Atom(f"{plan.atoms[entry.atom].name}.{entry.path}", shape, 0))
        dims = tuple(None if dim is None else 0 for dim in parent.dims)
        shardings.append(Sharding(shape, parent.mesh_shape, dims, (False,) * len(dims)))
        owners.append(owner)
        begins.append(ends[owner])
        ends[owner] += entry.like.nbytes
        for bucket in range(begins[-1] // most, -(-ends[owner] // most)):
            buckets[bucket].append(number)
    ownership = Ownership("parent's", tuple(owners), (0,) * layout.world_size)
    in_order = tuple(tuple(buckets[bucket]) for bucket in range(len(buckets)))
    of_mesh = MeshLayout(layout.coordinates, tuple(shardings))
    return BytesInRounds(tuple(atoms), of_mesh, ownership, in_order, 1, begins=tuple(begins), most=most)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_in(tensor: Tensor, dtype: torch.dtype, place: slice) -> Tensor:
    """The bytes at ``place`` of a tensor in ``dtype``. A part is sent at a time: only its rows are converted or copied,
    for SOAP's eigenvectors are not contiguous."""
    nbytes = tensor[0].numel() * dtype.itemsize
    first = place.start // nbytes
    rows = tensor[first : -(-place.stop // nbytes)]
    return _bytes(rows.to(dtype))[place.start - first * nbytes : place.stop - first * nbytes]


def owner_shards(steppers: Sequence[MeshStepper], rules: Mapping[int, MatrixRule], states: States) -> list[OwnerShards]:
    """The owner state of each stepper's matrices, in shards. Called on all ranks of the meshes.

    Shows its keys in ``states``: torch reads only the existing keys of a flattened checkpoint.
    """
    shards = [OwnerShards(stepper, rules) for stepper in steppers]
    for state in states.values():
        if isinstance(state, ShownState):
            state.shown.clear()
    show_in_8_bits(steppers, states)
    for stepper, of_mesh in zip(steppers, shards):
        for entry in of_mesh.entries:
            member = stepper.members[stepper.member_of_atom[entry.atom]]
            at_owner = _at_owner(entry.key, member.name, entry.like)
            _shown_of(states, entry.param)[entry.key] = _as_dtensor(at_owner, entry.like.shape, entry.param)
        for member in stepper.members:
            if (elements := of_mesh.matrices.get(member.param)) is not None:
                at_owner = _at_owner(MATRICES, member.name, nested.described(elements))
                _shown_of(states, member.param)[MATRICES] = at_owner
    return shards


def _at_owner(key: str, name: str, like: Tensor) -> Tensor:
    return ShownTensor(Elsewhere(AT_OWNER.format(key, name), tuple(like.shape), like.dtype))


def show_in_8_bits(steppers: Sequence[MeshStepper], states: States) -> None:
    """Show in ``states`` what the steppers keep in 8 bits."""
    for stepper in steppers:
        for number, member in enumerate(stepper.members):
            for key, held in stepper.in_8_bits(number).items():
                _shown_of(states, member.param)[key] = as_shard(ShownTensor(held), member.param)


def _shown_of(states: States, param: Tensor) -> dict[str, Tensor]:
    """What a parameter's state shows, to be changed."""
    state = states[param]
    if not isinstance(state, ShownState):
        states[param] = state = ShownState(state)
    return state.shown


def with_owner_state(state_dict: dict[str, Any], shards: Sequence[OwnerShards], groups: Groups) -> dict[str, Any]:
    """``state_dict`` with the owner state of the matrices in ``groups``. Called on all ranks of the meshes."""
    state, index_of = dict(state_dict["state"]), _indices(state_dict, groups)
    for of_mesh in shards:
        for entry, tensor in of_mesh.save():
            if (index := index_of.get(id(entry.param))) is not None:  # None if it was taken out of its group
                state[index] = {**state.get(index, {}), entry.key: tensor}
        for param, elements in of_mesh.matrices.items():
            if id(param) in index_of:
                state[index_of[id(param)]][MATRICES] = nested.described(elements)
    return {**state_dict, "state": state}


def with_wide_state(
    state_dict: dict[str, Any], steppers: Sequence[MeshStepper], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``state_dict`` with what is kept in 8 bits in fp32: that of ``steppers``, or zeros before there are any."""
    state, index_of = dict(state_dict["state"]), _indices(state_dict, [group["params"] for group in groups])
    pieces = {m.param: stepper.in_8_bits(n) for stepper in steppers for n, m in enumerate(stepper.members)}
    for group in groups:
        keys = quantized_keys(group)
        for param in group["params"] if keys else ():
            of_param = dict(state.get(index_of[id(param)], {}))
            for key in of_param.keys() & set(keys):
                held, like = pieces.get(param, {}).get(key), local(of_param[key])
                if held is None:
                    wide = torch.zeros(like.shape, dtype=like.dtype, device=local(param).device)
                else:
                    wide = held.read()
                of_param[key] = as_shard(wide, param)
            state[index_of[id(param)]] = of_param
    return {**state_dict, "state": state}


@torch.no_grad()
def take_state(
    state_dict: Mapping[str, Any],
    groups: Groups,
    states: States,
    shards: Sequence[OwnerShards],
    steppers: Sequence[MeshStepper],
) -> None:
    """Copy this rank's part of a state dict, of whole tensors or shards, into ``states``, or what ``steppers`` keep in
    8 bits there; send owner state to the owners.

    State that the state dict lacks is not changed. Called on all ranks.
    """
    index_of, saved = _indices(state_dict, groups), state_dict["state"]
    found = {param: saved.get(index_of[id(param)], {}) for group in groups for param in group}
    for of_mesh in shards:
        if of_mesh.entries and all(entry.key in found[entry.param] for entry in of_mesh.entries):
            made = ((entry, found[entry.param][entry.key], states[entry.param][entry.key]) for entry in of_mesh.entries)
            of_mesh.load({entry: _here(value, like) for entry, value, like in made})
    for param, of_param in found.items():
        for key, into in stored(states[param]).items():
            if key in of_param:
                local(into).copy_(_here(torch.as_tensor(of_param[key]), into))
    for stepper in steppers:
        for number, member in enumerate(stepper.members):
            for key, held in stepper.in_8_bits(number).items():
                if key in (of_param := found.get(member.param, {})):
                    here = _here(of_param[key], states[member.param][key])
                    held.write(here.to(held.device, held.dtype))


def _here(value: Tensor, made: Tensor) -> Tensor:
    """This rank's part of ``value``, which is a shard or whole, for a tensor that is sharded as ``made`` is."""
    return local(value) if isinstance(value, DTensor) else part_of(value, view_of(made))


def _indices(state_dict: Mapping[str, Any], groups: Groups) -> dict[int, Any]:
    """Each parameter's key in a state dict, by position: a number, or a name from torch.distributed.checkpoint."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    return {id(param): index for param, index in zip((p for group in groups for p in group), saved)}


def _as_dtensor(part: Tensor, shape: Sequence[int], param: Tensor) -> Tensor:
    """This rank's rows as a DTensor of the whole ``shape``; for a plain parameter, ``part`` itself."""
    if not isinstance(param, DTensor):
        return part
    placements = [Replicate() if p.is_replicate() or 0 in shape else Shard(0) for p in param.placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
