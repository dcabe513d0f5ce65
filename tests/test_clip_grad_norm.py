"""``clip_grad_norm_`` is torch's on every engine: its arguments, what it returns, what it leaves of gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.integrations import fsdp2
from tests import fsdp2 as fsdp
from tests.models import UnevenLM
from tests.owned import optimizer_for, shares
from tests.ranks import RankPool

CLASSES = (LayerWiseOptimizer, fsdp2.LayerWiseOptimizer, ModuleOptimizers)


@pytest.mark.parametrize("optimizer", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_the_arguments_are_torchs(optimizer: Any) -> None:
    ours = list(inspect.signature(optimizer.clip_grad_norm_).parameters.values())[1:]
    torchs = list(inspect.signature(torch.nn.utils.clip_grad_norm_).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in torchs]


def clipped(engine: str, norm_type: float) -> tuple[Tensor, float, float]:
    """What it returns, how far that is from torch's on one process, and how far the gradients are, in parts of it."""
    if engine == "fsdp2":
        sharded = fsdp.shard("rows", "fp32")
        model, optimizer = sharded.model, fsdp.layer_wise(sharded.model)
        fsdp.backward(sharded, 0)
    else:
        model = UnevenLM()
        optimizer = optimizer_for(model, keep_full_grads=True)
        model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.grad_norm()  # brings the gradients to all ranks
    if engine == "modules":
        optimizer = ModuleOptimizers({"model": optimizer})
    single = [nn.Parameter(fsdp.whole(param)) for param in model.parameters()]
    for param, theirs in zip(model.parameters(), single):
        theirs.grad = fsdp.whole(param.grad).clone()
    expected = torch.nn.utils.clip_grad_norm_(single, 0.05, norm_type, True, foreach=False)
    norm = optimizer.clip_grad_norm_(0.05, norm_type, True, foreach=False)
    left = [float((fsdp.whole(p.grad) - t.grad).abs().max()) for p, t in zip(model.parameters(), single)]
    return norm, float(abs(norm - expected) / expected), max(left) / 0.05


@pytest.mark.parametrize("engine", ["fsdp2", "owned", "modules"])
def test_it_does_what_torchs_does(ranks: RankPool, engine: str) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        for norm, from_norm, from_gradients in ranks.run(clipped, engine, norm_type):
            assert type(norm) is Tensor and norm.dtype == torch.float32 and norm.shape == ()
            assert from_norm <= 1e-6 and from_gradients <= 1e-6


def norm_of(engine: str, precision: str, norm_type: float) -> torch.dtype:
    sharded = fsdp.shard("rows", precision)
    optimizer = fsdp.layer_wise(sharded.model) if engine == "fsdp2" else optimizer_for(UnevenLM())
    fsdp.backward(sharded, 0)
    return optimizer.clip_grad_norm_(1.0, norm_type).dtype


def test_the_norm_of_bf16_gradients_is_in_fp32(ranks: RankPool) -> None:
    assert ranks.run(norm_of, "fsdp2", "bf16 parameters", 2.0) == [torch.float32] * 2


@pytest.mark.parametrize("engine", ["fsdp2", "owned"])
def test_an_order_of_no_norm_is_refused(ranks: RankPool, engine: str) -> None:
    for error in ranks.errors(norm_of, engine, "fp32", 0):
        assert error == "ValueError: norm_type: expected a number above 0, or inf; found 0"
