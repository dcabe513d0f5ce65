"""Training in plain PyTorch as users write it, and on one process with torch's optimizers; sums are exact."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.support.models import largest_difference
from tests.support.references import ADAMW, MUON, batch_shares, rows_of_all, torchs
from tests.support.zero import OWNED

BUCKET_MB = OWNED["bucket_mb"]


def rounded(grad: Tensor) -> Tensor:
    """To multiples of 3 * 2^-14: sums of a few are then exact in fp32, in whatever order, and so are means over 2, 3 or
    4 ranks."""
    return (grad * (2**14 / 3)).round() * 3 / 2**14


def exact_sums(model: nn.Module) -> nn.Module:
    """Round every gradient as it comes."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(rounded)
    return model


def optimizer_for(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    # torch.optim.Muon, the reference, takes fused weights whole.
    adamw = {"name": "adamw", **ADAMW}
    settings = {"elementwise": adamw, "bucket_mb": BUCKET_MB, "report": False, "atoms": {"*": "whole"}, **options}
    return LayerWiseOptimizer(model, **MUON, **settings)


def shares(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    return batch_shares(step, count, rows_of_all(count))


# Passes of all kinds, which a scenario says
MODES: dict[str, dict[str, Any]] = {"plain": {}, "kept gradients": {"keep_full_grads": True}}
MODES |= {"lazy return": {"overlap_param_gather": True}, "no overlap": {"overlap_grad_reduce": False}}


class Branches(nn.Module):
    """Layers, then two branches; ``use`` says which of them a forward pass takes."""

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


@dataclass(frozen=True)
class Turn:
    """One rank, between two steps. On one process all ranks have their turns, one after the other."""

    model: Any
    step: int
    rank: int
    no_sync: Callable[[], Any] = contextlib.nullcontext

    def rows(self, part: int = 0) -> Tensor:
        return rows(self.step, self.rank, part)

    def loss(self, part: int = 0, **how: Any) -> Tensor:
        return loss_of(self.model(self.rows(part), **how))

    def back(self, part: int = 0, **how: Any) -> None:
        self.loss(part, **how).backward()


Scenario = Callable[[Turn], None]  # what a rank does


def micro_batches(*reduced: bool, **how: Any) -> Scenario:
    """Passes, each one ``reduced`` or under no_sync."""

    def scenario(turn: Turn) -> None:
        for part, outside in enumerate(reduced):
            with contextlib.nullcontext() if outside else turn.no_sync():
                turn.back(part, **how)

    return scenario


def back(model: nn.Module, step: int) -> None:
    Turn(model, step, dist.get_rank()).back()


def optimizer_in(model: nn.Module, mode: str = "plain", **options: Any) -> LayerWiseOptimizer:
    return optimizer_for(model, **{"bucket_mb": 0.0001, **MODES[mode], **options})


def made(build: Callable[[], nn.Module] = Branches, mode: str = "plain", **options: Any) -> tuple[Any, Any]:
    model = exact_sums(build())
    return model, optimizer_in(model, mode, **options)


def keep(model: nn.Module) -> None:
    """Change nothing between backward and step."""


def train_ours(
    model: nn.Module,
    optimizer: LayerWiseOptimizer,
    steps: int | range | tuple[int, ...],
    scenario: Scenario = Turn.back,
    change: Callable[[nn.Module], object] = keep,
) -> None:
    """``change`` is done to mean gradients before the step."""
    for step in range(steps) if isinstance(steps, int) else steps:
        scenario(Turn(model, step, dist.get_rank(), optimizer.no_sync))
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def train(model: nn.Module, optimizer: LayerWiseOptimizer, steps: int | range) -> None:
    """The usual loop, every rank on its rows."""
    count = dist.get_world_size()
    train_ours(model, optimizer, steps, lambda turn: turn.model(*shares(turn.step, count)[turn.rank]).backward())


def optimizers_of(model: Any) -> list[Any]:
    """torch.optim.Muon on matrices, 2-D parameters but for the model's ``NO_MATRIX``, and AdamW on the rest."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    no_matrix = getattr(model, "NO_MATRIX", "")
    return torchs(named, [name for name, param in named.items() if param.ndim == 2 and name != no_matrix])


def step_all(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mean_gradients(model: nn.Module, scenario: Scenario, step: int) -> None:
    """On one process, add what all ranks get in one step, and divide it by them."""
    for rank in range(dist.get_world_size()):
        scenario(Turn(model, step, rank))
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.detach() / dist.get_world_size()


@functools.cache
def truth(
    steps: int | tuple[int, ...],
    build: Callable[[], nn.Module] = Branches,
    scenario: Scenario = Turn.back,
    change: Callable[[nn.Module], object] = keep,
) -> nn.Module:
    """torch.optim.Muon and AdamW on one process, from the mean of all ranks' gradients. Not to be changed."""
    model = exact_sums(build())
    optimizers = optimizers_of(model)
    for step in range(steps) if isinstance(steps, int) else steps:
        mean_gradients(model, scenario, step)
        change(model)
        step_all(optimizers)
    return model


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    off = largest_difference(theirs, ours)  # which may have a part of the experts
    assert off == 0.0, off


def assert_trains_exactly(
    scenario: Scenario = Turn.back,
    build: Callable[[], nn.Module] = Branches,
    mode: str = "plain",
    *,
    change: Callable[[nn.Module], object] = keep,
    **options: Any,
) -> None:
    """After three steps this rank's parameters are the truth's, bit for bit."""
    model, optimizer = made(build, mode, **options)
    train_ours(model, optimizer, 3, scenario, change)
    assert_same(model, truth(3, build, scenario, change))
