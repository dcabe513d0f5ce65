"""One step, as hooks on optimizers' steps hear of it: not of optimizers inside ours, not of a step's several calls."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import optimizer as of_torch
from torch.profiler import record_function

BEFORE: MutableMapping[int, Any] = of_torch._global_optimizer_pre_hooks
AFTER: MutableMapping[int, Any] = of_torch._global_optimizer_post_hooks


@contextmanager
def inner_steps() -> Iterator[None]:
    """Steps within are not told to hooks on every optimizer (``register_optimizer_step_pre_hook``, ``..._post_hook``).

    The step that they are part of is told once, by torch. The hooks are taken out rather than the optimizer's ``step``
    unwrapped, because one that calls its base class's ``step`` would be told of there.
    """
    kept: list[tuple[MutableMapping[int, Any], dict[int, Any]]] = [(hooks, dict(hooks)) for hooks in (BEFORE, AFTER)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


@contextmanager
def one_call(optimizer: torch.optim.Optimizer, *, begins: bool, ends: bool) -> Iterator[None]:
    """What torch does around ``step``, for an optimizer that a host calls several times a step.

    Hooks hear of the call that begins the step, before it, and of the one that ends it, after it. ``step`` must have an
    attribute ``hooked``, with which torch takes it as it is.
    """
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for hook in chain(BEFORE.values(), optimizer._optimizer_step_pre_hooks.values()) if begins else ():
            hook(optimizer, (optimizer,), {})
        yield
        for hook in chain(optimizer._optimizer_step_post_hooks.values(), AFTER.values()) if ends else ():
            hook(optimizer, (optimizer,), {})
