"""Records of all ranks from the plan and the record of one: the same events, with each rank's work and bytes.

All ranks go through a step in one order. They differ in the matrices that they own and in the elements that they store,
which the plan says. A part of a step costs a rank what it costs the recorded one: for each flop that the plan counts,
for each element and, in launches, for each bucket. So flops and the bytes of collectives are those of the rank's own
record, and element-wise work and launches are nearly so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.clock.record import Event, Record, Session, Start, Wait, Work, merged
from benchmarks.rehearsal.engines import FlatEngine, MeshEngine, PlainEngine
from lwopt_backend.groups.registry import build_matrix_rules
from lwopt_backend.plan import MatrixPlan
from lwopt_backend.rules import WeightRule

Place = tuple[str, int]  # a part of the step, and its bucket
OF_PIECES = ("out", "apply")  # parts of a step at what a rank stores of a bucket, copies included


class Amount(NamedTuple):
    """What work is in proportion to: its flops to ``cost``, its bytes to ``numel``."""

    cost: int = 0
    numel: int = 0


def records(session: Session, template: Record) -> Iterator[tuple[Record, int]]:
    """The distinct records of all ranks that share the plan, each with the number of ranks that have it.

    ``template`` is the session's own. Ranks of other instances than the first do as those of the first. Raises
    ValueError for what cannot be generated: weights that are sent, several matrix rules.
    """
    generator = Generator(session, template)
    return iter(Counter(map(generator.record_of, range(session.planned.group_size))).items())


class Generator:
    """Makes the records of other ranks from the ``session``'s own, ``template``."""

    def __init__(self, session: Session, template: Record) -> None:
        rules = [*build_matrix_rules(session.planned.shared.grouping.groups, session.setting.config).values()]
        if len(rules) != 1 or isinstance(rules[0], WeightRule):
            raise ValueError("records of other ranks are generated for one matrix rule that is sent directions")
        self._itemsize = rules[0].exchange_dtype.itemsize
        self._session, self._engine, self._template = session, session.engine, template
        self._amounts: dict[tuple[Place, int], Amount] = defaultdict(Amount)  # by part and rank
        self._sent: Counter[tuple[int, int]] = Counter()  # elements that a rank sends to owners, by bucket and rank
        self._kept: Counter[tuple[int, int]] = Counter()  # those among them that it owns itself
        self._returned = "own"  # the part in which the last collective of a bucket starts
        if isinstance(self._engine, PlainEngine):
            self._count_buckets(self._engine)
        else:
            assert isinstance(self._engine, (MeshEngine, FlatEngine))
            plans = [plan for _, plan in self._engine.matrix_steppers]
            self._count_pieces(plans)
            self._returned = "own" if plans[0].rows is None else "column"
        self._of_part = {place for place, _ in self._amounts}
        self._prices: dict[str, tuple[Amount, int, list[Work]]] = {}

    def _add(self, place: Place, rank: int, cost: int, numel: int) -> None:
        had = self._amounts[place, rank]
        self._amounts[place, rank] = Amount(had.cost + cost, had.numel + numel)

    def _count_pieces(self, plans: list[MatrixPlan]) -> None:
        """What ranks of ZeRO and FSDP2 own and store of each bucket."""
        number = 0
        for unit, plan in enumerate(plans):
            owners, local = plan.ownership.owners, {*range(len(plan.atoms))}
            for bucket in plan.buckets:
                local -= {*bucket}
                for atom in bucket:
                    self._add(("own", number), owners[atom], plan.atoms[atom].cost, plan.atoms[atom].numel)
                    self._store(number, plan, atom)
                number += 1
            for atom in local:
                self._add(("local", unit), owners[atom], plan.atoms[atom].cost, plan.atoms[atom].numel)

    def _store(self, number: int, plan: MatrixPlan, atom: int) -> None:
        for piece in plan.layout.fragments(atom):
            for part in OF_PIECES if piece.numel else ():
                self._add((part, number), piece.rank, 0, piece.numel)
        owner = plan.ownership.owners[atom]
        for piece in plan.layout.sources(atom, owner):
            self._sent[number, piece.rank] += piece.numel
            self._kept[number, piece.rank] += piece.numel if piece.rank == owner else 0

    def _count_buckets(self, engine: PlainEngine) -> None:
        """What ranks own of each bucket in plain PyTorch."""
        part = self._session.planned.part
        assert part is not None
        of_matrices = [n for n, buffers in enumerate(engine.buckets) if buffers.bucket.kind == "matrix"]
        for atom, owner, bucket in zip(part.atoms, part.owners, part.buckets):
            self._add(("own", of_matrices[bucket]), owner, atom.cost, atom.numel)
        for number, buffers in enumerate(engine.buckets):
            for rank, pieces in enumerate(buffers.bucket.pieces_of_all()):
                start, stop = buffers.bucket.parts[rank]
                for name in ("arrive", "settle"):
                    self._add((name, number), rank, 0, stop - start)
                if number not in of_matrices:
                    self._add(("own", number), rank, 0, sum(piece.numel for piece in pieces))

    def _kind(self, place: Place) -> str:
        """The parts of a step that have one price."""
        part, bucket = place
        if part == "own" and isinstance(self._engine, PlainEngine):
            return f"own {self._engine.buckets[bucket].bucket.kind}"
        return part

    def _price(self, kind: str) -> tuple[Amount, int, list[Work]]:
        """What the recorded rank has in parts of a kind, in how many it has some, and what it does there, by label."""
        if kind not in self._prices:
            mine = [self._amounts[place, self._session.rank] for place in self._of_part if self._kind(place) == kind]
            works = [event for event in self._template if isinstance(event, Work) and event.at in self._of_part]
            of_kind = [replace(work, at=("", 0)) for work in works if self._kind(work.at) == kind]
            total = Amount(sum(each.cost for each in mine), sum(each.numel for each in mine))
            self._prices[kind] = total, sum(each.numel > 0 for each in mine), merged(of_kind)
        return self._prices[kind]

    def record_of(self, rank: int) -> Record:
        """The record of one rank; of the recorded one, its own."""
        if rank == self._session.rank:
            return self._template
        found: list[Event] = []
        ways: list[Place] = []
        done: set[Place] = set()
        for event in self._template:
            if isinstance(event, Work):
                if event.at not in self._of_part:
                    found.append(event)
                elif event.at[0] in ("local", "arrive", "settle") and event.at not in done:
                    done.add(event.at)
                    found += self._works(event.at, rank)
                continue
            if isinstance(event, Start):
                ways.append(event.at)
                found += self._works(("own" if event.at[0] == "back" else event.at[0], event.at[1]), rank)
                event = replace(event, nbytes=self._nbytes(event, rank))
            found.append(event)
            if isinstance(event, Wait) and ways[event.start][0] == self._returned:
                found += self._works(("apply", ways[event.start][1]), rank)
        return tuple(found)

    def _works(self, place: Place, rank: int) -> list[Work]:
        """What a rank does in a part of the step."""
        mine = self._amounts[place, rank]
        if place not in self._of_part or not mine.numel:
            return []
        (cost, numel), count, works = self._price(self._kind(place))
        if not numel and place[0] == "own":  # no rank has both local and exchanged matrices: the rule costs both alike
            (cost, numel), count, works = self._price("local")
            works = [work for work in works if work.flops]
        if not numel:
            raise ValueError(f"rank {self._session.rank} has nothing in part {place[0]!r}; record another rank")
        return [
            replace(
                work,
                at=place,
                flops=work.flops * mine.cost // max(1, cost),
                nbytes=work.nbytes * mine.numel // numel,
                calls=-(-work.calls // count),
            )
            for work in works
        ]

    def _nbytes(self, event: Start, rank: int) -> int:
        """What a rank sends or receives in a collective, the larger. It sends all but what it also owns."""
        part, number = event.at
        if part in ("settle", "arrive"):
            mine, theirs = (self._amounts[event.at, r].numel for r in (rank, self._session.rank))
            return event.nbytes * mine // max(1, theirs)
        if event.kind != "all-to-all":
            return event.nbytes
        sent, owned = self._sent[number, rank], self._amounts[("own", number), rank].numel
        return (max(sent, owned) - self._kept[number, rank]) * self._itemsize
