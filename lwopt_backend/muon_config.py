"""``"type": "LayerWiseMuon"``: Muon's options, AdamW's in a section, DeepSpeed's beside them, in one flat model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import ZeROConfig
from lwopt_backend.options import parse
from lwopt_backend.rule_options import AdamWOptions, MuonOptions


class LayerWiseMuonConfig(ZeROConfig, MuonOptions):
    """Short for ``LayerWise`` with ``"matrix": {"name": "muon", ...}, "elementwise": {"name": "adamw", ...}``."""

    adamw: AdamWOptions = AdamWOptions()
    overrides: Any = ()  # ``settings_of`` looks at them


def muon_settings(options: Mapping[str, Any], where: str) -> tuple[Rules, ZeROConfig]:
    """Raises ValueError that names every wrong key."""
    config = parse(LayerWiseMuonConfig, options, where)
    muon = {key: getattr(config, key) for key in MuonOptions.model_fields}
    host = {key: getattr(config, key) for key in ZeROConfig.model_fields if key in config.model_fields_set}
    sections = {
        "matrix": {"name": "muon", **muon},
        "elementwise": {"name": "adamw", **config.adamw.model_dump()},
        "overrides": config.overrides,
    }
    return settings_of(ZeROConfig, {**host, **sections}, where)
