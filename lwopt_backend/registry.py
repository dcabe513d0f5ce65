"""The rules by name, in one table: options, cost, state, and the class that does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import AdamWOptions, LayerWiseConfig, MuonOptions, Options
from lwopt_backend.plan.cost import gram_flops
from lwopt_backend.rules import MatrixRule, Muon
from lwopt_backend.spelling import suggestion

State = dict[str, Tensor]


@dataclass(frozen=True)
class MatrixEntry:
    """A rule for whole matrices. ``build`` makes it from a group's options; ``cost`` is its flops on one matrix.

    ``cost`` takes the matrix's shape, the group's options, and the configuration of all groups.
    """

    name: str
    options: type[Options]
    build: Callable[..., MatrixRule]
    cost: Callable[[tuple[int, int], Mapping[str, Any], LayerWiseConfig], int]
    new_state: Callable[[Tensor, Mapping[str, Any]], State]
    work: str  # what the cost counts, for tables


@dataclass(frozen=True)
class ElementwiseEntry:
    """A torch optimizer for element-wise parameters and the state it keeps per flat tensor."""

    name: str
    options: type[Options]
    optimizer: type[torch.optim.Optimizer]
    new_state: Callable[[Tensor, Mapping[str, Any]], State]


def _momentum(flat: Tensor, options: Mapping[str, Any]) -> State:
    return {"momentum_buffer": torch.zeros_like(flat)}


def _adam_moments(flat: Tensor, options: Mapping[str, Any]) -> State:
    """The state torch.optim.AdamW makes on its first step, made before it, so that a checkpoint never lacks it."""
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])
    return {"step": torch.zeros(()), **{key: torch.zeros_like(flat) for key in moments}}


def _muon_flops(shape: tuple[int, int], options: Mapping[str, Any], config: LayerWiseConfig) -> int:
    return gram_flops(shape, options["ns_steps"], config.gram_aspect)


MATRIX_RULES = {
    "muon": MatrixEntry(
        name="muon",
        options=MuonOptions,
        build=Muon,
        cost=_muon_flops,
        new_state=_momentum,
        work="Newton-Schulz",
    ),
}

ELEMENTWISE_RULES = {
    "adamw": ElementwiseEntry("adamw", AdamWOptions, torch.optim.AdamW, _adam_moments),
}


def rule_named(name: str) -> MatrixEntry | ElementwiseEntry:
    """The rule of that name, of either kind. Raises ValueError with the nearest known name."""
    rules: dict[str, MatrixEntry | ElementwiseEntry] = {**MATRIX_RULES, **ELEMENTWISE_RULES}
    if name not in rules:
        raise ValueError(f"unknown rule {name!r}; {suggestion(name, rules)}")
    return rules[name]


def build_matrix_rule(name: str, group: Mapping[str, Any], config: LayerWiseConfig) -> MatrixRule:
    """The matrix rule of that name with the hyperparameters that its param group has now."""
    entry = MATRIX_RULES[name]
    return entry.build(
        **{key: group[key] for key in entry.options.model_fields},
        ns_dtype=getattr(torch, config.ns_dtype),
        exchange_dtype=getattr(torch, config.wire_dtype),
        gram_aspect=config.gram_aspect,
    )


def build_matrix_rules(
    rules: Sequence[str], groups: Sequence[Mapping[str, Any]], config: LayerWiseConfig
) -> dict[int, MatrixRule]:
    """By a param group's number, its matrix rule with the hyperparameters that the group has now."""
    named = enumerate(zip(rules, groups))
    return {number: build_matrix_rule(rule, group, config) for number, (rule, group) in named if rule in MATRIX_RULES}


def elementwise_options(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """What the torch optimizer of that element-wise rule is made with."""
    return {key: group[key] for key in ELEMENTWISE_RULES[name].options.model_fields}
