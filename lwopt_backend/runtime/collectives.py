"""The one door to torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
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
        """Start an uneven all-to-all of two flat tensors; splits are in elements, one per rank."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order, on every rank."""


class TorchCollectives:
    """Collectives over a torch.distributed process group (``None`` is the default group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> Pending:
        return dist.all_to_all_single(
            received, sent, list(receive_splits), list(send_splits), group=self.group, async_op=True
        )

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with torch.no_grad():
            dist.all_gather_object(values, value, group=self.group)
        return values
