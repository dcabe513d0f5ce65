"""pytorch-optimizer's Muon beside ours with the settings that docs/migration.md gives for it; its classes as rules."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import torch
from torch import nn

from lwopt_backend import LayerWiseOptimizer
from tests.migration import entry

ADAMW = {"lr": 3e-3, "weight_decay": 0.0}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 48), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 10) -> list[float]:
    tokens, losses = torch.arange(32), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_its_muon_and_ours_go_the_same_way() -> None:
    theirs, ours = network(), network()
    others = [param for name, param in theirs.named_parameters() if name != "1.weight"]
    groups = [{"params": [theirs[1].weight], "use_muon": True}, {"params": others, "use_muon": False}]
    peer = pytorch_optimizer.Muon(groups, lr=0.02, weight_decay=0.0, adamw_lr=3e-3, adamw_wd=0.0)
    params = entry("pytorch_optimizer")["params"]
    params["matrix"] |= {"lr": 0.02, "weight_decay": 0.0}
    params["elementwise"] |= {"lr": 3e-3, "weight_decay": 0.0}
    losses = train(theirs, peer), train(ours, LayerWiseOptimizer(ours, **params, report=False))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)  # Newton-Schulz in bf16, rounded in another order
    assert losses[0][-1] < losses[0][0] - 0.5


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_a_class_of_it_as_a_rule_trains_as_it_does_alone(name: str) -> None:
    cls = getattr(pytorch_optimizer, name)
    alone, ours = network(), network()
    others = [param for key, param in alone.named_parameters() if key != "1.weight"]
    torch.manual_seed(1)
    expected = train(alone, cls([alone[1].weight], lr=1e-2), torch.optim.AdamW(others, **ADAMW))
    rule = {"name": "torch_optimizer", "class": f"pytorch_optimizer.{name}", "lr": 1e-2}
    torch.manual_seed(1)
    found = train(ours, LayerWiseOptimizer(ours, rule, elementwise={"name": "adamw", **ADAMW}, report=False))
    assert found == expected
