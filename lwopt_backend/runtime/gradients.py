"""What ``clip_grad_norm_`` refuses, alike on every engine."""

from __future__ import annotations

import torch
from torch import Tensor


def checked_order(norm_type: float | str) -> float:
    """The order of a norm as a number, as torch takes it ("inf", too). Raises ValueError for one of no norm."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type: expected a number above 0, or inf; found {norm_type}")
    return order


def check_finite(norm: Tensor, norm_type: float, wanted: bool) -> None:
    """Raises RuntimeError for a norm that is infinite or not a number, if ``wanted``."""
    if wanted and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}; set error_if_nonfinite=False to "
            "clip by it anyway"
        )
