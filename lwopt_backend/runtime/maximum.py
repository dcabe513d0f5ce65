"""The largest of all ranks' numbers, where one may be NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lwopt_backend.runtime.ranks import Collectives


def largest_of_all(collectives: Collectives, value: Tensor) -> Tensor:
    """The largest of every rank's ``value``, without dimensions; NaN if any rank's is. Called on all ranks.

    gloo's MAX compares, and so forgets a NaN or what came before it, by the order of ranks.
    """
    both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), value.isnan().to(value.dtype)])
    collectives.all_reduce_max(both).wait()
    return torch.where(both[1] > 0, math.nan, both[0])
