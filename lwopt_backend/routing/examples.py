"""Examples of a module's arguments, of which only names, shapes and dtypes are kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lwopt_backend.routing.arguments import CallArguments, Empty
from lwopt_backend.routing.models import called

EXPECTED = "(args, kwargs): a tuple of a module's arguments, and a dictionary of those by name"
_REMEMBERED: WeakKeyDictionary[nn.Module, CallArguments] = WeakKeyDictionary()


def remember(model: nn.Module, example: Any) -> None:
    """Keep an example for the optimizer that is made for ``model`` later. Raises TypeError unless it is one."""
    _REMEMBERED[model] = _of_module(model, example)


def examples_of(model: nn.Module, example: Any = None) -> dict[nn.Module, CallArguments]:
    """The example of each module that is called: one of the model, or a list of them, one for each module of a list.

    Raises TypeError for anything else, and for arguments that a module's ``forward`` does not take; ValueError for
    another number of examples than modules.
    """
    modules = called(model)
    if example is None:
        return {module: _REMEMBERED[module] for module in (model, *modules) if module in _REMEMBERED}
    if not isinstance(model, nn.ModuleList):
        return {model: _of_module(model, example)}
    several = [example] if _is_one(example) and len(modules) == 1 else example
    if _is_one(several) or not isinstance(several, Sequence):
        raise TypeError(f"example: expected a list with {EXPECTED}, one for each module; found {_found(example)}")
    if len(several) != len(modules):
        raise ValueError(f"example: expected one for each of {len(modules)} modules; found {len(several)}")
    return {module: _of_module(module, one) for module, one in zip(modules, several) if one is not None}


def _of_module(module: nn.Module, example: Any) -> CallArguments:
    """Raises TypeError unless ``example`` is arguments with which ``module`` can be called."""
    given = as_given(example)
    inner = getattr(module, "_orig_mod", module)  # torch.compile's wrapper takes anything
    try:
        signature = inspect.signature(inner.forward)
    except (TypeError, ValueError):  # of code that is not Python's
        return given
    try:
        signature.bind(*example[0], **example[1])
    except TypeError as error:
        raise TypeError(
            f"example: expected arguments of {type(inner).__name__}.forward({', '.join(signature.parameters)}); found "
            f"{len(example[0])} by position and {sorted(map(str, example[1]))} by name: {error}. Write them as the "
            "model is called in training"
        ) from None
    return given


def as_given(example: Any) -> CallArguments:
    """Raises TypeError unless ``example`` is arguments by position and by name."""
    if not _is_one(example):
        raise TypeError(f"example: expected {EXPECTED}; found {_found(example)}")
    args, kwargs = example
    first = tuple(str(number) for number in range(len(args)))
    by_name = {**dict(zip(first, map(shapes_of, args))), **{name: shapes_of(value) for name, value in kwargs.items()}}
    return CallArguments(by_name, first)


def _is_one(example: Any) -> bool:
    is_pair = isinstance(example, (tuple, list)) and len(example) == 2
    return is_pair and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping)


def _found(example: Any) -> str:
    if isinstance(example, (tuple, list)):
        return f"a {type(example).__name__} of {', '.join(type(one).__name__ for one in example[:4]) or 'nothing'}"
    return f"a {type(example).__name__}"


def shapes_of(value: Any) -> Any:
    """A value with ``Empty`` in place of each of its tensors, in containers and in objects with attributes."""
    if isinstance(value, Tensor):
        return Empty(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return _like(value, {key: shapes_of(one) for key, one in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(shapes_of, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(shapes_of, value))
    inside = getattr(value, "__dict__", None)
    if inside and not isinstance(value, (nn.Module, type)) and any(map(_has_tensors, inside.values())):
        made = copy.copy(value)
        vars(made).update({key: shapes_of(one) for key, one in inside.items()})
        return made
    return value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, Tensor)


def _like(value: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return found
    try:
        made: Any = copy.copy(value)
        for key, one in found.items():
            made[key] = one
    except Exception:  # anybody's mapping
        return found
    return made


def lines(examples: Mapping[nn.Module, CallArguments]) -> Iterator[str]:
    """What ranks compare of their examples."""
    for number, given in enumerate(examples.values()):
        yield f"example of module {number}: {given.key}"
