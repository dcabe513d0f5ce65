"""Stage 0: every rank stores all weights; work and state are divided."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.engines.zero.plan import KIND, GroupPlan, UnitStepper, kept_bases, kept_numel
from lwopt_backend.groups.registry import build_matrix_rule
from lwopt_backend.plan import FlatPartition, TensorShards, TrainedParam
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.plan.layouts import View, range_views
from lwopt_backend.plan.mesh import in_whole
from lwopt_backend.runtime.collectives import EXCHANGE_BACK, Collectives, phase, sending
from lwopt_backend.runtime.pieces import Pieces, Regions, Slices, box_regions
from lwopt_backend.runtime.state import StatePiece, fill, part_of, with_quantized
from lwopt_backend.runtime.step import StepInput
from lwopt_backend.runtime.tensors import copy_all

# State of replicated parameters in a checkpoint: whole, parameter by parameter, as a single process would save it, for
# any later number of ranks.


def gather_whole(
    plan: GroupPlan, state: Mapping[str, Any], ranks: Collectives, numbers: Sequence[int], *, on_all: bool = False
) -> list[dict[str, Any]] | None:
    """Every parameter's whole state, on the CPU of the first rank, or ``on_all``; None on the others. Called on all
    ``ranks``.

    ``numbers`` are the numbers of ``tensors`` in the plan. Under tensor parallelism, these ranks have equal shards.
    """
    whole: list[dict[str, Any]] = [{} for _ in plan.params]
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            for of_param in whole:
                of_param[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        padded = value.new_zeros(max(state_numel(plan, rank) for rank in numbers))
        padded[: value.numel()] = value
        if on_all:
            received = padded.new_empty(padded.numel() * ranks.world_size)
            ranks.all_gather(received, padded)
            flats: Sequence[Tensor] | None = received.chunk(ranks.world_size)
        else:
            flats = ranks.gather_to_first(padded)
        if flats is None:
            continue
        for param, of_param in zip(plan.params, whole):
            of_param[key] = torch.empty(param.local_shape, dtype=value.dtype)
        for rank, flat in zip(numbers, flats, strict=True):
            for index, view, offset in _views(plan, rank):
                part_of(whole[index][key], view).copy_(_part(flat, view, offset))
    return whole if on_all or ranks.rank == 0 else None


def take_part(plan: GroupPlan, saved: Sequence[Mapping[str, Any]], rank: int, device: torch.device) -> dict[str, Any]:
    """This rank's flat state, cut from the parameters' whole states ``saved``."""
    part: dict[str, Any] = {}
    for key, value in saved[0].items():
        if isinstance(value, Tensor) and value.ndim:
            part[key] = torch.zeros(state_numel(plan, rank), dtype=value.dtype, device=device)
            for index, view, offset in _views(plan, rank):
                fill(_part(part[key], view, offset), saved[index][key], view)
        else:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return part


def _part(flat: Tensor, view: View, offset: int) -> Tensor:
    """The state of a parameter's elements ``view`` in a rank's flat state."""
    return flat.narrow(0, offset, math.prod(view.sizes)).view(view.sizes)


def _views(plan: GroupPlan, rank: int) -> Iterator[tuple[int, View, int]]:
    """Yield the elements whose state ``rank`` keeps: a parameter's number, elements, and their start."""
    if plan.matrices is None:
        assert isinstance(plan.layout, FlatPartition)
        for index in range(len(plan.params)):
            held = plan.layout.fragment(index, rank)
            if held is not None:
                yield index, View.of_range(held.start, held.stop), held.offset
        return
    bases, layout = kept_bases(plan.matrices, rank), plan.matrices.layout
    blocks = [(index, block) for index, param in enumerate(plan.params) for block in param.blocks]
    for atom, (index, block) in enumerate(blocks):
        offset = bases.get(atom)
        if offset is None:
            continue
        in_shard = layout.views(atom, rank) if isinstance(layout, TensorShards) else None
        for view in range_views(block, 0, plan.params[index].numel, 0) if in_shard is None else in_shard:
            yield index, view, offset
            offset += math.prod(view.sizes)


# Steps of parameters that every rank stores whole (stage 0): work and state are divided, weights are not.
#
# Matrices: the owner alone keeps the momentum and computes the update, which goes to all ranks; each applies it to its
# copy. Element-wise parameters: each rank steps its partition of them, and the new values are gathered.


class ReplicatedStepper(UnitStepper[Sequence[Tensor]]):
    """Base of both steppers: whole parameters, and flat state of this rank's elements."""

    def _like(self) -> Tensor:
        numel, device = self._place()
        return torch.zeros(numel, dtype=torch.float32, device=device)

    def _place(self) -> tuple[int, torch.device]:
        return state_numel(self._plan, self._collectives.rank), self._device

    def pieces(self, state: Mapping[str, Tensor], first: int) -> Iterator[StatePiece]:
        """The whole weights of every parameter, with its counters; then the state of this rank's elements."""
        counters = {key: tensor for key, tensor in state.items() if not tensor.ndim}
        for index, (param, trained) in enumerate(zip(self._stored, self.params)):
            values = [param.data] if not trained.parts else param.data.split(trained.parts)
            views = list(in_whole(trained, self._shard, 0, param.numel()))
            if trained.cut is None:
                views = [View.of_box(param.shape, [(0, size) for size in param.shape])]
            for view, value in zip(views, values, strict=True):
                yield StatePiece(first + index, view, value, dict(counters))
        flats = {key: tensor for key, tensor in state.items() if tensor.ndim}
        for place, (index, view, offset) in enumerate(_views(self._plan, self._collectives.rank)):
            for in_param in self._in_whole(self.params[index], view):
                tensors = {key: _part(flat, in_param, offset) for key, flat in flats.items()}
                yield StatePiece(first + index, in_param, None, self._with_8_bits(tensors, place, in_param))
                offset += math.prod(in_param.sizes)

    def _with_8_bits(self, tensors: dict[str, Tensor], place: int, view: View) -> Mapping[str, Tensor]:
        """The state of the elements ``view``, those of the matrix that is at ``place`` of this rank's."""
        return tensors

    def _in_whole(self, param: TrainedParam, view: View) -> Iterator[View]:
        """The elements ``view`` of this rank's shard as elements of the whole parameter, in order."""
        if param.cut is None:
            yield view
            return
        starts = [view.offset]  # of its runs, row by row
        if len(view.sizes) > 1:
            starts = [view.offset + row * view.strides[0] for row in range(view.sizes[0])]
        for start in starts:
            yield from in_whole(param, self._shard, start, start + view.sizes[-1])


class MatrixReplicas(ReplicatedStepper):
    """Steps matrices. A rank keeps the state of those that it owns in one flat tensor, in the plan's order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self._plan.matrices is not None
        pairs = list(zip(self._stored, self.params))
        self._places = [(p, regions) for p, trained in pairs for regions in _regions_of(trained, self._shard)]
        self._names = [trained.name for _, trained in pairs for _ in _regions_of(trained, self._shard)]
        self._bases = kept_bases(self._plan.matrices, self._collectives.rank)
        self._kept = list(self._bases)

    def _in_flat(self) -> Iterator[tuple[int, Sequence[View]]]:
        for atom, base in self._bases.items():
            yield atom, [View.of_range(base, base + sum(rows.numel for rows in self._quantized.part(atom)))]

    def _with_8_bits(self, tensors: dict[str, Tensor], place: int, view: View) -> Mapping[str, Tensor]:
        if not self._quantized_keys:
            return tensors
        atom = self._kept[place]  # tensor parallelism is refused, so a matrix is one view

        def cut(whole: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
            yield atom, [whole]

        device, keys = self._stored[0].device, self._quantized_keys
        return with_quantized(tensors, self._quantized.piece(keys, view.sizes, torch.float32, device, cut))

    def step(self, group: Mapping[str, Any], state: dict[str, Any], out: Collection[str] = ()) -> None:
        """One step from the parameters' gradients, which are equal on all ranks."""
        assert self.matrix_stepper is not None
        rule = build_matrix_rule(group, self._config)
        pieces = _WholePieces(self, {key: state[key] for key in rule.stored_keys})
        skipped = frozenset(atom for atom, name in enumerate(self._names) if name in out)
        self.matrix_stepper.step(StepInput({KIND: rule}, pieces, skipped))

    def pieces_of(self, state: Mapping[str, Tensor], atom: int) -> Pieces:
        """A whole matrix, or its shard, with its state if this rank keeps it."""
        param, regions = self._places[atom]
        (pieces,) = regions.cut(Slices(param.data, _grad(param), {}))
        base = self._bases.get(atom)
        if base is None:
            return pieces
        states = []
        for value in pieces.values:
            numel = value.numel()
            states.append({key: flat.narrow(0, base, numel).view(value.shape) for key, flat in state.items()})
            base += numel
        return pieces._replace(states=states)


class _WholePieces:
    """Pieces during one step, cut when they are first read."""

    def __init__(self, stepper: MatrixReplicas, state: Mapping[str, Tensor]) -> None:
        self._stepper, self._state = stepper, state
        self._cut: dict[int, Pieces] = {}

    def __getitem__(self, atom: int, /) -> Pieces:
        if atom not in self._cut:
            self._cut[atom] = self._stepper.pieces_of(self._state, atom)
        return self._cut[atom]


def _regions_of(param: TrainedParam, shard: int) -> Iterator[Regions]:
    """The place of each of a parameter's matrices in its tensor, which is ``shard`` of it."""
    if param.tiles > 1:  # the elements of a shard are in order, those of the matrix are in tiles
        (block,) = matrices_of(param.local_shape)
        yield box_regions([block], param.local_shape, [(0, size) for size in param.local_shape])
        return
    box = [(0, size) for size in param.local_shape]
    if param.cut is not None:
        box[0] = (shard * param.local_shape[0], param.local_shape[0])
    yield from (box_regions([block], param.shape, box) for block in param.blocks)


GATHERED_NUMEL = 2**24  # elements of all ranks that are gathered at once


class ElementwiseReplicas(ReplicatedStepper):
    """Steps element-wise parameters, concatenated and cut into one equal part per rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._plan.layout, FlatPartition)
        layout, numbers = self._plan.layout, range(len(self._stored))
        self._mine = [(number, layout.fragment(number, self._collectives.rank)) for number in numbers]
        share = max(1, min(GATHERED_NUMEL // self._collectives.world_size, layout.partition_numel))
        self._chunks = list(range(0, layout.partition_numel, share))  # their starts in every partition
        self._sizes = [min(share, layout.partition_numel - begin) for begin in self._chunks]
        # By chunk: a parameter's number and the start of its elements, their start in what is gathered, their number.
        self._arriving: list[list[tuple[int, int, int, int]]] = [[] for _ in self._chunks]
        for number in numbers:
            for part in layout.fragments(number):
                end = part.offset + part.numel
                for chunk in range(part.offset // share, -(-end // share)):
                    begin, size = self._chunks[chunk], self._sizes[chunk]
                    low, high = max(part.offset, begin), min(end, begin + size)
                    at = part.rank * size + low - begin
                    self._arriving[chunk].append((number, part.start + low - part.offset, at, high - low))

    @torch.no_grad()
    def step(self, group: Mapping[str, Any], state: dict[str, Any], out: Collection[str] = ()) -> None:
        """One step from the parameters' gradients, which are equal on all ranks."""
        value, grad = self._like(), self._like()
        for number, held in self._mine:
            if held is not None:
                param = self._stored[number]
                for flat, tensor in ((value, param.data), (grad, _grad(param))):
                    flat.narrow(0, held.offset, held.numel).copy_(tensor.reshape(-1)[held.start : held.stop])
        whole = Slices(value, grad, state)
        if out:
            self._step_without(out, group, whole)
        else:
            self._elementwise.step(0, group, [whole])
        with phase(EXCHANGE_BACK):
            for begin, size, arriving in zip(self._chunks, self._sizes, self._arriving):
                self._gather(value.narrow(0, begin, size), arriving)

    def _step_without(self, out: Collection[str], group: Mapping[str, Any], whole: Slices) -> None:
        """Step the parameters that are not ``out``. All have one count of steps, as in every step of this unit."""
        counts = {key: tensor.clone() for key, tensor in whole.state.items() if not tensor.ndim}
        parts = []
        for number, held in self._mine:
            if held is not None and self.params[number].name not in out:
                place = (0, held.offset, held.numel)
                state = {k: counts[k].clone() if k in counts else t.narrow(*place) for k, t in whole.state.items()}
                parts.append(Slices(whole.value.narrow(*place), whole.grad.narrow(*place), state))
        if parts:
            self._elementwise.step(0, group, parts)
            for key in counts:
                whole.state[key].copy_(parts[0].state[key])

    def _gather(self, mine: Tensor, arriving: Sequence[tuple[int, int, int, int]]) -> None:
        """Gather a chunk of new values into the parameters."""
        received = mine.new_empty(mine.numel() * self._collectives.world_size)
        sending(mine.nbytes * (self._collectives.world_size - 1))
        self._collectives.all_gather(received, mine)
        whole = {number: self._stored[number].data for number, *_ in arriving}
        flats = {number: data.view(-1) if data.is_contiguous() else data.flatten() for number, data in whole.items()}
        targets = [flats[number].narrow(0, start, numel) for number, start, _, numel in arriving]
        copy_all(targets, [received.narrow(0, at, numel) for *_, at, numel in arriving])
        for number, data in whole.items():
            if not data.is_contiguous():
                data.copy_(flats[number].view(data.shape))


def state_numel(plan: GroupPlan, rank: int) -> int:
    """The number of elements in the flat state of ``rank``."""
    if plan.matrices is None:
        assert isinstance(plan.layout, FlatPartition)
        return plan.layout.partition_numel
    return kept_numel(plan.matrices, rank)


def _grad(param: Tensor) -> Tensor:
    """The gradient; as in ZeRO, a missing one is zero."""
    return torch.zeros_like(param) if param.grad is None else param.grad
