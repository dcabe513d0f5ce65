"""ZeRO 1 to 3: parameters concatenated in flat partitions, planned and stepped by param group."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.engines.base import BATCH_NUMEL, batch_numel_on
from lwopt_backend.groups import registry
from lwopt_backend.groups.param_groups import ElementwiseGroups
from lwopt_backend.plan import (
    Atom,
    FlatPartition,
    Machine,
    MatrixPlan,
    ParameterPartition,
    Replicas,
    TensorShards,
    TrainedParam,
    plan_matrices,
    plan_spread,
)
from lwopt_backend.plan.layouts import SUB_GROUP_SIZE, BlockLayout, Partition, StorageLayout, View, in_blocks
from lwopt_backend.plan.mesh import in_whole
from lwopt_backend.plan.owners import Limits, modelled_time
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import plan_digest, setting
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.pieces import Regions, Slices, flat_regions, view_of
from lwopt_backend.runtime.quantized import QuantizedPiece, QuantizedState, planned_nbytes
from lwopt_backend.runtime.state import StatePiece, with_quantized
from lwopt_backend.runtime.step import MatrixStepper, StepInput

# How ZeRO stores the parameters of a param group, and which of them it steps at a time.
#
# ===========================  =====================================  ==========================================
# stage                        stored on every rank                   stepped at a time
# ===========================  =====================================  ==========================================
# 0                            all parameters, whole                  a param group
# 1, 2 (and BF16_Optimizer)    an equal part of each param group      a param group
# 3                            an equal part of each parameter        a sub-group: parameters of one param group
# ===========================  =====================================  ==========================================


def unit_layouts(
    numels: Sequence[int],
    ranks: int,
    stage: int,
    *,
    is_matrix: bool,
    sub_group_size: int = SUB_GROUP_SIZE,
    param_alignment: int = 1,
) -> Iterator[tuple[slice, StorageLayout]]:
    """Yield the parameters of a group that are stepped together, and their layout. ``numels`` are their sizes.

    ``param_alignment`` is that of ``FlatPartition.build``. ``is_matrix`` is whether a matrix rule steps them.
    """
    if stage == 3:  # a sub-group closes once a rank's elements reach its size
        start, filled = 0, 0
        for place, numel in enumerate(numels):
            filled += -(-numel // ranks)
            if filled >= sub_group_size or place == len(numels) - 1:
                part = slice(start, place + 1)
                yield part, ParameterPartition.build(numels[part], ranks)
                start, filled = place + 1, 0
    elif stage == 0 and is_matrix:
        yield slice(None), Replicas(ranks, tuple(numels))
    elif stage == 0:
        yield slice(None), FlatPartition.build(numels, ranks, alignment=1)
    else:
        yield slice(None), FlatPartition.build(numels, ranks, param_alignment=param_alignment)


# Plans of what a host steps at a time: a param group, or a sub-group with its flat tensor.


@dataclass(frozen=True)
class GroupPlan:
    """The plan of parameters of one rule. ``matrices`` is None for an element-wise rule, which exchanges no gradients.

    ``layout`` is that of the parameters, ``matrices.layout`` that of the atoms in them. Under tensor parallelism the
    former is that of a rank's shards on its data-parallel ranks, the latter that of all ranks.
    """

    rule: str
    params: tuple[TrainedParam, ...]
    layout: StorageLayout
    options: tuple[str, ...]  # the rule's, one line each
    matrices: MatrixPlan | None
    state_bytes: tuple[int, ...]  # of each rank's state

    def place(self, rank: int) -> int:
        """The rank in ``layout`` of a rank that exchanges these parameters."""
        of_matrices = self.matrices.layout if self.matrices is not None else None
        return of_matrices.places[rank][1] if isinstance(of_matrices, TensorShards) else rank

    def work(self, earlier: Sequence[int] = ()) -> Sequence[int]:
        """Each rank's work on matrices, in addition to its ``earlier`` work."""
        if self.matrices is None:
            return earlier
        loads = self.matrices.ownership.loads
        return [*map(add, earlier, loads)] if earlier else loads

    def lines(self) -> list[str]:
        """The lines that must be equal on all ranks."""
        return [*self.plan_lines(), *self.options]

    def plan_lines(self) -> list[str]:
        """The lines of the plan, without rates and other options of the rule."""
        return [*(param.line() for param in self.params), *(self.matrices.lines() if self.matrices else [])]


def members_digest(plans: Sequence[GroupPlan]) -> str:
    """A digest of a param group's parameters, their shapes and their rule; the same at every world size.

    It includes the matrices of a parameter with several, because owner state is stored by matrix.
    """
    lines = [
        f"{param.name} {param.shape} {param.rule}{'' if len(param.blocks) < 2 else list(map(str, param.blocks))}"
        for plan in plans
        for param in plan.params
    ]
    return plan_digest(lines)


def plan_group(
    group: Mapping[str, Any],
    members: Sequence[TrainedParam],
    layout: StorageLayout,
    config: ZeROConfig,
    machine: Machine,
    places: Sequence[tuple[int, int]] = (),
    earlier: Sequence[int] = (),
) -> GroupPlan:
    """Plan ``members``, the parameters of the param group ``group``, stored in ``layout`` in that order.

    Under tensor parallelism, ``places`` are as in ``TensorShards``. ``earlier`` is each rank's work in plans that are
    stepped before. Raises ValueError for a policy that the layout does not allow.
    """
    rule = group["rule"]
    matrices = None
    if rule in registry.MATRIX_RULES:
        costs: dict[tuple[int, int], int] = {}
        atoms = [atom for member in members for atom in registry.atoms_of(member, group, costs)]
        of_atoms = _of_atoms(members, layout, places)
        rule_of_group = registry.build_matrix_rule(group, config)
        if places and rule_of_group.quantized:
            raise ValueError(
                f"momentum_dtype: expected None under tensor parallelism, whose shards of a matrix have no rows of it, "
                f"found {group['momentum_dtype']!r}; leave it out"
            )
        matrices = _plan_atoms(atoms, of_atoms, rule_of_group, config, machine, earlier)
    options = tuple(setting(f"{rule}.{key}", value) for key, value in registry.arguments(group).items())
    if not isinstance(layout, Replicas):
        numels = [layout.partition_numel] * (len(places) or layout.world_size)
    else:
        assert matrices is not None, "element-wise parameters are replicated, but stepped in partitions"
        numels = [kept_numel(matrices, rank) for rank in range(len(places))] if places else matrices.owned_numels()
    quantized = matrices is not None and registry.quantized_keys(group)
    in_8_bits = planned_nbytes(matrices) if matrices is not None and quantized else [0] * len(numels)
    state_bytes = tuple(
        registry.state_nbytes(numel, group, in_8_bits=nbytes) for numel, nbytes in zip(numels, in_8_bits)
    )
    return GroupPlan(rule, tuple(members), layout, options, matrices, state_bytes)


def _of_atoms(
    members: Sequence[TrainedParam], layout: StorageLayout, places: Sequence[tuple[int, int]]
) -> StorageLayout | BlockLayout:
    """The layout of the matrices in ``members``."""
    if not places:
        blocks = [member.blocks for member in members]
        return layout if all(len(of_param) == 1 for of_param in blocks) else in_blocks(layout, blocks)
    assert not isinstance(layout, ParameterPartition), "tensor parallelism at stage 3 is refused"
    params = tuple(number for number, member in enumerate(members) for _ in member.blocks)
    flat = tuple(block for member in members for block in member.blocks)
    cut = tuple(member.cut is not None for member in members)
    return TensorShards(layout, params, flat, places=tuple(places), cut=cut)


def kept_bases(plan: MatrixPlan, rank: int) -> dict[int, int]:
    """The offset of each matrix, or of the shard of it, whose state ``rank`` keeps, in its flat state, by atom."""
    kept = [atom for atom in range(len(plan.atoms)) if plan.keeps_state(atom, rank)]
    found = (plan.layout.fragment(atom, rank) for atom in kept)
    return dict(zip(kept, accumulate((part.numel for part in found if part is not None), initial=0)))


def kept_numel(plan: MatrixPlan, rank: int) -> int:
    """The number of elements in the flat state of ``rank``."""
    parts = (plan.layout.fragment(atom, rank) for atom in kept_bases(plan, rank))
    return sum(part.numel for part in parts if part is not None)


def _plan_atoms(
    atoms: Sequence[Atom],
    layout: StorageLayout | BlockLayout,
    matrix_rule: MatrixRule,
    config: ZeROConfig,
    machine: Machine,
    earlier: Sequence[int],
) -> MatrixPlan:
    """Assign owners by the policy where a matrix is stored almost whole on one rank, otherwise by work."""
    limits = Limits(numel=config.bucket_numel, machine=machine, batch_numel=BATCH_NUMEL)
    more: dict[str, Any] = {"earlier": earlier, **registry.wire_of(matrix_rule)}
    stored = layout.storage if isinstance(layout, BlockLayout) else layout
    if isinstance(stored, FlatPartition):
        return plan_matrices(atoms, layout, limits, policy=config.policy, machine=machine, **more)
    if config.policy == "stay" and layout.world_size > 1:
        raise ValueError(
            "policy: expected 'balance' or 'auto', found 'stay', but here every rank stores a part or a copy of every "
            "matrix"
        )
    if matrix_rule.block_period > 1 and isinstance(stored, Replicas):
        raise ValueError(
            f"block_period: expected 1 at stage 0, where every rank stores whole matrices, found "
            f"{matrix_rule.block_period}; leave it out, or use stage 1, 2 or 3"
        )
    plan = plan_spread(atoms, layout, limits, **more)
    return replace(plan, modelled=((plan.ownership.policy, modelled_time(plan, machine)),))


# Steps of planned parameters, whose state is in flat tensors on this rank.

KIND = 0  # of all matrices of a unit, which have one rule

Stored = TypeVar("Stored", bound="Tensor | Sequence[Tensor]")


class UnitStepper(Generic[Stored]):
    """Steps the parameters of ``plan``. Matrices are exchanged on ``device``; their rule runs on the ``ns_device``.

    ``stored`` is what this rank stores of them. ``matrices`` is the stepper of matrices, if a matrix rule steps them.
    Each step reads the current hyperparameters. ``shard`` is the tensor-parallel rank.
    """

    def __init__(
        self,
        plan: GroupPlan,
        stored: Stored,
        collectives: Collectives,
        config: ZeROConfig,
        device: torch.device,
        shard: int = 0,
    ) -> None:
        self._plan, self.params = plan, plan.params
        self._stored = stored
        self._shard = shard
        self._collectives = collectives
        self._config = config
        self._device = device
        self._elementwise = ElementwiseGroups()
        self._quantized_keys: Sequence[str] = ()
        self.matrix_stepper: MatrixStepper | None = None
        if plan.matrices is not None:
            rule_device = torch.device("cpu") if config.ns_device == "cpu" else device
            batch = batch_numel_on(rule_device, BATCH_NUMEL)
            kinds = [KIND] * len(plan.matrices.atoms)
            self.matrix_stepper = MatrixStepper(
                plan.matrices,
                kinds,
                collectives,
                device,
                batch_numel=batch,
                rule_device=rule_device,
                capture=config.capture,
            )

    def step(self, group: Mapping[str, Any], state: dict[str, Any], out: Collection[str] = ()) -> None:
        """One step with the hyperparameters in ``group``, without the parameters of these names, which were taken
        ``out`` of the group where it shows them. Called on all ranks that share the parameters."""
        raise NotImplementedError

    def pieces(self, state: Mapping[str, Tensor], first: int) -> Iterator[StatePiece]:
        """This rank's pieces of the parameters, which the store numbers from ``first``."""
        raise NotImplementedError

    def fill_state(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Add the state tensors that are missing; those that a checkpoint restored are kept, or quantized."""
        for key, tensor in registry.stored_state(self._like(), group).items():
            state.setdefault(key, tensor)
        self._quantized_keys = registry.quantized_keys(group)
        for key in self._quantized_keys:
            loaded = state.pop(key, None)
            for atom, views in self._in_flat() if loaded is not None else ():
                self._quantized.take([view_of(loaded, view) for view in views], key, atom)
        if self._quantized_keys:
            self._quantized.make(self._quantized_keys, (atom for atom, _ in self._in_flat()), self._place()[1])

    def wide_state(self, *, to_send: bool) -> dict[str, Tensor]:
        """What is kept in 8 bits as flat fp32 tensors, for a checkpoint: in CPU memory, unless ranks send it."""
        found = {}
        for key in self._quantized_keys:
            numel, device = self._place()
            found[key] = flat = torch.zeros(numel, dtype=torch.float32, device=device if to_send else "cpu")
            for atom, views in self._in_flat():
                self._quantized.copy_into([view_of(flat, view) for view in views], key, atom)
        return found

    @property
    def _quantized(self) -> QuantizedState:
        assert self.matrix_stepper is not None
        return self.matrix_stepper.matrices.quantized

    def _in_flat(self) -> Iterator[tuple[int, Sequence[View]]]:
        """By matrix, the places of its state in this rank's flat state."""
        raise NotImplementedError

    def _like(self) -> Tensor:
        """A flat tensor of the length of the state."""
        raise NotImplementedError

    def _place(self) -> tuple[int, torch.device]:
        """The length of the state, and where it is."""
        raise NotImplementedError


class GroupStepper(UnitStepper[Tensor]):
    """Steps the fragments in a flat tensor, this rank's partition of the parameters."""

    _regions: Regions | None = None

    def _like(self) -> Tensor:
        return self._stored

    def _place(self) -> tuple[int, torch.device]:
        return self._stored.numel(), self._stored.device

    def _in_flat(self, atoms: Iterable[int] | None = None) -> Iterator[tuple[int, Sequence[View]]]:
        planned, rank = self._plan.matrices, self._collectives.rank
        assert planned is not None
        layout = planned.layout
        assert isinstance(layout, (Partition, BlockLayout))
        for atom in range(len(planned.atoms)) if atoms is None else atoms:
            if views := layout.views(atom, rank):
                yield atom, views

    def pieces(self, state: Mapping[str, Tensor], first: int) -> Iterator[StatePiece]:
        """The fragment of every parameter; some are empty, and some of shards have several pieces."""
        end = 0  # of the atoms so far
        for index, param in enumerate(self.params):
            held = self._plan.layout.fragment(index, self._plan.place(self._collectives.rank))
            offset, start, numel = (held.offset, held.start, held.numel) if held is not None else (0, 0, 0)
            atoms, end = range(end, end + len(param.blocks)), end + len(param.blocks)
            for view in in_whole(param, self._shard, start, start + numel):
                held_here = math.prod(view.sizes)
                cut = [t.narrow(0, offset, held_here).view(view.sizes) if t.ndim else t for t in state.values()]
                value = self._stored.detach().narrow(0, offset, held_here).view(view.sizes)
                tensors = with_quantized(dict(zip(state, cut)), self._in_8_bits(atoms, value, offset))
                yield StatePiece(first + index, view, value, tensors)
                offset += held_here

    def _in_8_bits(self, atoms: range, value: Tensor, offset: int) -> Mapping[str, QuantizedPiece]:
        """The state in 8 bits of a parameter, with these atoms, whose ``value`` is at ``offset`` of the partition."""
        if not self._quantized_keys:
            return {}

        def cut(flat: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
            for atom, views in self._in_flat(atoms):
                yield atom, [view_of(flat, replace(view, offset=view.offset - offset)) for view in views]

        return self._quantized.piece(self._quantized_keys, value.shape, value.dtype, value.device, cut)

    def _weights(self) -> list[Tensor]:
        """The partition without padding, whose values are arbitrary."""
        return [piece.value for piece in self.pieces({}, 0) if piece.value is not None]

    def step(self, group: Mapping[str, Any], state: dict[str, Any], out: Collection[str] = ()) -> None:
        """One step from the flat tensor's ``grad``."""
        planned, grad = self._plan.matrices, self._stored.grad
        assert grad is not None
        if self.matrix_stepper is None or planned is None:
            self._elementwise.step(0, group, [Slices(self._stored, grad, state)], self._weights)
            return
        rule = registry.build_matrix_rule(group, self._config)
        elements = Slices(self._stored, grad, {key: state[key] for key in rule.stored_keys})
        if self._regions is None:
            layout, rank = planned.layout, self._collectives.rank
            assert isinstance(layout, (Partition, BlockLayout))
            views = [layout.views(atom, rank) for atom in range(len(planned.atoms))]
            self._regions = flat_regions(views, self._stored.numel())
        self.matrix_stepper.step(StepInput({KIND: rule}, self._regions.cut(elements)))
