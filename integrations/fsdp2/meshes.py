"""Reading an FSDP2 model: its parameters, their meshes, and which rectangle of a parameter each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lwopt_backend.model_argument import as_module
from lwopt_backend.plan import Sharding
from lwopt_backend.plan.mesh import Coordinate


@dataclass(frozen=True)
class Mesh:
    """A device mesh as plain data: its global ranks in row-major order, its shape, and its kind of device."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    device_type: str
    handle: DeviceMesh = field(compare=False, repr=False)

    @property
    def order(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Sorts the meshes of a model alike on all ranks, so that their collectives never cross."""
        return len(self.ranks), tuple(sorted(self.ranks)), self.shape

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """Where each rank of the exchange group sits; the group counts its ranks from the lowest."""
        places = {rank: _unravel(position, self.shape) for position, rank in enumerate(self.ranks)}
        return tuple(places[rank] for rank in sorted(self.ranks))

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    def __str__(self) -> str:
        shape = f"{'x'.join(map(str, self.shape))} " if len(self.shape) > 1 else ""
        return f"{shape}mesh of ranks {_ranges(sorted(self.ranks))}"


def sharded_module(model: Any, caller: str) -> nn.Module:
    """The model, or its several modules as one. Raises TypeError for anything else, and for the wrappers of others."""
    module = as_module(model, caller)
    for name, inner in module.named_modules():
        which = f"module {name!r}" if name else "the model"
        if isinstance(inner, (DistributedDataParallel, DataParallel)):
            raise TypeError(
                f"{caller}: {which} is wrapped in {type(inner).__name__}, which shards nothing; pass model.module to "
                "lwopt_backend.LayerWiseOptimizer, which takes its place, or call fully_shard(model) instead of it"
            )
        if isinstance(inner, FullyShardedDataParallel):
            raise TypeError(
                f"{caller}: {which} is wrapped in FullyShardedDataParallel (FSDP1), which flattens matrices; call "
                "fully_shard(model) instead of it"
            )
    return module


def reshard(model: nn.Module) -> None:
    """Put every FSDP module's sharded parameters in place: after a forward pass the root keeps the unsharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mesh_of(param: Tensor) -> Mesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    if not isinstance(param, DTensor):
        return None
    ranks = param.device_mesh.mesh
    return Mesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape), param.device_mesh.device_type, param.device_mesh)


def meshes_of(params: Iterable[Tensor]) -> list[Mesh]:
    """The meshes of all DTensors, in an order that ranks share."""
    found = {mesh for param in params if (mesh := mesh_of(param)) is not None}
    return sorted(found, key=lambda mesh: mesh.order)


def sharding_of(name: str, param: Tensor) -> Sharding:
    """How a parameter lies over its mesh; a plain tensor lies whole on a single rank.

    Raises ValueError for placements that no rule can be given a whole matrix from, or that leave another shape on this
    rank than they say.
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
                f"{place} of the mesh and {param.device_mesh.get_local_rank(dim)} of its group, and FSDP2 goes by that"
            )
    planned, found = sharding.local_shape(tuple(coordinate)), tuple(local(param).shape)
    if planned != found:
        raise ValueError(
            f"{describe(name, param)}: these placements put a part of shape {planned} on this rank, found {found}; "
            "this way of sharding is not supported"
        )
    return sharding


def placed(tensor: DTensor) -> Sharding:
    """How a DTensor lies by its placements, whatever this rank's part looks like."""
    dims = tuple(_dim(p, tensor.ndim) for p in tensor.placements)
    late = tuple(_is_late(p) for p in tensor.placements)
    return Sharding(tuple(tensor.shape), tuple(tensor.device_mesh.shape), dims, late)


def _dim(placement: Placement, ndim: int) -> int | None:
    """The tensor dimension that is cut, counted from the front; None: a copy."""
    if placement.is_replicate():
        return None
    dim: int = placement.dim  # type: ignore[attr-defined]  # Shard and _StridedShard have it
    return dim % max(1, ndim)


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
    """This rank's part of a DTensor, sharing its memory; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not torch.is_grad_enabled():  # as it is in a step, where this is called for every tensor
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def gradient(name: str, param: Tensor) -> Tensor | None:
    """This rank's part of a gradient, laid out as the parameter is; None if there is none.

    Raises TypeError for a plain gradient of a DTensor.
    """
    grad = param.grad
    if grad is None or not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise TypeError(f"{describe(name, param)}: expected a DTensor gradient, found a plain tensor")
    if grad.placements != param.placements:  # e.g. still to be summed; the same on all ranks, as it is by the model
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad.to_local()


def _unravel(position: int, shape: Sequence[int]) -> Coordinate:
    coordinate = []
    for size in reversed(shape):
        coordinate.append(position % size)
        position //= size
    return tuple(reversed(coordinate))


def _ranges(ranks: Sequence[int]) -> str:
    """E.g. "0-3" or "0, 2"."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
