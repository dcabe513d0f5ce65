"""A GPU that is not there: real code runs on tensors without memory, and everything that it does is recorded.

Tensors on the GPU are torch's fake tensors: they have a shape, a dtype and a device, and allocate nothing. What mixes
devices raises, as on a GPU. Small tensors on the CPU (counters, flags) are real. A value that is read from the GPU is
0, which is what a healthy step reads: no flag is set, and all ranks say the same.
"""

from __future__ import annotations

import importlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

import lwopt_backend
from lwopt_backend.runtime import collectives
from lwopt_backend.runtime.collectives import TorchCollectives

DEVICE = torch.device("cuda", 0)
REAL_NUMEL = 2**16  # larger tensors on the CPU are also fake
PACKAGE = Path(lwopt_backend.__file__).resolve().parent
OTHER = "other"
OURS = "lwopt: "  # begins the labels of a step's parts in profiles

_DEVICE_OF = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default


class Recorder(TorchDispatchMode):
    """Records the operations on the GPU by part of the step, memory, collectives, and what waits for the GPU.

    ``total`` is the bytes that are alive now, ``peak`` the most at once. ``collectives`` has the calls and the bytes
    that this rank sends, by name. ``waits`` counts what waits for the GPU, by what it does and where: reads, and copies
    in both directions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.peak = 0
        self.stream = "compute"  # on which work is
        self._streams = 0  # made
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._labels: list[str] = []
        self._views: dict[Any, bool] = {}
        self.forget()

    def forget(self) -> None:
        """Begin to count anew; what is alive stays."""
        self.peak = self.total
        self.operations: Counter[str] = Counter()
        self.collectives: dict[str, tuple[int, int]] = {}
        self.waits: Counter[tuple[str, str]] = Counter()

    def sizes(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """The bytes of their elements and of their memory, each counted once. What is on the CPU has no memory here."""
        elements: dict[tuple[int, int, int], int] = {}
        memory: dict[int, int] = {}
        for tensor in tensors:
            key = self._record(tensor)
            place = key or id(tensor), int(tensor.storage_offset()), tensor.numel()
            elements[place] = tensor.numel() * tensor.itemsize
            if key is not None:
                memory[key], _ = self._storages[key]
        return sum(elements.values()), sum(memory.values())

    def address(self, tensor: Tensor) -> int:
        """A number that stands for the place of the tensor's first element."""
        return int(tensor.untyped_storage()._cdata * 2**48 + tensor.storage_offset() * tensor.itemsize)

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Within it, work is on another stream."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    def new_stream(self) -> Stream:
        """A new stream: ``beside``, then ``beside 2`` and so on."""
        self._streams += 1
        return Stream("beside" if self._streams == 1 else f"beside {self._streams}", self)

    def joined(self, stream: str, on: str) -> None:
        """Hear that a stream waits for another one."""

    def new_event(self) -> Any:
        """An event of a stream."""
        raise NotImplementedError("this recorder does not follow events; benchmarks/rehearsal/streams.py does")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Hear that the allocator is told of a stream that uses the tensor."""

    def seen(self, tensor: Tensor) -> None:
        """Hear that the host reads the elements of a tensor."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """Hear that a tensor on the CPU is in pinned memory; returns it."""
        return tensor

    def started(self, work: Any) -> Any:
        """A handle of a collective that has begun, in place of torch's."""
        return work

    def waited(self, what: str) -> None:
        """Count one wait for the GPU."""
        self.waits[what, place(sys._getframe())] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor, whose own operations come next
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return self.pinned(self.__torch_dispatch__(func, types, args, kwargs))
        if func.namespace == "profiler":
            self._follow(func, args)
        elif _is_real(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        elif (found := self._wait(func, args, kwargs)) is not None:
            return found
        found = func(*args, **kwargs)
        self._note(func, args, found)
        return found

    def _follow(self, func: Any, args: Any) -> None:
        """Follow the labels of a step's parts in profiles."""
        if func._schema.name.endswith("exit"):
            self._labels.pop()
        else:
            label = str(args[0])
            self._labels.append(label.removeprefix(OURS) if label.startswith(OURS) else self._part())

    def _wait(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation that reads from the GPU; None for any other. Counts what waits for the GPU."""
        name = func._schema.name
        if func is _READ:
            self.waited("read")
            return {torch.bool: False}.get(args[0].dtype, 0.0 if args[0].dtype.is_floating_point else 0)
        if name not in ("aten::_to_copy", "aten::copy_"):
            return None
        source = args[0] if name == "aten::_to_copy" else args[1]
        target = torch.device(kwargs.get("device") or source.device) if name == "aten::_to_copy" else args[0].device
        if {source.device.type, target.type} != {DEVICE.type, "cpu"}:
            return None
        lets_go = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if not lets_go or target.type == "cpu":
            self.waited("copy to the CPU" if target.type == "cpu" else "copy to the GPU")
        if target.type == "cpu" and name == "aten::_to_copy" and source.numel() <= REAL_NUMEL:
            with unset_fake_temporarily():
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return None

    def _note(self, func: Any, args: Any, found: Any) -> None:
        for each in tensors_in((found,)):
            self._record(each)
        if func.namespace == "c10d":
            what, nbytes = _sent(func._schema.name.partition("::")[2], args)
            calls, before = self.collectives.get(what, (0, 0))
            self.collectives[what] = (calls + 1, before + nbytes)
        elif not self._starts_nothing(func):
            self.operations[self._part()] += 1

    def _starts_nothing(self, func: Any) -> bool:
        """Whether an operation only describes memory that is there, or allocates some."""
        if func not in self._views:
            schema = func._schema
            aliases = [each.alias_info for each in schema.returns]
            is_view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
            self._views[func] = is_view or schema.name.startswith(
                ("aten::empty", "aten::new_empty", "prim", "profiler")
            )
        return self._views[func]

    def _part(self) -> str:
        """The part of the step that runs now."""
        return self._labels[-1] if self._labels else OTHER

    def _record(self, tensor: Tensor) -> int | None:
        """The number of the tensor's memory on the GPU, recorded when first seen."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != DEVICE.type:
            return None
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._storages:
            self._storages[key] = (storage.nbytes(), weakref.ref(storage, lambda _: self._freed(key)))
            self.total += storage.nbytes()
            self.peak = max(self.peak, self.total)
        return key

    def _freed(self, key: int) -> None:
        nbytes, _ = self._storages.pop(key)
        self.total -= nbytes


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``values``, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _is_real(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is computed: a small one on the CPU, and what needs no memory."""
    if any(isinstance(each, FakeTensor) for each in tensors_in((args, *kwargs.values()))):
        return False
    device = torch.device(kwargs.get("device") or "cpu")
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    small = not all(isinstance(size, int) for size in sizes) or math.prod(sizes) <= REAL_NUMEL
    return device.type == "meta" or (device.type == "cpu" and small)


def _sent(name: str, args: Any) -> tuple[str, int]:
    """The kind of a collective, and the bytes that this rank sends in it."""
    group = ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
    name = name.strip("_")
    kinds = {"alltoall_base": "all-to-all", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}
    kind = next((kind for word, kind in kinds.items() if word in name), name)
    if name == "allreduce":
        (first,) = tensors_in(args[0])
        kind = "all-reduce" if first.dtype.is_floating_point else "all-reduce of flags"
    return kind, sent(name, args, group.rank(), group.size())


def sent(name: str, args: Any, rank: int, ranks: int) -> int:
    """Bytes that leave ``rank`` in a collective; those of reductions and gathers as if they went around a ring."""
    first, second = (sum(each.nbytes for each in tensors_in([some])) for some in (*args, None)[:2])
    if name in ("allreduce", "all_reduce"):
        return 2 * (ranks - 1) * first // ranks
    if name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
        return (ranks - 1) * first
    if name in ("allgather", "allgather_base", "allgather_into_tensor_coalesced"):
        return (ranks - 1) * second
    if name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced") and not isinstance(args[1], (Tensor, list)):
        return (ranks - 1) * first // ranks
    if "reduce_scatter" in name:
        return second - first
    if name == "broadcast":
        return (ranks - 1) * first if args[2] == rank else 0
    if name == "alltoall_base":  # no splits are equal parts
        return second - (args[4][rank] * args[1].itemsize if args[4] else second // ranks)
    raise NotImplementedError(f"the bytes of a collective {name!r} are not known; add its rule")


def place(frame: FrameType | None) -> str:
    """The function of this package that runs in ``frame``, or that called what does: its file and its name."""
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if path.is_relative_to(PACKAGE) and not name.startswith("<"):
            return f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        frame = frame.f_back
    return "the caller"


@contextmanager
def absent_gpu(recorder: Recorder) -> Iterator[None]:
    """Within it, ``DEVICE`` is there, and ``recorder`` records what runs on it. There is no autograd."""

    of_tensor, of_torch, started = Tensor.tolist, torch.tensor, collectives._started

    def read(tensor: Tensor) -> Any:
        recorder.seen(tensor)
        if tensor.fake_device.type == DEVICE.type:
            recorder.waited("read")
        return of_tensor(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"))

    def tolist(tensor: Tensor) -> Any:
        recorder.seen(tensor)
        return of_tensor(tensor)

    def made(data: Any, *, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = of_torch(data, **kwargs)
        return recorder.pinned(tensor) if pin_memory else tensor

    def contiguous(tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        ordered = tensor.is_contiguous(memory_format=memory_format)
        return tensor if ordered else tensor.clone(memory_format=memory_format)

    def each(ranks: TorchCollectives, start: Any, options: Any, parts: Mapping[int, Tensor]) -> Any:
        """The collective of a list of all ranks' parts, which NCCL performs likewise: it is recorded as one."""
        empty = next(iter(parts.values())).new_empty(0)
        of_all = [parts.get(rank, empty) for rank in range(ranks.world_size)]
        mine, group = of_all[ranks.rank], ranks.group
        if isinstance(options, dist.ReduceOptions):
            return collectives._started(dist.reduce_scatter(mine, of_all, group=group, async_op=True))
        return collectives._started(dist.all_gather(of_all, mine, group=group, async_op=True))

    # The methods are those with which torch's Python side asks for the GPU's driver.
    instead: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: DEVICE.index),
        (torch.cuda, "current_stream", lambda device=None: Stream(recorder.stream, recorder)),
        (torch.cuda, "Stream", lambda device=None: recorder.new_stream()),
        (torch.cuda, "stream", lambda stream: recorder.on_stream(stream.name)),
        (torch.cuda, "Event", lambda enable_timing=False: recorder.new_event()),
        (torch.accelerator, "is_available", lambda: True),  # so what should be pinned is
        (torch, "tensor", made),
        (Tensor, "tolist", tolist),
        (TorchCollectives, "_each", each),
        (collectives, "_started", lambda work: recorder.started(started(work))),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "get_rng_state", lambda device=None: None),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "synchronize", lambda device=None: recorder.waited("synchronize")),
        (FakeTensor, "tolist", read),
        (FakeTensor, "__float__", lambda tensor: float(tensor.item())),
        (FakeTensor, "copy_", lambda tensor, *args, **kwargs: torch.ops.aten.copy_.default(tensor, *args, **kwargs)),
        (FakeTensor, "contiguous", contiguous),
        (FakeTensor, "new", lambda tensor, *sizes: tensor.new_empty(sizes)),
        (FakeTensor, "__getitem__", _part_of),
        (FakeTensor, "__setitem__", lambda tensor, index, value: _part_of(tensor, index).copy_(torch.as_tensor(value))),
        (FakeTensor, "record_stream", lambda tensor, stream: recorder.record_stream(tensor, stream)),
        (FakeTensor, "data_ptr", lambda tensor: recorder.address(tensor)),
        (collectives, "_profiler_enabled", lambda: True),  # the labels of a step's parts pass the recorder
        # Without it, torch's optimizers would take these tensors one by one.
        (torch_optimizer, "_foreach_supported_types", [torch.Tensor, torch.nn.Parameter, FakeTensor]),
    ]
    with ExitStack() as stack:
        for owner, name, new in instead:
            stack.enter_context(replaced(owner, name, new))
        for mode in (torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), recorder):
            stack.enter_context(mode)
        yield


@dataclass(frozen=True)
class Stream:
    """A stream, on which everything is done at once; ``recorder`` hears which stream waits for which."""

    name: str
    recorder: Recorder

    def wait_stream(self, other: Stream) -> None:
        self.recorder.joined(self.name, other.name)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or self.recorder.new_event()
        event.record(self)
        return event


def _part_of(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` for numbers and slices; torch's own asks for the GPU's driver."""
    dim = 0
    places = index if isinstance(index, tuple) else (index,)
    for number, each in enumerate(places):
        if each is Ellipsis:
            dim = tensor.ndim - sum(more is not None for more in places[number + 1 :])
        elif each is None or isinstance(each, slice):
            cut = slice(None) if each is None else each
            tensor = tensor.unsqueeze(dim) if each is None else tensor
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, cut.start, cut.stop, cut.step or 1)
            dim += 1
        elif isinstance(each, int):
            tensor = tensor.select(dim, each)
        else:
            raise TypeError(f"a rehearsal knows numbers and slices as indices of tensors, found {each!r}")
    return tensor


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Within it, ``owner`` has ``new`` as ``name``."""
    own = vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


@contextmanager
def pretended(rank: int, world_size: int, others: Callable[[Any, int], list[Any]]) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` ranks of which the others are not there: collectives return at once, move nothing.

    ``others`` returns what every rank of a group gathers, given this rank's object and the number of ranks.
    """

    def gather(gathered: list[Any], mine: Any, group: Any = None) -> None:
        gathered[:] = others(mine, len(gathered))

    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    with replaced(dist, "all_gather_object", gather):
        try:
            yield
        finally:
            dist.destroy_process_group()
