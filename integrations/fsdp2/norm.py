"""The norm of all gradients of a model whose parameters lie on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lwopt_backend.integrations.fsdp2.meshes import gradient, local
from lwopt_backend.integrations.fsdp2.stepper import Member, MeshStepper
from lwopt_backend.runtime.maximum import largest_of_all


def hold_different_parameters(steppers: Sequence[MeshStepper]) -> list[bool]:
    """Per stepper, whether other ranks hold other parameters under the same names (experts), rather than copies.

    Only a mesh that leaves out some ranks of the largest can be asked that. Copies are equal bit by bit, different
    parameters are not. Called on all ranks of the largest mesh.
    """
    partial = _partial(steppers)
    if not any(partial):
        return partial
    prints = [_fingerprint(stepper.members) if part else 0.0 for stepper, part in zip(steppers, partial)]
    everywhere = _largest(steppers).collectives.gather_objects(
        [(_place(s), p) if part else None for s, p, part in zip(steppers, prints, partial)]
    )
    different = []
    for number, part in enumerate(partial):
        of_place: dict[object, set[float]] = {}
        for found in everywhere:
            if part and found[number] is not None:
                of_place.setdefault(found[number][0], set()).add(found[number][1])
        different.append(part and any(len(values) > 1 for values in of_place.values()))
    return different


def total_norm(
    steppers: Sequence[MeshStepper],
    different: Sequence[bool],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """The norm of all gradients as one vector, each element counted once. Called on all ranks of the meshes.

    Per mesh it is ``torch.nn.utils.get_total_norm``, so for a single mesh it is what ``clip_grad_norm_`` gives, bit for
    bit. Plain tensors are taken to be copies. Raises RuntimeError for a norm that is not finite, if asked to.
    """
    if norm_type == float("inf"):
        total = _largest_element(steppers)
    else:
        norms = [_norm(stepper, norm_type, foreach) for stepper in steppers]
        if any(_partial(steppers)):
            norms = _with_other_ranks(steppers, different, norms, norm_type)
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}; set error_if_nonfinite=False to "
            "clip by it anyway"
        )
    return total


def _largest_element(steppers: Sequence[MeshStepper]) -> Tensor:
    """The infinity norm. torch's own fails on ranks that hold an empty part, and leaves the others waiting."""
    grads = [gradient(m.name, m.param) for stepper in steppers for m in stepper.members]
    largest = [grad.abs().max().float() for grad in grads if grad is not None and grad.numel()]
    everywhere = _largest(steppers)
    total = torch.stack(largest).max() if largest else torch.zeros(())
    return largest_of_all(everywhere.collectives, total.to(everywhere.device))


def _norm(stepper: MeshStepper, norm_type: float, foreach: bool | None) -> Tensor:
    """Of a stepper's gradients that some rank has; torch's norm is a collective, so all ranks take part with them."""
    presence = stepper.presence()
    params = [member.param for index, member in enumerate(stepper.members) if presence(index)]
    presence.finish()
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    if not grads:
        return torch.zeros((), device=stepper.device)
    norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _with_other_ranks(
    steppers: Sequence[MeshStepper], different: Sequence[bool], norms: Sequence[Tensor], norm_type: float
) -> list[Tensor]:
    """Norms of partial meshes: together with the other ranks' parameters, or of copies the largest, on every rank."""
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
    return max((s for s in steppers if s.mesh is not None), key=lambda s: len(s.mesh.ranks))


def _partial(steppers: Sequence[MeshStepper]) -> list[bool]:
    most = set(_largest(steppers).mesh.ranks)
    return [s.mesh is not None and set(s.mesh.ranks) < most for s in steppers]


def _place(stepper: MeshStepper) -> object:
    return stepper.mesh.coordinates[stepper.collectives.rank]


def _fingerprint(members: Sequence[Member]) -> float:
    parts = (local(member.param).double() for member in members)
    return float(sum((number + 1) * part.abs().sum() + part.sum() for number, part in enumerate(parts)))
