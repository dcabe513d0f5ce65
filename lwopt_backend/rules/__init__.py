"""Rules: whole matrices in, whole matrices out. torch only, never torch.distributed."""

from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.newton_schulz import newton_schulz
from lwopt_backend.rules.protocol import MatrixRule

__all__ = ["MatrixRule", "Muon", "newton_schulz"]
