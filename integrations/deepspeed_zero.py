"""Layer-wise optimizers inside DeepSpeed: ``"type": "LayerWise"`` or ``"LayerWiseMuon"`` in ds_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.groups.choices import Rules, muon_settings, settings_of
from lwopt_backend.integrations.deepspeed import engine, versions
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer, ZeROLayerWise
from lwopt_backend.integrations.deepspeed.owned import OwnedLayerWise


def register() -> None:
    """Register both types with DeepSpeed for ds_config.json. Call it once, before ``deepspeed.initialize``, on all
    ranks.

    On a CPU it also keeps DeepSpeed from compiling an op that training does not use. Raises ImportError if the
    installed DeepSpeed is not supported (``deepspeed.versions``).
    """
    versions.check()
    engine.compile_nothing()
    engine.install({"LayerWise": LayerWise, "LayerWiseMuon": LayerWiseMuon}, STORAGES.values())


def LayerWise(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """A rule for matrices and a rule for the rest; one data-parallel rank updates each whole matrix.

    ``params`` is what every torch optimizer takes: parameters, or groups with their own ``lr`` and ``weight_decay``.
    The options are the sections ``matrix`` and ``elementwise``, each a rule's name or its options with ``name``; the
    list ``overrides``, of such sections with globs in ``params``; and those of ``ZeROConfig``, of which ``storage``
    selects the optimizer's class.

    Constructed from ds_config.json, passed to ``deepspeed.initialize(optimizer=...)``, or returned by a callable passed
    there. Parameters are routed when the engine takes the optimizer, because only then is the model known. Raises
    ValueError for wrong options; an unsupported model or configuration raises on every rank when the engine is built.
    """
    return _made("LayerWise", params, *settings_of(ZeROConfig, options, "LayerWise", entry="LayerWise"))


def LayerWiseMuon(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """Muon for matrices, AdamW for the rest: short for ``LayerWise``. Its options are those of ``LayerWiseMuonConfig``:
    torch.optim.Muon's arguments, a section ``adamw`` with torch.optim.AdamW's, and ours."""
    return _made("LayerWiseMuon", params, *muon_settings(options, "LayerWiseMuon"))


STORAGES: dict[str, type[EngineOptimizer]] = {"zero": ZeROLayerWise, "owned": OwnedLayerWise}


def _made(name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> EngineOptimizer:
    register()
    return STORAGES[config.storage](name, params, rules, config)
