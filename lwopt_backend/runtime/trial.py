"""Steps that are run, not modelled: what a system does per step, on real collectives with real Newton-Schulz.

Gradients are taken to be there; a step is what follows backward. It runs on the ranks of a machine, to see how far the
model of ``plan.machine`` can be trusted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lwopt_backend.plan.types import Atom
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

        def median(action: Callable[[], None]) -> float:
            return _median(action, collectives, repeats)

        shapes = {shape: median(lambda atom=atom: _work([atom])) for shape, atom in sorted(atoms.items())}
        gathers = tuple(median(lambda n=n: _gather(collectives, n)) for n in numels)
        scatters = tuple(median(lambda n=n: _scatter(collectives, n)) for n in numels)
        steps = {s.system: median(lambda s=s: _step(collectives, s)) for s in schedules}
        return Measured(shapes, tuple(numels), gathers, scatters, steps)
    finally:
        leave()


def _median(action: Callable[[], None], collectives: TorchCollectives, repeats: int) -> float:
    """Of the slowest rank's time, after a warm-up."""
    action()
    seconds = []
    for _ in range(repeats):
        collectives.barrier()
        start = time.perf_counter()
        action()
        seconds.append(max(collectives.gather_objects(time.perf_counter() - start)))
    return statistics.median(seconds)


def _step(collectives: TorchCollectives, schedule: Schedule) -> None:
    for bucket in schedule.buckets:
        if schedule.reduce == "all":
            collectives.all_reduce(_buffer(bucket.reduced, collectives.world_size, torch.float32))
        else:
            _scatter(collectives, bucket.reduced)
        _work(bucket.work[collectives.rank])
        if bucket.returned:
            _gather(collectives, bucket.returned, torch.bfloat16)


def _work(atoms: Sequence[Atom]) -> None:
    for atom in atoms:
        newton_schulz(torch.ones(atom.shape), steps=STEPS, coefficients=JORDAN, eps=1e-7, dtype=torch.bfloat16)


def _scatter(collectives: TorchCollectives, numel: int) -> None:
    sent = _buffer(numel, collectives.world_size, torch.float32)
    collectives.reduce_scatter(torch.empty(sent.numel() // collectives.world_size), sent)


def _gather(collectives: TorchCollectives, numel: int, dtype: torch.dtype = torch.float32) -> None:
    received = _buffer(numel, collectives.world_size, dtype)
    collectives.all_gather(received, received[: received.numel() // collectives.world_size].clone())


def _buffer(numel: int, world_size: int, dtype: torch.dtype) -> Tensor:
    """Zeros, made to divide into equal parts."""
    return torch.zeros(-(-numel // world_size) * world_size, dtype=dtype)
