"""Steps of optimizers that are part of a step of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import optimizer

HOOKS = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)


@contextmanager
def inner_steps() -> Iterator[None]:
    """Steps within are not told to hooks on every optimizer (``register_optimizer_step_pre_hook``, ``..._post_hook``).

    The step that they are part of is told once, by torch. The hooks are taken out rather than the optimizer's ``step``
    unwrapped, because one that calls its base class's ``step`` would be told of there.
    """
    kept = [dict(hooks) for hooks in HOOKS]
    for hooks in HOOKS:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(HOOKS, kept):
            hooks.update(before)
