"""How many ranks own together: all of them, or instances of fewer that each have the whole buffer (as in HSDP).

Padded shards all fit the largest matrix, so more ranks than large matrices only add padding: 64 ranks that share 12
layers store 64 times the largest matrix. Owned by ``group_size`` ranks and repeated, the buffer shrinks, gradients are
summed across the instances once per bucket, and no rank need do more work than the largest matrix's owner had to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import BufferPlan, Stream, aligned_shard, check_choices
from lwopt_backend.plan.buffers.packing import plan_compact, plan_padded
from lwopt_backend.plan.buffers.placement import height_bound
from lwopt_backend.plan.buffers.step import Elements, buffer_step
from lwopt_backend.plan.cost import CostModel, Machine, StepTime

TOLERATED = 0.10  # share of padding, or of idle ranks, above which smaller groups are tried
TRIED = 3  # group sizes that are planned in full, the fastest by their bounds
WORK_ALLOWED = (1.0, 1.5, 2.0)  # times the busiest rank's work with all ranks; more only if less does not help


@dataclass(frozen=True, slots=True)
class Grouped:
    """A buffer's plan over ``plan.shards`` neighbouring ranks, repeated in ``instances``, and the cost of a step."""

    plan: BufferPlan
    instances: int
    time: StepTime

    @property
    def group_size(self) -> int:
        return self.plan.shards

    def memory_bytes(self, elements: Elements) -> int:
        """Bytes of the fullest rank: parameters and gradients of the buffer, masters and state of what it owns."""
        return _memory_bytes(self.plan.buffer_numel, max(self.plan.owned_numels()), elements)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The best that a plan over ``group_size`` ranks can be."""

    group_size: int
    memory: int
    time: StepTime


def _memory_bytes(buffer_numel: int, owned_numel: int, elements: Elements) -> int:
    buffer = buffer_numel * (elements.parameter + elements.gradient)
    return buffer + owned_numel * (elements.master + elements.state)


def plan_buffer(
    atoms: Sequence[Atom],
    ranks: int,
    *,
    layout: str,
    bucket_numel: int | None,
    machine: Machine,
    cost: CostModel,
    group_size: int | None = None,
    elements: Elements | None = None,
) -> Grouped:
    """Plan ``atoms`` over ``ranks`` ranks in ``layout`` "padded", "compact" or "auto".

    With ``group_size`` None, it is ``ranks``, unless padding or the share of idle ranks is then above 10 %; then it is
    the fastest modelled divisor of ``ranks`` that needs no more memory and hardly more work on any rank. Layout "auto"
    takes the faster of both layouts, padded on a tie. Raises ValueError if there are no atoms, for an unknown layout,
    or for a group size that does not divide the ranks.
    """
    if not atoms:
        raise ValueError("there is no matrix to plan")
    check_choices(layout, group_size, ranks)
    elements = elements or Elements()
    stream = Stream(atoms)

    def planned(size: int, layout: str) -> Grouped:
        step = partial(buffer_step, machine=machine, cost=cost, instances=ranks // size, elements=elements)
        if layout == "padded":
            plan = plan_padded(atoms, size, bucket_numel=bucket_numel, seconds=lambda plan: step(plan).total)
        else:
            plan = plan_compact(atoms, size, bucket_numel=bucket_numel)
        return Grouped(plan, ranks // size, step(plan))

    def wastes(plan: BufferPlan) -> bool:
        idle = sum(load == 0 for load in plan.loads()) / plan.shards
        return max(plan.padding, idle) > TOLERATED

    found = []
    for each in ("padded", "compact") if layout == "auto" else (layout,):
        whole = planned(group_size or ranks, each)
        if group_size is None and wastes(whole.plan):
            bounds = [
                _bound(stream, g, ranks, each, machine, cost, elements) for g in range(1, ranks) if ranks % g == 0
            ]
            whole = _smaller(whole, bounds, cache(partial(planned, layout=each)), elements)
        found.append(whole)
    return min(found, key=lambda grouped: (grouped.time.total, -grouped.group_size))


def _smaller(
    whole: Grouped, bounds: Sequence[_Bound], planned: Callable[[int], Grouped], elements: Elements
) -> Grouped:
    """The fastest plan over a smaller group that wastes little, needs no more memory and hardly more work.

    No rank may need more memory than with ``whole``, nor more work, if that is possible; else up to ``WORK_ALLOWED``
    times as much. Otherwise the fastest that needs no more of either, which may be ``whole``.
    """
    memory = whole.memory_bytes(elements)
    fastest = whole
    for allowed in WORK_ALLOWED:
        work = allowed * whole.time.compute
        likely = sorted(
            (bound for bound in bounds if bound.memory <= memory and bound.time.compute <= work),
            key=lambda bound: (bound.time.total, -bound.group_size),
        )
        tried = [planned(bound.group_size) for bound in likely[:TRIED]]
        good = [g for g in tried if g.memory_bytes(elements) <= memory and g.time.compute <= work]
        frugal = [grouped for grouped in good if grouped.plan.padding <= TOLERATED]
        if frugal:
            return min([fastest, *frugal], key=lambda grouped: (grouped.time.total, -grouped.group_size))
        if allowed == WORK_ALLOWED[0]:
            fastest = min([whole, *good], key=lambda grouped: (grouped.time.total, -grouped.group_size))
    return fastest


def _bound(
    stream: Stream, size: int, ranks: int, layout: str, machine: Machine, cost: CostModel, elements: Elements
) -> _Bound:
    """One bucket of the lowest possible shards and the most even possible work."""
    counts = stream.counts(0, len(stream))
    numel = stream.numel_before[-1]
    height = height_bound([kind.numel for kind in stream.kinds], counts, size)
    order = sorted(range(len(stream.kinds)), key=lambda k: -stream.kinds[k].cost)
    load = height_bound([stream.kinds[k].cost for k in order], [counts[k] for k in order], size)
    ideal = Atom("all", (1, numel), load)
    plan = BufferPlan(layout, "bound", (ideal,), size, (0,), (0,), (aligned_shard(height, size),))
    time = buffer_step(plan, machine, cost, instances=ranks // size, elements=elements)
    return _Bound(
        size, _memory_bytes(plan.buffer_numel, height if layout == "padded" else numel // size, elements), time
    )
