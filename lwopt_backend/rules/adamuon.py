"""AdaMuon: Muon whose elements have second moments (Si, Zhang and Shen, "AdaMuon", arXiv 2507.11005)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.rules.second_moment import SecondMomentMuon


@dataclass
class AdaMuon(SecondMomentMuon):
    """A second moment per element: a matrix as large as the weight, in fp32, at the owner.

    What is orthogonalized is the sign of the momentum; not ``sign_momentum``: the momentum itself, as in the paper's
    first version, Emerging-Optimizers and pytorch_optimizer.
    """

    sign_momentum: bool = True

    def transform(self, matrices: Tensor) -> Tensor:
        return super().transform(_signs(matrices.to(self.iterates_in)) if self.sign_momentum else matrices)

    def mean_squares(self, update: Tensor) -> Tensor:
        return update.square()

    def second_moment_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape


def _signs(matrices: Tensor) -> Tensor:
    """What is not finite stays as it is, where it has a sign too: it must be seen."""
    return torch.where(matrices.isfinite(), matrices.sign(), matrices)
