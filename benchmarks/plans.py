"""What judges the plan of a buffer: Megatron's measure and older owners, and whether the plan is lawful at all."""

from __future__ import annotations

from collections.abc import Sequence

from lwopt_backend.plan.buffers.layout import BufferPlan
from lwopt_backend.plan.cost import max_min_squared, per_rank


def ping_pong(numels: Sequence[int], shards: int) -> list[int]:
    """Owners of matrices of ``numels`` in model order: sorted by size, dealt 0..n-1, n-1..0, and so on.

    Megatron-Core's older assignment, which its compact layout still uses.
    """
    owners = [0] * len(numels)
    for place, index in enumerate(sorted(range(len(numels)), key=numels.__getitem__)):
        turn, step = divmod(place, shards)
        owners[index] = step if turn % 2 == 0 else shards - 1 - step
    return owners


def estimated_loads(plan: BufferPlan) -> list[int]:
    """Per shard, Megatron-Core's estimate of the cost of its matrices."""
    return per_rank(plan.owners, (max_min_squared(atom.shape) for atom in plan.atoms), plan.shards)


def problems(plan: BufferPlan) -> list[str]:
    """The plan's errors, in sentences; an empty list for every plan that the package builds."""
    found = []
    bounds = (("owner", plan.owners, plan.shards), ("bucket", plan.buckets, len(plan.shard_numels)))
    for name, values, end in bounds:
        if len(values) != len(plan.atoms):
            found.append(f"{len(values)} {name}s for {len(plan.atoms)} matrices")
        found += [f"matrix {i}: {name} {v} is not in [0, {end})" for i, v in enumerate(values) if not 0 <= v < end]
    if any(later > earlier for earlier, later in zip(plan.buckets, plan.buckets[1:])):
        found.append("buckets are not contiguous ranges of the backward order")
    filled: dict[tuple[int, int], int] = {}
    for atom, bucket, owner in zip(plan.atoms, plan.buckets, plan.owners):
        filled[bucket, owner] = filled.get((bucket, owner), 0) + atom.numel
    for (bucket, owner), numel in filled.items():
        if 0 <= bucket < len(plan.shard_numels) and numel > plan.shard_numels[bucket]:
            found.append(f"bucket {bucket}, shard {owner}: {numel} elements in {plan.shard_numels[bucket]}")
    return found
