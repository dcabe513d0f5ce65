"""The rules by name, in one table: options, cost, state, and the class that does the work.

``register_rule`` adds a matrix rule, ``register_elementwise`` an optimizer for everything that is not a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_type_hints

import torch
from pydantic import create_model
from torch import Tensor

from lwopt_backend.config import HostConfig
from lwopt_backend.optimizer_classes import DECAY_FORM, path_of
from lwopt_backend.options import Options, parse
from lwopt_backend.routing import Route
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime.elementwise import Counters
from lwopt_backend.runtime.labels import rule_name
from lwopt_backend.spelling import suggestion

State = dict[str, Tensor]
Shape = tuple[int, int]
ModelOf = Callable[[Mapping[str, Any], str], type[Options]]
Takes = Callable[[Route], bool | None]
CountersOf = Callable[[Mapping[str, Any]], Counters]


@dataclass(frozen=True)
class MatrixEntry:
    """A rule for whole matrices. ``build`` makes it from its options, by name; ``cost`` is its flops on one matrix.

    ``model`` gives the options' model, for rules whose options depend on what is given, such as a class's arguments.
    """

    name: str
    model: ModelOf
    build: Callable[..., MatrixRule]
    cost: Callable[[Shape, Mapping[str, Any]], int]
    work: str  # what the cost counts, for tables
    takes: Takes | None = None  # which parameters are its matrices, where it decides otherwise than their structure
    source: str = ""


@dataclass(frozen=True)
class ElementwiseEntry:
    """A torch optimizer for element-wise parameters, and the state it keeps per flat tensor.

    ``new_state`` makes the state that the optimizer would make on its first step, so that no checkpoint lacks it.
    ``counters`` are what the optimizer wants as numbers of Python; ``new_state`` has a tensor for each.
    """

    name: str
    model: ModelOf
    optimizer: Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]]
    new_state: Callable[[Tensor, Mapping[str, Any]], State]
    counters: CountersOf
    source: str = ""


# A name says which table a rule is in, so one that both kinds have is spelled out for elements.
ELEMENTWISE = {"torch_optimizer": "torch_optimizer_elementwise"}
MATRIX_RULES: dict[str, MatrixEntry] = {}
ELEMENTWISE_RULES: dict[str, ElementwiseEntry] = {}


def register_rule(
    name: str,
    rule: Callable[..., MatrixRule],
    *,
    options: type[Options] | ModelOf | None = None,
    cost: Callable[[Shape, Mapping[str, Any]], int] | None = None,
    work: str = "rule",
    takes: Takes | None = None,
    source: str = "",
) -> None:
    """Make a matrix rule known by ``name``, wherever a configuration names one. Called on all ranks, before that.

    - ``rule``: a subclass of ``MatrixRule``; it is called with the options by name.
    - ``options``: their pydantic model; for a dataclass it may be left out, its fields are the options.
    - ``cost``: flops on a matrix of a shape, given the options; by default as many as the matrix has elements.
    - ``takes``: default routing: of a 2-D parameter's route, whether it is a matrix for this rule; None: as it is.
      Globs in ``include`` and ``exclude`` still win.

    Raises ValueError for a name that is taken.
    """
    _check_free(name)
    model = _model_of(name, rule, options)
    MATRIX_RULES[name] = MatrixEntry(
        name, model, rule, cost or (lambda shape, _: shape[0] * shape[1]), work, takes, source
    )


def register_elementwise(
    name: str,
    optimizer: type[torch.optim.Optimizer] | Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]],
    *,
    options: type[Options] | ModelOf,
    new_state: Callable[[Tensor, Mapping[str, Any]], State],
    counters: CountersOf = lambda options: Counters(),
    source: str = "",
) -> None:
    """Make a torch optimizer known by ``name`` as a rule for element-wise parameters. Raises ValueError as above."""
    _check_free(name)
    given = (lambda _: optimizer) if isinstance(optimizer, type) else optimizer
    ELEMENTWISE_RULES[name] = ElementwiseEntry(
        name, _model_of(name, optimizer, options), given, new_state, counters, source
    )


def _check_free(name: str) -> None:
    if name in MATRIX_RULES or name in ELEMENTWISE_RULES:
        raise ValueError(f"a rule named {name!r} is registered already; choose another name")


def _model_of(name: str, rule: Any, options: type[Options] | ModelOf | None) -> ModelOf:
    if isinstance(options, type):
        return lambda given, where: options
    if options is not None:
        return options
    if not dataclasses.is_dataclass(rule):
        raise ValueError(f"rule {name!r}: expected a dataclass, or the options' model in 'options'")
    hints = get_type_hints(rule)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(rule)
    }
    model = create_model(f"{name}Options", __base__=Options, **fields)
    return lambda given, where: model


def rule_named(name: str) -> MatrixEntry | ElementwiseEntry:
    """The rule of that name, of either kind. Raises ValueError with the nearest known name."""
    rules: dict[str, MatrixEntry | ElementwiseEntry] = {**MATRIX_RULES, **ELEMENTWISE_RULES}
    if name not in rules:
        raise ValueError(f"unknown rule {name!r}; {suggestion(name, rules)}")
    return rules[name]


def options_of(rule: str, given: Mapping[str, Any], where: str) -> Options:
    """Raises ValueError for wrong options of a rule. A class among them becomes its path."""
    if "class" in given:
        given = {**given, "class": path_of(given["class"])}
    model = rule_named(rule).model(given, where)
    if "lr" not in model.model_fields:
        raise ValueError(f"{where}: {rule!r} has no option 'lr', which schedules write to every param group")
    return parse(model, given, where)


def option_names(group: Mapping[str, Any]) -> list[str]:
    """Which keys of a param group are options of its rule."""
    return list(rule_named(group["rule"]).model(group, "").model_fields)


def arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group's rule as they are now; of those that an older checkpoint lacks, the defaults."""
    fields = rule_named(group["rule"]).model(group, "").model_fields
    return {
        key: group[key] if key in group or field.is_required() else field.get_default(call_default_factory=True)
        for key, field in fields.items()
    }


def optimizer_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a torch optimizer is made with, of a rule's options: all but its class, and no decay that is cautious."""
    found = {key: value for key, value in options.items() if key not in ("class", DECAY_FORM)}
    return {**found, "weight_decay": 0.0} if is_cautious(options) else found


def is_cautious(options: Mapping[str, Any]) -> bool:
    """Whether the decay of an element-wise rule is ours: of elements that the update moves towards zero."""
    return options.get(DECAY_FORM) == "cautious"


def build_matrix_rule(group: Mapping[str, Any], config: HostConfig) -> MatrixRule:
    """The matrix rule of a param group with the hyperparameters that it has now."""
    rule = MATRIX_RULES[group["rule"]].build(**arguments(group))
    object.__setattr__(rule, "rule_name", rule_name(group))  # a frozen dataclass, too
    if config.exchange_dtype != "auto":
        rule.exchange_dtype = getattr(torch, config.exchange_dtype)
    if isinstance(rule, WeightRule) and rule.exchange_dtype != torch.float32:
        raise ValueError(
            f"exchange_dtype is {config.exchange_dtype!r}, but {group['rule']!r} takes weights and gradients in float32"
        )
    return rule


def build_matrix_rules(groups: Sequence[Mapping[str, Any]], config: HostConfig) -> dict[int, MatrixRule]:
    """By a param group's number, its matrix rule with the hyperparameters that the group has now."""
    return {
        number: build_matrix_rule(group, config) for number, group in enumerate(groups) if group["rule"] in MATRIX_RULES
    }


def rules_with_owner_state(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the param groups' matrix rules that keep state at the owners alone."""
    found = {g["rule"]: MATRIX_RULES[g["rule"]].build(**arguments(g)) for g in groups if g["rule"] in MATRIX_RULES}
    return sorted(name for name, rule in found.items() if isinstance(rule, (OwnerStateRule, WeightRule)))


class Wire(TypedDict, total=False):
    """Arguments of plans."""

    element_bytes: int
    tensors: int


def wire_of(rule: MatrixRule) -> Wire:
    """What plans must know of a rule's exchange: the bytes of an element, and the tensors that go to the owner."""
    return {"element_bytes": rule.exchange_dtype.itemsize, "tensors": 2 if isinstance(rule, WeightRule) else 1}


def cost_of(shape: Shape, group: Mapping[str, Any]) -> int:
    """The flops of a param group's matrix rule on a matrix of ``shape``."""
    return MATRIX_RULES[group["rule"]].cost(shape, arguments(group))


def new_state(flat: Tensor, group: Mapping[str, Any]) -> State:
    """Fresh state that lies where the elements of ``flat`` do, of a param group's rule of either kind."""
    if group["rule"] in ELEMENTWISE_RULES:
        return ELEMENTWISE_RULES[group["rule"]].new_state(flat, arguments(group))
    keys = MATRIX_RULES[group["rule"]].build(**arguments(group)).state_keys
    return {key: torch.zeros_like(flat) for key in keys}


def state_nbytes(numel: int, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the state of so many elements; asked of the rule itself, on a tensor without memory."""
    state = new_state(torch.empty(numel, dtype=dtype, device="meta"), group)
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


from lwopt_backend import muon_rules, optimizer_rules  # noqa: E402, F401  they register the rules that come with us
