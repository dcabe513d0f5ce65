"""``LayerWiseOptimizer`` in verl's FSDP engine, 0.9.1, by the two names that its configuration has for an optimizer::

    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.optimizer_impl=lwopt_backend.integrations.verl
    actor_rollout_ref.actor.optim.optimizer=LayerWise

verl keeps sharding, gradients, clipping, schedules and checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from lwopt_backend.engines.fsdp2.plan import is_sharded
from lwopt_backend.integrations.fsdp2 import at_one_rate
from lwopt_backend.optimizer import LayerWiseOptimizer


def LayerWise(
    params: Iterator[nn.Parameter], *, lr: float, weight_decay: float = 0.01, **options: Any
) -> LayerWiseOptimizer:
    """``LayerWiseOptimizer`` at verl's ``lr`` and ``weight_decay`` for both rules (``at_one_rate``).

    verl's ``build_optimizer`` calls it on all ranks.

    Args:
        params: ``module.parameters()``. This generator knows its module, whose names route the parameters.
        lr: learning rate of both rules.
        weight_decay: weight decay of both rules.
        **options: further arguments of ``at_one_rate``, from verl's ``override_optimizer_config``.

    Returns:
        A ``LayerWiseOptimizer``.

    Raises:
        TypeError: for ``params`` that is not such a generator, such as a list.
        ValueError: for a module that FSDP2 has not sharded.

    Examples:
        >>> optimizer = LayerWise(module.parameters(), lr=1e-6, momentum=0.95)
    """
    module = inspect.getgeneratorlocals(params).get("self") if inspect.isgenerator(params) else None
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"verl.LayerWise: expected module.parameters(), which knows the parameters' names, found "
            f"{type(params).__name__}; call LayerWiseOptimizer(module) instead"
        )
    if not is_sharded(module):
        first, param = next(iter(module.named_parameters()))
        raise ValueError(
            f"verl.LayerWise: expected matrices sharded by FSDP2, found {first!r} of shape {tuple(param.shape)} "
            "without shards (FSDP1 flattens matrices); set strategy to fsdp2"
        )
    return LayerWiseOptimizer(module, **at_one_rate(lr, weight_decay, **options))
