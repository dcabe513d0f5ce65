"""NorMuon and AdaMuon: the orthogonalized update is divided by the root of its second moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lwopt_backend.rules.muon import NESTEROV, RATE, TORCH, Muon
from lwopt_backend.rules.protocol import OwnerStateRule, option

NORMUON = "NorMuon, arXiv 2510.05491"
ADAMUON = "AdaMuon, arXiv 2507.11005"
LEAST_NORM = 1e-8  # of the divided update, so that a zero matrix stays zero
ADAMW_RMS = 0.2  # the usual root mean square of AdamW's updates, "Muon is Scalable for LLM Training", arXiv 2502.16982


@dataclass
class SecondMomentMuon(Muon, OwnerStateRule):
    """Muon whose update O is divided, element by element, by the root of a moving average v of O's squares.

    v <- beta2 v + (1 - beta2) mean(O^2), in fp32, is owner state; ``mean_squares`` is the mean. Then O becomes O /
    (sqrt(v) + second_moment_eps), and ``update_norm`` sets its length by norms of the whole matrix, which only the
    owner has. With "match_rms" there is no factor by shape.

    v has no bias correction: 'match_rms' and 'preserve' cancel it, and other implementations of 'none' also have none.
    """

    lr: float = option(None, f"{RATE}: AdamW's rate for update_norm 'match_rms', 0.02 for 'preserve'", TORCH, ge=0)
    nesterov: bool = option(False, NESTEROV, TORCH)
    beta2: float = option(
        0.95, "decay rate of the average of the update's squares", f"{NORMUON}; {ADAMUON}", ge=0, lt=1
    )
    second_moment_eps: float = option(1e-8, "term added to the root of the average of squares", "dion", ge=0)
    update_norm: Literal["match_rms", "preserve", "none"] = option(
        "match_rms",
        "length of the update. 'match_rms': a root mean square of 0.2, in place of the factor by shape; "
        "'preserve': the Frobenius norm before the division; 'none': the length that the division gives",
        f"{NORMUON}; {ADAMUON}; dion; Emerging-Optimizers",
    )

    more_reads: ClassVar[Sequence[str]] = ()  # options that ``transform_with`` reads in a subclass

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_norm == "match_rms" and self.adjust_lr_fn is not None:
            raise ValueError(
                f"adjust_lr_fn: expected none with update_norm 'match_rms', which has no factor by shape; found "
                f"{self.adjust_lr_fn!r}; leave it out, or choose update_norm 'preserve' or 'none'"
            )

    @property
    def needs_large_rate(self) -> bool:
        return self.hyperball or self.update_norm == "preserve" and super().needs_large_rate

    @property
    def transform_reads(self) -> Sequence[str] | None:
        of_muon = super().transform_reads
        return of_muon and (*of_muon, "beta2", "second_moment_eps", "update_norm", "exchange_dtype", *self.more_reads)

    def mean_squares(self, update: Tensor) -> Tensor:
        """The squares of a matrix's update that v averages over time, in v's shape."""
        raise NotImplementedError(f"{type(self).__name__} has no mean_squares")

    def second_moment_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of v for a matrix of ``shape``."""
        raise NotImplementedError(f"{type(self).__name__} has no second_moment_shape")

    def new_owner_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
        return {"second_moment": torch.zeros(self.second_moment_shape(shape), device=device)}

    def transform_with(self, matrix: Tensor, state: dict[str, Any]) -> Tensor:
        """Returns the dtype of the exchange, so that a matrix that is not exchanged takes the same step."""
        update = self.transform(matrix).float()
        moment: Tensor = state["second_moment"].lerp_(self.mean_squares(update), 1 - self.beta2)
        divided = update / moment.sqrt().add_(self.second_moment_eps)
        if self.update_norm == "match_rms":
            divided *= divided.numel() ** 0.5 / divided.norm().clamp(min=LEAST_NORM)
        elif self.update_norm == "preserve":
            divided *= update.norm() / divided.norm().clamp(min=LEAST_NORM)
        return divided.to(self.exchange_dtype)

    def scale(self, shape: tuple[int, int]) -> float:
        return ADAMW_RMS * self.extra_scale_factor if self.update_norm == "match_rms" else super().scale(shape)


@dataclass
class NorMuon(SecondMomentMuon):
    """One second moment per row of the weight, an output neuron: (rows, 1) at the owner.

    With ``second_moment_of`` "longer_side" there is one per line of the longer side: (1, columns) for wide matrices, as
    in Emerging-Optimizers and modded-nanogpt.
    """

    second_moment_of: Literal["rows", "longer_side"] = option(
        "rows",
        "'rows': a second moment for every row; 'longer_side': one for every line of the longer side",
        f"{NORMUON}; Emerging-Optimizers",
    )
    more_reads: ClassVar[Sequence[str]] = ("second_moment_of",)
    # nanochat has both; modded-nanogpt scales rows alone.
    defined: ClassVar[Mapping[str, Sequence[str]]] = dict.fromkeys(("none", "muoneq_r"), ("none", "frobenius"))

    def mean_squares(self, update: Tensor) -> Tensor:
        return update.square().mean(dim=-1 if self._by_rows(update.shape) else -2, keepdim=True)

    def second_moment_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (shape[0], 1) if self._by_rows(shape) else (1, shape[1])

    def _by_rows(self, shape: tuple[int, ...]) -> bool:
        return self.second_moment_of == "rows" or shape[-2] >= shape[-1]


@dataclass
class AdaMuon(SecondMomentMuon):
    """A second moment per element: a matrix of the weight's shape, in fp32, at the owner.

    The sign of the momentum is orthogonalized; without ``sign_momentum`` the momentum itself, as in the paper's first
    version, Emerging-Optimizers and pytorch_optimizer.
    """

    sign_momentum: bool = option(
        True,
        "orthogonalize the signs of the momentum; if false, the momentum",
        ADAMUON,
    )
    defined: ClassVar[Mapping[str, Sequence[str]]] = {"none": ("none",)}
    more_reads: ClassVar[Sequence[str]] = ("sign_momentum",)
    transform_reads = SecondMomentMuon.transform_reads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_norms:
            raise ValueError("expected AdaMuon without hyperball and uw_floor; no publication combines them")

    def transform(self, matrices: Tensor) -> Tensor:
        return super().transform(_signs(matrices.to(self.iterates_in)) if self.sign_momentum else matrices)

    def mean_squares(self, update: Tensor) -> Tensor:
        return update.square()

    def second_moment_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape


def _signs(matrices: Tensor) -> Tensor:
    """The signs; non-finite elements stay as they are, so that they are noticed."""
    return torch.where(matrices.isfinite(), matrices.sign(), matrices)
