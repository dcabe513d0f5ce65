"""Buckets as a whole: members, plans, buffers and steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER
from lwopt_backend.config.hosts import BufferConfig, HostConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.base import BATCH_NUMEL, batch_numel_on, machine_for
from lwopt_backend.engines.buffers.bucket_manager import BucketManager
from lwopt_backend.engines.buffers.gradients import BufferGradients
from lwopt_backend.engines.buffers.saves import Saves
from lwopt_backend.groups import Group, Groups
from lwopt_backend.groups.grouping import Grouping, Member
from lwopt_backend.groups.param_groups import ElementwiseGroups
from lwopt_backend.groups.registry import (
    MATRIX_RULES,
    atoms_of,
    build_matrix_rule,
    build_matrix_rules,
    check_devices,
    quantized_keys,
    stored_state,
)
from lwopt_backend.plan import Atom
from lwopt_backend.plan.atoms import lie_end_to_end
from lwopt_backend.plan.buffers.layout import BUCKET_END, NCCL_BUCKET_END, Bucket, BufferParam
from lwopt_backend.plan.buffers.plan import BufferPlan, plan_buffers
from lwopt_backend.plan.cost import Machine, Shape
from lwopt_backend.plan.layouts import Fragment, View, range_views
from lwopt_backend.qk_clip import RowScaling
from lwopt_backend.runtime.agreement import agree, agree_in_all, plan_digest
from lwopt_backend.runtime.buffers import BucketBuffers, RankGroups
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.pieces import Pieces, Regions, Slices, flat_regions
from lwopt_backend.runtime.places import Rules
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.quantized import QuantizedPiece, QuantizedState
from lwopt_backend.runtime.state import StatePiece, keeps_state, owner_key, with_quantized
from lwopt_backend.runtime.step import Matrices

# Which ranks share which parameters: all ranks of a process group, in instances that each own everything.


def rank_groups_of(everyone: Collectives, plan: BufferPlan, divisor: float) -> RankGroups:
    """Divide ``everyone`` into instances of neighbouring ranks. Called on all of these ranks."""
    if plan.instances == 1:
        return RankGroups(everyone, everyone, None, divisor)
    if plan.group_size == 1:
        return RankGroups(everyone, Collectives(), everyone, divisor)
    assert isinstance(everyone, TorchCollectives)
    size, ranks = plan.group_size, range(everyone.world_size)
    instance = everyone.part([ranks[first : first + size] for first in ranks[::size]])
    replicas = everyone.part([ranks[place::size] for place in ranks[:size]])
    return RankGroups(everyone, instance, replicas, divisor)


# The parameters in buckets, and the plan of each set of them that some ranks share.


def members_of(grouping: Grouping) -> list[Member]:
    """All trained parameters in the model's order."""
    found = {
        grouping.names[id(param)]: (param, number)
        for number, group in enumerate(grouping.groups)
        for param in group["params"]
    }
    return [grouping.member(route.name, *found[route.name]) for route in grouping.routes if route.name in found]


def plan_members(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    ranks: int,
    config: BufferConfig,
    *,
    group_size: int | None,
    grad_dtype: torch.dtype | None,
    base: Sequence[int] | None = None,
    machine: Machine,
) -> BufferPlan:
    """Plan ``members`` over ``ranks`` ranks, the same on every rank; slots name members by position.

    ``base`` is each rank's work from other plans; ``machine`` is the plan's target.
    """
    costs: list[dict[Shape, int]] = [{} for _ in groups]
    params = [_buffer_param(member, groups[member.group], costs[member.group]) for member in members]
    gradient = (grad_dtype or members[0].param.dtype).itemsize
    numel = max(1, int(config.bucket_mb * 2**20 / gradient))
    end = NCCL_BUCKET_END if config.pad_buckets_for_high_nccl_busbw else BUCKET_END
    return plan_buffers(params, ranks, config.layout, numel, group_size, base, machine, end)


def _buffer_param(member: Member, group: Mapping[str, Any], costs: dict[Shape, int]) -> BufferParam:
    """A member as planned: contiguous, to be a view; it may be cut between adjacent matrices."""
    atoms = atoms_of(member, group, costs)
    whole = None
    if atoms:
        rows = max(1, member.param.shape[0])
        shape = (rows, member.param.numel() // rows)
        whole = Atom(member.name, shape, sum(atom.cost for atom in atoms))
    parts = tuple((atom.numel, atom.cost) for atom in atoms) if len(atoms) > 1 and lie_end_to_end(member.blocks) else ()
    return BufferParam(member.name, member.param.numel(), member.dtype, whole, member.tied, parts)


def plan_lines(members: Sequence[Member], plan: BufferPlan) -> list[str]:
    """The lines that must be equal on all ranks that share these members."""
    shapes = [f"{m.name} {m.shape} {m.dtype} {m.rule} group {m.group}" for m in members]
    return [*shapes, *plan.lines()]


# One step on one rank, bucket by bucket.


class BufferStepper:
    """Steps this rank's pieces of ``members``, the parameters of ``manager``, and stores their state.

    ``state[member]`` has the flat state tensors of this rank's piece of the member, by key.
    """

    def __init__(
        self,
        members: Sequence[Member],
        groups: Groups,
        manager: BucketManager,
        config: HostConfig,
        row_scaling: RowScaling,
    ) -> None:
        self._row_scaling = row_scaling
        self._members = members
        self._manager = manager
        self._config = config
        mine = {piece.param: piece for bucket in manager.buckets for piece in bucket.pieces}
        self._atoms: list[Atom] = []
        kinds: list[int] = []  # by atom
        self._regions: dict[int, Regions] = {}  # by member: the places of its atoms in this rank's piece
        self._atoms_of: dict[int, dict[int, int]] = {}  # by member: this rank's atoms, by their place in it
        for number, member in enumerate(members):
            self._atoms_of[number] = {}
            views: list[Sequence[View]] = []
            piece = mine.get(number)
            for place, (atom, block) in enumerate(zip(atoms_of(member, groups[member.group]), member.blocks)):
                if piece is not None and piece.start <= block.flat(0) < piece.stop:
                    self._atoms_of[number][place] = len(self._atoms)
                    self._atoms.append(atom)
                    kinds.append(member.group)
                    views.append(range_views(block, piece.start, piece.stop, 0))
            self._regions[number] = flat_regions(views, 0 if piece is None else piece.numel)
        device = members[0].param.device
        batch = batch_numel_on(device, BATCH_NUMEL)
        self.matrices = Matrices(
            self._atoms,
            kinds,
            device,
            quantized=QuantizedState(self._atoms, lambda atom: Fragment(0, 0, self._atoms[atom].numel, 0)),
            batch_numel=batch,
            capture=config.capture,
        )
        self._elementwise = ElementwiseGroups()
        self.last_first = False  # parameters return in forward order, the reverse of backward
        self.state: dict[int, dict[str, Tensor]] = {}
        self._quantized: dict[int, Mapping[str, QuantizedPiece]] = {}
        for bucket in manager.buckets:
            for piece, value in zip(bucket.pieces, bucket.owned_values()):
                member = members[piece.param]
                self.state[piece.param] = stored_state(value, groups[member.group])
                self._quantized[piece.param] = self._in_8_bits(piece.param, value, groups[member.group])

    @torch.no_grad()
    def step(self, groups: Groups, active: Callable[[int], bool]) -> None:
        """Update every bucket and start its parameters' return. Called on all ranks, after ``manager.finish``.

        A member that is not ``active`` does not change, nor does its state; ``active`` must be equal on all ranks.
        """
        rules = build_matrix_rules(groups, self._config)
        numbers = self._manager.order[:: -1 if self.last_first else 1]
        for number, bucket in zip(numbers, self._manager.settled(numbers)):
            self._update(bucket, groups, rules, active)
            if self._row_scaling and self._row_scaling.scale(self._members, self.pieces(bucket)):
                bucket.publish_masters()
            self._manager.send_values(number)
        self._row_scaling.clear()

    def pieces(self, bucket: BucketBuffers) -> Iterator[StatePiece]:
        """This rank's pieces of a bucket: ranges of flattened parameters. ``tensors`` has the masters."""
        for piece, value in zip(bucket.pieces, bucket.owned_values()):
            tensors: Mapping[str, Tensor] = self.state[piece.param]
            tensors = {**tensors, **({} if bucket.masters is None else {MASTER: value})}
            view, owner = View.of_range(piece.start, piece.stop), self.owner_states(piece.param)
            tensors = with_quantized(tensors, self._quantized[piece.param])
            yield StatePiece(piece.param, view, value, tensors, owner)

    def _in_8_bits(self, number: int, value: Tensor, group: Group) -> Mapping[str, QuantizedPiece]:
        """The state in 8 bits of this rank's piece of a member, whose ``value`` is flat."""
        if not (keys := quantized_keys(group)):
            return {}
        cut = self._regions[number].of_matrices(self._atoms_of[number].values())
        self.matrices.quantized.make(keys, self._atoms_of[number].values(), value.device)
        return self.matrices.quantized.piece(keys, value.shape, value.dtype, value.device, cut)

    def owner_states(self, number: int) -> dict[int, dict[str, Any]]:
        """The owner state of a member's matrices on this rank, by a matrix's place in the member."""
        held = self.matrices.owner_state.held()
        return {place: held[atom] for place, atom in self._atoms_of[number].items() if atom in held}

    def take_owner_states(self, number: int, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the owner state of a member's matrices; those missing in ``states`` start fresh."""
        self.matrices.owner_state.take({atom: states.get(place) for place, atom in self._atoms_of[number].items()})

    def owner_tensors(self, number: int, groups: Groups) -> dict[str, Tensor]:
        """``owner_states`` as tensors by key; before the first step, tensors such as that step creates."""
        member, found = self._members[number], {}
        for place, atom in self._made(number, groups).items():
            for path, tensor in self.matrices.owner_state.tensors(atom, ordered=True).items():
                found[owner_key(path, place, len(member.blocks))] = tensor
        return found

    def take_owner_tensors(self, number: int, groups: Groups, found: Mapping[str, Tensor]) -> None:
        """Restore the result of ``owner_tensors`` on the rank that owned this piece."""
        for place, atom in self._made(number, groups).items():
            start = owner_key("", place, len(self._members[number].blocks))
            of_matrix = {key.removeprefix(start): found[key] for key in found if key.startswith(start)}
            self.matrices.owner_state.put_tensors(atom, of_matrix)

    def _made(self, number: int, groups: Groups) -> dict[int, int]:
        """Make the owner state of the matrices that this rank owns in a member; returns their atoms by place."""
        atoms = self._atoms_of[number]
        if not atoms:
            return {}
        rule = build_matrix_rule(groups[self._members[number].group], self._config)
        if not keeps_state(rule):
            return {}
        self.matrices.owner_state.make(dict.fromkeys(atoms.values(), rule))
        return atoms

    def owner_nbytes(self) -> int:
        """Bytes of all owner state on this rank."""
        return self.matrices.owner_state.nbytes()

    def _update(self, bucket: BucketBuffers, groups: Groups, rules: Rules, active: Callable[[int], bool]) -> None:
        pieces = zip(bucket.pieces, bucket.owned_values(), bucket.owned_grads())
        stepped = {
            piece.param: Slices(value, grad, self.state[piece.param])
            for piece, value, grad in pieces
            if active(piece.param)
        }
        by_atom: dict[int, Pieces] = {}
        for number, slices in stepped.items():
            if atoms := self._atoms_of[number].values():
                by_atom.update(zip(atoms, self._regions[number].cut(slices), strict=True))
        self.matrices.step(by_atom, rules, by_atom)
        by_group: dict[int, list[Slices]] = {}
        for number, slices in stepped.items():
            if self._members[number].rule not in MATRIX_RULES:
                by_group.setdefault(self._members[number].group, []).append(slices)
        for number, parts in by_group.items():
            self._elementwise.step(number, groups[number], parts)
        bucket.publish_masters()


# All of it: members, plans, buffers, steps. Plain PyTorch and DeepSpeed build their optimizers on it.

WHAT = "the optimizer's buffers"


@dataclass(frozen=True)
class ParamSet:
    """Parameters that the ranks of one process group share. ``takes`` selects them by name; the first takes the rest.

    ``group_size`` is that of ``PlainConfig``. A mean gradient is the sum over these ranks divided by ``divisor``.
    """

    ranks: Collectives
    divisor: float
    group_size: int | None
    takes: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class PlannedSet:
    """The members that one process group shares, by number, their plan, and the groups of ranks that use it."""

    numbers: tuple[int, ...]
    plan: BufferPlan
    rank_groups: RankGroups


class BufferCore:
    """The buffers of a model's trained parameters, and their steps. Made on all ranks of all ``sets``.

    Raises RuntimeError, on all of them, if their plans differ.
    """

    def __init__(
        self,
        grouping: Grouping,
        sets: Sequence[ParamSet],
        config: BufferConfig,
        *,
        grad_dtype: torch.dtype | None = None,
        keep_full: bool = False,
        overlap: bool = True,
    ) -> None:
        self.members, self.sets = members_of(grouping), sets
        self.config, self.grad_dtype, self.keep_full = config, grad_dtype, keep_full
        # Equal on all ranks for the same part of a user's group, unique otherwise.
        self.group_keys = [f"{g['from_group']}.{g['rule']}{g['overrides'] or ''}" for g in grouping.groups]
        self.planned_sets = self._plan(grouping, sets)
        of_sets = [enumerate(planned.numbers) for planned in self.planned_sets]
        self._places = {number: (one, place) for one, of in enumerate(of_sets) for place, number in of}
        buckets: list[tuple[Bucket, RankGroups]] = []
        for planned in self.planned_sets:
            for bucket in planned.plan.buckets:
                slots = (replace(slot, param=planned.numbers[slot.param]) for slot in bucket.slots)
                buckets.append((replace(bucket, slots=tuple(slots)), planned.rank_groups))
        buckets.sort(key=lambda pair: -min(slot.param for slot in pair[0].slots))
        if sets[0].ranks.rank == 0:
            warn_of_strides(self.members)
        self.manager = BucketManager(
            [bucket for bucket, _ in buckets],
            [rank_groups for _, rank_groups in buckets],
            [member.param for member in self.members],
            [member.name for member in self.members],
            grad_dtype=grad_dtype,
            keep_full=keep_full,
            overlap=overlap,
        )
        for buffers in self.manager.buckets:
            buffers.rank_groups.everyone.broadcast(buffers.values)
            buffers.refresh_masters()
        self.half_loaded = False
        self.saves = Saves(self.everyone, self.plan_digest)
        self.row_scaling = grouping.row_scaling()
        self.stepper = BufferStepper(self.members, grouping.groups, self.manager, config, self.row_scaling)
        self.gradients = BufferGradients(self.manager, self.planned_sets[0].rank_groups)
        firsts = [planned for planned in self.planned_sets if config.report and planned.rank_groups.everyone.rank == 0]
        names = {number: self.members[number].name for planned in firsts for number in planned.numbers}
        self.without_gradient = report.MissingGradients(names, sets[0].ranks.rank)

    def _plan(self, grouping: Grouping, sets: Sequence[ParamSet]) -> list[PlannedSet]:
        """Plan the members of each set, and compare the plans of all ranks."""
        ranks = [shared.ranks for shared in sets]

        def divide() -> tuple[list[list[int]], list[list[str]]]:
            device = self.members[0].param.device
            ways = check_devices(grouping.groups, self.config, device, grouping.smallest_matrix)
            check_gradients(self.members, self.grad_dtype)
            for each in ranks:
                each.check_device(device)
            parts: list[list[int]] = [[] for _ in sets]
            for number, member in enumerate(self.members):
                parts[set_number(member.name, sets)].append(number)
            for shared, part in zip(sets, parts):
                if not part:
                    raise ValueError(
                        "expected a trained parameter for the dense ranks, found none"
                        if shared.takes is None
                        else f"expected a trained parameter named like the experts, found {self.members[0].name!r}, ..."
                    )
            return parts, [ways for _ in sets]

        parts = agree_in_all(ranks, WHAT, divide)

        def plan_set(number: int, base: Sequence[int] | None = None) -> BufferPlan:
            members, shared = [self.members[n] for n in parts[number]], sets[number]
            return plan_members(
                members,
                grouping.groups,
                shared.ranks.world_size,
                self.config,
                group_size=shared.group_size,
                grad_dtype=self.grad_dtype,
                base=base,
                machine=machine_for(self.members[0].param.device),
            )

        def plan_experts() -> tuple[list[BufferPlan], list[list[str]]]:
            plans = [plan_set(number) for number in range(1, len(sets))]
            return plans, [[], *(self._lines(part, plan) for part, plan in zip(parts[1:], plans))]

        def plan_dense() -> tuple[BufferPlan, list[str]]:
            plan = plan_set(0, base)
            return plan, self._lines(parts[0], plan)

        # Experts have few possible owners, so they are planned first; dense matrices then go to the least loaded ranks.
        experts = agree_in_all(ranks, WHAT, plan_experts)
        mine = sum(plan.loads[s.ranks.rank % plan.group_size] for plan, s in zip(experts, sets[1:]))
        base = sets[0].ranks.gather_objects(mine) if experts else None
        plans = [agree(sets[0].ranks, WHAT, plan_dense), *experts]
        return [
            PlannedSet(tuple(part), plan, rank_groups_of(shared.ranks, plan, shared.divisor))
            for part, plan, shared in zip(parts, plans, sets)
        ]

    def set_of(self, name: str) -> ParamSet:
        """The ranks that share a parameter or a buffer."""
        return self.sets[set_number(name, self.sets)]

    def check_loaded(self) -> None:
        """Raises RuntimeError, on all ranks, if the last load ended in an error in between."""
        if self.half_loaded:
            raise RuntimeError(
                "the last load_state_dict_from failed after some weights and state had been loaded; load a checkpoint "
                "again, or restart"
            )

    def refresh_masters(self) -> None:
        """Copy the parameters' values into the fp32 masters of 16-bit parameters."""
        for bucket in self.manager.buckets:
            bucket.refresh_masters()

    @property
    def everyone(self) -> Collectives:
        """All ranks: those of the first set, which has the dense parameters."""
        return self.planned_sets[0].rank_groups.everyone

    @property
    def plan_digest(self) -> str:
        """The digest of the plans of all parameters that this rank shares."""
        return plan_digest(line for planned in self.planned_sets for line in self._lines(planned.numbers, planned.plan))

    def _lines(self, part: Sequence[int], plan: BufferPlan) -> list[str]:
        return plan_lines([self.members[number] for number in part], plan)

    def presences(self, out: Collection[str] = (), **more: Sequence[int]) -> list[Presence]:
        """Which members have a gradient on any rank, by planned set, and are not ``out`` of the param groups there;
        ``more`` are flags of all ranks of the first.

        Until ``order_buckets``, the places of the first rank's full buckets precede them; 0 means never full.
        """
        device, filled = self.members[0].param.device, self.manager.filled
        found = []
        for number, planned in enumerate(self.planned_sets):
            here = [self.manager.has_gradient(n) and self.members[n].name not in out for n in planned.numbers]
            first = planned.rank_groups.everyone.rank == 0
            numbers = () if filled is None else self._buckets_of(planned)
            places = [filled.index(each) + 1 if first and filled and each in filled else 0 for each in numbers]
            of_all = {name: () if number else flags for name, flags in more.items()}
            found.append(Presence(planned.rank_groups.everyone, here, device, places=places, **of_all))
        return found

    def order_buckets(self, presences: Sequence[Presence]) -> None:
        """Fix the order in which buckets leave: the order in which they were full in the first rank's first backward
        pass, as in DDP. Called on all ranks with ``presences``, after each pass, until that rank had one.

        A model may use layers in an order other than that of registration. The first bucket would then delay all others
        until backward has ended. Experts' places are those of the first rank that has them. All ranks compare places,
        so the ranks that share a bucket agree on its predecessors.
        """
        if self.manager.filled is None:
            return
        places: list[tuple[float, int, int]] = []
        for number, (planned, presence) in enumerate(zip(self.planned_sets, presences)):
            found, numbers = presence.largest("places"), self._buckets_of(planned)
            if number == 0 and not any(found):
                return
            places += [(place or math.inf, number, each) for place, each in zip(found, numbers)]
        self.manager.leave_in([each for *_, each in sorted(places)])

    def _buckets_of(self, planned: PlannedSet) -> list[int]:
        return [
            number for number, bucket in enumerate(self.manager.buckets) if bucket.rank_groups is planned.rank_groups
        ]

    def had_gradient(self, presences: Sequence[Presence]) -> Callable[[int], bool]:
        """Returns whether any rank has a gradient for a member, by the result of ``presences``."""

        def had_one(number: int) -> bool:
            one, place = self._places[number]
            return presences[one](place)

        return had_one

    def step(self, groups: Groups, presences: Sequence[Presence]) -> None:
        """Update what this rank owns and start the parameters' return. Called on all ranks."""
        self.stepper.step(groups, self.had_gradient(presences))
        self.end_step(presences)

    def end_step(self, presences: Sequence[Presence]) -> None:
        """The gradients have been used, or are to be skipped."""
        found = ((planned.numbers, presence.anywhere()) for planned, presence in zip(self.planned_sets, presences))
        self.manager.stepped(number for numbers, had in found for number, one in zip(numbers, had) if not one)


def check_gradients(members: Sequence[Member], dtype: torch.dtype | None) -> None:
    """Raises ValueError for a parameter whose gradients would lose bits in buffers of ``dtype``, None: their own."""
    for name, param in ((member.name, member.param) for member in members):
        wanted, kept = getattr(param, "grad_dtype", param.dtype) or torch.float32, dtype or param.dtype
        if torch.promote_types(wanted, kept) != kept:
            raise ValueError(
                f"{WHAT}: parameter {name!r} has the attribute grad_dtype {param.grad_dtype}, but its gradients are "
                f"kept in {kept}; keep them in float32 (LayerWiseOptimizer's option grad_dtype, DeepSpeed's "
                "data_types.grad_accum_dtype), or reset the attribute"
            )


def warn_of_strides(members: Sequence[Member]) -> None:
    """Warn once of parameters that do not store their elements in the order of their indices."""
    if found := [member.name for member in members if not member.param.is_contiguous()]:
        more = f" and {len(found) - 1} more parameter(s)" if len(found) > 1 else ""
        warnings.warn(
            f"{WHAT}: {found[0]!r}{more} had another memory format, such as channels_last, and is contiguous now, "
            "because buffers are. Values stay. A convolution of channels_last inputs returns channels_last outputs as "
            "before, and reorders its weight in each pass",
            stacklevel=6,
        )


def set_number(name: str, sets: Sequence[ParamSet]) -> int:
    """The number of the set that a parameter or a buffer is in."""
    return next((i for i, shared in enumerate(sets) if shared.takes is not None and shared.takes(name)), 0)
