"""The caller's contexts, kept away from what this package computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context, or decorator, in which autocast, inference mode and a default device of the caller have no effect.

    They would choose the dtype of Newton-Schulz, make state that later steps may not change, and put flags elsewhere.
    Inference mode is left with gradients enabled.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
