"""16-bit parameters are trained as one process trains them that keeps fp32 masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.owned import optimizer_for
from tests.owned_scenarios import BUCKET_MB, Branches, loss_of, optimizers_of, rows
from tests.ranks import RankPool

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept gradients": {"keep_full_grads": True},
    "lazy return": {"overlap_param_gather": True},
    "step in backward": {"step_in_backward": True},
    "fp32 gradients": {"grad_dtype": "float32"},
}


class Narrow(Branches):
    """All parameters in 16 bits, or all but those of the norm and the last layer."""

    def __init__(self, dtype: torch.dtype, mixed: bool) -> None:
        super().__init__()
        wide = [self.norm, self.last] if mixed else []
        for module in self.children():
            module.to(torch.float32 if module in wide else dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        x = (self.left(x) + self.right(x)).to(self.norm.weight.dtype)
        return self.last(self.norm(x)).float()


class Masters:
    """One process: fp32 copies of the parameters are stepped, and rounded into the model."""

    def __init__(self, model: Narrow) -> None:
        self.model = model
        self.masters = Branches()
        self.take()
        self.optimizers = optimizers_of(self.masters)

    def take(self) -> None:
        for master, param in zip(self.masters.parameters(), self.model.parameters()):
            master.data.copy_(param.data)

    def step(self, step: int) -> None:
        for rank in range(2):
            loss_of(self.model(rows(step, rank))).backward()
            for master, param in zip(self.masters.parameters(), self.model.parameters()):
                grad = param.grad.float()
                master.grad, param.grad = grad if master.grad is None else master.grad + grad, None
        for master in self.masters.parameters():
            master.grad /= 2
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for master, param in zip(self.masters.parameters(), self.model.parameters()):
            param.data.copy_(master.data)


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours.parameters(), theirs.parameters()))


def as_with_masters(dtype: str, mixed: bool, layout: str, mode: str, load: bool = False) -> bool:
    model, truth = Narrow(DTYPES[dtype], mixed), Masters(Narrow(DTYPES[dtype], mixed))
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB, layout=layout, **MODES[mode])
    for step in range(4):
        if load and step == 2:
            weights = {name: param + 0.25 for name, param in truth.model.state_dict().items()}
            model.load_state_dict(weights)
            truth.model.load_state_dict(weights)
            truth.take()
        loss_of(model(rows(step, dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.step(step)
    optimizer.synchronize()
    return equal(model, truth.model)


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_models_equal_one_process_with_masters(ranks: RankPool, dtype: str, mixed: bool, layout: str) -> None:
    """On gradients as they are: a sum of two ranks' in fp32 has one value."""
    for mode in ("plain", "lazy return", "step in backward"):
        assert ranks.run(as_with_masters, dtype, mixed, layout, mode) == [True, True], mode


@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_fp32_gradients_of_one_pass_are_those_of_the_model(ranks: RankPool, layout: str) -> None:
    assert ranks.run(as_with_masters, "bf16", False, layout, "fp32 gradients") == [True, True]


@pytest.mark.parametrize("mode", ["plain", "lazy return"])
@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_loaded_weights_replace_the_masters(ranks: RankPool, layout: str, mode: str) -> None:
    assert ranks.run(as_with_masters, "bf16", False, layout, mode, load=True) == [True, True]
