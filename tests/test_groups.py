"""Groups and the model of a step: formulas by hand, and choices against every other choice there was."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lwopt_backend.plan import MACHINES, Atom, Machine
from lwopt_backend.plan.buffers.groups import Grouped, plan_buffer
from lwopt_backend.plan.buffers.layout import BufferPlan
from lwopt_backend.plan.buffers.step import BucketTime, Elements, buffer_step, schedule, timeline
from lwopt_backend.plan.cost import COSTS, CostModel
from lwopt_backend.plan.machine import CLUSTERS
from tests.planner_shapes import atoms_of, model
from tests.test_padded import assert_lawful, planned

FLOPS = COSTS["newton_schulz"]
H100 = CLUSTERS["h100-8x-ib"]
GB200 = CLUSTERS["gb200-72x-ib"]
SIMPLE = Machine("simple", flops_per_second=10, bytes_per_second=2, latency_seconds=100)
NODES_OF_TWO = replace(SIMPLE, node_size=2, node_bytes_per_second=8)
ONE_LAYER = list(model("llama3.1-8b")[:7])


def grouped(
    atoms: list[Atom], ranks: int, layout: str = "padded", *, machine: Machine = H100, size: int | None = None
) -> Grouped:
    return plan_buffer(
        atoms, ranks, layout=layout, bucket_numel=40_000_000, machine=machine, cost=FLOPS, group_size=size
    )


def two_buckets(layout: str) -> BufferPlan:
    """Over two shards: bucket 1 is matrix 0 (64 elements) at shard 1; bucket 0 is 1 (128) and 2 (64) at 0 and 1."""
    atoms = Atom("a", (8, 8), 30), Atom("b", (8, 16), 50), Atom("c", (8, 8), 40)
    return BufferPlan(layout, "by hand", atoms, 2, (1, 0, 1), (1, 0, 0), (128, 64))


# A step


def test_a_step_is_the_busiest_owners_work_and_every_buckets_bytes() -> None:
    # Work: shards do 50 and 70 flops. Buckets: 2 x 128 and 2 x 64 elements travel, half of them from a rank; 4 bytes a
    # gradient and 2 a parameter at 2 bytes a second. Four collectives of one round each.
    time = buffer_step(two_buckets("padded"), SIMPLE, FLOPS)
    assert (time.compute, time.wire, time.latency) == (7.0, (256 + 128) / 2 * (4 + 2) / 2, 4 * 100.0)
    # Compact, only the matrices.
    time = buffer_step(two_buckets("compact"), SIMPLE, FLOPS, elements=Elements(parameter=1, gradient=2))
    assert (time.compute, time.wire, time.latency) == (7.0, (192 + 64) / 2 * (2 + 1) / 2, 400.0)
    measured = CostModel("measured", "ns", lambda shape: 0, "")
    assert buffer_step(two_buckets("padded"), SIMPLE, measured).compute == 70e-9, "nanoseconds need no rate"


def test_instances_add_an_all_reduce_of_the_owned_gradients() -> None:
    # Three instances of two ranks: a rank holds half a bucket's gradients, and an all-reduce sends 2 x 2/3 of them in
    # 2 x 2 rounds.
    alone = buffer_step(two_buckets("padded"), SIMPLE, FLOPS)
    time = buffer_step(two_buckets("padded"), SIMPLE, FLOPS, instances=3)
    assert time.compute == alone.compute
    assert time.wire - alone.wire == pytest.approx((256 + 128) / 2 * 4 * (4 / 3) / 2)
    assert time.latency - alone.latency == 2 * 4 * 100


def test_neighbours_in_a_node_use_its_links_and_instances_do_not() -> None:
    inside = buffer_step(two_buckets("padded"), NODES_OF_TWO, FLOPS, instances=3)
    across = buffer_step(two_buckets("padded"), SIMPLE, FLOPS, instances=3)
    assert across.wire - inside.wire == pytest.approx((256 + 128) / 2 * 6 * (1 / 2 - 1 / 8))


def test_a_group_fills_nodes_or_shares_the_network() -> None:
    eight = replace(NODES_OF_TWO, node_size=8)  # of 2 bytes a second between nodes, 8 within
    each, together = (256 + 128) / 2 * (4 + 2), (256 + 128) / 2 * 4  # sent within a group of two, and across groups
    seconds = {n: buffer_step(two_buckets("padded"), eight, FLOPS, instances=n).wire for n in (1, 2, 4, 8)}
    assert seconds[1] == each / 8
    assert seconds[2] == pytest.approx(each / 8 + together * 2 * 1 / 2 / 8), "four ranks of a node"
    assert seconds[4] == pytest.approx(each / 8 + together * 2 * 3 / 4 / 8), "a node"
    assert seconds[8] == pytest.approx(each / 8 + together * 2 * 7 / 8 / 2), "two nodes"
    three = replace(eight, node_size=3)  # ranks 2 and 3 are a group in two nodes
    assert buffer_step(two_buckets("padded"), three, FLOPS, instances=2).wire == pytest.approx(
        each / 2 + together * 2 * 1 / 2 / 2
    )


def test_a_single_rank_sends_nothing() -> None:
    time = buffer_step(planned(ONE_LAYER, 1, None), H100, FLOPS)
    assert time.wire == time.latency == 0 and time.compute == sum(a.cost for a in ONE_LAYER) / H100.flops_per_second


# The order in which buckets pass


def test_buckets_arrive_in_order_then_return_when_their_last_owner_is_done() -> None:
    # wire     | b0 2 | b1 3    | b0 1     | b1 1
    # shard 0         | b0 3    | b1 4     |
    # shard 1         | b0 2 |  | b1 1 |   |
    times = schedule([(1, 2), (3, 4)], arrive=[2, 3], work=[{0: 3, 1: 2}, {0: 4, 1: 1}], back=[1, 1])
    assert times == [
        BucketTime(0, 1, 2, reduce=(0, 2), work=(2, 5), back=(5, 6)),
        BucketTime(1, 3, 4, reduce=(2, 5), work=(5, 9), back=(9, 10)),
    ]


def test_a_buckets_work_is_its_owners_work_alone() -> None:
    # Shard 0 works on bucket 0 from 1 to 11, shard 1 on bucket 1 from 2 to 3; it returns after bucket 0 nevertheless.
    times = schedule([(0, 0)] * 2, arrive=[1, 1], work=[{0: 10}, {1: 1}], back=[1, 1])
    assert [time.work for time in times] == [(1, 11), (2, 3)]
    assert [time.back for time in times] == [(11, 12), (12, 13)]
    # Shard 1 is still busy with bucket 0 when bucket 1 arrives, and nobody else has a part in bucket 1.
    times = schedule([(0, 0)] * 2, arrive=[1, 1], work=[{1: 10}, {1: 1}], back=[1, 1])
    assert [time.work for time in times] == [(1, 11), (11, 12)]


def assert_one_thing_at_a_time(times: list[BucketTime]) -> None:
    wire = sorted([time.reduce for time in times] + [time.back for time in times])
    assert all(earlier[1] <= later[0] + 1e-12 for earlier, later in zip(wire, wire[1:])), "one wire"
    for time in times:
        moments = [*time.reduce, *time.work, *time.back]
        assert all(earlier <= later + 1e-12 for earlier, later in zip(moments, moments[1:]))
    assert max(time.reduce[1] for time in times) <= min(time.back[0] for time in times), "arrivals go first"


@pytest.mark.parametrize("seed", range(50))
def test_any_schedule_keeps_wire_and_owners_in_order(seed: int) -> None:
    generator = random.Random(seed)
    buckets, shards = generator.randint(1, 8), generator.randint(1, 5)
    arrive, back = ([generator.choice([0, 1, 3]) for _ in range(buckets)] for _ in range(2))
    owners = [generator.sample(range(shards), generator.randint(1, shards)) for _ in range(buckets)]
    work = [{owner: generator.choice([0, 1, 4]) for owner in some} for some in owners]
    times = schedule([(0, 0)] * buckets, arrive, work, back)
    assert_one_thing_at_a_time(times)
    end = times[-1].back[1]
    busiest = max(sum(loads.get(rank, 0) for loads in work) for rank in range(shards))
    longest = sum(max(loads.values()) for loads in work)
    assert max(sum(arrive) + sum(back), busiest) <= end <= sum(arrive) + longest + sum(back)
    free = [0] * shards
    for loads, time in zip(work, times):  # an owner works on one bucket after the other, each after its arrival
        begins = {rank: max(free[rank], time.reduce[1]) for rank in loads}
        for rank, seconds in loads.items():
            free[rank] = begins[rank] + seconds
        assert time.work == (min(begins.values()), max(free[rank] for rank in loads))


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize(("ranks", "size"), [(16, 16), (32, 8), (8, 1)])
def test_the_timeline_ends_between_its_longest_part_and_their_sum(layout: str, ranks: int, size: int) -> None:
    plan = grouped(list(model("gpt2-124m")), ranks, layout, size=size)
    times = timeline(plan.plan, H100, FLOPS, instances=plan.instances)
    assert_one_thing_at_a_time(times)
    parts = buffer_step(plan.plan, H100, FLOPS, instances=plan.instances)
    end = times[-1].back[1]
    assert max(parts.compute, parts.wire + parts.latency) <= end * (1 + 1e-9) and end <= parts.total * (1 + 1e-9)
    on_wire = sum(time.reduce[1] - time.reduce[0] + time.back[1] - time.back[0] for time in times)
    assert on_wire == pytest.approx(parts.wire + parts.latency)
    assert sum(time.nbytes_reduced for time in times) == 4 * sum(plan.plan.bucket_numels)
    assert [time.nbytes_returned for time in times] == [2 * numel for numel in plan.plan.bucket_numels]


# Over how many ranks


def memory(plan: Grouped, elements: Elements) -> int:
    """By hand: the buffer's parameters and gradients, and masters and state of the fullest owner."""
    owned = [0] * plan.group_size
    for atom, owner in zip(plan.plan.atoms, plan.plan.owners):
        owned[owner] += atom.numel
    buffer = plan.plan.buffer_numel * (elements.parameter + elements.gradient)
    return buffer + max(owned) * (elements.master + elements.state)


def test_one_layer_on_128_ranks_is_owned_by_few_of_them_without_much_padding() -> None:
    chosen, whole = grouped(ONE_LAYER, 128), grouped(ONE_LAYER, 128, size=128)
    assert whole.plan.padding > 30, "each of 128 ranks has room for an MLP matrix"
    assert chosen.group_size < 128 and chosen.plan.padding < 0.10
    assert chosen.group_size * chosen.instances == 128
    assert_lawful(chosen.plan)
    assert memory(chosen, Elements()) < 0.1 * memory(whole, Elements())
    assert max(chosen.plan.loads()) <= max(whole.plan.loads()), "nobody works longer than an MLP matrix takes"
    assert chosen.time.total < 0.1 * whole.time.total


def test_idle_ranks_are_reason_enough_for_a_smaller_group_though_nothing_is_padded() -> None:
    chosen, whole = grouped(ONE_LAYER, 128, "compact"), grouped(ONE_LAYER, 128, "compact", size=128)
    assert whole.plan.padding == 0 and whole.plan.loads().count(0) == 121
    assert chosen.group_size == 8 and max(chosen.plan.loads()) == max(whole.plan.loads())
    assert chosen.time.total < 0.6 * whole.time.total


def test_ranks_that_are_all_needed_are_one_group() -> None:
    plan = grouped(list(model("qwen3-32b", "mcore_fused")), 32)
    assert (plan.group_size, plan.instances) == (32, 1) and plan.plan.padding < 0.10


@pytest.mark.parametrize("layout", ["padded", "compact", "auto"])
@pytest.mark.parametrize("ranks", [1, 6, 8, 17, 24, 48])
def test_a_chosen_group_divides_the_ranks_and_needs_no_more_memory(layout: str, ranks: int) -> None:
    atoms = list(model("gpt2-124m"))
    chosen = grouped(atoms, ranks, layout)
    assert chosen.group_size * chosen.instances == ranks
    assert_lawful(chosen.plan)
    elements = Elements()
    assert chosen.memory_bytes(elements) == memory(chosen, elements)
    whole = grouped(atoms, ranks, chosen.plan.layout, size=ranks)
    assert memory(chosen, elements) <= memory(whole, elements)
    assert max(chosen.plan.loads()) <= 2 * max(whole.plan.loads())
    assert chosen.time == buffer_step(chosen.plan, H100, FLOPS, instances=chosen.instances)


@pytest.mark.parametrize("layout", ["padded", "compact", "auto"])
def test_an_asked_group_size_is_kept(layout: str) -> None:
    for size in (1, 3, 12):
        plan = grouped(ONE_LAYER, 12, layout, size=size)
        assert (plan.group_size, plan.instances) == (size, 12 // size)


def test_what_can_not_be_planned_is_named() -> None:
    for size in (0, -4, 5, 24):
        with pytest.raises(ValueError, match=f"group size {size} does not divide the 12 data-parallel ranks"):
            grouped(ONE_LAYER, 12, size=size)
    with pytest.raises(ValueError, match="unknown layout 'dense'; expected 'padded', 'compact' or 'auto'"):
        grouped(ONE_LAYER, 8, "dense")
    with pytest.raises(ValueError, match="there is no matrix to plan"):
        grouped([], 8)


@pytest.mark.parametrize("ranks", [8, 64])
def test_auto_is_the_faster_of_both_layouts(ranks: int) -> None:
    atoms = list(model("gpt2-124m"))
    padded, compact = grouped(atoms, ranks, "padded"), grouped(atoms, ranks, "compact")
    assert grouped(atoms, ranks, "auto") == min(padded, compact, key=lambda plan: plan.time.total)


def test_elements_on_the_wire_and_in_memory_are_those_asked_for() -> None:
    elements = Elements(parameter=1, gradient=2, master=8, state=16)
    plan = plan_buffer(
        ONE_LAYER, 8, layout="padded", bucket_numel=None, machine=H100, cost=FLOPS, group_size=8, elements=elements
    )
    assert plan.memory_bytes(elements) == memory(plan, elements)
    numel = plan.plan.buffer_numel
    assert plan.time.wire == pytest.approx(numel * 3 * 7 / 8 / H100.node_bytes_per_second)


def test_a_group_that_lies_in_two_nodes_is_charged_the_wire_between_them() -> None:
    plan = grouped(ONE_LAYER, 128, machine=GB200, size=64)
    nodes = [{rank // GB200.node_size for rank in range(first, first + 64)} for first in (0, 64)]
    assert nodes == [{0}, {0, 1}]
    nbytes = sum(plan.plan.bucket_numels) * (Elements().gradient + Elements().parameter)
    assert plan.time.wire >= nbytes * 63 / 64 / GB200.bytes_per_second


@pytest.mark.parametrize(("machine", "ranks"), [(H100, 6), (GB200, 64)])
def test_ranks_that_all_lie_in_one_node_use_its_links(machine: Machine, ranks: int) -> None:
    plan = grouped(ONE_LAYER, ranks, machine=machine, size=ranks)
    nbytes = sum(plan.plan.bucket_numels) * (Elements().gradient + Elements().parameter)
    assert plan.time.wire == pytest.approx(nbytes * (ranks - 1) / ranks / machine.node_bytes_per_second)


def test_a_quarter_of_padding_is_reason_enough_for_a_smaller_group() -> None:
    atoms = list(model("qwen3-32b"))
    whole, chosen = grouped(atoms, 128, size=128), grouped(atoms, 128)
    assert 0.10 < whole.plan.padding < 0.50
    assert chosen.group_size == 64 and chosen.plan.padding < 0.10 and chosen.time.total < whole.time.total
    assert max(chosen.plan.loads()) <= 2 * max(whole.plan.loads()), "twice the work, that of half as many ranks"


def any_case(seed: int) -> tuple[list[Atom], int, Machine, Elements]:
    """A small buffer, ranks and a machine with quick or slow nodes, elements with much or little state."""
    generator = random.Random(seed)
    d, layers = generator.choice([128, 256, 512]), generator.randint(1, 9)
    shapes = [(d, d), (d // 4, d), (d // 4, d), (d, d), (3 * d, d), (3 * d, d), (d, 3 * d)] * layers
    flops, wire, latency = (10 ** generator.uniform(*powers) for powers in ((11, 14), (9, 11), (-6, -4)))
    machine = Machine("any", flops, wire, latency, generator.choice([1, 4, 8]), 3e11)
    elements = generator.choice([Elements(), Elements(state=32), Elements(gradient=2, master=0, state=0)])
    return atoms_of(shapes), generator.choice([6, 8, 12, 16, 24, 32, 48, 64]), machine, elements


@pytest.mark.parametrize("seed", range(60))
def test_a_chosen_group_is_judged_against_every_other_divisor(seed: int) -> None:
    """No more memory, at most twice the work, not slower than all ranks; no more work where that costs no padding."""
    atoms, ranks, machine, elements = any_case(seed)

    given = {"layout": "padded", "bucket_numel": None, "machine": machine, "cost": FLOPS, "elements": elements}

    def over(size: int | None) -> Grouped:
        return plan_buffer(atoms, ranks, group_size=size, **given)

    chosen, whole = over(None), over(ranks)
    assert memory(chosen, elements) <= memory(whole, elements)
    assert max(chosen.plan.loads()) <= 2 * max(whole.plan.loads())
    assert chosen.time.total <= whole.time.total
    if whole.plan.padding <= 0.10 and all(whole.plan.loads()):
        assert chosen == whole
    every = [over(size) for size in range(1, ranks + 1) if ranks % size == 0]
    as_good = [
        g for g in every if memory(g, elements) <= memory(whole, elements) and g.time.compute <= whole.time.compute
    ]
    frugal = [g for g in as_good if g.plan.padding <= 0.10 and g.time.total <= whole.time.total]
    if frugal and whole.plan.padding > 0.10:
        assert chosen.plan.padding <= 0.10 and chosen.time.compute <= whole.time.compute
        assert chosen.time.total <= 1.05 * min(g.time.total for g in frugal)


def test_a_group_that_is_better_in_every_way_is_taken_though_it_pads_a_little_more_than_tolerated() -> None:
    atoms = atoms_of([(256, 256)] * 2 + [(160, 256)] * 4)
    whole, four = (grouped(atoms, 12, machine=MACHINES["cpu"], size=size) for size in (12, 4))
    assert four.time.total < 0.9 * whole.time.total and max(four.plan.loads()) <= max(whole.plan.loads())
    assert four.plan.padding < 0.12 and whole.plan.padding > 1.6
    assert memory(four, Elements()) < memory(whole, Elements())
    assert grouped(atoms, 12, machine=MACHINES["cpu"]).time.total <= four.time.total
