"""A process group for ranks on one machine, for tests: ``init_process_group("shared")``. It takes gloo's place, which
spends more on a small collective than the code that calls it.

- A collective starts when all ranks of its group have called it. They compare what they call, and raise if they differ.
- What is sent is copied when it starts. What arrives is delivered by ``Work.wait()``; until then an asynchronous
  collective's outputs hold NaN, or bytes of 0xA5 if they are integers. A Work that is dropped without a wait leaves
  these values if this package dropped it; what other libraries drop is delivered.
- If a rank dies, leaves the group, or does not come within the group's timeout, ``wait`` raises RuntimeError on its
  peers, in the first two cases at once. So do all later collectives of the group.
- To who asks it is gloo. It takes gloo's dtypes and reductions, and is as careless as gloo may be, with the NaN of a
  maximum and with what a rank sends to a reduction. Sums are in the order of ranks.

For contiguous tensors on the CPU. Messages are in wire.py; strict_transport.py adds checks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import marshal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.wire import COLLECTIVE, LEFT, Lost, Wire

NAME = "shared"
OURS = ("lwopt_backend.", "tests.")
PASSED_ON = ("tests.support.shared_transport", "tests.support.strict_transport", "torch.distributed.distributed_c10d")
PASSED_ON += ("torch.distributed.c10d_logger", "torch._ops", "torch.utils._contextlib", "contextlib")
PASSED_ON += ("typing_extensions", "deepspeed.comm.")
DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.bool]
NUMPY = {torch.uint8: np.uint8, torch.int8: np.int8, torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_}
NUMPY |= {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
NAMES = {dtype: str(dtype) for dtype in [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2]}
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


# Tensors


class Part(NamedTuple):
    """Bytes of a contiguous tensor."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def is_there(self) -> bool:
        """Whether the tensor's storage has not been freed by ``resize_``."""
        tensor = self.tensor
        return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + self.start

    @property
    def poison(self) -> int:
        return 0xFF if self.tensor.is_floating_point() else 0xA5

    def memory(self) -> np.ndarray:
        """Its bytes in place."""
        if self.start == self.stop:
            return NOTHING
        return np.frombuffer((ctypes.c_char * (self.stop - self.start)).from_address(self.address), np.uint8)


NOTHING = np.empty(0, np.uint8)


def whole(tensor: Tensor) -> Part:
    return Part(tensor, 0, tensor.numel() * tensor.itemsize)


def cut(tensor: Tensor, numels: Sequence[int]) -> list[Part]:
    """Parts of these many elements, one after the other."""
    stops = [numel * tensor.itemsize for numel in itertools.accumulate(numels)]
    return [Part(tensor, start, stop) for start, stop in zip([0, *stops], stops)]


def reduced(parts: Sequence[Any], reduction: str, factor: float, dtype: torch.dtype) -> Any:
    """The bytes of all ranks' sum, or another reduction, in the order of ranks."""
    if dtype not in NUMPY and len(parts[0]):
        wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # in 8 bits torch cannot add
        each = [torch.frombuffer(part, dtype=dtype).to(wide) for part in parts]
        total = functools.reduce(lambda one, other: _pair(reduction, one, other).to(dtype).to(wide), each)
        total = total / len(parts) if reduction == "AVG" else total * factor if reduction == "PREMUL_SUM" else total
        return total.to(dtype).view(torch.uint8).numpy()
    arrays = [np.frombuffer(part, NUMPY.get(dtype, np.uint8)) for part in parts]
    total = functools.reduce(functools.partial(_pair, reduction), arrays)
    if reduction == "AVG":
        total = total / len(parts) if total.dtype.kind == "f" else total // len(parts)
    elif reduction == "PREMUL_SUM":
        total = total * factor
    return (total.copy() if len(parts) == 1 else total).astype(NUMPY.get(dtype, np.uint8), copy=False).view(np.uint8)


def _pair(reduction: str, one: Any, other: Any) -> Any:
    if reduction in ("MAX", "MIN"):  # as std::max compares: a NaN is forgotten, or what was before it
        where = np.where if isinstance(one, np.ndarray) else torch.where
        return where(one > other if reduction == "MAX" else one < other, one, other)
    if reduction == "PRODUCT":
        return one * other
    if reduction in ("BAND", "BOR", "BXOR"):
        return {"BAND": one & other, "BOR": one | other, "BXOR": one ^ other}[reduction]
    return one + other


class Caller:
    """The code that calls a collective: whether it is this package's; and where it is, which nobody asks here."""

    place = ""

    def __init__(self, frame: FrameType) -> None:
        self.ours = module_of(frame).startswith(OURS)


def calling_frame() -> FrameType:
    """That of the code that calls a collective, through what passes calls on."""
    frame: FrameType | None = sys._getframe(1)
    while frame and module_of(frame).startswith(PASSED_ON):
        frame = frame.f_back
    assert frame is not None
    return frame


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


# Collectives


class Work(dist.Work):
    """A collective of this rank. ``sent`` is what was sent of each part; ``arrived`` is what ``wait`` delivers to
    ``outputs``: their bytes, a function that returns them, or an error."""

    _waited = True

    def __init__(
        self, group: Any, caller: Any, kind: str, sent: Sequence[Any], outputs: Sequence[Part], arrived: Any
    ) -> None:
        super().__init__()
        self._group, self._caller, self._kind, self._sent, self._outputs = group, caller, kind, sent, outputs
        self._arrived, self._waited = arrived, False
        for part in outputs:
            group.fill(part, part.poison)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            self._deliver(self._arrived() if callable(self._arrived) else self._arrived)
        return True

    def _deliver(self, arrived: Any) -> None:
        if isinstance(arrived, Exception):
            raise arrived
        for part, content in zip(self._outputs, arrived):
            if part.is_there:
                self._group.write(part, content)

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([part.tensor for part in self._outputs])
        return future

    def __del__(self) -> None:
        if not self._waited and not self._caller.ours:
            self.wait()


class Works(dist.Work):
    """Collectives that were started together, and have one handle."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait() for work in self._works])


DONE = Works(())
Outgoing = Sequence[Part | None]  # to each rank of a group a part, or nothing
Finish = Callable[[list[Any]], Sequence[Any]]  # the bytes of the outputs, from what each rank of the group sent


class Group(dist.ProcessGroup):
    supports_coalescing = supports_splitting = supports_time_estimate = False
    reported, stands_for, dtypes, reductions, careless = "gloo", "gloo", DTYPES, REDUCTIONS, True
    late, caller, work = False, Caller, Work  # whether what a synchronous call is sent comes with a wait; and classes
    devices, device = ("cuda", "cpu"), torch.device("cpu")  # that it is asked for, as gloo; and of tensors
    wire: Wire  # of this process in its world

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._me, self._size, self._timeout = options.group_rank, options.group_size, options.timeout
        self.ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self._others = [rank for rank in range(self._size) if rank != self._me]
        self._id, self._of_all = options.group_id, not dist.is_initialized()
        self._key = int.from_bytes(hashlib.blake2b(self._id.encode(), digest_size=8).digest(), "little")
        if self._of_all:
            Group.wire = Wire(options.store, self._me, self._size, self._timeout)
        self._number, self._passed = 0, Counter[tuple[str, int, int]]()
        self._ended: Lost | None = None
        self._together: list[dist.Work] | None = None  # what was started since coalescing began

    # What torch asks a group and its backend

    def name(self) -> str:
        return self.reported

    _get_backend_name = name

    def getBackendName(self) -> str:  # which C++ asks, and would take what is gloo for the class of that name
        return NAME

    group_name = property(lambda self: self._id)
    options = property(lambda self: SimpleNamespace(_timeout=self._timeout))
    _device_types = property(lambda self: [torch.device(each) for each in self.devices])

    def _get_backend(self, device: Any) -> Group:
        if torch.device(device).type not in self.devices:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def shutdown(self) -> None:
        if self._of_all:
            self.wire.close()
        elif self._ended is None:
            self._end("destroyed the group")

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Works:
        works, self._together = self._together, None
        return Works(works or [])

    # One collective

    @staticmethod
    def fault(what: str) -> Exception:
        return RuntimeError(what)

    def accept(self, condition: bool, kind: str, expected: str, there: Any) -> None:
        """Raises an error if the backend would refuse the call."""
        if not condition:
            place = self.caller(calling_frame()).place
            raise self.fault(f"{place}{': ' * bool(place)}{kind}: {self.stands_for} takes {expected}, found {there}")

    def check(self, kind: str, tensors: Sequence[Tensor], outgoing: Outgoing, outputs: Sequence[Part]) -> None:
        """Raises an error if the backend would refuse these."""
        for tensor in tensors:
            device, dtype, strided = tensor.device, tensor.dtype, tensor.layout == torch.strided
            self.accept(device.type == self.device.type, kind, f"memory of {self.device.type}", device)
            self.accept(dtype in self.dtypes, kind, "its dtypes", dtype)
            self.accept(dtype == tensors[0].dtype, kind, "tensors of one dtype", (tensors[0].dtype, dtype))
            if not (strided and tensor.is_contiguous()):
                there = tensor.stride() if strided else tensor.layout
                self.accept(False, kind, "contiguous tensors", f"one of {there}")

    def read(self, part: Part, copy: bool) -> np.ndarray:
        return part.memory().copy() if copy else part.memory()

    def write(self, part: Part, content: Any) -> None:
        memory = part.memory()
        if len(memory) != len(content):
            raise RuntimeError(f"expected {len(memory)} bytes, received {len(content)}")
        memory[:] = content

    def fill(self, part: Part, byte: int) -> None:
        part.memory()[:] = byte

    def run(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Outgoing,
        outputs: Sequence[Part],
        finish: Finish,
        opts: Any,
        *alike: Any,
        splits: Sequence[Sequence[int]] = (),
    ) -> Any:
        """A collective of these tensors, of which parts are outgoing and outputs. All ranks have the same ``kind`` and
        ``alike``; what a rank sends to another, the first of its ``splits``, is what that one receives, the second."""
        late = self.late or getattr(opts, "asyncOp", True) or self._together is not None

        def start() -> dist.Work:
            self.check(kind, tensors, outgoing, outputs)
            caller, contents = self.caller(calling_frame()) if late else None, self._contents(outgoing, late)
            call = caller.place if caller else "", kind, [*alike, *(NAMES[tensor.dtype] for tensor in tensors[:1])]
            try:
                arrived: Any = finish(self._exchanged(marshal.dumps((*call, *splits)), contents, bool(splits)))
            except RuntimeError as error:
                arrived = error
            if late:
                return self.work(self, caller, kind, [*zip(outgoing, contents)], outputs, arrived)
            if isinstance(arrived, Exception):
                raise arrived
            for part, content in zip(outputs, arrived):
                self.write(part, content)
            return DONE

        return self._start(kind, tensors, start)

    def _start(self, kind: str, tensors: Sequence[Tensor], start: Callable[[], dist.Work]) -> dist.Work:
        work = _seen(kind, tensors, start) if torch._C._len_torch_dispatch_stack() else start()
        if self._together is not None:
            self._together.append(work)
        return work

    def _contents(self, outgoing: Outgoing, copy: bool) -> list[np.ndarray]:
        """For ranks that are sent the same, the same."""
        found, last, content = [], None, NOTHING
        for part in outgoing:
            if part is not last:
                last, content = part, NOTHING if part is None else self.read(part, copy)
            found.append(content)
        return found

    def _exchanged(self, said: bytes, contents: list[Any], splits: bool) -> list[Any]:
        """What all ranks of the group send this one. Raises Lost, or an error if they do not call the same."""
        if self._ended is not None:
            raise self._ended
        self._number += 1
        number, peers = self._number, dict[int, list[int]]()
        for rank in self._others:
            peers.setdefault(id(contents[rank]), []).append(rank)
        try:
            for ranks in peers.values():
                of_world = [self.ranks[rank] for rank in ranks]
                self.wire.send(of_world, self._key, COLLECTIVE, number, said, contents[ranks[0]])
            wanted = [(self.ranks[rank], self._key, COLLECTIVE, number) for rank in self._others]
            messages = self.wire.take(wanted, self.patience())
        except (Lost, OSError) as error:
            raise self._end(str(error)) from error
        parts, unlike = [*contents], splits
        for rank, (theirs, content) in zip(self._others, messages):
            parts[rank], unlike = content, unlike or theirs != said
        if unlike:
            everyone = [theirs for theirs, _ in messages]
            self._compare([marshal.loads(each) for each in [*everyone[: self._me], said, *everyone[self._me :]]])
        return parts

    def patience(self) -> float:
        return self._timeout.total_seconds()

    def _end(self, reason: str) -> Lost:
        """Nothing comes in this group any more, which its ranks are told."""
        self._ended = Lost(reason)
        peers = [self.ranks[rank] for rank in self._others]
        self.wire.send(peers, self._key, LEFT, 0, reason.encode(), NOTHING)
        return self._ended

    def _compare(self, calls: Sequence[tuple[Any, ...]]) -> None:
        def same(one: int, other: int, *what: Any) -> None:
            if what[0] != what[1]:
                places = [f" at {calls[rank][0]}" * bool(calls[rank][0]) for rank in (one, other)]
                sides = [f"rank {self.ranks[n]} has {has}{at}" for n, has, at in zip((one, other), what, places)]
                raise self.fault(f"ranks differ: {', '.join(sides)}")

        for rank, call in enumerate(calls):
            same(0, rank, calls[0][1:3], call[1:3])
        for rank, (*_, sends, _) in enumerate(calls if len(calls[0]) > 3 else ()):
            for peer, sent in enumerate(sends):
                same(rank, peer, sent, calls[peer][4][rank])

    # All of them. A method's name is torch's.

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        (tensor,), how = tensors, self._reduction(opts)
        part = whole(tensor)

        def finish(parts: list[Any]) -> list[Any]:
            return [reduced(parts, *how, tensor.dtype)]

        return self.run("all_reduce", tensors, [part] * self._size, [part], finish, opts, tensor.numel(), *how)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        (tensor,), root, how = tensors, opts.rootRank, self._reduction(opts)
        part = whole(tensor)

        def finish(parts: list[Any]) -> list[Any]:
            return [reduced(parts, *how, tensor.dtype)] if root == self._me else []

        outputs = [part] if root == self._me else []
        work = self.run("reduce", tensors, self._to(root, part), outputs, finish, opts, root, tensor.numel(), *how)
        if self.careless and root != self._me:
            self.fill(part, part.poison)
        return work

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        part, root = whole(tensors[0]), opts.rootRank
        outgoing, outputs = (part, []) if root == self._me else (None, [part])

        def finish(parts: list[Any]) -> list[Any]:
            return [] if root == self._me else [parts[root]]

        return self.run("broadcast", tensors, [outgoing] * self._size, outputs, finish, opts, root, tensors[0].numel())

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (mine,), (parts,) = inputs, outputs
        return self._all_gather("all_gather", [mine, *parts], mine, [whole(part) for part in parts], opts)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any) -> Any:
        parts = self._equal("all_gather_single", output, mine)
        return self._all_gather("all_gather_single", [mine, output], mine, parts, opts)

    def _all_gather(self, kind: str, tensors: list[Tensor], mine: Tensor, parts: list[Part], opts: Any) -> Any:
        own, sizes = whole(mine), [part.stop - part.start for part in parts]
        fits = sizes[self._me] == own.stop
        self.accept(fits, kind, "an input of the size of its part", f"{own.stop} bytes, parts of {sizes}")
        self.accept(not self.careless or len(set(sizes)) == 1, kind, "tensors of equal sizes", sizes)
        ranks = self._others if own.address == parts[self._me].address else range(self._size)

        def finish(found: list[Any]) -> list[Any]:
            return [found[rank] for rank in ranks]

        return self.run(kind, tensors, [own] * self._size, [parts[rank] for rank in ranks], finish, opts, sizes)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (mine,), (parts,) = outputs, inputs
        return self._reduce_scatter("reduce_scatter", [mine, *parts], mine, [whole(part) for part in parts], opts)

    def reduce_scatter_single(self, mine: Tensor, all_of_it: Tensor, opts: Any) -> Any:
        parts = self._equal("reduce_scatter_single", all_of_it, mine)
        return self._reduce_scatter("reduce_scatter_single", [mine, all_of_it], mine, parts, opts)

    def _reduce_scatter(self, kind: str, tensors: list[Tensor], mine: Tensor, parts: list[Part], opts: Any) -> Any:
        how, sizes = self._reduction(opts), [part.stop - part.start for part in parts]

        def finish(found: list[Any]) -> list[Any]:
            return [reduced(found, *how, mine.dtype)]

        return self.run(kind, tensors, parts, [whole(mine)], finish, opts, sizes, *how)

    def all_to_all_single(self, output: Tensor, all_of_it: Tensor, into: Any, out: Any, opts: Any) -> Any:
        def counts(tensor: Tensor, splits: Any) -> list[int]:
            row = tensor.numel() // max(1, len(tensor))
            return [size * row for size in splits or [len(tensor) // self._size] * self._size]

        kind, sends, receives = "all_to_all_single", counts(all_of_it, out), counts(output, into)
        self.accept(not overlap(whole(all_of_it), whole(output)), kind, "two tensors", "one in the other")
        for splits, tensor in ((sends, all_of_it), (receives, output)):
            self.accept(sum(splits) == tensor.numel(), kind, f"parts of {tensor.numel()} in all", splits)
        parts, splits = (cut(all_of_it, sends), cut(output, receives)), (sends, receives)
        return self.run(kind, [all_of_it, output], *parts, lambda found: found, opts, splits=splits)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        parts = [[whole(tensor) for tensor in tensors] for tensors in (inputs, outputs)]
        splits = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        return self.run("all_to_all", [*inputs, *outputs], *parts, lambda found: found, opts, splits=splits)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (mine,), parts = inputs, outputs[0] if outputs else []
        self._equal_to("gather", mine, parts)
        outgoing, into = self._to(opts.rootRank, whole(mine)), [whole(part) for part in parts]

        def finish(found: list[Any]) -> list[Any]:
            return found if parts else []

        return self.run("gather", [mine, *parts], outgoing, into, finish, opts, opts.rootRank, mine.numel())

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (mine,), parts, root = outputs, inputs[0] if inputs else [], opts.rootRank
        self._equal_to("scatter", mine, parts)
        outgoing = [whole(part) for part in parts] or [None] * self._size

        def finish(found: list[Any]) -> list[Any]:
            return [found[root]]

        return self.run("scatter", [mine, *parts], outgoing, [whole(mine)], finish, opts, root, mine.numel())

    def barrier(self, opts: Any = None) -> Any:
        return self.run("barrier", [], [None] * self._size, [], lambda found: [], opts)

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        part, to = whole(tensors[0]), [self.ranks[peer]]
        self._passed["to", peer, tag] = number = self._passed["to", peer, tag] + 1

        def start() -> Work:
            self.check("send", tensors, [part], [])
            content = self.read(part, copy=True)
            self.wire.send(to, self._key, tag, number, b"", content)
            return self.work(self, self.caller(calling_frame()), "send", [(part, content)], [], [])

        return self._start("send", tensors, start)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        part = whole(tensors[0])
        self._passed["from", peer, tag] = number = self._passed["from", peer, tag] + 1
        key = self.ranks[peer], self._key, tag, number

        def receive() -> Any:
            try:
                return [content for _, content in self.wire.take([key], self.patience())]
            except Lost as error:
                return error

        def start() -> Work:
            self.check("recv", tensors, [], [part])
            return self.work(self, self.caller(calling_frame()), "recv", [], [part], receive)

        return self._start("recv", tensors, start)

    # As functional collectives call them

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return Works([self.allreduce([tensor], opts) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Works([self.all_gather_single(*each, opts) for each in zip(outputs, inputs)])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return Works([self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs)])

    # torch's names before 2.13

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Their arguments

    def _reduction(self, opts: Any) -> tuple[str, float]:
        operation = opts.reduceOp
        name = getattr(operation, "op", operation).name
        self.accept(name in self.reductions, "a collective", "its reductions", name)
        return name, operation.__getstate__()[1] if name == "PREMUL_SUM" else 1.0

    def _to(self, root: int, part: Part) -> list[Part | None]:
        return [part if rank == root else None for rank in range(self._size)]

    def _equal(self, kind: str, all_of_it: Tensor, part: Tensor) -> list[Part]:
        numel = self._size * part.numel()
        self.accept(all_of_it.numel() == numel, kind, f"{self._size} times {part.numel()}", all_of_it.numel())
        return cut(all_of_it, [part.numel()] * self._size)

    def _equal_to(self, kind: str, mine: Tensor, parts: Sequence[Tensor]) -> None:
        sizes = [part.numel() for part in parts]
        self.accept(set(sizes) <= {mine.numel()}, kind, "tensors of equal sizes", sizes)


def overlap(one: Part, other: Part) -> bool:
    """Whether they have bytes in common. Tensors without memory, on meta, have none."""
    if not one.tensor.data_ptr():
        return False
    stops = (part.address + part.stop - part.start for part in (one, other))
    return max(one.address, other.address) < min(stops)


# What modes of torch see. To them a collective is an operation of c10d, as with other backends; nothing within it is.

SEEN = {"all_reduce": "allreduce_", "reduce": "reduce_", "broadcast": "broadcast_", "all_gather": "allgather_"}
SEEN |= {"all_gather_single": "_allgather_base_", "reduce_scatter": "reduce_scatter_", "barrier": "barrier"}
SEEN |= {"reduce_scatter_single": "_reduce_scatter_base_", "all_to_all_single": "alltoall_base_", "send": "send"}
SEEN |= {"all_to_all": "alltoall_", "gather": "gather_", "scatter": "scatter_", "recv": "recv_"}
STARTS: dict[int, Any] = {}  # what an operation calls, and then what that returned, by the operation's number
NUMBERS = itertools.count()
LIBRARY = torch.library.Library("c10d", "FRAGMENT")
for name in SEEN.values():
    LIBRARY.define(f"{name}.{NAME}(Tensor[] sent, Tensor(a!)[] received, int number) -> ()")


def _seen(kind: str, tensors: Sequence[Tensor], start: Callable[[], Work]) -> Work:
    number = next(NUMBERS)
    STARTS[number] = start
    try:
        getattr(getattr(torch.ops.c10d, SEEN[kind]), NAME)(tensors, tensors, number)
        return STARTS[number]
    finally:
        del STARTS[number]


def _start(sent: list[Tensor], received: list[Tensor], number: int) -> None:
    STARTS[number] = STARTS[number]()


for name in SEEN.values():
    LIBRARY.impl(f"{name}.{NAME}", _start, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}.{NAME}", torch.library.fallthrough_kernel, "Autograd")

dist.Backend.register_backend(NAME, lambda options, _: Group(options), extended_api=True, devices=["cpu"])
