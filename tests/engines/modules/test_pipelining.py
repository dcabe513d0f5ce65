"""torch.distributed.pipelining, with several micro-batches in a step, trains as one process does."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.optimizer import PlainOptimizer
from tests.support.cells import cells
from tests.support.engines import Rounded, exact
from tests.support.fsdp2 import whole
from tests.support.models import VOCABULARY, batch
from tests.support.on_ranks import on_ranks
from tests.support.plain import step_all
from tests.support.references import ADAMW, MUON, torchs

WIDTH, MICRO_BATCHES, ROWS, CLIP = 24, 4, 2, 0.05
SCHEDULES: dict[str, Any] = {"1F1B": Schedule1F1B}
INTERLEAVED = {"interleaved": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}


class Stage(nn.Module):
    """One of ``count``: the first begins with a table of embeddings, the last ends with one, and the second has no
    matrix."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first, self.last = number == 0, number == count - 1
        wide = [nn.Linear(WIDTH, 31 + number), nn.GELU(), nn.Linear(31 + number, WIDTH)]
        self.layers = nn.Sequential(*(wide if number != 1 else []), nn.LayerNorm(WIDTH))
        self.table = nn.Embedding(VOCABULARY, WIDTH) if self.first or self.last else None
        exact(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.table(x) if self.first else x)
        return functional.linear(x, Rounded.apply(self.table.weight)) if self.last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@functools.cache
def mesh_of(data: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // data, data), mesh_dim_names=("pp", "dp"))


@functools.cache
def ends_of(data: int) -> Any:
    """The ranks of the first and of the last stage. Called on all ranks."""
    return dist.new_group(mesh_of(data).mesh[[0, -1]].flatten().tolist())


def optimizer_of(model: Any, **options: Any) -> LayerWiseOptimizer:
    adamw = {"name": "adamw", **ADAMW}
    return LayerWiseOptimizer(model, **MUON, elementwise=adamw, allow_no_matrix=True, report=False, **options)


class Pipeline:
    """This rank's stages of one of ``data`` pipelines, with optimizers of their own or ``joined``; and all stages on
    one process, which they must equal. The two tables may be ``tied``."""

    def __init__(self, schedule: str, data: int, tied: bool, storage: str, joined: bool) -> None:
        self.mesh, self.data = mesh_of(data), data
        place, length, dp = self.mesh.get_local_rank("pp"), self.mesh.size(0), self.mesh["dp"]
        self.count = length * (1 + (schedule in INTERLEAVED))
        self.stages = {number: Stage(number, self.count) for number in range(place, self.count, length)}
        self._make_alone(tied)
        made = dict[str, Any](dict.fromkeys([*map(str, range(self.count)), *["table"] * tied]))
        tables = [stage.table for stage in self.stages.values() if stage.table is not None] if tied else []
        for stage in self.stages.values() if storage != "owned" else ():
            fully_shard(stage, mesh=dp, ignored_params={table.weight for table in tables})
        where = {"process_group": dp.get_group()} if storage == "owned" else {}
        models = {str(number): stage.layers if tied else stage for number, stage in self.stages.items()}
        for named in [{name: model} for name, model in models.items()] if joined else [models]:
            made[min(named)] = optimizer_of([*named.values()], **where)
        ends = ends_of(data)
        for table in tables:
            table.weight.register_hook(lambda grad: 2 * grad)  # the mean over two stages becomes their sum
            made["table"] = optimizer_of(table, process_group=ends)
        self.joined = ModuleOptimizers(made) if joined else None
        self.optimizers = {name: optimizer for name, optimizer in made.items() if optimizer is not None}
        group, device = self.mesh["pp"].get_group(), torch.device("cpu")
        stages = [PipelineStage(s, number, self.count, device, group=group) for number, s in self.stages.items()]
        given = stages if schedule in INTERLEAVED else stages[0]
        self.schedule = (SCHEDULES | INTERLEAVED)[schedule](given, MICRO_BATCHES, loss_fn=loss_of)

    def _make_alone(self, tied: bool) -> None:
        self.alone = nn.ModuleList(Stage(number, self.count) for number in range(self.count))
        first, last = self.alone[0], self.alone[-1]
        if tied:
            last.table = first.table
        if tied and self.count - 1 in self.stages:
            self.stages[self.count - 1].table.weight.data.copy_(first.table.weight)
        params = dict(self.alone.named_parameters())
        matrices = [name for name, param in params.items() if param.ndim == 2 and "table" not in name]
        self.alone_optimizers = torchs(params, matrices)

    def step(self, step: int, *, reduced_once: bool = True) -> None:
        owned = [optimizer for optimizer in self.optimizers.values() if isinstance(optimizer, PlainOptimizer)]
        with ExitStack() as contexts:
            for optimizer in ([self.joined] if self.joined is not None else owned) if reduced_once else []:
                contexts.enter_context(optimizer.no_sync())
            self.backward(step)
        self.backward_alone(step)
        norm = self.clip() if self.joined is None else self.joined.clip_grad_norm_(CLIP)
        true_norm = torch.cat([param.grad.flatten() for param in self.alone.parameters()]).double().norm()
        assert norm.item() == pytest.approx(true_norm.item(), rel=1e-6)
        torch._foreach_mul_([param.grad for param in self.alone.parameters()], torch.clamp(CLIP / (norm + 1e-6), max=1))
        step_all([*self.optimizers.values()] if self.joined is None else [self.joined])
        step_all(self.alone_optimizers)

    def backward(self, step: int) -> None:
        rows = batch(step, self.data * MICRO_BATCHES * ROWS)
        tokens, targets = (each.chunk(self.data)[self.mesh.get_local_rank("dp")] for each in rows)
        given = [tokens] if 0 in self.stages else []
        self.schedule.step(*given, **({"target": targets} if self.count - 1 in self.stages else {}))

    def backward_alone(self, step: int) -> None:
        count = self.data * MICRO_BATCHES
        for x, targets in zip(*(each.chunk(count) for each in batch(step, count * ROWS))):
            for stage in self.alone:
                x = stage(x)
            loss_of(x, targets).backward()
        torch._foreach_div_([param.grad for param in self.alone.parameters()], count)

    def clip(self) -> Tensor:
        """As a user does it without ``ModuleOptimizers``: a tied table counts in the first stage."""
        norms = {name: optimizer.grad_norm().double() for name, optimizer in self.optimizers.items()}
        if 0 not in self.stages:
            norms.pop("table", None)
        squares = torch.stack([*norms.values()]).square().sum()
        dist.all_reduce(squares, group=self.mesh["pp"].get_group())
        for optimizer in self.optimizers.values():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grads_with_norm_(params, CLIP, squares.sqrt().float())
        return squares.sqrt().float()

    def check(self) -> None:
        for number, stage in self.stages.items():
            expected = dict(self.alone[number].named_parameters())
            for name, param in stage.named_parameters():
                assert torch.equal(whole(param), expected[name]), (number, name)


@on_ranks(4)
@cells(
    lambda schedule, tied, storage, **others: schedule != "zero bubble" or (storage != "owned" and not tied),
    schedule=[*SCHEDULES, *INTERLEAVED],
    data=[1, 2],
    tied=[False, True],
    storage=["owned", "FSDP2"],
    joined=[False, True],
)
def test_stages_equal_one_process(schedule: str, data: int, tied: bool, storage: str, joined: bool) -> None:
    """Clipped by one norm. Gradients are reduced once a step, after the last micro-batch, and divided by their number
    before; or after every micro-batch."""
    run = Pipeline(schedule, data, tied, storage, joined)
    for step in range(3):
        run.step(step, reduced_once=tied or step != 1)
    run.check()
