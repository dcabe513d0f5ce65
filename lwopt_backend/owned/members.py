"""The parameters of owned storage, and the plan of each set of ranks that shares some of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import LayerWiseConfig
from lwopt_backend.grouping import Grouping
from lwopt_backend.plan import MACHINES, Atom
from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.plan.buffers.owned import OwnedParam, OwnedPlan, Setting, plan_owned
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import COSTS
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.runtime.storage import owned_dtype

BUS_MULTIPLE = 2**16  # elements; NCCL reaches its full bus bandwidth on multiples of it


@dataclass(frozen=True)
class Member:
    """One trained parameter. ``group`` is the number of its param group; a stack has several matrices in it."""

    name: str
    param: Tensor
    group: int
    rule: str
    transposed: bool
    tied: bool

    @property
    def is_matrix(self) -> bool:
        return self.rule in MATRIX_RULES

    @property
    def dtype(self) -> str:
        return str(self.param.dtype).removeprefix("torch.")

    def atoms(self, group: Mapping[str, Any], config: LayerWiseConfig) -> list[Atom]:
        """The parameter's matrices; none of an element-wise one. The last two dimensions are a matrix each."""
        if not self.is_matrix:
            return []
        *lead, rows, columns = self.param.shape
        cost = MATRIX_RULES[self.rule].cost((rows, columns), group, config)
        count = math.prod(lead)
        names = [f"{self.name}[{number}]" for number in range(count)] if lead else [self.name]
        return [Atom(name, (rows, columns), cost, self.transposed) for name in names]


def members_of(grouping: Grouping) -> list[Member]:
    """All trained parameters in the model's order."""
    tied = {route.name for route in grouping.routes if route.aliases}
    found = {
        grouping.names[id(param)]: (param, number, group["rule"])
        for number, group in enumerate(grouping.groups)
        for param in group["params"]
    }
    order = [route.name for route in grouping.routes if route.name in found]
    return [Member(name, *found[name], name in grouping.transposed, name in tied) for name in order]


def plan_members(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    ranks: int,
    config: LayerWiseConfig,
    *,
    layout: str,
    bucket_mb: float,
    group_size: int | None,
    grad_dtype: torch.dtype | None,
    direct: bool,
    bus_alignment: bool,
    base: Sequence[int] | None = None,
) -> OwnedPlan:
    """Plan ``members`` over ``ranks`` ranks. Every rank computes the same; slots name members by their position.

    ``base`` is the work that each rank has anyway.
    """
    params = [_owned_param(member, groups[member.group], config) for member in members]
    dtype = members[0].param.dtype
    gradient = (grad_dtype or dtype).itemsize
    masters = 0 if owned_dtype(dtype) == dtype else owned_dtype(dtype).itemsize
    setting = Setting(
        layout,
        max(1, int(bucket_mb * 2**20 / gradient)),
        MACHINES.get(members[0].param.device.type, MACHINES["cuda"]),
        COSTS["newton_schulz"],
        Elements(parameter=dtype.itemsize, gradient=gradient, master=masters, state=4),
        direct=direct,
        bus_multiple=BUS_MULTIPLE if bus_alignment else 1,
    )
    return plan_owned(params, ranks, setting, group_size, base)


def _owned_param(member: Member, group: Mapping[str, Any], config: LayerWiseConfig) -> OwnedParam:
    """A stack is planned as one: it has to stay in one piece to be a view."""
    atoms = member.atoms(group, config)
    whole = None
    if atoms:
        rows, columns = atoms[0].shape
        whole = Atom(member.name, (rows * len(atoms), columns), sum(atom.cost for atom in atoms))
    return OwnedParam(member.name, member.param.numel(), member.dtype, whole, member.tied)


def renumbered(bucket: Bucket, numbers: Sequence[int]) -> Bucket:
    """The bucket with ``numbers[i]`` for parameter i."""
    return replace(bucket, slots=tuple(replace(slot, param=numbers[slot.param]) for slot in bucket.slots))
