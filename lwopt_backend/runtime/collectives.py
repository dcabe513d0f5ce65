"""The one door to torch.distributed: collectives, ranks, and what they are called in profiles."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# What the parts of a step are called in profiles (``torch.profiler.record_function``), on every engine.

EXCHANGE_OUT = "lwopt: exchange out"
EXCHANGE_BACK = "lwopt: exchange back"
NORM = "lwopt: norm"


def of_rule(name: str) -> str:
    """A matrix rule at work on whole matrices."""
    return f"lwopt: rule {name}"


def of_elementwise(group: Mapping[str, Any]) -> str:
    """The step of an element-wise param group."""
    return f"lwopt: elementwise {rule_name(group)}"


def rule_name(group: Mapping[str, Any]) -> str:
    """The name of a param group's rule; of one that runs any optimizer, that optimizer's class."""
    return str(group.get("class", group["rule"]))


class Pending(Protocol):
    """A collective under way; ``wait`` returns when its result may be read on the current stream."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


class Collectives:
    """What the runtime needs from a group of ranks. Every method is called by all ranks, in the same order.

    What returns ``Pending`` only starts. The methods here are those of a group of one, which receives what it sends.
    """

    rank = 0
    world_size = 1

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        """Start an all-to-all of two flat tensors; splits are in elements, one per rank, or empty for equal parts."""
        received.copy_(sent)
        return _Done()

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Start taking the largest of every element over all ranks, in place."""
        return _Done()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""
        return [value]

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """``received`` becomes all ranks' equally long ``mine``, in rank order."""
        received.copy_(mine)

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        """All ranks' equally long ``mine``, in rank order, on the first rank; None on the others."""
        return [mine]

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        """Every rank's ``value``, in rank order, on the first rank; None on the others."""
        return [value]

    def barrier(self) -> None:
        """Return when all ranks are here."""


class PartCollectives(Collectives):
    """What buffers whose parts belong to ranks need beside it."""

    def direct(self, device: torch.device) -> bool:
        """Whether parts on such a device travel best from rank to rank.

        gloo's reduce-scatter is an all-reduce inside, which moves twice the bytes, and it has no all-gather of unequal
        parts. Raises ValueError for a device that gloo cannot serve so.
        """
        return True

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> Pending:
        """Start sending flat tensors to ranks and receiving into others; between two ranks and a tag in order."""
        assert not sends and not receives
        return _Done()

    def reduce_scatter_parts(self, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        """``mine`` becomes the sum of all ranks' part for this one; ``whole`` holds equal parts end to end."""
        mine.copy_(parts[0])
        return _Done()

    def all_gather_parts(self, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        """Every part becomes that of the rank it belongs to; ``whole`` holds equal parts end to end."""
        return _Done()

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Sum ``tensor`` over all ranks, in place."""
        return _Done()

    def all_reduce(self, tensor: Tensor) -> None:
        """The same, and wait for it."""

    def broadcast(self, tensor: Tensor) -> None:
        """``tensor`` becomes the first rank's."""


class Alone(PartCollectives):
    """The collectives of a rank that shares nothing."""


# torch 2.13 renamed them and warns about the names that older versions have.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_OWN_GROUPS: list[tuple[Any, list[int], dist.ProcessGroup]] = []  # the default group, ranks, and the group for them


def _even_out(along: Sequence[dist.ProcessGroup]) -> None:
    """Make the ranks that ``along`` connects know equally many groups.

    torch names a group that only its members make by their ranks and by how many groups this rank knows. If ranks know
    different numbers of groups they would wait for each other under different names. A group of one takes nothing.
    """
    known = dist.distributed_c10d._world.pg_names
    most = len(known)
    for group in along:
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, most, group=group)
        most = max(counts)
    while len(known) < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """What the group waits for its members, where its backend says; None is torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


class TorchCollectives(PartCollectives):
    """Collectives over a torch.distributed process group (``None`` is the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        tell_failures()

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self.group or dist.group.WORLD
        assert group is not None
        return group

    def ranks(self) -> list[int]:
        """The global ranks of the group, in its order."""
        return dist.get_process_group_ranks(self.process_group)

    def direct(self, device: torch.device) -> bool:
        backend = self.process_group._get_backend(device).name()
        if backend == "gloo" and device.type != "cpu":
            raise ValueError(f"parameters are on {device}, for which the process group has gloo; use NCCL there")
        return backend == "gloo"

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        into, out = list(receive_splits) or None, list(send_splits) or None
        return _started(dist.all_to_all_single(received, sent, into, out, group=self.group, async_op=True))

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return _started(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True))

    @classmethod
    def over(cls, ranks: Sequence[int], along: Sequence[dist.ProcessGroup]) -> TorchCollectives:
        """Over a process group of its own for these global ranks, which all of them call for, and no others have to.

        ``along`` are existing groups, one per dimension of the mesh of these ranks, through which all of them reach
        each other. Made once and kept: a process group is a communicator, threads and memory. Ranks in it count from
        the lowest. Where NCCL cannot make one without the other ranks, the mesh's only dimension lends its own.
        """
        ranks = sorted(ranks)
        for world, members, group in _OWN_GROUPS:
            if world is dist.group.WORLD and members == ranks:
                return cls(group)
        if len(ranks) == dist.get_world_size():
            group = dist.new_group(ranks, timeout=_timeout(along[0]))
        elif getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            # NCCL splits the default group's communicator then, which takes all ranks of it.
            if len(along) > 1:
                raise ValueError(
                    f"no communicator can be made for ranks {ranks}, some of {dist.get_world_size()}: "
                    "init_process_group was given a device_id; leave it out"
                )
            group = along[0]
        else:
            _even_out(along)
            group = dist.new_group(ranks, timeout=_timeout(along[0]), use_local_synchronization=True)
        _OWN_GROUPS.append((dist.group.WORLD, ranks, group))
        return cls(group)

    def reduce_scatter(self, mine: Tensor, sent: Tensor) -> None:
        """Sum ``sent`` over all ranks; ``mine`` becomes this rank's equal part of the sum."""
        _reduce_scatter(mine, sent, group=self.group)

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        _all_gather(received, mine, group=self.group)

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        received = [torch.empty_like(mine) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(mine, received, group=self.group, group_dst=0)
        return received

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> Pending:
        works = [dist.irecv(into, group=self.group, group_src=rank, tag=tag) for rank, into in receives]
        works += [dist.isend(part, group=self.group, group_dst=rank, tag=tag) for rank, part in sends]
        return _All([_started(work) for work in works])

    def reduce_scatter_parts(self, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        if whole is not None:
            return _started(_reduce_scatter(mine, whole, group=self.group, async_op=True))
        return _started(dist.reduce_scatter(mine, list(parts), group=self.group, async_op=True))

    def all_gather_parts(self, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        if whole is not None:
            return _started(_all_gather(whole, parts[self.rank], group=self.group, async_op=True))
        return _started(dist.all_gather(list(parts), parts[self.rank], group=self.group, async_op=True))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return _started(dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.group, group_src=0)

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


def _started(work: Any) -> Pending:
    """What torch starts; it has None for a rank that is not in the group."""
    assert isinstance(work, dist.Work)
    return work


class _All:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def ranks_of(group: dist.ProcessGroup | None = None, name: str = "process_group") -> PartCollectives:
    """Over a process group, by default of all ranks; of this process alone where torch.distributed is not in use.

    Raises TypeError for what is no process group, ValueError on a rank that the group does not have. ``name`` is the
    option's.
    """
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        of_mesh = "; pass its group, mesh.get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(
            f"{name}: expected None or a process group, such as torch.distributed.new_group(ranks) returns; found "
            f"{group!r}{of_mesh}"
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group given; make the optimizer on the group's ranks only"
        )
    return TorchCollectives(group) if group is not None or dist.is_initialized() else Alone()


# A rank that ends with an exception tells the others of it, who then end with an error of their transport.

_FIRST_FAILURE = "lwopt: the first failure"


@functools.cache
def tell_failures() -> None:
    """From now on an exception that ends this process is told to the other ranks, and printed by those that end, too.

    The store is that of torch.distributed. Where the first rank's process keeps it, nobody hears of that rank's.
    """
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception) and dist.is_initialized():
            mine = f"rank {dist.get_rank()} failed with {error!r}"
            first = _of_store(lambda store: store.compare_set(_FIRST_FAILURE, "", mine).decode())
            if first not in (None, mine):
                print(f"lwopt_backend: {first} before this:", file=sys.stderr)
        before(kind, error, trace)

    sys.excepthook = tell


def first_failure() -> str | None:
    """What has ended a rank, as far as it could tell."""
    return _of_store(lambda store: store.get(_FIRST_FAILURE).decode() if store.check([_FIRST_FAILURE]) else None)


def _of_store(do: Callable[[Any], str | None]) -> str | None:
    """None, too, where the store is gone with the process that kept it."""
    try:
        return do(dist.distributed_c10d._get_default_store()) if dist.is_initialized() else None
    except RuntimeError:
        return None


def join(rank: int, world_size: int, meeting_point: str) -> TorchCollectives:
    """Make this process one of ``world_size`` ranks that meet over a file; gloo, for trials on one machine."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size)
    return TorchCollectives()


def leave() -> None:
    """End what ``join`` began."""
    dist.destroy_process_group()


def largest_of_all(collectives: Collectives, value: Tensor) -> Tensor:
    """The largest of every rank's ``value``, without dimensions; NaN if any rank's is. Called on all ranks.

    gloo's MAX compares, and so forgets a NaN or what came before it, by the order of ranks.
    """
    both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), value.isnan().to(value.dtype)])
    collectives.all_reduce_max(both).wait()
    return torch.where(both[1] > 0, math.nan, both[0])


class Presence:
    """Starts the exchange when made; waits for it only where another rank's flag is needed.

    A rank that has a gradient knows that it will be used; one that has not asks whether another has. So where all ranks
    have all gradients nobody waits. Made on all ranks of the group.

    ``number``, below 2^62, travels along: ``alike`` says whether all ranks gave the same.
    """

    def __init__(
        self,
        collectives: Collectives,
        here: Sequence[bool],
        device: torch.device,
        more: Tensor | None = None,
        number: int = 0,
    ) -> None:
        self._here = list(here)
        high, low = divmod(number, 2**31)
        halves = [high, -high, low, -low]  # all ranks have one number if the largest is also the smallest
        self._flags = torch.tensor([*halves, *self._here], dtype=torch.int32, device=device)
        if more is not None:
            self._flags = torch.cat([self._flags, more])
        self._pending: Pending | None = collectives.all_reduce_max(self._flags)
        self._found: list[int] | None = None

    def __call__(self, index: int) -> bool:
        """Whether any rank has a gradient for parameter ``index``."""
        return self._here[index] or bool(self.anywhere()[index])

    def anywhere(self) -> list[int]:
        """Per parameter, and per flag of ``more`` (int32) after them, 1 if any rank has it."""
        return self._largest()[4:]

    @property
    def alike(self) -> bool:
        """Whether all ranks gave one ``number``."""
        high, minus_high, low, minus_low = self._largest()[:4]
        return high == -minus_high and low == -minus_low

    def _largest(self) -> list[int]:
        if self._found is None:
            self.finish()
            self._found = self._flags.tolist()
        return self._found

    def finish(self) -> None:
        """Wait for the collective, whether anybody asked or not."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
