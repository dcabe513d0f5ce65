"""Norm and scaling of FSDP2's gradients, which are shards; each element is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lwopt_backend.engines.fsdp2.plan import Mesh, MeshStepper, gradient, local
from lwopt_backend.engines.gradients import Pick, checked_order, everything
from lwopt_backend.runtime.collectives import NORM, phase
from lwopt_backend.runtime.presence import largest_of_all


@torch.no_grad()
def place_gradients(params: Iterable[Tensor]) -> None:
    """Give gradients the placements of their parameters: sum what is Partial, for example.

    Each is a collective, of tensors that may have equal shapes. So all ranks call this for all parameters in one order,
    before anything that ranks do in different orders. The model decides on placements, so they are equal on all ranks.
    """
    for param in params:
        grad = param.grad
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            param.grad = grad.redistribute(param.device_mesh, param.placements)


class MeshGradients:
    """The gradients of ``steppers``; ``different`` is what ``hold_different_parameters`` returned.

    ``place`` is this rank in the largest mesh and its number of ranks. Methods are called on all ranks of that mesh.
    """

    def __init__(self, steppers: Sequence[MeshStepper], different: Sequence[bool]) -> None:
        self._steppers = steppers
        self._different = different
        self.everyone = _largest(steppers).collectives
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        return [(member.name, member.param) for stepper in self._steppers for member in stepper.members]

    def norm(self, norm_type: float = 2.0, pick: Pick = everything, foreach: bool | None = None) -> Tensor:
        """The norm of the gradients of the parameters that ``pick`` selects, as one vector, each element counted once.

        Per mesh it is ``torch.nn.utils.get_total_norm``, so for a single mesh it equals that of ``clip_grad_norm_``,
        bit for bit. Plain tensors are assumed to be copies.
        """
        order = checked_order(norm_type)
        with phase(NORM):
            place_gradients(param for _, param in self.params())
            if order == float("inf"):  # torch's own fails on ranks with an empty shard, while the other ranks wait
                grads = [gradient(name, param) for name, param in self.params() if pick(name)]
                largest = [grad.abs().max().float() for grad in grads if grad is not None and grad.numel()]
                everywhere = _largest(self._steppers)
                total = torch.stack(largest).max() if largest else torch.zeros(())
                return largest_of_all(everywhere.collectives, total.to(everywhere.device))
            norms = [_norm(stepper, order, pick, foreach) for stepper in self._steppers]
            if any(_partial(self._steppers)):
                norms = _with_other_ranks(self._steppers, self._different, norms, order)
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


def hold_different_parameters(steppers: Sequence[MeshStepper]) -> list[bool]:
    """Per stepper, whether other ranks have other parameters under the same names (experts), rather than copies.

    This can only be so on a mesh that leaves out ranks of the largest mesh. Copies are equal bit by bit, different
    parameters are not. Bits are summed as integers: sums of floats differ between types of GPU, or numbers of threads.
    Called on all ranks of the largest mesh.
    """
    partial = _partial(steppers)
    if not any(partial):
        return partial
    mine: list[tuple[object, int] | None] = []
    for stepper, part in zip(steppers, partial):
        sums = [sum_of_bits(local(member.param)) for member in stepper.members if part]
        fingerprint = sum((index + 1) * each for index, each in enumerate(sums))
        place = _mesh(stepper).coordinates[stepper.collectives.rank] if part else None
        mine.append((place, fingerprint) if part else None)
    everywhere = _largest(steppers).collectives.gather_objects(mine)
    different = []
    for number, part in enumerate(partial):
        of_place: dict[object, set[int]] = {}
        for found in everywhere:
            if part and found[number] is not None:
                of_place.setdefault(found[number][0], set()).add(found[number][1])
        different.append(part and any(len(values) > 1 for values in of_place.values()))
    return different


def sum_of_bits(tensor: Tensor) -> int:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.view(integers).sum(dtype=torch.int64))


def _norm(stepper: MeshStepper, norm_type: float, pick: Pick, foreach: bool | None) -> Tensor:
    """The norm of the gradients that any rank has. torch's norm is a collective, so ranks without one use zeros."""
    presence = stepper.presence()
    params = [member.param for index, member in enumerate(stepper.members) if presence(index) and pick(member.name)]
    presence.finish()
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    if not grads:
        return torch.zeros((), device=stepper.device)
    norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _with_other_ranks(
    steppers: Sequence[MeshStepper], different: Sequence[bool], norms: Sequence[Tensor], norm_type: float
) -> list[Tensor]:
    """Norms of partial meshes, complete on every rank: over all different parameters, or the largest of copies."""
    mine = [(tuple(sorted(s.mesh.ranks)) if s.mesh else None, norm.item()) for s, norm in zip(steppers, norms)]
    everywhere = _largest(steppers).collectives.gather_objects(mine)
    totals = []
    for number, (norm, partial) in enumerate(zip(norms, _partial(steppers))):
        if not partial:
            totals.append(norm)
            continue
        values = torch.tensor(list(dict(found[number] for found in everywhere).values()), dtype=norm.dtype)
        kind = norm_type if different[number] else float("inf")
        totals.append(torch.linalg.vector_norm(values, kind).to(norm.device))
    return totals


def _largest(steppers: Sequence[MeshStepper]) -> MeshStepper:
    return max((s for s in steppers if s.mesh is not None), key=lambda s: len(_mesh(s).ranks))


def _mesh(stepper: MeshStepper) -> Mesh:
    assert stepper.mesh is not None
    return stepper.mesh


def _partial(steppers: Sequence[MeshStepper]) -> list[bool]:
    most = set(_mesh(_largest(steppers)).ranks)
    return [s.mesh is not None and set(s.mesh.ranks) < most for s in steppers]
