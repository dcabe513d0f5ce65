"""The state that a rank owns, piece by piece, and a ``state_dict`` of it.

The ``state_dict`` has this rank's pieces and fits no other rank. Any ranks can load the folders of ``buffers.files``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER, LazyTensor
from lwopt_backend.engines.buffers.saves import Save
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups import Groups
from lwopt_backend.groups.grouping import Member
from lwopt_backend.groups.members import Members, check_all_held
from lwopt_backend.groups.param_groups import check_saved_groups, with_options
from lwopt_backend.groups.registry import new_state
from lwopt_backend.plan import TrainedParam
from lwopt_backend.plan.atoms import matrices_of as matrices_by_shape
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.state import (
    MATRICES,
    SAME_RULE,
    STRUCTURE,
    TO_DO,
    OwnerStates,
    StatePiece,
    StateStore,
    check_fits,
    fill,
    form_of,
)

Found = Tensor | LazyTensor
Boxes = Mapping[tuple[int, ...], Tensor]  # by the place of their first element


def state_pieces(core: BufferCore) -> list[StatePiece]:
    """This rank's pieces: ranges of flattened parameters. ``tensors`` has masters of 16-bit parameters."""
    return [piece for bucket in core.manager.buckets for piece in core.stepper.pieces(bucket)]


class BufferStore(StateStore):
    """This rank's pieces, under the names of ``names_of``. Made on all ranks."""

    def __init__(self, core: BufferCore, groups: Sequence[dict[str, Any]]) -> None:
        self._core, names = core, names_of(core, groups)
        units = [[replace(member, name=names.keys[number])] for number, member in enumerate(core.members)]
        super().__init__([core.planned_sets[0].rank_groups.everyone], groups, units, names.params.keys())

    def pieces(self) -> list[StatePiece]:
        return state_pieces(self._core)

    def take_owner_states(self, states: OwnerStates) -> None:
        for piece in self.pieces():
            self._core.stepper.take_owner_states(piece.member, states.get(self.params[piece.member].name, {}))

    def forget_owner_states(self, names: Collection[str]) -> None:
        for piece in self.pieces():
            if self.params[piece.member].name in names:
                self._core.stepper.take_owner_states(piece.member, {})

    def publish(self) -> None:
        for number, bucket in enumerate(self._core.manager.buckets):
            bucket.publish_masters()
            self._core.manager.send_values(number)
        self._core.manager.receive_values()


# Names of all ranks' parameters and param groups in a checkpoint; they do not depend on owners.


@dataclass(frozen=True)
class Names:
    """``keys`` of this rank's members, by number; all ranks' ``params`` and the keys of their ``groups``, by key."""

    keys: Mapping[int, str]
    params: Mapping[str, TrainedParam]
    groups: Mapping[str, str]


def names_of(core: BufferCore, groups: Groups) -> Names:
    """A parameter's key is its name; with the number of its set if that name means other experts on other ranks.

    Sets are numbered by their lowest rank. Called on all ranks.
    """
    everyone = core.planned_sets[0].rank_groups.everyone
    places, mine = {}, []
    for index, planned in enumerate(core.planned_sets):
        number = 0
        if index:
            lowest = min(planned.rank_groups.everyone.gather_objects(everyone.rank))
            number = sorted(set(everyone.gather_objects(lowest))).index(lowest)
        for member in planned.numbers:
            found = core.members[member]
            places[member] = (index, number, found.name)
            if planned.rank_groups.everyone.rank == 0:
                param = TrainedParam(found.name, found.shape, found.dtype, found.rule)
                mine.append((places[member], param, core.group_keys[found.group]))
    entries = [entry for of_rank in everyone.gather_objects(mine) for entry in of_rank]
    count: dict[str, int] = {}
    for (_, _, name), *_ in entries:
        count[name] = count.get(name, 0) + 1

    def key(place: tuple[int, int, str]) -> str:
        _, number, name = place
        return name if count[name] == 1 else f"{name} of expert set {number}"

    return Names(
        {m: key(place) for m, place in places.items()},
        {key(place): param for place, param, _ in entries},
        {key(place): group for place, _, group in entries},
    )


# ``state_dict`` and ``load_state_dict`` as in torch's optimizers, with this rank's pieces in place of whole tensors.

WHAT = "load_state_dict"
OTHER_RANKS = (
    "A rank's pieces fit on that rank alone, of as many ranks, with the same layout, group size and bucket size. To "
    "change any of these, save with optimizer.save_state_dict(folder) or torch.distributed.checkpoint on all ranks, "
    "and load with optimizer.load_state_dict_from(folder). To take what this state dict has, and start the rest "
    "fresh, call lwopt_backend.migration.load_pieces(optimizer, state_dict) on all ranks"
)

FLAT = f"{SAME_RULE}; torch's flattened form lacks owner state, so save the nested one"


class PartialTensor(Tensor):
    """A tensor in a state dict, of which this rank has some boxes: views of its stepped pieces.

    ``torch.distributed.checkpoint`` saves and loads it on any number of ranks; ``torch.save`` saves this rank's boxes.
    It can be detached, copied and moved to another device; any other operation raises TypeError.

    - ``shape``: the whole tensor's.
    - ``boxes``: tensors by the place of their first element; empty on a rank that owns none of it.
    - ``refused``: why it cannot be saved together with other ranks' pieces; empty if it can.
    - ``of``: the rank that owns them, and the number of ranks; empty if nobody asks.
    - ``save``: the state dict that has them, until it is copied.
    """

    boxes: dict[tuple[int, ...], Tensor]
    refused: str
    of: tuple[int, ...]
    save: Save | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Mapping[tuple[int, ...], Tensor],
        refused: str = "",
        of: tuple[int, ...] = (),
        save: Save | None = None,
    ) -> PartialTensor:
        device = next((box.device for box in boxes.values()), torch.device("cpu"))
        made: PartialTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.boxes, made.refused, made.of, made.save = dict(boxes), refused, of, save
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartialTensor(shape={tuple(self.shape)}, boxes={self.boxes})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.save is not None:
            self.save.begin()
        return PartialTensor, (tuple(self.shape), self.dtype, self.boxes, self.refused, self.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialTensor:
        """Of no ``save``: a thread may save a copy, at any time."""
        boxes = copy.deepcopy(self.boxes, memo)
        memo[id(self)] = made = PartialTensor(self.shape, self.dtype, boxes, self.refused, self.of)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten, mine = torch.ops.aten, args[0]
        if func is aten.new_empty.default:  # torch's asynchronous save then sets its attributes
            return PartialTensor(args[1], (kwargs or {}).get("dtype") or mine.dtype, {}, mine.refused)
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise TypeError(
                f"expected a whole tensor for {func}, found {len(mine.boxes)} boxes of it on this rank; use .boxes"
            )
        boxes = {place: func(box, *args[1:], **(kwargs or {})) for place, box in mine.boxes.items()}
        dtype = (kwargs or {}).get("dtype") or mine.dtype
        save = None if func is aten.clone.default else mine.save  # as of a deep copy
        return PartialTensor(mine.shape, dtype, boxes, mine.refused, mine.of, save)

    def __create_write_items__(self, key: str, value: object) -> list[Any]:
        from lwopt_backend.checkpoint.dcp.saving import write_item

        return [write_item(key, self.shape, self.dtype, chunk) for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[Any]:
        from lwopt_backend.checkpoint.dcp.saving import ChunkStorageMetadata

        self.check()
        return [ChunkStorageMetadata(torch.Size(place), box.shape) for place, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.boxes[tuple(index.offset)]

    @property
    def is_whole(self) -> bool:
        return sum(box.numel() for box in self.boxes.values()) == self.numel()

    def whole(self) -> Tensor:
        """The whole tensor, from its boxes, which ``is_whole``."""
        found = torch.empty(self.shape, dtype=self.dtype)
        for place, box in self.boxes.items():
            found[tuple(slice(begin, begin + size) for begin, size in zip(place, box.shape))] = box
        return found

    def check(self) -> None:
        """Raises ValueError if it cannot be saved together with other ranks' pieces."""
        if self.refused:
            raise ValueError(self.refused)


# Also by the name that it has in earlier state dicts (``engines/owned/state.py``).
torch.serialization.add_safe_globals([PartialTensor, (PartialTensor, "lwopt_backend.engines.owned.state.Pieces")])


EXPERTS = (
    "expected a parameter that all ranks share, found {!r} in expert_params, which means other parameters on other "
    "ranks; save with optimizer.save_state_dict(folder)"
)


def held_state(core: BufferCore, groups: Groups) -> dict[Tensor, Mapping[str, Tensor]]:
    """By parameter, this rank's piece of its state; meta tensors if this rank owns none of it.

    All ranks have all keys: torch.distributed.checkpoint steps an optimizer without state to create some, and reads
    only the existing keys of a flattened state dict.
    """
    mine = {piece.member: piece.tensors for piece in state_pieces(core)}
    return {
        member.param: mine.get(number) or {key: like.to("meta") for key, like in _kept(core, number, groups).items()}
        for number, member in enumerate(core.members)
    }


def _kept(core: BufferCore, number: int, groups: Groups) -> dict[str, Tensor]:
    """The keys of a member's state, with empty tensors for all but counters."""
    bucket = core.manager.buckets[core.manager.bucket_of[number]]
    empty = torch.empty(0, dtype=bucket.owned_dtype, device=bucket.values.device)
    masters = {} if bucket.masters is None else {MASTER: empty}
    return {**new_state(empty, groups[core.members[number].group]), **masters}


def state_of(core: BufferCore, groups: Groups) -> dict[str, Any]:
    """The state by the parameters' numbers in the param groups, in the form of torch's optimizers.

    It has this rank's pieces, not copied; none of a parameter that was taken out of its group.
    """
    indices = {id(param): index for index, param in enumerate(p for group in groups for p in group["params"])}
    found = {id(core.members[number].param): of_member for number, of_member in sorted(by_member(core, groups).items())}
    return {
        "state": {indices[param]: found[param] for param in found if param in indices},
        "param_groups": [{**group, "params": [indices[id(p)] for p in group["params"]]} for group in groups],
    }


def by_member(core: BufferCore, groups: Groups) -> dict[int, dict[str, PartialTensor]]:
    """By member, this rank's pieces of its state, with fp32 masters and owner state."""
    mine, found = {piece.member: piece for piece in state_pieces(core)}, dict[int, dict[str, PartialTensor]]()
    everyone = core.planned_sets[0].rank_groups.everyone
    more = ((everyone.rank, everyone.world_size), Save(core.saves))
    for planned in core.planned_sets:
        alone = planned.rank_groups.everyone.world_size < core.planned_sets[0].rank_groups.everyone.world_size
        for number in planned.numbers:
            member, piece, of_member = core.members[number], mine.get(number), dict[str, PartialTensor]()
            refused = EXPERTS.format(member.name) if alone else ""
            for key, like in _kept(core, number, groups).items():
                shape = tuple(member.param.shape) if like.ndim else ()
                boxes = piece.boxes(piece.tensors[key], shape) if piece else {}
                of_member[key] = PartialTensor(shape, like.dtype, boxes, refused, *more)
            owner = core.stepper.owner_tensors(number, groups) if piece else {}
            if owner and member.blocks != matrices_by_shape(member.shape):
                owner[MATRICES] = nested.described(member.matrices)
            for key, tensor in owner.items():
                of_member[key] = PartialTensor(tensor.shape, tensor.dtype, {(0,) * tensor.ndim: tensor}, refused, *more)
            found[number] = of_member
    return found


def gathered(core: BufferCore, groups: Groups) -> Iterator[tuple[int, str, Tensor]]:
    """Yield a member's number, a key and the whole state, copied; masters included. Called on all ranks."""
    own = {piece.member: piece.tensors for piece in state_pieces(core)}
    for bucket in core.manager.buckets:
        replicas = bucket.rank_groups.replicas
        kept = {slot.param: _kept(core, slot.param, groups) for slot in bucket.bucket.slots}
        for key in dict.fromkeys(key for of_member in kept.values() for key in of_member):
            whole = torch.zeros(bucket.bucket.numel, dtype=bucket.owned_dtype, device=bucket.values.device)
            for piece in bucket.pieces if replicas is None or replicas.rank == 0 else ():
                if key in own[piece.param]:  # a counter is spread over the elements, which several ranks may own
                    whole.narrow(0, piece.offset, piece.numel).copy_(own[piece.param][key])
            bucket.rank_groups.everyone.start_all_reduce(whole).wait()
            for number in (number for number in kept if key in kept[number]):
                found = bucket.view(whole, number)
                yield number, key, found.clone() if kept[number][key].ndim else found.reshape(-1)[:1].sum()


def take_state(
    core: BufferCore, groups: Groups, state_dict: Mapping[str, Any], members: Members | None
) -> list[dict[str, Any]]:
    """Load this rank's ``state_of``, or whole tensors; returns the param groups to use from now on.

    Parameters are matched by their place in the param groups. Called on all ranks. State that does not fit raises on
    all of them, before anything is changed.
    """

    def check() -> tuple[dict[int, dict[str, Found]], list[str]]:
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(f"{WHAT}: expected a state dict with 'state' and 'param_groups'; found {list(state_dict)}")
        saved = state_dict["param_groups"]
        check_saved_groups(WHAT, groups, saved, members=members)
        pairs = [pair for group, of_group in zip(groups, saved) for pair in zip(group["params"], of_group["params"])]
        indices = {id(param): index for param, index in pairs}
        check_all_held(WHAT, [member.name for member in core.members if id(member.param) not in indices])
        every = [(member, state_dict["state"].get(indices[id(member.param)])) for member in core.members]
        # torch's set_optimizer_state_dict leaves out the state of what is frozen now.
        found = [{} if state is None and member.param.requires_grad else state for member, state in every]
        return checked_state(core, groups, WHAT, found), []

    taken = agree(core.planned_sets[0].rank_groups.everyone, WHAT, check)
    if frozen := [member.name for number, member in enumerate(core.members) if number not in taken]:
        warnings.warn(f"{WHAT}: no state of {frozen} is given, which are frozen; it does not change", stacklevel=3)
    put_state(core, groups, taken)
    return [with_options(group, saved) for group, saved in zip(groups, state_dict["param_groups"])]


def put_state(core: BufferCore, groups: Groups, taken: Mapping[int, Mapping[str, Found]]) -> None:
    """Copy the result of ``checked_state`` into this rank's pieces, and give owners their state."""
    for piece in (each for each in state_pieces(core) if each.member in taken):
        found, shape = dict(taken[piece.member]), core.members[piece.member].param.shape
        for key in piece.tensors.keys() & found.keys():  # a missing master follows the weights
            value = found.pop(key)
            with piece.changing(key) as tensor:
                if isinstance(value, PartialTensor):
                    for place, box in piece.boxes(tensor, shape).items():
                        box.copy_(value.boxes[place])
                else:
                    fill(tensor, value, piece.view)
        core.stepper.take_owner_tensors(piece.member, groups, {key: _here(value) for key, value in found.items()})


def _here(value: Found) -> Tensor:
    """The whole tensor, at its owner."""
    if isinstance(value, PartialTensor):
        return next(iter(value.boxes.values()))
    return value if isinstance(value, Tensor) else value.read()


@dataclass(frozen=True)
class Expected:
    """What this rank keeps of a member's state, by key: ``kept`` is of elements, with empty tensors; ``owner`` of the
    whole matrices that this rank owns. ``piece`` is its piece of the member, None if it has none."""

    member: Member
    piece: StatePiece | None
    kept: Mapping[str, Tensor]
    owner: Mapping[str, Tensor]

    @property
    def matrices(self) -> set[str]:
        """The matrices with owner state here, as their keys begin."""
        return {_matrix_of(key) for key in self.owner}

    def boxes(self, key: str) -> Boxes:
        """This rank's boxes of the ``kept`` tensor."""
        return {} if self.piece is None else self.piece.boxes(self.piece.tensors[key], self.whole(key).shape)

    def whole(self, key: str) -> Tensor:
        """The whole tensor, without memory."""
        like = self.owner[key] if key in self.owner else self.kept[key]
        shape = self.member.shape if key not in self.owner and like.ndim else like.shape
        return torch.empty(shape, dtype=like.dtype, device="meta")

    def of(self, saved: Mapping[str, Any]) -> dict[str, Found]:
        """What this rank takes of a member's state: all of its elements, and what its own matrices have."""
        mine, found = self.matrices, dict[str, Found]()
        for key, value in in_state(saved, self.kept).items():
            others = self.piece is None or (key.startswith("[") and _matrix_of(key) not in mine)
            if key not in self.kept and self.member.blocks and others:
                continue  # its owner takes it
            found[key] = value if isinstance(value, LazyTensor) else torch.as_tensor(value)
        return found


def in_state(saved: Mapping[str, Any], kept: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors in a member's state; without its master, if none is ``kept``, and without descriptions."""
    left_out = {MATRICES} if MASTER in kept else {MATRICES, MASTER}
    return {
        key: value
        for key, value in saved.items()
        if key not in left_out and value is not None and not isinstance(value, Mapping)
    }


def checked_state(
    core: BufferCore, groups: Groups, where: str, found: Sequence[Mapping[str, Any] | None], *, anew: bool = False
) -> dict[int, dict[str, Found]]:
    """By member, this rank's part of the state ``found``, without members whose state is None. Raises ValueError for
    state that does not fit.

    Tensors are pieces as of ``state_of``, or whole, in memory or in a file. A matrix without owner state starts
    ``anew``, or is an error.
    """
    mine = {piece.member: piece for piece in state_pieces(core)}
    every = [_kept(core, number, groups) for number in range(len(core.members))]
    given = [(number, saved) for number, saved in enumerate(found) if saved is not None]
    for number, saved in given:
        _check_shapes(where, core.members[number], every[number], saved)
    taken: dict[int, dict[str, Found]] = {}
    for number, saved in given:
        member, kept = core.members[number], every[number]
        piece = mine.get(number)
        owner = core.stepper.owner_tensors(number, groups) if piece else {}
        expected = Expected(member, piece, kept, owner)
        taken[number] = expected.of(saved)
        _check_boxes(core, where, expected, taken[number])
        here, there = _facts(expected, saved, taken[number], anew)
        to_do = {**TO_DO, "state": FLAT if owner else SAME_RULE}
        check_fits(where, {member.name: here}, {member.name: there}, advice=OTHER_RANKS, to_do=to_do)
    return taken


def _check_shapes(where: str, member: Member, kept: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Raises ValueError for pieces of a tensor of another shape than the member's."""
    for key in saved.keys() & kept.keys():
        value = saved[key]
        if isinstance(value, PartialTensor) and value.ndim and tuple(value.shape) != tuple(member.shape):
            raise ValueError(
                f"{where}: parameter {member.name!r}: expected {key!r} of shape {tuple(member.shape)}, the state "
                f"dict has {tuple(value.shape)}; it was saved from another model"
            )


def _check_boxes(core: BufferCore, where: str, expected: Expected, taken: Mapping[str, Found]) -> None:
    """Raises ValueError if a state dict's pieces of a member are those of another rank."""
    for key in expected.kept.keys() & taken.keys():
        value = taken[key]
        if isinstance(value, PartialTensor) and _sizes(value.boxes) != _sizes(expected.boxes(key)):
            everyone = core.planned_sets[0].rank_groups.everyone
            here = f"rank {everyone.rank} of {everyone.world_size}"
            there = f"rank {value.of[0]} of {value.of[1]} ranks" if value.of else "another rank"
            raise ValueError(
                f"{where}: these are the pieces of the state that {there} owns, and {here} owns others, of "
                f"{expected.member.name!r} for one. {OTHER_RANKS}"
            )


def _facts(
    expected: Expected, saved: Mapping[str, Any], taken: Mapping[str, Found], anew: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What must be equal here and there: the matrices of owner state, the keys, and the forms of tensors."""
    kept, owner, member = expected.kept, expected.owner, expected.member
    given = {_matrix_of(key) for key in in_state(saved, kept).keys() - kept.keys()}
    # State with a description may have other keys than after the rule's first step.
    free = {matrix for matrix in expected.matrices if f"{matrix}{STRUCTURE}" in taken}
    free |= expected.matrices - given if anew else set()

    def keys(some: Collection[str]) -> list[str]:
        return sorted(key for key in some if key != MASTER and (key in kept or _matrix_of(key) not in free))

    here, there = dict[str, Any](), dict[str, Any]()
    if owner and given:
        here["matrices"], there["matrices"] = member.matrices, _matrices_in(saved, member)
    here["state"], there["state"] = keys({**kept, **owner}), keys(taken)
    for key in (*kept, *owner):
        if key in taken and key != STRUCTURE and (key in kept or _matrix_of(key) not in free):
            boxes = None if key in owner else expected.boxes(key)
            here[f"{key!r} as"], there[f"{key!r} as"] = _forms(expected.whole(key), taken[key], boxes)
    return here, there


def _matrices_in(saved: Mapping[str, Any], member: Member) -> Any:
    """The matrices to which the owner state belongs; those of the member's shape, if nothing describes them."""
    described = saved.get(MATRICES)
    if isinstance(described, Tensor):
        return nested.rebuilt(_here(described))
    return described or list(map(str, matrices_by_shape(member.shape)))


def _matrix_of(key: str) -> str:
    """The start of a key of owner state that names the matrix, if the parameter has several."""
    return key[: key.index(".") + 1] if key.startswith("[") else ""


def _forms(like: Tensor, value: Found, boxes: Boxes | None) -> tuple[str, str]:
    """The forms of a whole tensor, with ``boxes`` on this rank, and of the ``value`` for it."""
    if isinstance(value, LazyTensor):
        return f"{like.dtype} of shape {tuple(like.shape)}", f"{value.dtype} of shape {value.shape}"
    if boxes is None or not isinstance(value, PartialTensor):
        return form_of(like), form_of(value)
    return form_of(like, _sizes(boxes)), form_of(value, _sizes(value.boxes))


def _sizes(boxes: Boxes) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {place: tuple(box.shape) for place, box in boxes.items()}
