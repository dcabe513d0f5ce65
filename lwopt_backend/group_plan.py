"""Plans for what a host steps at a time: a param group, or the part of one that has a flat tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lwopt_backend.config import ZeROConfig
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
from lwopt_backend.plan.block_storage import BlockPartition, BlockReplicas, in_blocks
from lwopt_backend.plan.blocks import Block
from lwopt_backend.plan.build import modelled_time
from lwopt_backend.registry import MATRIX_RULES, arguments, build_matrix_rule, cost_of, state_nbytes, wire_of
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import plan_digest, setting

Member = tuple[str, tuple[int, ...], str, bool, tuple[Block, ...]]  # name, shape, dtype, whether transposed, matrices
HostLayout = FlatPartition | ParameterPartition | Replicas


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of one rule as planned. ``matrices`` is None for an element-wise rule, whose gradients never travel.

    ``layout`` tells where the parameters lie, ``matrices.layout`` the same of the atoms in them.
    """

    rule: str
    specs: tuple[ParamSpec, ...]
    layout: HostLayout
    options: tuple[str, ...]  # the rule's, a line to each
    matrices: MatrixPlan | None
    state_bytes: tuple[int, ...]  # of the state that each rank keeps
    blocks: tuple[tuple[Block, ...], ...]  # the matrices in each parameter, in the order of the atoms

    def lines(self) -> list[str]:
        """What all ranks must have decided alike."""
        return [*self.plan_lines(), *self.options]

    def plan_lines(self) -> list[str]:
        """What the plan is: the same whatever rates and other options the rule has."""
        return [*(spec.line() for spec in self.specs), *(self.matrices.lines() if self.matrices else [])]


def members_digest(plans: Sequence[GroupPlan]) -> str:
    """Identifies a param group's parameters, their shapes and their rule; the same at every world size.

    And which matrices are in them, where there are several: state that owners keep is by matrix.
    """
    lines = [
        f"{spec.name} {spec.shape} {spec.rule}{'' if len(blocks) < 2 else list(map(str, blocks))}"
        for plan in plans
        for spec, blocks in zip(plan.specs, plan.blocks)
    ]
    return plan_digest(lines)


def plan_group(
    group: Mapping[str, Any],
    members: Sequence[Member],
    layout: HostLayout,
    config: ZeROConfig,
    machine: Machine,
) -> GroupPlan:
    """Plan parameters ``members`` of a param group with options ``group``; they lie in ``layout`` in that order.

    Raises ValueError for a policy that the layout leaves no room for.
    """
    rule = group["rule"]
    specs = tuple(ParamSpec(name, shape, dtype, rule, transposed) for name, shape, dtype, transposed, _ in members)
    matrices = None
    if rule in MATRIX_RULES:
        blocks = [blocks for *_, blocks in members]
        atoms = [
            Atom(block.of(spec.name), block.shape, cost_of(block.shape, group), spec.transposed)
            for spec, of_param in zip(specs, blocks)
            for block in of_param
        ]
        whole = all(len(of_param) == 1 for of_param in blocks)
        of_atoms = layout if whole else in_blocks(layout, blocks)
        matrices = _plan_atoms(atoms, of_atoms, build_matrix_rule(group, config), config, machine)
    options = tuple(setting(f"{rule}.{key}", value) for key, value in arguments(group).items())
    return GroupPlan(
        rule,
        specs,
        layout,
        options,
        matrices,
        _state_bytes(group, layout, matrices),
        tuple(blocks for *_, blocks in members),
    )


def _plan_atoms(
    atoms: Sequence[Atom],
    layout: HostLayout | BlockPartition | BlockReplicas,
    matrix_rule: MatrixRule,
    config: ZeROConfig,
    machine: Machine,
) -> MatrixPlan:
    """Where matrices lie whole on one rank or nearly so, by the policy; where all ranks hold of all, by work."""
    wire = wire_of(matrix_rule)
    stored = layout.storage if isinstance(layout, (BlockPartition, BlockReplicas)) else layout
    if isinstance(stored, FlatPartition):
        return plan_matrices(
            atoms,
            layout,
            policy=config.policy,
            machine=machine,
            bucket_numel=config.bucket_numel,
            **wire,
        )
    if config.policy == "stay" and layout.world_size > 1:
        raise ValueError(
            "policy is 'stay', but here every rank stores a part or a copy of every matrix; use 'balance' or 'auto'"
        )
    plan = plan_spread(atoms, layout, bucket_numel=config.bucket_numel, **wire)
    return replace(plan, modelled=((plan.ownership.policy, modelled_time(plan, machine)),))


def _state_bytes(group: Mapping[str, Any], layout: HostLayout, matrices: MatrixPlan | None) -> tuple[int, ...]:
    """Asked of the rule itself, on fp32 tensors without memory, as long as what each rank keeps state of."""
    if not isinstance(layout, Replicas):
        numels = [layout.partition_numel] * layout.world_size
    else:
        assert matrices is not None, "element-wise parameters are replicated, but stepped in partitions"
        numels = matrices.owned_numels()
    return tuple(state_nbytes(numel, group) for numel in numels)
