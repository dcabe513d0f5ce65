"""A weight that a model stores as (inputs, outputs) is trained as torch.optim.Muon would train its transpose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers.pytorch_utils import Conv1D

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.fsdp2 import mesh_of
from tests.ranks import RankPool

MUON = {"lr": 0.02, "weight_decay": 0.1}


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.square, self.down = Conv1D(31, 12), Conv1D(31, 31), nn.Linear(31, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.square(torch.tanh(self.up(x))))).pow(2).mean()


def differ_from_the_transpose() -> float:
    model, reference = Transposed(), Transposed()
    fully_shard(model, mesh=mesh_of(torch.distributed.get_world_size()))
    optimizer = LayerWiseOptimizer(model, lr=MUON["lr"], weight_decay=MUON["weight_decay"], report=False)
    named = dict(reference.named_parameters())
    back = {name: nn.Parameter(named[name].detach().T.contiguous()) for name in ("up.weight", "square.weight")}
    muon = torch.optim.Muon([*back.values(), named["down.weight"]], **MUON)
    adamw = torch.optim.AdamW([named["up.bias"], named["square.bias"]], lr=1e-3)
    for step in range(4):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        model(x).backward()
        reference(x).backward()
        for name, own in back.items():
            own.grad = named[name].grad.T.contiguous()
        for some in (optimizer, muon, adamw):
            some.step()
        with torch.no_grad():
            for name, own in back.items():
                named[name].copy_(own.T)
        optimizer.zero_grad()
        reference.zero_grad()
    ours = {name: param.full_tensor() for name, param in model.named_parameters()}
    return max(float((ours[name] - param.detach()).abs().max()) for name, param in named.items())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_transposed_weights_are_trained_as_outputs_by_inputs(ranks: RankPool) -> None:
    assert ranks.run(differ_from_the_transpose) == [0.0, 0.0]
