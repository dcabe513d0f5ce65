"""Weight decay only of elements that the update moves towards zero ("Cautious Weight Decay", arXiv 2510.12402)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.runtime.elementwise import ElementwiseStepper
from lwopt_backend.runtime.storage import Slices

CHUNK = 2**22  # elements whose updates are in memory at a time


@torch.no_grad()
def step_cautiously(
    stepper: ElementwiseStepper, arguments: Mapping[str, Any], decay: float, parts: Sequence[Slices]
) -> None:
    """One step with ``arguments``, which have no decay, and then ``decay`` of every element that it moves towards zero.

    The optimizer steps zeros in place of the weights, which leaves its update, unrounded: its sign is known also where
    it is too small to change the weight. So only optimizers whose update does not depend on the weight are stepped like
    this. Zero counts as towards zero.
    """
    for some in _chunks(parts):
        moves = [torch.zeros_like(part.value) for part in some]
        stepper.step(arguments, [Slices(move, part.grad, part.state) for move, part in zip(moves, some)])
        for part, move in zip(some, moves):
            _apply(part.value, move, decay)


def _apply(value: Tensor, move: Tensor, decay: float) -> None:
    # Signs, because the product of two small numbers may be zero.
    aligned = value.sign().mul_(move.sign()) <= 0
    kept = torch.where(aligned, 1 - decay, 1.0)
    value.copy_((value * kept).add_(move))  # in fp32, so that 16 bits are rounded once


def _chunks(parts: Sequence[Slices]) -> Iterator[list[Slices]]:
    """The parts' rows, some ``CHUNK`` elements at a time."""
    some: list[Slices] = []
    numel = 0
    for piece in (piece for part in parts for piece in _pieces(part)):
        if some and numel + piece.value.numel() > CHUNK:
            yield some
            some, numel = [], 0
        some.append(piece)
        numel += piece.value.numel()
    if some:
        yield some


def _pieces(part: Slices) -> Iterator[Slices]:
    """A part cut by rows. All pieces begin with its counters; those that the last one leaves behind are kept."""
    rows = part.value.shape[0] if part.value.ndim else 1
    count = max(1, CHUNK * rows // max(1, part.value.numel()))
    if rows <= count:
        yield part
        return
    before = {key: tensor.clone() for key, tensor in part.state.items() if not tensor.ndim}
    for begin in range(0, rows, count):
        size = min(count, rows - begin)
        value, grad = (tensor.narrow(0, begin, size) for tensor in (part.value, part.grad))
        counters = part.state if begin + size == rows else {key: tensor.clone() for key, tensor in before.items()}
        state = {
            key: tensor.narrow(0, begin, size) if tensor.ndim else counters[key] for key, tensor in part.state.items()
        }
        yield Slices(value, grad, state)
