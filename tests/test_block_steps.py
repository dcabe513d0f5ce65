"""Steps of blocks: the same bits as of separate parameters, in flat storage and in rectangles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lwopt_backend.plan import (
    MACHINES,
    Atom,
    FlatPartition,
    MatrixPlan,
    MeshLayout,
    ParameterPartition,
    Sharding,
    plan_matrices,
    plan_spread,
)
from lwopt_backend.plan.block_storage import BlockPartition, in_blocks
from lwopt_backend.plan.blocks import Block, Grid, divided, equal, grouped, undivided
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import Slices
from lwopt_backend.runtime.views import flat_views, local_views
from tests.ranks import RankPool
from tests.test_blocks import matrix_of
from tests.test_stepper import rule_in

STEPS = 2
QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
# Shapes, whether stored transposed, and the division: interleaved by group, in block order, gate and up of experts one
# after the other and in turn, heads, a flattened convolution, and a plain matrix
PARAMS: list[tuple[tuple[int, ...], bool, tuple[Block, ...]]] = [
    ((24, 10), False, divided(Grid(1, 24, 10), grouped(QKV, (4, 1, 1), 4))),
    ((10, 24), True, divided(Grid(1, 10, 24), grouped(QKV, (12, 6, 6)), transposed=True)),
    ((3, 8, 6), False, divided(Grid(3, 8, 6), grouped(GATE_UP, (4, 4)))),
    ((2, 6, 8), True, divided(Grid(2, 6, 8), grouped(GATE_UP, (1, 1), 4), transposed=True)),
    ((12, 7), False, divided(Grid(1, 12, 7), equal(3, 4, "head"))),
    ((5, 3, 2, 2), False, divided(Grid.of((5, 3, 2, 2), 0), undivided(5))),
    ((7, 9), False, divided(Grid(1, 7, 9), undivided(7))),
]
DIVISIONS = [blocks for *_, blocks in PARAMS]
NUMELS = [torch.Size(shape).numel() for shape, *_ in PARAMS]


def atoms() -> list[Atom]:
    return [
        Atom(block.of(f"p{number}"), block.shape, newton_schulz_flops(block.shape, 5), transposed)
        for number, (_, transposed, blocks) in enumerate(PARAMS)
        for block in blocks
    ]


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape, *_ in PARAMS]


def by_themselves() -> list[Tensor]:
    """torch.optim.Muon on every block as a parameter of its own, outputs by inputs; put back where it came from."""
    whole, places = tensors(0), [(n, transposed, block) for n, (_, transposed, bs) in enumerate(PARAMS) for block in bs]

    def taken(params: Sequence[Tensor]) -> list[Tensor]:
        found = [(matrix_of(block, params[number]), transposed) for number, transposed, block in places]
        return [(matrix.T if transposed else matrix).contiguous() for matrix, transposed in found]

    separate = [torch.nn.Parameter(matrix) for matrix in taken(whole)]
    optimizer = torch.optim.Muon(separate, lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        for param, grad in zip(separate, taken(tensors(1 + step))):
            param.grad = grad
        optimizer.step()
    for (number, transposed, block), param in zip(places, separate):
        target = whole[number].view(-1)
        indices = matrix_of(block, torch.arange(target.numel())).flatten()
        target[indices] = (param.detach().T if transposed else param.detach()).flatten()
    return whole


@dataclass
class FlatBlocks:
    """Blocks in a rank's flat tensors."""

    layout: BlockPartition
    rank: int
    flat: Slices

    def parts(self, index: int) -> list[Slices]:
        views = self.layout.views(index, self.rank)
        held = (self.flat.value, self.flat.grad, self.flat.state["momentum_buffer"])
        found = zip(*(flat_views(tensor, views) for tensor in held))
        return [Slices(value, grad, {"momentum_buffer": momentum}) for value, grad, momentum in found]


def planned(kind: str, ranks: int) -> MatrixPlan:
    if kind == "per parameter":
        return plan_spread(atoms(), in_blocks(ParameterPartition.build(NUMELS, ranks), DIVISIONS), bucket_matrices=4)
    layout = in_blocks(FlatPartition.build(NUMELS, ranks), DIVISIONS)
    machine = MACHINES["cpu"]
    return plan_matrices(atoms(), layout, policy=kind, machine=machine, bucket_numel=200, element_bytes=2)


def flat_of(layout: BlockPartition, params: Sequence[Tensor], rank: int) -> Tensor:
    flat = torch.zeros(layout.storage.partition_numel)
    for number, param in enumerate(params):
        part = layout.storage.fragment(number, rank)
        if part is not None:
            flat[part.offset : part.offset + part.numel] = param.flatten()[part.start : part.stop]
    return flat


def step_flat(kind: str) -> Tensor:
    collectives = TorchCollectives()
    plan = planned(kind, collectives.world_size)
    stepper, layout = MatrixStepper(plan, collectives, torch.device("cpu")), plan.layout
    value = flat_of(layout, tensors(0), collectives.rank)
    state = {"momentum_buffer": torch.zeros_like(value)}
    for step in range(STEPS):
        grad = flat_of(layout, tensors(1 + step), collectives.rank)
        storage = FlatBlocks(layout, collectives.rank, Slices(value, grad, state))
        stepper.step([rule_in(torch.bfloat16)] * len(plan.atoms), storage)
    return value


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True, ids=["2ranks", "3ranks", "4ranks"])
@pytest.mark.parametrize("kind", ["stay", "balance", "per parameter"])
def test_blocks_in_flat_storage_are_stepped_to_the_bits_of_separate_parameters(ranks: RankPool, kind: str) -> None:
    layout, expected = planned(kind, ranks.world_size).layout, by_themselves()
    for rank, found in enumerate(ranks.run(step_flat, kind)):
        assert torch.equal(found, flat_of(layout, expected, rank))


MESHES = {  # mesh shape, and per parameter which dimension each mesh dimension cuts
    "rows": ((4,), [(0,), (0,), (1,), (1,), (0,), (0,), (0,)]),
    "columns": ((4,), [(1,), (1,), (2,), (2,), (1,), (1,), (1,)]),
    "experts": ((2, 2), [(0, 1), (0, 0), (0, 1), (0, 2), (1, 0), (0, None), (None, 0)]),
}


@dataclass
class Boxes:
    """Blocks in a rank's boxes of parameters, of which the gradient lies in memory in another order."""

    blocks: Sequence[tuple[int, Block]]
    shardings: Sequence[Sharding]
    coordinate: tuple[int, ...]
    held: Sequence[Slices]

    def parts(self, index: int) -> list[Slices]:
        number, block = self.blocks[index]
        sharding, local = self.shardings[index], self.held[number]
        box = sharding.box(self.coordinate)
        tensors = (local.value, local.grad, local.state["momentum_buffer"])
        found = zip(*(local_views(tensor, block, sharding.shape, box) for tensor in tensors))
        return [Slices(value, grad, {"momentum_buffer": momentum}) for value, grad, momentum in found]


def mesh_shardings(mesh: str) -> list[Sharding]:
    mesh_shape, dims = MESHES[mesh]
    late = tuple(False for _ in mesh_shape)
    return [
        Sharding(shape, mesh_shape, dims[number], late, block)
        for number, (shape, _, blocks) in enumerate(PARAMS)
        for block in blocks
    ]


def local_of(param: Tensor, sharding: Sharding, coordinate: tuple[int, ...]) -> Tensor:
    return param[tuple(slice(begin, begin + size) for begin, size in sharding.box(coordinate))].clone()


def step_boxes(mesh: str) -> list[Tensor]:
    collectives, shardings = TorchCollectives(), mesh_shardings(mesh)
    coordinates = tuple(itertools.product(*map(range, MESHES[mesh][0])))
    coordinate = coordinates[collectives.rank]
    plan = plan_spread(atoms(), MeshLayout(coordinates, tuple(shardings)), bucket_matrices=4)
    stepper = MatrixStepper(plan, collectives, torch.device("cpu"))
    blocks = [(number, block) for number, members in enumerate(DIVISIONS) for block in members]
    of_param = {number: sharding for (number, _), sharding in zip(blocks, shardings)}
    for (number, _), sharding in zip(blocks, shardings):
        sharding.check(f"p{number}")
    values = [local_of(param, of_param[number], coordinate) for number, param in enumerate(tensors(0))]
    momenta = [torch.zeros_like(value) for value in values]
    for step in range(STEPS):
        grads = [local_of(param, of_param[number], coordinate) for number, param in enumerate(tensors(1 + step))]
        grads = [grad.transpose(-2, -1).contiguous().transpose(-2, -1) for grad in grads]
        held = [Slices(v, g, {"momentum_buffer": m}) for v, g, m in zip(values, grads, momenta)]
        storage = Boxes(blocks, shardings, coordinate, held)
        stepper.step([rule_in(torch.bfloat16)] * len(plan.atoms), storage)
    return values


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("mesh", MESHES)
def test_blocks_in_boxes_are_stepped_to_the_bits_of_separate_parameters(ranks: RankPool, mesh: str) -> None:
    coordinates = list(itertools.product(*map(range, MESHES[mesh][0])))
    of_param = {sharding.shape: sharding for sharding in mesh_shardings(mesh)}
    for coordinate, found in zip(coordinates, ranks.run(step_boxes, mesh)):
        for param, value in zip(by_themselves(), found):
            assert torch.equal(value, local_of(param, of_param[tuple(param.shape)], coordinate))


def test_dividing_balances_the_work() -> None:
    """Eight layers of a fused q, k, v and of a fused gate and up, on 16 ranks: whole, half of the ranks would idle."""
    shapes = [((1536, 512), QKV), ((2048, 512), GATE_UP)] * 4
    loads = []
    for parts in (1, None):
        blocks = [
            divided(Grid.of(s, 0), grouped(names[:parts], [s[0] // len(names[:parts])] * len(names[:parts])))
            for s, names in shapes
        ]
        layout = in_blocks(FlatPartition.build([s[0] * s[1] for s, _ in shapes], 16), blocks)
        matrices = [Atom(b.of("p"), b.shape, newton_schulz_flops(b.shape, 5)) for bs in blocks for b in bs]
        plan = plan_matrices(
            matrices, layout, policy="balance", machine=MACHINES["cuda"], bucket_numel=2**20, element_bytes=2
        )
        loads.append((max(plan.ownership.loads), plan.ownership.imbalance))
    (whole, whole_imbalance), (divided_load, divided_imbalance) = loads
    assert divided_load < whole and divided_imbalance < whole_imbalance
