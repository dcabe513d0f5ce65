"""A process group as strict as NCCL and stricter, for CPU tensors, carried by gloo: ``pytest --transport strict``.

Its name is not gloo, so the code takes the branches that GPUs take. What is sent is copied when a collective starts;
what arrives is delivered by ``Work.wait()``. Until then outputs hold NaN, or bytes of 0xA5 if they are integers. With
``--device cuda`` it is for tensors of one GPU that all ranks share, and stages them through the CPU.

- Order. The ranks of a collective compare what they call, over a store, before it starts; all raise if they differ. It
  starts when all of its ranks have called it: where ranks use groups in different orders, NCCL may hang, and here they
  do not come.
- Limits. Contiguous tensors on the group's device, of NCCL's dtypes and reductions; no tags.
- Peers that died. ``wait`` returns, outputs stay NaN, and the process ends ``GRACE`` later, as by NCCL's watchdog.
- Faults, which raise in calls of this package: an input that changes between start and wait, an output that is written
  before wait, a Work that is dropped without wait while its optimizer lives. An output that is read before wait puts
  NaN into what is computed.

``settle`` raises what was found since the last call, so that no ``except`` on the way hides it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

NAME = "strict"
DEVICE = torch.device("cpu")  # or a GPU that all ranks share; what travels is staged through the CPU
PATIENCE = 300.0  # seconds until ranks that do not come count as dead, if the group's timeout is not shorter
GRACE = 2.0
LATE = 1_000_000  # cycles of a GPU
OURS = ("lwopt_backend.", "tests.")
PASSED_ON = (__name__, "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch._ops")
PASSED_ON += ("torch.utils._contextlib", "contextlib", "typing_extensions", "deepspeed.comm.")
DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")

FOUND: list[str] = []
WATCHDOGS: list[threading.Timer] = []


class StrictError(AssertionError):
    """What fails, hangs or computes garbage on NCCL."""


def found(fault: str) -> StrictError:
    """Note a fault, and return it as an error."""
    FOUND.append(fault)
    return StrictError(fault)


def settle() -> None:
    """Raises StrictError with the faults since the last call. In a process that is about to end, wait for its end: no
    answer of such a rank is a result."""
    for watchdog in WATCHDOGS:
        watchdog.join()
    faults = list(dict.fromkeys(FOUND))
    FOUND.clear()
    if faults:
        raise StrictError("\n".join(faults))


class Caller:
    """The code that calls a collective. In this package, ``owner`` is its outermost object at work."""

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and _module(frame).startswith(PASSED_ON):
            frame = frame.f_back
        assert frame is not None
        self.ours = _module(frame).startswith(OURS)
        while frame.f_back and _module(frame) == "lwopt_backend.runtime.collectives":
            frame = frame.f_back
        self.place = f"{_module(frame)}:{frame.f_lineno} in {frame.f_code.co_name}"
        self.owner: weakref.ref[Any] | None = None
        while self.ours and frame is not None:
            if _module(frame).startswith(OURS[0]) and frame.f_code.co_varnames[:1] == ("self",):
                values = frame.f_locals
                with suppress(TypeError, KeyError):
                    self.owner = weakref.ref(values["self"])
                if type(values) is dict:  # a copy that the frame keeps, and with it what its variables held
                    values.clear()
            frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class StrictWork(dist.Work):
    """One collective on this rank. All ranks have the same ``kind`` and ``alike``; what a rank ``sends`` to another, in
    elements, is what that one ``receives`` from it. ``launch`` starts gloo's, from copies of the inputs to tensors in
    place of the outputs, and returns its Work, or several."""

    def __init__(
        self,
        group: StrictGroup,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        launch: Callable[[list[Tensor], list[Tensor]], Any],
        *alike: Any,
        sends: Sequence[int] = (),
        receives: Sequence[int] = (),
        compared: bool = True,
    ) -> None:
        super().__init__()
        self._waited = True
        for tensor in (*inputs, *outputs):
            _check(kind, tensor)
        for tensor in inputs:
            apart = all(_same(tensor, output) or not _overlap(tensor, output) for output in outputs)
            accept(apart, kind, "inputs apart from outputs, or in their places", "some that overlap")
        dtypes = sorted({str(tensor.dtype) for tensor in (*inputs, *outputs)})
        self._group, self._caller, self._kind, self._inputs, self._outputs = group, Caller(), kind, inputs, outputs
        with torch.no_grad(), _disable_current_modes():  # no test counts what the transport does
            self._sent, self._arrived = [*map(_staged, inputs)], [*map(_staged, outputs)]
            call = [self._caller.place, kind, [*alike, *dtypes], sends, receives]
            works = launch(self._sent, self._arrived) if not compared or group.meets(call) else None
            for output in outputs:
                _bytes(output).fill_(_poison(output))
            if DEVICE.type == "cuda":
                torch.cuda.current_stream().synchronize()  # for the stream that waits, which may be another
        self._works = [works] if isinstance(works, dist.Work) else works
        self._waited = False
        if group.together is not None:
            group.together.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            with torch.no_grad(), _disable_current_modes():
                self._check()
                self._deliver()
        return True

    def _deliver(self) -> None:
        try:
            if self._works is None:
                raise RuntimeError("some ranks did not come")
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._group.end(f"{self._caller.place}: {self._kind} of ranks {self._group.ranks}: {error}")
            return
        for output, arrived in zip(self._outputs, self._arrived):
            if _is_there(output):
                if DEVICE.type == "cuda":  # later than the host, so a stream that does not wait reads NaN
                    torch.cuda._sleep(LATE)
                    arrived = arrived.pin_memory()
                output.data.copy_(arrived.view_as(output), non_blocking=True)

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future

    def _check(self) -> None:
        for output in self._outputs:
            if not _is_there(output) or not (_bytes(output) == _poison(output)).all():
                self._blame("an output was written")
        for sent, tensor in zip(self._sent, self._inputs):
            of_output = any(_same(tensor, output) for output in self._outputs)
            if not of_output and _is_there(tensor) and not torch.equal(_bytes(sent), _bytes(tensor.data.to("cpu"))):
                self._blame("an input changed")

    def _blame(self, fault: str) -> None:
        if self._caller.ours:
            raise found(f"{self._caller.place}: {fault} between the start of {self._kind} and its wait")

    def __del__(self) -> None:
        if self._waited:
            return
        if not self._caller.ours:
            self.wait()
        elif self._caller.owner is None or self._caller.owner() is not None:
            found(f"{self._caller.place}: the Work of {self._kind} was dropped without a wait")


class StrictWorks(dist.Work):
    """Collectives that were started together, and have one handle."""

    def __init__(self, works: Sequence[StrictWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait() for work in self._works])


def _staged(tensor: Tensor) -> Tensor:
    return tensor.data.to("cpu", copy=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.data.reshape(-1).view(torch.uint8)


def _is_there(tensor: Tensor) -> bool:
    """Whether the tensor's storage has not been freed by ``resize_``."""
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize


def _poison(tensor: Tensor) -> int:
    return 0xFF if tensor.is_floating_point() else 0xA5


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (begin, stop) = ((t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in (one, other))
    return max(start, begin) < min(end, stop)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() * one.itemsize == other.numel() * other.itemsize


def accept(condition: bool, kind: str, expected: str, there: Any) -> None:
    """Raises StrictError if NCCL would refuse the call."""
    if not condition:
        raise found(f"{Caller().place}: {kind}: NCCL takes {expected}, found {there}")


def _check(kind: str, tensor: Tensor) -> None:
    there = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    accept(tensor.device.type == DEVICE.type and _is_there(tensor), kind, f"memory of {DEVICE}", tensor.device)
    accept(tensor.is_contiguous(), kind, "contiguous tensors", f"one of {there}")
    accept(tensor.dtype in DTYPES, kind, "its dtypes", tensor.dtype)


def _reduction(opts: Any) -> str:
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rsplit(".", 1)[-1]
    accept(name in REDUCTIONS, "a collective", "its reductions", name)
    return name


class StrictGroup(dist.ProcessGroup):
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = c10d.ProcessGroupGloo(
            dist.PrefixStore("gloo", options.store), options.group_rank, options.group_size, options.timeout
        )
        self._me, self._size = options.group_rank, options.group_size
        self.ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self._store, self._number, self._id, self._timeout = options.store, 0, options.group_id, options.timeout
        self._came = True  # all ranks, to every collective until now
        self.together: list[StrictWork] | None = None  # what was started since coalescing began

    # What torch asks a group and its backend

    def name(self) -> str:
        return NAME

    _get_backend_name = getBackendName = name

    group_name = property(lambda self: self._id)
    options = property(lambda self: self._gloo.options)
    _device_types = property(lambda self: [DEVICE])

    def _get_backend(self, device: Any) -> StrictGroup:
        if torch.device(device).type != DEVICE.type:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    # The comparison of ranks

    def meets(self, call: Sequence[Any]) -> bool:
        """Wait until all ranks have called, and compare; False if some did not come, now or to an earlier call."""
        if not self._came:
            return False
        self._number += 1
        self._store.set(f"call {self._number} {self._me}", json.dumps(call))
        keys = [f"call {self._number} {rank}" for rank in range(self._size)]
        begun = time.monotonic()
        while not self._store.check(keys):
            waited = time.monotonic() - begun
            if waited > min(PATIENCE, self._timeout.total_seconds()):
                self._came = False
                return False
            time.sleep(min(waited / 4, 0.02))
        calls = [json.loads(text) for text in self._store.multi_get(keys)]
        if self._number > 1:  # which all ranks have read
            self._store.delete_key(f"call {self._number - 1} {self._me}")
        self._compare(calls)
        return True

    def _compare(self, calls: list[tuple[str, str, list[Any], list[int], list[int]]]) -> None:
        def same(one: int, other: int, *what: Any) -> None:
            if what[0] != what[1]:
                sides = [f"rank {self.ranks[n]} has {has} at {calls[n][0]}" for n, has in zip((one, other), what)]
                raise found(f"ranks differ: {', '.join(sides)}")

        for rank, call in enumerate(calls):
            same(0, rank, calls[0][1:3], call[1:3])
        for rank, (*_, sends, _) in enumerate(calls):
            for peer, sent in enumerate(sends):
                same(rank, peer, sent, calls[peer][4][rank])

    @staticmethod
    def end(reason: str) -> None:
        """End the process later."""

        def abort() -> None:
            print(f"strict transport: {reason}", file=sys.stderr, flush=True)
            os.abort()

        watchdog = threading.Timer(GRACE, abort)
        watchdog.daemon = True
        watchdog.start()
        WATCHDOGS.append(watchdog)

    # Collectives, each from copies of its inputs to tensors in place of its outputs

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.allreduce(outs, opts)

        return StrictWork(self, "all_reduce", tensors, tensors, launch, tensors[0].numel(), _reduction(opts))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        ways = (tensors, []) if opts.rootRank == self._me else ([], tensors)
        alike = (opts.rootRank, tensors[0].numel())
        return StrictWork(self, "broadcast", *ways, lambda ins, outs: self._gloo.broadcast([*ins, *outs], opts), *alike)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        into = tensors if opts.rootRank == self._me else []

        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.reduce(outs or [each.clone() for each in ins], opts)  # which gloo changes

        alike = (opts.rootRank, tensors[0].numel(), _reduction(opts))
        return StrictWork(self, "reduce", tensors, into, launch, *alike)

    def _start_coalescing(self, device: torch.device) -> None:
        self.together = []

    def _end_coalescing(self, device: torch.device) -> StrictWorks:
        works, self.together = self.together, None
        return StrictWorks(works or [])

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._all_gather("all_gather", inputs[0], outputs[0], opts)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any) -> Any:
        return self._all_gather("all_gather_single", mine, self._parts("all_gather_single", output, mine), opts)

    def _all_gather(self, kind: str, mine: Tensor, parts: Sequence[Tensor], opts: Any) -> Any:
        sizes, me = [part.numel() for part in parts], self._me
        in_place = _same(parts[me], mine)

        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            into = [*outs[:me], torch.empty_like(parts[me]), *outs[me:]] if in_place else outs
            into[me].copy_(ins[0].view_as(into[me]))
            if len(set(sizes)) == 1:
                return self._gloo.allgather([[part.view(-1) for part in into]], [ins[0].view(-1)], opts)
            return [self._gloo.broadcast(part, root=rank) for rank, part in enumerate(into) if part.numel()]

        accept(sizes[me] == mine.numel(), kind, "an input of the size of its part", f"{mine.numel()} and {sizes[me]}")
        outputs = [*parts[:me], *parts[me + 1 :]] if in_place else parts
        return StrictWork(self, kind, [mine], outputs, launch, sizes)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.reduce_scatter(outs, [ins], opts)

        sizes = [part.numel() for part in inputs[0]]
        return StrictWork(self, "reduce_scatter", inputs[0], outputs, launch, sizes, _reduction(opts))

    def reduce_scatter_single(self, mine: Tensor, whole: Tensor, opts: Any) -> Any:
        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo._reduce_scatter_base(outs[0].view(-1), torch.cat(ins), opts)

        parts = self._parts("reduce_scatter_single", whole, mine)
        return StrictWork(self, "reduce_scatter_single", parts, [mine], launch, mine.numel(), _reduction(opts))

    def _parts(self, kind: str, whole: Tensor, part: Tensor) -> list[Tensor]:
        _check(kind, whole)
        accept(whole.numel() == self._size * part.numel(), kind, f"{self._size} times {part.numel()}", whole.numel())
        return list(whole.detach().view(self._size, -1)) if part.numel() else [whole.detach().view(-1)] * self._size

    def all_to_all_single(self, output: Tensor, whole: Tensor, into: Any, out: Any, opts: Any) -> Any:
        def counts(tensor: Tensor, splits: Any) -> list[int]:
            row = tensor[0].numel() if len(tensor) else 0
            return [size * row for size in splits or [len(tensor) // self._size] * self._size]

        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(outs[0], ins[0], into, out, opts)

        accept(not _overlap(whole, output), "all_to_all_single", "two tensors", "one in the other")
        splits = {"sends": counts(whole, out), "receives": counts(output, into)}
        return StrictWork(self, "all_to_all_single", [whole], [output], launch, **splits)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        parts, numel = self._of_root("gather", outputs, inputs)

        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.gather([outs] if parts else [], ins, opts)

        return StrictWork(self, "gather", inputs, parts, launch, opts.rootRank, numel)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        parts, numel = self._of_root("scatter", inputs, outputs)

        def launch(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return self._gloo.scatter(outs, [ins] if parts else [], opts)

        return StrictWork(self, "scatter", parts, outputs, launch, opts.rootRank, numel)

    @staticmethod
    def _of_root(kind: str, lists: Any, single: Any) -> tuple[Any, int]:
        parts, numel = lists[0] if lists else [], single[0].numel()
        sizes = [part.numel() for part in parts]
        accept(set(sizes) <= {numel}, kind, "tensors of equal sizes", sizes)
        return parts, numel

    def barrier(self, opts: Any) -> Any:
        return StrictWork(self, "barrier", [], [], lambda *_: self._gloo.barrier())

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        accept(not tag, "send", "no tags", tag)
        return StrictWork(self, "send", tensors, [], lambda ins, _: self._gloo.send(ins, peer, tag), compared=False)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        accept(not tag, "recv", "no tags", tag)
        return StrictWork(self, "recv", [], tensors, lambda _, outs: self._gloo.recv(outs, peer, tag), compared=False)

    # As functional collectives call them
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (output,), (mine,) = outputs, inputs
        return self.all_gather_single(output, mine, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        (mine,), (whole,) = outputs, inputs
        return self.reduce_scatter_single(mine, whole, opts)

    # torch's names before 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


dist.Backend.register_backend(NAME, lambda options, _: StrictGroup(options), extended_api=True, devices=["cpu", "cuda"])
