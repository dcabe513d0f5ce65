"""What ranks hold and send is what ``memory_report`` and ``traffic`` say, byte for byte: counted over live tensors, by
the allocator's own events, and by formulas. That plans say it too: rehearsals, and test_planned.py."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.plan.buffers.layout import Bucket
from lwopt_backend.plan.cost import MACHINES, RankMemory
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import ModelShapes
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route
from lwopt_backend.runtime.collectives import DONE, Pending, TorchCollectives
from tests.support.allocations import allocations, come_to_be, live_bytes, watched
from tests.support.engines import OWNED as UNDER_DEEPSPEED
from tests.support.engines import ZERO, Cell, running
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.plain import optimizer_for, shares
from tests.support.ranks import RankPool, gathered

FP32, BF16 = torch.float32, torch.bfloat16
PADDED, COMPACT = {"layout": "padded"}, {"layout": "compact"}
KEPT = {**COMPACT, "keep_full_grads": True}
KEPT_PADDED = {**PADDED, "keep_full_grads": True}
WIDE = {**COMPACT, "grad_dtype": "float32"}


def backward(model: nn.Module, step: int = 0) -> None:
    model(*shares(step, dist.get_world_size())[dist.get_rank()]).backward()


def buckets_of(optimizer: LayerWiseOptimizer) -> list[Bucket]:
    return [bucket for held in optimizer.core.planned_sets for bucket in held.plan.buckets]


def padding_of(optimizer: LayerWiseOptimizer, dtype: torch.dtype) -> int:
    return sum(bucket.padding for bucket in buckets_of(optimizer)) * dtype.itemsize


HELD: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    *((3, BF16, options) for options in (PADDED, KEPT_PADDED, WIDE)),
    *((3, FP32, options) for options in (COMPACT, KEPT, {**PADDED, "overlap_grad_reduce": False})),
    *((4, BF16, {**PADDED, "group_size": size}) for size in (1, 2)),
    (1, BF16, KEPT),
]


@on_ranks()
@pytest.mark.parametrize("ranks, dtype, options", HELD, indirect=["ranks"], ids=str)
@watched()
def test_what_is_held_is_what_memory_report_says(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """What construction, a backward pass, a step and the next backward pass add to this process's live tensors."""
    model = UnevenLM().to(dtype)
    trained = sum(param.nbytes for param in model.parameters())
    start = live_bytes() - trained
    optimizer = optimizer_for(model, **options)
    report, padding = optimizer.memory_report()[dist.get_rank()], padding_of(optimizer, dtype)
    between = trained + padding + report.masters + report.state
    kept = trained + padding if options.get("keep_full_grads") else 0
    assert report.parameters == trained
    assert not kept or report.gradients + report.padding - padding == kept
    assert come_to_be(between + kept, start) == between + kept
    for step in range(2):
        backward(model, step)
        optimizer.grad_norm()
        assert come_to_be(report.long_lived, start) == report.long_lived
        optimizer.step()
        assert come_to_be(between + kept, start) == between + kept
        optimizer.zero_grad()
    assert between + report.gradients + report.padding - padding == report.long_lived
    state = [tensor for state in optimizer.state_dict()["state"].values() for tensor in state.values()]
    assert sum(box.nbytes for tensor in state for box in tensor.boxes.values()) == report.masters + report.state


@on_ranks(2)
@pytest.mark.parametrize(("dtype", "options"), [(FP32, PADDED), (BF16, KEPT)], ids=str)
@watched()
def test_a_step_leaves_nothing_behind(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Nor anything that only the garbage collector frees."""
    model = UnevenLM().to(dtype)
    optimizer, found = optimizer_for(model, **options), set()
    gc.disable()
    try:
        for step in range(3):
            backward(model, step)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.add(live_bytes(collect=False))
    finally:
        gc.enable()
    assert len(found) == 1


# The most that is held, by the allocator's events
def chain(layers: int, width: int = 40) -> nn.Module:
    """Square matrices alone, each a separate bucket or several together; no other gradients."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Bucket collectives that give a rank its own share and allocate nothing: gloo copies what it reduces."""

    def reduce_scatter(self: TorchCollectives, mine: Tensor, buffer: Tensor, owned: Any) -> Pending:
        if len(mine):
            starts = {rank: start for rank, start, _ in owned or ()}
            mine.copy_(buffer.narrow(0, starts.get(self.rank, self.rank * len(mine)), len(mine)))
        return DONE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCollectives, "reduce_scatter_parts", reduce_scatter)
        patch.setattr(TorchCollectives, "all_gather_parts", lambda self, buffer, owned: DONE)
        patch.setattr(TorchCollectives, "start_all_reduce", lambda self, tensor: DONE)
        yield


PEAKS: list[tuple[int, torch.dtype, int, dict[str, Any]]] = [  # layers of a chain; without any, a model
    *((ranks, dtype, 9, {**PADDED, "bucket_mb": 0.001}) for ranks, dtype in ((1, FP32), (4, BF16))),
    *((ranks, dtype, 8, {**COMPACT, "bucket_mb": 0.02}) for ranks, dtype in ((2, BF16), (3, FP32))),
    (2, BF16, 3, {**COMPACT, "bucket_mb": 10.0}),
    *((2, FP32, 0, options) for options in (PADDED, {**COMPACT, "group_size": 1}, KEPT_PADDED)),
    (2, FP32, 0, {**COMPACT, "overlap_grad_reduce": False}),
]


@on_ranks()
@pytest.mark.parametrize("ranks, dtype, layers, options", PEAKS, indirect=["ranks"], ids=str)
@nothing_sent()
def test_the_most_that_backward_holds_is_what_memory_report_says(
    dtype: torch.dtype, layers: int, options: dict[str, Any]
) -> None:
    """Gradients come last parameter first. They are made beforehand and given by hand, so that nothing but the buckets
    allocates. Of kept gradients, which are there before, small flags are not to be counted."""
    kept = bool(options.get("keep_full_grads"))
    model = chain(layers).to(dtype) if layers else UnevenLM()
    optimizer = optimizer_for(model, include="*" if layers else (), **options)
    manager = optimizer.core.manager
    grads = [torch.ones_like(param) for param in manager.params]

    def arrive() -> None:
        for index in reversed(range(len(grads))):
            manager.params[index].grad = grads[index]
            manager.arrived(index)
        manager.end_backward()
        manager.finish()
        for _ in manager.settled():
            pass

    found = allocations(arrive, at_least=256 if kept else 16)
    report = optimizer.memory_report()[dist.get_rank()]
    before = sum(bucket.numel for bucket in buckets_of(optimizer)) * dtype.itemsize if kept else 0
    assert before + found.left == report.gradients + report.padding - padding_of(optimizer, dtype)
    assert found.peak == found.left + report.transient
    if dist.get_world_size() == 1:  # what came is kept as it is, nothing is copied
        assert report.transient == 0


def save_wide(folder: str) -> None:
    optimizer_for(chain(6, 256), include="*").save_state_dict(folder)


def allocated_by_loading(folder: str) -> tuple[int, int]:
    optimizer = optimizer_for(chain(6, 256), include="*")
    found = allocations(lambda: optimizer.load_state_dict_from(folder))
    return found.peak, optimizer.memory_report()[0].state


def test_loading_maps_one_file_at_a_time(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A mapped file counts as allocated; a third of the state lies in each of the three, and is copied nowhere else."""
    rank_pools[3].run(save_wide, str(tmp_path))
    ((peak, state),) = rank_pools[1].run(allocated_by_loading, str(tmp_path))
    assert state == 6 * 256 * 256 * 4 and peak < 0.35 * state


# What is sent. That it is what the transport carries: rehearsals
SENT: list[tuple[int, torch.dtype, dict[str, Any]]] = [
    (1, FP32, PADDED),
    (3, FP32, COMPACT),
    (3, BF16, PADDED),
    (3, BF16, WIDE),
    (4, BF16, {**COMPACT, "group_size": 1}),
    (4, FP32, {**KEPT_PADDED, "group_size": 2}),
    (2, FP32, {**COMPACT, "overlap_param_gather": True}),
]


@on_ranks()
@pytest.mark.parametrize("ranks, dtype, options", SENT, indirect=["ranks"], ids=str)
def test_traffic_is_what_the_formulas_say(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """All ranks together (G - 1) (g + p) P bytes in each of n instances of G ranks, P elements with the padding, of g
    bytes as gradients, once more where all keep them, and p as parameters. A ring's all-reduce across instances sends
    2 (n - 1) / n of a tensor from each of n ranks. Counted in the second step."""
    model = UnevenLM().to(dtype)
    optimizer = optimizer_for(model, **options)
    for number in range(2):
        before = Counter(optimizer.traffic())
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    sent = Counter(optimizer.traffic()) - before
    (held,) = optimizer.core.planned_sets
    n, group_size = held.plan.instances, held.plan.group_size
    assert optimizer.memory_report()[held.rank_groups.instance.rank].sent == sum(sent.values())
    everyones = sum(gathered(sent), Counter())
    numel = sum(param.numel() for param in model.parameters()) + held.plan.padding
    wire = 4 if options.get("grad_dtype") == "float32" else dtype.itemsize
    g = wire * (2 if options.get("keep_full_grads") else 1)
    assert everyones["gradients"] == n * (group_size - 1) * g * numel
    assert everyones["parameters"] == n * (group_size - 1) * dtype.itemsize * numel
    assert everyones["across instances"] == pytest.approx(2 * (n - 1) * 4 * numel, rel=1e-3)


# A step's temporary memory: on every engine two buckets and one batch, however many matrices there are
WIDTH = 64
MATRIX = WIDTH * WIDTH  # elements
AT_OWNERS = ("plain", *UNDER_DEEPSPEED)  # their gradients, before the step


class Squares(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = chain(layers, WIDTH)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(rows) - targets).square().mean()


def sizes(engine: str) -> dict[str, Any]:
    """Two matrices in a bucket; FSDP2 has as many by itself."""
    if engine in AT_OWNERS:
        return {"bucket_mb": 2 * MATRIX * 4 / 2**20}
    travels = {"policy": "balance"} if engine in ("zero 1", "zero 2") else {}
    return {} if engine == "fsdp2" else {"bucket_numel": 2 * MATRIX, **travels}


@nothing_sent()
def held_by_steps(engine: str, layers: int) -> list[int]:
    """The most bytes that steps allocate on top of what there was before: the least of four steps, and of the next
    four. Where a machine is busy, the transport's thread may be the last to hold a buffer of the step before."""
    with running(Cell(engine, options={"include": ["*"], **sizes(engine)}), Squares(layers)) as run:
        found: list[int] = []
        ours = getattr(run.optimizer, "optimizer", run.optimizer)
        step = ours.step

        def watched(*args: Any, **kwargs: Any) -> None:
            found.append(allocations(lambda: step(*args, **kwargs), at_least=1024).peak)  # flags are smaller

        ours.step = watched
        for number in range(10):  # state comes to be in the first
            rows, targets = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number))
            run.step([(rows, targets)])
        return [min(found[2:6]), min(found[6:])]


def planned_for_a_step(engine: str, layers: int) -> RankMemory:
    """What this rank needs, as ``lwopt plan`` prints it."""
    kind = "plain" if engine in AT_OWNERS else engine.replace(" ", "")
    setting = Setting.of(kind, MACHINES["cpu"], sizes(engine))
    shapes = [(name, tuple(param.shape)) for name, param in Squares(layers).named_parameters()]
    routes = [Route(name, shape, "matrix", "2-D weight") for name, shape in shapes]
    model = ModelShapes("squares", *setting.training.of(routes))
    return plan_study(model, Deployment(dist.get_world_size()), setting).worst.memory()[dist.get_rank()]


@pytest.mark.on_gloo  # the strict transport holds copies
@pytest.mark.parametrize("engine", [*AT_OWNERS, *ZERO, "fsdp2"])
@on_ranks(2)
def test_step_holds_what_its_plan_says(engine: str) -> None:
    """A step holds what its plan says, whatever the model and however often. By the plan, at most one batch and the
    buckets. At the least, what an iteration of Newton-Schulz needs at once: the direction in fp32, and in 16 bits X,
    A = X X^T, b A + c A^2 and the next X. What products take for themselves comes on top, and depends on the CPU: those
    of 16 bits take some with AVX-512."""
    x = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    products = [lambda: x @ x.mT, lambda: torch.addmm(x, x, x.mT)]
    taken = max(allocations(each, at_least=1024).peak for each in products) - x.nbytes
    (held,) = {nbytes for layers in (16, 32) for nbytes in held_by_steps(engine, layers)}
    if engine != "zero 0":  # which lwopt plan does not plan
        planned = planned_for_a_step(engine, 16)
        assert (4 + 4 * 2) * MATRIX <= held <= planned.workspace + planned.exchange + taken, taken
