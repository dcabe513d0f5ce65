"""What ranks hold and send is what ``memory_report`` and ``traffic`` say, byte for byte: counted over live tensors, by
the allocator's own events, and in the tensors given to c10d."""

import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.plan.buffers.layout import Bucket
from lwopt_backend.plan.cost import MACHINES, RankMemory
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import ModelShapes
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.routing.routing import Route
from lwopt_backend.runtime.collectives import DONE, Pending, TorchCollectives
from tests.allocations import allocations, come_to_be, live_bytes, watched
from tests.cells import cells, with_full
from tests.engines import Cell, running
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.owned import optimizer_for, shares
from tests.ranks import RankPool, gathered

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PADDED, COMPACT = {"layout": "padded"}, {"layout": "compact"}
KEPT = {**COMPACT, "keep_full_grads": True}
KEPT_PADDED = {**PADDED, "keep_full_grads": True}


def backward(model: nn.Module, step: int = 0) -> None:
    model(*shares(step, dist.get_world_size())[dist.get_rank()]).backward()


def buckets_of(optimizer: LayerWiseOptimizer) -> list[Bucket]:
    return [bucket for held in optimizer.core.holdings for bucket in held.plan.buckets]


def padding_of(optimizer: LayerWiseOptimizer, itemsize: int) -> int:
    return sum(bucket.padding for bucket in buckets_of(optimizer)) * itemsize


def report_of(optimizer: LayerWiseOptimizer) -> RankMemory:
    return optimizer.memory_report()[dist.get_rank()]


HELD: list[dict[str, Any]] = [PADDED, COMPACT, {"layout": "auto"}, KEPT, KEPT_PADDED]
HELD += [{**COMPACT, "grad_dtype": "float32"}, {**PADDED, "overlap_grad_reduce": False}]
HELD_IN_TURN = [(3, ("bfloat16", "float32")[number % 2], options) for number, options in enumerate(HELD)]
INSTANCES = [(4, "bfloat16", {**PADDED, "group_size": size}) for size in (1, 2)]


@on_ranks()
@pytest.mark.parametrize(
    "ranks, dtype, options",
    with_full([*HELD_IN_TURN, *INSTANCES, (1, "bfloat16", KEPT)], itertools.product([1, 3], DTYPES, HELD)),
    indirect=["ranks"],
    ids=str,
)
@watched()
def test_what_is_held_is_what_is_reported(dtype: str, options: dict[str, Any]) -> None:
    """What construction, a backward pass, a step and the next backward pass add to this process's live tensors."""
    model = UnevenLM().to(DTYPES[dtype])
    trained = sum(param.nbytes for param in model.parameters())
    start = live_bytes() - trained
    optimizer = optimizer_for(model, **options)
    report, padding = report_of(optimizer), padding_of(optimizer, DTYPES[dtype].itemsize)
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
@pytest.mark.parametrize(("dtype", "options"), [("float32", PADDED), ("bfloat16", KEPT)], ids=str)
@watched()
def test_a_step_leaves_nothing_behind(dtype: str, options: dict[str, Any]) -> None:
    model = UnevenLM().to(DTYPES[dtype])
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

    def reduce_scatter(self: TorchCollectives, mine: Tensor, parts: Sequence[Tensor], whole: Tensor | None) -> Pending:
        mine.copy_(parts[self.rank])
        return DONE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCollectives, "reduce_scatter_parts", reduce_scatter)
        patch.setattr(TorchCollectives, "all_gather_parts", lambda self, parts, whole: DONE)
        patch.setattr(TorchCollectives, "start_all_reduce", lambda self, tensor: DONE)
        yield


@nothing_sent()
def peak_of_backward(optimizer: LayerWiseOptimizer, itemsize: int, kept: bool = False) -> int:
    """The most bytes that the allocator has held while a backward pass's gradients come, last parameter first. They are
    made beforehand and given by hand, so that nothing but the buckets allocates. The most and what is left are what is
    reported; of kept gradients, which are there before, small flags are not to be counted."""
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

    found, report = allocations(arrive, at_least=256 if kept else 16), report_of(optimizer)
    before = sum(bucket.numel for bucket in buckets_of(optimizer)) * itemsize if kept else 0
    assert before + found.left == report.gradients + report.padding - padding_of(optimizer, itemsize)
    assert found.peak == found.left + report.transient
    return found.peak


def peak_of(buckets: list[Bucket], rank: int, wire: int, owned: int) -> int:
    """The most bytes of gradients in one backward pass, if a bucket is full before the next one gets a gradient.

    Two buckets are under way while the next one fills. Bucket k takes b(k) bytes of buffer, f(k) = b(k) + o(k) under
    way, with o(k) those of this rank's part of it, and s(k) once it has come: o(k) in the owner's dtype. One rank's
    buffer is its own sum. The most is the largest, over all buckets k, of

        k comes         s(0) + .. + s(k - 1)  +  f(k) + f(k + 1)  +  b(k + 2)
        k has left      s(0) + .. + s(k - 2)  +  f(k - 1) + f(k)

    Where gradients travel narrower than they are stepped, s(k) in place of b(k) as well, once k has come.
    """
    ranks = len(buckets[0].parts)
    part = [bucket.parts[rank][1] - bucket.parts[rank][0] for bucket in buckets]
    b = [bucket.numel * wire for bucket in buckets] + [0, 0]
    s = [numel * owned for numel in part]
    f = [whole + (numel * wire if ranks > 1 else 0) for whole, numel in zip(b, part)] + [0]
    numbers = range(len(buckets))
    comes = [sum(s[:k]) + f[k] + f[k + 1] + b[k + 2] for k in numbers]
    has_left = [sum(s[: max(0, k - 1)]) + (f[k - 1] if k else 0) + f[k] for k in numbers]
    widened = [sum(s[: k + 1]) + part[k] * wire + f[k + 1] + b[k + 2] for k in numbers] if wire != owned else []
    return max(comes + has_left + widened)


def check_peak(dtype: str, layers: int, options: dict[str, Any]) -> None:
    """That many layers have a known peak; without any, a model has element-wise buckets, which stay open meanwhile."""
    itemsize, kept = DTYPES[dtype].itemsize, bool(options.get("keep_full_grads"))
    if not layers:
        peak_of_backward(optimizer_for(UnevenLM(), **options), itemsize, kept)
        return
    optimizer = optimizer_for(chain(layers).to(DTYPES[dtype]), include="*", **options)
    buckets = buckets_of(optimizer)
    assert all(bucket.kind == "matrix" for bucket in buckets)
    assert options["bucket_mb"] < 10.0 or len(buckets) == 1
    assert peak_of_backward(optimizer, itemsize) == peak_of(buckets, dist.get_rank(), itemsize, 4)
    if dist.get_world_size() == 1 and dtype == "float32":  # what came is kept as it is, nothing is copied
        assert report_of(optimizer).transient == 0


def chains(ranks: int, dtype: str, layout: str) -> list[tuple[int, str, int, dict[str, Any]]]:
    sizes = ((9, 0.001), (8, 0.02), (3, 10.0))
    return [(ranks, dtype, layers, {"layout": layout, "bucket_mb": size}) for layers, size in sizes]


IN_TURN = [(1, "float32", "padded"), (2, "bfloat16", "compact"), (3, "float32", "compact"), (4, "bfloat16", "padded")]
MODELS = [PADDED, COMPACT, {**COMPACT, "overlap_grad_reduce": False}, KEPT_PADDED, {**COMPACT, "group_size": 1}]
PEAKS = [*itertools.chain(*(chains(*row) for row in IN_TURN)), *((2, "float32", 0, options) for options in MODELS)]
MORE_PEAKS = [
    *itertools.chain(*(chains(*row) for row in itertools.product([1, 2, 3, 4], DTYPES, ["padded", "compact"]))),
    *((ranks, "float32", 0, options) for ranks in (1, 4) for options in MODELS),
]


@pytest.mark.parametrize("ranks, dtype, layers, options", with_full(PEAKS, MORE_PEAKS), indirect=["ranks"], ids=str)
def test_the_most_that_backward_holds_is_told(
    ranks: RankPool, dtype: str, layers: int, options: dict[str, Any]
) -> None:
    ranks.run(check_peak, dtype, layers, options)


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


# What is sent
class Watch(TorchDispatchMode):
    """Counts the bytes of every tensor that this process gives to c10d, by operation; flags, in int32, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = str(func._overloadpacket).split(".")[-1].strip("_")
            leaves = torch.utils._pytree.tree_leaves(args)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            self.nbytes[name] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return func(*args, **(kwargs or {}))


def given(buckets: list[Bucket], rank: int, g: int, p: int, across: bool) -> Counter[str]:
    """The bytes of a step's tensors by operation: buffers and this rank's parts of them, of ``g`` bytes an element to
    be summed and of ``p`` to be gathered, and the parts in fp32 ``across`` instances."""
    found: Counter[str] = Counter()
    for bucket in buckets:
        part = bucket.parts[rank][1] - bucket.parts[rank][0]
        if len(bucket.parts) > 1:
            found["reduce_scatter_base" if bucket.even else "reduce_scatter"] += (bucket.numel + part) * g
            found["allgather_base" if bucket.even else "broadcast"] += (bucket.numel + part * bucket.even) * p
        found["allreduce"] += part * 4 * across
    return found


SENT: list[tuple[int, str, dict[str, Any]]] = [
    (1, "float32", PADDED),
    (2, "bfloat16", COMPACT),
    (3, "float32", COMPACT),
    (3, "bfloat16", PADDED),
    (4, "float32", {"layout": "auto"}),
    (4, "float32", PADDED),
    (3, "bfloat16", {**COMPACT, "grad_dtype": "float32"}),
    (4, "bfloat16", {**COMPACT, "group_size": 1}),
    (3, "bfloat16", KEPT),
    (4, "float32", {**KEPT_PADDED, "group_size": 2}),
    (2, "float32", {**COMPACT, "overlap_param_gather": True}),
]


@pytest.mark.on_gloo  # whose collectives the profiler names
@on_ranks()
@pytest.mark.parametrize(
    "ranks, dtype, options",
    with_full(SENT, itertools.product([1, 2, 3, 4], DTYPES, [PADDED, COMPACT])),
    indirect=["ranks"],
    ids=str,
)
def test_a_step_sends_what_the_formulas_say(dtype: str, options: dict[str, Any]) -> None:
    """All ranks together (G - 1) (g + p) P bytes in each of n instances of G ranks, P elements with the padding, of g
    bytes as gradients, once more where all keep them, and p as parameters. A ring's all-reduce across instances sends
    2 (n - 1) / n of a tensor from each of n ranks. Counted in the second step."""
    model = UnevenLM().to(DTYPES[dtype])
    optimizer = optimizer_for(model, **options)
    with Watch() as watch:
        for number in range(2):
            before = Counter(optimizer.traffic())
            watch.nbytes.clear()
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    sent, seen = Counter(optimizer.traffic()) - before, watch.nbytes
    (held,) = optimizer.core.holdings
    n, group_size, itemsize = held.plan.instances, held.plan.group_size, DTYPES[dtype].itemsize
    rank, kept = held.sharers.instance.rank, options.get("keep_full_grads", False)
    wire = 4 if options.get("grad_dtype") == "float32" else itemsize
    assert +seen == +given(buckets_of(optimizer), rank, wire, itemsize + kept * wire, n > 1)
    across = 2 * seen["allreduce"] * (n - 1) // n
    assert across == pytest.approx(sent["across instances"], abs=len(held.plan.buckets))
    assert optimizer.memory_report()[rank].sent == sum(sent.values())
    assert options["layout"] == "auto" or (held.plan.padding > 0) == (options["layout"] == "padded")

    everyones = sum(gathered(sent), Counter())
    numel = sum(param.numel() for param in model.parameters()) + held.plan.padding
    g = wire * (2 if kept else 1)
    assert everyones["gradients"] == n * (group_size - 1) * g * numel
    assert everyones["parameters"] == n * (group_size - 1) * itemsize * numel
    assert everyones["across instances"] == pytest.approx(2 * (n - 1) * 4 * numel, rel=1e-3)


# A step's temporary memory: on every engine at most two buckets and one batch, however many matrices there are
WIDTH = 64
MATRIX = WIDTH * WIDTH  # elements
IN_A_BUCKET = 2  # matrices
BUCKET = 2 * IN_A_BUCKET * MATRIX * 2  # bytes: there and back in 16 bits, what a rank sends of it and what it receives
# One matrix: its direction and its update in fp32; of 16 bits the start of Newton-Schulz, X and its next, the Gram
# matrix and its polynomial; two fewer of 16 bits in torch 2.9. On a CPU a batch is one matrix.
BATCH = (2 * 4 + 5 * 2) * MATRIX
SMALL = 2048  # norms and flags
OWNED = ("owned 0", "owned 1", "owned 2", "plain")  # whose gradients are at their owners before


class Squares(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = chain(layers, WIDTH)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(rows) - targets).square().mean()


@nothing_sent()
def held_by_a_step(engine: str, layers: int, **given: Any) -> int:
    """The most bytes that a step allocates on top of what there was before it: the least of the third to the tenth.
    Where a machine is busy, the transport's thread may be the last to hold a buffer of the step before."""
    elements = IN_A_BUCKET * MATRIX
    options: dict[str, Any] = {"bucket_mb": elements * 4 / 2**20} if engine in OWNED else {"bucket_numel": elements}
    options = {} if engine == "fsdp2" else options  # it has as many in a bucket there
    options = given or options
    options |= {"policy": "balance"} if engine in ("zero 1", "zero 2") else {}
    with running(Cell(engine, options={"include": ["*"], **options}), Squares(layers)) as run:
        found: list[int] = []
        ours = getattr(run.optimizer, "optimizer", run.optimizer)
        step = ours.step

        def watched(*args: Any, **kwargs: Any) -> None:
            found.append(allocations(lambda: step(*args, **kwargs), at_least=256).peak)

        ours.step = watched
        for number in range(10):  # state comes to be in the first
            rows, targets = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number))
            run.step([(rows, targets)])
        return min(found[2:])


@pytest.mark.on_gloo  # the strict transport holds copies
@pytest.mark.parametrize("engine", [*OWNED, "zero 0", "zero 1", "zero 2", "zero 3", "fsdp2"])
@on_ranks(2)
def test_a_step_holds_two_buckets_and_a_batch(engine: str) -> None:
    few, many = (held_by_a_step(engine, layers) for layers in (16, 32))
    assert few == many, "nothing grows with the model"
    most = BATCH + SMALL + (0 if engine in OWNED else 2 * BUCKET)
    assert BATCH - 4 * MATRIX - SMALL <= few <= most, few / MATRIX


def planned_for_a_step(engine: str, layers: int, **options: Any) -> int:
    """The bytes that this rank needs in a step, as ``lwopt plan`` prints them."""
    kind = "owned" if engine in OWNED else engine.replace(" ", "")
    options |= {"policy": "balance"} if kind in ("zero1", "zero2") else {}
    setting = Setting.of(kind, MACHINES["cpu"], options)
    shapes = [(name, tuple(param.shape)) for name, param in Squares(layers).named_parameters()]
    routes = [Route(name, shape, "matrix", "2-D weight") for name, shape in shapes]
    model = ModelShapes("squares", *setting.training.of(routes))
    memory = plan_study(model, Deployment(dist.get_world_size()), setting).worst.memory()[dist.get_rank()]
    return memory.workspace + memory.exchange


@pytest.mark.on_gloo  # the strict transport holds copies
@cells(
    ranks=[2, 3],
    engine=["plain", "owned 1", "zero 1", "zero 2", "zero 3", "fsdp2"],
    layers=[9, 16],
    limit=[None, 2 * MATRIX],
)
@on_ranks()
def test_a_step_needs_no_more_than_its_plan_prints(engine: str, layers: int, limit: int | None) -> None:
    """With the buckets of the defaults, and with small ones."""
    options = {"report": False} if limit is None else {"bucket_numel": limit}
    if engine in OWNED:
        options = {"report": False} if limit is None else {"bucket_mb": limit * 4 / 2**20}
    planned = planned_for_a_step(engine, layers, **{key: options[key] for key in options if key != "report"})
    held = held_by_a_step(engine, layers, **options)
    assert planned / 4 < held <= planned + SMALL, (held / MATRIX, planned / MATRIX)
