"""Rules: whole matrices in, whole matrices out. torch only, never torch.distributed."""

from lwopt_backend.rules.adamh import AdamH
from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.newton_schulz import gram_newton_schulz, newton_schulz
from lwopt_backend.rules.protocol import MatrixRule, OwnerStateRule, WeightRule, option
from lwopt_backend.rules.qk_clip import QKFactors, qk_clip_factors, row_factors
from lwopt_backend.rules.second_moment import AdaMuon, NorMuon

__all__ = [
    "AdaMuon",
    "AdamH",
    "MatrixRule",
    "Muon",
    "NorMuon",
    "OwnerStateRule",
    "QKFactors",
    "WeightRule",
    "gram_newton_schulz",
    "newton_schulz",
    "option",
    "qk_clip_factors",
    "row_factors",
]
