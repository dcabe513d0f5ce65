"""Norm and scaling of FSDP2's gradients, which are shards; each element is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lwopt_backend.engines.fsdp2.plan import Mesh, MeshStepper, gradient, local
from lwopt_backend.engines.gradients import Pick, checked_order, everything
from lwopt_backend.runtime.collectives import NORM, phase
from lwopt_backend.runtime.presence import Presence, largest_of_all, read_at_once


@torch.no_grad()
def place_gradients(params: Iterable[Tensor]) -> None:
    """Give gradients the placements of their parameters: sum what is Partial, for example.

    Each sum is a collective, of tensors that may have equal shapes. All ranks call this for all parameters in one
    order, before anything that ranks do in different orders. Placements are equal on all ranks.
    """
    for param in params:
        grad = param.grad
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            param.grad = grad.redistribute(param.device_mesh, param.placements)


@dataclass(frozen=True)
class Scattered:
    """Meshes of one stepper, each with some ranks of the largest mesh. ``firsts`` has the first rank of each mesh.

    The parameters on them have the same names; ``different`` distinguishes those of experts from copies.
    """

    firsts: tuple[int, ...]
    different: bool


class MeshGradients:
    """The gradients of ``steppers``; ``of_steppers`` is what ``scattered`` returned.

    ``place`` is this rank in the largest mesh and its number of ranks. Methods are called on all ranks of that mesh.
    """

    def __init__(self, steppers: Sequence[MeshStepper], of_steppers: Sequence[Scattered | None]) -> None:
        self._steppers = steppers
        self._scattered = of_steppers
        self.everyone = _largest(steppers).collectives
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        return [(member.name, member.param) for stepper in self._steppers for member in stepper.members]

    def norm(self, norm_type: float = 2.0, pick: Pick = everything, foreach: bool | None = None) -> Tensor:
        """The norm of the gradients of the parameters that ``pick`` selects, as one vector, each element counted once.

        Per mesh it is ``torch.nn.utils.get_total_norm``, so for a single mesh it equals that of ``clip_grad_norm_``,
        bit for bit. Plain tensors are assumed to be copies. On a rank with all gradients, the host does not wait; on
        other ranks, it waits once, for the gradients of other ranks.
        """
        order = checked_order(norm_type)
        with phase(NORM):
            place_gradients(param for _, param in self.params())
            if order == float("inf"):  # torch's fails on ranks with an empty shard, while the other ranks wait
                grads = [gradient(name, param) for name, param in self.params() if pick(name)]
                largest = [grad.abs().max().float() for grad in grads if grad is not None and grad.numel()]
                everywhere = _largest(self._steppers)
                total = torch.stack(largest).max() if largest else torch.zeros(())
                return largest_of_all(everywhere.collectives, total.to(everywhere.device))
            presences = [stepper.presence() for stepper in self._steppers]
            if not all(presence.complete for presence in presences):
                read_at_once(presences)
            norms = [_norm(*of, order, pick, foreach) for of in zip(self._steppers, presences)]
            if any(self._scattered):
                norms = _with_other_ranks(_largest(self._steppers), self._scattered, norms, order)
            return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)

    def scale(self, factor: float, pick: Pick = everything) -> None:
        """Multiply the gradients of the parameters that ``pick`` selects by ``factor``, in place."""
        for name, param in self.params():
            if param.grad is not None and pick(name):
                param.grad.mul_(factor)

    def clip(self, max_norm: float, norm: Tensor, pick: Pick, foreach: bool | None) -> None:
        """``torch.nn.utils.clip_grads_with_norm_`` of the parameters that ``pick`` selects."""
        for stepper in self._steppers:
            params = [member.param for member in stepper.members if pick(member.name)]
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=foreach)


def scattered(steppers: Sequence[MeshStepper]) -> list[Scattered | None]:
    """Per stepper, the meshes that it has on different ranks, if each leaves out ranks of the largest mesh.

    Copies are equal bit by bit, different parameters are not. Bits are summed as integers: sums of floats differ
    between types of GPU, or numbers of threads. Called on all ranks of the largest mesh.
    """
    most = set(_mesh(_largest(steppers)).ranks)
    partial = [s.mesh is not None and set(s.mesh.ranks) < most for s in steppers]
    if not any(partial):
        return [None] * len(steppers)
    mine: list[tuple[tuple[int, ...], object, int] | None] = []
    for stepper, part in zip(steppers, partial):
        sums = [sum_of_bits(local(member.param)) for member in stepper.members if part]
        fingerprint = sum((index + 1) * each for index, each in enumerate(sums))
        mesh = stepper.mesh
        if mesh is None or not part:
            mine.append(None)
        else:
            mine.append((tuple(sorted(mesh.ranks)), mesh.coordinates[stepper.collectives.rank], fingerprint))
    found: list[Scattered | None] = []
    for part, of_ranks in zip(partial, zip(*_largest(steppers).collectives.gather_objects(mine), strict=True)):
        firsts: dict[object, int] = {}
        of_place: dict[object, set[int]] = {}
        for rank, of_rank in enumerate(of_ranks):
            if part and of_rank is not None:
                ranks, place, fingerprint = of_rank
                firsts.setdefault(ranks, rank)
                of_place.setdefault(place, set()).add(fingerprint)
        different = any(len(values) > 1 for values in of_place.values())
        found.append(Scattered(tuple(firsts.values()), different) if part else None)
    return found


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of the elements' bits, read as integers; equal for copies on any device."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]
    return int(real.view(integers).sum(dtype=torch.int64))


def _norm(stepper: MeshStepper, presence: Presence, norm_type: float, pick: Pick, foreach: bool | None) -> Tensor:
    """The norm of the gradients that any rank has. torch's norm is a collective, so ranks without one use zeros."""
    params = [member.param for index, member in enumerate(stepper.members) if presence(index) and pick(member.name)]
    presence.finish()
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    if not grads:
        return torch.zeros((), device=stepper.device)
    norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _with_other_ranks(
    largest: MeshStepper, of_steppers: Sequence[Scattered | None], norms: Sequence[Tensor], norm_type: float
) -> list[Tensor]:
    """Norms that are complete on every rank of the ``largest`` mesh: over all different parameters, or the largest of
    copies. Called on all of these ranks."""
    mine = torch.stack([norm.to(largest.device, torch.float64) for norm in norms])  # wide enough for every dtype
    everywhere = mine.new_empty(largest.collectives.world_size * len(norms))
    largest.collectives.all_gather(everywhere, mine)
    of_ranks = everywhere.view(-1, len(norms))
    totals = []
    for number, (norm, of_stepper) in enumerate(zip(norms, of_steppers)):
        if of_stepper is not None:
            values = torch.stack([of_ranks[rank, number] for rank in of_stepper.firsts]).to(norm.device, norm.dtype)
            norm = torch.linalg.vector_norm(values, norm_type if of_stepper.different else float("inf"))
        totals.append(norm)
    return totals


def _largest(steppers: Sequence[MeshStepper]) -> MeshStepper:
    return max((s for s in steppers if s.mesh is not None), key=lambda s: len(_mesh(s).ranks))


def _mesh(stepper: MeshStepper) -> Mesh:
    assert stepper.mesh is not None
    return stepper.mesh
