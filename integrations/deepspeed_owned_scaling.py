"""From reduced gradients to what is stepped on: the loss scale taken out, clipped, or dropped if not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor

from lwopt_backend.integrations.deepspeed_engine import checks_overflow
from lwopt_backend.owned.gradients import OwnedGradients


@dataclass(frozen=True)
class GradientScaling:
    """What an engine's configuration asks for. ``clip`` is 0 where gradients are not clipped."""

    clip: float
    tells_norm: bool
    skips_overflow: bool

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> GradientScaling:
        return cls(engine.gradient_clipping() or 0.0, engine.zero_compute_grad_norm(), checks_overflow(engine))

    def apply(self, gradients: OwnedGradients, loss_scale: float) -> tuple[float | None, bool]:
        """Scale the mean gradients in place. The norm before clipping, where it was needed, and whether it overflowed,
        in which case they are as they were. Called on all ranks."""
        norm, factor = None, 1 / loss_scale
        if self.clip or self.tells_norm or self.skips_overflow:
            norm = gradients.norm(2.0, lambda number: True) / loss_scale
            if self.skips_overflow and not torch.isfinite(norm):
                return float("inf"), True
        if self.clip:
            assert norm is not None
            gradients.scale(self._clipping(norm) / loss_scale)
        elif factor != 1:
            gradients.scale(factor)
        return None if norm is None else float(norm), False

    def _clipping(self, norm: Tensor) -> Tensor:
        """torch.nn.utils.clip_grad_norm_'s factor."""
        return torch.clamp(self.clip / (norm + 1e-6), max=1.0)


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """DeepSpeed's: dynamic or static in fp16, one that does nothing in other precisions."""
    return CreateLossScaler(
        dtype=engine.get_data_types()[0],
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )
