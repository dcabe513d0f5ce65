"""Layer-wise optimizers inside DeepSpeed: ``"type": "LayerWise"`` or ``"LayerWiseMuon"`` in ds_config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.groups.choices import Rules, settings_of
from lwopt_backend.integrations.deepspeed import engine, versions
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer, ZeROLayerWise
from lwopt_backend.integrations.deepspeed.owned import OwnedLayerWise
from lwopt_backend.routing.examples import remember
from lwopt_backend.routing.models import check_is_module


def register() -> None:
    """Register "LayerWise" and "LayerWiseMuon" as types of optimizers in ds_config.json.

    Call it once, on all ranks, before ``deepspeed.initialize``. On a CPU it also keeps DeepSpeed from compiling an op
    that training does not use.

    Raises:
        ImportError: if the installed version of DeepSpeed is not supported.

    Examples:
        >>> deepspeed_zero.register()
        >>> engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
    """
    versions.check()
    engine.compile_nothing()
    engine.install({"LayerWise": LayerWise, "LayerWiseMuon": LayerWiseMuon}, STORAGES.values())


def use_example(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Follow ``model`` on an example of its arguments when ``deepspeed.initialize`` builds its engine.

    Call it on all ranks, before ``deepspeed.initialize``, with arguments as the model is called with. Shapes and dtypes
    count, and are the same on all ranks; tensors may be on any device, ``"meta"`` included. What the model's code does
    with a weight on them decides what the weight is, as with ``example`` of ``LayerWiseOptimizer``. Of a pipeline, the
    model is this rank's stage.

    Examples:
        >>> deepspeed_zero.use_example(model, input_ids=batch["input_ids"], labels=batch["labels"])
        >>> engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
    """
    check_is_module(model, "use_example")
    remember(model, (args, kwargs))


def LayerWise(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """Optimizer of any matrix rule and any element-wise rule. One data-parallel rank updates each matrix whole.

    Name it in ds_config.json, or pass it to ``deepspeed.initialize(optimizer=...)``, itself or from a callable. The
    engine knows the model, so parameters are routed when the engine takes the optimizer, on all ranks.

    Args:
        params: parameters, or param groups with their own ``lr`` and ``weight_decay``, as in torch.optim.
        **options: ``matrix`` and ``elementwise``, each a rule's name or a mapping with ``name`` and options; the matrix
            rule's options by name; ``overrides``, a list of such sections with globs in ``params``; ``include``,
            ``exclude``, ``atoms``, ``convolutions``, ``allow_no_matrix``, ``exchange_dtype``, ``capture``,
            ``on_nonfinite``, ``skip_above`` and ``report``; ``storage``, "zero" or "owned". Storage "zero" has
            ``policy``, ``bucket_numel`` and ``ns_device``; "owned" has ``layout``, ``bucket_mb``,
            ``pad_buckets_for_high_nccl_busbw`` and ``group_size``.

    Returns:
        An optimizer for one engine.

    Raises:
        ValueError: for wrong options. An unsupported model or configuration raises on all ranks when the engine is
            built.

    Examples:
        >>> optimizer = LayerWise(model.parameters(), matrix={"name": "muon", "lr": 0.02}, elementwise="adamw")
    """
    return _made("LayerWise", params, *settings_of(ZeROConfig, options, "LayerWise"))


def LayerWiseMuon(params: Iterable[Any], **options: Any) -> EngineOptimizer:
    """``LayerWise`` with Muon for matrices and AdamW for all other parameters, whose options need no sections.

    Args:
        params: parameters, or param groups, as in ``LayerWise``.
        **options: the options of rule ``muon``; ``adamw``, a section with the options of rule ``adamw``; ``overrides``
            and the other options of ``LayerWise``.

    Returns:
        An optimizer for one engine.

    Raises:
        ValueError: as ``LayerWise``.

    Examples:
        >>> optimizer = LayerWiseMuon(model.parameters(), lr=0.02, adamw={"lr": 3e-4})
    """
    for key in ("matrix", "elementwise"):
        if key in options:
            raise ValueError(
                f'LayerWiseMuon: {key!r} names a rule, and these are Muon and AdamW; write "type": "LayerWise"'
            )
    return _made("LayerWiseMuon", params, *settings_of(ZeROConfig, options, "LayerWiseMuon"))


STORAGES: dict[str, type[EngineOptimizer]] = {"zero": ZeROLayerWise, "owned": OwnedLayerWise}


def _made(name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> EngineOptimizer:
    register()
    return STORAGES[config.storage](name, params, rules, config)
