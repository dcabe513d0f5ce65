"""Records of all ranks from the plan and the record of one: what a rank does at its own matrices, and its bytes.

All ranks go through a step in one order. They differ in the matrices that they own and in the pieces that they store,
which the plan says. What these cost is found by calling the step's own functions on such pieces, each once. With
attach, a step also compares what was sent: where ranks store unequally much, that costs what the recorded rank's does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from benchmarks.clock.record import COMPUTE, Event, Record, Session, Start, Wait, Work, merged
from benchmarks.rehearsal.absent_gpu import DEVICE, OTHER, OURS
from benchmarks.rehearsal.engines import FlatEngine, MeshEngine, OwnedEngine
from lwopt_backend.groups.param_groups import ElementwiseGroups
from lwopt_backend.groups.registry import MATRIX_RULES, atoms_of, build_matrix_rules, new_state
from lwopt_backend.plan import Atom, MatrixPlan, MeshLayout
from lwopt_backend.rules import MatrixRule, WeightRule
from lwopt_backend.runtime.collectives import EXCHANGE_BACK, EXCHANGE_OUT, phase
from lwopt_backend.runtime.stepper import copied
from lwopt_backend.runtime.whole import Slices, Storage, WholeMatrices, owned_dtype

Prepared = Callable[[], object]  # work whose tensors are made
Pieces = tuple[tuple[int, tuple[int, ...]], ...]  # matrices, each with the elements of this rank's views of it


def records(session: Session, template: Record) -> Iterator[tuple[Record, int]]:
    """The distinct records of all ranks that share the plan, each with the number of ranks that have it.

    ``template`` is the session's own. Ranks of other instances than the first do as those of the first.
    """
    generator = generator_of(session, template)
    counted = Counter(map(generator.record_of, range(session.planned.group_size)))
    return iter(counted.items())


def generator_of(session: Session, template: Record) -> Generator:
    """The generator for the session's engine."""
    kind = OwnedGenerator if isinstance(session.engine, OwnedEngine) else HostGenerator
    return kind(session, template)


class Generator:
    """Makes the records of other ranks from the ``session``'s own, ``template``."""

    def __init__(self, session: Session, template: Record) -> None:
        self.session = session
        self.template = template
        self._priced: dict[Any, list[Work]] = {}

    def record_of(self, rank: int) -> Record:
        """The record of one rank."""
        raise NotImplementedError

    def priced(
        self, key: Any, prepare: Callable[[], Prepared], at: tuple[str, int], stream: str = COMPUTE
    ) -> list[Work]:
        """What the work that ``prepare`` returns does, as part ``at``; found once for every ``key``."""
        if key not in self._priced:
            self._priced[key] = self.session.price(prepare())
        return [replace(each, at=at, stream=stream) for each in self._priced[key]]

    @cached_property
    def groups(self) -> Sequence[Any]:
        return self.session.planned.shared.grouping.groups

    @cached_property
    def rule(self) -> MatrixRule:
        """The one matrix rule. Raises ValueError if there are several, or one that weights are sent for."""
        rules = [*build_matrix_rules(self.groups, self.session.setting.config).values()]
        if len(rules) != 1 or isinstance(rules[0], WeightRule):
            raise ValueError("records of other ranks are generated for one matrix rule that is sent directions")
        return rules[0]

    def whole_step(self, whole: WholeMatrices, owned: Sequence[int], at: tuple[str, int]) -> list[Work]:
        """The step of matrices that a rank stores whole, batch by batch."""
        found = []
        rules = [self.rule] * len(whole._atoms)
        for batch in whole.batches(owned, rules):
            atom = whole._atoms[batch[0]]
            key = "step", len(batch), atom.shape, atom.transposed, atom.tiles
            found += self.priced(key, partial(self._step_of, whole, batch, rules), at)
        return found

    def _step_of(self, whole: WholeMatrices, batch: Sequence[int], rules: Sequence[MatrixRule]) -> Prepared:
        return partial(whole.step, batch, rules, self.made({index: [whole._atoms[index].shape] for index in batch}))

    def made(self, shapes: Mapping[int, Sequence[tuple[int, ...]]]) -> Storage:
        """Pieces of matrices, by their numbers."""
        (group,) = (group for group in self.groups if group["rule"] in MATRIX_RULES)
        pieces = {index: [self.piece(shape, group) for shape in of_one] for index, of_one in shapes.items()}
        return pieces.__getitem__

    def piece(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Slices:
        """A piece of a weight with its gradient and state."""
        value = torch.empty(shape, dtype=self.stored, device=DEVICE)
        return Slices(value, torch.empty_like(value), dict(new_state(value, group)))

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the weights that are stepped."""
        return owned_dtype(self.session.setting.dtype)


# Hosts that store matrices in pieces: ZeRO 1 to 3, FSDP2.

OF_PIECES = ("out", "early", "apply")  # parts of a step at what a rank stores of a bucket


class HostGenerator(Generator):
    """The generator for exchanges of ``MatrixPlan``s."""

    def __init__(self, session: Session, template: Record) -> None:
        super().__init__(session, template)
        engine = session.engine
        assert isinstance(engine, (MeshEngine, FlatEngine))
        self._engine = engine
        steppers = engine.matrix_steppers
        self._plans = [plan for _, plan in steppers]
        self._wholes = [WholeMatrices(p.atoms, DEVICE, batch_numel=s._whole._batch_numel) for s, p in steppers]
        self._buckets = [(unit, bucket) for unit, plan in enumerate(self._plans) for bucket in plan.buckets]
        self._owned: list[dict[int, list[int]]] = []
        for unit, bucket in self._buckets:
            owned: dict[int, list[int]] = {}
            for atom in bucket:
                owned.setdefault(self._plans[unit].ownership.owners[atom], []).append(atom)
            self._owned.append(owned)
        self._local = [_by_owner(plan) for plan in self._plans]
        self._numels: dict[Any, dict[int, int]] = {}
        self._found: dict[Any, Pieces] = {}
        self._works: dict[tuple[str, int], list[Work]] = {}
        for event in template:
            if isinstance(event, Work):
                self._works.setdefault(event.at, []).append(event)
        if any(self._local[unit] and ("local", unit) not in self._works for unit in range(len(self._plans))):
            raise ValueError(f"expected a rank with matrices in all plans, found rank {session.rank}; record another")

    @property
    def stored(self) -> torch.dtype:
        return self.session.setting.dtype if isinstance(self._engine, MeshEngine) else torch.float32

    def record_of(self, rank: int) -> Record:
        found: list[Event] = []
        ways: list[tuple[str, int]] = []
        done: set[tuple[str, int]] = set()
        for event in self.template:
            if isinstance(event, Work):
                if event.at[0] == "local" and event.at not in done:
                    done.add(event.at)
                    found += merged(self._stepped(event.at[1], rank))
                elif event.at[0] not in (*OF_PIECES, "own", "local"):
                    found.append(self._scaled(event, rank))
                continue
            if isinstance(event, Start):
                ways.append(event.at)
                if event.at[0] in OF_PIECES:
                    found += self._at_pieces(event.at, rank, event.stream)
                elif event.at[0] == "own":
                    found += self._at_owner(event.at[1], rank)
                event = replace(event, nbytes=self._nbytes(event.at[1], rank)) if event.at[0] else event
            found.append(event)
            if isinstance(event, Wait) and ways[event.start][0] == "own":
                found += self._at_pieces(("apply", ways[event.start][1]), rank)
        return tuple(found)

    def _pieces(self, number: int, rank: int) -> Pieces:
        """A rank's pieces of a bucket in the order of the wire: matrices, and the elements of every view."""
        unit, _ = self._buckets[number]
        layout, (everywhere, alone) = self._plans[unit].layout, self._stored[number]
        own = alone.get(rank, [])
        shared = tuple(self._numel(unit, atom, rank) for atom in everywhere)  # one of a kind for each
        key = number, tuple(own), shared, None if isinstance(layout, MeshLayout) else rank
        if key not in self._found:
            numels = {layout.kind(atom): numel for atom, numel in zip(everywhere, shared)}
            found = []
            for atom in self._order[number]:
                numel = numels.get(layout.kind(atom), 0) or (self._numel(unit, atom, rank) if own else 0)
                if numel:
                    views = () if isinstance(layout, MeshLayout) else layout.views(atom, rank)  # type: ignore[attr-defined]
                    found.append((atom, tuple(math.prod(view.sizes) for view in views) or (numel,)))
            self._found[key] = tuple(found)
        return self._found[key]

    @cached_property
    def _order(self) -> list[list[int]]:
        """The matrices of each bucket in the order of the wire."""
        return [sorted(bucket, key=self._plans[unit].ownership.owners.__getitem__) for unit, bucket in self._buckets]

    @cached_property
    def _stored(self) -> list[tuple[list[int], dict[int, list[int]]]]:
        """By bucket: a matrix of each kind that every rank stores some of, and by rank the others that it does."""
        found = []
        for unit, bucket in self._buckets:
            everywhere: dict[Any, int] = {}
            alone: dict[int, list[int]] = {}
            for atom in bucket:
                kind, ranks = self._plans[unit].layout.kind(atom), self._by_rank(unit, atom)
                if len(ranks) == self._plans[unit].layout.world_size:
                    everywhere[kind] = atom
                else:
                    for rank in ranks:
                        alone.setdefault(rank, []).append(atom)
            found.append(([*everywhere.values()], alone))
        return found

    def _numel(self, unit: int, atom: int, rank: int) -> int:
        return self._by_rank(unit, atom).get(rank, 0)

    def _by_rank(self, unit: int, atom: int) -> dict[int, int]:
        """The elements of a matrix that each rank stores, if any."""
        layout = self._plans[unit].layout
        kind = unit, layout.kind(atom)
        if kind not in self._numels:
            self._numels[kind] = {part.rank: part.numel for part in layout.fragments(atom) if part.numel}
            if sum(self._numels[kind].values()) != self._plans[unit].atoms[atom].numel:
                raise ValueError("records of ranks are generated for layouts without copies of elements")
        return self._numels[kind]

    def _at_pieces(self, at: tuple[str, int], rank: int, stream: str = COMPUTE) -> list[Work]:
        """Packing directions, or applying updates."""
        part, number = at
        mine, theirs = self._pieces(number, rank), self._pieces(number, self.session.rank)
        if mine is theirs or mine == theirs:
            return self._works.get(at, [])
        unit, _ = self._buckets[number]
        whole, views = self._wholes[unit], dict(mine)
        rules = [self.rule] * len(whole._atoms)
        found: list[Work] = []
        for batch in whole.batches([*views], rules, {atom: sum(numels) for atom, numels in views.items()}):
            key = part, unit, tuple(views[atom] for atom in batch)
            found += self.priced(key, partial(self._prepared, part, whole, batch, views, rules), at, stream)
        return merged(found)

    def _prepared(self, part: str, whole: WholeMatrices, batch: Sequence[int], views: Any, rules: Any) -> Prepared:
        pieces = self.made({atom: [(numel,) for numel in views[atom]] for atom in batch})
        on_wire = {atom: self._on_wire(views[atom]) for atom in batch}
        pieces = copied(pieces) if part == "early" else pieces

        def work() -> None:
            if part == "apply":
                with phase(EXCHANGE_BACK):
                    whole.apply(on_wire, rules, pieces)
            else:
                with phase(EXCHANGE_OUT):
                    whole.pack_directions(on_wire, rules, pieces, advance=True)

        return work

    def _on_wire(self, numels: tuple[int, ...]) -> Tensor:
        return torch.empty(sum(numels), dtype=self.rule.exchange_dtype, device=DEVICE)

    def _at_owner(self, number: int, rank: int) -> list[Work]:
        """Unpacking what arrived, the rule, and packing the updates."""
        unit, _ = self._buckets[number]
        owned, whole = self._owned[number].get(rank, []), self._wholes[unit]
        if not owned:
            return []
        at, wire = ("own", number), self.rule.exchange_dtype.itemsize
        numel = sum(whole._atoms[atom].numel for atom in owned)
        label = EXCHANGE_OUT.removeprefix(OURS), EXCHANGE_BACK.removeprefix(OURS)
        found = [Work(label[0], at, 0, 2 * wire * numel, 1)]
        updates = 0
        for batch in whole.batches(owned, [self.rule] * len(whole._atoms)):
            atom = whole._atoms[batch[0]]
            key = len(batch), atom.shape, atom.transposed, atom.tiles
            found += self.priced(("transform", key), partial(self._transform_of, whole, batch, key), at)
            updates += self._itemsize[key] * len(batch) * atom.numel
        return merged([*found, Work(label[1], at, 0, updates + wire * numel, 1)])

    def _transform_of(self, whole: WholeMatrices, batch: Sequence[int], key: Any) -> Prepared:
        stack = whole.empty(batch, torch.empty(0, dtype=self.rule.exchange_dtype, device=DEVICE))

        def work() -> None:
            self._itemsize[key] = whole.transform(self.rule, batch, stack)[0].itemsize

        return work

    @cached_property
    def _itemsize(self) -> dict[Any, int]:
        return {}

    def _stepped(self, unit: int, rank: int) -> list[Work]:
        return self.whole_step(self._wholes[unit], self._local[unit].get(rank, []), ("local", unit))

    def _nbytes(self, number: int, rank: int) -> int:
        """What a rank sends or receives of a bucket, the larger; equal both ways."""
        unit, _ = self._buckets[number]
        owned = self._owned[number].get(rank, [])
        own = sum(self._numel(unit, atom, rank) for atom in owned)
        stored = sum(sum(views) for _, views in self._pieces(number, rank))
        whole = sum(self._plans[unit].atoms[atom].numel for atom in owned)
        return max(stored - own, whole - own) * self.rule.exchange_dtype.itemsize

    def _scaled(self, event: Work, rank: int) -> Work:
        """Work at elements that a rank has, in proportion to them."""
        if event.at[0] == "sent":
            numels = (sum(sum(views) for _, views in self._pieces(event.at[1], r)) for r in (rank, self.session.rank))
            return replace(event, nbytes=event.nbytes * next(numels) // max(1, next(numels)))
        if not isinstance(self._engine, MeshEngine) or not event.what.startswith("elementwise"):
            return event
        mine, theirs = map(self._engine.elementwise_numel, (rank, self.session.rank))
        return event if mine == theirs else replace(event, nbytes=event.nbytes * mine // theirs)


def _by_owner(plan: MatrixPlan) -> dict[int, list[int]]:
    """The matrices that are not exchanged, by owner."""
    exchanged = {atom for bucket in plan.buckets for atom in bucket}
    found: dict[int, list[int]] = {}
    for atom, owner in enumerate(plan.ownership.owners):
        if atom not in exchanged:
            found.setdefault(owner, []).append(atom)
    return found


# Owned storage.


class OwnedGenerator(Generator):
    """The generator for buckets whose parts ranks own."""

    def __init__(self, session: Session, template: Record) -> None:
        super().__init__(session, template)
        assert isinstance(session.engine, OwnedEngine)
        core, self._buffers = session.engine.core, session.engine.buckets
        self._members = core.members
        self._pieces = [buffers.bucket.pieces_of_all() for buffers in self._buffers]
        costs: list[dict[Any, int]] = [{} for _ in self.groups]
        self._atoms: list[Atom] = []
        self._starts: list[list[tuple[int, int]]] = []  # by member: its matrices' first elements, and their numbers
        for member in self._members:
            atoms = atoms_of(member, self.groups[member.group], costs[member.group])
            places = [block.flat(0) for block in member.blocks] if atoms else []
            self._starts.append([(start, len(self._atoms) + number) for number, start in enumerate(places)])
            self._atoms += atoms
        self._whole = WholeMatrices(self._atoms, DEVICE, batch_numel=core.stepper._whole._batch_numel)
        self._elementwise = ElementwiseGroups()

    def record_of(self, rank: int) -> Record:
        found: list[Event] = []
        for event in self.template:
            if isinstance(event, Work) and event.at[0] == "own":
                continue
            if isinstance(event, Start) and event.at[0] == "back":
                found += self._updated(event.at[1], rank)
            found.append(self._scaled(event, rank) if _is_of_part(event) else event)
        return tuple(found)

    def _part(self, number: int, rank: int) -> int:
        """The elements of a bucket's buffer that a rank owns."""
        start, stop = self._buffers[number].bucket.parts[rank]
        return stop - start

    @cached_property
    def _bytes_an_element(self) -> dict[Any, int]:
        """The bytes an element of each operation on a part of a bucket."""
        found = {}
        for event in self.template:
            if _is_of_part(event) and (numel := self._part(event.at[1], self.session.rank)):
                found[event.at[0], event.what.partition(" ")[0], type(event)] = event.nbytes // numel
        return found

    def _scaled(self, event: Any, rank: int) -> Any:
        numel = self._part(event.at[1], rank)
        key = event.at[0], event.what.partition(" ")[0], type(event)
        if numel and key not in self._bytes_an_element:
            raise ValueError(f"rank {self.session.rank} owns nothing; record one that does")
        return replace(event, nbytes=numel * self._bytes_an_element.get(key, 0))

    def _updated(self, number: int, rank: int) -> list[Work]:
        """A rank's update of what it owns in a bucket, and its copy into the parameters."""
        at, pieces = ("own", number), self._pieces[number][rank]
        owned = [atom for p in pieces for start, atom in self._starts[p.param] if p.start <= start < p.stop]
        found = self.whole_step(self._whole, owned, at)
        by_group: dict[int, list[int]] = {}
        for piece in pieces:
            if not self._starts[piece.param]:
                by_group.setdefault(self._members[piece.param].group, []).append(piece.numel)
        for group, numels in by_group.items():
            found += self.priced(("elementwise", group, *numels), partial(self._elementwise_of, group, numels), at)
        narrow = self.session.setting.dtype
        if pieces and owned_dtype(narrow) != narrow:
            numel = sum(piece.numel for piece in pieces)
            found.append(Work(OTHER, at, 0, numel * (owned_dtype(narrow).itemsize + narrow.itemsize), 1))
        return merged(found)

    def _elementwise_of(self, number: int, numels: Sequence[int]) -> Prepared:
        group = self.groups[number]
        return partial(self._elementwise.step, number, group, [self.piece((numel,), group) for numel in numels])


def _is_of_part(event: Event) -> TypeGuard[Work | Start]:
    return isinstance(event, (Work, Start)) and event.at[0] in ("arrive", "settle")
