"""Optimizers by the path of their class, ``"pytorch_optimizer.SOAP"``: their options, and whether they may be used."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeGuard

import torch
from pydantic import create_model
from torch import nn

from lwopt_backend.installing import install_command
from lwopt_backend.options import Options, option
from lwopt_backend.spelling import suggestion

Trial = Callable[[str, Mapping[str, Any]], object]
DECAY_FORM = "weight_decay_form"  # an option of ours, no argument of a class
PACKAGES = {"pytorch_optimizer": "pytorch-optimizer", "deepspeed": "deepspeed"}  # by the module that each installs


def path_of(given: Any) -> str:
    """The path of a class that is given as itself or as its path. Raises ValueError for anything else."""
    if isinstance(given, str):
        return given
    if isinstance(given, type):
        if "." in given.__qualname__:
            raise ValueError(
                f"class: {given.__qualname__} is defined inside something else; expected one at the top of a module, "
                "from which every rank imports it"
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
    except (ImportError, ValueError) as error:
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
def options_model(path: str, *, with_class: bool, with_form: bool = False) -> type[Options]:
    """The arguments of a class as an options model: names and defaults as in its signature.

    One with ``**kwargs`` takes those of its base class, too. Of one with weight decay it can be said how it decays.
    """
    fields: dict[str, Any] = {"class": (str, ...)} if with_class else {}
    for name, parameter in _parameters(class_named(path)).items():
        fields[name] = (Any, ... if parameter.default is parameter.empty else parameter.default)
    if with_form and "weight_decay" in fields:
        meaning = "as the class has it; or only what the update moves towards zero"
        form = option("own", meaning, "Cautious Weight Decay, arXiv 2510.12402")
        fields[DECAY_FORM] = (Literal["own", "cautious"], form)
    return create_model(path.rpartition(".")[2], __base__=Options, **fields)


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor but ``self`` and the optimizer's parameters."""
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


def checked_model(
    path: str, given: Mapping[str, Any], where: str, trial: Trial, *, with_class: bool, with_form: bool = False
) -> type[Options]:
    """``options_model``. Raises ValueError for arguments that the class itself refuses, or that fail in a ``trial``."""
    try:
        model = options_model(path, with_class=with_class, with_form=with_form)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error
    named = {key: value for key, value in given.items() if key != "class"}
    if where and set(named) <= set(model.model_fields):
        defaults = {key: field.default for key, field in model.model_fields.items() if not field.is_required()}
        try:
            arguments = {key: value for key, value in named.items() if key != DECAY_FORM}
            class_named(path)([nn.Parameter(torch.zeros(2, 2))], **arguments)
        except Exception as error:
            raise ValueError(f"{where}: {path} refuses these arguments: {error}") from error
        try:
            trial(path, {**defaults, **named})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return model
