"""Many tensors in one operation: pieces like others, matrices in tiles, copies between devices, norms of pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwopt_backend.rules import MatrixRule
from lwopt_backend.rules.protocol import sums_of
from lwopt_backend.runtime.pieces import Pieces


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which owners step parameters of ``dtype``: fp32 (masters) if it is narrower, otherwise ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def parts_like(parts: Sequence[Tensor], places: Sequence[int], of_batch: Sequence[Pieces]) -> list[Tensor]:
    """The parts of a buffer at these places, as views like the pieces."""
    return moves_like(of_batch, [parts[place] for place in places])


def moves_like(of_batch: Sequence[Pieces], updates: Sequence[Tensor]) -> list[Tensor]:
    """The updates, flat by matrix, like the pieces of all matrices."""
    return [
        move
        for pieces, update in zip(of_batch, updates)
        for move in ((update,) if pieces.is_flat else views_like(update, pieces.values))
    ]


# Matrices in tiles (``Atom``)


def side_by_side(stack: Tensor, tiles: int) -> Tensor:
    """Matrices with their columns in order, from matrices in tiles."""
    if tiles == 1:
        return stack
    rows, columns = stack.shape[-2:]
    return stack.view(*stack.shape[:-2], tiles, rows, columns // tiles).transpose(-3, -2).reshape(stack.shape)


def in_tiles(stack: Tensor, tiles: int) -> Tensor:
    """The inverse of ``side_by_side``."""
    if tiles == 1:
        return stack
    rows, columns = stack.shape[-2:]
    return stack.reshape(*stack.shape[:-2], rows, tiles, columns // tiles).transpose(-3, -2).reshape(stack.shape)


# Between an accelerator and the CPU, where a host may offload tensors: in one copy.


def to_fill(target: Tensor, on: torch.device | None) -> Tensor:
    """A tensor to fill ``on`` a device, for ``take_filled``; ``target`` itself if it is there, or without a device."""
    return target if on is None or on.type == target.device.type else _beside(target, on)


def take_filled(target: Tensor, filled: Tensor) -> None:
    """Copy what was filled on another device."""
    if filled is not target:
        target.copy_(filled, non_blocking=target.device.type != "cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``. The host waits for copies to the CPU."""
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cpu":
        return _beside(tensor, device).copy_(tensor)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    filled = to_fill(target, tensor.device).copy_(tensor)
    take_filled(target, filled)
    return target


def moved_all(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one device on another, in one copy."""
    if tensors[0].device.type == device.type:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0]
    return views_like(moved(flat, device), tensors)


def _beside(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape and dtype on ``device``. On the CPU its memory is pinned, so that an accelerator can copy
    it asynchronously. torch keeps freed pinned memory, in blocks of a power of two bytes, and reuses it after the
    copies."""
    pinned = device.type == "cpu" and torch.accelerator.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)


# Many tensors in one operation.


def views_like(tensor: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive elements in the shapes of ``pieces``. The tensor is flat unless there is only one piece."""
    if len(pieces) == 1:
        return [tensor.reshape_as(pieces[0])]
    flats = zip(tensor.split([piece.numel() for piece in pieces]), pieces)
    return [flat if piece.ndim == 1 else flat.view_as(piece) for flat, piece in flats]


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes."""
    if len({tensor.dtype for tensor in into}) == 1:
        copy_alike(into, tensors)
        return
    for target, tensor in zip(into, tensors):  # on CUDA, some versions of torch assume the first one's dtype for all
        target.copy_(tensor)


def copy_alike(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """``copy_all`` into tensors of one dtype."""
    if into:
        torch._foreach_copy_(list(into), list(tensors))


def cast_all(tensors: list[Tensor], dtype: torch.dtype, numels: list[int] | None = None) -> list[Tensor]:
    """Tensors of one dtype in another; the given list if they have it. ``numels`` are theirs if they are flat."""
    if tensors[0].dtype == dtype:
        return tensors
    if len(tensors) == 1:
        return [tensors[0].to(dtype)]
    total = sum(numels or [tensor.numel() for tensor in tensors])
    flat = torch.empty(total, dtype=dtype, device=tensors[0].device)
    cast = views_like(flat, tensors) if numels is None else [*flat.split_with_sizes(numels)]
    copy_alike(cast, tensors)
    return cast


# Of rules that use norms of whole matrices: pieces of equal sizes at once, on copies.

COPIED_NUMEL = 2**25  # elements at once


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors of equal sizes, at most ``COPIED_NUMEL`` elements or one tensor at a time."""
    found: dict[int, list[list[int]]] = {}
    for number, tensor in enumerate(tensors):
        numel = tensor.numel()
        some = found.setdefault(numel, [[]])
        if some[-1] and (len(some[-1]) + 1) * numel > COPIED_NUMEL:
            some.append([])
        some[-1].append(number)
    return [numbers for some in found.values() for numbers in some]


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one size as rows, a copy unless there is only one."""
    if len(tensors) == 1:
        return tensors[0].reshape(1, -1)
    return torch.stack([tensor.reshape(-1) for tensor in tensors])


def sums_of_matrices(values: Sequence[Tensor], moves: Sequence[Tensor], of_batch: Sequence[Pieces]) -> Tensor:
    """``sums_of`` every matrix, whose pieces follow each other, of shape (matrices, 3)."""
    of_pieces: dict[int, Tensor] = {}
    for numbers in _alike(values):
        sums = sums_of(*(_rows([tensors[number] for number in numbers]) for tensors in (values, moves)))
        of_pieces.update(zip(numbers, sums.unbind()))
    every = iter(of_pieces[number] for number in range(len(values)))
    of_matrices = [[next(every) for _ in pieces.values] for pieces in of_batch]
    return torch.stack([found[0] if len(found) == 1 else torch.stack(found).sum(0) for found in of_matrices])


def apply_by_norms(
    rule: MatrixRule,
    values: Sequence[Tensor],
    moves: Sequence[Tensor],
    of_batch: Sequence[Pieces],
    factors: tuple[Tensor, Tensor],
) -> None:
    """``factors`` are by matrix, whose pieces follow each other."""
    matrices = [number for number, pieces in enumerate(of_batch) for _ in pieces.values]
    keeps, shares = (factor.unbind() for factor in factors)
    for numbers in _alike(values):
        here = [matrices[number] for number in numbers]
        if len(here) == 1:
            rule.apply_by(values[numbers[0]], moves[numbers[0]], keeps[here[0]], shares[here[0]])
            continue
        rows, updates = (_rows([tensors[number] for number in numbers]) for tensors in (values, moves))
        keep, share = (torch.stack([of_all[number] for number in here])[:, None] for of_all in (keeps, shares))
        rule.apply_by(rows, updates, keep, share)
        into = [values[number] for number in numbers]
        copy_all(into, [row.view_as(value) for row, value in zip(rows, into)])
