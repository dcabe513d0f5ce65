"""All ranks on one clock: when each does what its record says, on a cluster's devices and wires.

Every rank has a host, which launches work in the order of the record; streams, which do it; and one wire, on which
collectives follow one another. A collective begins when the last rank has started it and every rank's wire is free, and
takes as long as the bytes of the busiest rank. Ranks with one record do the same at the same time, and are played once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.clock.record import COMPUTE, Event, Join, Record, Start, Wait, Work
from lwopt_backend.plan.cost import LAUNCH_SECONDS, MEMORY_BYTES_PER_SECOND, Machine

MEMORY = {"h100-8x-ib": MEMORY_BYTES_PER_SECOND}  # of element-wise kernels, by cluster


@dataclass(frozen=True, slots=True)
class Rates:
    """The clock's rates: a machine; bytes per second of its memory; seconds of the host a launch and a collective.

    A ``blocking`` host does the work itself, and is done with it when it goes on, as on a CPU.
    """

    machine: Machine
    memory: float
    launch: float = LAUNCH_SECONDS
    collective: float = 3e-5
    blocking: bool = False

    @classmethod
    def of(cls, machine: Machine) -> Rates:
        return cls(machine, MEMORY.get(machine.name, math.inf), machine.launch_seconds)

    def work(self, work: Work) -> float:
        """Seconds of work on a device."""
        return work.flops / self.machine.flops_per_second + work.nbytes / self.memory

    def wire(self, start: Start, nbytes: int) -> float:
        """Seconds of a collective in which a rank sends or receives at most ``nbytes``, by the planner's price."""
        direct = start.kind == "all-to-all"
        more: dict[str, Any] = {"stride": start.stride, "direct": direct, "operations": start.operations}
        return sum(self.machine.collective(nbytes, start.ranks, **more))


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a rank's stream, from begin to end."""

    where: str
    what: str
    begin: float
    end: float


@dataclass(slots=True)
class Trip:
    """A collective as played: when each rank had started it, and from begin to end."""

    start: Start
    ready: list[float]
    started: int = 0
    nbytes: int = 0
    begin: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Played:
    """A step of all ranks. ``ends``, ``works``, ``counts`` and ``spans`` are by record: the second in which a rank is
    done, its work on the device, how many ranks have the record, and when the work is done."""

    ends: tuple[float, ...]
    works: tuple[float, ...]
    counts: tuple[int, ...]
    trips: tuple[Trip, ...]
    given: float  # seconds of the model's passes and their host's collectives, played alone
    spans: tuple[list[Span], ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)

    @property
    def busiest(self) -> int:
        return max(range(len(self.works)), key=self.works.__getitem__)

    @property
    def mean_work(self) -> float:
        return sum(work * count for work, count in zip(self.works, self.counts)) / sum(self.counts)

    @property
    def wire(self) -> float:
        """Seconds in which the wire is busy."""
        return sum(trip.seconds for trip in self.trips)

    @property
    def bound(self) -> float:
        """What no order of one step beats by much: the wire, or the busiest rank's work between its way in and out."""
        ways = [trip.seconds for trip in self.trips if trip.start.at[0]] or [0.0]
        return max(self.wire, ways[0] + self.works[self.busiest] + self.given + ways[-1])

    @property
    def hidden(self) -> float:
        """The share of the wire's seconds in which the busiest rank's streams work."""
        works: list[list[float]] = []  # which do not overlap
        for begin, end in sorted((span.begin, span.end) for span in self.spans[self.busiest]):
            if works and begin <= works[-1][1]:
                works[-1][1] = max(works[-1][1], end)
            else:
                works.append([begin, end])
        both = (min(high, trip.end) - max(low, trip.begin) for low, high in works for trip in self.trips)
        return sum(max(0.0, seconds) for seconds in both) / self.wire if self.wire else 1.0


GIVEN = ("backward", "forward")  # work that is the model's


def play(records: Sequence[tuple[Record, int]], rates: Rates) -> Played:
    """Play all ranks: the distinct records, each with the number of ranks that have it.

    Raises ValueError if ranks start other collectives, or in another order.
    """
    clock = _Clock(records, rates)
    clock.run()
    ranks = clock.ranks
    return Played(
        tuple(rank.done for rank in ranks),
        tuple(rank.work for rank in ranks),
        tuple(count for _, count in records),
        tuple(clock.trips),
        _Clock([(_passes_alone(records[0][0]), 1)], rates).run(),
        tuple(rank.spans for rank in ranks),
    )


def _passes_alone(record: Record) -> Record:
    """What a record has of the model's passes and their host's collectives."""
    found: list[Event] = []
    numbers: dict[int, int] = {}
    starts = -1
    for event in record:
        if isinstance(event, Start):
            starts += 1
            if event.of_host:
                numbers[starts] = len(numbers)
                found.append(event)
        elif isinstance(event, Wait) and event.start in numbers:
            found.append(replace(event, start=numbers[event.start]))
        elif isinstance(event, Join) or (isinstance(event, Work) and event.what in GIVEN):
            found.append(event)
    return tuple(found)


class _Clock:
    """The ranks and the collectives that they have started."""

    def __init__(self, records: Sequence[tuple[Record, int]], rates: Rates) -> None:
        self.rates = rates
        self.trips: list[Trip] = []
        self.ranks = [_Rank(number, record) for number, (record, _) in enumerate(records)]
        self._going = deque(self.ranks)
        self._waiting: defaultdict[int, list[_Rank]] = defaultdict(list)

    def run(self) -> float:
        """Let every rank go on until it waits for a collective that another has not started, and again after that.
        Returns when the last one is done."""
        while self._going:
            rank = self._going.popleft()
            trip = rank.go_on(self)
            if trip is not None:
                self._waiting[trip].append(rank)
        if len({len(rank.starts) for rank in self.ranks}) > 1:
            raise ValueError("some ranks start more collectives than others, which would wait for ever")
        return max(rank.done for rank in self.ranks)

    def start(self, rank: _Rank, event: Start, ready: float) -> None:
        """A rank starts its next collective, which begins if it is the last one."""
        number = len(rank.starts)
        rank.starts.append(event)
        if number == len(self.trips):
            self.trips.append(Trip(event, [math.nan] * len(self.ranks)))
        trip = self.trips[number]
        if (event.kind, event.ranks, event.at) != (trip.start.kind, trip.start.ranks, trip.start.at):
            raise ValueError(f"a rank starts {trip.start.what!r} where another starts {event.what!r}")
        trip.ready[rank.number] = ready
        trip.started += 1
        trip.nbytes = max(trip.nbytes, event.nbytes)
        if trip.started == len(self.ranks):
            self._begin(trip)
            self._going.extend(self._waiting.pop(number, ()))

    def _begin(self, trip: Trip) -> None:
        trip.begin = max(max(trip.ready), *(rank.wire for rank in self.ranks))
        trip.end = trip.begin + self.rates.wire(trip.start, trip.nbytes)
        for rank in self.ranks:
            rank.wire = trip.end


@dataclass
class _Rank:
    """A rank on its way through its record."""

    number: int
    record: Record
    at: int = 0
    host: float = 0.0
    wire: float = 0.0
    work: float = 0.0
    streams: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0})
    starts: list[Start] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def go_on(self, clock: _Clock) -> int | None:
        """Go on to the end, or to a collective that some rank has not started, whose number is returned."""
        rates, streams = clock.rates, self.streams
        while self.at < len(self.record):
            event = self.record[self.at]
            free = streams.setdefault(event.stream, 0.0)
            if isinstance(event, Work):
                self._work(event, rates)
            elif isinstance(event, Start):
                self.host += rates.collective
                clock.start(self, event, max(self.host, free))
            elif isinstance(event, Wait):
                trip = clock.trips[event.start]
                if trip.started < len(clock.ranks):
                    return event.start
                streams[event.stream] = max(free, trip.end)
                if rates.blocking:
                    self.host = streams[event.stream]
            elif isinstance(event, Join):
                streams[event.stream] = max(free, streams.get(event.on, 0.0))
            else:
                self.host = max(self.host, free)
            self.at += 1
        return None

    def _work(self, event: Work, rates: Rates) -> None:
        free, seconds = self.streams[event.stream], rates.work(event)
        begin = max(free, self.host)
        launched = self.host + event.calls * rates.launch
        end = max(begin + seconds, launched)
        if rates.blocking:
            launched = end
        if end > begin:
            self.spans.append(Span(event.stream, event.what, begin, end))
        self.host, self.streams[event.stream] = launched, end
        self.work += 0.0 if event.what in GIVEN else seconds

    @property
    def done(self) -> float:
        return max(self.host, *self.streams.values())
