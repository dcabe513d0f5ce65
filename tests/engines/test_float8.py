"""Linear layers that compute in float8 over bf16 weights, as torchao's do. The product is that of torch._scaled_mm,
written out: oneDNN has none for CPUs without AVX."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lwopt_backend import LayerWiseOptimizer
from tests.support import fsdp2, zero
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.references import MUON

FLOAT8 = torch.float8_e4m3fn


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """In float8, and the scale of the whole tensor."""
    scale = tensor.abs().max().float() / torch.finfo(FLOAT8).max
    return (tensor / scale).to(FLOAT8), scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (left, one), (right, other) = _rounded(x), _rounded(weight)
        return (left.float() @ right.t().float() * one * other).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = Float8Linear(32, 48, bias=False), Float8Linear(48, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(torch.relu(self.up(x))).float().square().mean()
        return loss


def rows(step: int) -> Tensor:
    """The same on all ranks, so that their mean is exact."""
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).bfloat16()


def trained_alone() -> dict[str, Tensor]:
    """torch.optim.Muon on fp32 masters of the bf16 weights."""
    model, masters = Model().bfloat16(), dict(Model().bfloat16().float().named_parameters())
    optimizer = torch.optim.Muon(masters.values(), **MUON)
    for step in range(3):
        model.load_state_dict(masters)
        model(rows(step)).backward()
        for name, param in model.named_parameters():
            masters[name].grad, param.grad = param.grad.float(), None
        optimizer.step()
    return {name: master.detach().bfloat16() for name, master in masters.items()}


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "zero 1", "zero 2", "zero 3", "owned 1"])
@on_ranks(2)
def test_layers_that_compute_in_float8_train_as_in_one_process(engine: str) -> None:
    model = Model().bfloat16()
    storage, _, stage = engine.partition(" ")
    if stage:
        with zero.engine_for(zero.settings_for(storage, int(stage), "bf16", rows=1), model) as made:
            for step in range(3):
                made.backward(made(rows(step)))
                made.step()
            weights = zero.full_weights(made)
    else:
        if engine == "fsdp2":
            fully_shard(model.float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = LayerWiseOptimizer(model, **MUON, report=False)
        for step in range(3):
            model(rows(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine == "plain":
            optimizer.synchronize()
        weights = fsdp2.weights_of(model) if engine == "fsdp2" else dict(model.named_parameters())
    assert largest_difference({name: weight.bfloat16() for name, weight in weights.items()}, trained_alone()) == 0.0
