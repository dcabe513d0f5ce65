"""Plans of plain PyTorch's buckets: matrices and element-wise parameters in buckets, cut between ranks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

from lwopt_backend.plan.buffers.dealing import deal, deal_padded, ends_where_even, ends_where_full
from lwopt_backend.plan.buffers.layout import (
    BUCKET_END,
    LAYOUTS,
    Bucket,
    BucketLayout,
    BufferParam,
    Layout,
    Slot,
    aligned,
    arrange_elementwise,
    arrange_matrices,
    imbalance,
    never,
)
from lwopt_backend.plan.cost import MACHINES, Machine

# Parameters with several matrices, concatenated in buckets that are cut between ranks where a matrix ends.
#
# ::
#
#     | e0 e1 e2 e3 | e4 e5 | q k v | q k v |     stacks and fused weights, each contiguous, to be a view
#     | rank 0  | rank 1  | rank 2  | rank 3 |     matrices are whole in one part; nothing is padded
#
# So the experts of a stack can have several owners, although the stack is one tensor.


def arrange_cut(
    params: Sequence[BufferParam], members: Sequence[int], before: Sequence[int]
) -> tuple[Bucket, list[int]]:
    """One bucket of ``members``, in this order, over as many ranks as ``before``, each rank's work so far.

    Consecutive matrices go to consecutive ranks, so that the busiest rank has the least work. Returns the bucket and
    the work that it adds to each rank.
    """
    parts = [part for index in members for part in params[index].parts]
    cost_before = [*accumulate((cost for _, cost in parts), initial=0)]
    low = max(*before, -(-(sum(before) + cost_before[-1]) // len(before)))
    high = low + max(cost for _, cost in parts)  # a matrix left over would mean that every rank has more than ``low``
    while low < high:  # bisection for the least largest sum, among the sums that ranks can have
        counts, fullest, fuller = _filled(cost_before, before, (low + high) // 2)
        low, high = (low, fullest) if sum(counts) == len(parts) else (fuller, high)
    counts, _, _ = _filled(cost_before, before, low)
    slots, end = [], 0
    for index in members:
        slots.append(Slot(index, end, params[index].numel))
        end += params[index].numel
    bounds, added, first, start = [], [], 0, 0
    for count in counts:
        mine = parts[first : first + count]
        stop = start + sum(numel for numel, _ in mine)
        bounds.append((start, stop))
        added.append(sum(cost for _, cost in mine))
        first, start = first + count, stop
    sizes = {stop - start for start, stop in bounds}
    layout: BucketLayout = "padded" if len(sizes) == 1 else "compact"
    return Bucket("matrix", layout, params[members[0]].dtype, tuple(slots), tuple(bounds), end), added


def _filled(cost_before: Sequence[int], before: Sequence[int], limit: int) -> tuple[list[int], int, int]:
    """The number of matrices that each rank takes if it takes all that fit under the limit, which no load ``before``
    exceeds; the largest load then; and the least limit under which a rank would take more, if matrices are left."""
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


def split_buckets(
    params: Sequence[BufferParam], bucket_numel: int, before: Sequence[int]
) -> tuple[list[Bucket], list[int], list[str]]:
    """Buckets of the parameters with several matrices, in backward order; a bucket closes at ``bucket_numel``."""
    buckets: list[Bucket] = []
    loads = [0] * len(before)
    cuttable = [i for i in reversed(range(len(params))) if params[i].parts]
    for members in _in_buckets(params, cuttable, bucket_numel):
        bucket, added = arrange_cut(params, members, [*map(add, before, loads)])
        buckets.append(bucket)
        loads = [*map(add, loads, added)]
    matrices = sum(len(params[index].parts) for index in cuttable)
    told = f"{len(cuttable)} parameters hold {matrices} matrices, each with its own owner."
    return buckets, loads, [told]


# From parameters to buckets: their layout, their number of ranks, their order.


MOST_PADDING = 0.05  # of the parameters' elements; with more, ``auto`` is compact
MOST_PADDING_ON_NCCL = 0.25  # for memory; below it, ``auto`` takes the layout with faster modelled collectives
ELEMENT_BYTES = 2  # on the wire, of a 16-bit parameter; the choice between layouts is the same within a factor of 2


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """``buckets`` over ``group_size`` ranks, repeated in ``instances``; slots name parameters by their position.

    ``loads`` is the work of each rank of an instance. ``choices`` explain the plan in sentences.
    """

    group_size: int
    instances: int
    buckets: tuple[Bucket, ...]
    loads: tuple[int, ...]
    choices: tuple[str, ...]

    @property
    def padding(self) -> int:
        return sum(bucket.padding for bucket in self.buckets)

    def lines(self) -> list[str]:
        """The lines that must be equal on all ranks."""
        return [f"{self.instances} instances of {self.group_size}", *(bucket.line() for bucket in self.buckets)]


def plan_buffers(
    params: Sequence[BufferParam],
    ranks: int,
    layout: Layout,
    bucket_numel: int,
    group_size: int | None = None,
    base: Sequence[int] | None = None,
    machine: Machine = MACHINES["cpu"],
    end: int = BUCKET_END,
) -> BufferPlan:
    """Plan ``params``, in model order, over groups of ``group_size`` ranks; None is all ``ranks``.

    Buckets are in the order in which backward completes them, and close at ``bucket_numel`` elements. The matrices in
    one parameter may have several owners, unless the layout is padded. ``base`` is each rank's work from other plans.
    ``machine`` is the cost model by which the layout ``auto`` chooses. A padded bucket ends on a multiple of ``end``.
    Raises ValueError for an unknown layout or a group size that does not divide the ranks.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'padded', 'compact' or 'auto', found {layout!r}")
    if group_size is not None and (group_size < 1 or ranks % group_size):
        raise ValueError(f"group_size: expected a divisor of the {ranks} data-parallel ranks, found {group_size}")
    size = group_size or ranks
    before = [max((base or [0] * ranks)[place::size]) for place in range(size)]  # the busiest instance's
    buckets: list[Bucket] = []
    loads = [0] * size
    choices: list[str] = []
    cut = layout in ("auto", "compact") and any(param.parts for param in params)
    if cut:
        buckets, loads, choices = split_buckets(params, bucket_numel, before)
    backwards = range(len(params))[::-1]
    whole = [i for i in backwards if params[i].atom is not None and not (cut and params[i].parts)]
    for members in _in_buckets(params, whole):
        found, added = _matrix_buckets(params, members, layout, bucket_numel, [*map(add, before, loads)], machine, end)
        buckets += found
        loads = [*map(add, loads, added)]
        choices.append(_told(found, added))
    elementwise = [i for i in backwards if params[i].atom is None]
    for members in _in_buckets(params, elementwise, bucket_numel):
        buckets.append(_elementwise_bucket(params, members, size, layout, end))
    buckets.sort(key=lambda bucket: -min(slot.param for slot in bucket.slots))
    if size < ranks:
        choices.append(f"{ranks // size} instances of {size} ranks; gradients are summed across them once per bucket.")
    matrices = sum(len(param.parts) if cut and param.parts else 1 for param in params if param.atom is not None)
    if 0 < matrices < size:
        fewer = max(each for each in range(1, matrices + 1) if ranks % each == 0)
        choices.append(
            f"{size - matrices} of {size} ranks own no matrix, because there are {matrices}. With group_size={fewer}, "
            f"{ranks // fewer} instances of {fewer} ranks would each own all, and no rank would be without."
        )
    plan = BufferPlan(size, ranks // size, tuple(buckets), tuple(loads), tuple(choices))
    if end == BUCKET_END:
        return plan
    more = plan.padding - plan_buffers(params, ranks, layout, bucket_numel, group_size, base, machine).padding
    of_all = more / max(1, sum(param.numel for param in params))
    told = f"Padded buckets end on multiples of {end} elements, which adds {more} elements of padding ({of_all:.2%})."
    return replace(plan, choices=(*choices, told))


def _matrix_buckets(
    params: Sequence[BufferParam],
    members: Sequence[int],
    layout: Layout,
    bucket_numel: int,
    before: Sequence[int],
    machine: Machine,
    end: int,
) -> tuple[list[Bucket], list[int]]:
    """The buckets of the matrices ``members`` of one dtype, in backward order, and the work added to each rank.

    ``auto`` is padded if that adds at most ``MOST_PADDING``; on NCCL at most ``MOST_PADDING_ON_NCCL``, and only if
    padding is no slower. Otherwise, and on a single rank, which sends nothing, it is compact.
    """
    if layout == "auto":
        padded = _matrix_buckets(params, members, "padded", bucket_numel, before, machine, end)
        most = MOST_PADDING_ON_NCCL if machine.launch_seconds else MOST_PADDING
        small = len(before) > 1 and _padding(padded[0]) <= most
        if small and not machine.launch_seconds:
            return padded
        compact = _matrix_buckets(params, members, "compact", bucket_numel, before, machine, end)
        return padded if small and _pays(padded[0], compact[0], len(before), machine) else compact
    ranks, loads = len(before), list(before)
    numels = [aligned(params[index].numel) for index in members]
    costs = [atom.cost for index in members if (atom := params[index].atom) is not None]
    if layout == "padded":
        ends = ends_where_even(numels, ranks, bucket_numel)
        owners = []
        for start, stop in zip([0, *ends], ends):
            owners += deal_padded(numels[start:stop], costs[start:stop], loads)
    elif layout == "compact":
        ends = ends_where_full(numels, ranks, bucket_numel)
        owners = deal(numels, costs, loads, sum(numels))
    else:
        never(layout)
    sizes = [(index, params[index].numel) for index in members]
    dtype = params[members[0]].dtype
    spans = [slice(start, stop) for start, stop in zip([0, *ends], ends)]
    buckets = [arrange_matrices(sizes[s], owners[s], ranks, layout, dtype, end) for s in spans]
    return buckets, [load - had for load, had in zip(loads, before)]


def _elementwise_bucket(
    params: Sequence[BufferParam], members: Sequence[int], ranks: int, layout: Layout, end: int
) -> Bucket:
    """A bucket of element-wise parameters; ``auto`` works as for matrices."""
    sizes, dtype = [(index, params[index].numel) for index in members], params[members[0]].dtype
    if layout == "auto":
        padded = arrange_elementwise(sizes, ranks, "padded", dtype, end)
        layout = "padded" if ranks > 1 and _padding([padded]) <= MOST_PADDING else "compact"
    return arrange_elementwise(sizes, ranks, layout, dtype, end)


def _pays(padded: Sequence[Bucket], compact: Sequence[Bucket], ranks: int, machine: Machine) -> bool:
    """Whether sending the padding takes no longer than the unequal parts of the compact buckets.

    NCCL performs an uneven collective as one operation per owner (a reduce or a broadcast), which takes longer than the
    rounds of an even one if there are more owners than rounds.
    """
    uneven = even = 0.0
    for bucket in compact:
        owners = sum(stop > start for start, stop in bucket.parts)
        uneven += machine.collective(1, ranks, operations=1 if bucket.even else owners)[1]
        even += machine.collective(1, ranks)[1]
    more = ELEMENT_BYTES * sum(bucket.padding for bucket in padded) * (ranks - 1) / ranks
    return machine.collective(more, ranks)[0] <= uneven - even


def _padding(buckets: Sequence[Bucket]) -> float:
    """Padding divided by the parameters' elements."""
    padding = sum(bucket.padding for bucket in buckets)
    return padding / max(1, sum(bucket.numel for bucket in buckets) - padding)


def _in_buckets(
    params: Sequence[BufferParam], members: Sequence[int], bucket_numel: float = math.inf
) -> Iterator[list[int]]:
    """Yield ``members`` of equal dtype, closed at ``bucket_numel``; a tied element-wise one has its own bucket.

    A tied weight's gradient is complete only when backward reaches its first use, and would delay its neighbours.
    """
    open_buckets: dict[str, list[int]] = {}
    filled: Counter[str] = Counter()
    for index in members:
        param = params[index]
        if param.tied and param.atom is None:
            yield [index]
            continue
        open_buckets.setdefault(param.dtype, []).append(index)
        filled[param.dtype] += param.numel
        if filled[param.dtype] >= bucket_numel:
            yield open_buckets.pop(param.dtype)
            filled[param.dtype] = 0
    yield from open_buckets.values()


def _told(buckets: Sequence[Bucket], loads: Sequence[int]) -> str:
    return (
        f"Layout: {sum(len(bucket.slots) for bucket in buckets)} {buckets[0].dtype} matrices in {len(buckets)} "
        f"{buckets[0].layout} bucket(s), {_padding(buckets):.1%} padding, busiest rank over mean "
        f"{imbalance(loads):.3f}."
    )
