"""Norms and zeros of gradients that only owners have: every element counts once, as on one process."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import UnevenLM
from tests.owned import BUCKET_MB, exact_sums, optimizer_for, shares
from tests.ranks import RankPool

SUBSETS: dict[str, Any] = {
    "all": "*",
    "matrices of the layers": "layers.*.weight",
    "two globs": ["embedding.*", "*bias"],
    "one parameter": "gate.weight",
}


def halved(grad: Tensor) -> Tensor:
    """Half of the elements exactly zero, the same ones on every rank."""
    return grad * (torch.arange(grad.numel()).view(grad.shape) % 2)


def with_zeros(tied: bool) -> nn.Module:
    model = exact_sums(UnevenLM(tied=tied))
    for name in ("layers.2.weight", "layers.2.bias", "embedding.weight"):
        model.get_parameter(name).register_hook(halved)
    return model


def mean_gradients(tied: bool) -> dict[str, Tensor]:
    model = with_zeros(tied)
    for tokens, targets in shares(0, dist.get_world_size()):
        model(tokens, targets).backward()
    return {name: param.grad / dist.get_world_size() for name, param in model.named_parameters()}


def measured(tied: bool, **options: Any) -> list[dict[str, tuple[float, ...]]]:
    """Ours and one process's, by subset: the norms of order 2, 1, 3 and infinity, and the zeros."""
    model = with_zeros(tied)
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB, **options)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    grads = mean_gradients(tied)
    ours, theirs = {}, {}
    for subset, names in SUBSETS.items():
        norms = [float(optimizer.grad_norm(names, norm_type=order)) for order in (2.0, 1.0, 3.0, float("inf"))]
        ours[subset] = (*norms, optimizer.count_zeros(names))
        globs = [names] if isinstance(names, str) else names
        flat = torch.cat([g.flatten() for n, g in grads.items() if any(fnmatchcase(n, glob) for glob in globs)])
        norms = [float(torch.linalg.vector_norm(flat.double(), order)) for order in (2.0, 1.0, 3.0, float("inf"))]
        theirs[subset] = (*norms, int((flat == 0).sum()))
    return [ours, theirs]


MODES = [{}, {"keep_full_grads": True}]


def check(ranks: RankPool, tied: bool, **options: Any) -> None:
    for ours, theirs in ranks.run(measured, tied, **options):
        for subset, (*norms, zeros) in theirs.items():
            assert ours[subset][:-1] == pytest.approx(norms, rel=1e-6), subset
            assert ours[subset][-1] == zeros and (subset == "one parameter" or zeros > 0), subset


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_norms_and_zeros_equal_one_process(ranks: RankPool, layout: str, tied: bool, options: dict[str, Any]) -> None:
    check(ranks, tied, layout=layout, **options)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_instances_count_every_element_once(ranks: RankPool, group_size: int, options: dict[str, Any]) -> None:
    check(ranks, False, group_size=group_size, **options)


def clipped(max_norm: float) -> tuple[float, float, float]:
    """The norm that clipping returns, the norm after it, and torch's."""
    model = with_zeros(False)
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    before = float(optimizer.clip_grad_norm_(max_norm))
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in mean_gradients(False).values()]
    for param, grad in zip(params, mean_gradients(False).values()):
        param.grad = grad
    return before, float(optimizer.grad_norm()), float(torch.nn.utils.clip_grad_norm_(params, max_norm))


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_scales_to_the_norm_asked_for(ranks: RankPool, max_norm: float) -> None:
    for before, after, torchs in ranks.run(clipped, max_norm):
        assert before == pytest.approx(torchs, rel=1e-5)
        assert after == pytest.approx(min(max_norm, before), rel=1e-4)


def a_glob_that_matches_nothing() -> None:
    model = with_zeros(False)
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    optimizer.grad_norm("layer.*")


def test_a_glob_that_matches_nothing_is_an_error(ranks: RankPool) -> None:
    for error in ranks.errors(a_glob_that_matches_nothing):
        assert "'layer.*'" in error and "layers." in error, error


def norms_with_a_nan_on(rank: int) -> tuple[float, float]:
    """Of order infinity and 2, where one rank's gradient has a NaN."""
    model = with_zeros(False)
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    optimizer.grad_norm()
    if dist.get_rank() == rank:
        grads = [grad for bucket in optimizer.core.manager.buckets for grad in bucket.owned_grads()]
        grads[0][0] = float("nan")
    found = float(optimizer.grad_norm(norm_type=float("inf"))), float(optimizer.grad_norm())
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_no_norm_hides_a_nan(ranks: RankPool) -> None:
    for rank in range(3):
        assert all(math.isnan(norm) for norms in ranks.run(norms_with_a_nan_on, rank) for norm in norms)
