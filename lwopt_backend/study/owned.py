"""Owned storage in a study: the plan that training makes, and what it holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lwopt_backend.config import OwnedConfig
from lwopt_backend.owned.members import Member, members_of, plan_lines, plan_members
from lwopt_backend.owned.memory import rank_memories
from lwopt_backend.plan import MACHINES
from lwopt_backend.plan.buffers.arrangement import Bucket
from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.plan.buffers.step import buffer_step, timeline
from lwopt_backend.plan.types import Atom
from lwopt_backend.study.grouping import Share
from lwopt_backend.study.part import Collective, Elementwise, Part, Placed, Planned, RankMemory, workspace
from lwopt_backend.study.setting import Setting


def plan_owned_share(
    name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None
) -> Planned:
    """What ``lwopt_backend.LayerWiseOptimizer`` plans over ``ranks`` ranks, each of which has the work ``base``."""
    config = setting.config
    assert isinstance(config, OwnedConfig)
    members, groups = members_of(shared.grouping), shared.grouping.groups
    plan = plan_members(
        members,
        groups,
        ranks,
        setting.plans_for,
        layout=config.layout,
        bucket_mb=config.bucket_mb,
        group_size=config.group_size,
        grad_dtype=_wide(config),
        direct=setting.plans_for == MACHINES["cpu"] or ranks == 1,  # as gloo and a single process are
        bus_alignment=config.bus_alignment,
        base=base,
    )
    of_kind = {kind: replace(plan, buckets=_of(plan, kind)) for kind in ("matrix", "elementwise")}
    rest = of_kind["elementwise"]
    return Planned(
        name,
        ranks,
        plan.group_size,
        _part(name, of_kind["matrix"], members, shared, setting) if of_kind["matrix"].buckets else None,
        Elementwise(
            sum(slot.numel for bucket in rest.buckets for slot in bucket.slots),
            tuple(_memory(rest, members, shared, config)),
            tuple(_collectives(rest, setting, config)),
        ),
        tuple(plan_lines(members, plan)),
        plan.loads,
        shared,
        None if base is None else tuple(base),
    )


def _wide(config: OwnedConfig) -> torch.dtype | None:
    return torch.float32 if config.grad_dtype == "float32" else None


def _of(plan: OwnedPlan, kind: str) -> tuple[Bucket, ...]:
    return tuple(bucket for bucket in plan.buckets if bucket.kind == kind)


def _part(name: str, plan: OwnedPlan, members: Sequence[Member], shared: Share, setting: Setting) -> Part:
    """The figures of a plan's matrix buckets."""
    config = setting.config
    assert isinstance(config, OwnedConfig)
    placed = _placed(plan, members, shared, setting)
    held = _memory(plan, members, shared, config)
    works = [workspace(atoms) for atoms in placed.owned()]
    machine, work, elements = setting.machine, setting.work, setting.elements
    layouts = {bucket.layout for bucket in plan.buckets}
    return Part(
        name,
        plan.group_size * plan.instances,
        layouts.pop() if len(layouts) == 1 else "mixed",
        f"layout {config.layout!r}",
        placed,
        sum(bucket.numel for bucket in plan.buckets),
        tuple(replace(memory, workspace=transient) for memory, transient in zip(held, works)),
        tuple(_collectives(plan, setting, config)),
        buffer_step(placed, machine, work, instances=plan.instances, elements=elements),
        tuple(timeline(placed, machine, work, instances=plan.instances, elements=elements)),
    )


def _placed(plan: OwnedPlan, members: Sequence[Member], shared: Share, setting: Setting) -> Placed:
    """Every matrix, in the model's order, at the rank whose part of the buffer it lies in."""
    found: dict[int, list[tuple[Atom, int, int]]] = {}
    groups = shared.grouping.groups
    for number, bucket in enumerate(plan.buckets):
        for rank, pieces in enumerate(bucket.pieces_of_all()):
            for piece in pieces:
                member = members[piece.param]
                found.setdefault(piece.param, []).extend(
                    (atom, rank, number)
                    for atom, block in zip(member.atoms(groups[member.group]), member.blocks)
                    if piece.start <= block.flat(0) < piece.stop
                )
    rows = [row for param in sorted(found) for row in found[param]]
    return Placed(
        tuple(shared.shown(atom, setting) for atom, _, _ in rows),
        plan.group_size,
        tuple(rank for _, rank, _ in rows),
        tuple(number for _, _, number in rows),
        tuple(bucket.numel for bucket in plan.buckets),
    )


def _memory(plan: OwnedPlan, members: Sequence[Member], shared: Share, config: OwnedConfig) -> list[RankMemory]:
    """Per rank of an instance, what ``memory_report`` says of the plan's buckets."""
    groups, keep_full = shared.grouping.groups, config.keep_full_grads
    held = rank_memories(plan, members, groups, grad_dtype=_wide(config), keep_full=keep_full)
    return [RankMemory(m.parameters, m.gradients, m.masters, m.state, m.padding) for m in held]


def _collectives(plan: OwnedPlan, setting: Setting, config: OwnedConfig) -> list[Collective]:
    """From the busiest rank, as ``traffic`` counts."""
    if not plan.buckets:
        return []
    count, wire = len(plan.buckets), setting.grad_dtype.itemsize

    def busiest(amounts: Sequence[Sequence[int]]) -> int:
        return max(map(sum, zip(*amounts)))

    back = busiest([bucket.return_numels() for bucket in plan.buckets])
    found = [
        Collective("reduce-scatter of gradients", count, wire * busiest([b.reduce_numels() for b in plan.buckets])),
        Collective("all-gather of parameters", count, setting.dtype.itemsize * back),
    ]
    if plan.instances > 1:
        owned = busiest([[stop - start for start, stop in bucket.parts] for bucket in plan.buckets])
        stepped = 4  # fp32, in which owners sum
        across = 2 * owned * stepped * (plan.instances - 1) // plan.instances
        found.insert(1, Collective("all-reduce across instances", count, across))
    if config.keep_full_grads:
        found.append(Collective("all-gather of gradients", count, wire * back))
    return found
