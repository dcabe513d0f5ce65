"""The plan of one param group, whatever its rule: its members, where they lie, and for matrices who owns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lwopt_backend.config import LayerWiseMuonConfig
from lwopt_backend.plan import Atom, FlatPartition, Machine, MatrixPlan, ParamSpec, plan_matrices
from lwopt_backend.registry import MATRIX_RULES, rule_named
from lwopt_backend.runtime.agreement import digest

Member = tuple[str, tuple[int, ...], str]  # name, shape, dtype


@dataclass(frozen=True)
class GroupPlan:
    """A param group as planned. ``matrices`` is None for an element-wise rule, whose parameters never travel."""

    rule: str
    specs: tuple[ParamSpec, ...]
    layout: FlatPartition
    options: str  # the rule's, as "lr=0.02, weight_decay=0.1, ..."
    matrices: MatrixPlan | None
    state_bytes: int  # of the state that one rank keeps; partitions are equally long, so it is the same on all

    @property
    def members_digest(self) -> str:
        """Identifies the group's parameters, their shapes and their rule; the same at every world size."""
        return digest([f"{spec.name} {spec.shape} {spec.rule}" for spec in self.specs])[:16]

    def lines(self) -> list[str]:
        """What all ranks must have decided alike."""
        members = [spec.line() for spec in self.specs]
        return [*members, f"options of {self.rule}: {self.options}", *(self.matrices.lines() if self.matrices else [])]


def plan_group(
    group: Mapping[str, Any],
    members: Sequence[Member],
    layout: FlatPartition,
    config: LayerWiseMuonConfig,
    machine: Machine,
) -> GroupPlan:
    """Plan a param group with options ``group`` and parameters ``members``, which lie in ``layout`` in that order."""
    rule = group["rule"]
    specs = tuple(ParamSpec(name, shape, dtype, rule) for name, shape, dtype in members)
    matrices = None
    if rule in MATRIX_RULES:
        matrices = plan_matrices(
            [_atom(spec, group, config) for spec in specs],
            layout,
            policy=config.policy,
            machine=machine,
            bucket_numel=config.bucket_numel,
            element_bytes=getattr(torch, config.wire_dtype).itemsize,
        )
    options = ", ".join(f"{key}={group[key]!r}" for key in rule_named(rule).options.model_fields)
    return GroupPlan(rule, specs, layout, options, matrices, _state_bytes(group, layout))


def _atom(spec: ParamSpec, group: Mapping[str, Any], config: LayerWiseMuonConfig) -> Atom:
    shape = (spec.shape[0], spec.shape[1])
    return Atom(spec.name, shape, MATRIX_RULES[spec.rule].cost(shape, group, config))


def _state_bytes(group: Mapping[str, Any], layout: FlatPartition) -> int:
    """Asked of the rule itself, on a flat fp32 partition without memory."""
    flat = torch.empty(layout.partition_numel, dtype=torch.float32, device="meta")
    return sum(tensor.numel() * tensor.itemsize for tensor in rule_named(group["rule"]).new_state(flat, group).values())
