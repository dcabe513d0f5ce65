"""What is shown of a played step: its figures, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.clock.play import Played, Trip
from lwopt_backend.engines.report import numbers

PREDICTED = "A prediction: nothing here was measured on a GPU or a network."


def figures(played: Played) -> dict[str, float]:
    """The seconds of a step and what they are made of; ratios to the busiest rank's work, the mean, and the bound."""
    work, rest = played.works[played.busiest], played.seconds - played.given
    return {
        "seconds": played.seconds,
        "given": played.given,
        "busiest": work,
        "over_busiest": rest / work,
        "over_mean": rest / played.mean_work,
        "wire": played.wire,
        "hidden": played.hidden,
        "bound": played.bound,
        "over_bound": played.seconds / played.bound,
        "host": played.hosts[played.busiest],
    }


def sentences(played: Played) -> Iterator[str]:
    """The figures in words."""
    found = figures(played)
    yield f"Step: {ms(found['seconds'])}, of which {ms(found['given'])} are the passes alone."
    yield (
        f"Busiest rank's own work: {ms(found['busiest'])}. The step without the passes takes "
        f"{found['over_busiest']:.2f} times as long, and {found['over_mean']:.2f} times the work of all ranks over "
        "their number."
    )
    yield f"Wire: {ms(found['wire'])} in {len(played.trips)} collectives, {found['hidden']:.0%} hidden behind work."
    yield (
        f"Bound: {ms(found['bound'])}, the larger of the wire and of the busiest rank's work with its first way in and "
        f"its last way out; the step takes {found['over_bound']:.2f} times as long."
    )
    yield f"The busiest rank's device stands still for its host: {ms(found['host'])}."
    yield PREDICTED


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def waits(played: Played, most: int = 12) -> Table:
    """The collectives that work waits for longest, and the ranks that start them last."""
    table = Table("work waits for", *numbers("begins", "takes", "longest wait", "mean wait", "last rank is late by"))
    table.title = "What waits for what"
    for trip in sorted(played.trips, key=lambda trip: -trip.waited)[:most]:
        if trip.waited:
            table.add_row(trip.start.what, *map(ms, (trip.begin, trip.seconds, trip.waited, trip.mean, _late(trip))))
    return table


def _late(trip: Trip) -> float:
    """Seconds from when the median rank has started a collective to when the last has."""
    return max(trip.ready) - sorted(trip.ready)[len(trip.ready) // 2]
