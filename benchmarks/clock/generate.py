"""Records of all ranks from the plan and the record of one: the same events, with each rank's work and bytes.

All ranks go through a step in one order. They differ in the matrices that they own and in the elements that they store,
which the plan says. A part of a step costs a rank what it costs the recorded one: for each flop that the plan counts,
for each element and, in launches, for each shape. So flops and the bytes of collectives are those of the rank's own
record, and element-wise work is nearly so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from benchmarks.clock.record import Event, Record, Session, Start, Wait, Work, merged
from benchmarks.rehearsal.engines import FlatEngine, MeshEngine, OwnedEngine
from lwopt_backend.groups.registry import build_matrix_rules
from lwopt_backend.plan import Atom, MatrixPlan
from lwopt_backend.rules import WeightRule

Place = tuple[str, int]  # a part of the step, and its bucket
OF_PIECES = ("out", "early", "apply", "sent")  # parts of a step at what a rank stores of a bucket


class Amount(NamedTuple):
    """What work is in proportion to: flops to ``cost``, bytes to ``numel``, launches to the number of ``shapes``."""

    cost: int = 0
    numel: int = 0
    shapes: frozenset[tuple[int, ...]] = frozenset()

    def plus(self, cost: int, numel: int, shape: tuple[int, ...] = ()) -> Amount:
        return Amount(self.cost + cost, self.numel + numel, self.shapes | {shape})

    def plus_matrix(self, atom: Atom) -> Amount:
        return self.plus(atom.cost, atom.numel, atom.shape)


@dataclass
class Price:
    """What the recorded rank does in all parts of a kind, by label; and the flops, elements and shapes of that."""

    cost: int = 0
    numel: int = 0
    shapes: int = 0
    works: list[Work] = field(default_factory=list)

    def of(self, mine: Amount, place: Place) -> list[Work]:
        """The work for another amount."""
        return [
            replace(
                work,
                at=place,
                flops=work.flops * mine.cost // max(1, self.cost),
                nbytes=work.nbytes * mine.numel // self.numel,
                calls=-(-work.calls * len(mine.shapes) // self.shapes),
            )
            for work in merged(self.works)
        ]


def records(session: Session, template: Record) -> Iterator[tuple[Record, int]]:
    """The distinct records of all ranks that share the plan, each with the number of ranks that have it.

    ``template`` is the session's own. Ranks of other instances than the first do as those of the first. Raises
    ValueError for what cannot be generated: weights that are sent, several matrix rules, copies of elements.
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
        self._sent: dict[tuple[int, int], int] = {}  # elements, by bucket and rank
        if isinstance(self._engine, OwnedEngine):
            self._count_owned(self._engine)
        else:
            assert isinstance(self._engine, (MeshEngine, FlatEngine))
            self._count_pieces([plan for _, plan in self._engine.matrix_steppers])
        self._of_part = {place for place, _ in self._amounts}
        self._prices = self._priced()

    def _count_pieces(self, plans: list[MatrixPlan]) -> None:
        """What ranks of ZeRO and FSDP2 own and store of each bucket."""
        number = 0
        for unit, plan in enumerate(plans):
            local = {*range(len(plan.atoms))}
            for bucket in plan.buckets:
                local -= {*bucket}
                for atom in bucket:
                    self._own(("own", number), plan, atom)
                    self._store(number, plan, atom)
                number += 1
            for atom in sorted(local):
                self._own(("local", unit), plan, atom)

    def _own(self, place: Place, plan: MatrixPlan, atom: int) -> None:
        key = place, plan.ownership.owners[atom]
        self._amounts[key] = self._amounts[key].plus_matrix(plan.atoms[atom])

    def _store(self, number: int, plan: MatrixPlan, atom: int) -> None:
        """Count the pieces of a matrix. A rank sends all but the piece that it also owns; both ways are equal."""
        parts = {part.rank: part.numel for part in plan.layout.fragments(atom) if part.numel}
        whole, owner = plan.atoms[atom].numel, plan.ownership.owners[atom]
        if sum(parts.values()) != whole:
            raise ValueError("records of ranks are generated for layouts without copies of elements")
        for rank, numel in parts.items():
            for part in OF_PIECES:
                key = (part, number), rank
                self._amounts[key] = self._amounts[key].plus(0, numel)
        self._sent[number, owner] = self._sent.get((number, owner), 0) + parts.get(owner, 0)

    def _count_owned(self, engine: OwnedEngine) -> None:
        """What ranks of owned storage own of each bucket."""
        part = self._session.planned.part
        assert part is not None
        of_matrices = [n for n, buffers in enumerate(engine.buckets) if buffers.bucket.kind == "matrix"]
        for atom, owner, bucket in zip(part.atoms, part.owners, part.buckets):
            key = ("own", of_matrices[bucket]), owner
            self._amounts[key] = self._amounts[key].plus_matrix(atom)
        for number, buffers in enumerate(engine.buckets):
            for rank, pieces in enumerate(buffers.bucket.pieces_of_all()):
                start, stop = buffers.bucket.parts[rank]
                for name in ("arrive", "settle"):
                    self._amounts[(name, number), rank] = Amount().plus(0, stop - start)
                if number not in of_matrices:
                    self._amounts[("own", number), rank] = Amount().plus(0, sum(piece.numel for piece in pieces))

    def _kind(self, place: Place) -> str:
        """The parts of a step that have one price."""
        part, bucket = place
        if part == "own" and isinstance(self._engine, OwnedEngine):
            return f"own {self._engine.buckets[bucket].bucket.kind}"
        return part

    def _priced(self) -> dict[str, Price]:
        found: dict[str, Price] = defaultdict(Price)
        for place in self._of_part:
            mine, price = self._amounts[place, self._session.rank], found[self._kind(place)]
            price.cost += mine.cost
            price.numel += mine.numel
            price.shapes += len(mine.shapes)
        for event in self._template:
            if isinstance(event, Work) and event.at in self._of_part:
                found[self._kind(event.at)].works.append(replace(event, at=("", 0)))
        return found

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
                    found.append(self._elementwise(event, rank))
                elif event.at[0] in ("local", "sent", "arrive", "settle") and event.at not in done:
                    done.add(event.at)
                    found += self._works(event.at, rank)
                continue
            if isinstance(event, Start):
                ways.append(event.at)
                found += self._works(("own" if event.at[0] == "back" else event.at[0], event.at[1]), rank)
                event = replace(event, nbytes=self._nbytes(event, rank))
            found.append(event)
            if isinstance(event, Wait) and ways[event.start][0] == "own":
                found += self._works(("apply", ways[event.start][1]), rank)
        return tuple(found)

    def _works(self, place: Place, rank: int) -> list[Work]:
        """What a rank does in a part of the step."""
        mine = self._amounts[place, rank]
        if place not in self._of_part or not mine.numel:
            return []
        price = self._prices[self._kind(place)]
        if not price.numel and place[0] == "own":  # no rank has both local and exchanged matrices: the rule costs both
            local = self._prices["local"]
            price = replace(local, works=[work for work in local.works if work.flops])
        if not price.numel:
            raise ValueError(f"rank {self._session.rank} has nothing in part {place[0]!r}; record another rank")
        return price.of(mine, place)

    def _nbytes(self, event: Start, rank: int) -> int:
        """What a rank sends or receives in a collective, the larger."""
        part, number = event.at
        if part in ("settle", "arrive"):
            mine, theirs = (self._amounts[event.at, r].numel for r in (rank, self._session.rank))
            return event.nbytes * mine // max(1, theirs)
        if event.kind != "all-to-all":
            return event.nbytes
        stored, owned = self._amounts[("out", number), rank].numel, self._amounts[("own", number), rank].numel
        return (max(stored, owned) - self._sent.get((number, rank), 0)) * self._itemsize

    def _elementwise(self, event: Work, rank: int) -> Work:
        """Work at all parameters, in proportion to the elements that a rank has of those that are no matrices."""
        if not isinstance(self._engine, MeshEngine) or not event.what.startswith("elementwise"):
            return event
        mine, theirs = map(self._engine.elementwise_numel, (rank, self._session.rank))
        return event if mine == theirs else replace(event, nbytes=event.nbytes * mine // theirs)
