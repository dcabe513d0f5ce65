"""Factors on the learning rate by a matrix's shape, under the names that implementations have for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lwopt_backend.rules.newton_schulz import Coefficients, gram_newton_schulz, newton_schulz
from lwopt_backend.rules.protocol import MatrixRule

Scale = Callable[[int, int], float]


def original(rows: int, columns: int) -> float:
    """sqrt(max(1, rows / columns)): Jordan's, torch's default; Megatron's "shape_scaling"."""
    return math.sqrt(max(1, rows / columns))


def match_rms_adamw(rows: int, columns: int) -> float:
    """0.2 sqrt(max(rows, columns)), for AdamW's learning rates: "Muon is Scalable for LLM Training", arXiv 2502.16982.

    dion calls it "rms_norm".
    """
    return 0.2 * math.sqrt(max(rows, columns))


def spectral(rows: int, columns: int) -> float:
    """sqrt(max(rows, columns)): Megatron's "spectral"; an update's elements have a root mean square of about one."""
    return math.sqrt(max(rows, columns))


def unit_rms_norm(rows: int, columns: int) -> float:
    """sqrt(rows / columns), which makes the operator norm between root mean squares one: Scion, arXiv 2502.07529.

    Megatron's "unit_rms_norm"; dion calls it "spectral_norm".
    """
    return math.sqrt(rows / columns)


def none(rows: int, columns: int) -> float:
    """The learning rate as it is."""
    return 1.0


SCALES: dict[str, Scale] = {
    "original": original,
    "match_rms_adamw": match_rms_adamw,
    "shape_scaling": original,
    "spectral": spectral,
    "unit_rms_norm": unit_rms_norm,
    "spectral_norm": unit_rms_norm,
    "rms_norm": match_rms_adamw,
    "none": none,
}


# Muon: momentum, then the whole matrix's Newton-Schulz (Keller Jordan 2024; argument names of torch.optim.Muon).


@dataclass
class Muon(MatrixRule):
    """torch.optim.Muon's update as a matrix rule; its state is one ``momentum_buffer`` per element.

    - ``momentum_form``: "ema" is B <- mu B + (1 - mu) G, which torch computes (its docstring writes the other); "sum"
      is B <- mu B + G. One is the other times 1 - mu, in the buffer too, so their checkpoints are not interchangeable.
    - ``ns_dtype``: of the iteration and of what travels: bfloat16 on the wire loses nothing when the iteration is in
      bfloat16, because it starts with that cast and ends in that dtype.
    - ``gram_aspect``: matrices whose longer side is at least so many times the shorter take the cheaper Gram
      Newton-Schulz, with ``gram_restarts``; None: none do.
    - ``weight_decay_form``: "decoupled" takes ``lr * weight_decay`` of the weight off, "cautious" only of elements that
      the update moves towards zero ("Cautious Weight Decay", arXiv 2510.12402), "coupled" adds ``weight_decay`` of the
      weight to the gradient. All go by the learning rate without the factor by shape.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: Coefficients
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    ns_dtype: str = "bfloat16"
    gram_aspect: float | None = None
    gram_restarts: Sequence[int] | None = None
    momentum_form: str = "ema"
    weight_decay_form: str = "decoupled"
    extra_scale_factor: float = 1.0
    state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        self.exchange_dtype = self.iterates_in

    @property
    def iterates_in(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ns_dtype)
        return dtype

    def gradient(self, grad: Tensor, value: Tensor) -> Tensor:
        if self.weight_decay_form != "coupled" or not self.weight_decay:
            return grad
        return grad.add(value.to(grad.dtype), alpha=self.weight_decay)

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        if self.momentum_form == "ema":
            state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
        else:
            state["momentum_buffer"].mul_(self.momentum).add_(grad)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        buffer = state["momentum_buffer"]
        if not self.nesterov:
            return buffer
        if self.momentum_form == "ema":
            return grad.lerp(buffer, self.momentum)
        return grad.add(buffer, alpha=self.momentum)

    def transform(self, matrices: Tensor) -> Tensor:
        steps, coefficients, eps, dtype = self.ns_steps, self.ns_coefficients, self.eps, self.iterates_in
        short, long = sorted(matrices.shape[-2:])
        if self.gram_aspect is not None and long >= self.gram_aspect * short:
            return gram_newton_schulz(
                matrices, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype, restarts=self.gram_restarts
            )
        return newton_schulz(matrices, steps=steps, coefficients=coefficients, eps=eps, dtype=dtype)

    def scale(self, shape: tuple[int, int]) -> float:
        return SCALES[self.adjust_lr_fn or "original"](*shape) * self.extra_scale_factor

    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        if self.weight_decay_form == "decoupled":
            super().apply(value, update, shape)
            return
        if self.weight_decay_form == "cautious":
            # Signs, because the product of two small numbers may be zero. Zero counts as towards zero.
            aligned = value.sign().mul_(update.sign()) >= 0
            value.mul_(torch.where(aligned, 1 - self.lr * self.weight_decay, 1.0))
        value.add_(update, alpha=-self.lr * self.scale(shape))
