"""Plans for what a host steps at a time: a param group, or the part of one that has a flat tensor of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lwopt_backend.config import LayerWiseMuonConfig
from lwopt_backend.plan import (
    Atom,
    FlatPartition,
    Machine,
    MatrixPlan,
    ParameterPartition,
    ParamSpec,
    Replicas,
    plan_matrices,
    plan_spread,
)
from lwopt_backend.plan.build import modelled_time
from lwopt_backend.registry import MATRIX_RULES, rule_named
from lwopt_backend.runtime.agreement import digest

Member = tuple[str, tuple[int, ...], str, bool]  # name, shape, dtype, whether transposed
HostLayout = FlatPartition | ParameterPartition | Replicas


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of one rule as planned. ``matrices`` is None for an element-wise rule, whose gradients never travel.

    ``layout`` tells where the parameters lie, ``matrices.layout`` the same of the atoms in them.
    """

    rule: str
    specs: tuple[ParamSpec, ...]
    layout: HostLayout
    options: str  # the rule's, as "lr=0.02, weight_decay=0.1, ..."
    matrices: MatrixPlan | None
    state_bytes: tuple[int, ...]  # of the state that each rank keeps

    def lines(self) -> list[str]:
        """What all ranks must have decided alike."""
        members = [spec.line() for spec in self.specs]
        return [*members, f"options of {self.rule}: {self.options}", *(self.matrices.lines() if self.matrices else [])]


def members_digest(plans: Sequence[GroupPlan]) -> str:
    """Identifies a param group's parameters, their shapes and their rule; the same at every world size."""
    return digest([f"{spec.name} {spec.shape} {spec.rule}" for plan in plans for spec in plan.specs])[:16]


def plan_group(
    group: Mapping[str, Any],
    members: Sequence[Member],
    layout: HostLayout,
    config: LayerWiseMuonConfig,
    machine: Machine,
) -> GroupPlan:
    """Plan parameters ``members`` of a param group with options ``group``; they lie in ``layout`` in that order.

    A matrix parameter of more than two dimensions is a stack of matrices: its last two dimensions are a matrix each.
    Raises ValueError for a policy that the layout leaves no room for.
    """
    rule = group["rule"]
    specs = tuple(ParamSpec(name, shape, dtype, rule, transposed) for name, shape, dtype, transposed in members)
    matrices = None
    if rule in MATRIX_RULES:
        counts = [math.prod(spec.shape[:-2]) for spec in specs]
        atoms = [atom for spec, count in zip(specs, counts) for atom in _atoms(spec, count, group, config)]
        matrices = _plan_atoms(atoms, layout.split(counts), config, machine)
    options = ", ".join(f"{key}={group[key]!r}" for key in rule_named(rule).options.model_fields)
    return GroupPlan(rule, specs, layout, options, matrices, _state_bytes(group, layout, matrices))


def _atoms(spec: ParamSpec, count: int, group: Mapping[str, Any], config: LayerWiseMuonConfig) -> list[Atom]:
    shape = (spec.shape[-2], spec.shape[-1])
    cost = MATRIX_RULES[spec.rule].cost(shape, group, config)
    if len(spec.shape) == 2:
        return [Atom(spec.name, shape, cost, spec.transposed)]
    return [Atom(f"{spec.name}[{number}]", shape, cost, spec.transposed) for number in range(count)]


def _plan_atoms(atoms: Sequence[Atom], layout: HostLayout, config: LayerWiseMuonConfig, machine: Machine) -> MatrixPlan:
    """Where matrices lie whole on one rank or nearly so, by the policy; where all ranks hold of all, by work."""
    element_bytes = getattr(torch, config.wire_dtype).itemsize
    if isinstance(layout, FlatPartition):
        return plan_matrices(
            atoms,
            layout,
            policy=config.policy,
            machine=machine,
            bucket_numel=config.bucket_numel,
            element_bytes=element_bytes,
        )
    if config.policy == "stay" and layout.world_size > 1:
        raise ValueError(
            "policy is 'stay', but here every rank stores a part or a copy of every matrix; use 'balance' or 'auto'"
        )
    plan = plan_spread(atoms, layout, element_bytes=element_bytes, bucket_numel=config.bucket_numel)
    return replace(plan, modelled=((plan.ownership.policy, modelled_time(plan, machine)),))


def _state_bytes(group: Mapping[str, Any], layout: HostLayout, matrices: MatrixPlan | None) -> tuple[int, ...]:
    """Asked of the rule itself, on fp32 tensors without memory, as long as what each rank keeps state of."""
    if not isinstance(layout, Replicas):
        numels = [layout.partition_numel] * layout.world_size
    else:
        assert matrices is not None, "element-wise parameters are replicated, but stepped in partitions"
        numels = matrices.owned_numels()
    return tuple(_state_size(group, numel) for numel in numels)


def _state_size(group: Mapping[str, Any], numel: int) -> int:
    flat = torch.empty(numel, dtype=torch.float32, device="meta")
    return sum(tensor.numel() * tensor.itemsize for tensor in rule_named(group["rule"]).new_state(flat, group).values())
