"""A rank of a planned world, rehearsed: an engine's own step on tensors without memory, compared with the plan."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from lwopt_backend.plan import MACHINES
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.study import Stage, Study
from lwopt_backend.runtime.agreement import plan_digest
from lwopt_backend.runtime.state import OwnerState
from lwopt_backend.runtime.step import Matrices

from .absent_gpu import DEVICE, PACKAGE, Recorder, absent_gpu, pretended, replaced
from .engines import ENGINES, Engine
from .streams import StreamCheck

TRAFFIC = ("all-to-all", "reduce-scatter", "all-gather", "all-reduce")
FLAG_NBYTES = 8  # of each parameter and each rank, at most, that an engine may keep after a step
NEEDED = "most that the step needs beside it"  # beside what is kept
Kept = Mapping[str, tuple[int, int]]  # by kind, the bytes of the elements and of the memory that they lie in

# What a rehearsal finds.


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a step, as rehearsed and as planned; None if the plan does not say.

    Unless ``exact``, the plan's is an estimate, and a difference is no error.
    """

    what: str
    rehearsed: int
    planned: int | None = None
    unit: str = "bytes"
    exact: bool = True

    @property
    def difference(self) -> str | None:
        """A sentence, if both should be equal and are not."""
        if self.planned is None or not self.exact or self.rehearsed == self.planned:
            return None
        by = self.rehearsed - self.planned
        return f"{self.what}: planned {self.planned}, rehearsed {self.rehearsed}, a difference of {by:+} {self.unit}"


@dataclass(frozen=True)
class Rehearsal:
    """One step of ``rank`` of the ``ranks`` that share the parameters called ``name``.

    ``waits`` is how often it waited for the GPU, by place. ``problems`` are sentences: differences from the plan, and
    what went wrong.
    """

    name: str
    rank: int
    ranks: int
    figures: tuple[Figure, ...] = ()
    waits: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


# A rehearsal.


def rehearse(study: Study, rank: int, *, steps: int = 1) -> list[Rehearsal]:
    """Rehearse ``steps`` steps of ``rank`` of the study's world; the last one is reported.

    One rehearsal for each set of parameters that the rank shares with others. Raises ValueError for what cannot be
    rehearsed.
    """
    if TorchVersion(torch.__version__) < "2.13":
        raise ValueError(
            f"a rehearsal needs torch 2.13 or newer (collectives on fake tensors); found "
            f"{torch.__version__}; install a newer torch, or use lwopt plan alone"
        )
    deployment, setting = study.deployment, study.setting
    if not 0 <= rank < deployment.world_size:
        raise ValueError(f"--rank: expected 0 to {deployment.world_size - 1}, found {rank}")
    if setting.plans_for != MACHINES[DEVICE.type]:
        raise ValueError("a rehearsal plays ranks with GPUs, but --cluster cpu plans for CPUs; name another cluster")
    if setting.config.capture:
        raise ValueError("a rehearsal has no GPU whose graphs it could capture; leave capture out of the options")
    stage = study.stages[rank // deployment.stage_ranks]
    if setting.engine == "plain" and len(stage.planned) > 1:
        raise ValueError("plain PyTorch with --ep cannot be rehearsed; leave --ep out, or rehearse another engine")
    return [rehearse_share(stage, planned, rank % stage.ranks, steps) for planned in stage.planned]


def rehearse_share(stage: Stage, planned: Planned, rank: int, steps: int) -> Rehearsal:
    """Rehearse what ``rank`` of the stage shares with others by this plan."""
    apart = stage.deployment.ep if planned.name == "experts" else stage.deployment.tp
    mine = rank // apart % planned.ranks
    found = Rehearsal(planned.name, mine, planned.ranks)
    recorder, counted, doing = StreamCheck(), Counted(), "making the optimizer"
    with pretended(mine, planned.ranks, others_of(planned)), absent_gpu(recorder), counted.counting():
        try:
            engine = ENGINES[stage.setting.engine](planned, stage.setting)
            for number in range(steps):
                doing = f"step {number + 1} of {steps}"
                kept, held = _step(engine, recorder, counted)
        except Exception as error:
            return replace(found, problems=(f"{doing}: {_told(error)}",))
        mine_planned = planned.memory(mine % planned.group_size)
        figures = (
            *_work(recorder, counted, planned, mine),
            *_memory(engine, kept, mine_planned),
            Figure(NEEDED, recorder.peak - held, mine_planned.workspace + mine_planned.exchange, exact=False),
            *(Figure("gradients on their way", way, mine_planned.transient) for way in engine.transient()),
        )
        waits = {f"{what} at {where}": times for (what, where), times in sorted(recorder.waits.items())}
        differences = (figure.difference for figure in figures)
        problems = [
            *_digests(engine, planned),
            *(said for said in differences if said),
            *_waits(engine, waits),
            *_left(engine, recorder, counted, planned),
        ]
    return replace(found, figures=figures, waits=waits, problems=tuple(problems))


def others_of(planned: Planned) -> Callable[[Any, int], list[Any]]:
    """What every rank says when objects are gathered: the same as this one, but for its work, which the plan knows."""
    works = iter(planned.before)

    def say(mine: Any, ranks: int) -> list[Any]:
        return list(next(works, [mine] * ranks)) if type(mine) is int else [mine] * ranks

    return say


def _step(engine: Engine, recorder: Recorder, counted: Counted) -> tuple[Kept, int]:
    """One backward pass and one step; returns what is kept in between, and all bytes that are held then."""
    recorder.forget()
    counted.matrices = 0
    engine.backward()
    kept = {kind: recorder.sizes(tensors) for kind, tensors in engine.tensors().items()}
    recorder.peak = held = recorder.total
    engine.step()
    return kept, held


def _told(error: Exception) -> str:
    """The error, and the last line of the engine that was reached."""
    lines = [(Path(each.filename), each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    ours = [(path, line) for path, line in lines if path.is_relative_to(PACKAGE)]
    where = f" ({ours[-1][0].relative_to(PACKAGE).as_posix()}:{ours[-1][1]})" if ours else ""
    return f"{type(error).__name__}: {error}{where}"


class Counted:
    """Counts the matrices on which a rule ran, and finds the owner state."""

    def __init__(self) -> None:
        self.matrices = 0
        self._owner_states: dict[int, OwnerState] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within it."""
        transform, step_weight = Matrices.transform, Matrices.step_weight

        def counted_transform(whole: Matrices, rule: Any, atoms: Sequence[int], *args: Any) -> Any:
            self._count(whole, len(atoms))
            return transform(whole, rule, atoms, *args)

        def counted_step(whole: Matrices, *args: Any) -> Any:
            self._count(whole, 1)
            return step_weight(whole, *args)

        with ExitStack() as stack:
            stack.enter_context(replaced(Matrices, "transform", counted_transform))
            stack.enter_context(replaced(Matrices, "step_weight", counted_step))
            yield

    def _count(self, whole: Matrices, matrices: int) -> None:
        self.matrices += matrices
        self._owner_states[id(whole)] = whole.owner_state

    def owner_state(self) -> list[Tensor]:
        """The tensors of all owner state."""
        leaves = tree_leaves([[*state.held().values()] for state in self._owner_states.values()])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# What is compared.


def _digests(engine: Engine, planned: Planned) -> list[str]:
    expected = plan_digest(planned.lines)
    return [] if engine.digest == expected else [f"plan digest: planned {expected}, rehearsed {engine.digest}"]


def _waits(engine: Engine, waits: Mapping[str, int]) -> list[str]:
    """A sentence for each place where the step waits for the GPU, or more often than it may."""
    return [
        f"waits for the GPU: {what}, {times} time(s), {engine.waits.get(what, 0)} meant"
        for what, times in waits.items()
        if times > engine.waits.get(what, 0)
    ]


def _work(recorder: Recorder, counted: Counted, planned: Planned, rank: int) -> list[Figure]:
    """Matrices, collectives and operations."""
    place = rank % planned.group_size
    owned = planned.part.placed.owners.count(place) if planned.part else 0
    found = [Figure("matrices updated", counted.matrices, owned, "matrices")]
    listed = [*(planned.part.collectives if planned.part else ()), *planned.elementwise.collectives]
    for kind in TRAFFIC:
        calls = sum(each.count for each in listed if each.what.startswith(f"{kind} "))
        done, _ = recorder.collectives.get(kind, (0, 0))
        if calls or done:
            found.append(Figure(f"{kind}s", done, calls, "calls"))
    sent = sum(nbytes for kind, (_, nbytes) in recorder.collectives.items() if kind in TRAFFIC)
    return [*found, Figure("sent", sent, planned.memory(place).sent)]


def _memory(engine: Engine, kept: Kept, planned: RankMemory) -> list[Figure]:
    """What is kept between a backward pass and its step, by kind."""
    found = [Figure(f"kept: {kind}", kept.get(kind, (0, 0))[0], getattr(planned, kind)) for kind in engine.compared]
    if {"parameters", "gradients"} <= {*engine.compared}:
        both = [kept[kind] for kind in ("parameters", "gradients")]
        found.append(Figure("kept: padding", sum(memory - elements for elements, memory in both), planned.padding))
    return found


def _left(engine: Engine, recorder: Recorder, counted: Counted, planned: Planned) -> list[str]:
    """A sentence, if memory is kept after the step that is neither a parameter's nor state."""
    named = [*engine.tensors().values(), counted.owner_state()]
    left = recorder.total - sum(recorder.sizes(tensors)[1] for tensors in named)
    most = FLAG_NBYTES * (len(planned.lines) + planned.ranks)
    return [f"after the step, {left} bytes are kept that nobody names; flags may take {most}"] if left > most else []
