"""Steps that are run, not modelled: what a system does per step, on real collectives with real Newton-Schulz.

Gradients are taken to be there; a step is what follows backward. It runs on the ranks of a machine, to see how far the
model of ``plan.machine`` can be trusted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.rules import newton_schulz
from lwopt_backend.runtime.collectives import TorchCollectives, join, leave

JORDAN = (3.4445, -4.7750, 2.0315)  # any coefficients take as long
STEPS = 5


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels together: elements to reduce and to return, padding included, and each rank's matrices."""

    reduced: int
    returned: int
    work: tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A system's step. ``reduce`` is "scatter" (to owners) or "all"; nothing returns where ``returned`` is 0."""

    system: str
    reduce: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in seconds: of each shape's Newton-Schulz, of gathering ``numels`` fp32 elements, of each schedule."""

    shapes: dict[tuple[int, int], float]
    numels: tuple[int, ...]
    gathers: tuple[float, ...]
    scatters: tuple[float, ...]
    steps: dict[str, float]


def run_trial(
    rank: int, world_size: int, meeting_point: str, schedules: Sequence[Schedule], numels: Sequence[int], repeats: int
) -> Measured:
    """Called on all ranks, each its own process. All ranks compute at once, as they would in training."""
    torch.set_num_threads(1)
    collectives = join(rank, world_size, meeting_point)
    try:
        atoms = {atom.shape: atom for s in schedules for b in s.buckets for work in b.work for atom in work}
        actions: dict[Hashable, Callable[[], None]] = {}
        actions |= {("shape", shape): partial(_work, [atom]) for shape, atom in sorted(atoms.items())}
        actions |= {("gather", numel): partial(_gather, collectives, numel) for numel in numels}
        actions |= {("scatter", numel): partial(_scatter, collectives, numel) for numel in numels}
        actions |= {("step", s.system): partial(_step, collectives, s) for s in schedules}
        medians = _medians(actions, collectives, repeats)
        return Measured(
            {shape: medians["shape", shape] for shape in atoms},
            tuple(numels),
            tuple(medians["gather", numel] for numel in numels),
            tuple(medians["scatter", numel] for numel in numels),
            {s.system: medians["step", s.system] for s in schedules},
        )
    finally:
        leave()


def _medians(
    actions: Mapping[Hashable, Callable[[], None]], collectives: TorchCollectives, repeats: int
) -> dict[Hashable, float]:
    """Medians of the slowest rank's seconds. In rounds of all actions: a machine that slows down does so for all."""
    seconds: dict[Hashable, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            collectives.barrier()
            start = time.perf_counter()
            action()
            seconds[name].append(max(collectives.gather_objects(time.perf_counter() - start)))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first round warms up


def _step(collectives: TorchCollectives, schedule: Schedule) -> None:
    """All reductions, all work, all returns: nothing overlaps, and no rank waits for another's share of a bucket."""
    for bucket in schedule.buckets:
        if schedule.reduce == "all":
            collectives.all_reduce(_buffer(bucket.reduced, collectives.world_size, torch.float32))
        else:
            _scatter(collectives, bucket.reduced)
    for bucket in schedule.buckets:
        _work(bucket.work[collectives.rank])
    for bucket in schedule.buckets:
        if bucket.returned:
            _gather(collectives, bucket.returned, torch.bfloat16)


def _work(atoms: Sequence[Atom]) -> None:
    for atom in atoms:
        newton_schulz(torch.ones(atom.shape), steps=STEPS, coefficients=JORDAN, eps=1e-7, dtype=torch.bfloat16)


def _scatter(collectives: TorchCollectives, numel: int) -> None:
    sent = _buffer(numel, collectives.world_size, torch.float32)
    collectives.reduce_scatter(_buffer(sent.numel() // collectives.world_size, 1, torch.float32), sent)


def _gather(collectives: TorchCollectives, numel: int, dtype: torch.dtype = torch.float32) -> None:
    received = _buffer(numel, collectives.world_size, dtype)
    collectives.all_gather(received, _buffer(received.numel() // collectives.world_size, 1, dtype))


@cache
def _buffer(numel: int, parts: int, dtype: torch.dtype) -> Tensor:
    """Zeros that divide into ``parts``; kept, as an engine keeps its buffers."""
    return torch.zeros(-(-numel // parts) * parts, dtype=dtype)
