"""Element-wise parameters: torch's own optimizer, stepped on whatever tensors this rank stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.runtime.storage import Slices


def step_elementwise(
    optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], parts: Sequence[Slices]
) -> None:
    """One step of a torch.optim optimizer over ``parts``, whose state stays in their ``state`` dictionaries.

    An element-wise update does not care how parameters are cut: each rank steps its own elements, nothing travels. The
    dictionaries are used as they are, so what the optimizer adds to them is kept.
    """
    if not parts:
        return
    inner = optimizer_class([part.value for part in parts], **options)
    for part in parts:
        part.value.grad = part.grad
        inner.state[part.value] = part.state
    inner.step()
