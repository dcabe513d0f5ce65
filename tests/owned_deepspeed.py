"""What tests of owned storage under DeepSpeed share: configurations, a training loop, references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests import zero
from tests.models import UnevenLM
from tests.owned import BUCKET_MB, ROWS, exact_sums, optimizer_for, shares
from tests.zero import Reference


def config(stage: int = 2, *, accumulation: int = 1, clip: float = 0.0, **params: Any) -> dict[str, Any]:
    """A ds_config with owned storage; ``params`` are further options of the optimizer."""
    rows = ROWS // (accumulation * dist.get_world_size())
    options = {"storage": "owned", "bucket_mb": BUCKET_MB, **params}
    settings = zero.config(stage, accumulation=accumulation, clip=clip, rows=rows, **options)
    settings["zero_optimization"] = {"stage": stage}
    return settings


def train(engine: Any, steps: int | range, *, same_rows: bool = False) -> list[float]:
    """Train on the global batches of ``steps``, every rank on its share or all on all rows; this rank's losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        parts = shares(step, accumulation * (1 if same_rows else world_size))
        for number in range(accumulation):
            loss = engine(*parts[number if same_rows else number * world_size + rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def reference(
    steps: int, *, accumulation: int = 1, clip: float = 0.0, model: Callable[[], nn.Module] = UnevenLM
) -> tuple[nn.Module, list[float]]:
    """torch.optim.Muon and AdamW on one process, from the means over all ranks' micro-batches; norms before clipping.

    The order of operations is DeepSpeed's: losses by the micro-batches of a step, gradients by the ranks.
    """
    world_size = dist.get_world_size()
    single = Reference(exact_sums(model()))
    norms = []
    for step in range(steps):
        for tokens, targets in shares(step, world_size * accumulation):
            (single.model(tokens, targets) / accumulation).backward()
        params = [param for param in single.model.parameters() if param.grad is not None]
        for param in params:
            param.grad.div_(world_size)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, clip or float("inf"))))
        for optimizer in (single.muon, single.adamw):
            optimizer.step()
            optimizer.zero_grad()
    return single.model, norms


def plain(steps: int, *, accumulation: int = 1, **options: Any) -> nn.Module:
    """The same by ``lwopt_backend.LayerWiseOptimizer`` in plain PyTorch on these ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = exact_sums(UnevenLM())
    optimizer = optimizer_for(model, **options)
    for step in range(steps):
        parts = shares(step, world_size * accumulation)
        for number in range(accumulation):
            (model(*parts[number * world_size + rank]) / accumulation).backward()
        optimizer.step()
    return model


def in_precision(precision: str, settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` in fp32, bf16 or fp16, with a scale that holds, or these with fp32 accumulation (``bf16+fp32``)."""
    if precision.startswith("bf16"):
        settings["bf16"] = {"enabled": True}
    if precision.startswith("fp16"):
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    if precision.endswith("+fp32"):
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


@contextlib.contextmanager
def engine_on_any_cpu(settings: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> Iterator[Any]:
    """``zero.engine_for``, in fp16 too: a CPU without units for it computes it all the same, but says it does not."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        with zero.engine_for(settings, model, **kwargs) as engine:
            yield engine
    finally:
        del accelerator.is_fp16_supported
