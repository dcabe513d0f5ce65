"""The first argument of an optimizer that routes a model's parameters: the model, not its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def check_is_module(model: Any, caller: str) -> None:
    """Raises TypeError for anything else, with what to pass."""
    if not isinstance(model, nn.Module):
        raise _no_module(model, caller, "a torch.nn.Module")


def as_module(models: Any, caller: str) -> nn.Module:
    """A module, or several as one. Raises TypeError for anything else."""
    if isinstance(models, nn.Module):
        return models
    items = _items(models)
    if not items or not all(isinstance(item, nn.Module) for item in items):
        raise _no_module(
            items if isinstance(models, Iterator) else models, caller, "a torch.nn.Module, or a list of them"
        )
    return nn.ModuleList(items)


def _items(given: Any) -> list[Any]:
    """What is in a list or an iterator of anything; else the thing itself."""
    return [given] if isinstance(given, (Tensor, Mapping, str)) or not isinstance(given, Iterable) else list(given)


def _no_module(given: Any, caller: str, wanted: str) -> TypeError:
    first = next(iter(_items(given)), None)
    found = "None" if given is None else f"a {type(given).__name__}"
    if first is not None and first is not given:
        found += f" of {type(first).__name__}"
    problem = f"{caller}: model: expected {wanted}; found {found}"
    if not isinstance(first, (Tensor, Mapping, tuple)):
        return TypeError(problem)
    groups = ", and param groups as params=[...]" if isinstance(first, Mapping) else ", not its parameters"
    return TypeError(
        f"{problem}. Pass the model{groups}: its structure and its parameters' names decide which of them are matrices"
    )
