"""AdamH: Adam's update of a matrix that keeps its norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.rules.protocol import MatrixRule, add_to_all, keeping_norms, multiply_all, option, sums_of

HYPERBALL = "Hyperball, arXiv 2606.16899"
ADAM = "torch.optim.AdamW"


def checked_betas(given: Any) -> tuple[float, float]:
    if not isinstance(given, (list, tuple)) or len(given) != 2 or not all(_is_beta(beta) for beta in given):
        raise ValueError(f"betas: expected two numbers from 0 to below 1; found {given!r}")
    return float(given[0]), float(given[1])


def _is_beta(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < 1


@dataclass
class AdamH(MatrixRule):
    """R Norm(W - lr R Norm(U)) with Adam's U = M / (sqrt(V) + eps) and R = ||W||: arXiv 2606.16899.

    M and V have no bias correction. M's would only scale U, whose length has no effect. V's would also only scale it,
    except for ``eps``, which is therefore larger by 1 / sqrt(1 - beta2^t) in step t than in the paper. U is
    element-wise, but its norm is not: U is computed where the elements are, and is sent to the owner in fp32 and back.
    """

    lr: float = option(0.01, "share of the weight's norm that a step moves it by", HYPERBALL, ge=0)
    betas: tuple[float, float] = option(
        (0.9, 0.95), "of the moving averages of gradients and squares", ADAM, check=checked_betas
    )
    eps: float = option(1e-8, "term added to the root of the mean square", ADAM, gt=0)
    weight_decay: float = option(0.0, "none: the norm is kept", HYPERBALL, ge=0)

    state_keys = ("exp_avg", "exp_avg_sq")
    transform_reads = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a weight decay."""
        if self.weight_decay:
            raise ValueError(
                f"weight_decay: expected 0, because AdamH keeps the weight's norm; found {self.weight_decay}"
            )

    @property
    def needs_large_rate(self) -> bool:
        return True

    @property
    def by_norms(self) -> bool:
        return True

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        state["exp_avg"].lerp_(grad, 1 - self.betas[0])
        state["exp_avg_sq"].mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(self.eps)

    def accumulate_all(self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_([state["exp_avg"] for state in states], grads, 1 - self.betas[0])
        multiply_all(squares, self.betas[1])
        torch._foreach_addcmul_(squares, grads, grads, value=1 - self.betas[1])

    def directions(
        self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        self.accumulate_all(grads, values, states)
        roots = list(torch._foreach_sqrt([state["exp_avg_sq"] for state in states]))
        add_to_all(roots, self.eps)
        return torch._foreach_div([state["exp_avg"] for state in states], roots)

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices

    def factors(self, sums: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        return keeping_norms(sums, self.lr)

    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        keep, move = self.factors(sums_of(value.reshape(1, -1), update.reshape(1, -1)), [shape])
        self.apply_by(value, update, keep[0], move[0])
