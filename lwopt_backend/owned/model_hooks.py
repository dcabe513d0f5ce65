"""Hooks on a model whose parameters are views of our buffers: they are waited for before anybody reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lwopt_backend.runtime.bucket_manager import BucketManager


def wait_in_forward(model: nn.Module, manager: BucketManager) -> list[Any]:
    """Every module waits for its own parameters when it is called, and for all of them when it is saved or loaded."""
    numbers = {id(param): manager.bucket_of[index] for index, param in enumerate(manager.params)}
    handles = []
    for module in model.modules():
        own = sorted({numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers})
        if own:
            handles.append(module.register_forward_pre_hook(_waiting(manager, own)))
        handles.append(module.register_state_dict_pre_hook(_waiting(manager, None)))
        handles.append(module.register_load_state_dict_pre_hook(_waiting(manager, None)))
    return handles


def tell_when_loaded(model: nn.Module, loaded: Callable[[], None]) -> list[Any]:
    """Call ``loaded`` when weights were loaded into the model or a part of it."""

    def hook(*args: Any) -> None:
        loaded()

    return [module.register_load_state_dict_post_hook(hook) for module in model.modules()]


def _waiting(manager: BucketManager, numbers: list[int] | None) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        manager.receive_values(numbers)

    return hook
