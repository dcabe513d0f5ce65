"""A sanitizer of the order of work on streams: every access to memory of a step on a GPU that is not there.

    with absent_gpu(check := StreamCheck()): ...
    check.faults

A CPU does one thing after another, so a missing wait shows on none. Here the host, every stream and every collective
are threads with vector clocks. A thread knows what another has done if it waited: by ``wait_stream``, an event,
``Work.wait``, or on the host by a synchronization or a read. An operation also follows what the host knew when the host
launched it. A collective follows the stream that started it; that NCCL runs those of one group one after another is not
relied on. An operation is an access of the current stream to the bytes of its operands. Of two accesses to the same
bytes, one of them a write, one must follow the other.

Memory that is freed goes to the next allocation on its stream. Work of other streams that are still there is a fault,
unless they were recorded, or that stream has waited for them. So is what the host reads or writes on the CPU while a
copy is on its way, and a ``non_blocking`` copy from memory that is not pinned, for which the host waits.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import absent_gpu
from .absent_gpu import DEVICE, PACKAGE, Recorder, Stream, tensors_in

HOST = "the host"
UNORDERED, FREED, REUSED = "not ordered", "freed while in use", "reused while in use"
TORN, REWRITTEN = "read by the host too early", "rewritten by the host too early"
UNWAITED, PAGEABLE, UNTIMED = "never waited for", "not asynchronous", "not timed"
ROOT = Path(__file__).resolve().parents[2]
WATCHING = (__file__, absent_gpu.__file__)

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """A thread's access at its ``time`` to bytes ``begin`` to ``end`` of some memory."""

    thread: str
    time: int
    begin: int
    end: int
    writes: bool
    what: str

    def before(self, clock: Clock) -> bool:
        """Whether a thread with this clock follows it."""
        return self.time <= clock.get(self.thread, 0)

    def meets(self, other: Access) -> bool:
        """Whether the order of both matters."""
        return (self.writes or other.writes) and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.thread.partition(' #')[0]} by {self.what}"


@dataclass
class Memory:
    """One storage: the stream that allocated it, those that ``record_stream`` named, and accesses that still matter.

    ``before`` are accesses to the memory that the allocator may have given to it. ``ours`` is whether the package
    allocated it.
    """

    owner: str
    ours: bool = False
    pinned: bool = False
    accesses: list[Access] = field(default_factory=list)
    before: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    alive: Any = None


class StreamCheck(Recorder):
    """``faults`` has sentences with both places, and how often each was found."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self._memories: dict[Any, Memory] = {}
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)  # what every thread has done, and follows
        self._given_back: defaultdict[str, list[Access]] = defaultdict(list)  # by owner, to what was freed
        self._ended: set[str] = set()  # collectives dropped without wait, whose tensors torch keeps until they end
        self._started = 0
        self._open: tuple[str, list[Tensor]] | None = None  # a collective whose handle is about to be made
        self._returned: dict[int, str] = {}  # collectives of DTensor, by what they return
        self._lets_go = False  # the operation does not make the host wait
        super().__init__()

    def found(self, what: str, one: object, other: object) -> None:
        self.faults[f"{what}: {one} | {other}"] += 1

    # Order

    def follow(self, thread: str, clock: Clock) -> None:
        """What the thread does later follows this."""
        mine = self.clocks[thread]
        for other, time in clock.items():
            mine[other] = max(time, mine.get(other, 0))

    def tick(self, thread: str) -> None:
        """The thread's next operation, which the host launches now."""
        self.follow(thread, self.clocks[HOST])
        self.clocks[thread][thread] = self.clocks[thread].get(thread, 0) + 1

    def joined(self, stream: str, on: str) -> None:
        self.follow(stream, self.clocks[on])

    def waited(self, what: str) -> None:
        super().waited(what)
        if not (what.startswith("copy") and self._lets_go):  # a recorder counts such a copy, but the host goes on
            for thread in [*self.clocks] if what == "synchronize" else [self.stream]:
                self.follow(HOST, self.clocks[thread])

    def new_event(self) -> Event:
        return Event(self)

    # Memory

    def _memory(self, tensor: Tensor) -> Memory | None:
        """That of a tensor on the GPU; of a tensor on the CPU, if a stream has used it or it is pinned."""
        if on_gpu(tensor):
            return self._memories[self._record(tensor)]
        return None if tensor.device.type != "cpu" else self._memories.get(("cpu", tensor.untyped_storage()._cdata))

    def _on_cpu(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = "cpu", storage._cdata
        if key not in self._memories:
            self._memories[key] = Memory(HOST, alive=weakref.ref(storage, lambda _: self._memories.pop(key)))
        return self._memories[key]

    def _record(self, tensor: Tensor) -> int | None:
        key = super()._record(tensor)
        if key is not None and key not in self._memories:
            clock, freed = self.clocks[self.stream], self._given_back[self.stream]
            freed[:] = [each for each in freed if not each.before(clock)]
            self._memories[key] = Memory(self.stream, in_package(), before=[*freed])
        return key

    def _freed(self, key: int) -> None:
        super()._freed(key)
        memory = self._memories.pop(key)
        clocks = [self.clocks[each] for each in (memory.owner, HOST, *memory.recorded)]
        for each in memory.accesses:
            if each.thread not in self._ended and not any(map(each.before, clocks)):
                self._given_back[memory.owner].append(each)
                if memory.ours:  # or it is the model's, who may know that its streams wait
                    self.found(FREED, each, f"memory of {memory.owner}, freed at {where()}")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        if (memory := self._memory(tensor)) is not None:
            memory.recorded.add(stream.name)

    def pinned(self, tensor: Tensor) -> Tensor:
        self._on_cpu(tensor).pinned = True
        return tensor

    # Accesses

    def access(self, thread: str, tensor: Tensor, writes: bool, what: str, memory: Memory | None = None) -> None:
        """At the thread's current time. What the host does with the CPU's memory is only compared."""
        memory = memory or self._memory(tensor)
        if memory is None or tensor.numel() == 0:
            return
        begin = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        clock, end = self.clocks[thread], begin + (last + 1) * tensor.itemsize
        now = Access(thread, clock.get(thread, 0), begin, end, writes, what)
        for each in memory.before:
            if not each.before(clock):
                self.found(REUSED, each, f"new memory: {now}")
        left = []
        for each in memory.accesses:
            ordered = each.before(clock)
            if not ordered and each.meets(now):
                self.found(UNORDERED if thread != HOST else REWRITTEN if writes else TORN, each, now)
            covered = ordered and begin <= each.begin and each.end <= end and (writes or not each.writes)
            if thread == HOST or not covered:
                left.append(each)
        memory.accesses = left if thread == HOST else [*left, now]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((each.name for each in func._schema.arguments), args)) | (kwargs or {})
        waits, self._lets_go = self.waits.total(), bool(given.get("non_blocking"))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if found is NotImplemented or func.namespace in ("prim", "profiler"):
            return found
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self._collective(name.strip("_"), args, of_own=given.get("async_op", True))
        elif func.namespace == "_c10d_functional":
            self._of_dtensor(name, args[0], found)
        elif not self._starts_nothing(func):
            self._operation(func, given, found)
            if self.waits.total() > waits and not self._lets_go:
                self.follow(HOST, self.clocks[self.stream])
        return found

    def _operation(self, func: Any, given: dict[str, Any], found: Any) -> None:
        reads: list[Tensor] = []
        writes = [] if any(each.alias_info for each in func._schema.returns) else [*tensors_in([found])]
        for spec in func._schema.arguments:
            written = spec.alias_info is not None and spec.alias_info.is_write
            (writes if written else reads).extend(tensors_in([given.get(spec.name)]))
        both = [*((each, False) for each in reads), *((each, True) for each in writes)]
        what = f"{func._schema.name.partition('::')[2]} at {where()}"
        launches = any(on_gpu(each) for each, _ in both)
        if launches:
            self.tick(self.stream)
        for each, write in both:
            if on_gpu(each):
                self.access(self.stream, each, write, what)
            elif launches and self._lets_go:
                if not write and not self._on_cpu(each).pinned:
                    self.found(PAGEABLE, what, "a copy with non_blocking from memory that is not pinned")
                self.access(self.stream, each, write, what, self._on_cpu(each))
            else:
                self.access(HOST, each, write, what)

    def seen(self, tensor: Tensor) -> None:
        if on_gpu(tensor):
            self.tick(self.stream)
        self.access(self.stream if on_gpu(tensor) else HOST, tensor, False, f"tolist at {where()}")

    # Collectives

    def _begin(self, name: str) -> str:
        """A collective's own thread, from here."""
        self._started += 1
        thread = f"{name} #{self._started}"
        self.tick(self.stream)
        self.joined(thread, self.stream)
        self.tick(thread)
        return thread

    def _collective(self, name: str, args: Any, *, of_own: bool) -> None:
        thread = self._begin(name) if of_own else self.stream
        self.tick(thread)
        for write, tensors in ((True, args[:1]), (False, args[1:2])):
            for each in tensors_in(tensors):
                self.access(thread, each, write, f"{name} at {where()}")
        self._open = (thread, [*tensors_in(args[:2])]) if of_own else None

    def _of_dtensor(self, name: str, given: Tensor, found: Tensor) -> None:
        """DTensor's collectives, of which torch waits for the tensor that they return."""
        if name == "wait_tensor":
            self.joined(self.stream, self._returned.pop(given.untyped_storage()._cdata, self.stream))
            return
        thread = self._begin(name)
        self.access(thread, given, False, f"{name} at {where()}")
        self.access(thread, found, True, f"{name} at {where()}")
        self._returned[found.untyped_storage()._cdata] = thread

    def started(self, work: Any) -> Handle:
        assert self._open is not None
        (thread, tensors), self._open = self._open, None
        return Handle(self, thread, tensors, where())


@dataclass
class Handle:
    """A collective's handle, which keeps its tensors until ``wait``, as torch's does for NCCL."""

    check: StreamCheck
    thread: str
    tensors: list[Tensor]
    place: str

    def wait(self) -> None:
        self.check.joined(self.check.stream, self.thread)
        self.tensors = []

    def __del__(self) -> None:
        if self.tensors:
            self.check._ended.add(self.thread)
            self.check.found(UNWAITED, self.thread.partition(" #")[0], f"begun at {self.place}")


@dataclass
class Event:
    """What a stream has done until ``record``."""

    check: StreamCheck
    clock: Clock = field(default_factory=dict)

    def record(self, stream: Stream | None = None) -> None:
        name = self.check.stream if stream is None else stream.name
        self.check.tick(name)
        self.clock = dict(self.check.clocks[name])

    def wait(self, stream: Stream | None = None) -> None:
        self.check.follow(self.check.stream if stream is None else stream.name, self.clock)

    def synchronize(self) -> None:
        self.check.follow(HOST, self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; 1 of each operation. CUDA raises if an event was not recorded, or has not happened yet."""
        known = self.check.clocks[HOST]
        happened = self.clock and all(time <= known.get(thread, 0) for thread, time in end.clock.items())
        later = sum(end.clock.values()) - sum(self.clock.values())
        if not happened or later <= 0:
            self.check.found(UNTIMED, f"events at {where()}", "the end was not before the host's read of it")
        return float(later)


def on_gpu(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == DEVICE.type


def _frames() -> Iterator[tuple[str, int]]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@cache
def _named(path: str) -> tuple[str, bool]:
    """How a file of this repository is called, and whether it is of the package; "" for other files, and for those
    that watch."""
    file = Path(path)
    if not file.is_relative_to(ROOT) or "site-packages" in path or path in WATCHING:
        return "", False
    return file.relative_to(ROOT).as_posix(), file.is_relative_to(PACKAGE)


def in_package() -> bool:
    """Whether the package runs now, and not what plays the model or the user."""
    return any(_named(path)[1] for path, _ in _frames())


def where(most: int = 2) -> str:
    """The innermost lines of the package that run now; elsewhere that of the model or of the user."""
    frames = [(*_named(path), line) for path, line in _frames()]
    ours = [f"{name}:{line}" for name, of_package, line in frames if of_package]
    others = [f"{name}:{line}" for name, _, line in frames if name]
    return " < ".join(ours[:most] or others[:1])
