"""What profilers, hooks, stack traces and ``metrics`` see of a step: its parts by name, and one step."""

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

import lwopt_backend
from lwopt_backend import ModuleOptimizers, integrations
from lwopt_backend.engines.base import BaseOptimizer
from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.second_moment import NorMuon
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.counted import Operations
from tests.support.engines import ENGINES, Cell, ExactLM, running
from tests.support.models import MATRICES
from tests.support.on_ranks import on_ranks
from tests.support.ranks import gathered
from tests.support.references import SECTIONS
from tests.support.zero import ADAMW


class Inherited(torch.optim.AdamW):
    """Its step is another optimizer's step, of which torch tells hooks again."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


INHERITED = {"name": "torch_optimizer", "class": f"{__name__}.Inherited", "lr": 0.02}


def step_on(engine: str, seeing: AbstractContextManager[Any], matrix: str) -> None:
    """Make an optimizer and step with it, while someone is ``seeing``."""
    zero = {"sub_group_size": 1000} if engine == "zero 3" else {}
    cell = Cell("plain" if engine == "modules" else engine, matrix, clip=1.0, zero=zero)
    with mock.patch.dict(SECTIONS, inherited=INHERITED), seeing, running(cell, ExactLM()) as run:
        if engine == "modules":
            run.optimizer = ModuleOptimizers({"all": run.optimizer})
        run.train(range(1))


@contextmanager
def told(seen: list[str]) -> Iterator[None]:
    with ExitStack() as handles:
        for when, register in (("pre", register_optimizer_step_pre_hook), ("post", register_optimizer_step_post_hook)):
            handle = register(lambda optimizer, *_, when=when: seen.append(f"{when} {type(optimizer).__name__}"))
            handles.callback(handle.remove)
        yield


PARTS = {f"lwopt: {part}" for part in ("exchange out", "rule muon", "exchange back", "elementwise adamw", "norm")}
# An engine, the optimizer of which hooks are told, and the parts that a profile names. At stages 1 to 3 the norm is
# DeepSpeed's; it steps a group at a time, of which hooks are told once.
SEEN: list[tuple[str, str, set[str] | None]] = [
    ("fsdp2", "MeshOptimizer", PARTS),
    ("plain", "PlainOptimizer", PARTS),
    ("modules", "ModuleOptimizers", None),
    ("zero 0", "ZeROLayerWise", PARTS),
    ("zero 1", "ZeROLayerWise", None),
    ("zero 2", "ZeROLayerWise", PARTS - {"lwopt: norm"}),
    ("zero 3", "ZeROLayerWise", None),
    ("owned 2", "OwnedLayerWise", None),
]


@pytest.mark.parametrize(("engine", "optimizer", "parts"), SEEN)
@on_ranks(2)
def test_profile_names_the_parts_of_a_step(engine: str, optimizer: str, parts: set[str] | None) -> None:
    """Hooks are told of a step, too."""
    if parts is not None:
        prof = profile(activities=[ProfilerActivity.CPU])
        step_on(engine, prof, "muon")
        seen_by = {event.key for event in prof.key_averages() if event.is_user_annotation}
        assert set().union(*gathered({key for key in seen_by if key.startswith("lwopt")})) == parts
    seen: list[str] = []
    step_on(engine, told(seen), "inherited")
    assert seen == [f"pre {optimizer}", f"post {optimizer}"]


OURS = [Path(package.__file__ or "").parent for package in (lwopt_backend, integrations)]
Walk = list[tuple[str, str]]  # files and functions, the innermost first


def walk() -> Walk:
    """Our frames from where a rule or a collective is called out to the optimizer's step, or to the hook of a
    gradient."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if any(file.is_relative_to(folder) for folder in OURS) and file.parent.name != "rules":
            found.append((str(file), name))
            if name == "step" and isinstance(frame.f_locals.get("self"), BaseOptimizer):
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found


PLACES = [(Muon, "directions"), (Muon, "transform"), (NorMuon, "transform_with")]
WIRES = [(TorchCollectives, name) for name in ("all_to_all", "reduce_scatter_parts", "all_gather_parts")]


@contextmanager
def walked(found: dict[str, list[Walk]]) -> Iterator[None]:
    """By the name of what is called: a rule's work, or a collective of a bucket."""
    with ExitStack() as stack:
        for owner, name in (*PLACES, *WIRES):
            stack.enter_context(mock.patch.object(owner, name, _noting(found, name, getattr(owner, name))))
        yield


def _noting(found: dict[str, list[Walk]], name: str, method: Any) -> Any:
    def noted(*args: Any, **more: Any) -> Any:
        found.setdefault(name, []).append(walk())
        return method(*args, **more)

    return noted


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_a_stack_trace_leads_from_the_step_to_the_rule(engine: str) -> None:
    """From the optimizer's step to a rule, and from a gradient's hook to its bucket's reduction: at most 8 calls,
    through at most 4 files. Each has a name, also on the way to other collectives."""
    found: dict[str, list[Walk]] = {}
    step_on(engine, walked(found), "normuon")
    assert {"directions", "transform_with"} <= set().union(*gathered(set(found)))
    for what, walks in found.items():
        for each in walks:
            assert not any(name.startswith("<") for _, name in each), each
            if what not in ("all_to_all", "all_gather_parts"):
                assert len(each) <= 8 and len({file for file, _ in each}) <= 4, each


# optimizer.metrics()
APART = {"gates": {"params": "gate.*", "max_norm": 0.001}}


def operations(engine: Any, step: int) -> list[str]:
    gc.collect()  # earlier tests' engines, whose ends are operations too
    with Operations() as seen:
        engine.train(range(step, step + 1))
    return seen.names


@pytest.mark.on_gloo  # the strict transport's operations would be counted
@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_metrics_are_of_the_whole_model(engine: str) -> None:
    """Metrics cost nothing until they are asked for."""
    apart = {"clip_groups": APART} if engine in ("plain", "fsdp2") else {}
    with running(Cell(engine, clip=0.3, options=apart), ExactLM()) as trained:
        optimizer = getattr(trained.optimizer, "optimizer", trained.optimizer)
        trained.train(range(3))  # in which ZeRO-3 learns what comes next
        unasked = operations(trained, 3)
        with pytest.raises(RuntimeError, match="expected record_metrics"):
            optimizer.metrics()
        optimizer.record_metrics()
        before = trained.weights()
        norms = trained.train(range(5, 6))
        found, after = optimizer.metrics(), trained.weights()
        asked = operations(trained, 6)
        optimizer.record_metrics(False)
        assert len(asked) > len(unasked) and operations(trained, 7) == unasked
    assert [found["grad_norm"], *found.get("clip_group_norms", {}).values()] == pytest.approx(norms)
    for rule, names in (("muon", MATRICES), ("adamw", after.keys() - set(MATRICES))):
        change = torch.cat([(after[name] - before[name]).flatten() for name in names])
        rms = float(change.square().mean().sqrt())
        assert found["update_rms"][rule] == pytest.approx(rms, rel=1e-4), rule
    assert 0 < found["orthogonality"]["muon"] < 0.6 and found["exchange_bytes"] > 0
    assert all(found["seconds"][part] > 0 for part in ("exchange", "rule", "elementwise"))
    assert set(found["lr"]) == {SECTIONS["muon"]["lr"], ADAMW["lr"]}
    assert gathered(found)[0] == found
