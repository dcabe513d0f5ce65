"""Each engine's plan for what some ranks share: ZeRO, plain PyTorch, FSDP2."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch

from lwopt_backend.config.hosts import FSDP2Config, PlainConfig, ZeROConfig
from lwopt_backend.engines.base import BATCH_NUMEL
from lwopt_backend.engines.buffers.model import rank_memories
from lwopt_backend.engines.buffers.step import members_of, plan_lines, plan_members
from lwopt_backend.engines.fsdp2 import plan as mesh
from lwopt_backend.engines.fsdp2.plan import MeshMember, MeshPlan, by_wire, following, mesh_state_nbytes, plan_mesh
from lwopt_backend.engines.report import Note, on_blocks, on_copies, on_peers, on_pieces, on_stacks
from lwopt_backend.engines.zero.plan import GroupPlan, plan_group, unit_layouts
from lwopt_backend.groups.grouping import Member
from lwopt_backend.groups.registry import MATRIX_RULES, atoms_of, build_matrix_rules
from lwopt_backend.plan import MACHINES, FlatPartition, ParameterPartition, Sharding
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buckets import Timeline, critical_path
from lwopt_backend.plan.buffers.plan import BufferPlan
from lwopt_backend.plan.cost import RankMemory, Shape, StepTime, per_rank
from lwopt_backend.plan.mesh import Coordinate
from lwopt_backend.plan.owners import Limits, MatrixPlan, exchange_timeline
from lwopt_backend.planner.part import Collective, Elementwise, Part, Planned, workspaces
from lwopt_backend.planner.seconds import Placed, buffer_step, buffer_timeline
from lwopt_backend.planner.setting import MeshConfig, Setting, Share
from lwopt_backend.runtime.collectives import all_reduce_nbytes

SUMS_NBYTES = 24  # of a matrix: those of W^2, W U and U^2, in fp64

# A host's storage in a study: DeepSpeed's ZeRO and FSDP2 store parameters; this package exchanges the pieces of
# matrices. Its plan for the parameters that some ranks share: owners, buckets, bytes, memory of every rank, seconds.


def host_part(
    name: str,
    plans: Sequence[MatrixPlan],
    shared: Share,
    setting: Setting,
    *,
    buffer_numel: int,
    host: Sequence[Collective],
    spread: bool,
    batch_numel: int,
    before: Sequence[int] = (),
    notes: Sequence[Note] = (),
) -> Part:
    """The figures of ``plans``, one after another on the same ranks.

    ``host`` are the host's own collectives. ``spread`` is whether all ranks store a part of every matrix. A rule takes
    up to ``batch_numel`` elements at once. ``before`` is each rank's work before the first plan. ``notes`` are on
    how the host stores parameters.
    """
    ranks, apart = plans[0].layout.world_size, plans[0].instances
    of_all = ranks if apart is None else len(apart.of)
    rows = [*_rows(plans)]
    placed = _placed(rows, plans, shared, setting)
    trips = sum(plan.trips(bucket) for plan in plans for bucket in range(len(plan.buckets)))
    sent = [*map(sum, zip(*(plan.wire_bytes() for plan in plans)))]
    norms, columns = _norms(plans, shared, setting), _columns(plans)
    added = sum(each.nbytes for each in norms)
    exchanged = [
        *map(sum, zip(*chain.from_iterable(plan.bucket_bytes(range(len(plan.buckets)))[:2] for plan in plans)))
    ]
    ways = trips - sum(each.count for each in columns)
    moved = (Collective("all-to-all to the owners, and back", ways, max(exchanged)), *columns, *norms, *host)
    works = workspaces(placed, batch_numel, travel=True)
    phases, first = [], 0  # of each plan, whose buckets are numbered from there
    for plan in plans:
        of_plan = {number: works.get(first + number, {}) for number in range(len(plan.buckets))}
        phases.append(plan.largest_phases({**of_plan, -1: works.get(-1, {})}))
        first += len(plan.buckets)
    needed = (max(of_rank, key=sum) for of_rank in zip(*phases))
    rounds = trips + sum(each.count for each in norms)
    time = StepTime(
        setting.seconds(_path(plans, shared, setting, before, meet=True)),
        sum(_wire(each, ranks, of_all, setting, direct=each is moved[0]) for each in moved),
        rounds * setting.machine.latency_seconds,
    )
    timelines = [
        _timeline(plan, shared, setting, () if number else before, batch_numel) for number, plan in enumerate(plans)
    ]
    return Part(
        name,
        of_all,
        "compact" if spread else "host",
        f"policy {plans[0].ownership.policy!r}",
        placed,
        buffer_numel,
        tuple(RankMemory(workspace=work, exchange=of, sent=mine + added) for (work, of), mine in zip(needed, sent)),
        moved,
        time,
        reduce(Timeline.then, timelines),
        tuple((atom.name, owner, None if bucket < 0 else bucket) for atom, owner, bucket in rows),
        _path(plans, shared, setting, before, meet=False),
        tuple(before),
        (*notes, *chain.from_iterable(map(_said, plans)), *on_peers(plans)),
    )


def _said(plan: MatrixPlan) -> Iterator[Note]:
    return chain(on_copies(plan), on_blocks(plan), on_stacks(plan))


def _wire(moved: Collective, ranks: int, of_all: int, setting: Setting, *, direct: bool) -> float:
    """Seconds on the wire of what ``ranks`` ranks, an instance of ``of_all``, move in a step."""
    among = moved.ranks or ranks
    return setting.machine.collective(moved.nbytes, among, stride=moved.stride, of=of_all, direct=direct)[0]


def _columns(plans: Sequence[MatrixPlan]) -> list[Collective]:
    """The all-gathers by which rows of ranks pass updates on to their copies."""
    shared = [plan for plan in plans if plan.rows is not None and plan.buckets]
    if not shared:
        return []
    assert shared[0].rows is not None
    _, column = shared[0].rows.of[0]
    passed_on = (plan.bucket_bytes(range(len(plan.buckets)))[2] for plan in shared)
    nbytes, count = max(map(sum, zip(*passed_on))), sum(len(plan.buckets) for plan in shared)
    return [Collective("all-gather of updates to copies", count, nbytes, len(column), column[1] - column[0])]


def _norms(plans: Sequence[MatrixPlan], shared: Share, setting: Setting) -> list[Collective]:
    """The all-reduce of a bucket's sums, for rules that use norms of whole weights and updates (``by_norms``)."""
    grouping, ranks = shared.grouping, plans[0].layout.world_size
    names = set[str]()
    for number, rule in build_matrix_rules(grouping.groups, setting.config).items():
        params = grouping.groups[number]["params"] if rule.by_norms else ()
        for name in (grouping.names[id(param)] for param in params):
            names.update(block.of(name) for block in grouping.matrices_in(name))
    counts = [sum(plan.atoms[i].name in names for i in bucket) for plan in plans for bucket in plan.buckets]
    if not any(counts):
        return []
    nbytes = sum(all_reduce_nbytes(count * SUMS_NBYTES, ranks) for count in counts)
    return [Collective("all-reduce of norms", sum(map(bool, counts)), nbytes)]


def _timeline(plan: MatrixPlan, shared: Share, setting: Setting, before: Sequence[int], batch_numel: int) -> Timeline:
    """The modelled step of a plan by itself: without each rank's work ``before``, and with one rank's share of TP."""
    atoms = plan.atoms if shared.tp == 1 else tuple(shared.shown(atom, setting) for atom in plan.atoms)
    done = per_rank(plan.ownership.owners, [atom.cost for atom in plan.atoms], plan.layout.world_size)
    alone = per_rank(plan.ownership.owners, [atom.cost for atom in atoms], plan.layout.world_size)
    loads = tuple(
        all_of_it - own - more + less
        for all_of_it, own, more, less in zip(plan.ownership.loads, done, before or [0] * len(done), alone)
    )
    plan = replace(plan, atoms=atoms, ownership=replace(plan.ownership, loads=loads))
    return exchange_timeline(plan, Limits(machine=setting.machine, batch_numel=batch_numel))


def _path(plans: Sequence[MatrixPlan], shared: Share, setting: Setting, before: Sequence[int], *, meet: bool) -> int:
    """The cost until the last rank is done: of all buckets as if they were one plan's; or of one plan after another, if
    the ranks ``meet`` after each plan, because its updates have to return before the host continues."""
    path, loads = 0, list(before or [0] * plans[0].layout.world_size)
    atoms: list[Atom] = []
    owners: list[int] = []
    buckets: list[list[int]] = []
    for plan in plans:
        first = len(atoms)
        buckets += [[first + index for index in bucket] for bucket in plan.buckets]
        exchanged = {atom for bucket in plan.buckets for atom in bucket}
        atoms += [shared.shown(atom, setting) for atom in plan.atoms]
        owners += plan.ownership.owners
        for index, owner in enumerate(plan.ownership.owners):
            loads[owner] += 0 if index in exchanged else atoms[first + index].cost
        if meet or plan is plans[-1]:
            path += critical_path(atoms, buckets, owners, loads)
            buckets, loads = [], [0] * len(loads)
    return path


Row = tuple[Atom, int, int]  # a matrix, its owner, and the number of its bucket, -1 if it is not exchanged


def _rows(plans: Sequence[MatrixPlan]) -> Iterator[Row]:
    """Every matrix in the order of exchange; in each plan, those that are not exchanged come first. Buckets are
    numbered through all plans."""
    first = 0
    for plan in plans:
        exchanged = {atom for bucket in plan.buckets for atom in bucket}
        stay = [index for index in range(len(plan.atoms)) if index not in exchanged]
        for number, bucket in ((-1, stay), *enumerate(plan.buckets, first)):
            yield from ((plan.atoms[index], plan.ownership.owners[index], number) for index in bucket)
        first += len(plan.buckets)


def _placed(rows: Sequence[Row], plans: Sequence[MatrixPlan], shared: Share, setting: Setting) -> Placed:
    """Matrices of all plans, in the model's order."""
    grouping = shared.grouping
    names = [block.of(route.name) for route in grouping.routes for block in grouping.matrices_in(route.name)]
    order = {name: place for place, name in enumerate(names)}
    numels = [sum(plan.atoms[index].numel for index in bucket) for plan in plans for bucket in plan.buckets]
    in_order = sorted(rows, key=lambda row: order[row[0].name])
    return placed_at(in_order, plans[0].layout.world_size, numels, shared, setting)


def placed_at(rows: Sequence[Row], shards: int, numels: Iterable[int], shared: Share, setting: Setting) -> Placed:
    """The matrices of ``rows``, with the cost of their work for one rank; ``numels`` are the buckets'."""
    atoms, owners, buckets = zip(*rows)
    return Placed(tuple(shared.shown(atom, setting) for atom in atoms), shards, owners, buckets, tuple(numels))


# ZeRO in a study: the plan of ``LayerWise`` under DeepSpeed for a data-parallel model.

MASTER = 4  # bytes: DeepSpeed keeps fp32 partitions in addition to parameters of any dtype


def zero_plans(shared: Share, ranks: int, setting: Setting) -> list[tuple[dict[str, Any], GroupPlan]]:
    """DeepSpeed's successive steps: the param group, and the plan."""
    config, grouping = setting.config, shared.grouping
    assert isinstance(config, ZeROConfig)
    plans = []
    earlier: Sequence[int] = ()
    for number, group in enumerate(grouping.groups):
        layouts = unit_layouts(
            [param.numel() for param in group["params"]],
            ranks,
            int(setting.engine[-1]),
            is_matrix=group["rule"] in MATRIX_RULES,
            sub_group_size=setting.sub_group_size,
        )
        members = [grouping.member(grouping.names[id(param)], param, number) for param in group["params"]]
        for part, layout in layouts:
            plans.append((group, plan_group(group, members[part], layout, config, setting.plans_for, (), earlier)))
            earlier = plans[-1][1].work(earlier)
    return plans


def plan_zero_share(name: str, shared: Share, ranks: int, setting: Setting) -> Planned:
    """The plan of ``LayerWise``, param group by param group, after DeepSpeed's own collectives."""
    stage, plans = int(setting.engine[-1]), [plan for _, plan in zero_plans(shared, ranks, setting)]
    matrices = [plan for plan in plans if plan.matrices is not None]
    rest = [plan for plan in plans if plan.matrices is None]
    part = None
    if matrices:
        part = host_part(
            name,
            [plan.matrices for plan in matrices if plan.matrices is not None],
            shared,
            setting,
            buffer_numel=sum(map(_stored, matrices)) * ranks,
            host=_zero_traffic(matrices, ranks, setting, stage),
            spread=stage == 3,
            batch_numel=_batch(setting, BATCH_NUMEL),
        )
    return Planned(
        name,
        ranks,
        ranks,
        part,
        Elementwise(sum(map(_zero_numel, rest)), tuple(_zero_traffic(rest, ranks, setting, stage)) if rest else ()),
        tuple(_zero_memory(plans, ranks, setting, stage)),
        tuple(line for plan in plans for line in plan.plan_lines()),
        tuple(part.loads) if part else (0,) * ranks,
        shared,
    )


def _zero_numel(plan: GroupPlan) -> int:
    return sum(param.numel for param in plan.params)


def _stored(plan: GroupPlan) -> int:
    """Elements of the fp32 parameters on every rank."""
    assert isinstance(plan.layout, (FlatPartition, ParameterPartition))
    return plan.layout.partition_numel


def _zero_memory(plans: Sequence[GroupPlan], ranks: int, setting: Setting, stage: int) -> list[RankMemory]:
    """Per rank, DeepSpeed's memory, and the plan's state."""
    stored, numel = sum(map(_stored, plans)), sum(map(_zero_numel, plans))
    parameter, gradient = setting.dtype.itemsize, setting.grad_dtype.itemsize
    state = [sum(plan.state_bytes[rank] for plan in plans) for rank in range(ranks)]
    if stage == 3:
        return [RankMemory(stored * parameter, stored * gradient, stored * MASTER, mine) for mine in state]
    kept = stored * ranks * gradient if stage == 1 else stored * gradient
    copied = stored * 4  # the step's own fp32 copy of the partition's gradients
    padding = (stored * ranks - numel) * parameter
    return [RankMemory(numel * parameter, kept + copied, stored * MASTER, mine, padding) for mine in state]


def _zero_traffic(plans: Sequence[GroupPlan], ranks: int, setting: Setting, stage: int) -> list[Collective]:
    """DeepSpeed's own collectives: stages 1 and 2 all-reduce gradients and gather parameters, stage 3 shards both."""
    numel, share = sum(map(_stored, plans)) * ranks, (ranks - 1) / ranks
    parameters, gradients = (int(numel * each.itemsize * share) for each in (setting.dtype, setting.grad_dtype))
    if stage == 3:
        return [
            Collective("zero3's reduce-scatter of gradients", 1, gradients),
            Collective("zero3's all-gathers of parameters", 2, 2 * parameters),
        ]
    return [
        Collective(f"{setting.engine}'s all-reduce of gradients", 1, 2 * gradients),
        Collective(f"{setting.engine}'s all-gather of parameters", 1, parameters),
    ]


# Plain PyTorch in a study: the plan that training makes, and what it stores and sends.


def plan_plain_share(
    name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None
) -> Planned:
    """The plan of ``lwopt_backend.LayerWiseOptimizer`` over ``ranks`` ranks, with each rank's other work ``base``."""
    config = setting.config
    assert isinstance(config, PlainConfig)
    members, groups = members_of(shared.grouping), shared.grouping.groups
    plan = plan_members(
        members,
        groups,
        ranks,
        config,
        group_size=config.group_size,
        grad_dtype=_wide(config),
        base=base,
        machine=setting.plans_for,
    )
    matrices, rest = (
        replace(plan, buckets=tuple(bucket for bucket in plan.buckets if bucket.kind == kind))
        for kind in ("matrix", "elementwise")
    )
    return Planned(
        name,
        ranks,
        plan.group_size,
        _part(name, matrices, members, shared, setting) if matrices.buckets else None,
        Elementwise(
            sum(slot.numel for bucket in rest.buckets for slot in bucket.slots),
            tuple(_collectives(rest, setting, config)),
        ),
        tuple(rank_memories(plan, members, groups, grad_dtype=_wide(config), keep_full=config.keep_full_grads)),
        tuple(plan_lines(members, plan)),
        plan.loads,
        shared,
        None if base is None else tuple(base),
    )


def _wide(config: PlainConfig) -> torch.dtype | None:
    return torch.float32 if config.grad_dtype == "float32" else None


def _part(name: str, plan: BufferPlan, members: Sequence[Member], shared: Share, setting: Setting) -> Part:
    """The figures of a plan's matrix buckets."""
    config = setting.config
    assert isinstance(config, PlainConfig)
    placed = _plain_placed(plan, members, shared, setting)
    batch_numel = _batch(setting, BATCH_NUMEL)
    works = workspaces(placed, batch_numel, travel=False)
    in_order = sorted(zip(placed.buckets, (atom.name for atom in placed.atoms), placed.owners), key=lambda row: row[0])
    machine, elements = setting.machine, setting.elements
    layouts = {bucket.layout for bucket in plan.buckets}
    return Part(
        name,
        plan.group_size * plan.instances,
        layouts.pop() if len(layouts) == 1 else "mixed",
        f"layout {config.layout!r}",
        placed,
        sum(bucket.numel for bucket in plan.buckets),
        tuple(
            RankMemory(workspace=max((of_bucket.get(rank, 0) for of_bucket in works.values()), default=0))
            for rank in range(placed.shards)
        ),
        tuple(_collectives(plan, setting, config)),
        buffer_step(placed, machine, instances=plan.instances, elements=elements),
        buffer_timeline(placed, machine, instances=plan.instances, elements=elements, batch_numel=batch_numel),
        tuple((name, owner, bucket) for bucket, name, owner in in_order),
        max(placed.loads()),
    )


def _batch(setting: Setting, numel: int) -> int:
    """The elements that a rule takes at once: ``numel`` on an accelerator, one matrix on a CPU."""
    return 0 if setting.plans_for == MACHINES["cpu"] else numel


def _plain_placed(plan: BufferPlan, members: Sequence[Member], shared: Share, setting: Setting) -> Placed:
    """Every matrix, in the model's order, at the rank whose part of the buffer contains it."""
    found: dict[int, list[Row]] = {}
    groups = shared.grouping.groups
    costs: list[dict[Shape, int]] = [{} for _ in groups]
    for number, bucket in enumerate(plan.buckets):
        starts: dict[int, list[tuple[int, Atom]]] = {}  # a member's matrices, with the places of their first elements
        for slot in bucket.slots:
            member = members[slot.param]
            atoms = atoms_of(member, groups[member.group], costs[member.group])
            starts[slot.param] = [(block.flat(0), atom) for atom, block in zip(atoms, member.blocks)]
        for rank, pieces in enumerate(bucket.pieces_of_all()):
            for piece in pieces:
                found.setdefault(piece.param, []).extend(
                    (atom, rank, number) for start, atom in starts[piece.param] if piece.start <= start < piece.stop
                )
    rows = [row for param in sorted(found) for row in found[param]]
    return placed_at(rows, plan.group_size, (bucket.numel for bucket in plan.buckets), shared, setting)


def _collectives(plan: BufferPlan, setting: Setting, config: PlainConfig) -> list[Collective]:
    """The collectives of a step, with the busiest rank's bytes, as ``traffic`` counts them."""
    if not plan.buckets:
        return []
    count, wire = len(plan.buckets), setting.grad_dtype.itemsize
    parts = [sum(stop - start for start, stop in of_rank) for of_rank in zip(*(b.parts for b in plan.buckets))]
    owned, back = max(parts), max(parts) * (plan.group_size - 1)
    shared = [
        Collective("reduce-scatter of gradients", count, wire * (sum(b.numel for b in plan.buckets) - min(parts))),
        Collective("all-gather of parameters", count, setting.dtype.itemsize * back),
    ]
    found = shared if plan.group_size > 1 else []
    if plan.instances > 1:
        stepped = 4  # fp32, in which owners sum
        across = 2 * owned * stepped * (plan.instances - 1) // plan.instances
        found.insert(1, Collective("all-reduce across instances", count, across))
    if config.keep_full_grads and plan.group_size > 1:
        found.append(Collective("all-gather of gradients", count, wire * back))
    return found


# FSDP2 in a study: the plan of ``LayerWiseOptimizer`` for a model whose rows are sharded over all ranks, or over some.

PARAMETER_BYTES = 2  # bf16 on the wire, for shards of any dtype


def plan_fsdp2_share(
    name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None
) -> Planned:
    """The plan for a mesh of ``ranks`` ranks, with each rank's work ``base`` on smaller meshes."""
    given, groups = setting.config, shared.grouping.groups
    assert isinstance(given, MeshConfig)
    config: FSDP2Config = given
    rules = build_matrix_rules(groups, config)
    shape = _mesh(ranks, given.group_size or ranks)
    members = _members(shared, shape, setting.stack_dim)
    coordinates = tuple(itertools.product(*map(range, shape)))
    loads = tuple(base or (0,) * ranks)
    plans: list[MeshPlan] = []
    before = []
    for place, own in enumerate(by_wire(members, rules)):
        before.append(loads)
        more = {"earlier" if place else "loads": loads}
        plans.append(plan_mesh(own, groups, rules, config, coordinates, setting.plans_for, **more))
        config = following(config, plans[-1].plan)
        done = plans[-1].plan.of_mesh(plans[-1].plan.ownership.loads)
        loads = tuple(map(add, loads, done)) if place else tuple(done)
    mesh.check_copies(given, (planned.plan for planned in plans))
    matrices = [member for member in members if member.rule in MATRIX_RULES]
    rest = [member for member in members if member.rule not in MATRIX_RULES]
    of_matrices = [planned.plan for planned in plans if planned.plan.atoms]
    size = of_matrices[0].layout.world_size if of_matrices else ranks  # of an instance, where each computes by itself
    part = None
    if matrices:
        part = host_part(
            name,
            of_matrices,
            shared,
            setting,
            buffer_numel=_numel(matrices),
            host=_traffic(matrices, setting, shape),
            spread=True,
            batch_numel=_batch(setting, mesh.BATCH_NUMEL),
            before=() if base is None else [max(base[place::size]) for place in range(size)],
            notes=[
                *([Note("copies", f"Hybrid: {shape[0]} copies of {shape[1]} shards.")] if len(shape) > 1 else []),
                *(said for planned in plans for said in on_pieces(planned.plan, setting.machine)),
            ],
        )
    return Planned(
        name,
        ranks,
        size,
        part,
        Elementwise(_numel(rest), tuple(_traffic(rest, setting, shape))),
        tuple(_memory(members, shared, setting, coordinates[:size])),
        tuple(line for planned in plans for line in planned.lines()),
        loads[:size],
        shared,
        None if base is None else tuple(base),
        tuple(before),
    )


def _mesh(ranks: int, shards: int) -> tuple[int, ...]:
    """The mesh of ``ranks`` ranks: all, or copies x shards. Raises ValueError if these do not divide."""
    if ranks % shards:
        raise ValueError(
            f"group_size {shards} does not divide the {ranks} ranks that share a parameter; give a number of ranks "
            "that store everything once, such as those of a node"
        )
    return (ranks,) if shards == ranks else (ranks // shards, shards)


def _members(shared: Share, shape: tuple[int, ...], stack_dim: int) -> list[MeshMember]:
    """All trained parameters in the model's order, as ``fully_shard`` shards them: stacks along ``stack_dim``, others
    by rows."""
    grouping = shared.grouping
    group_of = {id(param): number for number, group in enumerate(grouping.groups) for param in group["params"]}
    params = {grouping.names[id(param)]: param for group in grouping.groups for param in group["params"]}
    copies, late = (None,) * (len(shape) - 1), (False,) * len(shape)
    shardings: dict[tuple[int, ...], Sharding] = {}
    found = []
    for route in grouping.routes:
        param = params.get(route.name)
        if param is None:
            continue
        member = grouping.member(route.name, param, group_of[id(param)])
        if member.shape not in shardings:
            dim = stack_dim if len(member.shape) == 3 else 0
            shardings[member.shape] = Sharding(member.shape, shape, (*copies, dim), late)
        found.append(MeshMember(**vars(member), sharding=shardings[member.shape]))
    return found


def _numel(members: Sequence[MeshMember]) -> int:
    return sum(member.param.numel() for member in members)


def _memory(
    members: Sequence[MeshMember], shared: Share, setting: Setting, coordinates: Sequence[Coordinate]
) -> list[RankMemory]:
    """Per rank, its shards of parameters and gradients, and the optimizer's state for them."""
    config, groups = setting.config, shared.grouping.groups
    assert isinstance(config, MeshConfig)
    alike, state = Counter(member.sharding for member in members), mesh_state_nbytes(members, groups, config)
    size, found = setting.dtype.itemsize, []
    for at in coordinates:
        numel = sum(count * math.prod(sharding.local_shape(at)) for sharding, count in alike.items())
        found.append(RankMemory(numel * size, numel * size, 0, state(at)))
    return found


def _traffic(members: Sequence[MeshMember], setting: Setting, shape: tuple[int, ...]) -> list[Collective]:
    """FSDP2's own collectives."""
    if not members:
        return []
    *copies, shards = shape
    numel, wide = _numel(members), setting.grad_dtype.itemsize
    sent = numel * (shards - 1) / shards
    found = [
        Collective("fsdp2's reduce-scatter of gradients", 1, int(sent * wide), shards),
        Collective("fsdp2's all-gathers of parameters", 2, int(2 * sent * PARAMETER_BYTES), shards),
    ]
    for number in copies:
        across = 2 * numel // shards * (number - 1) // number
        found.insert(1, Collective("fsdp2's all-reduce across copies", 1, across * wide, number, shards))
    return found
