"""What tests of owned storage share: a training loop, and a single-process reference whose sums are exact."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.zero import ADAMW, MUON, OWN_ROWS, OWNED, Reference, batch_shares

BUCKET_MB = OWNED["bucket_mb"]


def exact_sums(model: nn.Module) -> nn.Module:
    """Round every gradient to multiples of 2^-14, so that sums of a few are exact in fp32, in whatever order."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: (grad * 2**14).round() / 2**14)
    return model


def optimizer_for(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    # torch.optim.Muon, the reference, takes fused weights whole.
    adamw = {"name": "adamw", **ADAMW}
    settings = {"elementwise": adamw, "bucket_mb": BUCKET_MB, "report": False, "atoms": {"*": "whole"}, **options}
    return LayerWiseOptimizer(model, **MUON, **settings)


def shares(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    return batch_shares(step, count, OWN_ROWS)


def train(
    model: nn.Module,
    optimizer: LayerWiseOptimizer,
    steps: int | range,
    *,
    accumulation: int = 1,
    clip: float | None = None,
) -> None:
    """The usual loop, every rank on its rows. Micro-batches accumulate locally."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(steps) if isinstance(steps, int) else steps:
        *parts, last = shares(step, world_size * accumulation)[rank::world_size]
        with optimizer.no_sync():
            for part in parts:
                model(*part).backward()
        model(*last).backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def step_alone(single: Reference, step: int, world_size: int) -> None:
    """One step of a reference on what ``world_size`` ranks would get in ``train``."""
    for tokens, targets in shares(step, world_size):
        single.model(tokens, targets).backward()
    for param in single.model.parameters():
        if param.grad is not None:
            param.grad.div_(world_size)
    single.step()


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of any parameter; NaN if there is one."""
    other = dict(theirs.named_parameters())
    pairs = [(param.detach(), other[name].detach()) for name, param in ours.named_parameters() if param.numel()]
    return float(torch.stack([(mine - others).abs().max().double() for mine, others in pairs]).max())
