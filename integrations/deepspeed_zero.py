"""Layer-wise optimizers inside DeepSpeed: ``"type": "LayerWise"`` or ``"LayerWiseMuon"`` in ds_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lwopt_backend.config.choices import Rules, layer_wise_settings, muon_settings
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.integrations.deepspeed import engine, versions
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer, ZeROLayerWise
from lwopt_backend.integrations.deepspeed.owned import OwnedLayerWise


def register() -> None:
    """Make both types known to ds_config.json. Call it once, before ``deepspeed.initialize``.

    On a CPU it also keeps DeepSpeed from compiling an op that training does not use (``compile_nothing``). Raises
    ImportError for a DeepSpeed that is not supported (``deepspeed.versions``).
    """
    versions.check()
    engine.compile_nothing()
    engine.install({"LayerWise": LayerWise, "LayerWiseMuon": LayerWiseMuon}, STORAGES.values())


def LayerWise(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """A rule for matrices and a rule for the rest, with each matrix updated whole by one data-parallel rank.

    ``params`` is what every torch optimizer takes: parameters, or groups with their own ``lr`` and ``weight_decay``.
    The options are the sections ``matrix`` and ``elementwise``, each a rule's name or its options with ``name``; the
    list ``overrides``, of such sections for ``params`` by glob; and those of ``ZeROConfig``, of which ``storage`` says
    what the optimizer is.

    Made from ds_config.json, given to ``deepspeed.initialize(optimizer=...)``, or by a callable given there. Parameters
    are routed when the engine takes the optimizer, because only then is the model known. Raises ValueError for wrong
    options here, and when the engine is built, on every rank, for a model or a configuration that cannot work.
    """
    return _made("LayerWise", params, *layer_wise_settings(options, "LayerWise"))


def LayerWiseMuon(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """Muon for matrices, AdamW for the rest. Short for ``LayerWise``: the options of ``LayerWiseMuonConfig`` are
    torch.optim.Muon's arguments, an ``adamw`` section with torch.optim.AdamW's, and ours, all in one."""
    return _made("LayerWiseMuon", params, *muon_settings(options, "LayerWiseMuon"))


STORAGES: dict[str, type[EngineOptimizer]] = {"zero": ZeROLayerWise, "owned": OwnedLayerWise}


def _made(name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> EngineOptimizer:
    register()
    return STORAGES[config.storage](name, params, rules, config)
