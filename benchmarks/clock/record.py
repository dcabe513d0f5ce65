"""What one rank does in a step, in order: its own code, rehearsed on a GPU that is not there, and recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from benchmarks.rehearsal.absent_gpu import OTHER, Recorder, absent_gpu, pretended, replaced, tensors_in
from benchmarks.rehearsal.engines import ENGINES, Engine, FlatEngine, MeshEngine, Passes, PlainEngine
from benchmarks.rehearsal.step import others_of
from lwopt_backend.engines.buffers.step import BufferStepper
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.rules.newton_schulz import KERNELS, QUACK, product
from lwopt_backend.runtime import collectives
from lwopt_backend.runtime.buffers import BucketBuffers
from lwopt_backend.runtime.exchange import Arrival
from lwopt_backend.runtime.step import MatrixStepper

# What a record consists of. Numbers of buckets count through all plans of an engine.

COMPUTE = "compute"  # the stream of the model and of the step
REDUCE, GATHER = "reduce", "gather"  # FSDP2's streams for gradients and for parameters


@dataclass(frozen=True, slots=True)
class Work:
    """Operations on a stream: flops of matrix products, and bytes that the others read and write.

    ``at`` is the part of the step and its bucket, such as ("own", 3); ("", 0) elsewhere. ``calls`` are launches.
    """

    what: str
    at: tuple[str, int] = ("", 0)
    flops: int = 0
    nbytes: int = 0
    calls: int = 0
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Start:
    """A collective that starts once ``stream`` has got here on the last rank.

    ``nbytes`` is the larger of what this rank sends and receives. ``ranks`` take part, ``stride`` apart; other ranks do
    the same at the same time. ``operations`` is how many NCCL makes of it; ``of_host`` is whether it is the host's own.
    """

    what: str
    kind: str
    nbytes: int
    ranks: int
    at: tuple[str, int] = ("", 0)
    stride: int = 1
    operations: int = 1
    of_host: bool = False
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Wait:
    """``stream`` waits for the ``start``-th collective of the record."""

    start: int
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Join:
    """``stream`` waits for what stream ``on`` was given before."""

    on: str
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Read:
    """The host waits for ``stream``."""

    what: str
    stream: str = COMPUTE


Event = Work | Start | Wait | Join | Read
Record = tuple[Event, ...]


def merged(works: Sequence[Work]) -> list[Work]:
    """One ``Work`` of each kind, in the order of the first."""
    found: dict[tuple[Any, ...], Work] = {}
    for work in works:
        key = work.what, work.at, work.stream
        have = found.get(key)
        if have is None:
            found[key] = work
        else:
            found[key] = replace(
                have,
                flops=have.flops + work.flops,
                nbytes=have.nbytes + work.nbytes,
                calls=have.calls + work.calls,
            )
    return list(found.values())


# Recording. A stretch of work between two collectives, waits or reads is one ``Work`` of each kind.

PRODUCTS = {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}  # with the number of their operands


class Tracer(Recorder):
    """Records events in order while it is ``on``, in addition to a ``Recorder``'s counts."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.events: list[Event] = []
        self._works: list[Work] = []
        self._at = ("", 0)
        self._starts = 0
        self._open: int | None = None  # a collective whose caller may wait at once
        self._halves = False  # whether products are symmetric, of which kernels compute one half

    def begin(self) -> None:
        """Begin a record."""
        self.events, self._works, self._starts, self._open, self.on = [], [], 0, None, True

    def end(self) -> Record:
        """The record since its begin."""
        self.flush()
        self.on = False
        return tuple(self.events)

    def add(self, event: Event) -> None:
        """Add an event after those recorded."""
        if isinstance(event, Work):
            self._settle()
            self._works.append(event)
            return
        self.flush()
        self.events.append(event)

    def flush(self) -> None:
        self._settle()
        self.events += merged(self._works)
        self._works = []

    def start(self, event: Start) -> int:
        """Add a collective; returns its number."""
        self.add(event)
        self._starts += 1
        return self._starts - 1

    def _settle(self) -> None:
        """A collective that nobody holds was waited for by its call."""
        if self._open is not None:
            number, self._open = self._open, None
            self.add(Wait(number, self.stream))

    @contextmanager
    def at(self, part: str, bucket: int) -> Iterator[None]:
        """Within it, work is this part's; of parts within each other, the outermost counts."""
        before, self._at = self._at, self._at if self._at[0] else (part, bucket)
        try:
            yield
        finally:
            self._at = before

    def waiting(self, work: Any) -> Any:
        """A handle in place of ``work``, whose wait is recorded. Without a recorded start, ``work`` itself."""
        if not self.on or self._open is None:
            return work
        number, self._open = self._open, None
        return _Handle(self, number, work)

    def gemm_symmetric(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        """In place of quack-kernels': one launch of half the flops."""
        self._halves = True
        try:
            return product(A, B, C, alpha=alpha, beta=beta)
        finally:
            self._halves = False

    def joined(self, stream: str, on: str) -> None:
        if self.on and stream != on:
            self.add(Join(on, stream))

    def waited(self, what: str) -> None:
        super().waited(what)
        if self.on:
            self.add(Read(what, self.stream))

    def _note(self, func: Any, args: Any, found: Any) -> None:
        super()._note(func, args, found)
        if not self.on or self._starts_nothing(func) or func.namespace == "profiler":
            return
        if func.namespace == "c10d":
            self._open = self.start(self._collective(func._schema.name.partition("::")[2], args))
            return
        flops, nbytes = cost(func._schema.name, args, found)
        self.add(Work(self._part(), self._at, flops // 2 if self._halves else flops, nbytes, 1, self.stream))

    def _collective(self, name: str, args: Any) -> Start:
        group = ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
        ranks, nbytes = group.size(), moved(name, args, group.rank(), group.size())
        into, out = ([*tensors_in([each])] for each in args[:2])
        kind, operations = name.strip("_"), 1
        if name == "alltoall_base_":
            kind = "all-to-all"
        elif name.startswith("allreduce"):
            kind = "all-reduce"
        else:
            sizes = [tensor.numel() for tensor in max(into, out, key=len)]
            operations = sum(map(bool, sizes)) if len({*sizes}) > 1 else 1  # NCCL drops those of no elements
            kind = "reduce-scatter" if "reduce_scatter" in name else "all-gather" if "allgather" in name else kind
        what = self._part() if self._part() != OTHER else kind
        what = f"{what} {self._at[1]}" if self._at[0] else what
        return Start(what, kind, nbytes, ranks, self._at, dist_stride(group), operations, stream=self.stream)


def moved(name: str, args: Any, rank: int, ranks: int) -> int:
    """The bytes that ``rank`` sends or receives in a collective of torch's, the larger; those of reductions and gathers
    as if they went around a ring."""
    if name == "alltoall_base_":
        received, sent = args[:2]
        mine = [splits[rank] if splits else flat.numel() // ranks for splits, flat in zip(args[3:5], args[:2])]
        return int(max(len(received) - mine[0], len(sent) - mine[1]) * sent.itemsize)
    total = max(sum(each.numel() * each.itemsize for each in tensors_in([some])) for some in args[:2])
    return (2 if name.startswith(("allreduce", "all_reduce")) else 1) * total * (ranks - 1) // ranks


def dist_stride(group: ProcessGroup) -> int:
    """How far a group's ranks are apart."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def cost(name: str, args: Any, found: Any) -> tuple[int, int]:
    """The flops of a matrix product; otherwise the bytes that an operation reads and writes."""
    if name in PRODUCTS:
        a, b = args[PRODUCTS[name] - 2 : PRODUCTS[name]]
        return 2 * a.numel() * b.shape[-1], 0
    read = args[1:] if "copy_" in name and "to_copy" not in name else args
    written = args[:1] if "copy_" in name and "to_copy" not in name else (found,)
    return 0, sum(tensor.numel() * tensor.itemsize for tensor in tensors_in((*read, *written)))


@dataclass(slots=True)
class _Handle:
    """A collective's handle."""

    tracer: Tracer
    number: int
    work: Any

    def wait(self) -> None:
        self.work.wait()
        if self.tracer.on:
            self.tracer.add(Wait(self.number, self.tracer.stream))


# A session: an engine on a GPU that is not there, whose parts of a step have their names.


@dataclass
class Session:
    """An engine that plays ``rank`` of a plan. Steps are recorded within ``opened``."""

    planned: Planned
    setting: Setting
    rank: int
    engine: Engine
    tracer: Tracer
    steps: int = 0

    def record(self, passes: Passes | None = None) -> Record:
        """The next step; with ``passes``, also those around it. The first step makes state, and is not recorded."""
        tracer, engine = self.tracer, self.engine
        if not self.steps:
            engine.backward()
            engine.step()
        if passes is None:
            engine.backward()
        self.steps += 1
        tracer.begin()
        engine.step() if passes is None else engine.train(passes)
        return tracer.end()


@contextmanager
def opened(planned: Planned, setting: Setting, rank: int) -> Iterator[Session]:
    """A session as ``rank`` of the ranks that share what is planned."""
    tracer = Tracer()
    with ExitStack() as stack:
        stack.enter_context(pretended(rank, planned.ranks, others_of(planned)))
        stack.enter_context(absent_gpu(tracer))
        if setting.rules.matrix.get("ns_method") == QUACK:  # "auto" would find it, too, and is without it in a plan
            kernels: Any = ModuleType(KERNELS)
            kernels.gemm_symmetric = tracer.gemm_symmetric
            stack.enter_context(mock.patch.dict(sys.modules, {KERNELS: kernels}))
        engine = ENGINES[setting.engine](planned, setting)
        for place in _places(engine, tracer):
            stack.enter_context(place)
        started = collectives._started
        stack.enter_context(replaced(collectives, "_started", lambda work: tracer.waiting(started(work))))
        yield Session(planned, setting, rank, engine, tracer)


def _places(engine: Engine, tracer: Tracer) -> Iterator[Any]:
    """Contexts in which methods of the step name their part and bucket."""

    def named(owner: Any, name: str, part: str, bucket: Callable[..., int]) -> Any:
        method = getattr(owner, name)

        def run(self: Any, *args: Any, **more: Any) -> Any:
            if not tracer.on:
                return method(self, *args, **more)
            with tracer.at(part, bucket(self, *args)):
                return method(self, *args, **more)

        return replaced(owner, name, run)

    if isinstance(engine, PlainEngine):
        numbers = {id(buffers): number for number, buffers in enumerate(engine.buckets)}
        parts = {"take": "take", "launch": "out", "arrive": "arrive", "settle": "settle", "send_values": "back"}
        for name, part in {**parts, "receive_values": "back"}.items():
            yield named(BucketBuffers, name, part, lambda buffers, *_: numbers[id(buffers)])
        yield named(BufferStepper, "_update", "own", lambda stepper, buffers, *_: numbers[id(buffers)])
        return
    assert isinstance(engine, (MeshEngine, FlatEngine))
    units = {id(stepper): number for number, (stepper, _) in enumerate(engine.matrix_steppers)}
    counts = [len(plan.buckets) for _, plan in engine.matrix_steppers]
    first = [sum(counts[:number]) for number in range(len(counts))]
    parts = {"_depart": "out", "_update_owned": "own", "_apply_returned": "apply"}
    for name, part in parts.items():
        yield named(MatrixStepper, name, part, lambda stepper, bucket, *_: first[units[id(stepper)]] + bucket)
    yield named(MatrixStepper, "_step_local", "local", lambda stepper, *_: units[id(stepper)])
    ways = [id(way) for stepper, _ in engine.matrix_steppers for way in stepper._back]
    yield named(Arrival, "passed_on", "column", lambda arrival, *_: ways.index(id(arrival.way)))
