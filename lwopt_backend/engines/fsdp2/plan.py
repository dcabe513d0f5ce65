"""FSDP2: parameters as DTensors on meshes, planned and stepped mesh by mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lwopt_backend.config.hosts import NAME, FSDP2Config
from lwopt_backend.engines.base import batch_numel_on, machine_for
from lwopt_backend.groups import registry
from lwopt_backend.groups.grouping import Grouping, Member
from lwopt_backend.plan import Machine, MatrixPlan, MeshLayout, Sharding, plan_copies
from lwopt_backend.plan.atoms import Block
from lwopt_backend.plan.cost import ElementwiseBytes
from lwopt_backend.plan.layouts import View, unravel
from lwopt_backend.plan.mesh import Coordinate
from lwopt_backend.plan.owners import Limits
from lwopt_backend.routing.models import as_module
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.pieces import Pieces, Regions, Slices, box_regions
from lwopt_backend.runtime.places import Rules
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.quantized import QuantizedPiece, part_nbytes, rows_in
from lwopt_backend.runtime.shown_state import Elsewhere, ShownState, ShownTensor, stored
from lwopt_backend.runtime.state import StatePiece, keeps_state, with_quantized
from lwopt_backend.runtime.step import MatrixStepper, StepInput

# Reading an FSDP2 model: its parameters, their meshes, and the box of a parameter that each rank stores.


@dataclass(frozen=True)
class Mesh:
    """A device mesh as plain data: its global ranks in row-major order, its shape, and its kind of device."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    device_type: str
    handle: DeviceMesh = field(compare=False, repr=False)

    @property
    def order(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """A sort key that puts a model's meshes in the same order on all ranks, so that collectives match."""
        return len(self.ranks), tuple(sorted(self.ranks)), self.shape

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """The mesh coordinate of each rank of the exchange group, which has its ranks in ascending order."""
        places = {rank: tuple(unravel(position, self.shape)) for position, rank in enumerate(self.ranks)}
        return tuple(places[rank] for rank in sorted(self.ranks))

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    def __str__(self) -> str:
        shape = f"{'x'.join(map(str, self.shape))} " if len(self.shape) > 1 else ""
        ranks = sorted(self.ranks)
        in_a_row = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
        return f"{shape}mesh of ranks {f'{ranks[0]}-{ranks[-1]}' if in_a_row else ', '.join(map(str, ranks))}"


def sharded_module(model: Any, caller: str) -> nn.Module:
    """The model, or several modules as one. Raises TypeError for anything else, and for DDP's and FSDP1's wrappers."""
    module = as_module(model, caller)
    for name, inner in module.named_modules():
        which = f"module {name!r}" if name else "the model"
        if isinstance(inner, (DistributedDataParallel, DataParallel)):
            raise TypeError(
                f"{caller}: {which} is wrapped in {type(inner).__name__}, found no shards; call "
                "fully_shard(model) instead of it, or pass the plain model.module without sharded_later"
            )
        if isinstance(inner, FullyShardedDataParallel):
            raise TypeError(
                f"{caller}: {which} is wrapped in FullyShardedDataParallel (FSDP1), which flattens matrices; call "
                "fully_shard(model) instead of it"
            )
    return module


def is_sharded(models: Any) -> bool:
    """Whether a model, or one in a list, has DTensors, or FSDP2's modules, whose parameters may be unsharded now."""
    given = models if isinstance(models, (list, tuple)) else [models]
    modules = [module for model in given if isinstance(model, nn.Module) for module in model.modules()]
    params = (param for module in modules for param in module.parameters(recurse=False))
    return any(isinstance(each, (FSDPModule, DTensor)) for each in chain(modules, params))


def reduction(model: nn.Module) -> str:
    """In which dtypes ``fully_shard`` reduces the gradients of ``model``, for the table; "" if that is not known."""
    found: set[torch.dtype] = set()
    by_version = False
    for module in model.modules():
        policy = getattr(module._get_fsdp_state(), "_mp_policy", None) if isinstance(module, FSDPModule) else None
        trained = [p for p in sharded_by(module) if p.requires_grad and isinstance(p, DTensor)] if policy else []
        if policy is not None and trained:
            computed = [policy.param_dtype or param.dtype for param in trained]
            kept = [getattr(param, "grad_dtype", param.dtype) or own for param, own in zip(trained, computed)]
            unset = reduce(torch.promote_types, kept if torch.__version__ >= "2.15" else computed)
            found.add(policy.reduce_dtype or unset)
            by_version |= policy.reduce_dtype is None and kept != computed
    if not found:
        return ""
    dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    reason = " without reduce_dtype, that is param_dtype up to torch 2.14, and the parameters' grad_dtype from 2.15"
    return f"fully_shard reduces gradients in {dtypes}{';' + reason if by_version else ''}."


def sharded_by(module: nn.Module) -> Iterator[Tensor]:
    """The parameters that ``fully_shard(module)`` shards, or ignores: those that no call for an inner module has."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from sharded_by(child)


def reshard(model: nn.Module) -> None:
    """Reshard every FSDP module: after a forward pass, the root keeps its unsharded parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mesh_of(param: Tensor) -> Mesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    if not isinstance(param, DTensor):
        return None
    ranks = param.device_mesh.mesh
    return Mesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape), param.device_mesh.device_type, param.device_mesh)


def sharding_of(name: str, param: Tensor) -> Sharding:
    """How a parameter is sharded over its mesh; a plain tensor is whole on a single rank.

    Raises ValueError for placements other than Shard and Replicate, for a mesh that this rank is not in or whose ranks
    do not ascend, and for a shard whose shape differs from that of its placements.
    """
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return Sharding(shape, (1,), (None,), (False,))
    for placement in param.placements:
        if not (placement.is_replicate() or _is_late(placement) or isinstance(placement, Shard)):
            raise ValueError(f"{describe(name, param)}: expected Shard or Replicate placements only")
    sharding = placed(param)
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{describe(name, param)}: this rank is not in the mesh")
    for dim, place in enumerate(coordinate):
        if param.device_mesh.get_local_rank(dim) != place:
            raise ValueError(
                f"{describe(name, param)}: the mesh's ranks do not ascend along dimension {dim}; this rank is at place "
                f"{place} of the mesh and {param.device_mesh.get_local_rank(dim)} of its group, which FSDP2 uses"
            )
    planned, found = sharding.local_shape(tuple(coordinate)), tuple(local(param).shape)
    if planned != found:
        raise ValueError(
            f"{describe(name, param)}: expected a part of shape {planned} on this rank by its placements, found "
            f"{found}; this way of sharding is not supported"
        )
    return sharding


def placed(tensor: DTensor) -> Sharding:
    """The sharding that a DTensor's placements describe; does not look at this rank's shard."""
    dims: list[int | None] = []
    for placement in tensor.placements:  # Shard and _StridedShard have ``dim``, which may count from the end
        dims.append(None if placement.is_replicate() else placement.dim % max(1, tensor.ndim))  # type: ignore[attr-defined]
    late = tuple(_is_late(p) for p in tensor.placements)
    return Sharding(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(dims), late)


def _is_late(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def describe(name: str, param: Tensor) -> str:
    """A parameter for an error message: its name, shape, placements and mesh."""
    text = f"parameter {name!r} of shape {tuple(param.shape)}"
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        named = f", dimensions {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        text += f", placements {tuple(param.placements)} on a {mesh_of(param)}{named}"
    return text


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor._local_tensor  # ``to_local`` makes a view, and of a parameter another parameter


@torch.no_grad()
def place_gradients(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Give gradients the placements of their parameters: sum what is Partial, for example.

    Each sum is a collective, of tensors that may have equal shapes. All ranks call this for all parameters in one
    order, before anything that ranks do in different orders. Placements are equal on all ranks. Returns the gradients.
    """
    found = []
    for param in params:
        grad = param.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad._spec is param._spec:
            pass  # FSDP2 gives a gradient the parameter's own specification
        elif not is_placed(param, grad):
            param.grad = grad = grad.redistribute(param.device_mesh, param.placements)
        found.append(grad)
    return found


def is_placed(param: DTensor, grad: DTensor) -> bool:
    """Whether a gradient has its parameter's placements."""
    return grad._spec is param._spec or grad.placements == param.placements


def gradient(name: str, param: Tensor, grad: Tensor) -> Tensor:
    """This rank's shard of a gradient that has the parameter's placements.

    Raises TypeError for a plain gradient of a DTensor.
    """
    if not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise TypeError(f"{describe(name, param)}: expected a DTensor gradient, found a plain tensor")
    assert is_placed(param, grad), f"{name}: place_gradients() comes first"
    return grad._local_tensor


# Plans for the parameters of one device mesh, as FSDP2 shards them.


@dataclass(frozen=True)
class MeshMember(Member):
    """A parameter that FSDP2 shards, and its sharding."""

    sharding: Sharding = field(kw_only=True)

    def line(self) -> str:
        """The line that must be equal on all ranks."""
        return f"{self.name} {self.sharding} {self.param.dtype} by {self.rule} of group {self.group}"


@dataclass(frozen=True)
class MeshPlan:
    """``members`` in the model's order, and the plan of their matrices. An atom is block ``places[atom]`` of member
    ``member_of_atom[atom]``."""

    members: tuple[MeshMember, ...]
    member_of_atom: tuple[int, ...]
    places: tuple[int, ...]
    plan: MatrixPlan

    def lines(self) -> list[str]:
        """The lines that must be equal on all ranks of the mesh."""
        return [*(member.line() for member in self.members), *self.plan.lines()]


def plan_mesh(
    members: Sequence[MeshMember],
    groups: Sequence[Mapping[str, Any]],
    rules: Mapping[int, MatrixRule],
    config: FSDP2Config,
    coordinates: tuple[Coordinate, ...],
    machine: Machine,
    *,
    loads: Sequence[int] = (),
    earlier: Sequence[int] = (),
) -> MeshPlan:
    """Plan ``members`` of one mesh, whose ``rules``, by param group, have equal exchanges.

    ``coordinates`` are the ranks' places in the mesh, ``loads`` and ``earlier`` as in ``plan_spread``.
    """
    costs: list[dict[tuple[int, int], int]] = [{} for _ in groups]
    atoms = [registry.atoms_of(member, groups[member.group], costs[member.group]) for member in members]
    # Backward computes the last layers' gradients first.
    matrices = [(i, place) for i in reversed(range(len(members))) for place in range(len(members[i].blocks))]
    blocks = [members[i].blocks[place] for i, place in matrices]
    shardings = (sharding_in(members[i].sharding, block) for (i, _), block in zip(matrices, blocks))
    plan = plan_copies(
        [atoms[i][place] for i, place in matrices],
        MeshLayout(coordinates, tuple(shardings)),
        Limits(config.bucket_matrices, config.bucket_numel, machine, BATCH_NUMEL),
        share=_shares(config, rules),
        elementwise=_elementwise_bytes(members, rules, config),
        loads=loads,
        earlier=earlier,
        **(registry.wire_of(rules[members[matrices[0][0]].group]) if matrices else {}),
    )
    of, places = (tuple(pair[which] for pair in matrices) for which in (0, 1))
    return MeshPlan(tuple(members), of, places, plan)


def _shares(config: FSDP2Config, rules: Mapping[int, MatrixRule]) -> bool | None:
    """Whether copies share the work; None leaves it to the plan. Owner state, which each copy would keep, is shared."""
    return config.share_copies if config.share_copies is not None else any(map(keeps_state, rules.values())) or None


def _elementwise_bytes(
    members: Sequence[MeshMember], rules: Mapping[int, MatrixRule], config: FSDP2Config
) -> ElementwiseBytes:
    """The most that any matrix takes; most are alike."""
    kinds = {
        (m.group, m.param.dtype, getattr(m.param, "grad_dtype", None)): m.param for m in members if m.group in rules
    }
    found = []
    for (group, dtype, grad), param in kinds.items():
        rule = rules[group]
        state = state_dtype(param, config, bool(rule.quantized))
        of = {"param": dtype, "grad": grad or dtype, "state": state, "wire": rule.exchange_dtype}
        sizes = {key: each.itemsize for key, each in of.items()}
        found.append(ElementwiseBytes.of(**sizes, states=len(rule.state_keys)))
    return ElementwiseBytes(max((e.stored for e in found), default=0), max((e.owned for e in found), default=0))


def sharding_in(sharding: Sharding, block: Block) -> Sharding:
    """The sharding of one matrix in a parameter that has this ``sharding``."""
    return sharding if block.is_everything and len(sharding.shape) == 2 else replace(sharding, block=block)


def by_wire(members: Sequence[MeshMember], rules: Mapping[int, MatrixRule]) -> list[list[MeshMember]]:
    """Group the members whose rules have equal exchanges; element-wise members join the first group."""
    found: dict[tuple[object, ...], list[MeshMember]] = {}
    for member in members:
        if member.group in rules:
            found.setdefault(tuple(registry.wire_of(rules[member.group]).values()), []).append(member)
    if not found:
        return [list(members)] if members else []
    first = next(iter(found.values()))
    kept = {id(member) for member in first} | {id(member) for member in members if member.group not in rules}
    return [[m for m in members if id(m) in kept], *list(found.values())[1:]]


def new_state(param: Tensor, group: Mapping[str, Any], config: FSDP2Config) -> MutableMapping[str, Tensor]:
    """Fresh state for a parameter, sharded as it is, in the configured dtype; shown only what is kept in 8 bits."""
    keys = registry.quantized_keys(group)
    like, dtype = param.detach(), state_dtype(param, config, bool(keys))
    made = registry.stored_state(like if like.dtype == dtype else torch.empty_like(like, dtype=dtype), group)
    if not keys:
        return made
    why = "kept in 8 bits, from the first step or load on; until then zeros"
    later = ShownTensor(Elsewhere(why, tuple(local(param).shape), dtype))
    return ShownState(made, {key: as_shard(later, param) for key in keys})


def as_shard(part: Tensor, made: Tensor) -> Tensor:
    """``part`` as this rank's shard of a DTensor with the mesh, the placements and the shape of ``made``; the part
    itself if that is a plain tensor."""
    if not isinstance(made, DTensor):
        return part
    return DTensor.from_local(
        part, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
    )


def state_dtype(param: Tensor, config: FSDP2Config, in_8_bits: bool) -> torch.dtype:
    """The configured dtype of a parameter's state. torch's Muon and SGD create it like the gradient, whose
    ``grad_dtype`` fully_shard keeps from torch 2.15; None allows any dtype. Beside state in 8 bits, at least fp32."""
    if config.state_dtype == "float32":
        return torch.float32
    found = torch.promote_types(param.dtype, getattr(param, "grad_dtype", param.dtype) or torch.float32)
    return torch.promote_types(found, torch.float32) if in_8_bits else found


def mesh_state_nbytes(
    members: Sequence[MeshMember], groups: Sequence[Mapping[str, Any]], config: FSDP2Config
) -> Callable[[Coordinate], int]:
    """The bytes of the state that a rank keeps, by its coordinate."""
    in_8_bits = [bool(registry.quantized_keys(group)) for group in groups]
    alike = Counter(  # which most layers are
        (m.sharding, m.blocks if in_8_bits[m.group] else (), m.group, state_dtype(m.param, config, in_8_bits[m.group]))
        for m in members
    )

    @cache
    def nbytes(numel: int, group: int, dtype: torch.dtype, in_8_bits: int) -> int:
        return registry.state_nbytes(numel, groups[group], dtype, in_8_bits)

    def of_rank(coordinate: Coordinate) -> int:
        found = 0
        for (sharding, blocks, group, dtype), count in alike.items():
            numel = math.prod(sharding.local_shape(coordinate))
            found += count * nbytes(numel, group, dtype, _nbytes_in_8_bits(sharding, blocks, coordinate))
        return found

    return of_rank


def _nbytes_in_8_bits(sharding: Sharding, blocks: Sequence[Block], coordinate: Coordinate) -> int:
    """Bytes of one state in 8 bits of a parameter's matrices at ``coordinate``."""
    fragments = ((sharding_in(sharding, block).fragment(0, coordinate), block.shape[1]) for block in blocks)
    return sum(part_nbytes(rows_in(fragment, columns)) for fragment, columns in fragments)


# From param groups of sharded parameters to steppers: one per device mesh, planned in the same order on all ranks.

Exchange = Sequence[tuple[Mesh, Collectives]]


def exchange_groups(params: Iterable[Tensor]) -> list[tuple[Mesh, Collectives]]:
    """The meshes of the parameters, each with its own exchange group, in the order in which all ranks use them.

    Called on all ranks of the meshes. Raises ValueError if no parameter is a DTensor.
    """
    meshes = {mesh for param in params if (mesh := mesh_of(param)) is not None}
    if not meshes:
        raise ValueError(
            f"{NAME}: expected DTensors in the model, found none; call fully_shard(model) first, or pass "
            "sharded_later=True if Accelerate shards it in prepare()"
        )
    exchange: list[tuple[Mesh, Collectives]] = []
    for mesh in sorted(meshes, key=lambda mesh: mesh.order):
        along = mesh.handle.get_all_groups()
        exchange.append((mesh, TorchCollectives.over(mesh.ranks, along) if len(mesh.ranks) > 1 else Collectives()))
    return exchange


def bind(
    exchange: Exchange,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    grouping: Grouping,
    config: FSDP2Config,
) -> list[MeshStepper]:
    """Plan the parameters of ``groups``, in the model's order. Called on all ranks of the meshes.

    A rank's work on one mesh counts when the next is planned. Plain tensors come last, in a separate
    stepper. An error on any rank is raised on all.
    """

    order = {name: position for position, name in enumerate(grouping.names.values())}

    def decide() -> tuple[list[MeshMember], list[list[str]]]:
        members = sorted(_members(groups, names, grouping), key=lambda member: order[member.name])
        ways = set[str]()
        for device in {member.param.device for member in members}:
            ways.update(registry.check_devices(groups, config, device, grouping.smallest_matrix))
        lines = [[m.line() for m in members if mesh_of(m.param) == mesh] for mesh, _ in exchange]
        return members, [[*sorted(ways), *of_mesh] for of_mesh in lines]

    collectives = [of_mesh for _, of_mesh in exchange]
    members = agree_in_all(collectives, NAME, decide)
    rules = registry.build_matrix_rules(groups, config)
    load = 0  # this rank's flops on the meshes planned so far
    steppers = []
    lines: list[list[str]] = [[] for _ in exchange]
    for number, (mesh, of_mesh) in enumerate(exchange):
        settled = config
        for place, own in enumerate(by_wire([m for m in members if mesh_of(m.param) == mesh], rules)):
            loads = of_mesh.gather_objects(load)
            work = {"earlier" if place else "loads": loads}  # the ranks of a mesh synchronize in a plan's exchange
            stepper = MeshStepper(mesh, of_mesh, own, groups, rules, settled, **work)
            load = stepper.plan.ownership.loads[stepper.exchanging.rank] + (load if place else 0)
            steppers.append(stepper)
            settled = following(settled, stepper.plan)
            lines[number] += stepper.planned.lines()

    def settle() -> tuple[None, list[list[str]]]:
        check_copies(config, (stepper.plan for stepper in steppers))
        return None, lines

    agree_in_all(collectives, NAME, settle)
    plain = [member for member in members if mesh_of(member.param) is None]
    alone = [MeshStepper(None, Collectives(), own, groups, rules, config) for own in by_wire(plain, rules)]
    return [*steppers, *alone]


def check_copies(config: FSDP2Config, plans: Iterable[MatrixPlan]) -> None:
    """Raises ValueError for ``share_copies`` if none of the meshes copies its matrices."""
    if config.share_copies is not None and not any(plan.is_copied for plan in plans):
        raise ValueError(
            "share_copies: expected a mesh that copies all of its matrices (HSDP), found none; leave it out"
        )


def following(config: FSDP2Config, plan: MatrixPlan) -> FSDP2Config:
    """For further plans on the same mesh, whose copies share the work or do not, as those of the first."""
    return config if plan.compared is None else replace(config, share_copies=plan.instances is None)


def names_of(
    held: Sequence[Sequence[Tensor]], bound: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Names of the parameters ``held``: those they were ``bound`` under, or by position if parameters were replaced.

    Raises RuntimeError if the sizes of the groups have changed since.
    """
    known = {id(p): n for params, theirs in zip(bound, names) for p, n in zip(params, theirs)}
    if all(id(param) in known for params in held for param in params):
        return [[known[id(param)] for param in params] for params in held]
    if [len(params) for params in held] != [len(theirs) for theirs in names]:
        raise RuntimeError(
            f"{NAME}: expected the parameters that it was made with, found others in the param groups; make a new one"
        )
    return [list(theirs) for theirs in names]


def _members(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], grouping: Grouping
) -> list[MeshMember]:
    members = []
    checked: set[Sharding] = set()  # a check looks at every rank, and many layers are equal
    for number, (group, group_names) in enumerate(zip(groups, names)):
        for name, param in zip(group_names, group["params"]):
            if param.is_meta:
                raise ValueError(
                    f"parameter {name!r} is on the meta device; call model.to_empty(device=...) and initialise it "
                    "before the optimizer is made"
                )
            blocks = grouping.matrices_in(name)
            sharding = sharding_of(name, param)
            for own in (sharding_in(sharding, block) for block in blocks):
                if own not in checked:
                    own.check(name)
                    checked.add(own)
            members.append(MeshMember(**vars(grouping.member(name, param, number)), sharding=sharding))
    return members


# The parameters of one device mesh: planned together, exchanged over one process group, stepped together.

BATCH_NUMEL = 2**26  # elements that a rule takes at once on an accelerator; others: ``base.BATCH_NUMEL``, and why
States = MutableMapping[Tensor, MutableMapping[str, Any]]


class MeshStepper:
    """Steps ``members`` of one ``mesh``; if it is None, plain tensors, of which every rank steps its own copy.

    Their ``rules``, by param group, exchange equally. ``loads``, ``earlier`` are as in ``plan_spread``. Made on the
    mesh's ranks, of which ``exchanging`` are those that this one exchanges matrices with.
    """

    def __init__(
        self,
        mesh: Mesh | None,
        collectives: Collectives,
        members: Sequence[MeshMember],
        groups: Sequence[Mapping[str, Any]],
        rules: Mapping[int, MatrixRule],
        config: FSDP2Config,
        loads: Sequence[int] = (),
        earlier: Sequence[int] = (),
    ) -> None:
        self.mesh = mesh
        self.collectives = collectives
        self.members = list(members)
        self.groups = groups
        self.config = config
        coordinates = mesh.coordinates if mesh else ((0,),)
        self._coordinate = coordinates[collectives.rank]
        self.device = mesh.device if mesh else (local(members[0].param).device if members else torch.device("cpu"))
        machine = machine_for(self.device)
        self.planned = plan_mesh(
            self.members, groups, rules, config, coordinates, machine, loads=loads, earlier=earlier
        )
        self.plan = self.planned.plan
        self.member_of_atom, self.places = self.planned.member_of_atom, self.planned.places
        batch = batch_numel_on(self.device, BATCH_NUMEL)
        self._quantized_keys = [*map(registry.quantized_keys, groups)]
        in_8_bits = [number for number, member in enumerate(self.members) if self._quantized_keys[member.group]]
        self._wide = {number: self._state_dtype(self.members[number]) for number in in_8_bits}  # of their gradients
        self._kinds: dict[tuple[int, torch.dtype, torch.dtype], int] = {}  # of matrices, by param group and dtypes
        kinds = [self._kind(self.members[index]) for index in self.member_of_atom]
        apart = self.plan.instances
        self.exchanging = collectives if apart is None else collectives.part(apart.groups()[0])
        self.matrix_stepper = MatrixStepper(
            self.plan, kinds, self.exchanging, self.device, batch_numel=batch, capture=config.capture
        )
        self._regions = self._find_regions()
        self._atoms_of: dict[int, list[int]] = {number: [] for number in in_8_bits}  # by member
        for atom, number in enumerate(self.member_of_atom):
            if number in self._atoms_of:
                self._atoms_of[number].append(atom)
        for number, atoms in self._atoms_of.items():
            keys, device = self._quantized_keys[self.members[number].group], local(self.members[number].param).device
            self.matrix_stepper.matrices.quantized.make(keys, atoms, device)
        self._units: list[bool] = []  # by member, whether a fully_shard unit reduces its gradient

    def check_units(self, params: Collection[int]) -> None:
        """From now on, look for the parameters of fully_shard units, with these ids, that some ranks alone use."""
        units = [id(member.param) in params for member in self.members]
        self._units = units if any(units) else []

    def lacking(self, grads: Sequence[Tensor | None], out: Collection[str]) -> list[bool]:
        """Which members of fully_shard units lack a gradient on this rank, by member; empty if there is no unit."""
        members = zip(self._units, self.members, grads)
        return [unit and grad is None and member.name not in out for unit, member, grad in members]

    def unlike(self, presence: Presence) -> str | None:
        """A sentence about a parameter that ``first_of`` its ``lacking`` shows to be used by some ranks alone."""
        assert self.mesh is not None
        ranks = sorted(self.mesh.ranks)
        for member, having, lacking in zip(self.members, presence.anywhere(), presence.largest("lacking")):
            if (one := presence.first(having)) is not None and (other := presence.first(lacking)) is not None:
                return (
                    f"parameter {member.name!r}, which fully_shard shards: expected a gradient on all ranks of its "
                    f"mesh or on none, found one on rank {ranks[one]} and none on rank {ranks[other]}"
                )
        return None

    def presence(self, grads: Sequence[Tensor | None], out: Collection[str] = (), **flags: Sequence[int]) -> Presence:
        """Start to find which members have a gradient on any rank where they are not ``out`` of the param groups, and
        the largest ``flags``. ``grads`` are this rank's. On all ranks of the mesh."""
        here = [grad is not None and member.name not in out for member, grad in zip(self.members, grads)]
        return Presence(self.collectives, here, self.device, **flags)

    def skipped(self, presence: Presence) -> frozenset[int]:
        """The atoms whose parameters have no gradient on any rank. Waits for flags only if one has none here."""
        if presence.complete:
            return frozenset()
        return frozenset(atom for atom, number in enumerate(self.member_of_atom) if not presence(number))

    def _kind(self, member: MeshMember) -> int:
        key = (member.group, member.param.dtype, self._state_dtype(member))
        return self._kinds.setdefault(key, len(self._kinds))

    def by_kind(self, rules: Rules) -> Rules:
        """The rules of the param groups, by the kinds of matrices."""
        return {kind: rules[group] for (group, *_), kind in self._kinds.items()}

    def rules_of(self, rules: Mapping[int, MatrixRule]) -> list[MatrixRule]:
        """One rule per matrix of the plan, from the rules of the param groups."""
        return [rules[self.members[index].group] for index in self.member_of_atom]

    def placed_gradients(self) -> list[Tensor | None]:
        """The members' gradients, with their placements. Called on all ranks, as ``place_gradients``."""
        return place_gradients(member.param for member in self.members)

    def given(self, rules: Rules, states: States, grads: Sequence[Tensor | None]) -> StepInput:
        """What a step is given, with the ``rules`` of the param groups and the members' ``grads``."""
        return StepInput(self.by_kind(rules), _MemberPieces(self, states, grads))

    def pieces_of(self, number: int, states: States, grad: Tensor | None) -> Sequence[Pieces]:
        """This rank's pieces of a member's matrices."""
        member = self.members[number]
        return self._regions[number].cut(piece(member, grad, states[member.param], self._wide.get(number)))

    def _state_dtype(self, member: MeshMember) -> torch.dtype:
        return state_dtype(member.param, self.config, bool(self._quantized_keys[member.group]))

    def in_8_bits(self, number: int) -> dict[str, QuantizedPiece]:
        """The state in 8 bits of this rank's shard of a member."""
        member = self.members[number]
        if not (keys := self._quantized_keys[member.group]):
            return {}
        value, cut = local(member.param), self._regions[number].of_matrices(self._atoms_of[number])
        return self.matrix_stepper.matrices.quantized.piece(keys, value.shape, value.dtype, value.device, cut)

    def _find_regions(self) -> dict[int, Regions]:
        """The places of the matrices in each member that has some; many members are alike."""
        found: dict[Hashable, Regions] = {}
        regions = {}
        for number in dict.fromkeys(self.member_of_atom):
            blocks, sharding = self.members[number].blocks, self.members[number].sharding
            if (blocks, sharding) not in found:
                box = sharding.box(self._coordinate)
                found[blocks, sharding] = box_regions(blocks, sharding.shape, box)
            regions[number] = found[blocks, sharding]
        return regions

    def pieces(self, states: States, first: int = 0) -> Iterator[StatePiece]:
        """This rank's box of every member, which are numbered from ``first``."""
        for number, member in enumerate(self.members, first):
            view = View.of_box(member.sharding.shape, member.sharding.box(self._coordinate))
            state = {key: local(tensor) for key, tensor in stored(states.get(member.param, {})).items()}
            tensors = with_quantized(state, self.in_8_bits(number - first))
            yield StatePiece(number, view, local(member.param), tensors)

    def elementwise(self, group: int, states: States, presence: Presence) -> list[Slices]:
        """This rank's shards of the element-wise members of a param group that have a gradient on any rank."""
        chosen = [i for i, m in enumerate(self.members) if m.group == group and m.rule in registry.ELEMENTWISE_RULES]
        members = [self.members[number] for number in chosen if presence(number)]
        return [piece(member, member.param.grad, states[member.param]) for member in members]


class _MemberPieces:
    """Pieces during one step, cut when a member's first one is read."""

    def __init__(self, stepper: MeshStepper, states: States, grads: Sequence[Tensor | None]) -> None:
        self._stepper, self._states, self._grads = stepper, states, grads
        self._cut: dict[int, Sequence[Pieces]] = {}  # by member

    def __getitem__(self, atom: int, /) -> Pieces:
        number = self._stepper.member_of_atom[atom]
        if number not in self._cut:
            self._cut[number] = self._stepper.pieces_of(number, self._states, self._grads[number])
        return self._cut[number][self._stepper.places[atom]]


def piece(
    member: MeshMember, grad: Tensor | None, state: Mapping[str, Any], dtype: torch.dtype | None = None
) -> Slices:
    """This rank's shard of the parameter, its gradient in the state's dtype or ``dtype`` (zeros for None), and its
    state.

    Raises TypeError for a gradient that is not a dense tensor.
    """
    value = local(member.param)
    shards = {key: local(tensor) for key, tensor in stored(state).items()}
    grad = torch.zeros_like(value) if grad is None else gradient(member.name, member.param, grad)
    if grad.layout != torch.strided:
        raise TypeError(f"{describe(member.name, member.param)}: expected a dense gradient, found {grad.layout}")
    dtypes = [shard.dtype for key, shard in shards.items() if key != "step"]
    if dtype is not None:
        grad = grad.to(dtype)
    elif [value.dtype, *dtypes].count(grad.dtype) <= len(dtypes):
        like = (s.dtype for key, s in shards.items() if key != "step" and s.shape == value.shape)
        grad = grad.to(next(like, value.dtype))
    return Slices(value, grad, shards)
