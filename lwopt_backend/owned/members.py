"""The parameters of owned storage, and the plan of each set of ranks that shares some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.grouping import Grouping
from lwopt_backend.plan import Atom, Machine
from lwopt_backend.plan.blocks import Block, end_to_end
from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.plan.buffers.owned import OwnedPlan, plan_owned
from lwopt_backend.plan.buffers.setting import OwnedParam, Setting
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import COSTS
from lwopt_backend.registry import MATRIX_RULES, cost_of
from lwopt_backend.runtime.storage import owned_dtype

BUS_MULTIPLE = 2**16  # elements; NCCL reaches its full bus bandwidth on multiples of it


@dataclass(frozen=True)
class Member:
    """One trained parameter. ``group`` is the number of its param group, ``blocks`` are the matrices in it."""

    name: str
    param: Tensor
    group: int
    rule: str
    transposed: bool
    tied: bool
    blocks: tuple[Block, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return self.rule in MATRIX_RULES

    @property
    def dtype(self) -> str:
        return str(self.param.dtype).removeprefix("torch.")

    def atoms(self, group: Mapping[str, Any]) -> list[Atom]:
        """The parameter's matrices; none of an element-wise one."""
        return [
            Atom(block.of(self.name), block.shape, cost_of(block.shape, group), self.transposed)
            for block in self.blocks
        ]


def members_of(grouping: Grouping) -> list[Member]:
    """All trained parameters in the model's order."""
    tied = {route.name for route in grouping.routes if route.aliases}
    found = {
        grouping.names[id(param)]: (param, number, group["rule"])
        for number, group in enumerate(grouping.groups)
        for param in group["params"]
    }
    order = [route.name for route in grouping.routes if route.name in found]
    return [
        Member(name, *found[name], name in grouping.transposed, name in tied, grouping.matrices_in(name))
        for name in order
    ]


def plan_members(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    ranks: int,
    machine: Machine,
    *,
    layout: str,
    bucket_mb: float,
    group_size: int | None,
    grad_dtype: torch.dtype | None,
    direct: bool,
    bus_alignment: bool,
    base: Sequence[int] | None = None,
) -> OwnedPlan:
    """Plan ``members`` over ``ranks`` of ``machine``. Every rank computes the same; slots name members by position.

    ``base`` is the work that each rank has anyway.
    """
    params = [_owned_param(member, groups[member.group]) for member in members]
    dtype = members[0].param.dtype
    gradient = (grad_dtype or dtype).itemsize
    masters = 0 if owned_dtype(dtype) == dtype else owned_dtype(dtype).itemsize
    setting = Setting(
        layout,
        max(1, int(bucket_mb * 2**20 / gradient)),
        machine,
        COSTS["newton_schulz"],
        Elements(parameter=dtype.itemsize, gradient=gradient, master=masters, state=4),
        direct=direct,
        bus_multiple=BUS_MULTIPLE if bus_alignment else 1,
    )
    return plan_owned(params, ranks, setting, group_size, base)


def _owned_param(member: Member, group: Mapping[str, Any]) -> OwnedParam:
    """A parameter stays in one piece, to be a view; it may be cut where its matrices lie one after the other."""
    atoms = member.atoms(group)
    whole = None
    if atoms:
        rows = max(1, member.param.shape[0])
        shape = (rows, member.param.numel() // rows)
        whole = Atom(member.name, shape, sum(atom.cost for atom in atoms))
    parts = tuple((atom.numel, atom.cost) for atom in atoms) if len(atoms) > 1 and end_to_end(member.blocks) else ()
    return OwnedParam(member.name, member.param.numel(), member.dtype, whole, member.tied, parts)


def plan_lines(members: Sequence[Member], plan: OwnedPlan) -> list[str]:
    """What all ranks that share these members must have decided alike."""
    shapes = [f"{m.name} {tuple(m.param.shape)} {m.dtype} {m.rule} group {m.group}" for m in members]
    return [*shapes, *plan.lines()]


def renumbered(bucket: Bucket, numbers: Sequence[int]) -> Bucket:
    """The bucket with ``numbers[i]`` for parameter i."""
    return replace(bucket, slots=tuple(replace(slot, param=numbers[slot.param]) for slot in bucket.slots))
