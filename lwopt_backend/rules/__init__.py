"""Rules: whole matrices in, whole matrices out. torch only, never torch.distributed."""

from lwopt_backend.rules.gram_newton_schulz import gram_newton_schulz
from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.newton_schulz import newton_schulz
from lwopt_backend.rules.protocol import MatrixRule, OwnerStateRule

__all__ = ["MatrixRule", "Muon", "OwnerStateRule", "gram_newton_schulz", "newton_schulz"]
