"""What a plan balances."""

from __future__ import annotations

from lwopt_backend.plan.buffers.stream import Stream


def balanced_measures(stream: Stream) -> dict[str, list[int]]:
    """Weights by position: the cost, and where Megatron's estimate weighs otherwise that one and the sum of both.

    In the sum both have equal parts, so that a plan which is even by it tends to be even by both.
    """
    measures = {"cost": stream.costs}
    first = stream.kinds[0]
    if any(kind.cost * first.estimate != first.cost * kind.estimate for kind in stream.kinds):
        cost, estimate = sum(stream.costs), sum(stream.estimates)
        measures["estimate"] = stream.estimates
        measures["both"] = [c * estimate + e * cost for c, e in zip(stream.costs, stream.estimates)]
    return measures
