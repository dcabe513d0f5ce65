"""8-bit momentum, ``momentum_dtype="int8"``: every engine equals torch.optim.Muon whose momentum is rounded after each
step, block by block, bit for bit. The rounding is written out here."""

import contextlib
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.checkpoint import formats
from lwopt_backend.config.hosts import FSDP2Config, ZeROConfig
from lwopt_backend.engines.fsdp2.plan import local
from lwopt_backend.engines.zero.plan import plan_group
from lwopt_backend.groups.grouping import Given
from lwopt_backend.groups.registry import options_of
from lwopt_backend.migration import change_momentum_form, convert_momentum
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.cost import MACHINES
from lwopt_backend.plan.layouts import FlatPartition, Fragment
from lwopt_backend.runtime import quantized
from lwopt_backend.runtime.pieces import Pieces
from tests.support import fsdp2
from tests.support.cells import cells
from tests.support.engines import ENGINES, Cell, ExactLM, model_for, running
from tests.support.models import MATRICES, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import shares
from tests.support.references import MUON, SIMPLE, Reference, orthogonalized, random, round_to_8_bits

BLOCK = 8  # in place of 256, so that the rows of small matrices have several blocks
INT8 = {"momentum_dtype": "int8"}
CELLS = {
    **{engine: Cell(engine, options=INT8) for engine in ENGINES},
    "fsdp2, columns": Cell("fsdp2", options=INT8, sharding="columns"),
    "fsdp2, copies": Cell("fsdp2", options=INT8, sharding="hybrid"),
}


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "BLOCK", BLOCK)
        yield


def cuts_of(cell: Cell, matrices: dict[str, Tensor], ranks: int) -> Iterator[set[int]]:
    """Where storage cuts each flattened matrix."""
    unit = 2 * ranks  # a partition of stages 1 and 2 ends on these
    partition, begin = -(-sum(param.numel() for param in matrices.values()) // unit) * 2, 0
    for param in matrices.values():
        rows, columns = param.shape
        if cell.sharding == "columns":
            size = columns // ranks if columns % ranks == 0 else columns
            yield {row * columns + cut for row in range(rows) for cut in range(size, columns, size)}
        elif cell.engine in ("zero 1", "zero 2"):
            yield {cut - begin for cut in range(0, partition * ranks, partition)} & {*range(param.numel())}
        elif cell.engine == "zero 3":
            yield {*range(0, param.numel(), -(-param.numel() // ranks))}
        else:
            yield set()
        begin += param.numel()


class Rounded(Reference):
    def __init__(self, cell: Cell, ranks: int) -> None:
        super().__init__(model_for(cell.sharding))
        named = {name: param for name, param in self.model.named_parameters() if name in MATRICES}
        self.cuts = dict(zip(named, cuts_of(cell, named, ranks)))

    def round(self) -> None:
        for name in MATRICES:
            round_to_8_bits(self.state_of(name)["momentum_buffer"], self.cuts[name], BLOCK)

    def go(self, steps: range, ranks: int) -> None:
        for step in steps:
            self.step(shares(step, ranks), ranks)
            self.round()


def momenta(folder: str) -> dict[str, Tensor]:
    """In a checkpoint, whatever wrote it."""
    params = formats.read(Path(folder)).params
    return {name: params[name].states["momentum_buffer"].read() for name in MATRICES}


def check_momenta(folder: str, truth: Rounded) -> None:
    dist.barrier()
    for name, found in momenta(folder).items():
        assert found.dtype == torch.float32 and torch.equal(found, truth.state_of(name)["momentum_buffer"]), name


ON = [pytest.param(4 if cell.sharding == "hybrid" else 2, cell, id=name) for name, cell in CELLS.items()]


@pytest.mark.parametrize(("ranks", "cell"), ON, indirect=["ranks"])
@on_ranks()
def test_it_equals_rounding_the_momentum_of_one_process(cell: Cell, tmp_path: Path) -> None:
    """Its checkpoints have the momentum in fp32, to the bit, and go on as if there were no break; a run in fp32 takes
    them, and is taken, rounded."""
    with small_blocks():
        train_save_and_load(cell, str(tmp_path / "saved"))


@on_ranks(4)
def test_each_copy_of_hsdp_rounds_its_own(tmp_path: Path) -> None:
    """Copies that compute by themselves keep a momentum each, on the ranks of one of them."""
    with small_blocks():
        apart = Cell("fsdp2", sharding="hybrid", options={**INT8, "share_copies": False})
        train_save_and_load(apart, str(tmp_path / "saved"))


def train_save_and_load(cell: Cell, folder: str) -> None:
    ranks = dist.get_world_size()
    truth, in_fp32 = Rounded(cell, ranks), Cell(cell.engine, sharding=cell.sharding)
    with running(cell, model_for(cell.sharding)) as run:
        run.train(range(2))
        run.save(folder)
        truth.go(range(2), ranks)
        check_momenta(folder, truth)
        before = copy.deepcopy(truth)
        run.train(range(2, 4))
        truth.go(range(2, 4), ranks)
        assert largest_difference(run.weights(), truth.model) == 0.0
    with running(cell, model_for(cell.sharding)) as again:
        again.train(range(1))
        again.load(folder)
        again.save(f"{folder} again")
        check_momenta(f"{folder} again", before)
        again.train(range(2, 4))
        assert largest_difference(again.weights(), truth.model) == 0.0
        assert all(g["momentum_dtype"] == "int8" for g in again.optimizer.param_groups if g["rule"] == "muon")
    with running(in_fp32, model_for(cell.sharding)) as wide:
        wide.load(folder)
        wide.train(range(2, 3))
        before.step(shares(2, ranks), ranks)
        assert largest_difference(wide.weights(), before.model) == 0.0
        wide.save(f"{folder} wide")
        check_momenta(f"{folder} wide", before)
    with running(cell, model_for(cell.sharding)) as narrow:
        narrow.load(f"{folder} wide")
        narrow.save(f"{folder} narrow")
        before.round()
        check_momenta(f"{folder} narrow", before)
        narrow.train(range(3, 4))
        before.go(range(3, 4), ranks)
        assert largest_difference(narrow.weights(), before.model) == 0.0


# The rounding itself, with blocks of 256
FRAGMENTS = [  # a whole matrix, ranges of one that begin and end within rows, and a rectangle
    (600, Fragment(0, 0, 6000, 0)),
    (600, Fragment(0, 300, 2750, 0)),
    (600, Fragment(0, 610, 700, 0)),
    (5, Fragment(0, 2, 1000, 0)),
    (600, Fragment(0, 700, 1000, 0, 10, 600)),
]
SIZES = [1.0, 3e38, 1e-37, 1e-42, 1e-44, 0.0]  # normal, about to overflow, of subnormal codes, and subnormal


@pytest.mark.parametrize(("columns", "fragment"), FRAGMENTS)
def test_what_codes_stand_for_has_these_codes(columns: int, fragment: Fragment) -> None:
    """To the bit, of numbers of all sizes; each is as near as a code can be."""
    part = quantized.rows_in(fragment, columns)
    starts = range(fragment.start, fragment.start + fragment.runs * max(1, fragment.pitch), max(1, fragment.pitch))
    places = [start + at for start in starts[: fragment.runs] for at in range(fragment.stop - fragment.start)]
    blocks = torch.tensor([place // columns * columns + place % columns // 256 for place in places])
    numbers = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(0)).clamp(-1.1, 1.1)
    for size in SIZES:
        flat = numbers * size
        codes, scales = quantized.quantize(flat, part)
        assert quantized.part_nbytes(part) == codes.nbytes + scales.nbytes
        wide = quantized.dequantize(codes, scales, part)
        for block, scale in zip(blocks.unique(), scales, strict=True):
            here = blocks == block
            assert scale == flat[here].abs().max() == wide[here].abs().max()
            assert (flat - wide)[here].abs().max() <= scale.double() / 254 * (1 + 2**-20) + 2.0**-149
        again = quantized.quantize(wide, part)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_number_that_is_not_finite_is_nan(wrong: float) -> None:
    flat, part = torch.ones(600), quantized.rows_in(Fragment(0, 0, 600, 0), 600)
    flat[300] = wrong
    wide = quantized.dequantize(*quantized.quantize(flat, part), part)
    assert wide.isnan().tolist() == [256 <= place < 512 for place in range(600)]
    assert torch.equal(torch.stack(quantized.quantize(wide, part)[1:]).isnan(), torch.tensor([[False, True, False]]))


def test_matrices_in_a_batch_are_rounded_as_one_by_one() -> None:
    """Also in several views, and beside others of another shape or part."""
    shapes = [(4, 300), (4, 300), (3, 7), (4, 300)]
    atoms = [Atom(f"{number}", shape, 0) for number, shape in enumerate(shapes)]
    wholes = [Fragment(0, 0, rows * columns, 0) for rows, columns in shapes[:-1]]
    fragments = [*wholes, Fragment(0, 100, 1100, 0)]
    numbers = [random((part.numel,), seed) for seed, part in enumerate(fragments)]
    cut = [[each] if seed else list(each.view(4, 300).split(150, 1)) for seed, each in enumerate(numbers)]
    found = []
    for batches in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        state = quantized.QuantizedState(atoms, fragments.__getitem__)
        for _ in range(2):
            for batch in batches:
                of_batch = [Pieces(cut[atom], cut[atom], [{} for _ in cut[atom]]) for atom in batch]
                with state.opened(["momentum"], batch, of_batch) as (grads, _, states):
                    for grad, each in zip(grads, states, strict=True):
                        each["momentum"].lerp_(grad, 0.3)
        wide = [torch.empty_like(each) for each in numbers]
        for atom, into in enumerate(wide):
            state.copy_into([into], "momentum", atom)
        found.append(torch.cat(wide))
    assert found[0].count_nonzero() > 3000 and torch.equal(*found)


# Dtypes and ways of a run
def sharded(dtype: torch.dtype, **options: Any) -> tuple[nn.Module, LayerWiseOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 6, bias=False)).to(dtype)
    fully_shard(model, mesh=fsdp2.mesh_of())
    return model, LayerWiseOptimizer(model, include=["*"], **MUON, **INT8, report=False, **options)


def step_with(model: nn.Module, optimizer: LayerWiseOptimizer, grad: Tensor) -> Tensor:
    """The momentum after a step."""
    weight = model.get_parameter("0.weight")
    weight.grad = DTensor.from_local(fsdp2.distribute_like(grad, weight), weight.device_mesh, weight.placements)
    optimizer.step()
    momentum: Tensor = optimizer.state_dict()["state"][0]["momentum_buffer"].full_tensor()
    return momentum


@on_ranks(2)
def test_bf16_parameters_on_fsdp2_are_stepped_in_fp32() -> None:
    """Momentum, direction and step, which is rounded to the weight once, as with state_dtype float32."""
    model, optimizer = sharded(torch.bfloat16)
    weight, factors = fsdp2.weights_of(model)["0.weight"], random((6, 300), 1).bfloat16()
    momentum, (lr, decay) = torch.zeros(6, 300), MUON.values()
    for step in range(3):
        grad = factors * (step + 1)
        found = step_with(model, optimizer, grad)
        momentum.lerp_(grad.float(), 1 - 0.95)
        update = orthogonalized(grad.float().lerp(momentum, 0.95).bfloat16(), [SIMPLE] * 5).float()
        weight = (weight.float() * (1 - lr * decay)).add(update, alpha=-lr).bfloat16()
        round_to_8_bits(momentum)
        assert found.dtype == torch.float32 and torch.equal(found, momentum)
        assert torch.equal(fsdp2.weights_of(model)["0.weight"], weight)
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = momentum * 2  # whole, of which a rank takes its rows
    optimizer.load_state_dict(saved)
    found = optimizer.state_dict()["state"][0]["momentum_buffer"].full_tensor()
    assert torch.equal(found, momentum * 2)


@on_ranks(2)
def test_muonbps_steps_between_advance_the_same_momentum() -> None:
    """They update other matrices, each rank's own blocks."""
    runs = [sharded(torch.float32, block_period=period) for period in (1, 2)]
    for step in range(4):
        one, two = (step_with(*run, random((6, 300), step)) for run in runs)
        assert torch.equal(one, two)


@cells(ranks=[2], engine=["plain", "zero 0", "zero 2", "zero 3", "owned 1", "fsdp2"])
@on_ranks()
def test_what_changes_state_changes_what_is_kept_in_8_bits(engine: str, tmp_path: Path) -> None:
    """Another form of momentum, and a reset; a key that DeepSpeed would read as it is stored is refused by name."""
    cell, folder = CELLS[engine], str(tmp_path / "saved")
    truth = Rounded(cell, dist.get_world_size())
    with small_blocks(), running(cell, model_for("rows")) as run:
        run.train(range(1))
        truth.go(range(1), dist.get_world_size())
        optimizer = getattr(run.optimizer, "optimizer", run.optimizer)  # in DeepSpeed's wrapper
        change_momentum_form(optimizer, "sum")
        optimizer.reset_state("layers.2.weight")
        run.save(folder)
        for name in MATRICES:
            buffer = truth.state_of(name)["momentum_buffer"]
            buffer.copy_(convert_momentum(buffer, 0.95, source="ema", target="sum") * (name != "layers.2.weight"))
        truth.round()
        check_momenta(folder, truth)
        if engine == "zero 0":
            for unit, stepper in zip(optimizer._binding.units, optimizer._steppers.values()):
                of_unit = stepper.matrix_stepper
                held = [] if of_unit is None else of_unit.matrices.quantized.tensors()
                assert not held or sum(t.nbytes for t in held) == unit.plan.state_bytes[dist.get_rank()]
        if engine in ("zero 2", "owned 1"):
            with pytest.raises(ValueError, match="found 'momentum_buffer', kept in 8 bits by momentum_dtype"):
                safe_get_full_optimizer_state(run.model.get_parameter(MATRICES[0]), "momentum_buffer")


@cells(ranks=[2], engine=["plain", "fsdp2", "fsdp2, columns"])
@on_ranks()
def test_optimizer_state_shows_the_momentum_in_fp32(engine: str, tmp_path: Path) -> None:
    """Loops that trainers and users write over it move it, read it and change it, or raise."""
    cell = CELLS[engine]
    truth = Rounded(cell, dist.get_world_size())
    with small_blocks(), running(cell, model_for(cell.sharding)) as run:
        run.train(range(1))
        truth.go(range(1), dist.get_world_size())
        kept = [state for state in run.optimizer.state.values() if "momentum_buffer" in state]
        for state in run.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to("cpu")
        squares = torch.stack([local(state["momentum_buffer"]).double().square().sum() for state in kept]).sum()
        dist.all_reduce(squares)
        wanted = sum(truth.state_of(name)["momentum_buffer"].double().square().sum() for name in MATRICES)
        assert squares.item() == pytest.approx(float(wanted), rel=1e-12)
        for change in ("moved", "in place", "in a list", "assigned"):
            for state in kept:
                momentum = state["momentum_buffer"]
                if change == "in place":
                    momentum.mul_(-2)
                elif change == "in a list":
                    torch._foreach_mul_([momentum], 4.0)
                elif change == "assigned":
                    state["momentum_buffer"] = copy.deepcopy(momentum) * 0.25
            factor = {"moved": 1.0, "in place": -2.0, "in a list": 4.0, "assigned": 0.25}[change]
            for name in MATRICES:
                truth.state_of(name)["momentum_buffer"].mul_(factor)
            run.save(f"{tmp_path} {change}")
            check_momenta(f"{tmp_path} {change}", truth)
        (some, *_) = [state for state in kept if local(state["momentum_buffer"]).numel()]
        with pytest.raises(RuntimeError, match=r"'select' takes a part of state .* clone\(\) the whole first"):
            local(some["momentum_buffer"])[0].zero_()
        with pytest.raises(ValueError, match=r"'momentum_buffer': expected this rank's .* found \(3,\)"):
            some["momentum_buffer"] = torch.zeros(3)
        run.train(range(1, 2))
        truth.go(range(1, 2), dist.get_world_size())
        assert largest_difference(run.weights(), truth.model) == 0.0


# What is refused
def test_two_dtypes_of_one_momentum_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    given = {"lr": 0.02, "matrix": {"name": "normuon", **INT8}, "state_dtype": "float32"}
    found = "state_dtype is 'float32', but momentum_dtype of param group 0 .normuon. is 'int8'"
    with pytest.raises(ValueError, match=found):
        Given(given, None).decide(FSDP2Config, model)


def test_tensor_parallelism_under_deepspeed_is_refused() -> None:
    """Its shards of a matrix have no rows of the matrix."""
    group, layout = {"rule": "muon", **options_of("muon", {"lr": 0.02, **INT8})}, FlatPartition.build([8], 1)
    with pytest.raises(ValueError, match="momentum_dtype: expected None under tensor parallelism.*found 'int8'"):
        plan_group(group, [], layout, ZeROConfig(), MACHINES["cpu"], places=[(0, 0), (1, 0)])


@cells(ranks=[2], engine=["plain", "zero 1", "fsdp2"])
@on_ranks()
def test_another_momentum_dtype_in_a_run_is_refused(engine: str) -> None:
    with running(CELLS[engine], ExactLM()) as run:
        run.train(range(1))
        before = run.weights()
        run.optimizer.param_groups[0]["momentum_dtype"] = None
        with pytest.raises((ValueError, RuntimeError), match="expected 'int8', with which the optimizer was made"):
            run.train(range(1, 2))
        run.optimizer.param_groups[0]["momentum_dtype"] = "int8"
        assert largest_difference(run.weights(), before) == 0.0
