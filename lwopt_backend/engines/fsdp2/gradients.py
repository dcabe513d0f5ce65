"""Norm and scaling of FSDP2's gradients, which are shards; each element is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lwopt_backend.engines.fsdp2.plan import Mesh, MeshStepper, gradient, local
from lwopt_backend.engines.gradients import Pick, Version, checked_order, everything, version_of
from lwopt_backend.runtime.collectives import NORM, phase
from lwopt_backend.runtime.presence import Presence, largest_of_all, read_at_once


@dataclass(frozen=True)
class Counted:
    """Parameters of the stepper with this number that a norm counts in one way.

    If their mesh leaves out ranks of the largest mesh, ``firsts`` has the first rank of each mesh that has parameters
    of these names: ``different`` ones (experts), or copies. Otherwise it is empty.
    """

    stepper: int
    names: frozenset[str]
    firsts: tuple[int, ...] = ()
    different: bool = False


class MeshGradients:
    """The gradients of ``steppers``; ``counted`` is what ``counted_of`` returned.

    ``place`` is this rank in the largest mesh and its number of ranks. Methods are called on all ranks of that mesh.
    """

    def __init__(self, steppers: Sequence[MeshStepper], counted: Sequence[Counted]) -> None:
        self._steppers = steppers
        self._counted = counted
        self.everyone = _largest(steppers).collectives
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        return [(member.name, member.param) for stepper in self._steppers for member in stepper.members]

    def norm(self, norm_type: float = 2.0, pick: Pick = everything, foreach: bool | None = None) -> Tensor:
        """The norm of the gradients of the parameters that ``pick`` selects, as one vector, each element counted once.

        Per mesh it is ``torch.nn.utils.get_total_norm``, so for a single mesh it equals that of ``clip_grad_norm_``,
        bit for bit; of fp16 gradients it is in fp32. Plain tensors are assumed to be copies. On a rank with all
        gradients, the host does not wait; on other ranks, it waits once, for the gradients of other ranks.
        """
        order = checked_order(norm_type)
        check_one_has_all(self._steppers)
        with phase(NORM):
            of_steppers = [stepper.placed_gradients() for stepper in self._steppers]
            if order == float("inf"):  # torch's fails on ranks with an empty shard, while the other ranks wait
                pairs = zip(self.params(), chain.from_iterable(of_steppers))
                grads = [gradient(n, param, grad) for (n, param), grad in pairs if grad is not None and pick(n)]
                largest = [grad.abs().max().float() for grad in grads if grad.numel()]
                everywhere = _largest(self._steppers)
                total = torch.stack(largest).max() if largest else torch.zeros(())
                return largest_of_all(everywhere.collectives, total.to(everywhere.device))
            presences = [stepper.presence(grads) for stepper, grads in zip(self._steppers, of_steppers)]
            if not all(presence.complete for presence in presences):
                read_at_once(presences)
            norms = [
                _norm(self._steppers[each.stepper], presences[each.stepper], each.names, order, pick, foreach)
                for each in self._counted
            ]
            if any(each.firsts for each in self._counted):
                norms = _with_other_ranks(_largest(self._steppers), self._counted, norms, order)
            return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)

    def agreed(self, norm: Tensor) -> Tensor:
        """A norm with the same bits on all ranks, by which they may decide. Copies of a mesh add up apart."""
        everywhere = _largest(self._steppers)
        if len(self._steppers) == 1 and len(_mesh(everywhere).shape) == 1:
            return norm
        return largest_of_all(everywhere.collectives, norm.to(everywhere.device))

    def version(self) -> Version:
        return version_of([param.grad for _, param in self.params()])

    @torch.no_grad()
    def count_zeros(self, pick: Pick) -> int:
        """The number of their elements that are exactly zero, each counted once."""
        check_one_has_all(self._steppers)
        grads = [stepper.placed_gradients() for stepper in self._steppers]
        everyone = _largest(self._steppers)
        ranks, total = sorted(_mesh(everyone).ranks), torch.zeros((), dtype=torch.float64, device=everyone.device)
        for each in self._counted:
            stepper = self._steppers[each.stepper]
            copies = each.firsts and not each.different
            first = ranks[each.firsts[0] if copies else 0]
            if copies and first not in _mesh(stepper).ranks or stepper.mesh is None and self.place[0] > 0:
                continue
            for member, grad in zip(stepper.members, grads[each.stepper]):
                if member.name in each.names and pick(member.name) and _is_first_copy(member.param):
                    total += local(member.param).numel() if grad is None else (local(grad) == 0).sum().to(total.device)
        everyone.collectives.all_reduce(total)
        return int(total)

    def scale(self, factor: float, pick: Pick = everything) -> None:
        """Multiply the gradients of the parameters that ``pick`` selects by ``factor``, in place."""
        for name, param in self.params():
            if param.grad is not None and pick(name):
                param.grad.mul_(factor)

    def clip(self, max_norm: float, norm: Tensor, pick: Pick, foreach: bool | None = None) -> None:
        """``torch.nn.utils.clip_grads_with_norm_`` of the parameters that ``pick`` selects."""
        for stepper in self._steppers:
            params = [member.param for member in stepper.members if pick(member.name)]
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=foreach)


def _is_first_copy(param: Tensor) -> bool:
    """Whether this rank is the first of those with the same shard of a parameter."""
    if not isinstance(param, DTensor):
        return True
    coordinate = param.device_mesh.get_coordinate() or ()
    return not any(place for place, how in zip(coordinate, param.placements) if how.is_replicate())


def counted_of(steppers: Sequence[MeshStepper], is_copy: Callable[[str], bool]) -> list[Counted]:
    """How a norm counts the parameters of each stepper. Called on all ranks of the largest mesh.

    If a mesh leaves out ranks of the largest one, these have other parameters (experts), whatever their values, except
    under names that are said to be copies. Raises ValueError, on all ranks, for such a name with other values there.
    """
    everyone = _largest(steppers)
    partial = [s for s in steppers if s.mesh is not None and set(s.mesh.ranks) < set(_mesh(everyone).ranks)]
    mine = [(_mesh(stepper).ranks, _sums_of_bits(stepper, is_copy)) for stepper in partial]
    of_partial = iter(zip(*everyone.collectives.gather_objects(mine), strict=True) if partial else ())
    found = []
    for number, stepper in enumerate(steppers):
        names = frozenset(member.name for member in stepper.members)
        if stepper not in partial:
            found.append(Counted(number, names))
            continue
        firsts: dict[tuple[int, ...], int] = {}
        of_meshes: dict[tuple[int, ...], Counter[str]] = {}
        for rank, (ranks, sums) in enumerate(next(of_partial)):
            firsts.setdefault(ranks, rank)
            of_meshes.setdefault(ranks, Counter()).update(sums)
        copies = frozenset(filter(is_copy, names))
        for name in sorted(copies):
            if len({sums[name] for sums in of_meshes.values()}) > 1:
                raise ValueError(
                    f"copies: parameter {name!r}: expected equal values on the meshes of ranks {[*of_meshes]}, found "
                    "others; make them equal, or leave the parameter out if each mesh has its own (experts)"
                )
        for of_kind, different in ((copies, False), (names - copies, True)):
            if of_kind:
                found.append(Counted(number, of_kind, tuple(firsts.values()), different))
    return found


def _sums_of_bits(stepper: MeshStepper, is_copy: Callable[[str], bool]) -> dict[str, int]:
    """By name, of this rank's shards of copies."""
    return {member.name: sum_of_bits(local(member.param)) for member in stepper.members if is_copy(member.name)}


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of the elements' bits, read as integers; equal for copies on any device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return int(real.view(integers).sum(dtype=torch.int64))


def _norm(
    stepper: MeshStepper,
    presence: Presence,
    names: frozenset[str],
    norm_type: float,
    pick: Pick,
    foreach: bool | None,
) -> Tensor:
    """The norm of the gradients that any rank has of these parameters, if ``pick`` selects them.

    torch's norm is a collective, so ranks without one use zeros.
    """
    chosen = (i for i, member in enumerate(stepper.members) if member.name in names and pick(member.name))
    params = [stepper.members[index].param for index in chosen if presence(index)]
    presence.finish()
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    if not grads:
        return torch.zeros((), device=stepper.device)
    # Ranks exchange squares of norms in the gradients' dtype, and in fp16 that of 256 overflows.
    grads = [grad.float() if grad.dtype == torch.float16 else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _with_other_ranks(
    largest: MeshStepper, counted: Sequence[Counted], norms: Sequence[Tensor], norm_type: float
) -> list[Tensor]:
    """Norms that are complete on every rank of the ``largest`` mesh: over all different parameters, or the largest of
    copies. Called on all of these ranks."""
    mine = torch.stack([norm.to(largest.device, torch.float64) for norm in norms])  # wide enough for every dtype
    everywhere = mine.new_empty(largest.collectives.world_size * len(norms))
    largest.collectives.all_gather(everywhere, mine)
    of_ranks = everywhere.view(-1, len(norms))
    totals = []
    for number, (norm, each) in enumerate(zip(norms, counted)):
        if each.firsts:
            values = torch.stack([of_ranks[rank, number] for rank in each.firsts]).to(norm.device, norm.dtype)
            norm = torch.linalg.vector_norm(values, norm_type if each.different else float("inf"))
        totals.append(norm)
    return totals


def check_one_has_all(steppers: Sequence[MeshStepper]) -> None:
    """Raises ValueError for a mesh with ranks that the largest one lacks: each rank would come to another norm."""
    largest = _mesh(_largest(steppers))
    for mesh in (stepper.mesh for stepper in steppers if stepper.mesh is not None):
        if not set(mesh.ranks) <= set(largest.ranks):
            raise ValueError(
                f"the norm of gradients: expected one mesh with the ranks of all others, found a {largest} and a "
                f"{mesh}; shard some parameters over all of these ranks, or clip those of each mesh by torch's function"
            )


def _largest(steppers: Sequence[MeshStepper]) -> MeshStepper:
    return max((s for s in steppers if s.mesh is not None), key=lambda s: len(_mesh(s).ranks))


def _mesh(stepper: MeshStepper) -> Mesh:
    assert stepper.mesh is not None
    return stepper.mesh
