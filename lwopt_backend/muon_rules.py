"""Muon and its variants in the registry: what an update costs, and which options it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lwopt_backend.plan.cost import SECOND_MOMENT_FLOPS, gram_flops
from lwopt_backend.registry import Shape, register_rule
from lwopt_backend.rule_options import AdaMuonOptions, MuonOptions, NorMuonOptions
from lwopt_backend.rules import AdaMuon, Muon, NorMuon
from lwopt_backend.rules.gram_newton_schulz import segments


def _muon_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    count = len(segments(options["ns_coefficients"], options["ns_steps"], options["gram_restarts"]))
    return gram_flops(shape, options["ns_steps"], options["gram_aspect"], count)


def _second_moment_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    return _muon_flops(shape, options) + SECOND_MOMENT_FLOPS * shape[0] * shape[1]


register_rule("muon", Muon, options=MuonOptions, cost=_muon_flops, work="Newton-Schulz", source="Keller Jordan 2024")
register_rule(
    "normuon",
    NorMuon,
    options=NorMuonOptions,
    cost=_second_moment_flops,
    work="Newton-Schulz, second moments by row",
    source="arXiv 2510.05491",
)
register_rule(
    "adamuon",
    AdaMuon,
    options=AdaMuonOptions,
    cost=_second_moment_flops,
    work="Newton-Schulz, second moments",
    source="arXiv 2507.11005",
)
