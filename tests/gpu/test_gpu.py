"""On a GPU, by `make test-gpu`: one rank on NCCL, and ranks that share the GPU by the strict transport. With
``--device cpu`` the same runs on a CPU, one rank on gloo, and only what CUDA alone can tell is left out.

What a step's host may wait for (READS, on one rank; docs/cost.md has more ranks):

- plain PyTorch, FSDP2 and ZeRO 1 to 3: nothing. One rank knows which parameters have gradients without asking others.
- `ModuleOptimizers`: the norms of all modules with their flags, which decide whether the step is taken.
- ZeRO 0, and DeepSpeed with owned storage: the norm that decides whether the step is taken."""

import functools
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import step_systems, step_watch
from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, plan_study
from lwopt_backend.rules.newton_schulz import IMMEDIATE, PACKAGES, check_package
from tests.support.allocations import allocations
from tests.support.ranks import RankPool
from tests.support.references import random, rule_of

pytestmark = pytest.mark.gpu
READS = {"plain": 0, "modules": 1, "fsdp2": 0, "zero0": 1, "zero1": 0, "zero2": 0, "zero3": 0, "owned": 1}
OFFLOADED = ("fsdp2", "zero1", "zero2", "zero3")
COMPILED = ("plain", "fsdp2", "zero2", "owned")
SLEEP = 20_000_000  # cycles of the GPU, some 10 ms, by which the host runs ahead: what does not wait computes garbage
ROUNDED = 0.05  # of what weights move by, in norm: batched matrices, and those of a compiled model, round otherwise
Row = dict[str, Any]


Note = Callable[[str, object], None]  # a figure, for the results


@pytest.fixture
def note(record_property: Note) -> Note:
    return lambda name, value: record_property(name, json.dumps(value))


@pytest.fixture(scope="module")
def device(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("device")


one_rank = pytest.mark.parametrize("ranks", [1], indirect=True, ids=["1 rank"])


# On each rank.


@contextmanager
def training(
    engine: str, device: str, *, one_by_one: bool = False, offload: bool | None = None, **setting: Any
) -> Iterator[tuple[Any, Any]]:
    """Ours on an engine as benchmarks.step makes it, and its setting. Matrices are stepped in batches, or
    ``one_by_one`` as on a CPU. State is offloaded to pinned memory if ``offload``, to other memory of the CPU if it is
    False."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.callback(lambda before: (IMMEDIATE.clear(), IMMEDIATE.update(before)), {*IMMEDIATE})
        IMMEDIATE.clear()
        IMMEDIATE.update({device} if one_by_one else set())
        if offload is not None:
            offload_by(patch, offload)
        sizes = {"layers": 2, "width": 64, "tokens": 32, "accumulation": 1, "bucket_mb": 4.0, **setting}
        made = step_systems.Setting(dist.get_world_size(), **sizes, device=device)
        (system,) = stack.enter_context(step_systems.built({"ours": step_systems.systems(engine, made)["ours"]}))
        yield system, made


def offload_by(patch: pytest.MonkeyPatch, pinned: bool) -> None:
    """FSDP2 and ZeRO keep their optimizer's part in memory of the CPU."""
    deepspeed = importlib.import_module("deepspeed")
    initialize = deepspeed.initialize

    def with_offload(*args: Any, config: Row, **kwargs: Any) -> Any:
        zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
        return initialize(*args, config={**config, "zero_optimization": zero}, **kwargs)

    policy = CPUOffloadPolicy(pin_memory=pinned)
    patch.setattr(step_systems, "fully_shard", functools.partial(fully_shard, offload_policy=policy))
    patch.setattr(deepspeed, "initialize", with_offload)


def steps(system: Any, setting: Any, hooks: Any, numbers: range) -> None:
    for step in numbers:
        if setting.device == "cuda":
            torch.cuda._sleep(SLEEP)
        system.step(setting.batches(step), hooks)


def trained(engine: str, device: str, change: Callable[[Any], object] = lambda system: None, **how: Any) -> Row:
    """After three steps: the largest differences of matrices and of others from torch.optim on the same device, and
    the norm of all differences by that of what the weights moved by."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), training(engine, device, **how) as made:
        system, setting = made
        expected, start = step_systems.reference(setting), dict(setting.model().named_parameters())
        change(system)
        steps(system, setting, step_systems.Hooks(), range(step_systems.COMPARED_AFTER))
        found = {name: system.whole(param).detach().cpu() for name, param in system.model.named_parameters()}
        matrices, others = step_systems.difference(system, expected)
        own = system.model.parameters() if engine == "fsdp2" else ()
        pinned = {p.to_local().is_pinned() for p in own if isinstance(p, DTensor)}
    off, moved = (
        torch.stack([(found[name].double() - other[name].detach().cpu().double()).norm() for name in found]).norm()
        for other in (expected, start)
    )
    digest = [float(found[name].double().sum()) for name in sorted(found)]
    return {"differ": (matrices, others), "off": float(off / moved), "digest": digest, "pinned": pinned}


def compiled(system: Any) -> None:
    for block in system.model.blocks:
        block.compile()


def on_two_streams(system: Any) -> None:
    """The MLPs run on a side stream of a GPU, where autograd then accumulates their gradients, late."""
    if next(system.model.parameters()).device.type != "cuda":
        return
    side = torch.cuda.Stream()

    def aside(forward: Callable[[Any], Any], x: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.record_stream(side)
            y = forward(x)
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        return y

    for block in system.model.blocks:
        for layer in (block.up, block.down):
            layer.forward = functools.partial(aside, layer.forward)
            layer.weight.register_hook(lambda grad: torch.cuda._sleep(SLEEP))


def replayed(engine: str, device: str) -> Row:
    """How far weights are from those of a run without graphs, by the norm of what they moved by; the rates change."""
    of_runs: list[dict[str, torch.Tensor]] = []
    replay = torch.cuda.CUDAGraph.replay
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=replay) as graphs:
        for capture in (False, True):
            with training(engine, device, capture=capture) as (system, setting):
                start = dict(setting.model().named_parameters())
                for number in range(6):
                    steps(system, setting, step_systems.Hooks(), range(number, number + 1))
                    for group in system.optimizers[-1].param_groups:
                        group["lr"] *= 0.9
                own = system.model.named_parameters()
                of_runs.append({name: system.whole(param).detach().cpu().clone() for name, param in own})
    before, after = of_runs
    off, moved = (
        torch.stack([(after[name].double() - other[name].detach().cpu().double()).norm() for name in after]).norm()
        for other in (before, start)
    )
    return {"off": float(off / moved), "graphs": graphs.call_count}


def watched(engine: str, device: str) -> Row:
    """What our step dispatches, the fourth; on a GPU also where it waits in the fifth, and its kernels then."""
    with training(engine, device, matrices_only=True, layers=3) as (system, setting):
        hooks = step_systems.Hooks
        steps(system, setting, hooks(), range(3))
        watch = step_watch.Watch(0, 1)
        with watch.watching() as counting:
            steps(system, setting, counting, range(3, 4))
        count, waits, kernels = watch.count, list[str](), list[str]()
        if device == "cuda":
            mode = "warn" if READS[engine] else "error"
            steps(system, setting, hooks(optimizer=functools.partial(noting_waits, waits, mode)), range(4, 5))
            steps(system, setting, hooks(optimizer=functools.partial(noting_kernels, kernels)), range(5, 6))
    names = {"launches": count.launches(), "batches": count.calls, "matrices": count.matrices}
    return {**names, "reads": count.host_reads, "waits": waits, "kernels": len(kernels)}


def noting_waits(found: list[str], mode: str, work: Callable[[], Any]) -> Any:
    """``work``, in which every wait for the GPU is noted, or is an error."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{each.filename}:{each.lineno}" for each in seen if "synchronizing" in str(each.message)]


def noting_kernels(found: list[str], work: Callable[[], Any]) -> Any:
    """``work``; what the GPU did for it is noted: kernels, copies, memory that was filled."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = work()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found += [event.name for event in on_gpu if not getattr(event, "is_user_annotation", False)]
    return result


def needed(engine: str, device: str, folder: str) -> Row:
    """Bytes of state, and what a step needs in addition to what there is: as measured, and as planned."""
    with training(engine, device, matrices_only=True, layers=4, width=128) as (system, setting):
        hooks, most = step_systems.Hooks, list[int]()

        def measured(work: Callable[[], Any]) -> Any:
            if device == "cpu":
                most.append(allocations(work, at_least=512).peak)
                return None
            torch.cuda.reset_peak_memory_stats()
            before, result = torch.cuda.memory_allocated(), work()
            most.append(torch.cuda.max_memory_allocated() - before)
            return result

        steps(system, setting, hooks(), range(2))
        steps(system, setting, hooks(optimizer=measured), range(2, 3))
        path = Path(folder, "shapes.json")
        path.write_text(json.dumps([[name, list(param.shape)] for name, param in setting.model().named_parameters()]))
        options = {"bucket_mb": setting.bucket_mb} if engine == "plain" else {}
        stored = Setting.of(engine, CLUSTERS["h100-8x-ib"], options, dtype=torch.float32)
        plan = plan_study(read_shapes_json(path, stored.training), Deployment(1), stored).worst.planned[0].memory(0)
        kept = [state["momentum_buffer"] for state in system.optimizers[-1].state.values()]
        state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in kept)
    return {"state": state, "step": max(most), "planned": {"state": plan.state, "step": plan.workspace + plan.exchange}}


def by_package(name: str, device: str) -> float | str:
    """How far the package's update of a stack is from this one's, by its norm; or why it cannot be had."""
    try:
        check_package(name, torch.device(device))
    except ValueError as error:
        return str(error)
    gradients = torch.stack([random((512, 1024), seed) for seed in range(3)]).to(device)
    theirs, ours = (rule_of("muon", ns_method=method).transform(gradients).float() for method in (name, "standard"))
    return float((theirs - ours).norm() / ours.norm())


# The tests.


@one_rank
@pytest.mark.parametrize("engine", READS)
def test_every_engine_has_the_bits_of_torch_optim(ranks: RankPool, device: str, engine: str) -> None:
    (found,) = ranks.run(trained, engine, device, one_by_one=True, bucket_mb=0.1)
    assert found["differ"] == (0.0, 0.0)


@one_rank
@pytest.mark.parametrize("engine", READS)
def test_batches_of_matrices_differ_by_rounding(ranks: RankPool, device: str, engine: str, note: Note) -> None:
    (found,) = ranks.run(trained, engine, device)
    note("off", found["off"])
    assert found["off"] < ROUNDED


@one_rank
@pytest.mark.parametrize("engine", READS)
def test_captured_batches_are_those_that_are_launched(ranks: RankPool, device: str, engine: str, note: Note) -> None:
    (found,) = ranks.run(replayed, engine, device)
    note("off", found["off"])
    assert found["off"] <= (ROUNDED if device == "cuda" else 0.0)
    assert bool(found["graphs"]) == (device == "cuda")


@one_rank
@pytest.mark.parametrize("engine", OFFLOADED)
def test_offload_to_pinned_memory(ranks: RankPool, device: str, engine: str, note: Note) -> None:
    """The bits of memory that is not pinned, whose copies the host waits for; nearly those of torch.optim."""
    ((pinned,), (other,)) = (ranks.run(trained, engine, device, offload=how) for how in (device == "cuda", False))
    note("off", pinned["off"])
    assert pinned["digest"] == other["digest"] and pinned["off"] < ROUNDED
    assert pinned["pinned"] == ({device == "cuda"} if engine == "fsdp2" else set())


@one_rank
@pytest.mark.parametrize("engine", READS)
def test_a_step_waits_where_it_says_and_launches_what_is_counted(
    ranks: RankPool, device: str, engine: str, note: Note
) -> None:
    (found,) = ranks.run(watched, engine, device)
    for name, value in found.items():
        note(name, value)
    assert found["reads"] == READS[engine] and found["matrices"] == 12
    if device == "cuda":
        assert len(found["waits"]) == READS[engine], found["waits"]
        assert 0 < found["kernels"] <= 2 * found["launches"]


@one_rank
@pytest.mark.parametrize("engine", ["plain", "fsdp2", "zero2"])
def test_a_step_needs_the_memory_of_its_plan(
    ranks: RankPool, device: str, engine: str, note: Note, tmp_path: Path
) -> None:
    (found,) = ranks.run(needed, engine, device, str(tmp_path))
    note("bytes", found)
    assert found["state"] == found["planned"]["state"]
    assert found["step"] <= 1.05 * found["planned"]["step"]


@one_rank
@pytest.mark.parametrize("engine", COMPILED)
def test_a_model_that_inductor_compiled(ranks: RankPool, device: str, engine: str, note: Note) -> None:
    (found,) = ranks.run(trained, engine, device, compiled, layers=1)
    note("off", found["off"])
    assert 0 < found["off"] < ROUNDED


@one_rank
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_compute_newton_schulz(ranks: RankPool, device: str, package: str, note: Note) -> None:
    (found,) = ranks.run(by_package, package, device)
    if isinstance(found, str):
        pytest.skip(found)
    note("off", found)
    assert found < ROUNDED


@pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=lambda size: f"{size} ranks")
@pytest.mark.parametrize("engine", READS)
def test_several_ranks_have_the_bits_of_torch_optim(ranks: RankPool, device: str, engine: str) -> None:
    """Several ranks on one device have the bits of torch.optim. All have equal batches, whose mean gradient is each
    one's to the bit."""
    for found in ranks.run(trained, engine, device, one_by_one=True, bucket_mb=0.1):
        assert found["differ"][0] == 0.0


@pytest.mark.parametrize("ranks", [2], indirect=True, ids=["2 ranks"])
def test_a_model_that_uses_two_streams(ranks: RankPool, device: str) -> None:
    """A bucket that one stream sends has gradients that the other stream has written."""
    for found in ranks.run(trained, "plain", device, on_two_streams, one_by_one=True, bucket_mb=0.1):
        assert found["differ"] == (0.0, 0.0)
