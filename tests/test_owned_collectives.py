"""The collectives that NCCL takes, on gloo: reduce-scatter and all-gather, of equal parts and of unequal ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.maximum import largest_of_all
from lwopt_backend.runtime.ranks import Pending
from tests.models import UnevenLM
from tests.owned import difference, exact_sums, optimizer_for, reference, train
from tests.ranks import RankPool


@contextlib.contextmanager
def not_from_rank_to_rank() -> Iterator[dict[str, int]]:
    """Groups that are not ``direct``, as NCCL's; counts collectives. gloo lacks one, which broadcasts replace."""
    calls: dict[str, int] = {}
    before = TorchCollectives.direct, TorchCollectives.reduce_scatter_parts, TorchCollectives.all_gather_parts

    def direct(self: TorchCollectives, device: torch.device) -> bool:
        return False

    def reduce_scatter(self: TorchCollectives, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        name = "reduce_scatter uneven" if whole is None else "reduce_scatter_tensor"
        calls[name] = calls.get(name, 0) + 1
        return before[1](self, mine, parts, whole)

    def all_gather(self: TorchCollectives, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        name = "all_gather uneven" if whole is None else "all_gather_into_tensor"
        calls[name] = calls.get(name, 0) + 1
        if whole is not None:
            return before[2](self, parts, whole)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=self.group, group_src=rank)
        return dist.barrier(self.group, async_op=True)

    TorchCollectives.direct = direct  # type: ignore[method-assign]
    TorchCollectives.reduce_scatter_parts = reduce_scatter  # type: ignore[method-assign]
    TorchCollectives.all_gather_parts = all_gather  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        (
            TorchCollectives.direct,  # type: ignore[method-assign]
            TorchCollectives.reduce_scatter_parts,  # type: ignore[method-assign]
            TorchCollectives.all_gather_parts,  # type: ignore[method-assign]
        ) = before


def trained(layout: str, **options: Any) -> tuple[float, dict[str, int]]:
    with not_from_rank_to_rank() as calls:
        model = exact_sums(UnevenLM())
        train(model, optimizer_for(model, layout=layout, **options), 4, accumulation=2)
    return difference(model, reference(dist.get_world_size(), 4, accumulation=2)), calls


@pytest.mark.parametrize("options", [{}, {"group_size": 2}, {"keep_full_grads": True}], ids=str)
@pytest.mark.parametrize("layout", ["padded", "compact", "auto"])
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_collectives_of_parts_equal_one_process(ranks: RankPool, layout: str, options: dict[str, Any]) -> None:
    for off, calls in ranks.run(trained, layout, **options):
        assert off == 0.0
        if layout == "padded":
            assert set(calls) == {"reduce_scatter_tensor", "all_gather_into_tensor"}
        if layout == "compact":
            assert "reduce_scatter uneven" in calls and "all_gather uneven" in calls


def direct_of_unknown_device() -> str:
    """gloo serves CPU tensors from rank to rank; tensors elsewhere would be read as if they were in its memory."""
    try:
        TorchCollectives().direct(torch.device("cuda"))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_gloo_is_refused_for_other_devices(ranks: RankPool) -> None:
    assert all("cuda" in error for error in ranks.run(direct_of_unknown_device))


def largest_with_a_nan_on(rank: int) -> float:
    mine = float("nan") if dist.get_rank() == rank else float(dist.get_rank())
    return float(largest_of_all(TorchCollectives(), torch.tensor(mine)))


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_the_largest_of_all_ranks_is_nan_whichever_rank_has_one(ranks: RankPool) -> None:
    """gloo's own maximum compares with it and goes on."""
    assert ranks.run(largest_with_a_nan_on, -1) == [2.0] * 3
    for rank in range(3):
        assert all(map(math.isnan, ranks.run(largest_with_a_nan_on, rank)))
