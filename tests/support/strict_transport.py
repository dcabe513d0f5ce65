"""A process group as strict as NCCL and stricter, for ranks on one machine: ``pytest --transport strict``. It is that
of shared_transport.py with further checks.

Its name is not gloo, so the code takes the branches that GPUs take. Every collective's outputs are delivered by
``Work.wait()``. With ``--device cuda`` it is for tensors of one GPU that all ranks share, and stages them through the
CPU.

- Order. Where ranks call different collectives, the error names both sides. Where ranks use groups in different orders,
  NCCL may hang, and here they do not come.
- Limits. Contiguous tensors on the group's device, of NCCL's dtypes and reductions; no tags.
- Peers that died. ``wait`` returns, outputs stay NaN, and the process ends ``GRACE`` later, as by NCCL's watchdog.
- Faults, which raise in calls of this package: an input that changes between start and wait, an output that is written
  before wait, a Work that is dropped without wait while its optimizer lives. An output that is read before wait puts
  NaN into what is computed.

``settle`` raises what was found since the last call, so that no ``except`` on the way hides it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support import shared_transport
from tests.support.shared_transport import OURS, Caller, Group, Outgoing, Part, Work, module_of, overlap, whole
from tests.support.wire import Lost

NAME = "strict"
DEVICE = torch.device("cpu")  # or a GPU that all ranks share
PATIENCE = 300.0  # seconds until ranks that do not come count as dead, if the group's timeout is not shorter
GRACE = 2.0
LATE = 1_000_000  # cycles of a GPU
DTYPES = [*shared_transport.DTYPES, torch.float8_e4m3fn, torch.float8_e5m2]
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


class Owned(Caller):
    """Code at a place. In this package, ``owner`` is the outermost object at work."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame)
        while frame.f_back and module_of(frame) == "lwopt_backend.runtime.collectives":
            frame = frame.f_back
        self.place = f"{module_of(frame)}:{frame.f_lineno} in {frame.f_code.co_name}"
        self.owner: weakref.ref[Any] | None = None
        within: FrameType | None = frame
        while self.ours and within is not None:
            if module_of(within).startswith(OURS[0]) and within.f_code.co_varnames[:1] == ("self",):
                values = within.f_locals
                with suppress(TypeError, KeyError):
                    self.owner = weakref.ref(values["self"])
                if type(values) is dict:  # a copy that the frame keeps, and with it what its variables held
                    values.clear()
            within = within.f_back


class StrictWork(Work):
    def _deliver(self, arrived: Any) -> None:
        self._check()
        if isinstance(arrived, Lost):
            end(f"{self._caller.place}: {self._kind} of ranks {self._group.ranks}: {arrived}")
        else:
            super()._deliver(arrived)

    def _check(self) -> None:
        for part in self._outputs:
            if not part.is_there or not (self._group.read(part, copy=False) == part.poison).all():
                self._blame("an output was written")
        in_place = {part.address for part in self._outputs}
        for part, sent in self._sent:
            if part is None or part.address in in_place or not part.is_there:
                continue
            if not np.array_equal(sent, self._group.read(part, copy=False)):
                self._blame("an input changed")

    def _blame(self, fault: str) -> None:
        if self._caller.ours:
            raise found(f"{self._caller.place}: {fault} between the start of {self._kind} and its wait")

    def __del__(self) -> None:
        super().__del__()
        if not self._waited and (self._caller.owner is None or self._caller.owner() is not None):
            found(f"{self._caller.place}: the Work of {self._kind} was dropped without a wait")


def end(reason: str) -> None:
    """End the process later."""

    def abort() -> None:
        print(f"strict transport: {reason}", file=sys.stderr, flush=True)
        os.abort()

    watchdog = threading.Timer(GRACE, abort)
    watchdog.daemon = True
    watchdog.start()
    WATCHDOGS.append(watchdog)


class StrictGroup(Group):
    reported, stands_for, dtypes, reductions, careless = NAME, "NCCL", DTYPES, REDUCTIONS, False
    late, caller, work, fault, devices = True, Owned, StrictWork, staticmethod(found), ("cpu",)
    device = property(lambda self: DEVICE)

    def patience(self) -> float:
        return min(PATIENCE, super().patience())

    def check(self, kind: str, tensors: Sequence[Tensor], outgoing: Outgoing, outputs: Sequence[Part]) -> None:
        super().check(kind, tensors, outgoing, outputs)
        for tensor in tensors:
            self.accept(whole(tensor).is_there, kind, "tensors", "one whose storage was freed")
        for part in filter(None, outgoing):
            apart = all(part.address == output.address or not overlap(part, output) for output in outputs)
            self.accept(apart, kind, "inputs apart from outputs, or in their places", "some that overlap")

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        self.accept(not tag, "send", "no tags", tag)
        return super().send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        self.accept(not tag, "recv", "no tags", tag)
        return super().recv(tensors, peer, tag)


class SharedGPU(StrictGroup):
    """Stages tensors of a GPU through the CPU."""

    devices, device = ("cuda",), torch.device("cuda")

    def read(self, part: Part, copy: bool) -> np.ndarray:
        with _disable_current_modes():
            return on_gpu(part).to("cpu").numpy()

    def write(self, part: Part, content: Any) -> None:
        with _disable_current_modes():
            torch.cuda._sleep(LATE)  # later than the host, so a stream that does not wait reads NaN
            arrived = torch.from_numpy(np.array(content, np.uint8)).pin_memory()
            on_gpu(part).copy_(arrived, non_blocking=True)

    def fill(self, part: Part, byte: int) -> None:
        with _disable_current_modes():
            on_gpu(part).fill_(byte)
            torch.cuda.current_stream().synchronize()  # for the stream that waits, which may be another


def on_gpu(part: Part) -> Tensor:
    return part.tensor.data.reshape(-1).view(torch.uint8)[part.start : part.stop]


def made(options: Any, _: Any) -> StrictGroup:
    return (SharedGPU if DEVICE.type == "cuda" else StrictGroup)(options)


dist.Backend.register_backend(NAME, made, extended_api=True, devices=["cpu", "cuda"])
