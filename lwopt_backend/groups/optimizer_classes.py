"""Optimizer classes by their path: their arguments as options, and what they refuse."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

import torch
from pydantic import create_model
from torch import nn

from lwopt_backend.config.options import Options, install_command, option, suggestion

DECAY_FORM = "weight_decay_form"  # an option of this package, not an argument of the class
PACKAGES = {"pytorch_optimizer": "pytorch-optimizer", "deepspeed": "deepspeed"}  # by the module that each installs


def path_of(given: Any) -> str:
    """The path of a class that is given as itself or as its path. Raises ValueError for anything else."""
    if isinstance(given, str):
        return given
    if isinstance(given, type):
        if "." in given.__qualname__:
            raise ValueError(
                f"class: expected one at the top of a module, which every rank can import; found {given.__qualname__}, "
                "defined inside a function or class; move it"
            )
        return f"{given.__module__}.{given.__qualname__}"
    raise ValueError(
        f"class: expected an optimizer's class or its path, e.g. 'pytorch_optimizer.SOAP'; found {given!r}"
    )


@functools.cache
def class_named(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of that path. Raises ValueError if there is none, with the nearest name."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # TypeError: of ".a.B"
        package = PACKAGES.get(module_name.partition(".")[0])
        how = f"; run: {install_command(package)}" if package else ""
        raise ValueError(f"class {path!r} cannot be imported: {error}{how}") from error
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if _is_optimizer(value)]
        raise ValueError(f"class {path!r}: {module_name} has no {name!r}; {suggestion(name, known)}")
    if not _is_optimizer(found):
        raise ValueError(f"class {path!r}: expected a torch.optim.Optimizer, found {found!r}")
    return found


def _is_optimizer(value: Any) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


@functools.cache
def options_of_class(path: str, *, with_class: bool, with_form: bool = False) -> type[Options]:
    """The arguments of a class as an options model: names and defaults as in its signature.

    A class with ``**kwargs`` also takes those of its base class. One with weight decay takes its form.
    """
    fields: dict[str, Any] = {"class": (str, ...)} if with_class else {}
    for name, parameter in _parameters(class_named(path)).items():
        fields[name] = (Any, ... if parameter.default is parameter.empty else parameter.default)
    if with_form and "weight_decay" in fields:
        meaning = "'own': as the class decays; 'cautious': decay only elements that the update moves towards zero"
        form = option("own", meaning, "Cautious Weight Decay, arXiv 2510.12402")
        fields[DECAY_FORM] = (Literal["own", "cautious"], form)
    return create_model(path.rpartition(".")[2], __base__=Options, **fields)


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor, except ``self`` and the optimizer's parameters."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if base is torch.optim.Optimizer:
            break
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.items())[2:]
        named = {k: p for k, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and k != "defaults"}
        found = {**named, **found}
        if len(named) == len(parameters):
            break
    return found


def check_arguments(path: str, model: type[Options], given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that the class itself refuses."""
    named = {key: value for key, value in given.items() if key != "class"}
    if not set(named) <= set(model.model_fields):
        return  # the model reports unknown ones
    fields = {key: field for key, field in model.model_fields.items() if key != "class"}
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    missing = [key for key in fields if key not in defaults and key not in named]
    if missing:
        raise ValueError(f"{path}: expected the argument {missing[0]!r}, found none; add it")
    arguments = {key: value for key, value in named.items() if key != DECAY_FORM}
    error = _error_of(path, arguments)
    if error is not None:
        said = str(error)
        if not isinstance(error, ValueError):  # Python's own, without the argument's name
            needed = {key: value for key, value in arguments.items() if key not in defaults}
            alone = [key for key in arguments if _error_of(path, {**needed, key: arguments[key]})] or list(arguments)
            likes = {key: f"; expected a value like {defaults[key]!r}" for key in alone if key in defaults}
            said = ", ".join(f"{key} is {arguments[key]!r}{likes.get(key, '')}" for key in alone)
        raise ValueError(f"{path} refuses these arguments: {said}") from error


def _error_of(path: str, arguments: Mapping[str, Any]) -> Exception | None:
    """The exception that the class raises when made with these arguments, if any."""
    try:
        class_named(path)([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:
        return error
    return None
