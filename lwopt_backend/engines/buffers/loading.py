"""Load a ``state_dict``: check what it has for this rank's pieces, on all ranks and before anything changes; copy it.

Plain PyTorch's folders (``files.py``) are checked and copied by the same two functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER, LazyTensor
from lwopt_backend.engines.buffers.partial import PartialTensor
from lwopt_backend.engines.buffers.state import state_forms, state_pieces
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups import Groups
from lwopt_backend.groups.grouping import Member
from lwopt_backend.groups.members import Members, check_all_held
from lwopt_backend.groups.param_groups import check_saved_groups, with_options
from lwopt_backend.plan.atoms import matrices_of as matrices_by_shape
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.state import MATRICES, SAME_RULE, STRUCTURE, TO_DO, StatePiece, check_fits, fill, form_of

Found = Tensor | LazyTensor
Boxes = Mapping[tuple[int, ...], Tensor]  # by the place of their first element

WHAT = "load_state_dict"
OTHER_RANKS = (
    "A rank's pieces fit on that rank alone, of as many ranks, with the same layout, group size and bucket size. To "
    "change any of these, save with optimizer.save_state_dict(folder) or torch.distributed.checkpoint on all ranks, "
    "and load with optimizer.load_state_dict_from(folder). To take what this state dict has, and start the rest "
    "fresh, call lwopt_backend.migration.load_pieces(optimizer, state_dict) on all ranks"
)

FLAT = f"{SAME_RULE}; torch's flattened form lacks owner state, so save the nested one"


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

    taken = agree(core.everyone, WHAT, check)
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
        here, found = self.matrices, dict[str, Found]()
        for key, value in in_state(saved, self.kept).items():
            of_another_rank = self.piece is None or (key.startswith("[") and _matrix_of(key) not in here)
            # The owner of a matrix takes its owner state. Without matrices there is none, so a key that is not kept
            # stays, to be refused.
            if key not in self.kept and self.member.blocks and of_another_rank:
                continue
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
    pieces = {piece.member: piece for piece in state_pieces(core)}
    every = [state_forms(core, number, groups) for number in range(len(core.members))]
    given = [(number, saved) for number, saved in enumerate(found) if saved is not None]
    for number, saved in given:
        _check_shapes(where, core.members[number], every[number], saved)
    taken: dict[int, dict[str, Found]] = {}
    for number, saved in given:
        member, kept = core.members[number], every[number]
        piece = pieces.get(number)
        owner = core.stepper.owner_tensors(number, groups) if piece else {}
        expected = Expected(member, piece, kept, owner)
        taken[number] = expected.of(saved)
        _check_boxes(core, where, expected, taken[number])
        here, there = _facts(expected, saved, taken[number], anew)
        to_do = {**TO_DO, "state": FLAT if owner else SAME_RULE}
        facts = {member.name: here}, {member.name: there}
        check_fits(where, *facts, advice=OTHER_RANKS, to_do=to_do, alone=None)  # the rules are the checkpoint's
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
            here = f"rank {core.everyone.rank} of {core.everyone.world_size}"
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
