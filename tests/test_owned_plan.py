"""Plans of owned storage, as pure data: where parameters lie, whose they are, which layout."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lwopt_backend.plan import MACHINES, Atom
from lwopt_backend.plan.buffers.arrangement import Bucket, Slot
from lwopt_backend.plan.buffers.compact import plan_compact
from lwopt_backend.plan.buffers.cut import Cuttable, arrange_cut
from lwopt_backend.plan.buffers.joint import on_top_of
from lwopt_backend.plan.buffers.owned import LAYOUTS, plan_owned
from lwopt_backend.plan.buffers.setting import OwnedParam, Setting
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import COSTS, newton_schulz_flops
from tests.cells import cells

SETTING = Setting("auto", 100_000, MACHINES["cuda"], COSTS["newton_schulz"], Elements(2, 2, 4, 4))


def matrix(name: str, rows: int, columns: int, dtype: str = "bfloat16") -> OwnedParam:
    return OwnedParam(name, rows * columns, dtype, Atom(name, (rows, columns), newton_schulz_flops((rows, columns))))


def vector(name: str, numel: int, dtype: str = "bfloat16", tied: bool = False) -> OwnedParam:
    return OwnedParam(name, numel, dtype, None, tied)


def gpt(layers: int = 4, width: int = 96, odd: int = 0) -> list[OwnedParam]:
    params = [vector("embedding", 1000 * width, tied=True)]
    for layer in range(layers):
        params += [
            vector(f"h.{layer}.norm", width),
            matrix(f"h.{layer}.qkv", 3 * width, width),
            matrix(f"h.{layer}.out", width, width + odd),
            matrix(f"h.{layer}.up", 4 * width, width),
            matrix(f"h.{layer}.down", width + odd, 4 * width),
        ]
    return params


def stack(name: str, count: int, rows: int, columns: int) -> OwnedParam:
    cost = newton_schulz_flops((rows, columns))
    whole = Atom(name, (count * rows, columns), count * cost)
    parts = ((rows * columns, cost),) * count
    return OwnedParam(name, count * rows * columns, "bfloat16", whole, parts=parts)


def random_params(seed: int) -> list[OwnedParam]:
    draw = random.Random(seed)
    params = []
    for number in range(draw.randint(1, 40)):
        dtype = draw.choice(["bfloat16", "bfloat16", "float32"])
        if draw.random() < 0.1:
            params.append(stack(f"p{number}", draw.randint(2, 5), draw.randint(1, 99), draw.randint(1, 99)))
        elif draw.random() < 0.5:
            params.append(matrix(f"p{number}", draw.randint(1, 300), draw.randint(1, 300), dtype))
        else:
            params.append(vector(f"p{number}", draw.randint(1, 5000), dtype, tied=draw.random() < 0.1))
    return params


@cells(seed=range(12), layout=LAYOUTS, ranks_and_group=[(1, None), (3, None), (4, 2), (6, 1), (8, None)])
def test_every_element_has_one_owner_and_every_matrix_too(
    seed: int, layout: str, ranks_and_group: tuple[int, int | None]
) -> None:
    params, (ranks, group_size) = random_params(seed), ranks_and_group
    plan = plan_owned(params, ranks, replace(SETTING, layout=layout), group_size)
    assert sorted(slot.param for bucket in plan.buckets for slot in bucket.slots) == list(range(len(params)))
    assert layout != "compact" or plan.padding == 0
    for bucket in plan.buckets:
        assert len(bucket.parts) == plan.group_size
        assert {params[slot.param].dtype for slot in bucket.slots} == {bucket.dtype}
        assert {params[slot.param].atom is not None for slot in bucket.slots} == {bucket.kind == "matrix"}
        pieces = [piece for rank in range(plan.group_size) for piece in bucket.pieces(rank)]
        assert sum(piece.numel for piece in pieces) == sum(slot.numel for slot in bucket.slots)
        for piece in pieces if bucket.kind == "matrix" else ():
            matrix_numel = (params[piece.param].parts or ((params[piece.param].numel, 0),))[0][0]
            assert piece.start % matrix_numel == piece.stop % matrix_numel == 0, "whole matrices"
        assert len(bucket.slots) == 1 or not any(params[slot.param].tied for slot in bucket.slots)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_padded_parameters_and_parts_start_on_64_and_buckets_end_on_what_ranks_and_128_divide(ranks: int) -> None:
    plan = plan_owned(gpt(odd=1), ranks, replace(SETTING, layout="padded"), ranks)
    for bucket in plan.buckets:
        assert bucket.even and bucket.numel % ranks == 0 and bucket.numel % 128 == 0
        assert all(start % 64 == 0 for start, _ in bucket.parts)
        if bucket.kind == "matrix":
            assert all(slot.offset % 64 == 0 for slot in bucket.slots)
    wide = plan_owned(gpt(odd=1), ranks, replace(SETTING, layout="padded", bus_multiple=2**16), ranks)
    assert all(bucket.even and bucket.numel % 2**16 == 0 for bucket in wide.buckets)
    even = plan_owned(gpt(odd=0), ranks, replace(SETTING, layout="compact"), ranks)
    assert all(slot.offset % 64 == 0 for bucket in even.buckets for slot in bucket.slots if bucket.kind == "matrix")


@cells(machine=["cpu", "cuda"], direct=[True, False], group=[2, 4, 8, 16])
def test_auto_moves_and_pads_no_more_than_the_better_layout(machine: str, direct: bool, group: int) -> None:
    """By bytes where parts travel directly; otherwise by modelled time, of which latency is a part."""
    setting, numels = replace(SETTING, machine=MACHINES[machine], direct=direct), {}
    for layout in LAYOUTS:
        plan = plan_owned(gpt(odd=1), group, replace(setting, layout=layout), group)
        numels[layout] = sum(bucket.numel for bucket in plan.buckets)
    best = min if direct else max
    assert numels["auto"] <= best(numels["padded"], numels["compact"])
    (sentence,) = plan_owned(gpt(), 4, SETTING, 4).choices
    assert "16 bfloat16 matrices" in sentence and "padded owners" in sentence and "compact owners" in sentence


def test_ranks_without_a_matrix_are_planned_as_instances_if_padded_and_otherwise_told_of() -> None:
    setting = replace(SETTING, layout="padded")
    plan = plan_owned(gpt(layers=1), 64, setting, None)
    assert plan.group_size < 64 and plan.group_size * plan.instances == 64
    assert any("instances" in sentence for sentence in plan.choices)
    assert plan_owned(gpt(layers=1), 64, setting, 64).instances == 1
    sentences = plan_owned(gpt(layers=1), 64, replace(SETTING, layout="compact"), None).choices
    assert any("60 of 64 ranks own no matrix. group_size=4 would leave none" in sentence for sentence in sentences)
    assert not any("own no matrix" in sentence for sentence in plan_owned(gpt(), 16, SETTING, None).choices)


def test_buckets_come_in_the_order_in_which_backward_completes_them() -> None:
    plan = plan_owned(gpt(), 4, SETTING, 4)
    firsts = [min(slot.param for slot in bucket.slots) for bucket in plan.buckets]
    assert firsts == sorted(firsts, reverse=True) and firsts[-1] == 0


def test_what_cannot_be_planned_and_a_bucket_that_cannot_be_are_named() -> None:
    for group_size, layout in ((3, "auto"), (0, "auto"), (2, "sparse")):
        with pytest.raises(ValueError, match="unknown layout 'sparse'" if layout == "sparse" else "not divide the 4"):
            plan_owned(gpt(), 4, replace(SETTING, layout=layout), group_size)
    five = Slot(0, 0, 5)
    for slots, parts, message in [
        ((five, Slot(1, 4, 3)), ((0, 8),), "overlaps another"),
        ((Slot(0, 6, 5),), ((0, 8),), "overlaps another"),
        ((five,), ((0, 4), (5, 8)), "not a partition"),
        ((five,), ((0, 4), (4, 7)), "not a partition"),
    ]:
        with pytest.raises(ValueError, match=message):
            Bucket("matrix", "padded", "float32", slots, parts, 8)


@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_matrices_go_where_there_is_least_to_do(layout: str) -> None:
    """Ranks 0 and 1 have as much work as half of the dense matrices; a plan that knows of it gives them less."""
    setting = replace(SETTING, layout=layout)
    total = sum(plan_owned(gpt(layers=8), 4, setting, 4).loads)
    base = [total // 4, total // 4, 0, 0]
    blind, aware = plan_owned(gpt(layers=8), 4, setting, 4), plan_owned(gpt(layers=8), 4, setting, 4, base)
    largest = [max(work + load for work, load in zip(base, plan.loads)) for plan in (blind, aware)]
    assert sum(aware.loads) == total and aware.padding <= blind.padding
    assert largest[1] < largest[0]
    if layout == "compact":
        assert largest[1] <= 1.05 * (total + sum(base)) / 4


def test_what_is_on_top_is_never_worse_than_the_plan_alone() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        atoms = [param.atom for param in random_params(seed) if param.atom is not None] or [Atom("a", (2, 2), 5)]
        plan = plan_compact(atoms, 4, bucket_numel=20_000)
        base = [draw.randint(0, sum(atom.cost for atom in atoms)) for _ in range(4)]
        better = on_top_of(plan, base)
        assert not better.problems()
        assert max(map(sum, zip(base, better.loads()))) <= max(map(sum, zip(base, plan.loads())))


@pytest.mark.parametrize(("count", "ranks"), [(8, 4), (7, 4), (3, 4), (16, 3), (5, 1)])
@pytest.mark.parametrize("layout", ["auto", "compact"])
def test_a_stack_has_several_owners_and_stays_in_one_piece(count: int, ranks: int, layout: str) -> None:
    params = [matrix("before", 64, 64), stack("experts", count, 2048, 1536), matrix("after", 64, 64)]
    plan = plan_owned(params, ranks, replace(SETTING, layout=layout), ranks)
    pieces = [p for b in plan.buckets for rank in range(ranks) for p in b.pieces(rank) if p.param == 1]
    size = 2048 * 1536
    assert all(piece.start % size == 0 and piece.stop % size == 0 for piece in pieces)
    assert [piece.stop for piece in pieces][:-1] == [piece.start for piece in pieces][1:], "in rank order, end to end"
    most = -(-count // ranks)
    assert max(piece.numel for piece in pieces) == most * size or ranks == 1
    (bucket,) = [b for b in plan.buckets for slot in b.slots if slot.param == 1]
    assert bucket.padding == 0 and bucket.even == (count % ranks == 0)
    assert max(plan.loads) < count * params[1].parts[0][1] or ranks == 1
    whole = plan_owned(params[1:2], ranks, replace(SETTING, layout="padded"), ranks)
    assert [piece.param for b in whole.buckets for rank in range(ranks) for piece in b.pieces(rank)] == [0]


@pytest.mark.parametrize("seed", range(60))
def test_consecutive_matrices_are_cut_as_evenly_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    parts = tuple((draw.choice([64, 128, 192]), draw.randint(1, 50)) for _ in range(draw.randint(1, 8)))
    before = [draw.randint(0, 60) for _ in range(ranks)]
    bucket, added = arrange_cut([Cuttable(0, parts)], before, "bfloat16")
    best = min(
        max(load + sum(cost for _, cost in parts[a:b]) for load, a, b in zip(before, bounds, bounds[1:]))
        for cuts in itertools.combinations_with_replacement(range(len(parts) + 1), ranks - 1)
        for bounds in [(0, *cuts, len(parts))]
    )
    assert max(map(sum, zip(before, added))) == max(best, max(before))
    assert bucket.parts[0][0] == 0 and bucket.parts[-1][1] == bucket.numel == sum(numel for numel, _ in parts)
