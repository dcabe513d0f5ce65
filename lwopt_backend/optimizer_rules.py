"""Optimizers of torch and of pytorch-optimizer as rules, by name or by the path of their class.

``torch_optimizer`` takes any class, ``{"name": "torch_optimizer", "class": "my_package.MyOptimizer", ...}``; the others
are short for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.optimizer_classes import Trial, checked_model, class_named, path_of
from lwopt_backend.optimizer_trials import elementwise_state, try_cautious, try_matrix
from lwopt_backend.options import Options
from lwopt_backend.plan.cost import shampoo_flops, soap_flops
from lwopt_backend.registry import (
    ELEMENTWISE,
    ModelOf,
    Shape,
    State,
    is_cautious,
    optimizer_arguments,
    register_elementwise,
    register_rule,
)
from lwopt_backend.rule_options import AdamWOptions
from lwopt_backend.rules.torch_optimizer import TorchOptimizer
from lwopt_backend.runtime.elementwise import Counters

Path = Callable[[Mapping[str, Any]], str]
ANY = "torch_optimizer"


def _given(options: Mapping[str, Any]) -> str:
    if "class" not in options:
        raise ValueError("expected 'class', the path of an optimizer's class, e.g. 'pytorch_optimizer.SOAP'")
    return path_of(options["class"])


def _model(path: Path, trial: Trial, *, with_class: bool, with_form: bool = False) -> ModelOf:
    def model(given: Mapping[str, Any], where: str) -> type[Options]:
        try:
            found = path(given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from error
        return checked_model(found, given, where, trial, with_class=with_class, with_form=with_form)

    return model


def _rule(path: Path, **options: Any) -> TorchOptimizer:
    return TorchOptimizer(class_named(path(options)), **optimizer_arguments(options))


def _flops(path: Path, shape: Shape, options: Mapping[str, Any]) -> int:
    """SOAP's and Shampoo's own; of any other as many as it has elements."""
    name = class_named(path(options)).__name__.lower()
    if "soap" in name:
        frequency = options.get("precondition_frequency", 10)
        return soap_flops(shape, frequency, options.get("max_precondition_dim", 10_000))
    if "shampoo" in name:
        frequency = options.get("preconditioning_compute_steps", 1)  # it has no largest side
        return shampoo_flops(shape, frequency, max(shape))
    return shape[0] * shape[1]


def _new_state(path: Path, flat: Tensor, options: Mapping[str, Any]) -> State:
    return elementwise_state(path(options), optimizer_arguments(options)).new(flat)


def _counters(path: Path, options: Mapping[str, Any]) -> Counters:
    return elementwise_state(path(options), optimizer_arguments(options)).counters


def _try_elementwise(path: str, options: Mapping[str, Any]) -> None:
    elementwise_state(path, optimizer_arguments(options))
    if is_cautious(options):
        try_cautious(path, optimizer_arguments(options))


def _adam_moments(flat: Tensor, options: Mapping[str, Any]) -> State:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])
    step = torch.zeros((), device=flat.device if options.get("fused") else "cpu")  # as torch keeps its counter
    return {"step": step, **{key: torch.zeros_like(flat) for key in moments}}


def _always(path: str) -> Path:
    return lambda options: path


def _matrix(name: str, path: Path, source: str, work: str) -> None:
    model, rule, cost = _model(path, try_matrix, with_class=name == ANY), partial(_rule, path), partial(_flops, path)
    register_rule(name, rule, options=model, cost=cost, work=work, source=source)


def _elementwise(name: str, path: Path, source: str) -> None:
    register_elementwise(
        name,
        lambda options: class_named(path(options)),
        options=_model(path, _try_elementwise, with_class=name == ELEMENTWISE[ANY], with_form=True),
        new_state=partial(_new_state, path),
        counters=partial(_counters, path),
        source=source,
    )


_matrix(ANY, _given, "the class", "update")
_matrix("soap", _always("pytorch_optimizer.SOAP"), "pytorch_optimizer.SOAP, arXiv 2409.11321", "SOAP")
_matrix("shampoo", _always("pytorch_optimizer.Shampoo"), "pytorch_optimizer.Shampoo, arXiv 1802.09568", "Shampoo")
register_elementwise(
    "adamw", torch.optim.AdamW, options=AdamWOptions, new_state=_adam_moments, source="torch.optim.AdamW"
)
_elementwise("lion", _always("pytorch_optimizer.Lion"), "pytorch_optimizer.Lion, arXiv 2302.06675")
_elementwise("sgd", _always("torch.optim.SGD"), "torch.optim.SGD")
_elementwise(ELEMENTWISE[ANY], _given, "the class")
