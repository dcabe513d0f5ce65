"""Hooks on a model whose parameters are views of our buffers: they are waited for before anybody reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lwopt_backend.runtime.backward import Hook
from lwopt_backend.runtime.bucket_manager import BucketManager


def wait_in_forward(model: nn.Module, manager: BucketManager) -> list[Any]:
    """Every module waits for the parameters it reads when it is called, and for all when it is saved, loaded or copied.

    It reads its own, and those of modules within it that nobody has called so far: their weights are used by hand, as
    ``nn.MultiheadAttention`` does with its output projection.
    """
    numbers = {id(param): manager.bucket_of[index] for index, param in enumerate(manager.params)}
    own = {}
    for module in model.modules():
        own[id(module)] = {numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers}
    called: set[int] = set()
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(Hook(manager, _before_call, own, called)))
        handles.append(module.register_state_dict_pre_hook(Hook(manager, _before_reading)))
        handles.append(module.register_load_state_dict_pre_hook(Hook(manager, _before_reading)))
        module.__dict__["__getstate__"] = _StateForCopies(manager, module)
    return handles


def tell_when_loaded(model: nn.Module, loaded: Callable[[], None]) -> list[Any]:
    """Call ``loaded``, a method, when weights were loaded into the model or a part of it."""
    method = loaded.__func__  # type: ignore[attr-defined]
    hook = Hook(loaded.__self__, lambda owner, *args: method(owner))  # type: ignore[attr-defined]
    return [module.register_load_state_dict_post_hook(hook) for module in model.modules()]


def _before_call(
    manager: BucketManager, own: Mapping[int, set[int]], called: set[int], module: nn.Module, *args: Any
) -> None:
    called.add(id(module))
    if any(bucket.stale for bucket in manager.buckets):
        within = [m for m in module.modules() if m is module or id(m) not in called]
        manager.receive_values(sorted(set().union(*(own.get(id(m), ()) for m in within))))


def _before_reading(manager: BucketManager, *args: Any) -> None:
    manager.receive_values()


class _StateForCopies:
    """A module's ``__getstate__``, which ``copy`` and ``pickle`` ask: its attributes, once its parameters are there."""

    def __init__(self, manager: BucketManager, module: nn.Module) -> None:
        self._manager = weakref.ref(manager)
        self._module = weakref.ref(module)

    def __call__(self) -> dict[str, Any]:
        manager, module = self._manager(), self._module()
        assert module is not None
        if manager is not None:
            manager.receive_values()
        of_class = getattr(type(module), "__getstate__", None)
        state = module.__dict__ if of_class is None else of_class(module)
        return {key: value for key, value in state.items() if value is not self}
