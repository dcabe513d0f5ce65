"""NorMuon: Muon whose neurons have second moments (Li et al., "NorMuon", arXiv 2510.05491)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lwopt_backend.rules.second_moment import SecondMomentMuon


@dataclass
class NorMuon(SecondMomentMuon):
    """One second moment per row of the weight, an output neuron: (rows, 1) at the owner.

    ``second_moment_of`` "longer_side" keeps one per line of the longer side instead: (1, columns) for wide matrices,
    which is what Emerging-Optimizers and modded-nanogpt do.
    """

    second_moment_of: str = "rows"

    def mean_squares(self, update: Tensor) -> Tensor:
        return update.square().mean(dim=-1 if self._by_rows(update.shape) else -2, keepdim=True)

    def second_moment_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (shape[0], 1) if self._by_rows(shape) else (1, shape[1])

    def _by_rows(self, shape: tuple[int, ...]) -> bool:
        return self.second_moment_of == "rows" or shape[-2] >= shape[-1]
