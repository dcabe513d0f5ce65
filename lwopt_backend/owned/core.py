"""Owned storage put together: members, plans, buffers, steps. What hosts build their optimizers on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lwopt_backend.config import HostConfig
from lwopt_backend.grouping import Grouping
from lwopt_backend.owned.gradients import OwnedGradients
from lwopt_backend.owned.members import Member, members_of, plan_lines, plan_members, renumbered
from lwopt_backend.owned.sharing import share
from lwopt_backend.owned.stepper import OwnedStepper
from lwopt_backend.plan import machine_of
from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.runtime.agreement import agree, agree_in_all, plan_digest
from lwopt_backend.runtime.bucket_manager import BucketManager
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.ranks import PartCollectives
from lwopt_backend.runtime.sharers import Sharers

WHAT = "owned storage"


@dataclass(frozen=True)
class Share:
    """Parameters that the ranks of one process group share. ``takes`` says which, by name; the first takes the rest.

    ``group_size`` as in ``OwnedConfig``. Gradients are means: sums over these ranks by ``divisor``.
    """

    ranks: PartCollectives
    divisor: float
    group_size: int | None
    takes: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class Holdings:
    """What one process group shares: its members by number, their plan, and the groups that carry it out."""

    numbers: tuple[int, ...]
    plan: OwnedPlan
    sharers: Sharers


class OwnedCore:
    """The buffers of a model's trained parameters, and their steps. Made on all ranks of all ``shares``.

    Raises ValueError, on all of them, if they do not plan alike.
    """

    def __init__(
        self,
        grouping: Grouping,
        shares: Sequence[Share],
        config: HostConfig,
        *,
        layout: str,
        bucket_mb: float,
        grad_dtype: torch.dtype | None = None,
        keep_full: bool = False,
        overlap: bool = True,
        bus_alignment: bool = False,
    ) -> None:
        self.members = members_of(grouping)
        self.config = config

        ranks = [shared.ranks for shared in shares]
        parts = agree_in_all(ranks, WHAT, lambda: (_divide(self.members, shares), [[] for _ in shares]))

        def planned(number: int, base: Sequence[int] | None = None) -> OwnedPlan:
            members, shared = [self.members[n] for n in parts[number]], shares[number]
            return plan_members(
                members,
                grouping.groups,
                shared.ranks.world_size,
                machine_of(members[0].param.device.type),
                layout=layout,
                bucket_mb=bucket_mb,
                group_size=shared.group_size,
                grad_dtype=grad_dtype,
                direct=shared.ranks.direct(members[0].param.device),
                bus_alignment=bus_alignment,
                base=base,
            )

        def plan_experts() -> tuple[list[OwnedPlan], list[list[str]]]:
            plans = [planned(number) for number in range(1, len(shares))]
            return plans, [[], *(self._lines(part, plan) for part, plan in zip(parts[1:], plans))]

        def plan_dense() -> tuple[OwnedPlan, list[str]]:
            plan = planned(0, base)
            return plan, self._lines(parts[0], plan)

        # Experts' owners have little choice; the dense matrices then go where there is least to do.
        experts = agree_in_all(ranks, WHAT, plan_experts)
        mine = sum(plan.loads[s.ranks.rank % plan.group_size] for plan, s in zip(experts, shares[1:]))
        base = shares[0].ranks.gather_objects(mine) if experts else None
        plans = [agree(shares[0].ranks, WHAT, plan_dense), *experts]
        self.holdings = [
            Holdings(part, plan, share(shared.ranks, plan, shared.divisor))
            for part, plan, shared in zip(parts, plans, shares)
        ]
        buckets = [
            (renumbered(bucket, held.numbers), held.sharers) for held in self.holdings for bucket in held.plan.buckets
        ]
        buckets.sort(key=lambda pair: -min(slot.param for slot in pair[0].slots))
        self.manager = BucketManager(
            [bucket for bucket, _ in buckets],
            [sharers for _, sharers in buckets],
            [member.param for member in self.members],
            [member.name for member in self.members],
            grad_dtype=grad_dtype,
            keep_full=keep_full,
            overlap=overlap,
        )
        for bucket in self.manager.buckets:
            bucket.sharers.everyone.broadcast(bucket.values)
            bucket.refresh_masters()
        self.row_scaling = grouping.row_scaling()
        self.stepper = OwnedStepper(self.members, grouping.groups, self.manager, config, self.row_scaling)
        self.gradients = OwnedGradients(self.manager, self.holdings[0].sharers)

    def refresh_masters(self) -> None:
        """Take the parameters' values into the fp32 masters of 16-bit parameters."""
        for bucket in self.manager.buckets:
            bucket.refresh_masters()

    @property
    def plan_digest(self) -> str:
        """The name of the plan of what this rank shares."""
        return plan_digest(line for held in self.holdings for line in self._lines(held.numbers, held.plan))

    def _lines(self, part: Sequence[int], plan: OwnedPlan) -> list[str]:
        return plan_lines([self.members[number] for number in part], plan)

    def presences(self, more: torch.Tensor) -> list[Presence]:
        """Which members have a gradient on any rank, per holdings; ``more`` are flags of all ranks of the first."""
        device = self.members[0].param.device
        found = []
        for number, held in enumerate(self.holdings):
            here = [self.manager.has_gradient(member) for member in held.numbers]
            found.append(Presence(held.sharers.everyone, here, device, None if number else more))
        return found

    def step(self, groups: Sequence[Mapping[str, Any]], presences: Sequence[Presence]) -> None:
        """Update what this rank owns and start the parameters' return. Called on all ranks."""
        of_member = {
            number: (presence, place)
            for held, presence in zip(self.holdings, presences)
            for place, number in enumerate(held.numbers)
        }

        def active(number: int) -> bool:
            presence, place = of_member[number]
            return presence(place)

        self.stepper.step(groups, active)
        for presence in presences:
            presence.finish()
        self.manager.stepped()


def _divide(members: Sequence[Member], shares: Sequence[Share]) -> list[tuple[int, ...]]:
    """Which members each share has, by number. Raises ValueError for one that has none."""
    parts: list[list[int]] = [[] for _ in shares]
    for number, member in enumerate(members):
        claims = [i for i, shared in enumerate(shares) if shared.takes is not None and shared.takes(member.name)]
        parts[claims[0] if claims else 0].append(number)
    for shared, part in zip(shares, parts):
        if not part:
            raise ValueError(
                "no trained parameter is left for the dense ranks"
                if shared.takes is None
                else f"no trained parameter is named like the experts; names look like {members[0].name!r}"
            )
    return [tuple(part) for part in parts]


def broadcast_buffers(model: nn.Module, shares: Sequence[Share]) -> None:
    """Buffers become those of the first rank that shares them, as in DDP; experts have theirs. Called on all ranks."""
    for name, buffer in model.named_buffers():
        claims = [shared for shared in shares if shared.takes is not None and shared.takes(name)]
        (claims or shares)[0].ranks.broadcast(buffer)
