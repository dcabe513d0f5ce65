"""Load whole tensors by parameter name into a DeepSpeed engine's optimizer, as ``lwopt_backend.migration`` does."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend import migration
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer
from lwopt_backend.migration import Form, Named, check_form
from lwopt_backend.runtime.state import StateStore


def load_named_state(engine: DeepSpeedEngine, named: Named, *, strict: bool = True) -> list[str]:
    """``lwopt_backend.migration.load_named_state`` for an engine, at every stage and with both storages.

    Call it on all ranks between steps, best right after ``deepspeed.initialize`` or ``load_checkpoint``. It creates the
    state that a first step would create. In a pipeline, every stage takes its own parameters, and every rank its own
    experts, which are numbered through all ranks.

    Args:
        engine: an engine with an optimizer of this package.
        named: state by parameter name, as ``from_checkpoint`` returns it.
        strict: require every trained parameter and no other.

    Returns:
        Names of parameters that kept their state.

    Raises:
        ValueError: as ``load_named_state``, and for element-wise parameters with different counts of steps, because
            DeepSpeed steps a param group as one tensor.

    Examples:
        >>> engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
        >>> load_named_state(engine, from_checkpoint(torch.load("muon.pt"), names=["0.weight", "2.weight"]))
    """
    return migration.load_into(_store(engine, migration.WHAT), named, strict=strict)


def change_momentum_form(engine: DeepSpeedEngine, target: Form) -> None:
    """``lwopt_backend.migration.change_momentum_form`` for an engine. Call it on all ranks, between steps.

    Args:
        engine: an engine with an optimizer of this package.
        target: form of momentum from now on, "ema" or "sum".

    Raises:
        ValueError: for an unknown form.
        TypeError: for another optimizer.

    Examples:
        >>> change_momentum_form(engine, "sum")
    """
    check_form("target", target)
    migration.change_form(_store(engine, "change_momentum_form"), target)


def _store(engine: Any, what: str) -> StateStore:
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, EngineOptimizer):
        raise TypeError(
            f"{what}: expected a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found "
            f"{type(engine).__name__} with {type(optimizer).__name__}"
        )
    return optimizer.state_store()
