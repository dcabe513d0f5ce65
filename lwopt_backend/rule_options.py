"""The options of the rules that come with the package. Names and defaults are torch.optim's where it has the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, StrictBool, model_validator

from lwopt_backend.options import Aspect, BelowOne, Count, NonNegative, Options, Steps, option
from lwopt_backend.rules.coefficients import Coefficients, by_step, table_of

TORCH = "torch.optim.Muon"
ADAMW = "torch.optim.AdamW"
MOONLIGHT = "Muon is Scalable for LLM Training, arXiv 2502.16982"
NORMUON = "NorMuon, arXiv 2510.05491"
ADAMUON = "AdaMuon, arXiv 2507.11005"
CAUTIOUS = "Cautious Weight Decay, arXiv 2510.12402"
SCALE = (
    "factor on the learning rate by a matrix's rows and columns. 'original' (Megatron: 'shape_scaling'): "
    "sqrt(max(1, rows / columns)); 'match_rms_adamw' (dion: 'rms_norm'): 0.2 sqrt(max(rows, columns)); 'spectral': "
    "Megatron's sqrt(max(rows, columns)); 'unit_rms_norm' (dion: 'spectral_norm'): sqrt(rows / columns); 'none': 1. "
    "Mind that 'spectral' and 'spectral_norm' are not the same. Without a value: 'original'"
)
ScaleName = Literal[
    "original", "match_rms_adamw", "shape_scaling", "spectral", "unit_rms_norm", "spectral_norm", "rms_norm", "none"
]


def _coefficients(given: Any) -> Coefficients:
    """A name, three numbers, or three for every step; lists become tuples."""
    triples = table_of(given).triples
    if not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"ns_coefficients: expected finite numbers; found {given!r}")
    if isinstance(given, str):
        return given
    return triples if isinstance(given[0], Sequence) else triples[0]


class MuonOptions(Options):
    """torch.optim.Muon's arguments, then ours."""

    lr: NonNegative = option(1e-3, "learning rate, before the factor by shape", TORCH)
    weight_decay: NonNegative = option(0.1, "goes by the learning rate as it is, without the factor by shape", TORCH)
    momentum: BelowOne = option(0.95, "of the average of gradients", TORCH)
    nesterov: StrictBool = option(True, "go by the average that the next gradient like this one would give", TORCH)
    ns_coefficients: Annotated[Coefficients, PlainValidator(_coefficients)] = option(
        (3.4445, -4.7750, 2.0315),
        "of the quintic Newton-Schulz iteration: three numbers, or three for every step, or a published table: "
        "'simple' (any number of steps; these three numbers), 'quintic' (5 steps), 'polar_express' (any number), "
        "'polar_express_5' (5 steps; dion's and nanochat's)",
        f"{TORCH}; quintic: Cesista, You and Jordan 2025; Polar Express, arXiv 2505.16932",
    )
    eps: NonNegative = option(
        1e-7, "least norm that a matrix is divided by; one below it is scaled up first, so it is orthogonalized", TORCH
    )
    ns_steps: Steps = option(5, "Newton-Schulz iterations", TORCH)
    adjust_lr_fn: ScaleName | None = option(None, SCALE, f"{TORCH}; Megatron-Core; dion; Scion, arXiv 2502.07529")
    extra_scale_factor: NonNegative = option(1.0, "on the factor by shape", "Megatron-Core")
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
    gram_aspect: Aspect | None = option(
        None,
        "matrices whose longer side is at least this many times the shorter take Gram Newton-Schulz; None: none do",
        "Dao-AILab, Gram Newton-Schulz",
    )
    gram_restarts: tuple[Count, ...] | None = option(
        None,
        "numbers of steps after which Gram Newton-Schulz forms its matrices anew; None: where rounding needs it, after "
        "3 of 5 steps of torch's coefficients and after 2 of the tables'",
        "Dao-AILab, Gram Newton-Schulz; the default is ours",
    )

    @model_validator(mode="after")
    def _steps_fit(self) -> MuonOptions:
        by_step(self.ns_coefficients, self.ns_steps)
        restarts = self.gram_restarts or ()
        if list(restarts) != sorted(set(restarts)) or any(restart >= self.ns_steps for restart in restarts):
            raise ValueError(
                f"gram_restarts: expected increasing numbers below ns_steps, {self.ns_steps}; found {restarts!r}"
            )
        if self.gram_restarts is not None and self.gram_aspect is None:
            raise ValueError(
                f"gram_restarts is {restarts!r}, but without gram_aspect no matrix takes Gram Newton-Schulz; set "
                "gram_aspect, 1.0 for all matrices, or leave gram_restarts out"
            )
        return self


class SecondMomentOptions(MuonOptions):
    """What NorMuon and AdaMuon have beside Muon's options."""

    nesterov: StrictBool = option(False, "go by the average that the next gradient like this one would give", TORCH)
    beta2: BelowOne = option(0.95, "of the moving average of the update's squares", f"{NORMUON}; {ADAMUON}")
    second_moment_eps: NonNegative = option(1e-8, "added to the root of that average", "dion")
    update_norm: Literal["match_rms", "preserve", "none"] = option(
        "match_rms",
        "the update's length: a root mean square of 0.2, in place of the factor by shape; or the Frobenius norm that "
        "it had before the division, as in dion and, since 0.3.0, in Emerging-Optimizers' NorMuon; or what the "
        "division gave, as in its AdaMuon. 0.2.0 of it is 'none' with adjust_lr_fn 'none' in both",
        f"{NORMUON}; {ADAMUON}; dion; Emerging-Optimizers",
    )

    @model_validator(mode="after")
    def _one_scale(self) -> SecondMomentOptions:
        if self.update_norm == "match_rms" and self.adjust_lr_fn is not None:
            raise ValueError(
                f"adjust_lr_fn is {self.adjust_lr_fn!r}, but with update_norm 'match_rms' there is no factor by shape; "
                "leave adjust_lr_fn out, or choose update_norm 'preserve' or 'none'"
            )
        return self


class NorMuonOptions(SecondMomentOptions):
    """Muon whose neurons have second moments."""

    second_moment_of: Literal["rows", "longer_side"] = option(
        "rows",
        "a second moment for every row, an output neuron; or for every line of the longer side, as Emerging-Optimizers",
        f"{NORMUON}; Emerging-Optimizers",
    )


class AdaMuonOptions(SecondMomentOptions):
    """Muon whose elements have second moments."""

    sign_momentum: StrictBool = option(
        True, "orthogonalize the signs of the momentum; false: the momentum, as Emerging-Optimizers", ADAMUON
    )


class AdamWOptions(Options):
    """torch.optim.AdamW's arguments."""

    lr: NonNegative = option(1e-3, "learning rate", ADAMW)
    betas: tuple[BelowOne, BelowOne] = option((0.9, 0.999), "of the moving averages of gradients and squares", ADAMW)
    eps: NonNegative = option(1e-8, "added to the root of the mean square", ADAMW)
    weight_decay: NonNegative = option(1e-2, "goes by the learning rate", ADAMW)
    amsgrad: StrictBool = option(False, "divide by the largest mean square so far", ADAMW)
    foreach: StrictBool | None = option(None, "torch's multi-tensor implementation; None: torch decides", ADAMW)
    fused: StrictBool | None = option(None, "torch's fused implementation; None: torch decides", ADAMW)
    weight_decay_form: Literal["decoupled", "cautious"] = option(
        "decoupled", "decay the weight; or only what the update moves towards zero", CAUTIOUS
    )

    @model_validator(mode="after")
    def _one_implementation(self) -> AdamWOptions:
        if self.foreach and self.fused:
            raise ValueError("foreach and fused are both true, but torch has them one at a time; leave one of them out")
        return self
