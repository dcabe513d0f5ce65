"""What one training step does: collectives, operations, Newton-Schulz, time; and what is kept after it."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rehearsal.absent_gpu import sent, tensors_in
from benchmarks.step_systems import Hooks, System

# Collectives and operations.

NOT_COUNTED = ("barrier", "wait_tensor", "wrap_tensor_autograd")
READS = {"_local_scalar_dense", "nonzero"}
NOT_LAUNCHED = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class Traffic:
    """The collectives of one rank by operation: how many, and the bytes that leave the rank in them."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, dict[str, int]]:
        return {"calls": dict(self.calls), "sent": dict(self.sent)}


@dataclass
class Count:
    """What the optimizer of one rank did in a step. ``operations`` are by name, without those of Newton-Schulz."""

    operations: Counter[str] = field(default_factory=Counter)
    newton_schulz: Counter[str] = field(default_factory=Counter)
    calls: int = 0  # of Newton-Schulz: batches
    matrices: int = 0  # in them
    host_reads: int = 0
    collectives: int = 0
    allocations: int = 0

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "operations": dict(self.operations), "newton_schulz": dict(self.newton_schulz)}

    def launches(self) -> int:
        return self.operations.total() + self.newton_schulz.total()


class Watch(TorchDispatchMode):
    """Sees every collective in which this rank takes part, whoever starts it, and all that its optimizer dispatches.

    All collectives are over all ranks. ``step`` is the traffic of all, ``update`` that of the update.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.step, self.update, self.count = Traffic(), Traffic(), Count()
        self.in_update = self.in_optimizer = self.in_newton_schulz = False

    @contextmanager
    def watching(self) -> Iterator[Hooks]:
        """Watch within it; a step takes the hooks."""
        around = lambda flag: lambda work: self._within(flag, work)  # noqa: E731
        with around_newton_schulz(self._newton_schulz), _Reads(self), self:
            yield Hooks(around("in_update"), around("in_optimizer"))

    def _within(self, flag: str, work: Callable[[], Any]) -> Any:
        before = getattr(self, flag)
        setattr(self, flag, True)
        try:
            return work()
        finally:
            setattr(self, flag, before)

    def _newton_schulz(self, work: Callable[[], Any], matrices: Tensor) -> Any:
        self.count.calls += 1
        self.count.matrices += matrices.shape[:-2].numel()
        return self._within("in_newton_schulz", work)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again, with what it does to the shards
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(name.strip("_"), args)
        elif func.namespace == "aten" and self.in_optimizer:
            self.count.host_reads += name in READS
            if not func.is_view and name not in READS:
                counted = self.count.newton_schulz if self.in_newton_schulz else self.count.operations
                counted[name] += 0 if name in NOT_LAUNCHED else launches(name, args)
                self.count.allocations += new_storages(result, [*args, *(kwargs or {}).values()])
        return result

    def _collective(self, name: str, args: Any) -> None:
        if name in NOT_COUNTED:
            return
        leaves = sent(name, args, self.rank, self.world_size)
        for traffic in (self.step, self.update) if self.in_update else (self.step,):
            traffic.calls[name] += 1
            traffic.sent[name] += leaves
        self.count.collectives += self.in_optimizer


class _Reads(TorchFunctionMode):
    """Counts ``Tensor.tolist``, which copies to the host and dispatches nothing."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.count.host_reads += func is Tensor.tolist and self.watch.in_optimizer
        return func(*args, **(kwargs or {}))


def launches(name: str, args: Sequence[Any]) -> int:
    """1, or for a list of tensors that CUDA takes one by one, their number."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    if not name.startswith("_foreach") or not lists:
        return 1
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    alike = all(len(found) == 1 for found in dtypes) and (name == "_foreach_copy_" or len(set().union(*dtypes)) == 1)
    alike = alike and all(len({(t.shape, t.stride()) for t in row}) == 1 and dense(row[0]) for row in zip(*lists))
    return 1 if alike else len(lists[0])


def dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())


def new_storages(result: Any, args: Sequence[Any]) -> int:
    made, given = ({t.untyped_storage()._cdata for t in tensors_in(some)} for some in ([result], args))
    return len(made - given)


# The functions that are Newton-Schulz, where their callers look them up.
NEWTON_SCHULZ = {
    "lwopt_backend.rules.muon": ("newton_schulz", "gram_newton_schulz"),
    "torch.optim._muon": ("_zeropower_via_newtonschulz",),
    "deepspeed.runtime.zero.muon.original_muon": ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz"),
}


@contextmanager
def around_newton_schulz(do: Callable[[Callable[[], Any], Tensor], Any]) -> Iterator[None]:
    """Within it ``do`` makes all calls of Newton-Schulz, of whatever is imported, and is told of what."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda matrices, *args, **kwargs: do(lambda: function(matrices, *args, **kwargs), matrices)

    modules = [(sys.modules[module], names) for module, names in NEWTON_SCHULZ.items() if module in sys.modules]
    found = [(module, name, getattr(module, name)) for module, names in modules for name in names]
    for module, name, function in found:
        setattr(module, name, wrapped(function))
    try:
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


# Time.


@dataclass
class Clock:
    """Seconds of CPU time, of all threads of this process, and on the clock, of the parts that it is around.

    Newton-Schulz is the CPU time of the thread that calls it; on a GPU it is not taken apart.
    """

    device: torch.device
    cpu: float = 0.0
    wall: float = 0.0
    newton_schulz: float = 0.0
    running: bool = False

    def around(self, work: Callable[[], Any]) -> Any:
        """``work``, timed, unless a call around it already is."""
        if self.running:
            return work()
        synchronize(self.device)
        self.running, cpu, wall = True, time.process_time(), time.perf_counter()
        try:
            return work()
        finally:
            synchronize(self.device)
            self.running = False
            self.cpu += time.process_time() - cpu
            self.wall += time.perf_counter() - wall

    def around_newton_schulz(self, work: Callable[[], Any], matrices: Tensor) -> Any:
        began = time.thread_time()
        result = work()
        self.newton_schulz += time.thread_time() - began
        return result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Memory.

# Which bytes of an optimizer a tensor belongs to, by the attribute or the state key under which it is found.
KINDS = {
    "momentum_buffer": "momentum",
    "momentum": "momentum",  # dion's
    "exp_avg": "adam",
    "exp_avg_sq": "adam",
    "step": "adam",
    "_muon_pending_momentum": "staging",
    "_muon_allgather_buffers": "staging",
    "single_partition_of_fp32_groups": "masters",
    "fp32_partitioned_groups_flat": "masters",
    "masters": "masters",
}
OTHER = "other"
OF_OPTIMIZERS = ("deepspeed", "lwopt_backend", "dion")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kept_bytes(system: System) -> dict[str, int]:
    """Bytes of every tensor that this rank's optimizers hold between steps, by kind, without the model's own weights.

    The optimizers and ZeRO's wrapper are searched, attribute by attribute. A tensor that several hold, or views of one
    memory, count once.
    """
    params = [_mine(param.detach()) for param in system.model.parameters()]
    weights = params + [param.ds_tensor for param in system.model.parameters() if hasattr(param, "ds_tensor")]
    counted = {weight.untyped_storage().data_ptr() for weight in weights}
    found = dict.fromkeys([*KINDS.values(), OTHER], 0)
    tensors = list(_tensors(system.optimizers, OTHER, set()))
    for kind, tensor in sorted(tensors, key=lambda item: item[0] == OTHER):  # by its name wherever it has one
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            found[kind] += storage.nbytes()
    return found


def _mine(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(held: Any, kind: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached from ``held``, with its kind."""
    if isinstance(held, Tensor):
        yield kind, _mine(held)
        return
    if id(held) in seen or isinstance(held, nn.Module):
        return
    seen.add(id(held))
    package = type(held).__module__.split(".")[0]
    named: list[tuple[Any, Any]] = []
    if isinstance(held, Mapping):
        named = list(held.items())
    elif isinstance(held, (list, tuple, set)):
        named = [(None, value) for value in held]
    elif package in OF_OPTIMIZERS or isinstance(held, torch.optim.Optimizer):
        names = [*getattr(held, "__dict__", ()), *(n for c in type(held).__mro__ for n in vars(c).get("__slots__", ()))]
        named = [(name, getattr(held, name, None)) for name in names]
    for name, value in named:
        yield from _tensors(value, KINDS.get(name, kind) if isinstance(name, str) else kind, seen)


def resident_bytes(device: torch.device) -> int:
    """Memory of this process after what was freed has been given back; on a GPU, what torch has allocated there."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def restart_peak(device: torch.device) -> None:
    """Forget the highest memory so far."""
    resident_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The highest memory since ``restart_peak``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))
