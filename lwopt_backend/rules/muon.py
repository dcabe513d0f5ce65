"""Muon, and the factors on its learning rate by a matrix's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lwopt_backend.rules.newton_schulz import (
    PACKAGES,
    Coefficients,
    by_step,
    check_package,
    gram_newton_schulz,
    newton_schulz,
    packaged_newton_schulz,
    product,
    quack_product,
    table_of,
)
from lwopt_backend.rules.protocol import MatrixRule, option

# Factors on the learning rate by a matrix's shape, by the names that implementations use.

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
    """No factor: one for every shape."""
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


TORCH = "torch.optim.Muon"
MOONLIGHT = "Muon is Scalable for LLM Training, arXiv 2502.16982"
CAUTIOUS = "Cautious Weight Decay, arXiv 2510.12402"
NESTEROV = "go by the average that the next gradient like this one would give"
SCALE = (
    "factor on the learning rate by a matrix's rows and columns. 'original' (Megatron: 'shape_scaling'): "
    "sqrt(max(1, rows / columns)); 'match_rms_adamw' (dion: 'rms_norm'): 0.2 sqrt(max(rows, columns)); 'spectral': "
    "Megatron's sqrt(max(rows, columns)); 'unit_rms_norm' (dion: 'spectral_norm'): sqrt(rows / columns); 'none': 1. "
    "Mind that 'spectral' and 'spectral_norm' are not the same. Without a value: 'original'"
)
ScaleName = Literal[
    "original", "match_rms_adamw", "shape_scaling", "spectral", "unit_rms_norm", "spectral_norm", "rms_norm", "none"
]


# The ways to compute Newton-Schulz, and which matrices take the s x s Gram matrix; l is the longer side.

NsMethod = Literal["standard", "gram", "auto", "gram-newton-schulz", "quack-kernels"]
# Flops that pass while a GPU moves one element of 16 bits; an H100's dense bf16 rate over its memory bandwidth is
# 989e12 / 3.35e12 flops a byte. For every step but one a segment, the Gram matrix saves 4 s^2 l - 6 s^3 flops and the
# traffic of 4 s l elements, and costs that of 10 s^2.
FLOPS_PER_ELEMENT = 2 * 295


def takes_gram(shape: Sequence[int], ns_method: str, gram_aspect: float | None) -> bool:
    """Whether a matrix of ``shape`` takes Gram Newton-Schulz: from ``gram_aspect`` on; by ``ns_method`` if it is None.

    With a package, half a product makes up for more products as soon as a matrix is not square.
    """
    short, long = sorted(shape)
    if gram_aspect is not None:
        return long >= gram_aspect * short
    if ns_method == "auto":
        return long * (2 * short + 2 * FLOPS_PER_ELEMENT) > short * (3 * short + 5 * FLOPS_PER_ELEMENT)
    return ns_method == "gram" or (ns_method in PACKAGES and long > short)


def checked_coefficients(given: Any) -> Coefficients:
    """A name, three numbers, or three for every step; lists become tuples."""
    triples = table_of(given).triples
    if not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"ns_coefficients: expected finite numbers; found {given!r}")
    if isinstance(given, str):
        return given
    return triples if isinstance(given[0], Sequence) else triples[0]


def checked_restarts(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not all(type(step) is int and step >= 1 for step in given):
        raise ValueError(f"gram_restarts: expected a list of numbers of steps, 1 or more; found {given!r}")
    return tuple(given)


@dataclass
class Muon(MatrixRule):
    """torch.optim.Muon's update as a matrix rule; its state is one ``momentum_buffer`` per element.

    ``momentum_form`` "ema" is what torch computes (its docstring shows the other form); it equals the sum times 1 -
    momentum, in the buffer, too, so the forms' checkpoints are not interchangeable. If the iteration is in bfloat16, so
    is the exchange, without loss: the iteration begins with that cast and ends in that dtype. All forms of decay use
    the learning rate without the factor by shape.
    """

    lr: float = option(1e-3, "learning rate, before the factor by shape", TORCH, ge=0)
    weight_decay: float = option(0.1, "goes by the learning rate as it is, without the factor by shape", TORCH, ge=0)
    momentum: float = option(0.95, "of the average of gradients", TORCH, ge=0, lt=1)
    nesterov: bool = option(True, NESTEROV, TORCH)
    ns_coefficients: Coefficients = option(
        (3.4445, -4.7750, 2.0315),
        "of the quintic Newton-Schulz iteration: three numbers, or three for every step, or a published table: "
        "'simple' (any number of steps; these three numbers), 'quintic' (5 steps), 'polar_express' (any number), "
        "'polar_express_5' (5 steps; dion's and nanochat's)",
        f"{TORCH}; quintic: Cesista, You and Jordan 2025; Polar Express, arXiv 2505.16932",
        check=checked_coefficients,
    )
    eps: float = option(
        1e-7,
        "least norm that a matrix is divided by; one below it is scaled up first, so it is orthogonalized",
        TORCH,
        ge=0,
    )
    ns_steps: int = option(5, "Newton-Schulz iterations", TORCH, ge=1, lt=100)
    adjust_lr_fn: ScaleName | None = option(None, SCALE, f"{TORCH}; Megatron-Core; dion; Scion, arXiv 2502.07529")
    extra_scale_factor: float = option(1.0, "on the factor by shape", "Megatron-Core", ge=0)
    momentum_form: Literal["ema", "sum"] = option(
        "ema",
        "B <- momentum B + (1 - momentum) G, as torch computes, or B <- momentum B + G, as dion and Moonlight; "
        "checkpoints differ by the factor 1 - momentum",
        f"{TORCH}; {MOONLIGHT}",
    )
    weight_decay_form: Literal["decoupled", "coupled", "cautious"] = option(
        "decoupled",
        "decay the weight; or add its share to the gradient; or decay only what the update moves towards zero",
        f"{TORCH}; {CAUTIOUS}",
    )
    ns_dtype: Literal["bfloat16", "float32"] = option("bfloat16", "dtype of the iteration, and of what travels", "ours")
    ns_method: NsMethod = option(
        "standard",
        "how Newton-Schulz is computed. 'standard': torch's iteration, bit for bit; 'gram': Gram Newton-Schulz for all "
        "matrices; 'auto': by shape, whichever is faster by its flops and memory traffic; 'gram-newton-schulz' or "
        "'quack-kernels': with the kernels of that package for symmetric products, on NVIDIA GPUs",
        "torch.optim.Muon; Dao-AILab, Gram Newton-Schulz and QuACK",
    )
    gram_aspect: float | None = option(
        None,
        "matrices whose longer side is at least this many times the shorter take Gram Newton-Schulz, and no others; "
        "None: by ns_method",
        "Dao-AILab, Gram Newton-Schulz",
        ge=1,
    )
    gram_restarts: tuple[int, ...] | None = option(
        None,
        "numbers of steps after which Gram Newton-Schulz forms its matrices anew; None: where rounding needs it, after "
        "3 of 5 steps of torch's coefficients and after 2 of the tables'",
        "Dao-AILab, Gram Newton-Schulz; the default is ours",
        check=checked_restarts,
    )
    state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        """Raises ValueError for options that do not fit each other."""
        self.exchange_dtype = self.iterates_in
        by_step(self.ns_coefficients, self.ns_steps)
        restarts = self.gram_restarts or ()
        if list(restarts) != sorted(set(restarts)) or any(restart >= self.ns_steps for restart in restarts):
            raise ValueError(
                f"gram_restarts: expected increasing numbers below ns_steps, {self.ns_steps}; found {restarts!r}"
            )
        if self.gram_restarts is not None and self.ns_method == "standard" and self.gram_aspect is None:
            raise ValueError(
                f"gram_restarts is {restarts!r}, but with ns_method 'standard' and without gram_aspect no matrix takes "
                "Gram Newton-Schulz; set ns_method, 'gram' for all matrices, or leave gram_restarts out"
            )
        if self.ns_method in PACKAGES and self.ns_dtype != "bfloat16":
            raise ValueError(
                f"ns_dtype is {self.ns_dtype!r}, but {self.ns_method} computes in 16 bits; leave ns_dtype out, or set "
                "ns_method to 'auto'"
            )

    @property
    def iterates_in(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ns_dtype)
        return dtype

    @property
    def needs_large_rate(self) -> bool:
        return SCALES[self.adjust_lr_fn or "original"] not in (match_rms_adamw, spectral)

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

    def directions(
        self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]], *, advance: bool
    ) -> Sequence[Tensor]:
        buffers = [state["momentum_buffer"] for state in states]
        grads = [self.gradient(grad, value) for grad, value in zip(grads, values)]
        if advance and self.momentum_form == "ema":
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        elif advance:
            _multiply(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
        if not self.nesterov:
            return buffers
        if self.momentum_form == "ema":
            return torch._foreach_lerp(grads, buffers, self.momentum)
        return torch._foreach_add(grads, buffers, alpha=self.momentum)

    def transform(self, matrices: Tensor) -> Tensor:
        on_gram = takes_gram(matrices.shape[-2:], self.ns_method, self.gram_aspect)
        options: dict[str, Any] = {"steps": self.ns_steps, "coefficients": self.ns_coefficients, "eps": self.eps}
        options["dtype"] = self.iterates_in
        if self.ns_method == "gram-newton-schulz":
            return packaged_newton_schulz(matrices, **options, restarts=self.gram_restarts, on_gram=on_gram)
        symmetric = quack_product if self.ns_method == "quack-kernels" else product
        if on_gram:
            return gram_newton_schulz(matrices, **options, restarts=self.gram_restarts, symmetric=symmetric)
        return newton_schulz(matrices, **options, symmetric=symmetric)

    def check_device(self, device: torch.device) -> None:
        if self.ns_method in PACKAGES:
            check_package(self.ns_method, device)

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

    def apply_all(self, values: list[Tensor], updates: list[Tensor], shapes: Sequence[tuple[int, int]]) -> None:
        if self.weight_decay_form == "cautious":
            super().apply_all(values, updates, shapes)
            return
        if self.weight_decay_form == "decoupled":
            _multiply(values, 1 - self.lr * self.weight_decay)
        for shape in set(shapes):
            some = [number for number, other in enumerate(shapes) if other == shape]
            of_shape, moves = ([tensors[number] for number in some] for tensors in (values, updates))
            torch._foreach_add_(of_shape, moves, alpha=-self.lr * self.scale(shape))


def _multiply(tensors: list[Tensor], factor: float) -> None:
    """In place. A number would first be rounded to tensors of 16 bits on a CPU, unlike by ``Tensor.mul_``."""
    torch._foreach_mul_(tensors, torch.tensor(factor, dtype=torch.float64))
