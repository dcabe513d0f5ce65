"""Training loops as users write them: on owned storage, and on one process with torch's optimizers, rank by rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests import owned
from tests.owned import difference, exact_sums
from tests.zero import ADAMW, MUON

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept gradients": {"keep_full_grads": True},
    "lazy return": {"overlap_param_gather": True},
    "step in backward": {"step_in_backward": True},
    "no overlap": {"overlap_grad_reduce": False},
}
SEVERAL_PASSES = ("plain", "kept gradients", "lazy return", "no overlap")  # step in backward takes one


class Branches(nn.Module):
    """Layers, then two branches; ``use`` says which of them a forward pass takes."""

    MATRICES = (
        "first.weight",
        *(f"middle.{number}.weight" for number in range(0, 10, 2)),
        "left.weight",
        "right.weight",
        "last.weight",
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 11)
        self.middle = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(11, 11), nn.Tanh())))
        self.left = nn.Linear(11, 7)
        self.right = nn.Linear(11, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        """x: (rows, 6); (rows, 5)."""
        x = self.middle(torch.tanh(self.first(x)))
        if use == "neither":
            return self.last(x[:, :7])
        x = self.left(x) + self.right(x) if use == "both" else getattr(self, use)(x)
        return self.last(self.norm(x))


def rows(step: int, rank: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + part)
    return torch.randn(8, 6, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


# What one rank does between two steps: scenario(model, no_sync, step, rank). On one process all ranks' in turn.
Scenario = Callable[[nn.Module, Callable[[], Any], int, int], None]


def one_pass(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()


def optimizer_for(model: nn.Module, mode: str = "plain", **options: Any) -> LayerWiseOptimizer:
    """With six or more buckets of ``Branches``."""
    return owned.optimizer_for(model, **{"bucket_mb": 0.0001, **MODES[mode], **options})


def made(build: Callable[[], nn.Module] = Branches, mode: str = "plain", **options: Any) -> tuple[nn.Module, Any]:
    """A model whose gradients have exact sums, and its optimizer."""
    model = exact_sums(build())
    return model, optimizer_for(model, mode, **options)


def keep(model: nn.Module) -> None:
    """Change nothing between backward and step."""


def train_ours(
    model: nn.Module,
    optimizer: LayerWiseOptimizer,
    steps: int | tuple[int, ...],
    scenario: Scenario = one_pass,
    change: Callable[[nn.Module], object] = keep,
    forget: Callable[[nn.Module], object] | None = None,
) -> None:
    """``change`` is done to mean gradients before the step; ``forget`` instead of ``optimizer.zero_grad``."""
    for step in range(steps) if isinstance(steps, int) else steps:
        scenario(model, optimizer.no_sync, step, dist.get_rank())
        change(model)
        optimizer.step()
        optimizer.zero_grad() if forget is None else forget(model)
    optimizer.synchronize()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch.optim.Muon on the model's ``MATRICES``, AdamW on its other trained parameters."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices = [named.pop(name) for name in model.MATRICES]
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(named.values(), **ADAMW)]


def step_all(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mean_gradients(model: nn.Module, scenario: Scenario, step: int) -> None:
    """On one process, add what all ranks get in one step, and divide it by them."""
    for rank in range(dist.get_world_size()):
        scenario(model, contextlib.nullcontext, step, rank)
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.detach() / dist.get_world_size()


def truth(
    steps: int | tuple[int, ...],
    build: Callable[[], nn.Module] = Branches,
    scenario: Scenario = one_pass,
    change: Callable[[nn.Module], object] = keep,
) -> nn.Module:
    """torch.optim.Muon and AdamW on one process, from the mean of all ranks' gradients. Not to be changed."""
    return _truth(steps, build, scenario, change, dist.get_world_size())


@functools.cache
def _truth(
    steps: Any, build: Callable[[], nn.Module], scenario: Scenario, change: Callable[[nn.Module], object], ranks: int
) -> nn.Module:
    model = exact_sums(build())
    optimizers = optimizers_of(model)
    for step in range(steps) if isinstance(steps, int) else steps:
        mean_gradients(model, scenario, step)
        change(model)
        step_all(optimizers)
    return model


def differences(
    scenario: Scenario = one_pass,
    build: Callable[[], nn.Module] = Branches,
    modes: Sequence[str] = tuple(MODES),
    layouts: Sequence[str] = ("auto",) * len(MODES),
    **options: Any,
) -> dict[str, float]:
    """Per mode, each in a layout of its own, how far this rank's parameters are from the truth after three steps."""
    found = {}
    for mode, layout in zip(modes, layouts):
        model, optimizer = made(build, mode, layout=layout, **options)
        train_ours(model, optimizer, 3, scenario)
        found[mode] = difference(model, truth(3, build, scenario))
    return found
