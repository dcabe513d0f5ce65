"""Muon: momentum, then the whole matrix's Newton-Schulz (Keller Jordan 2024; argument names of torch.optim.Muon)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.rules.gram_newton_schulz import gram_newton_schulz
from lwopt_backend.rules.newton_schulz import newton_schulz


@dataclass(frozen=True, slots=True)
class Muon:
    """torch.optim.Muon's update as a matrix rule; its state is one ``momentum_buffer`` per element.

    Momentum is the moving average B <- mu B + (1 - mu) G that torch computes (its docstring writes the sum form).
    ``ns_dtype`` is the dtype of the iteration, ``exchange_dtype`` that of what travels; bfloat16 on the wire loses
    nothing when the iteration is in bfloat16, because it starts with that cast and ends in that dtype. Matrices whose
    longer side is at least ``gram_aspect`` times the shorter take the cheaper Gram Newton-Schulz; None: none do.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    ns_dtype: torch.dtype = torch.bfloat16
    exchange_dtype: torch.dtype = torch.bfloat16
    gram_aspect: float | None = None
    state_keys: tuple[str, ...] = ("momentum_buffer",)

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        state["momentum_buffer"].lerp_(grad, 1 - self.momentum)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        buffer = state["momentum_buffer"]
        return grad.lerp(buffer, self.momentum) if self.nesterov else buffer

    def transform(self, matrices: Tensor) -> Tensor:
        short, long = sorted(matrices.shape[-2:])
        gram = self.gram_aspect is not None and long >= self.gram_aspect * short
        iterate = gram_newton_schulz if gram else newton_schulz
        return iterate(
            matrices, steps=self.ns_steps, coefficients=self.ns_coefficients, eps=self.eps, dtype=self.ns_dtype
        )

    def scale(self, shape: tuple[int, int]) -> float:
        """sqrt(max(1, rows / columns)) for "original" (Jordan); "match_rms_adamw" is 0.2 sqrt(max(rows, columns))."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":  # Moonshot, "Muon is Scalable for LLM Training", arXiv 2502.16982
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))
