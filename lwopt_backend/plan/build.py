"""Plans for flat partitions (ZeRO-1/2), where most matrices lie whole on one rank and only the others travel."""

from __future__ import annotations

from collections.abc import Sequence

from lwopt_backend.plan.machine import Machine, StepTime, step_time
from lwopt_backend.plan.matrix_plan import MatrixPlan, is_whole
from lwopt_backend.plan.owners import POLICIES, Ownership, balance, stay
from lwopt_backend.plan.storage import Layout
from lwopt_backend.plan.types import Atom


def plan_matrices(
    atoms: Sequence[Atom],
    layout: Layout,
    *,
    policy: str,
    machine: Machine,
    bucket_numel: int,
    element_bytes: int,
    tensors: int = 1,
) -> MatrixPlan:
    """Choose owners by ``policy`` and put what has to travel into buckets of at most ``bucket_numel`` elements.

    ``auto`` models the step time of every policy on ``machine`` and takes the fastest, ``stay`` on a tie.
    ``element_bytes`` is the size of one element on the wire, of ``tensors`` that travel to the owner. Raises ValueError
    for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    makers = {"stay": stay, "balance": balance}
    wanted = makers if policy == "auto" else {policy: makers[policy]}
    plans = [
        _with_buckets(make(atoms, layout), atoms, layout, bucket_numel, element_bytes, tensors)
        for make in wanted.values()
    ]
    timed = sorted(((plan, modelled_time(plan, machine)) for plan in plans), key=lambda pair: pair[1].total)
    modelled = tuple((plan.ownership.policy, time) for plan, time in timed)
    best = timed[0][0]
    return MatrixPlan(best.atoms, layout, best.ownership, best.buckets, element_bytes, modelled, tensors=tensors)


def modelled_time(plan: MatrixPlan, machine: Machine) -> StepTime:
    """Modelled seconds per step: the busiest rank's work, the busiest link's bytes, and the buckets' collectives."""
    return step_time(
        machine,
        flops=max(plan.ownership.loads),
        nbytes=max(plan.wire_bytes()),
        collectives=sum(map(plan.trips, range(len(plan.buckets)))),
    )


def fill_buckets(travelling: Sequence[int], atoms: Sequence[Atom], bucket_numel: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive atoms until a bucket would exceed ``bucket_numel`` elements; a larger atom has a bucket to itself."""
    buckets: list[list[int]] = []
    filled = 0
    for index in travelling:
        if not buckets or filled + atoms[index].numel > bucket_numel:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += atoms[index].numel
    return tuple(map(tuple, buckets))


def _with_buckets(
    ownership: Ownership,
    atoms: Sequence[Atom],
    layout: Layout,
    bucket_numel: int,
    element_bytes: int,
    tensors: int,
) -> MatrixPlan:
    travelling = [i for i, owner in enumerate(ownership.owners) if not is_whole(layout, i, owner)]
    buckets = fill_buckets(travelling, atoms, bucket_numel)
    return MatrixPlan(tuple(atoms), layout, ownership, buckets, element_bytes, tensors=tensors)
