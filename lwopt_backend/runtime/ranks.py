"""What the runtime asks of a group of ranks, and the group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective under way; ``wait`` returns when its result may be read on the current stream."""

    def wait(self) -> object: ...


class Collectives(Protocol):
    """What the runtime needs from a group of ranks. Every method is called by all ranks, in the same order."""

    rank: int
    world_size: int

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        """Start an all-to-all of two flat tensors; splits are in elements, one per rank, or empty for equal parts."""

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Start taking the largest of every element over all ranks, in place."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        """``received`` becomes all ranks' equally long ``mine``, in rank order."""

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        """All ranks' equally long ``mine``, in rank order, on the first rank; None on the others."""

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        """Every rank's ``value``, in rank order, on the first rank; None on the others."""


class PartCollectives(Collectives, Protocol):
    """What buffers whose parts belong to ranks need beside it. What returns ``Pending`` only starts."""

    def direct(self, device: torch.device) -> bool:
        """Whether parts on such a device travel best from rank to rank.

        gloo's reduce-scatter is an all-reduce inside, which moves twice the bytes, and it has no all-gather of unequal
        parts. Raises ValueError for a device that gloo cannot serve so.
        """

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> Pending:
        """Start sending flat tensors to ranks and receiving into others; between two ranks and a tag in order."""

    def reduce_scatter_parts(self, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        """``mine`` becomes the sum of all ranks' part for this one; ``whole`` holds equal parts end to end."""

    def all_gather_parts(self, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        """Every part becomes that of the rank it belongs to; ``whole`` holds equal parts end to end."""

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Sum ``tensor`` over all ranks, in place."""

    def all_reduce(self, tensor: Tensor) -> None:
        """The same, and wait for it."""

    def broadcast(self, tensor: Tensor) -> None:
        """``tensor`` becomes the first rank's."""


class Alone:
    """The collectives of a rank that shares nothing: what it sends, it receives."""

    rank, world_size = 0, 1

    def direct(self, device: torch.device) -> bool:
        return True

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
    ) -> Pending:
        assert not sends and not receives
        return _Done()

    def reduce_scatter_parts(self, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        mine.copy_(parts[0])
        return _Done()

    def all_gather_parts(self, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        return _Done()

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return _Done()

    def all_reduce(self, tensor: Tensor) -> None:
        return None

    def broadcast(self, tensor: Tensor) -> None:
        return None

    def barrier(self) -> None:
        return None

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        received.copy_(sent)
        return _Done()

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return _Done()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def all_gather(self, received: Tensor, mine: Tensor) -> None:
        received.copy_(mine)

    def gather_to_first(self, mine: Tensor) -> list[Tensor] | None:
        return [mine]

    def gather_objects_to_first(self, value: Any) -> list[Any] | None:
        return [value]


class _Done:
    def wait(self) -> None:
        return None
