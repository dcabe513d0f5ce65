"""Rules: whole matrices in, whole matrices out. torch only, never torch.distributed."""

from lwopt_backend.rules.adamuon import AdaMuon
from lwopt_backend.rules.gram_newton_schulz import gram_newton_schulz
from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.newton_schulz import newton_schulz
from lwopt_backend.rules.normuon import NorMuon
from lwopt_backend.rules.protocol import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.rules.qk_clip import QKFactors, qk_clip_factors, row_factors

__all__ = [
    "AdaMuon",
    "MatrixRule",
    "Muon",
    "NorMuon",
    "OwnerStateRule",
    "QKFactors",
    "WeightRule",
    "gram_newton_schulz",
    "newton_schulz",
    "qk_clip_factors",
    "row_factors",
]
