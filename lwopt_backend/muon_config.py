"""``"type": "LayerWiseMuon"``: Muon's options, AdamW's in a section, DeepSpeed's beside them, in one flat model.

Both types take the entries that were written for DeepSpeed's Muon and for AdamW, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import ZeROConfig
from lwopt_backend.foreign_entries import translated
from lwopt_backend.options import parse
from lwopt_backend.rule_options import AdamWOptions, MuonOptions


class LayerWiseMuonConfig(ZeROConfig, MuonOptions):
    """Short for ``LayerWise`` with ``"matrix": {"name": "muon", ...}, "elementwise": {"name": "adamw", ...}``."""

    adamw: AdamWOptions = AdamWOptions()
    overrides: Any = ()  # ``settings_of`` looks at them


def muon_settings(options: Mapping[str, Any], where: str) -> tuple[Rules, ZeROConfig]:
    """Raises ValueError that names every wrong key."""
    options, note = translated(options, where)
    rules, config = settings_of(ZeROConfig, _sections(parse(LayerWiseMuonConfig, options, where)), where)
    return _noted(rules, note), config


def layer_wise_settings(options: Mapping[str, Any], where: str) -> tuple[Rules, ZeROConfig]:
    """``settings_of`` for DeepSpeed, also of an entry that was written for an optimizer of others."""
    options, note = translated(options, where)
    if note is not None:
        options = _sections(parse(LayerWiseMuonConfig, options, where))
    rules, config = settings_of(ZeROConfig, options, where)
    return _noted(rules, note), config


def _sections(config: LayerWiseMuonConfig) -> dict[str, Any]:
    """The same as options of ``LayerWise``."""
    muon = {key: getattr(config, key) for key in MuonOptions.model_fields}
    host = {key: getattr(config, key) for key in ZeROConfig.model_fields if key in config.model_fields_set}
    sections = {
        "matrix": {"name": "muon", **muon},
        "elementwise": {"name": "adamw", **config.adamw.model_dump()},
        "overrides": config.overrides,
    }
    return {**host, **sections}


def _noted(rules: Rules, note: str | None) -> Rules:
    return rules if note is None else replace(rules, notes=(note,))
