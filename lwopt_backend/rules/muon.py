"""Muon, and the factors on its learning rate by a matrix's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lwopt_backend.rules.newton_schulz import (
    PACKAGES,
    QUACK,
    Coefficients,
    by_step,
    check_package,
    gram_newton_schulz,
    has_package,
    newton_schulz,
    packaged_newton_schulz,
    product,
    quack_product,
    quack_takes,
    table_of,
)
from lwopt_backend.rules.protocol import (
    MatrixRule,
    OwnerStateRule,
    add_to_all,
    keeping_norms,
    multiply_all,
    option,
    sums_of,
)

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

    Megatron's "unit_rms_norm"; dion calls it "spectral_norm", torch since 2.14 "spectral_unclamped".
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
    "spectral_unclamped": unit_rms_norm,
    "rms_norm": match_rms_adamw,
    "none": none,
}


TORCH = "torch.optim.Muon"
MOONLIGHT = "Muon is Scalable for LLM Training, arXiv 2502.16982"
CAUTIOUS = "Cautious Weight Decay, arXiv 2510.12402"
RATE = "learning rate, before the factor by shape"
NESTEROV = "use Nesterov momentum"
SCALE = (
    "factor on the learning rate, from a matrix's rows and columns; None is 'original'. 'original' and "
    "'shape_scaling': sqrt(max(1, rows / columns)); 'match_rms_adamw' and 'rms_norm': 0.2 sqrt(max(rows, columns)); "
    "'spectral': sqrt(max(rows, columns)); 'unit_rms_norm', 'spectral_norm' and 'spectral_unclamped': "
    "sqrt(rows / columns); 'none': 1"
)
ScaleName = Literal[
    "original",
    "match_rms_adamw",
    "shape_scaling",
    "spectral",
    "unit_rms_norm",
    "spectral_norm",
    "spectral_unclamped",
    "rms_norm",
    "none",
]


# The ways to compute Newton-Schulz, and which matrices use the s x s Gram matrix; l is the longer side.

NsMethod = Literal["standard", "gram", "auto", "gram-newton-schulz", "quack-kernels"]
# Flops in the time in which a GPU moves one element of 16 bits; an H100's dense bf16 rate over its memory bandwidth is
# 989e12 / 3.35e12 flops a byte. Every step except one a segment saves 4 s^2 l - 6 s^3 flops and the traffic of 4 s l
# elements with the Gram matrix, and costs the traffic of 10 s^2. If symmetric products cost half, it saves 3 s^2 l - 3
# s^3 flops.
FLOPS_PER_ELEMENT = 2 * 295


def takes_gram(shape: Sequence[int], ns_method: str, gram_aspect: float | None, *, symmetric: bool = False) -> bool:
    """Whether a matrix of ``shape`` takes Gram Newton-Schulz: from ``gram_aspect`` on; by ``ns_method`` if None.

    A package computes half of each product, which compensates for more products as soon as a matrix is not square.
    ``symmetric`` is whether "auto" has one.
    """
    short, long = sorted(shape)
    if gram_aspect is not None:
        return long >= gram_aspect * short
    if ns_method == "auto":
        saved, added = (3, 3) if symmetric else (4, 6)
        moved = 4 * long - 10 * short
        return short * (saved * long - added * short) + moved * FLOPS_PER_ELEMENT > 0
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


# Scaling before and after Newton-Schulz. Rows and columns are those of the weight, also if the iteration transposes.

MUONEQ, MUON_PLUS = "MuonEq, arXiv 2603.28254", "Muon+, arXiv 2602.21545"
HYPERBALL, FLOOR = "Hyperball, arXiv 2606.16899", "modded-nanogpt, track 3, u/w-floor"
PER_HEAD = "Kimi K3, arXiv 2607.24653; GLM-5, arXiv 2602.15763; DeepSpeed's per_head_muon"
MUON2, TURBO = "Muon^2, arXiv 2604.09967", "Turbo-Muon, arXiv 2512.04632"
MUONBP = "MuonBP, arXiv 2510.16981"
MUON8 = "8-bit Muon, arXiv 2509.23106; block size of bitsandbytes"
Precondition = Literal["none", "muoneq_r", "muoneq_c", "muoneq_rc", "aol", "muon2"]
Renormalize = Literal["none", "row", "col", "row_col", "col_row", "frobenius"]
LINES = {"muoneq_r": (-1,), "muoneq_c": (-2,), "muoneq_rc": (-1, -2)}  # the dimensions that MuonEq sums over
OF_MUON_PLUS = ("none", "row", "col", "row_col", "col_row")
OF_SCALING = ("precondition", "precondition_eps", "renormalize")  # options that ``transform`` reads
OF_TRANSFORM = (
    *OF_SCALING,
    "ns_method",
    "gram_aspect",
    "gram_restarts",
    "ns_steps",
    "ns_coefficients",
    "ns_dtype",
    "eps",
)
# Valid combinations: MuonEq's code also runs Muon+'s modes; nanochat has "frobenius", after rows or alone.
DEFINED: Mapping[str, Sequence[str]] = {
    "none": (*OF_MUON_PLUS, "frobenius"),
    "muoneq_r": (*OF_MUON_PLUS, "frobenius"),
    "muoneq_c": OF_MUON_PLUS,
    "muoneq_rc": OF_MUON_PLUS,
    "aol": ("none",),
    "muon2": ("none",),
}
MUON_PLUS_EPS = 1e-7  # in the root, as in the authors' code, github.com/K1seki221/MuonPlus
FROBENIUS_EPS = 1e-6  # the least norm, as in nanochat


def equilibrate(matrices: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Divide rows (-1), columns (-2) or both by the roots of their sums of squares: MuonEq, arXiv 2603.28254, R, C, RC.

    In fp32, on (..., rows, columns); both sums are those of the input. The matrix is first divided by its largest
    element, so ``eps``, which is added to the sums, means the same for small gradients; the iteration has no scale.
    """
    x = matrices.float()
    largest: Tensor = torch.linalg.vector_norm(x, math.inf, (-2, -1), keepdim=True)
    x = x / largest.clamp(min=torch.finfo(x.dtype).tiny)
    factors = [_one_over_norm(x, dim, eps) for dim in dims]
    for factor in factors:
        x *= factor
    return x


def renormalize(update: Tensor, mode: str) -> Tensor:
    """Divide each row, each column, or both in turn, by its norm: Muon+, arXiv 2602.21545.

    "frobenius" is nanochat's: the whole matrix has the norm of an orthogonal one, sqrt(min(rows, columns)). Computed in
    fp32; returns the dtype of ``update``, and leaves it as it is.
    """
    x = update.float()
    if mode == "frobenius":
        norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        return (x * (math.sqrt(min(x.shape[-2:])) / norm.clamp(min=FROBENIUS_EPS))).to(update.dtype)
    for line in mode.split("_"):
        x = x * _one_over_norm(x, -1 if line == "row" else -2, MUON_PLUS_EPS)
    return x.to(update.dtype)


def _one_over_norm(x: Tensor, dim: int, eps: float) -> Tensor:
    """1 / sqrt(sum of squares + eps)."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return norms.square().add(eps).rsqrt()


@dataclass
class Muon(MatrixRule):
    """torch.optim.Muon's update as a matrix rule; its state is one ``momentum_buffer`` per element.

    With ``precondition`` "muon2" there is also a ``second_moment`` per element: V <- beta2 V + (1 - beta2) G^2, by
    root, plus eps, the direction is divided before it is sent (Muon^2, arXiv 2604.09967). V has no bias correction,
    which would only scale the direction.

    ``momentum_form`` "ema" is what torch computes (its docstring shows the other form); it equals the sum times 1 -
    momentum, also in the buffer, so the forms' checkpoints are not interchangeable. If the iteration is in bfloat16, so
    is the exchange, without loss: the iteration begins with that cast and ends in that dtype. All forms of decay use
    the learning rate without the factor by shape.
    """

    lr: float = option(
        None, f"{RATE}: 0.02 for adjust_lr_fn 'original', AdamW's rate for 'match_rms_adamw'", TORCH, ge=0
    )
    weight_decay: float = option(
        0.1, "weight decay; a step multiplies it by the learning rate, without the factor by shape", TORCH, ge=0
    )
    momentum: float = option(0.95, "momentum of the average of gradients", TORCH, ge=0, lt=1)
    nesterov: bool = option(True, NESTEROV, TORCH)
    ns_coefficients: Coefficients = option(
        (3.4445, -4.7750, 2.0315),
        "coefficients of Newton-Schulz: three numbers, a list of three for every step, or a table's name. "
        "Tables: 'simple' (any number of steps; the default's numbers), 'quintic' (5 steps), 'polar_express' "
        "(any number of steps), 'polar_express_5' (5 steps; dion's and nanochat's)",
        f"{TORCH}; quintic: Cesista, You and Jordan 2025; Polar Express, arXiv 2505.16932",
        check=checked_coefficients,
    )
    eps: float = option(
        1e-7,
        "smallest norm that a matrix is divided by; a matrix below this norm is scaled up first",
        TORCH,
        ge=0,
    )
    ns_steps: int = option(5, "number of Newton-Schulz iterations", TORCH, ge=1, lt=100)
    adjust_lr_fn: ScaleName | None = option(None, SCALE, f"{TORCH}; Megatron-Core; dion; Scion, arXiv 2502.07529")
    extra_scale_factor: float = option(
        1.0, "further factor, multiplied with the factor by shape", "Megatron-Core", ge=0
    )
    momentum_form: Literal["ema", "sum"] = option(
        "ema",
        "'ema': B <- momentum B + (1 - momentum) G, as in torch; 'sum': B <- momentum B + G, as in dion",
        f"{TORCH}; {MOONLIGHT}",
    )
    momentum_dtype: Literal["int8"] | None = option(
        None,
        "dtype of the momentum between steps. 'int8': 8 bits, with an fp32 scale for each 256 elements of a row, and "
        "fp32 in checkpoints; None: the engine's",
        MUON8,
    )
    weight_decay_form: Literal["decoupled", "coupled", "cautious"] = option(
        "decoupled",
        "what decays. 'decoupled': the weight; 'coupled': the decay is added to the gradient; 'cautious': only "
        "elements that the update moves towards zero",
        f"{TORCH}; {CAUTIOUS}",
    )
    ns_dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16", "dtype of the iteration and of the exchange", "this package"
    )
    ns_method: NsMethod = option(
        "standard",
        "implementation of Newton-Schulz. 'standard': torch's iteration, bit for bit; 'gram': Gram "
        "Newton-Schulz for all matrices; 'auto': the faster one for each shape, by flops and memory traffic, with "
        "quack-kernels if that is installed and has kernels for the GPU; 'gram-newton-schulz' and 'quack-kernels': "
        "the kernels of that package, on NVIDIA GPUs",
        "torch.optim.Muon; Dao-AILab, Gram Newton-Schulz and QuACK",
    )
    gram_aspect: float | None = option(
        None,
        "smallest ratio of longer to shorter side for Gram Newton-Schulz; None: ns_method decides",
        "Dao-AILab, Gram Newton-Schulz",
        ge=1,
    )
    gram_restarts: tuple[int, ...] | None = option(
        None,
        "numbers of steps after which Gram Newton-Schulz recomputes its matrices. None: where rounding "
        "requires a restart, after 3 of 5 steps with torch's coefficients, and after 2 with a table",
        "Dao-AILab, Gram Newton-Schulz; the default is this package's",
        check=checked_restarts,
    )
    precondition: Precondition = option(
        "none",
        "scaling before Newton-Schulz. 'muoneq_r', 'muoneq_c', 'muoneq_rc': divide rows, columns or both by "
        "their norms; 'aol': divide rows of the shorter side by the roots of the sums of |XX^T|; 'muon2': "
        "divide each element by the root of the mean of its squared gradients",
        f"{MUONEQ}; {TURBO}; {MUON2}",
    )
    precondition_beta2: float = option(0.95, "decay rate of the mean of 'muon2'", f"{MUON2}; dion", ge=0, lt=1)
    precondition_eps: float = option(
        1e-8,
        "term added to the root of the mean of 'muon2', and to the sums of squares of 'muoneq'",
        f"{MUONEQ}; dion",
        gt=0,
    )
    renormalize: Renormalize = option(
        "none",
        "scaling after Newton-Schulz. 'row', 'col': divide rows or columns by their norms; 'row_col', "
        "'col_row': both, in this order; 'frobenius': scale the matrix to the norm sqrt(min(rows, columns))",
        f"{MUON_PLUS}; nanochat",
    )
    hyperball: bool = option(
        False,
        "keep the weight's Frobenius norm, in place of weight decay: MuonH, or NorMuonH with 'normuon'",
        HYPERBALL,
    )
    per_head: bool = option(
        False,
        "make every attention head's query, key and value weights a matrix, also in fused weights",
        PER_HEAD,
    )
    uw_floor: float = option(
        0.0,
        "smallest ratio of the update's norm to the weight's norm; the source uses 0.35",
        FLOOR,
        ge=0,
    )
    block_period: int = option(
        1,
        "number of steps from one update of whole matrices to the next; the paper uses 5. The steps between "
        "orthogonalize the block of a matrix that each rank stores, and send no matrix",
        MUONBP,
        ge=1,
    )
    block_lr_scale: float = option(
        1.0,
        "learning rate of blocks, as a multiple of lr; the factor by shape is that of the block",
        MUONBP,
        ge=0,
    )
    defined: ClassVar[Mapping[str, Sequence[str]]] = DEFINED  # the values of ``renormalize`` by ``precondition``

    def __post_init__(self) -> None:
        """Raises ValueError for options that do not fit each other."""
        self.exchange_dtype = self.iterates_in
        self._check_scaling()
        self._check_norms()
        self._check_blocks()
        by_step(self.ns_coefficients, self.ns_steps)
        restarts = self.gram_restarts or ()
        if list(restarts) != sorted(set(restarts)) or any(restart >= self.ns_steps for restart in restarts):
            raise ValueError(
                f"gram_restarts: expected increasing numbers below ns_steps ({self.ns_steps}), found {restarts!r}"
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
    def state_keys(self) -> tuple[str, ...]:
        return ("momentum_buffer", "second_moment") if self.precondition == "muon2" else ("momentum_buffer",)

    @property
    def quantized(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum_dtype == "int8" else ()

    @property
    def transform_reads(self) -> Sequence[str] | None:
        return None if self.ns_method in PACKAGES else OF_TRANSFORM  # nobody has captured a package's kernels

    def _check_scaling(self) -> None:
        if self.renormalize not in self.defined.get(self.precondition, ()):
            pairs = [f"{before!r} with {', '.join(map(repr, after))}" for before, after in self.defined.items()]
            raise ValueError(
                f"expected {'; '.join(pairs)}; found precondition {self.precondition!r} with renormalize "
                f"{self.renormalize!r}, a combination without a publication for {type(self).__name__}"
            )
        for name, those in {"precondition_beta2": ("muon2",), "precondition_eps": ("muon2", *LINES)}.items():
            given = getattr(self, name)
            if self.precondition not in those and given != getattr(Muon, name):
                raise ValueError(
                    f"{name}: expected none with precondition {self.precondition!r}, which does not use it; found "
                    f"{given!r}; leave it out, or set precondition to {' or '.join(map(repr, those))}"
                )
        if self.precondition == "aol" and self.ns_method == "gram-newton-schulz":
            raise ValueError(
                "precondition is 'aol', but gram-newton-schulz divides by the norm itself; leave precondition out, or "
                "set ns_method to 'auto'"
            )

    def _check_norms(self) -> None:
        if self.hyperball and self.weight_decay:
            raise ValueError(
                f"hyperball keeps the weight's norm, but weight_decay is {self.weight_decay}; set weight_decay to 0"
            )
        if self.hyperball and (self.adjust_lr_fn or self.extra_scale_factor != 1 or self.uw_floor):
            raise ValueError(
                f"hyperball makes every update lr times the weight's norm long, but adjust_lr_fn is "
                f"{self.adjust_lr_fn!r}, extra_scale_factor {self.extra_scale_factor} and uw_floor {self.uw_floor}; "
                "leave them out"
            )
        if self.uw_floor and self.weight_decay_form == "cautious":
            raise ValueError("uw_floor: expected 0 with weight_decay_form 'cautious'; no publication combines them")

    def _check_blocks(self) -> None:
        others = {"precondition": self.precondition != "none", "renormalize": self.renormalize != "none"}
        others |= {"hyperball": self.hyperball, "uw_floor": self.uw_floor > 0, "per_head": self.per_head}
        others |= {f"the second moments of {type(self).__name__}": isinstance(self, OwnerStateRule)}
        if self.block_period > 1 and any(others.values()):
            found = " and ".join(name for name, there in others.items() if there)
            raise ValueError(
                f"block_period: expected 1 with {found}, found {self.block_period}; no publication combines them"
            )
        if self.block_period == 1 and self.block_lr_scale != 1:
            raise ValueError(
                f"block_lr_scale: expected 1 without block_period, found {self.block_lr_scale}; set block_period, 5 in "
                "the paper"
            )

    @property
    def iterates_in(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ns_dtype)
        return dtype

    @property
    def needs_large_rate(self) -> bool:
        return self.hyperball or SCALES[self.adjust_lr_fn or "original"] not in (match_rms_adamw, spectral)

    def gradient(self, grad: Tensor, value: Tensor) -> Tensor:
        if self.weight_decay_form != "coupled" or not self.weight_decay:
            return grad
        return grad.add(value.to(grad.dtype), alpha=self.weight_decay)

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        if self.precondition == "muon2":
            state["second_moment"].mul_(self.precondition_beta2).addcmul_(grad, grad, value=1 - self.precondition_beta2)
        if self.momentum_form == "ema":
            state["momentum_buffer"].lerp_(grad, 1 - self.momentum)
        else:
            state["momentum_buffer"].mul_(self.momentum).add_(grad)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        buffer = state["momentum_buffer"]
        if self.nesterov and self.momentum_form == "ema":
            buffer = grad.lerp(buffer, self.momentum)
        elif self.nesterov:
            buffer = grad.add(buffer, alpha=self.momentum)
        if self.precondition == "muon2":
            buffer = buffer / state["second_moment"].sqrt().add_(self.precondition_eps)
        return buffer

    def accumulate_all(self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        self._accumulate([self.gradient(grad, value) for grad, value in zip(grads, values)], states)

    def _accumulate(self, grads: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        """``accumulate``, given the results of ``gradient``."""
        buffers = [state["momentum_buffer"] for state in states]
        if self.precondition == "muon2":
            moments = [state["second_moment"] for state in states]
            multiply_all(moments, self.precondition_beta2)
            torch._foreach_addcmul_(moments, grads, grads, value=1 - self.precondition_beta2)
        if self.momentum_form == "ema":
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        else:
            multiply_all(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)

    def directions(
        self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        grads = [self.gradient(grad, value) for grad, value in zip(grads, values)]
        self._accumulate(grads, states)
        found = [state["momentum_buffer"] for state in states]
        if self.nesterov and self.momentum_form == "ema":
            found = list(torch._foreach_lerp(grads, found, self.momentum))
        elif self.nesterov:
            found = list(torch._foreach_add(grads, found, alpha=self.momentum))
        if self.precondition == "muon2":
            found = self._over_roots(found, [state["second_moment"] for state in states])
        return found

    def _over_roots(self, found: list[Tensor], moments: list[Tensor]) -> list[Tensor]:
        """The directions ``found`` over the roots of the second moments, as in ``direction``."""
        roots = list(torch._foreach_sqrt(moments))
        add_to_all(roots, self.precondition_eps)
        return list(torch._foreach_div(found, roots))

    def transform(self, matrices: Tensor) -> Tensor:
        if self.precondition in LINES:
            # The dtype of the exchange comes first, so that a matrix that is not exchanged takes the same step.
            matrices = equilibrate(matrices.to(self.iterates_in), LINES[self.precondition], self.precondition_eps)
        update = self._orthogonalized(matrices)
        return update if self.renormalize == "none" else renormalize(update, self.renormalize)

    def _orthogonalized(self, matrices: Tensor) -> Tensor:
        on_gram, package = self.way(matrices.shape[-2:], matrices.device)
        options: dict[str, Any] = {"steps": self.ns_steps, "coefficients": self.ns_coefficients, "eps": self.eps}
        options["dtype"] = self.iterates_in
        if package == "gram-newton-schulz":
            return packaged_newton_schulz(matrices, **options, restarts=self.gram_restarts, on_gram=on_gram)
        symmetric = product if package is None else quack_product
        options["aol"] = self.precondition == "aol"
        if on_gram:
            return gram_newton_schulz(matrices, **options, restarts=self.gram_restarts, symmetric=symmetric)
        return newton_schulz(matrices, **options, symmetric=symmetric)

    def way(self, shape: Sequence[int], device: torch.device) -> tuple[bool, str | None]:
        """Whether a matrix takes Gram Newton-Schulz, and the package that computes its symmetric products, if any."""
        package = self.package_on(device)
        if self.ns_method == "auto" and not quack_takes(shape):
            package = None
        return takes_gram(shape, self.ns_method, self.gram_aspect, symmetric=package is not None), package

    def package_on(self, device: torch.device) -> str | None:
        """The package with kernels that this rule takes there: the one that was asked for, or what "auto" finds."""
        if self.ns_method in PACKAGES:
            return self.ns_method
        found = self.ns_method == "auto" and self.iterates_in == torch.bfloat16 and has_package(QUACK, device)
        return QUACK if found else None

    def check_device(self, device: torch.device) -> None:
        if self.ns_method in PACKAGES:
            check_package(self.ns_method, device)

    def scale(self, shape: tuple[int, int]) -> float:
        return SCALES[self.adjust_lr_fn or "original"](*shape) * self.extra_scale_factor

    @property
    def by_norms(self) -> bool:
        return self.hyperball or self.uw_floor > 0

    def factors(self, sums: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Hyperball's, or with the floor under ||U|| / ||W||; an update of zeros stays zero."""
        if self.hyperball:
            return keeping_norms(sums, self.lr)
        squares, _, of_updates = sums.unbind(-1)
        filled = {shape: sums.new_full((), self.scale(shape)) for shape in set(shapes)}  # there: no copy to wait for
        scales = torch.stack([filled[shape] for shape in shapes])
        factor = (self.uw_floor * squares.sqrt() / (scales * of_updates.sqrt())).clamp(min=1.0)
        decay = self.weight_decay if self.weight_decay_form == "decoupled" else 0.0
        move = self.lr * scales * torch.where(of_updates == 0, 1.0, factor)
        return torch.full_like(scales, 1 - self.lr * decay), move

    def of_blocks(self) -> MatrixRule:
        rule = copy(self)
        rule.lr = self.lr * self.block_lr_scale
        return rule

    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        if self.by_norms:
            keep, move = self.factors(sums_of(value.reshape(1, -1), update.reshape(1, -1)), [shape])
            self.apply_by(value, update, keep[0], move[0])
            return
        if self.weight_decay_form == "decoupled":
            super().apply(value, update, shape)
            return
        if self.weight_decay_form == "cautious":
            # Signs, because the product of two small numbers may be zero. Zero counts as towards zero.
            aligned = value.sign().mul_(update.sign()) >= 0
            value.mul_(torch.where(aligned, 1 - self.lr * self.weight_decay, 1.0))
        value.add_(update, alpha=-self.lr * self.scale(shape))

    def apply_all(self, values: list[Tensor], updates: list[Tensor], shapes: Sequence[tuple[int, int]]) -> None:
        if self.weight_decay_form == "cautious" or self.by_norms:
            super().apply_all(values, updates, shapes)
            return
        if self.weight_decay_form == "decoupled":
            multiply_all(values, 1 - self.lr * self.weight_decay)
        for shape in set(shapes):
            some = [number for number, other in enumerate(shapes) if other == shape]
            of_shape, moves = ([tensors[number] for number in some] for tensors in (values, updates))
            torch._foreach_add_(of_shape, moves, alpha=-self.lr * self.scale(shape))
