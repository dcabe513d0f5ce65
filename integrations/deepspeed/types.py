"""The types of ours that ds_config.json may name, in any case of letters, and what to do where they are not known.

DeepSpeed looks a type up in ``torch.optim`` as it is written, and says of any other that it is not supported. Importing
this module changes one thing: where a configuration names a type of ours that nobody registered, the error says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime import config

from lwopt_backend.config.options import nearest

HOOKED = "get_optimizer_name"
TYPES = ("LayerWise", "LayerWiseMuon")


def name_types() -> None:
    """Have DeepSpeed read the type of an optimizer entry through ``canonical``. Calling it again changes nothing."""
    original = getattr(config, HOOKED, None)
    if original is None or getattr(original, "_lwopt_names", False):  # ``register()`` says what is missing
        return

    @functools.wraps(original)
    def get_optimizer_name(param_dict: Mapping[str, Any]) -> Any:
        return canonical(original(param_dict))

    get_optimizer_name._lwopt_names = True  # type: ignore[attr-defined]
    setattr(config, HOOKED, get_optimizer_name)


def canonical(name: Any) -> Any:
    """The type as it is registered. Raises ValueError for ours if it is not, and for one that is only nearly ours."""
    if not isinstance(name, str) or hasattr(torch.optim, name) or name.lower() in config.DEEPSPEED_OPTIMIZERS:
        return name
    ours = _ours(name)
    if ours is None:
        close = nearest(name, TYPES, cutoff=0.8)
        if close:
            raise ValueError(f"optimizer.type is {name!r}, which DeepSpeed does not know; did you mean {close!r}?")
        return name
    if not hasattr(torch.optim, ours):
        raise ValueError(
            f"optimizer.type is {name!r}, but it is not registered; call "
            "lwopt_backend.integrations.deepspeed_zero.register() before deepspeed.initialize, or start the script "
            "by python -m lwopt_backend.run"
        )
    return ours


def _ours(name: str) -> str | None:
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((each for each in TYPES if each.lower() == plain), None)


name_types()


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce; called before the first collective is set up.

    The op serves inference only, yet ``deepspeed.init_distributed`` builds it: without a compiler that fails, and
    a build that was killed leaves a lock on which every later run waits for ever. Does nothing on an accelerator.
    """
    import deepspeed.ops as ops
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
