"""The order of work on streams, on a GPU that is not there: every engine's own code makes none of the faults that the
sanitizer finds, and the sanitizer finds each kind of fault."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.torch_version import TorchVersion

from benchmarks.rehearsal import engines
from benchmarks.rehearsal.absent_gpu import DEVICE, absent_gpu, pretended, replaced
from benchmarks.rehearsal.engines import ENGINES, MeshEngine, ModulesEngine, Passes, PlainEngine, ReplicatedEngine
from benchmarks.rehearsal.streams import StreamCheck
from lwopt_backend.engines.buffers.state import gathered
from lwopt_backend.engines.fsdp2.plan import local
from lwopt_backend.rules import Muon
from lwopt_backend.runtime import collectives
from lwopt_backend.runtime.presence import Presence, read_at_once
from lwopt_backend.runtime.step import Matrices
from lwopt_backend.runtime.tensors import take_filled, to_fill
from tests.support.planner_shapes import LAYER, SMALL, study_in

pytestmark = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="a rehearsal needs torch 2.13")
SHAPES = [[f"layers.{i}.{name}", shape] for i in range(4) for name, shape in LAYER.items()]
STEPS = 4


# What a model and its host do, as far as the order of work goes.


class Uses(Passes):
    """Reads weights in forward passes, and writes gradients, or adds to them, in backward passes."""

    def backward(self, params: Any, following: Any = ()) -> None:
        for param in params:
            new = torch.empty_like(param).copy_(param.data)
            param.grad = new if param.grad is None else param.grad.add_(new)

    def forward(self, params: Any) -> None:
        for param in params:
            torch.empty_like(local(param)).copy_(local(param).detach())


class TwoStreams(Uses):
    """Parameters whose names have a ``word`` were used on a side stream, where autograd then writes their gradients and
    calls their hooks."""

    def __init__(self, check: StreamCheck, engine: PlainEngine, word: str) -> None:
        self._check = check
        self._aside = {key for key, name in engine.names.items() if word in name}

    def backward(self, params: Any, following: Any = ()) -> None:
        self._check.stream = "aside" if id(params[0]) in self._aside else "compute"
        if self._check.stream == "aside":
            self._check.joined("aside", "compute")
        super().backward(params)

    def end(self) -> None:
        self._check.stream = "compute"
        self._check.joined("compute", "aside")


class Sharded(Uses):
    """FSDP2's streams, as torch 2.13 has them: a root reduces on its own. The compute stream waits for the reduction
    before the last one, and at the end for all."""

    def __init__(self, check: StreamCheck) -> None:
        self._check = check
        self._before: Any = None

    def backward(self, params: Any, following: Any = ()) -> None:
        pass

    @contextmanager
    def reduced(self, params: Any) -> Iterator[None]:
        check, stream = self._check, "root"
        if self._before is not None:
            check.follow("compute", self._before[1])
        sent = torch.empty(sum(param.numel() for param in params), device=DEVICE).fill_(1)
        check.joined(stream, "compute")
        with check.on_stream(stream):
            output = torch.empty(sum(local(param).numel() for param in params), device=DEVICE).copy_(sent[:1])
            self._before = (sent, output), dict(check.clocks[stream])
            yield

    def end(self) -> None:
        self._check.joined("compute", "root")
        self._before = None


# How they train.


def train_owned(check: StreamCheck, engine: PlainEngine, *, aside: str = "", clips: bool = False) -> None:
    """Three passes a step, the first of which reduces nothing; at the end, a checkpoint's state, and gradients that are
    never sent."""
    optimizer, params = engine.optimizer, engine.core.manager.params
    passes = TwoStreams(check, engine, aside) if aside else Uses()
    for step in range(STEPS):
        with optimizer.no_sync():
            engine.play(passes)
        if aside and step == 0:  # what both streams have filled is changed before it is sent
            optimizer.core.gradients.change(range(len(params)), torch.ops.aten.mul_.Scalar, 0.5)
        engine.play(passes)
        if step == 1:  # and forget these
            optimizer.zero_grad()
        if step == 2:  # or those of some parameters, whose sum over two passes is added up on a side stream
            engine.play(passes)
            for param in params[::2]:
                param.grad = None
        if clips:
            optimizer.clip_grad_norm_(1.0, math.inf if step else 2.0)
            found, inverse = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
            optimizer.core.gradients.unscale(range(4), found, inverse)
            optimizer.step()
        engine.train(passes)
        optimizer.zero_grad()
    assert [*gathered(optimizer.core, optimizer.param_groups)]
    with optimizer.no_sync():
        engine.play(passes)


def train_mesh(check: StreamCheck, engine: MeshEngine, *, clips: bool = False) -> None:
    params, host = [*engine.model.parameters()], Sharded(check)
    for step in range(STEPS):
        engine.play(host)
        if clips:
            engine.optimizer.clip_grad_norm_(1.0, math.inf if step else 2.0)
        engine.optimizer.step()
        host.forward(params)
        for param in params:
            param.grad = None


def train_alone(check: StreamCheck, engine: Any) -> None:
    """The step alone, on gradients that are there."""
    for _ in range(STEPS):
        engine.backward()
        for kind in ("gradients", "masters"):
            for tensor in engine.tensors().get(kind, ()):
                tensor.fill_(1)
        engine.step()


def train_modules(check: StreamCheck, engine: ModulesEngine) -> None:
    """On a process group of NCCL alone."""
    with replaced(collectives.TorchCollectives, "device", property(lambda _: DEVICE)):
        read_by_hooks(check, engine, train_alone)


def read_by_hooks(check: StreamCheck, engine: Any, train: Callable[..., None]) -> None:
    """Hooks after a step read all weights."""
    hook = register_optimizer_step_post_hook(lambda *_: Uses().forward(engine.tensors()["parameters"]))
    try:
        train(check, engine)
    finally:
        hook.remove()


def train_measured(check: StreamCheck, engine: Any) -> None:
    """With a record of metrics, whose seconds are those between events."""
    recorder = collectives.Recorder()
    collectives.RECORDERS.add(recorder)
    train_alone(check, engine)
    recorder.take(collectives.TorchCollectives())


def fail_within(check: StreamCheck, engine: Any) -> None:
    """The rule raises at an owner while other buckets are on their way there and back."""
    done: list[Sequence[int]] = []
    transform = Matrices.transform

    def failing(matrices: Matrices, rule: Any, atoms: Sequence[int], stack: Tensor) -> Tensor:
        done.append(atoms)
        if len(done) == 2:
            raise ArithmeticError
        return transform(matrices, rule, atoms, stack)

    engine.backward()
    with replaced(Matrices, "transform", failing), pytest.raises(ArithmeticError):
        engine.step()


def fail_in_copies(check: StreamCheck, engine: Any) -> None:
    """The rule raises where another rank sends the direction of a piece that this rank also stores."""
    engine.backward()
    with replaced(Muon, "accumulate_all", lambda *_: 1 // 0), pytest.raises(ZeroDivisionError):
        engine.step()


def copy_to_cpu(check: StreamCheck, engine: Any) -> None:
    """A batch of matrices for a rule on the CPU, which takes them one by one in every engine here."""
    there = torch.empty(8, device="cpu")
    take_filled(there, to_fill(there, DEVICE).fill_(1))
    there.add_(1)


def read_flags(check: StreamCheck, engine: Any) -> None:
    """Of two groups of ranks, as experts have them."""
    read_at_once([Presence(collectives.TorchCollectives(), [False], DEVICE) for _ in range(2)])


@contextmanager
def with_buffers() -> Iterator[None]:
    """A model has one buffer."""
    made = engines._made

    def with_one(*args: Any) -> Any:
        model, grouping = made(*args)
        model.register_buffer("count", torch.zeros(3, device=DEVICE))
        return model, grouping

    with replaced(engines, "_made", with_one):
        yield


MUONH = {"name": "muon", "hyperball": True, "weight_decay": 0.0}
GATHERS = {"overlap_param_gather": True, **SMALL}
BUCKETS = {"policy": "balance", "bucket_numel": 9000}
SCENARIOS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "plain": ("plain", SMALL, train_owned),
    "plain, overlap_param_gather": ("plain", GATHERS, train_owned),
    "plain, no overlap": ("plain", {"overlap_grad_reduce": False, **SMALL}, train_owned),
    "plain, in pairs": ("plain", {"group_size": 2, **SMALL}, train_owned),
    "plain, keep_full_grads": ("plain", {"keep_full_grads": True, **SMALL}, train_owned),
    "plain, pairs, keep_full_grads": ("plain", {"group_size": 2, "keep_full_grads": True, **SMALL}, train_owned),
    "plain, norms": ("plain", SMALL, partial(train_owned, clips=True)),
    "plain, hooks": ("plain", GATHERS, partial(read_by_hooks, train=train_owned)),
    "plain, two streams": ("plain", SMALL, partial(train_owned, aside="down")),
    "plain, two streams, the last aside": ("plain", SMALL, partial(train_owned, aside="q.")),
    "plain, pairs, two streams": ("plain", {"group_size": 2, **SMALL}, partial(train_owned, aside="norm")),
    "fsdp2": ("fsdp2", {"bucket_matrices": 2}, train_mesh),
    "fsdp2, norms": ("fsdp2", {"matrix": MUONH, "bucket_matrices": 2}, partial(train_mesh, clips=True)),
    "fsdp2, offload": ("fsdp2, offload", {"bucket_matrices": 3}, train_mesh),
    "hsdp": ("fsdp2", {"group_size": 2, "bucket_matrices": 2}, train_mesh),
    "zero0": ("zero0", {"policy": "balance", "bucket_numel": 9000}, train_alone),
    "zero1": ("zero1", BUCKETS, train_alone),
    "zero1, offload": ("zero1, offload", BUCKETS, train_alone),
    "zero3": ("zero3", {"bucket_numel": 9000}, train_alone),
    "zero3, offload": ("zero3, offload", {"bucket_numel": 9000}, train_alone),
    "zero3, offload, rule on the CPU": ("zero3, offload", {"bucket_numel": 9000, "ns_device": "cpu"}, train_alone),
    "zero3, measured": ("zero3", {"bucket_numel": 9000}, train_measured),
    "plain, the rule fails": ("plain", GATHERS, fail_within),
    "zero3, the rule fails": ("zero3", {"bucket_numel": 9000}, fail_within),
    "hsdp, the rule fails": ("fsdp2", {"group_size": 2, "bucket_matrices": 2}, fail_within),
    "hsdp, the rule fails in copies": ("fsdp2", {"group_size": 2, "bucket_matrices": 2}, fail_in_copies),
    "a batch to the CPU": ("zero3", {}, copy_to_cpu),
    "flags of two groups": ("zero3", {}, read_flags),
    "modules": ("modules", {}, train_modules),
}


def engine_of(kind: str, options: dict[str, Any], path: Path) -> Callable[[], Any]:
    name, _, offloads = kind.partition(", ")
    if name == "modules":
        parts = {"text": ("plain", GATHERS), "vision": ("fsdp2", {"bucket_matrices": 2})}
        made = {part: engine_of(*given, path) for part, given in parts.items()}
        return lambda: ModulesEngine({part: make() for part, make in made.items()})
    study = study_in(path, "zero1" if name == "zero0" else name, 4, options, shapes=SHAPES)
    (planned,) = study.worst.planned
    base: Any = ReplicatedEngine if name == "zero0" else ENGINES[name]
    return partial(type(base.__name__, (base,), {"offloads": bool(offloads)}), planned, study.setting)


def faults_of(name: str, path: Path) -> Counter[str]:
    """What the sanitizer finds in a scenario on rank 0 of 4; no other rank does more."""
    kind, options, train = SCENARIOS[name]
    make, check = engine_of(kind, options, path), StreamCheck()
    with pretended(0, 4, ModulesEngine.others), absent_gpu(check), with_buffers():
        engine = make()
        train(check, engine)
        del engine
        gc.collect()
    return check.faults


@pytest.mark.filterwarnings("ignore:.*at which matrices hardly move")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_engine_faults_in_the_order_on_streams(name: str, tmp_path: Path) -> None:
    """Fixed: Stale bytes were reduced if a model used several CUDA streams. An engine makes no fault in the order of
    work on streams."""
    assert faults_of(name, tmp_path / "shapes.json") == {}


# The sanitizer finds each kind of fault, and none where a wait is. ``x`` was written on the current stream.


def aside(x: Tensor, *, follows: bool = True, joins: bool = True, records: bool = True) -> None:
    """Change it on a side stream, free it, and use memory that may be the same."""
    side = torch.cuda.Stream()
    if follows:
        side.wait_stream(torch.cuda.current_stream())
    if records:
        x.record_stream(side)
    with torch.cuda.stream(side):
        x.mul_(2)
    if joins:
        torch.cuda.current_stream().wait_stream(side)
    x.data = torch.empty(0, device=DEVICE)
    torch.empty(8, device=DEVICE).fill_(1)


def by_event(x: Tensor, *, records: bool = True) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    if records:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.mul_(2)


def sent(x: Tensor, *, waits: bool = True, writes: bool = False) -> None:
    pending = collectives.TorchCollectives().start_all_reduce(x)
    if writes:
        x.fill_(0)
    if waits:
        pending.wait()


def to_host(x: Tensor, *, waits: bool = True, writes: bool = False) -> None:
    """Read on the host, or change, the memory of a copy."""
    there = torch.empty(8, pin_memory=True)
    (x.copy_(there, non_blocking=True) if writes else there.copy_(x, non_blocking=True))
    if waits:
        torch.cuda.synchronize()
    there.fill_(0) if writes else there.tolist()


def to_gpu(x: Tensor, *, pins: bool = True) -> None:
    torch.ones(8, device="cpu", pin_memory=pins).to(DEVICE, non_blocking=True)


def timed(x: Tensor, *, waits: bool = True, swaps: bool = False) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (end, begin) if swaps else (begin, end):
        event.record()
        x.fill_(0)
    if waits:
        end.synchronize()
    begin.elapsed_time(end)


FAULTS: list[tuple[Callable[..., None], dict[str, bool], list[str]]] = [
    (aside, {}, []),
    (aside, {"joins": False}, []),  # the allocator waits for the stream that was recorded
    (aside, {"records": False}, []),
    (aside, {"records": False, "joins": False}, ["reused while in use"]),
    (aside, {"follows": False}, ["not ordered"]),
    (by_event, {}, []),
    (by_event, {"records": False}, ["not ordered"]),
    (sent, {}, []),
    (sent, {"waits": False}, ["never waited for"]),
    (sent, {"writes": True}, ["not ordered"]),
    (to_host, {}, []),
    (to_host, {"waits": False}, ["read by the host too early"]),
    (to_host, {"writes": True}, []),
    (to_host, {"writes": True, "waits": False}, ["rewritten by the host too early"]),
    (to_gpu, {}, []),
    (to_gpu, {"pins": False}, ["not asynchronous"]),
    (timed, {}, []),
    (timed, {"waits": False}, ["not timed"]),
    (timed, {"swaps": True}, ["not timed"]),
]


ACCESS = r"(write|read) on \w+ by \w+ at [\w/]+\.py:\d+"
PLACES = rf"not ordered: {ACCESS} \| {ACCESS}"


@pytest.mark.parametrize(("work", "how", "kinds"), FAULTS)
def test_the_sanitizer_names_the_kind_and_both_places_of_a_fault(
    work: Callable[..., None], how: dict[str, bool], kinds: list[str]
) -> None:
    check = StreamCheck()
    with pretended(0, 4, lambda mine, ranks: [mine] * ranks), absent_gpu(check):
        work(torch.empty(8, device=DEVICE).fill_(1), **how)
    assert [fault.partition(":")[0] for fault in check.faults] == kinds
    for fault in check.faults:
        assert re.fullmatch(PLACES, fault) or "not ordered" not in fault
