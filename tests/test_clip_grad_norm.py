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
from tests.fsdp2 import whole
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.owned import optimizer_for, shares

CLASSES = (LayerWiseOptimizer, fsdp2.LayerWiseOptimizer, ModuleOptimizers)


def test_the_arguments_are_torchs() -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in list(inspect.signature(function).parameters.values())[1:]]

    for optimizer in CLASSES:
        assert arguments(optimizer.clip_grad_norm_) == arguments(nn.utils.clip_grad_norm_), optimizer


def after_backward(engine: str, precision: str = "fp32") -> tuple[nn.Module, Any]:
    """A model with whole gradients, and its optimizer."""
    if engine == "fsdp2":
        sharded = fsdp.shard("rows", precision)
        optimizer = fsdp.layer_wise(sharded.model)
        fsdp.backward(sharded, 0)
        return sharded.model, optimizer
    model = UnevenLM()
    optimizer = optimizer_for(model, keep_full_grads=True)
    model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
    optimizer.grad_norm()  # brings the gradients to all ranks
    return model, ModuleOptimizers({"model": optimizer}) if engine == "modules" else optimizer


@pytest.mark.parametrize("engine", ["fsdp2", "owned", "modules"])
@on_ranks(2)
def test_it_does_what_torchs_does(engine: str) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        model, optimizer = after_backward(engine)
        single = [nn.Parameter(whole(param)) for param in model.parameters()]
        for param, theirs in zip(model.parameters(), single):
            theirs.grad = whole(param.grad).clone()
        expected = nn.utils.clip_grad_norm_(single, 0.05, norm_type, True, foreach=False)
        norm = optimizer.clip_grad_norm_(0.05, norm_type, True, foreach=False)
        assert type(norm) is Tensor and norm.dtype == torch.float32 and norm.shape == ()
        assert abs(norm - expected) / expected <= 1e-6
        for param, theirs in zip(model.parameters(), single):
            torch.testing.assert_close(whole(param.grad), theirs.grad, rtol=0, atol=0.05 * 1e-6)


@on_ranks(2)
def test_the_norm_of_bf16_gradients_is_in_fp32_and_an_order_of_no_norm_is_refused() -> None:
    assert after_backward("fsdp2", "bf16 parameters")[1].clip_grad_norm_(1.0).dtype == torch.float32
    for engine in ("fsdp2", "owned"):
        with pytest.raises(ValueError, match="^norm_type: expected a number above 0, or inf; found 0$"):
            after_backward(engine)[1].clip_grad_norm_(1.0, 0)
