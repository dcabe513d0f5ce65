"""The model of a step of owned storage: formulas by hand, and a timeline in which one thing happens at a time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from lwopt_backend.plan import Atom, Machine
from lwopt_backend.plan.buckets import BucketTime, Stage, pipeline
from lwopt_backend.plan.buffers.layout import OwnedParam
from lwopt_backend.plan.buffers.owned import plan_owned
from lwopt_backend.plan.cost import CLUSTERS, StepTime
from lwopt_backend.planner.seconds import Elements, Placed, buffer_step, buffer_timeline
from tests.planner_shapes import model

H100 = CLUSTERS["h100-8x-ib"]
SIMPLE = Machine("simple", flops_per_second=10, bytes_per_second=2, latency_seconds=100)
NODES_OF_TWO = replace(SIMPLE, node_size=2, node_bytes_per_second=8)
ONE_LAYER = list(model("llama3.1-8b")[:7])
EIGHT = replace(NODES_OF_TWO, node_size=8)  # of 2 bytes a second between nodes, 8 within
# A rank sends half of every bucket (256 and 128 elements, compact 192 and 64) within a group of two: 4 bytes a gradient
# and 2 a parameter. Instances add an all-reduce of the owned gradients, 2 x (instances - 1) / instances of 4 bytes.
WITHIN, ACROSS = (256 + 128) / 2 * (4 + 2), (256 + 128) / 2 * 4 * 2


def two_buckets(layout: str) -> Placed:
    """Over two shards: bucket 1 is matrix 0 (64 elements) at shard 1; bucket 0 is 1 (128) and 2 (64) at 0 and 1."""
    atoms = Atom("a", (8, 8), 30), Atom("b", (8, 16), 50), Atom("c", (8, 8), 40)
    return Placed(atoms, 2, (1, 0, 1), (1, 0, 0), (256, 128) if layout == "padded" else (192, 64))


def placed(atoms: Sequence[Atom], ranks: int, layout: str) -> Placed:
    params = [OwnedParam(atom.name, atom.numel, "bfloat16", atom) for atom in atoms]
    plan = plan_owned(params, ranks, layout, 40_000_000)
    where = {
        piece.param: (rank, number)
        for number, bucket in enumerate(plan.buckets)
        for rank, pieces in enumerate(bucket.pieces_of_all())
        for piece in pieces
    }
    owners, buckets = zip(*(where[index] for index in range(len(atoms))))
    return Placed(tuple(atoms), ranks, owners, buckets, tuple(bucket.numel for bucket in plan.buckets))


@pytest.mark.parametrize(
    ("machine", "instances", "wire", "latency"),
    [
        (SIMPLE, 1, WITHIN / 2, 4 * 100),  # four collectives of one round each
        (SIMPLE, 3, WITHIN / 2 + ACROSS * 2 / 3 / 2, 4 * 100 + 2 * 4 * 100),  # two more of 2 x 2 rounds
        (NODES_OF_TWO, 3, WITHIN / 8 + ACROSS * 2 / 3 / 2, 1200),  # neighbours use a node's links, instances do not
        (EIGHT, 1, WITHIN / 8, 400),
        (EIGHT, 2, WITHIN / 8 + ACROSS * 1 / 2 / 8, 800),  # four ranks of a node
        (EIGHT, 4, WITHIN / 8 + ACROSS * 3 / 4 / 8, 1200),  # a node
        (EIGHT, 8, WITHIN / 8 + ACROSS * 7 / 8 / 8, 1600),  # two nodes, which a ring leaves by four cards
        (replace(EIGHT, node_size=3), 2, WITHIN / 2 + ACROSS * 1 / 2 / 2, 800),  # ranks 2 and 3 are in two nodes
    ],
)
def test_a_step_is_its_busiest_owners_work(machine: Machine, instances: int, wire: float, latency: float) -> None:
    time = buffer_step(two_buckets("padded"), machine, instances=instances)
    assert (time.compute, time.wire, time.latency) == (7.0, pytest.approx(wire), latency)


def test_a_compact_step_sends_the_matrices_alone_one_rank_nothing() -> None:
    time = buffer_step(two_buckets("compact"), SIMPLE, elements=Elements(parameter=1, gradient=2))
    assert (time.compute, time.wire, time.latency) == (7.0, (192 + 64) / 2 * (2 + 1) / 2, 400.0)
    alone = buffer_step(placed(ONE_LAYER, 1, "padded"), H100)
    assert alone == StepTime(sum(atom.cost for atom in ONE_LAYER) / H100.flops_per_second, 0, 0), "nothing is sent"


def reduced(arrive: Sequence[float], work: Sequence[Mapping[int, float]], back: Sequence[float]) -> list[BucketTime]:
    """The buckets' times, without hosts."""
    shards = 1 + max(owner for owners in work for owner in owners)
    stages = [
        Stage(out, home, {owner: (seconds, 0.0) for owner, seconds in owners.items()})
        for out, owners, home in zip(arrive, work, back)
    ]
    return [*pipeline(stages, [0.0] * shards, 0.0, reduced=True).buckets]


def test_gradients_arrive_in_order_then_buckets_return_when_all_ranks_got_there() -> None:
    # wire     | b0 2 | b1 3 |      | b0 1 | b1 1
    # shard 0                | b0 3 | b1 4 |
    # shard 1                | b0 2 | b1 1 |
    times = reduced(arrive=[2, 3], work=[{0: 3, 1: 2}, {0: 4, 1: 1}], back=[1, 1])
    assert times == [BucketTime((0, 2), (5, 8), (8, 9)), BucketTime((2, 5), (7, 12), (12, 13))]


def assert_one_thing_at_a_time(times: Sequence[BucketTime]) -> None:
    outs, backs = [time.out for time in times], [time.back for time in times]
    assert outs == sorted(outs) and backs == sorted(backs), "in the buckets' order"
    wire = sorted(outs + backs)
    assert all(earlier[1] <= later[0] + 1e-12 for earlier, later in zip(wire, wire[1:])), "one wire"
    for time in times:
        moments = [*time.out, *time.work, *time.back]
        assert all(earlier <= later + 1e-12 for earlier, later in zip(moments, moments[1:]))
    assert max(time.out[1] for time in times) <= min(time.work[0] for time in times), "arrivals go first"


@pytest.mark.parametrize("seed", range(50))
def test_any_schedule_keeps_wire_and_owners_in_order(seed: int) -> None:
    generator = random.Random(seed)
    buckets, shards = generator.randint(1, 8), generator.randint(1, 5)
    arrive, back = ([generator.choice([0, 1, 3]) for _ in range(buckets)] for _ in range(2))
    owners = [generator.sample(range(shards), generator.randint(1, shards)) for _ in range(buckets)]
    work = [{owner: generator.choice([0, 1, 4]) for owner in some} for some in owners]
    times = reduced(arrive, work, back)
    assert_one_thing_at_a_time(times)
    end = times[-1].back[1]
    busiest = max(sum(loads.get(rank, 0) for loads in work) for rank in range(shards))
    assert sum(arrive) + max(busiest, sum(back)) <= end <= sum(arrive) + busiest + sum(back)
    free = [sum(arrive)] * shards
    for loads, time in zip(work, times):  # an owner works on one bucket after the other
        begins = min(free[rank] for rank in loads)
        for rank, seconds in loads.items():
            free[rank] += seconds
        assert time.work == (begins, max(free[rank] for rank in loads))


@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize(("ranks", "size"), [(16, 16), (32, 8), (8, 1)])
def test_the_timeline_ends_between_its_longest_part_and_their_sum(layout: str, ranks: int, size: int) -> None:
    plan, machine = placed(model("gpt2-124m"), size, layout), replace(H100, launch_seconds=0.0)
    found = buffer_timeline(plan, machine, instances=ranks // size)
    times = found.buckets
    assert_one_thing_at_a_time(times)
    parts = buffer_step(plan, machine, instances=ranks // size)
    assert found.seconds == times[-1].back[1]
    assert max(parts.compute, parts.wire + parts.latency) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= parts.total * (1 + 1e-9)
    on_wire = sum(time.out[1] - time.out[0] + time.back[1] - time.back[0] for time in times)
    assert on_wire == pytest.approx(parts.wire + parts.latency)
