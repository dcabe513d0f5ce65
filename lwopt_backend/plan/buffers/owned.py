"""Plans of owned storage: matrices and element-wise parameters in buckets, cut between ranks where that pays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.instances import Grouped, plan_buffer
from lwopt_backend.plan.buffers.layout import (
    Bucket,
    BucketLayout,
    BufferPlan,
    OwnedParam,
    Setting,
    Slot,
    Stream,
    aligned_shard,
    arrange_elementwise,
    arrange_matrices,
    check_choices,
)
from lwopt_backend.plan.buffers.packing import relieve
from lwopt_backend.plan.buffers.placement import place_costliest_first
from lwopt_backend.plan.cost import StepTime, gather_seconds

# Parameters with several matrices, concatenated in buckets that are cut between ranks where a matrix ends.
#
# ::
#
#     | e0 e1 e2 e3 | e4 e5 | q k v | q k v |     stacks and fused weights, each contiguous, to be a view
#     | rank 0  | rank 1  | rank 2  | rank 3 |     matrices are whole in one part; nothing is padded
#
# So the experts of a stack can have several owners, although the stack is one tensor.


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Parameter ``param`` as its matrices, in memory order: the elements and the cost of each."""

    param: int
    parts: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.parts)


def arrange_cut(members: Sequence[Cuttable], before: Sequence[int], dtype: str) -> tuple[Bucket, list[int]]:
    """One bucket of ``members``, in this order, over as many ranks as ``before``, each rank's work so far.

    Consecutive matrices go to consecutive ranks, so that the busiest rank has the least work. Returns the bucket and
    the work that it adds to each rank.
    """
    parts = [part for member in members for part in member.parts]
    cost_before = [*accumulate((cost for _, cost in parts), initial=0)]
    low = max(*before, -(-(sum(before) + cost_before[-1]) // len(before)))
    high = low + max(cost for _, cost in parts)  # if a matrix were left, every rank would have more than ``low``
    while low < high:  # bisection for the least largest sum, among the sums that ranks can have
        counts, fullest, fuller = _filled(cost_before, before, (low + high) // 2)
        low, high = (low, fullest) if sum(counts) == len(parts) else (fuller, high)
    counts, _, _ = _filled(cost_before, before, low)
    slots, end = [], 0
    for member in members:
        slots.append(Slot(member.param, end, member.numel))
        end += member.numel
    bounds, added, first, start = [], [], 0, 0
    for count in counts:
        mine = parts[first : first + count]
        stop = start + sum(numel for numel, _ in mine)
        bounds.append((start, stop))
        added.append(sum(cost for _, cost in mine))
        first, start = first + count, stop
    sizes = {stop - start for start, stop in bounds}
    layout: BucketLayout = "padded" if len(sizes) == 1 else "compact"
    return Bucket("matrix", layout, dtype, tuple(slots), tuple(bounds), end), added


def _filled(cost_before: Sequence[int], before: Sequence[int], limit: int) -> tuple[list[int], int, int]:
    """How many matrices each rank takes if it takes all that fit under the limit, which no load ``before`` is above;
    the largest load then, and the least limit under which a rank would take more, if matrices are left."""
    counts, place, fullest, fuller = [], 0, 0, cost_before[-1] + limit
    for load in before:
        start = load - cost_before[place]
        stop = bisect_right(cost_before, limit - start)
        counts.append(stop - 1 - place)
        place = stop - 1
        fullest = max(fullest, start + cost_before[place])
        if stop < len(cost_before):
            fuller = min(fuller, start + cost_before[stop])
    return counts, fullest, fuller


def cut_buckets(
    params: Sequence[OwnedParam], bucket_numel: int, before: Sequence[int]
) -> tuple[list[Bucket], list[int], list[str]]:
    """Buckets of the parameters with several matrices, in backward order; a bucket closes at ``bucket_numel``."""
    buckets: list[Bucket] = []
    loads = [0] * len(before)
    open_buckets: dict[str, list[Cuttable]] = {}
    cuttable = [i for i in reversed(range(len(params))) if params[i].parts]
    for index in cuttable:
        param = params[index]
        members = open_buckets.setdefault(param.dtype, [])
        members.append(Cuttable(index, param.parts))
        last = all(params[other].dtype != param.dtype for other in cuttable if other < index)
        if last or sum(member.numel for member in members) >= bucket_numel:
            work = [had + more for had, more in zip(before, loads)]
            bucket, added = arrange_cut(open_buckets.pop(param.dtype), work, param.dtype)
            buckets.append(bucket)
            loads = [had + more for had, more in zip(loads, added)]
    matrices = sum(len(params[index].parts) for index in cuttable)
    told = f"{matrices} matrices of {len(cuttable)} parameters that hold several are owned one by one."
    return buckets, loads, [told]


def on_top_of(plan: BufferPlan, base: Sequence[int]) -> BufferPlan:
    """``plan`` with owners that make the largest sum of a shard's ``base`` and its load small; without more padding.

    Returns the plan with the smallest such sum, the earlier on a tie, of three: as it is; with its shards dealt again
    (the costliest to the rank with the least ``base``); with its matrices placed again in shards that are no larger.
    """
    return min(_candidates(plan, base), key=lambda candidate: max(map(sum, zip(base, candidate.loads()))))


def _candidates(plan: BufferPlan, base: Sequence[int]) -> Iterator[BufferPlan]:
    yield plan
    loads = plan.loads()
    heavy_first = sorted(range(plan.shards), key=lambda shard: (-loads[shard], shard))
    light_first = sorted(range(plan.shards), key=lambda shard: (base[shard], shard))
    rank_of = dict(zip(heavy_first, light_first))
    yield replace(plan, owners=tuple(rank_of[owner] for owner in plan.owners))
    stream = Stream(plan.atoms)
    of_bucket = list(reversed(plan.buckets))
    cuts = (0, *(i for i in range(1, len(of_bucket)) if of_bucket[i] != of_bucket[i - 1]), len(of_bucket))
    caps = list(plan.shard_numels) if plan.layout == "padded" else [plan.numel + len(stream) * 64] * (len(cuts) - 1)
    placed = place_costliest_first(stream, cuts, stream.costs, caps, plan.shards, base)
    if all(height <= cap for height, cap in zip(placed.heights, caps)):
        relieve(placed, caps)
        heights = tuple(aligned_shard(height, plan.shards) for height in placed.heights)
        numels = plan.shard_numels if plan.layout == "padded" else heights
        yield replace(plan, owners=tuple(reversed(placed.owners)), shard_numels=numels)


# From parameters to buckets: their layout, their number of ranks, their order.
#
# Matrix buckets come from the planner (``instances``); element-wise ones are cut in backward order. Buckets are in the
# order in which backward completes them.

# A compact bucket's parts differ in length: one reduce and one broadcast per owner, in one group of calls. Their cost
# beyond that of a fixed-size collective is assumed to be one more latency.
UNEVEN_LATENCIES = 1
_Candidate = tuple[StepTime, str, list[Bucket], BufferPlan]  # the planner of the owners, and the buckets


@dataclass(frozen=True, slots=True)
class OwnedPlan:
    """``buckets`` over ``group_size`` ranks, repeated in ``instances``; slots name parameters by their position.

    ``loads`` is the work of each rank of an instance. ``choices`` are sentences that explain the plan. ``modelled`` is
    a step's work, and its wire within an instance, without overlap.
    """

    group_size: int
    instances: int
    buckets: tuple[Bucket, ...]
    loads: tuple[int, ...]
    choices: tuple[str, ...]
    modelled: StepTime

    @property
    def padding(self) -> int:
        return sum(bucket.padding for bucket in self.buckets)

    def lines(self) -> list[str]:
        """The lines that must be equal on all ranks."""
        return [f"{self.instances} instances of {self.group_size}", *(bucket.line() for bucket in self.buckets)]


def plan_owned(
    params: Sequence[OwnedParam],
    ranks: int,
    setting: Setting,
    group_size: int | None,
    base: Sequence[int] | None = None,
) -> OwnedPlan:
    """Plan ``params``, in model order, over ``ranks`` ranks. With ``group_size`` None, the planner chooses it.

    ``base`` is each rank's work from other plans. Raises ValueError for an unknown layout or a group size that does not
    divide the ranks.
    """
    if any(param.parts for param in params) and setting.layout != "padded":
        plans = [_plan(params, ranks, setting, group_size, base, cut=cut) for cut in (False, True)]
        return min(plans, key=lambda plan: plan.modelled.total)
    return _plan(params, ranks, setting, group_size, base, cut=False)


def _plan(
    params: Sequence[OwnedParam],
    ranks: int,
    setting: Setting,
    group_size: int | None,
    base: Sequence[int] | None,
    *,
    cut: bool,
) -> OwnedPlan:
    """``plan_owned``; with ``cut``, the matrices in one parameter may have different owners."""
    check_choices(setting.layout, group_size, ranks)
    by_dtype: dict[str, list[int]] = {}
    for index, param in enumerate(params):
        if param.atom is not None and not (cut and param.parts):
            by_dtype.setdefault(param.dtype, []).append(index)
    proposals = []
    if by_dtype and group_size is None:
        largest = max(by_dtype.values(), key=lambda some: sum(params[i].numel for i in some))
        atoms = _atoms(params, largest)
        grouped = _planned(atoms, ranks, setting, setting.layout, None)
        group_size = grouped.group_size
        proposals = _proposals(atoms, ranks, setting, grouped)
    size = group_size or ranks
    of_place = [max((base or [0] * ranks)[place::size]) for place in range(size)]  # the busiest instance's
    buckets, loads, choices = cut_buckets(params, setting.bucket_numel, of_place) if cut else ([], [0] * size, [])
    for dtype, members in by_dtype.items():
        before = [work + load for work, load in zip(of_place, loads)]
        atoms = _atoms(params, members)
        found, plan, why = _matrix_buckets(atoms, members, dtype, ranks, size, setting, before)
        buckets += found
        choices.append(why)
        loads = [load + more for load, more in zip(loads, plan.loads())]
    # "auto" uses fixed-size collectives; one rank needs none.
    automatic: BucketLayout = "compact" if size == 1 else "padded"
    layout: BucketLayout = automatic if setting.layout == "auto" else setting.layout  # type: ignore[assignment]
    for dtype, members in _elementwise(params, setting.bucket_numel):
        sizes = [(i, params[i].numel) for i in members]
        buckets.append(arrange_elementwise(sizes, size, layout, dtype, multiple=setting.bus_multiple))
    buckets.sort(key=lambda bucket: -min(slot.param for slot in bucket.slots))
    if size < ranks:
        choices.append(f"{ranks // size} instances of {size} ranks; gradients are summed across them once per bucket.")
    work = setting.cost.seconds(max(map(sum, zip(of_place, loads))), setting.machine.flops_per_second)
    modelled = sum((_wire(bucket, setting) for bucket in buckets), StepTime(work, 0, 0))
    return OwnedPlan(size, ranks // size, tuple(buckets), tuple(loads), (*choices, *proposals), modelled)


def _atoms(params: Sequence[OwnedParam], members: Iterable[int]) -> list[Atom]:
    return [atom for member in members if (atom := params[member].atom) is not None]


def _planned(atoms: Sequence[Atom], ranks: int, setting: Setting, layout: str, group_size: int | None) -> Grouped:
    return plan_buffer(
        atoms,
        ranks,
        layout=layout,
        bucket_numel=setting.bucket_numel,
        machine=setting.machine,
        cost=setting.cost,
        group_size=group_size,
        elements=setting.elements,
    )


def _proposals(atoms: Sequence[Atom], ranks: int, setting: Setting, chosen: Grouped) -> list[str]:
    """If ranks have no matrix, what instances in which every rank has one would cost."""
    if chosen.group_size <= len(atoms):
        return []
    size = max(size for size in range(1, len(atoms) + 1) if ranks % size == 0)
    other = _planned(atoms, ranks, setting, setting.layout, size)
    return [
        f"{chosen.group_size - len(atoms)} of {chosen.group_size} ranks own no matrix. group_size={size} would leave "
        f"none without: modelled step {1e3 * other.time.total:.3g} ms instead of {1e3 * chosen.time.total:.3g} ms."
    ]


def _matrix_buckets(
    atoms: Sequence[Atom],
    members: Sequence[int],
    dtype: str,
    ranks: int,
    size: int,
    setting: Setting,
    before: Sequence[int],
) -> tuple[list[Bucket], BufferPlan, str]:
    """The buckets of one dtype's matrices. ``auto``: the better planner's owners, each bucket in its faster layout."""
    fixed = setting.layout if setting.layout != "auto" else None
    candidates: list[_Candidate] = []
    for planner in ("padded", "compact") if fixed is None else (fixed,):
        plan = on_top_of(_planned(atoms, ranks, setting, planner, size).plan, before)
        padded = arrange_matrices(plan, members, "padded", dtype, multiple=setting.bus_multiple)
        compact = arrange_matrices(plan, members, "compact", dtype)
        pairs = zip(padded, compact)
        buckets = [_faster(pair, setting) if fixed is None else pair[fixed == "compact"] for pair in pairs]
        time = sum((_wire(bucket, setting) for bucket in buckets), StepTime(0, 0, 0))
        work = setting.cost.seconds(max(map(sum, zip(before, plan.loads()))), setting.machine.flops_per_second)
        candidates.append((replace(time, compute=work), planner, buckets, plan))
    best = min(candidates, key=lambda candidate: candidate[0].total)
    return best[2], best[3], _why(candidates, best, dtype)


def _faster(pair: tuple[Bucket, Bucket], setting: Setting) -> Bucket:
    """The faster of a bucket's padded and compact forms; the padded one on a tie, if it has no padding."""
    padded, compact = pair
    slower = _wire(padded, setting).total > _wire(compact, setting).total
    return compact if slower or (len(padded.parts) == 1 and padded.padding) else padded


def _wire(bucket: Bucket, setting: Setting) -> StepTime:
    """The modelled wire time of gradients to the owners and parameters back."""
    ranks = len(bucket.parts)
    wire = latency = 0.0
    for nbytes in (setting.elements.gradient, setting.elements.parameter):
        seconds = gather_seconds(setting.machine, bucket.numel * nbytes, ranks)
        wire += seconds[0]
        latency += seconds[1] * (1 if bucket.even else 1 + UNEVEN_LATENCIES)
    return StepTime(0.0, wire, latency)


def _elementwise(params: Sequence[OwnedParam], bucket_numel: int) -> Iterable[tuple[str, list[int]]]:
    """Element-wise parameters in backward order, by dtype, closed at ``bucket_numel``; a tied one has its own bucket.

    A tied weight's gradient is complete only when backward reaches its first use, and would delay its neighbours.
    """
    open_buckets: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for index in reversed(range(len(params))):
        param = params[index]
        if param.atom is not None:
            continue
        if param.tied:
            yield param.dtype, [index]
            continue
        open_buckets.setdefault(param.dtype, []).append(index)
        filled[param.dtype] = filled.get(param.dtype, 0) + param.numel
        if filled[param.dtype] >= bucket_numel:
            yield param.dtype, open_buckets.pop(param.dtype)
            filled[param.dtype] = 0
    yield from open_buckets.items()


def _why(candidates: Sequence[_Candidate], best: _Candidate, dtype: str) -> str:
    time, planner, buckets, plan = best
    kinds = [bucket.layout for bucket in buckets]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("padded", "compact") if kind in kinds)
    numel = sum(bucket.numel for bucket in buckets)
    padding = sum(bucket.padding for bucket in buckets) / max(1, numel - sum(bucket.padding for bucket in buckets))
    seconds = "; ".join(
        f"{name} owners {1e3 * each.total:.3g} ms = {1e3 * each.compute:.3g} work + {1e3 * each.wire:.3g} wire + "
        f"{1e3 * each.latency:.3g} latency"
        for each, name, *_ in candidates
    )
    loads = plan.loads()
    even = max(loads) * len(loads) / max(1, sum(loads))
    return (
        f"Layout: {len(plan.atoms)} {dtype} matrices in {len(buckets)} bucket(s), {counts}, {padding:.1%} padding, "
        f"busiest rank over mean {even:.3f}. Modelled step: {seconds}."
    )
