"""The only module that calls torch.distributed's collectives; also the labels of a step's parts in profiles."""

from __future__ import annotations

import math
import secrets
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Labels of a step's parts in profiles (``torch.profiler.record_function``), the same on every engine.

EXCHANGE_OUT = "lwopt: exchange out"
EXCHANGE_BACK = "lwopt: exchange back"
NORM = "lwopt: norm"


def of_rule(name: str) -> str:
    """The label of a matrix rule's computation."""
    return f"lwopt: rule {name}"


def of_elementwise(group: Mapping[str, Any]) -> str:
    """The label of an element-wise param group's step."""
    return f"lwopt: elementwise {rule_name(group)}"


def rule_name(group: Mapping[str, Any]) -> str:
    """The name of a param group's rule; for a rule that runs any optimizer, the class of that optimizer."""
    return str(group.get("class") or group.get("rule", "adamw"))


class WithoutCollectives(TorchDispatchMode):
    """Within it, a collective raises RuntimeError, because no other rank would take part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"expected a step of one rank alone, found the collective {func}")
        return func(*args, **(kwargs or {}))


# What ``optimizer.metrics()`` returns, measured in the same parts. Nothing is measured without a recorder.


class Recorder:
    """Measures all steps of this process while it records, since the last call of ``take``.

    Seconds on a GPU are those of its current stream, and are read from it in ``take``.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.sent = 0  # bytes, to other ranks
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._changes: dict[str, list[Tensor]] = {}  # by rule, a sum of squares and a number of elements
        self._tilts: dict[str, Tensor] = {}

    def add_change(self, rule: str, squares: Tensor, numel: int) -> None:
        """Count ``numel`` weights whose changes have this sum of squares."""
        if rule in self._changes:
            self._changes[rule][0] += squares
            self._changes[rule][1] += numel
        else:
            self._changes[rule] = [squares, torch.tensor(float(numel))]

    def add_update(self, rule: str, updates: Tensor) -> None:
        """Sample the first matrix that the rule updates: how far its shorter side is from orthogonal."""
        if rule not in self._tilts:
            update = updates.detach().view(-1, *updates.shape[-2:])[0].float()
            update = update.mT if update.shape[0] > update.shape[1] else update
            tilt = (update @ update.mT).sub_(torch.eye(len(update), device=update.device))
            self._tilts[rule] = tilt.norm() / math.sqrt(len(update))

    def add_events(self, part: str, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._events.append((part, begin, end))
        while len(self._events) > MOST_EVENTS:
            self._add_seconds(*self._events.popleft())

    def _add_seconds(self, part: str, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        end.synchronize()
        self.seconds[part] += begin.elapsed_time(end) / 1e3

    def take(self, everyone: Collectives) -> dict[str, Any]:
        """The record over all ranks: the mean, or the busiest rank's value. Starts a new one. Called on all ranks."""
        for entry in self._events:
            self._add_seconds(*entry)
        changes = {rule: (float(squares), float(numel)) for rule, (squares, numel) in self._changes.items()}
        tilts = {rule: float(tilt) for rule, tilt in self._tilts.items()}
        found = everyone.gather_objects((self.sent, dict(self.seconds), changes, tilts))
        sent, seconds, all_changes, all_tilts = (list(some) for some in zip(*found))
        self._begin()
        of_rule = {rule: [some[rule] for some in all_changes if rule in some] for some in all_changes for rule in some}
        sums = {rule: [sum(column) for column in zip(*rows)] for rule, rows in of_rule.items()}
        tilted = {rule: [some[rule] for some in all_tilts if rule in some] for some in all_tilts for rule in some}
        return {
            "update_rms": {rule: math.sqrt(squares / max(1.0, numel)) for rule, (squares, numel) in sums.items()},
            "orthogonality": {rule: sum(values) / len(values) for rule, values in tilted.items()},
            "exchange_bytes": max(sent),
            "seconds": {part: max(some.get(part, 0.0) for some in seconds) for part in PARTS},
        }


MOST_EVENTS = 10_000
PARTS = ("exchange", "rule", "elementwise", "norm")
RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()  # of optimizers that are recorded


def phase(label: str) -> AbstractContextManager[Any]:
    """A part of a step under its ``label``, in profiles and in recorders."""
    if RECORDERS:
        return _recorded(label)
    # Without a profiler, ``record_function`` costs 9 microseconds, and 150 on a CPU with full caches.
    return record_function(label) if _profiler_enabled() else _RecordFunctionFast(label)


@contextmanager
def _recorded(label: str) -> Iterator[None]:
    part = label.split()[1]
    if torch.cuda.is_initialized():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with record_function(label):
            yield
        end.record()
        for recorder in RECORDERS:
            recorder.add_events(part, begin, end)
        return
    started = time.perf_counter()
    with record_function(label):
        yield
    for recorder in RECORDERS:
        recorder.seconds[part] += time.perf_counter() - started


@contextmanager
def changing(rule: str, weights: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Context in which a rule changes these weights. A recorder compares them with a copy."""
    values = weights() if RECORDERS else ()
    before = [value.clone() for value in values]
    yield
    for recorder in RECORDERS if before else ():
        squares = sum((value.float() - old.float()).square().sum() for value, old in zip(values, before))
        recorder.add_change(rule, torch.as_tensor(squares), sum(value.numel() for value in values))


def sampled(rule: str, updates: Tensor) -> Tensor:
    """The updates of a rule, of which a recorder takes a sample."""
    for recorder in RECORDERS:
        recorder.add_update(rule, updates)
    return updates


def sending(nbytes: int) -> None:
    """Count bytes that this rank sends to others."""
    for recorder in RECORDERS:
        recorder.sent += nbytes


def all_reduce_nbytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of ``nbytes``: twice the shares of all other ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


class Pending(Protocol):
    """A collective in flight. After ``wait``, its result may be read on the current stream."""

    def wait(self) -> object: ...


class _All:
    """Several collectives, waited for together; an empty one is done at once."""

    def __init__(self, works: Sequence[Pending] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


DONE = _All()


Owned = Sequence[tuple[int, int, int]]  # rank, start and stop of parts of a buffer, in the same order on all ranks


class Collectives:
    """The collectives of one group of ranks. All ranks call the same methods in the same order.

    A method that returns ``Pending`` is asynchronous. This base class implements a group of one rank.
    """

    rank = 0
    world_size = 1

    @property
    def device(self) -> torch.device:
        """The device for small tensors without a device: the CPU, if the group has a backend for it."""
        return torch.device("cpu")

    @property
    def store(self) -> Store | None:
        """What all ranks read and write without meeting, if torch has it."""
        return None

    def part(self, parts: Sequence[Sequence[int]]) -> Collectives:
        """Collectives over this rank's part of the group; every rank is in one of ``parts``, by its number in it."""
        return self

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        """Start an all-to-all of two flat tensors; splits are in elements, one per rank, or empty for equal parts."""
        received.copy_(sent)
        return DONE

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Start an element-wise MAX over all ranks, in place."""
        return DONE

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""
        return [value]

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """Gather all ranks' ``mine``, of equal length, into ``received`` in rank order."""
        received.copy_(mine)

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        """All ranks' ``mine``, of equal length, in rank order on the first rank; None on the others."""
        return [mine]

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        """Every rank's ``value``, in rank order on the first rank; None on the others."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    # For buffers that are cut into one part per rank: equal ones in rank order, or those that some ranks own

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError if the backend for ``device`` is gloo and the device is not the CPU: gloo has no
        reduce-scatter there."""

    def sends(self, tensor: Tensor) -> bool:
        """Whether the group has a backend for the tensor's device, and the tensor is dense."""
        return True

    def reduce_scatter_parts(self, mine: Tensor, buffer: Tensor, owned: Owned | None) -> Pending:
        """Start summing all ranks' parts for this rank into ``mine``; ``owned`` is None if parts are equal.

        Afterwards the parts of other ranks in ``buffer`` have any values.
        """
        mine.copy_(buffer)
        return DONE

    def all_gather_parts(self, buffer: Tensor, owned: Owned | None = None) -> Pending:
        """Start filling every part of ``buffer`` with its owner's values; ``owned`` is None if parts are equal."""
        return DONE

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start summing ``tensor`` over all ranks, in place."""
        return DONE

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place."""

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first rank's ``tensor`` to all ranks, in place."""

    def start_broadcast(self, tensor: Tensor) -> Pending:
        """Start copying the first rank's ``tensor`` to all ranks, in place."""
        return DONE


# torch 2.13 renamed both functions, and warns about their old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Groups made here, by the default group at that time, by their ranks, and by the ranks of the groups along which they
# met. If all of these are equal, every rank that would take part in making a group finds it here. References are weak:
# after destroy_process_group() a group's threads must end before Python does. A thread that then takes the
# interpreter's lock, to free a tensor, ends the process: "terminate called without an active exception".
_OwnGroups = dict[tuple[Any, ...], "weakref.ref[dist.ProcessGroup]"]
_OWN_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, _OwnGroups] = weakref.WeakKeyDictionary()


def _key(ranks: Sequence[int], met: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    return (tuple(ranks), tuple(map(tuple, met)))


def _own_group(ranks: Sequence[int], met: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The group of these ranks that was made before, if the ranks met along groups of the same ranks."""
    found = _OWN_GROUPS.get(_world(), {}).get(_key(ranks, met))
    return None if found is None else found()


def _keep(ranks: Sequence[int], met: Sequence[Sequence[int]], group: dist.ProcessGroup) -> None:
    _OWN_GROUPS.setdefault(_world(), {})[_key(ranks, met)] = weakref.ref(group)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _splits() -> bool:
    """Whether NCCL makes a group by splitting the default group's communicator, which takes all of its ranks."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def _new_group(ranks: Sequence[int], along: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group of these ranks, which ``along`` connects. Called on all of them, and on no other rank.

    torch names a group that only its members make by its ranks and by this rank's count of groups. Ranks may have
    different counts, and would wait for each other under different names. Since torch 2.14 such a group also increases
    the count that names the groups that all ranks make. So the ranks agree on a name here, without a count.
    """
    drawn = secrets.token_hex(8)
    for group in along:
        of_all: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_all, drawn, group=group)
        drawn = max(of_all)
    # Groups that meet here at once share what was drawn, but no two have a rank in common.
    name = dist.distributed_c10d._process_group_name
    dist.distributed_c10d._process_group_name = lambda *_, **__: f"lwopt {drawn} {min(ranks)}"  # type: ignore[assignment]
    try:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=_timeout(along[0]), use_local_synchronization=True)
    finally:
        dist.distributed_c10d._process_group_name = name
    return made


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout, if its backend has one; None means torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


class TorchCollectives(Collectives):
    """Collectives over a torch.distributed process group (``None`` is the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self._gloo: dict[torch.device, bool] = {}
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group as given. Raises RuntimeError if it was destroyed."""
        if self._group is None:
            return None
        if (group := self._group()) is None:
            raise RuntimeError(
                "expected the optimizer's process group, found it destroyed; make the optimizer again in a new one"
            )
        return group

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.group or _world()

    @property
    def device(self) -> torch.device:
        cpu, accelerator = torch.device("cpu"), torch.accelerator.current_accelerator()
        return cpu if accelerator is None or cpu in self.process_group._device_types else accelerator

    @property
    def store(self) -> Store | None:
        default = getattr(dist.distributed_c10d, "_get_default_store", None)
        return None if default is None else default()

    def ranks(self) -> list[int]:
        """The global ranks of the group, in its order."""
        return dist.get_process_group_ranks(self.process_group)

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu" and self._is_gloo(device):
            raise ValueError(f"expected NCCL for parameters on {device}, found gloo in the process group; use NCCL")

    def _is_gloo(self, device: torch.device) -> bool:
        if device not in self._gloo:
            self._gloo[device] = self.process_group._get_backend(device).name() == "gloo"
        return self._gloo[device]

    def sends(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return False
        try:
            self.process_group._get_backend(tensor.device)
        except RuntimeError:  # "No backend type associated with device type cpu"
            return False
        return True

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        into, out = list(receive_splits) or None, list(send_splits) or None
        return _started(dist.all_to_all_single(received, sent, into, out, group=self.group, async_op=True))

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return _started(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True))

    @classmethod
    def over(cls, ranks: Sequence[int], along: Sequence[dist.ProcessGroup]) -> TorchCollectives:
        """Collectives over a new process group of these global ranks. Called on all of them; other ranks need not.

        ``along`` are existing groups that together connect the ranks, one per dimension of their mesh. The new group is
        cached, because it costs a communicator, threads and memory. Its ranks are in ascending order. If NCCL cannot
        create it without the other ranks, the group in ``along`` that has these ranks is used; without one, ValueError.
        """
        ranks = sorted(ranks)
        met = [dist.get_process_group_ranks(group) for group in along]
        if (cached := _own_group(ranks, met)) is not None:
            return cls(cached)
        if not _splits():
            group = _new_group(ranks, along)
        elif len(ranks) == dist.get_world_size():
            group = dist.new_group(ranks, timeout=_timeout(along[0]))
        elif met == [ranks]:
            group = along[0]
        else:
            raise ValueError(
                f"expected a communicator for ranks {ranks}, some of {dist.get_world_size()}; none can be made, "
                "because init_process_group was given a device_id: leave it out"
            )
        _keep(ranks, met, group)
        return cls(group)

    def part(self, parts: Sequence[Sequence[int]]) -> TorchCollectives:
        """Collectives over this rank's part of the group. Every rank, by its number in the group, is in one of
        ``parts``. Called on all ranks of the group; raises ValueError as ``over`` does."""
        numbers, along = self.ranks(), [self.process_group]
        of_parts = [sorted(numbers[rank] for rank in part) for part in parts]
        mine = next(ranks for ranks in of_parts if numbers[self.rank] in ranks)
        if _splits() and len(mine) < len(numbers) == dist.get_world_size() and _own_group(mine, [numbers]) is None:
            made = {tuple(ranks): dist.new_group(ranks, timeout=_timeout(along[0])) for ranks in of_parts}
            _keep(mine, [numbers], made[tuple(mine)])
        return TorchCollectives.over(mine, along)

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        _all_gather(received, mine, group=self.group)

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        received = [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(mine, received, group=self.group, group_dst=0)
        return received

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def reduce_scatter_parts(self, mine: Tensor, buffer: Tensor, owned: Owned | None) -> Pending:
        if owned is None:
            return _started(_reduce_scatter(mine, buffer, group=self.group, async_op=True))
        parts = {rank: buffer[start:stop] for rank, start, stop in owned}
        if self.rank in parts:
            parts[self.rank] = mine.copy_(parts[self.rank])
        return self._each(self.process_group.reduce, dist.ReduceOptions(), parts)

    def all_gather_parts(self, buffer: Tensor, owned: Owned | None = None) -> Pending:
        if owned is None:
            mine = buffer.view(self.world_size, -1)[self.rank]
            return _started(_all_gather(buffer, mine, group=self.group, async_op=True))
        parts = {rank: buffer[start:stop] for rank, start, stop in owned}
        return self._each(self.process_group.broadcast, dist.BroadcastOptions(), parts)

    def _each(self, start: Callable[..., Any], options: Any, parts: Mapping[int, Tensor]) -> Pending:
        """Start a reduction to each of these ranks, or a broadcast from it; on NCCL they are one launch.

        So are torch's collectives of lists, but these walk all ranks, of which few own a part of a bucket. The group's
        methods are what ``dist.reduce`` and ``dist.broadcast`` call, in a third of the time.
        """
        group, device = self.process_group, next(iter(parts.values())).device
        together = len(parts) > 1 and not self._is_gloo(device)
        works, options.asyncOp = [], True
        if together:
            group._start_coalescing(device)
        for rank, part in parts.items():
            options.rootRank = rank
            works.append(start([part], options))
        if together:
            return _started(group._end_coalescing(device))
        return _All([_started(work) for work in works])

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return _started(dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.group, group_src=0)

    def start_broadcast(self, tensor: Tensor) -> Pending:
        return _started(dist.broadcast(tensor, group=self.group, group_src=0, async_op=True))

    def barrier(self) -> None:
        dist.barrier(self.group)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with torch.no_grad():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with torch.no_grad():
            dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        with torch.no_grad():
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


def _started(work: Any) -> Pending:
    """torch's handle, which is None on a rank outside the group."""
    assert isinstance(work, dist.Work)
    return work


def ranks_of(group: dist.ProcessGroup | None = None, name: str = "process_group") -> Collectives:
    """Collectives over ``group``, by default of all ranks; without torch.distributed, of this process alone.

    Raises TypeError if ``group`` is not a process group, ValueError on a rank outside it. ``name`` is the option's.
    """
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        of_mesh = "; pass its group, mesh.get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(
            f"{name}: expected None or a process group, such as torch.distributed.new_group(ranks) returns; found "
            f"{group!r}{of_mesh}"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"{name}: expected rank {dist.get_rank()} in it, found it outside; make the optimizer on the group's ranks "
            "only"
        )
    return TorchCollectives(group) if group is not None or dist.is_initialized() else Collectives()
