"""Owned storage in a study: the buffer on every rank of an instance, masters and state at the owner."""

from __future__ import annotations

from lwopt_backend.plan.buffers.groups import Grouped
from lwopt_backend.plan.buffers.step import timeline
from lwopt_backend.study.part import Collective, Part, RankMemory, Setting, owned_atoms, workspace


def owned_part(name: str, grouped: Grouped, setting: Setting) -> Part:
    """The figures of a planned buffer."""
    plan, e = grouped.plan, setting.elements
    numel, shard = plan.numel, plan.buffer_numel // plan.shards
    share = (plan.shards - 1) / plan.shards
    collectives = [
        Collective("reduce-scatter of gradients", len(plan.shard_numels), int(plan.buffer_numel * e.gradient * share)),
        Collective("all-gather of parameters", len(plan.shard_numels), int(plan.buffer_numel * e.parameter * share)),
    ]
    if grouped.instances > 1:
        across = int(2 * shard * e.gradient * (grouped.instances - 1) / grouped.instances)
        collectives.insert(1, Collective("all-reduce across instances", len(plan.shard_numels), across))
    padding = (plan.buffer_numel - numel) * (e.parameter + e.gradient)
    owned = owned_atoms(plan.atoms, plan.owners, plan.shards)
    memory = [
        RankMemory(
            numel * e.parameter,
            numel * e.gradient,
            owned_numel * e.master,
            owned_numel * e.state,
            padding,
            workspace(mine),
        )
        for owned_numel, mine in zip(plan.owned_numels(), owned)
    ]
    times = timeline(plan, setting.machine, setting.cost, instances=grouped.instances, elements=e)
    return Part(
        name,
        plan.shards * grouped.instances,
        plan.shards,
        plan.layout,
        plan.strategy,
        plan.atoms,
        plan.owners,
        plan.buckets,
        tuple(plan.bucket_numels),
        plan.buffer_numel,
        tuple(plan.loads()),
        tuple(memory),
        tuple(collectives),
        grouped.time,
        tuple(times),
    )
