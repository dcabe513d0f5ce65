"""State in 8 bits, between steps: int8 codes, and an fp32 scale for each block of a matrix's row.

A block is ``BLOCK`` elements of a row of the stored matrix, counted from the row's start; a row's last block may be
shorter. Where storage cuts a block, each part has its own scale. So blocks do not depend on ranks, batches or buckets,
except those that are cut: by FSDP2 where columns are sharded, by ZeRO 1 to 3 where a rank's range ends within a row.

::

    a row of 600 elements       0 ... 255 | 256 ... 511 | 512 ... 599
    cut after 300               0 ... 255 | 256 ... 299   on one rank,   300 ... 511 | 512 ... 599   on the next

The scale s is the largest magnitude in the block. A code is 127 x / s, rounded to the nearest whole number, ties to
even: the linear blockwise quantization of "Effective Quantization of Muon Optimizer States" (8-bit Muon, arXiv
2509.23106), with the block size of bitsandbytes' optimizers. An element moves by at most s / 254, up to rounding in
fp32. Elements are computed as (code / 127) * s. The largest one has code 127 or -127, so it is s again, to the bit, and
the others are nearest to their own codes: quantizing what was computed yields the same codes and scales. Checkpoints
therefore hold fp32 tensors, as of any other run, and lose nothing.

A block with an element that is not finite has the scale NaN, and so becomes NaN as a whole: it never turns finite.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lwopt_backend.plan import Atom, MatrixPlan, Replicas
from lwopt_backend.plan.layouts import Fragment, boxes_of
from lwopt_backend.runtime.pieces import Joined, Pieces, joined
from lwopt_backend.runtime.tensors import views_like

BLOCK = 256  # elements; 64 bytes of codes for a byte of a scale
LARGEST = 127  # code
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive ``rows``, or parts of them: ``width`` elements of each, from element ``column`` of a block on."""

    rows: int
    width: int
    column: int

    @property
    def numel(self) -> int:
        return self.rows * self.width

    @property
    def blocks(self) -> int:
        """The number of blocks in one row."""
        return -(-(self.column + self.width) // BLOCK)

    def in_blocks(self, flat: Tensor) -> Tensor:
        """(..., numel) as (..., rows, blocks, elements), with zeros where a block has elements elsewhere."""
        whole = flat.unflatten(-1, (self.rows, self.width))
        if self.blocks > 1 and (self.column or self.width % BLOCK):
            whole = pad(whole, (self.column, self.blocks * BLOCK - self.column - self.width))
        blocks: Tensor = whole.unflatten(-1, (self.blocks, -1))
        return blocks

    def out_of_blocks(self, blocks: Tensor) -> Tensor:
        """The inverse of ``in_blocks``."""
        whole = blocks.flatten(-2)
        if whole.shape[-1] > self.width:
            whole = whole.narrow(-1, self.column, self.width)
        return whole.flatten(-2)


MatrixPart = tuple[Rows, ...]  # a rank's elements of a matrix, in row-major order


def rows_in(fragment: Fragment | None, columns: int) -> MatrixPart:
    """The rows in a rank's fragment of a matrix with these ``columns``."""
    if fragment is None:
        return ()
    if fragment.runs > 1:
        return (Rows(fragment.runs, fragment.stop - fragment.start, fragment.start % columns % BLOCK),)
    boxes = boxes_of((-(-fragment.stop // columns), columns), fragment.start, fragment.stop)
    return tuple(Rows(rows, width, column % BLOCK) for (_, column), (rows, width) in boxes)


def part_nbytes(part: MatrixPart) -> int:
    """Bytes of the codes and the scales."""
    return sum(rows.numel + SCALE_BYTES * rows.rows * rows.blocks for rows in part)


def planned_nbytes(plan: MatrixPlan) -> list[int]:
    """By rank, the bytes of one state in 8 bits of the plan's matrices."""
    layout, found = plan.layout, [0] * plan.layout.world_size
    shapes = [atom.shape for atom in plan.atoms]
    if isinstance(getattr(layout, "storage", layout), Replicas):  # of which the owner alone keeps the state
        for atom, owner in enumerate(plan.ownership.owners):
            found[owner] += part_nbytes(rows_in(layout.fragment(atom, owner), shapes[atom][1]))
        return found
    alike: dict[tuple[Hashable, int], list[int]] = {}
    for atom, (_, columns) in enumerate(shapes):
        alike.setdefault((layout.kind(atom), columns), []).append(atom)
    for (_, columns), some in alike.items():
        for fragment in layout.fragments(some[0]):
            found[fragment.rank] += len(some) * part_nbytes(rows_in(fragment, columns))
    return found


def quantize(flat: Tensor, part: MatrixPart) -> tuple[Tensor, Tensor]:
    """Codes and scales, int8 (..., elements) and fp32 (..., blocks), of the elements ``flat``, fp32 of (..., elements).

    Of several matrices alike, the leading dimension has their number.
    """
    codes, scales = torch.empty_like(flat, dtype=torch.int8), []
    for rows, elements, found in zip(part, *_split(part, flat, codes)):
        blocks = rows.in_blocks(elements)
        scale = blocks.abs().amax(-1, keepdim=True)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        steps = blocks / torch.where(scale == 0, 1.0, scale) * LARGEST
        found.copy_(rows.out_of_blocks(steps.nan_to_num_(nan=0.0).round_()))
        scales.append(scale.flatten(-3))
    return codes, torch.cat(scales, -1)


def dequantize(codes: Tensor, scales: Tensor, part: MatrixPart) -> Tensor:
    """The elements, fp32, of the codes and scales that ``quantize`` returns."""
    flat = codes.float()
    # By a tensor on the device: with a number, CUDA multiplies by a rounded 1 / 127, and 127 / 127 is not one.
    flat.div_(flat.new_full((1,), LARGEST))
    of_rows = scales.split([rows.rows * rows.blocks for rows in part], -1)
    for rows, elements, some in zip(part, flat.split([rows.numel for rows in part], -1), of_rows):
        scale = some.unflatten(-1, (rows.rows, rows.blocks, 1))
        if rows.blocks > 1 and (rows.column or rows.width % BLOCK):
            each = rows.out_of_blocks(scale.expand(*scale.shape[:-1], BLOCK))
            elements.mul_(each)
        else:
            rows.in_blocks(elements).mul_(scale)
    return flat


def _split(part: MatrixPart, *flats: Tensor) -> list[tuple[Tensor, ...]]:
    numels = [rows.numel for rows in part]
    return [flat.split(numels, -1) for flat in flats]


class QuantizedTensor(NamedTuple):
    codes: Tensor
    scales: Tensor


ViewsIn = Callable[[Tensor], Iterable[tuple[int, Sequence[Tensor]]]]  # the views of matrices in a tensor, by atom


@dataclass(frozen=True, slots=True)
class QuantizedPiece:
    """One state of elements that a rank stores together, as a tensor of this shape: ``read`` makes one, and ``write``
    takes one. ``cut`` finds the matrices in it."""

    state: QuantizedState
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cut: ViewsIn

    def read(self) -> Tensor:
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for atom, views in self.cut(whole):
            self.state.copy_into(views, self.key, atom)
        return whole

    def write(self, whole: Tensor) -> None:
        for atom, views in self.cut(whole.contiguous()):
            self.state.take(views, self.key, atom)


class QuantizedState:
    """The state in 8 bits of this rank's parts of ``atoms``; zeros until it is written.

    ``fragment`` says which elements of an atom this rank stores, None if it stores none.
    """

    def __init__(self, atoms: Sequence[Atom], fragment: Callable[[int], Fragment | None]) -> None:
        self._atoms, self._fragment = atoms, fragment
        self._parts: dict[int, MatrixPart] = {}
        self._held: dict[tuple[int, str], QuantizedTensor] = {}

    def part(self, atom: int) -> MatrixPart:
        """The rows that this rank stores of a matrix."""
        if atom not in self._parts:
            self._parts[atom] = rows_in(self._fragment(atom), self._atoms[atom].shape[1])
        return self._parts[atom]

    def make(self, keys: Sequence[str], atoms: Iterable[int], device: torch.device) -> None:
        """Make the state of these matrices, zeros, unless there is some."""
        for atom in atoms:
            for key in keys if self.part(atom) else ():
                self._hold(atom, key, device)

    def tensors(self) -> list[Tensor]:
        """All codes and scales."""
        return [tensor for held in self._held.values() for tensor in held]

    def forget(self) -> None:
        """Let all state be zeros."""
        self._held.clear()

    @contextmanager
    def opened(self, keys: Sequence[str], atoms: Sequence[int], of_batch: Sequence[Pieces]) -> Iterator[Joined]:
        """The pieces of a batch, ``joined``, with the state under these ``keys``, and gradients as wide. At the end the
        state is quantized again, so at most a batch of it exists in fp32."""
        found = joined(of_batch)
        if not keys:
            yield found
            return
        dtype, device = torch.promote_types(found.grads[0].dtype, torch.float32), found.values[0].device
        states = [dict(state) for state in found.states]
        stacks: list[tuple[str, list[int], Tensor]] = []
        alike: dict[MatrixPart, list[int]] = {}
        for number, atom in enumerate(atoms):
            alike.setdefault(self.part(atom), []).append(number)
        first_of = [0]
        for pieces in of_batch:
            first_of.append(first_of[-1] + len(pieces.values))
        for key in keys:
            for part, numbers in alike.items():
                held = [self._hold(atoms[number], key, device) for number in numbers]
                codes, scales = (torch.stack(some) for some in zip(*held))
                stack = dequantize(codes, scales, part).to(dtype)
                stacks.append((key, [atoms[number] for number in numbers], stack))
                for number, flat in zip(numbers, stack.unbind()):
                    for place, view in enumerate(views_like(flat, of_batch[number].values), first_of[number]):
                        states[place][key] = view
        yield Joined([grad.to(dtype) for grad in found.grads], found.values, states)
        for key, some, stack in stacks:
            codes, scales = quantize(stack.float(), self.part(some[0]))
            into = [self._held[atom, key] for atom in some]
            torch._foreach_copy_([each.codes for each in into], list(codes.unbind()))
            torch._foreach_copy_([each.scales for each in into], list(scales.unbind()))

    def copy_into(self, views: Sequence[Tensor], key: str, atom: int) -> None:
        """Copy a matrix's state into views of another tensor, in the order of this rank's elements."""
        held = self._held.get((atom, key))
        if held is None or not self.part(atom):
            for view in views:
                view.zero_()
            return
        for view, found in zip(views, views_like(dequantize(*held, self.part(atom)), views)):
            view.copy_(found)

    def take(self, views: Sequence[Tensor], key: str, atom: int) -> None:
        """Replace a matrix's state, by the views that ``copy_into`` fills, where they are."""
        part = self.part(atom)
        if part:
            codes, scales = quantize(torch.cat([view.reshape(-1) for view in views]).float(), part)
            held = self._hold(atom, key, codes.device)
            held.codes.copy_(codes)
            held.scales.copy_(scales)

    def piece(
        self, keys: Sequence[str], shape: Sequence[int], dtype: torch.dtype, device: torch.device, cut: ViewsIn
    ) -> dict[str, QuantizedPiece]:
        """By key, the state of elements whose weights are of this shape and dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return {key: QuantizedPiece(self, key, tuple(shape), wide, device, cut) for key in keys}

    def _hold(self, atom: int, key: str, device: torch.device) -> QuantizedTensor:
        if (atom, key) not in self._held:
            part = self.part(atom)
            numel, blocks = sum(rows.numel for rows in part), sum(rows.rows * rows.blocks for rows in part)
            codes = torch.zeros(numel, dtype=torch.int8, device=device)
            self._held[atom, key] = QuantizedTensor(codes, torch.zeros(blocks, dtype=torch.float32, device=device))
        return self._held[atom, key]
