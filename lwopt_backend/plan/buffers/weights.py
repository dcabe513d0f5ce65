"""What a plan balances."""

from __future__ import annotations

from lwopt_backend.plan.buffers.stream import Stream


def balanced_measures(stream: Stream) -> dict[str, list[int]]:
    """Weights by position: the cost, and where Megatron's estimate weighs otherwise that one and the sum of both.

    In the sum both have equal parts, so that a plan which is even by it tends to be even by both.
    """
    measures = {"cost": stream.costs}
    of_first = (stream.costs[0], stream.estimates[0])
    if any(cost * of_first[1] != estimate * of_first[0] for cost, estimate in zip(stream.costs, stream.estimates)):
        cost, estimate = sum(stream.costs), sum(stream.estimates)
        measures["estimate"] = stream.estimates
        measures["both"] = [c * estimate + e * cost for c, e in zip(stream.costs, stream.estimates)]
    return measures
