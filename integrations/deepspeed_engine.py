"""What we read of DeepSpeed beyond its documented interface, and the one method we override. Nothing else touches it.

Read from an engine: ``module``, ``param_names``, ``device``, ``seq_data_parallel_group``, ``pipeline_parallelism``,
``has_moe_layers``, ``client_lr_scheduler``, ``_config._param_dict`` and the accessor methods below. Read from a
parameter, after ZeRO is set up: ``_hp_mapping`` with ``lp_fragment_address`` and ``hp_fragment_address``. Changed:
``ZERO_SUPPORTED_OPTIMIZERS`` (our class is added) and ``DeepSpeedEngine._do_optimizer_sanity_check``.

Checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor

from lwopt_backend.plan import FlatPartition, Fragment

HOOKED = "_do_optimizer_sanity_check"


def install(optimizer_class: type[torch.optim.Optimizer], bind: Callable[[Any, DeepSpeedEngine], None]) -> None:
    """Make ``optimizer_class`` a name ds_config.json knows, and call ``bind(optimizer, engine)`` for its instances.

    The engine asks ``_do_optimizer_sanity_check`` right before it wraps the optimizer; it is the only moment at which
    the module, the parameter names and the configuration are all known and the param groups may still be changed.
    Calling it again changes nothing. Raises ImportError where DeepSpeed has moved the method.
    """
    setattr(torch.optim, optimizer_class.__name__, optimizer_class)
    if optimizer_class not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)
    original = getattr(DeepSpeedEngine, HOOKED, None)
    if getattr(original, "_lwopt_binds", None) is not None:
        return
    if original is None or list(inspect.signature(original).parameters) != ["self", "basic_optimizer"]:
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} has no DeepSpeedEngine.{HOOKED}(self, basic_optimizer); "
            "install deepspeed==0.19.8, the version this was checked with"
        )

    @functools.wraps(original)
    def check(self: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        if isinstance(basic_optimizer, optimizer_class):
            bind(basic_optimizer, self)
        return original(self, basic_optimizer)

    check._lwopt_binds = optimizer_class  # type: ignore[attr-defined]
    setattr(DeepSpeedEngine, HOOKED, check)


def flat_partition(engine: DeepSpeedEngine, params: Sequence[Tensor], world_size: int) -> FlatPartition:
    """How ZeRO-1/2 and BF16_Optimizer will lay out a param group; compared with ``_hp_mapping`` at the first step."""
    alignment = 1
    if engine.zero_parameter_alignment() and not uses_bf16_optimizer(engine):
        alignment = 16 // math.gcd(16, params[0].element_size())
    return FlatPartition.build([p.numel() for p in params], world_size, param_alignment=alignment)


def uses_bf16_optimizer(engine: DeepSpeedEngine) -> bool:
    """Stage 1 with bf16 parameters and fp32 accumulation goes to DeepSpeed's BF16_Optimizer, all else to ZeRO's."""
    return engine.zero_optimization_stage() == 1 and engine.get_data_types() == (torch.bfloat16, torch.float32)


def stored_fragment(param: Tensor, rank: int) -> Fragment | None:
    """What DeepSpeed says this rank stores of ``param`` in its flat partition."""
    mapping = param._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    inside, stored = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Fragment(rank, inside.start, inside.start + inside.numel, stored.start)


def default_clipping(engine: DeepSpeedEngine) -> float | None:
    """The norm DeepSpeed clips at because the configuration says nothing, or None."""
    norm = engine.gradient_clipping()
    return None if "gradient_clipping" in engine._config._param_dict or not norm else norm


def adopt_torch_scheduler(engine: DeepSpeedEngine) -> None:
    """Let ``"scheduler": {"type": <a torch scheduler>}`` work under ZeRO.

    DeepSpeed builds a scheduler named in the configuration on its own wrapper, which torch's schedulers refuse
    ("DeepSpeedZeroOptimizer is not an Optimizer"). One given as a callable is built on ours; so it becomes one.
    """
    name = engine.scheduler_name()
    if name is None or engine.client_lr_scheduler is not None or hasattr(lr_schedules, name):
        return
    scheduler_class = getattr(torch.optim.lr_scheduler, name, None)
    if scheduler_class is not None:
        engine.client_lr_scheduler = functools.partial(scheduler_class, **(engine.scheduler_params() or {}))
