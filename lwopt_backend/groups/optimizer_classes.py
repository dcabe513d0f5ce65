"""Optimizer classes by their path: their arguments as options, and what they refuse."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from lwopt_backend.config.options import (
    LEFT_TO_THE_CLASS,
    REQUIRED,
    Known,
    Option,
    install_command,
    spelling,
)
from lwopt_backend.rules.protocol import option

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PACKAGES = {  # by the module that each installs
    "pytorch_optimizer": "pytorch-optimizer",
    "deepspeed": "deepspeed",
    "emerging_optimizers": "emerging-optimizers",
}
_ORTHOGONALIZED, _RIEMANNIAN = "orthogonalized_optimizers", "riemannian_optimizers.normalized_optimizer"
_EMERGING = {  # the registry of emerging-optimizers 0.3.0, which asks for an import of each class's module
    "muon": f"{_ORTHOGONALIZED}.muon.Muon",
    "adaptive_muon": f"{_ORTHOGONALIZED}.adaptive_muon.AdaptiveMuon",
    "muon_hyperball": f"{_ORTHOGONALIZED}.muon_hyperball.MuonHyperball",
    "sinkhorn_muon": f"{_ORTHOGONALIZED}.sinkhorn_muon.SinkhornMuon",
    "mop": f"{_ORTHOGONALIZED}.mop.MOP",
    "polargrad": f"{_ORTHOGONALIZED}.polargrad.PolarGrad",
    "scion": f"{_ORTHOGONALIZED}.scion.Scion",
    "spel": f"{_ORTHOGONALIZED}.spel.Spel",
    "soap": "soap.soap.SOAP",
    "rekls": "soap.rekls.REKLS",
    "psgd_pro": "psgd.psgd.PSGDPro",
    "oblique_sgd": f"{_RIEMANNIAN}.ObliqueSGD",
    "oblique_adam": f"{_RIEMANNIAN}.ObliqueAdam",
    "lion": "scalar_optimizers.lion.Lion",
    "laprop": "scalar_optimizers.laprop.LaProp",
}
EMERGING = {f"emerging_optimizers.{name}": f"emerging_optimizers.{path}" for name, path in _EMERGING.items()}


def as_class(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section whose ``name`` is of NVIDIA's registry as one of ``torch_optimizer`` with that class; others unchanged.

    Raises ValueError for a name that the registry has not got.
    """
    name = section.get("name")
    if not isinstance(name, str) or not name.startswith("emerging_optimizers."):
        return section
    if name not in EMERGING:
        raise ValueError(f"unknown rule {name!r}; {spelling(name, EMERGING)}")
    if "class" in section:
        raise ValueError(f"{name!r} is the name of a class, and {section['class']!r} another; leave one out")
    return {**section, "name": "torch_optimizer", "class": EMERGING[name]}


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


def class_of(given: type[torch.optim.Optimizer] | str) -> type[torch.optim.Optimizer]:
    """The optimizer class that is given as itself or as its path."""
    return class_named(given) if isinstance(given, str) else given


@functools.cache
def class_named(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of that path. Raises ValueError if there is none, with the nearest name."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # TypeError: of ".a.B"
        top = module_name.partition(".")[0]
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else top
        package = PACKAGES.get(top, "") if missing == top else missing  # which the package needs, such as Triton
        how = f"; run: {install_command(package)}" if top in PACKAGES else ""
        raise ValueError(f"class {path!r} cannot be imported: {error}{how}") from error
    found = getattr(module, name, None)
    if found is None:
        optimizers = {key: value for key, value in vars(module).items() if _is_optimizer(value)}
        known = [key for key, value in optimizers.items() if value is not torch.optim.Optimizer]
        raise ValueError(f"class {path!r}: {module_name} has no {name!r}; {spelling(name, known, most=8)}")
    if not _is_optimizer(found):
        raise ValueError(f"class {path!r}: expected a torch.optim.Optimizer, found {found!r}")
    return found


def _is_optimizer(value: Any) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def arguments_of(given: Mapping[str, Any], path: str | None = None) -> Known:
    """The options of a rule that is a class, whose path is ``path`` or the option ``class``."""
    if path is not None:
        return _arguments_of(path)
    if "class" not in given:
        raise ValueError("expected 'class', the path of an optimizer's class, e.g. 'pytorch_optimizer.SOAP'")
    return {"class": Option("class", check=path_of), **_arguments_of(path_of(given["class"]))}


@functools.cache
def _arguments_of(path: str) -> Known:
    """Names and defaults as in the signature of the class, except those of ``self`` and the optimizer's parameters.

    A class with ``**kwargs`` also takes those of its base classes. Their defaults are left to the class, which may have
    others, and so are values that a checkpoint may not return as they were, such as ``object()``.
    """
    options: dict[str, Option] = {}
    bases = class_named(path).__mro__
    makers = [base for base in bases[: bases.index(torch.optim.Optimizer)] if "__init__" in vars(base)]
    for base in makers:
        kinds = set()
        for name, parameter in list(inspect.signature(vars(base)["__init__"]).parameters.items())[2:]:
            kinds.add(parameter.kind)
            if name in options or name == "defaults" or parameter.kind in VARIADIC:
                continue
            default = parameter.default
            keeps = base is makers[0] and _is_plain(default)
            if name == "lr" and not keeps:  # schedules write to every group's
                default = _rate_of(path)
            elif not keeps:
                default = REQUIRED if base is makers[0] and default is parameter.empty else LEFT_TO_THE_CLASS
            options[name] = Option(name, default)
        if VARIADIC[1] not in kinds:
            break
    return options


@dataclass
class CautiousDecay:
    """What this package adds to the options of an element-wise class that decays weights."""

    weight_decay_form: Literal["own", "cautious"] = option(
        "own",
        "'own': as the class decays; 'cautious': decay only elements that the update moves towards zero",
        "Cautious Weight Decay, arXiv 2510.12402",
    )


def _rate_of(path: str) -> Any:
    """The learning rate of a class that is made without one, if it needs none."""
    made: Callable[..., torch.optim.Optimizer] = class_named(path)
    try:
        return made([_matrix()]).param_groups[0].get("lr", REQUIRED)
    except Exception:
        return REQUIRED


def _matrix() -> nn.Parameter:
    """A matrix of random numbers, to make a class with."""
    return nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, chain(value, value.values())))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def check_without_modes(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raises ValueError for a class that has other weights for an evaluation, such as the schedule-free ones."""
    if all(callable(getattr(optimizer_class, mode, None)) for mode in ("train", "eval")):
        raise ValueError(
            f"{path_of(optimizer_class)}: expected a class whose weights are one for training and evaluation, found "
            "train() and eval(), which this optimizer does not have: an evaluation or a checkpoint would take the "
            "weights of training; choose another class"
        )


def check_arguments(values: Mapping[str, Any], path: str | None = None, built_in: Container[str] = ()) -> None:
    """Raises ValueError for values with which the class cannot be made. It is made as in a step.

    ``built_in`` are names of rules.
    """
    path = path or path_of(values["class"])
    check_without_modes(class_named(path))
    known = _arguments_of(path)
    arguments = {key: value for key, value in values.items() if key in known}
    rate = arguments.get("lr", 0.0)
    if isinstance(rate, bool) or isinstance(rate, (int, float)) and not 0 <= rate < math.inf:
        raise ValueError(f"{path}: lr: expected a finite number of at least 0, found {rate!r}")
    error = _error_of(path, arguments)
    if error is None:
        return
    needed = {key: value for key, value in arguments.items() if known[key].default is REQUIRED}
    if (cause := _error_of(path, needed)) is not None:  # whatever the other arguments are
        cause = _error_of(path, needed, in_group=True) or cause  # of classes that take only param groups
        name = path.rpartition(".")[2].lower()
        instead = f"; write the rule {name!r}, which is built in" if name in built_in else ""
        said = f"{type(cause).__name__}: {cause}{instead}"
        raise ValueError(f"{path} cannot be made with one matrix as its parameters: {said}") from error
    said = str(error)
    if not isinstance(error, ValueError):  # Python's own, without the argument's name
        given = {key: value for key, value in arguments.items() if value is not known[key].default}
        alone = [key for key in given if _error_of(path, {**needed, key: given[key]})] or list(given)
        likes = {key: f"; expected a value like {known[key].default!r}" for key in alone if known[key].has_default}
        said = ", ".join(f"{key} is {given[key]!r}{likes.get(key, f' ({error})')}" for key in alone)
    raise ValueError(f"{path} refuses these arguments: {said}") from error


def _error_of(path: str, arguments: Mapping[str, Any], *, in_group: bool = False) -> Exception | None:
    """The exception that the class raises when made with these arguments, if any; or one if it changes weights then."""
    param = _matrix()
    made: Callable[..., torch.optim.Optimizer] = class_named(path)
    try:
        made([{"params": [param]}] if in_group else [param], **arguments)
    except Exception as error:
        return error
    if torch.equal(param, _matrix()):
        return None
    return ValueError("weights change as it is made, which is in every step here; expected changes in step() only")
