"""``block_period``: MuonBP, arXiv 2510.16981, on ranks against one process that is told the ranks' blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lwopt_backend import LayerWiseOptimizer
from tests.engines.zero.test_tensor_parallel import FUSED, ShardedLM, sharded_engine
from tests.engines.zero.test_tensor_parallel import MATRICES as OF_SHARDED
from tests.support.counted import Counted
from tests.support.fsdp2 import EVEN, MATRIX_NAMES, BesideTwin, named, shard_rows
from tests.support.models import MATRICES, UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.ranks import gathered
from tests.support.references import MUON
from tests.support.zero import ROWS, Beside, Reference, build, engine_for, settings_for
from tests.unit.cli.test_cli import run as lwopt

PERIOD, SCALE = 3, 0.5
OPTIONS = {"block_period": PERIOD, "block_lr_scale": SCALE}
Box = tuple[slice, ...]


class MuonBP:
    """Algorithm 1 of the paper, with torch.optim.Muon's momentum and factor by shape, on whole matrices.

    Every ``PERIOD``-th step, beginning with the first, orthogonalizes the matrix, at ``lr``; those between its blocks,
    at ``SCALE`` times ``lr``.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], blocks: Sequence[Sequence[Box]], matrices: Sequence[Box] = ()
    ) -> None:
        """``matrices`` are parts of their parameters, by default all of them."""
        self.params, self.blocks, self.taken = params, blocks, 0
        self.matrices = matrices or [(slice(None),) for _ in params]
        self.momenta = [torch.zeros_like(param) for param in params]
        self.state = {param: {"momentum_buffer": momentum} for param, momentum in zip(params, self.momenta)}
        self.param_groups: list[dict[str, Any]] = [{**MUON}]

    @torch.no_grad()
    def step(self) -> None:
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        for param, momentum, blocks, matrix in zip(self.params, self.momenta, self.blocks, self.matrices):
            momentum.lerp_(param.grad, 0.05)
            direction = param.grad.lerp(momentum, 0.95)
            whole = self.taken % PERIOD == 0 or len(blocks) == 1
            for box in [matrix] if whole else blocks:
                rate = lr if whole else SCALE * lr
                block = nn.Parameter(param[box].clone())
                block.grad = direction[box].clone()
                torch.optim.Muon([block], lr=rate, weight_decay=decay, momentum=0.0, nesterov=False).step()
                param[box] = block
        self.taken += 1

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def blocks_of(model: nn.Module) -> dict[str, list[Box]]:
    """Every rank's box of each matrix, by torch's own function; copies once."""
    mine: dict[str, tuple[Any, Any]] = {}
    for name, param in named(model):
        if isinstance(param, DTensor):
            mine[name] = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    found: dict[str, list[Box]] = {}
    for name in MATRIX_NAMES:
        boxes = dict.fromkeys(box for of_rank in gathered(mine) if 0 not in (box := of_rank[name])[0])
        found[name] = [tuple(slice(o, o + size) for o, size in zip(offset, shape)) for shape, offset in boxes]
    return found


def beside_twin(sharding: str, **options: Any) -> BesideTwin:
    run = BesideTwin(sharding, **{**OPTIONS, **options})
    names = [name for name in run.twin.params if name in MATRIX_NAMES]
    blocks = blocks_of(run.model)
    run.twin.optimizers[0] = MuonBP([run.twin.params[name] for name in names], [blocks[name] for name in names])
    return run


def train(run: BesideTwin, steps: range) -> None:
    for step in steps:
        run.backward(step)
        run.update()


@pytest.mark.parametrize("sharding", ["rows", "hybrid", "columns", "tensor parallel"])
@on_ranks(4)
def test_muonbp_on_fsdp2_equals_one_process(sharding: str) -> None:
    """MuonBP on FSDP2 equals one process, and blocks do not travel."""
    run = beside_twin(sharding, bucket_matrices=1)
    planned = sum(stepper.plan.wire_bytes()[stepper.collectives.rank] for stepper in run.optimizer._steppers)
    assert sum(gathered(planned)) > 0
    for step in range(PERIOD + 2):
        with Counted() as counted:
            run.backward(step)
            run.update()
        assert counted.sent_bytes == (planned if step % PERIOD == 0 else 0)
        run.check()


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(4)
def test_muonbp_resumes_within_the_block_period(tmp_path: Path, flat: bool) -> None:
    """MuonBP resumes within the block period on another sharding. From rows to columns, after the second of three
    steps, so that one more in blocks follows."""
    run, other = beside_twin("rows", sharded=shard_rows(UnevenLM(hidden=EVEN))), beside_twin("columns")
    old, new = run.twin.optimizers[0], other.twin.optimizers[0]
    assert old.blocks != new.blocks
    train(run, range(2))
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved, loaded = (get_state_dict(each.model, each.optimizer, options=how) for each in (run, other))
    dcp.save(dict(zip("mo", saved)), checkpoint_id=tmp_path)
    dcp.load(dict(zip("mo", loaded)), checkpoint_id=tmp_path)
    set_state_dict(other.model, other.optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1], options=how)
    old.blocks, other.twin = new.blocks, run.twin
    train(other, range(2, 2 * PERIOD))
    other.check()


def flat_blocks(params: Sequence[nn.Parameter], stage: int) -> list[list[Box]]:
    """The two ranks' blocks of ZeRO: rows above and below a cut between rows. None where it is inside a row."""
    total, begin, found = sum(param.numel() for param in params), 0, []
    for param in params:
        cut = param.numel() // 2 if stage == 3 else -(-total // 4) * 2 - begin
        row, inside = divmod(cut, param.shape[1])
        parted = not inside and 0 < row < param.shape[0]
        found.append([(slice(0, row),), (slice(row, None),)] if parted else [(slice(None),)])
        begin += param.numel()
    return found


@pytest.mark.parametrize(("stage", "parted"), [(1, [1, 2, 1, 1]), (2, [1, 2, 1, 1]), (3, [2, 1, 2, 2])])
@on_ranks(2)
def test_muonbp_on_zero_has_blocks_where_pieces_are_rows(tmp_path: Path, stage: int, parted: list[int]) -> None:
    """Whole matrices in the first step, blocks in the second, and after a load, in the third."""
    settings = settings_for("zero", stage, rows=ROWS // 2, **OPTIONS)
    single = Reference(UnevenLM(hidden=(60, 37)))
    params = [single.model.get_parameter(name) for name in MATRICES]
    blocks = flat_blocks(params, stage)
    assert [*map(len, blocks)] == parted
    single.optimizers[0] = MuonBP(params, blocks)
    Beside(single, settings).train_and_resume(lambda: engine_for(settings, UnevenLM(hidden=(60, 37))), tmp_path)


@on_ranks(2)
def test_muonbp_on_zero_0_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 at stage 0, where every rank stores whole matrices"):
        build(settings_for("zero", 0, **OPTIONS))


@pytest.mark.usefixtures("ranks_to_spoil")
@on_ranks(2)
def test_muonbp_of_tensor_parallel_shards_under_deepspeed(tmp_path: Path) -> None:
    """By rows, by columns, of both matrices in a fused weight; and copies, which are whole."""
    settings = settings_for("zero", 1, atoms=FUSED, **OPTIONS)
    single = Reference(ShardedLM(), matrices=OF_SHARDED)
    rows = {"up": [(0, 68)], "mix": [(0, 24)], "gated": [(0, 28), (28, 56)], "down": [(0, 24)], "out": [(0, 24)]}
    params, blocks, matrices = [], list[list[Box]](), list[Box]()
    for name, of_param in rows.items():
        for start, stop in of_param:
            params.append(single.model.get_parameter(f"{name}.weight"))
            half, columns = (start + stop) // 2, params[-1].shape[1]
            matrices.append((slice(start, stop),))
            by_rows: list[Box] = [(slice(start, half),), (slice(half, stop),)]
            by_columns: list[Box] = [(slice(None), slice(columns // 2)), (slice(None), slice(columns // 2, None))]
            blocks.append({"mix": matrices[-1:], "down": by_columns, "out": by_columns}.get(name, by_rows))
    single.optimizers[0] = MuonBP(params, blocks, matrices)
    Beside(single, settings).train_and_resume(lambda: sharded_engine(settings), tmp_path)


REFUSED = {
    "hyperball": {"hyperball": True, "weight_decay": 0.0},
    "precondition and per_head": {"precondition": "muoneq_r", "per_head": True},
    "the second moments of NorMuon": {"matrix": "normuon"},
    "expected 1 without block_period": {"block_period": 1},
    'plain PyTorch and DeepSpeed with "storage": "owned" keep every matrix whole': {},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_muonbp_combinations_that_are_refused(reason: str) -> None:
    """MuonBP with what no publication combines is refused, and owned storage too."""
    with pytest.raises(ValueError, match=reason):
        LayerWiseOptimizer(nn.Linear(8, 8), **{"matrix": "muon", **OPTIONS, "lr": 0.02, **REFUSED[reason]})


def test_lwopt_plan_says_what_muonbp_sends_between_whole_steps(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([["layers.0.w", [64, 32]], ["layers.1.w", [64, 32]], ["small.w", [1, 32]]]))
    rule = f"matrix={json.dumps({'name': 'muon', 'block_period': 5})}"
    words = ("plan", "--shapes", shapes, "--world-size", 4, "--option", rule, "--engine")
    said = " ".join(lwopt(*words, "fsdp2").split())
    assert "in 4 of 5 steps each rank updates its own block of 2 of 3 matrices, without traffic" in said
    assert "Such a step sends 0 B from the busiest rank, a step of whole matrices" in said
    said = " ".join(lwopt(*words, "zero3").split())
    assert "own block of 2 of 3 matrices, without traffic; 1 cut inside a row are updated whole" in said
