"""Plans of flat partitions and of meshes: exact, every element once there and back, and the same everywhere."""

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks import public_models
from lwopt_backend.plan.atoms import Atom, matrices_of
from lwopt_backend.plan.buckets import BucketSeconds, BucketTime, Timeline, cut_buckets, pipeline
from lwopt_backend.plan.cost import MACHINES, ElementwiseBytes, Machine, Shape, newton_schulz_flops
from lwopt_backend.plan.exchange import Segment, Transfer
from lwopt_backend.plan.layouts import FlatPartition, Fragment, Layout, ParameterPartition, Replicas, in_blocks
from lwopt_backend.plan.mesh import MeshLayout, Sharding, TensorShards
from lwopt_backend.plan.owners import (
    Limits,
    balance,
    device_bound,
    exchange_timeline,
    longest_first,
    plan_copies,
    plan_matrices,
    plan_spread,
    stay,
)
from tests.support import plans
from tests.support.fsdp2 import mesh_of
from tests.support.launcher import ROOT, succeeds
from tests.support.on_ranks import on_ranks
from tests.support.plans import SHAPES, atoms_of, plan_of, rows_over

SMALL = [(1, 7), (7, 1), (6, 10), (13, 5), (4, 4), (64, 24)]
NUMELS = [rows * columns for rows, columns in SMALL]


def test_flat_partitions_cut_parameters_where_deepspeed_does() -> None:
    layout = FlatPartition.build([4, 5, 1], 3)
    assert layout.partition_numel == 4  # 10 elements, padded to a multiple of 2 * 3
    assert layout.fragments(0) == (Fragment(0, 0, 4, 0),)
    assert layout.fragments(1) == (Fragment(1, 0, 4, 0), Fragment(2, 4, 5, 0))
    assert layout.fragments(2) == (Fragment(2, 0, 1, 1),)
    assert [layout.stored_numel(rank) for rank in range(3)] == [4, 4, 2]
    aligned = FlatPartition.build([3, 3], 1, param_alignment=4)
    assert (aligned.offsets, aligned.partition_numel) == ((0, 4), 8)
    assert FlatPartition.build([3, 5], 1, param_alignment=8).partition_numel == 14, "nothing is padded after the last"
    in_parts = ParameterPartition.build([5, 2], 3)
    assert in_parts.partition_numel == 3 and in_parts.stored_numel(2) == 1
    assert in_parts.fragments(0) == (Fragment(0, 0, 2, 0), Fragment(1, 2, 4, 0), Fragment(2, 4, 5, 0))
    assert in_parts.fragments(1) == (Fragment(0, 0, 1, 2), Fragment(1, 1, 2, 2))
    stack = in_blocks(ParameterPartition.build([12], 2), [matrices_of((3, 2, 2))])
    assert stack.fragments(1) == (Fragment(0, 0, 2, 4), Fragment(1, 2, 4, 0))


def test_what_cannot_be_planned_is_named() -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (
            lambda: FlatPartition.build([4, 0], 2),
            "parameter 1: expected at least one element in a flat partition, found 0",
        ),
        (lambda: FlatPartition(2, (4, 4), (0, 3), 8), "parameter 1: expected a start from 4 on, found 3"),
        (lambda: FlatPartition(2, (4, 4), (0, 4), 3), "expected an end within 2 partitions of 3 elements, found 8"),
        (lambda: plan_of(SHAPES, 2, "spread"), "unknown policy 'spread'; expected one of auto, stay, balance"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make()


PLACEMENTS = {
    (4,): [(Shard(0),), (Shard(1),), (Replicate(),)],
    (2, 2): [
        *[(Replicate(), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(0), Shard(0))],
        *[(_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Replicate())],
    ],
}
GPT = [(1152, 384), (384, 384), (1536, 384), (384, 1536)] * 12


@on_ranks(4)
def test_shards_on_a_mesh_are_where_torch_puts_them() -> None:
    for mesh_shape, all_placements in PLACEMENTS.items():
        mesh = mesh_of(*mesh_shape, names=("outer", "inner")[: len(mesh_shape)])
        coordinate = tuple(mesh.get_coordinate())
        for placements, shape in itertools.product(all_placements, SMALL):
            local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
            dims = tuple(None if isinstance(p, Replicate) else p.dim for p in placements)
            ours = Sharding(shape, mesh_shape, dims, tuple(isinstance(p, _StridedShard) for p in placements))
            if any(ours.late) and shape not in ((64, 24), (4, 4)):
                continue  # torch 2.13 gives the parts of uneven chunks another offset than DTensor's own split
            begins, sizes = zip(*ours.box(coordinate))
            assert sizes == tuple(local) and (0 in local or begins == tuple(offset))
            matrix = torch.arange(shape[0] * shape[1]).view(shape)
            cut = torch.empty(0, dtype=torch.int64)
            if (part := ours.fragment(dist.get_rank(), coordinate)) is not None:
                cut = matrix.as_strided((part.runs, part.stop - part.start), (part.pitch, 1), part.start).flatten()
            assert torch.equal(cut, matrix[tuple(slice(b, b + s) for b, s in zip(offset, local))].flatten())


def test_stay_gives_an_atom_to_the_rank_that_stores_most_of_it() -> None:
    atoms = atoms_of([(2, 2), (2, 3), (1, 2)])
    layout = FlatPartition.build([4, 6, 2], 2)  # rank 0: 4 + 2 of 6; rank 1: 4 of 6 + 2
    assert stay(atoms, layout).owners == (0, 1, 1)
    assert stay(atoms_of([(1, 4)]), FlatPartition.build([4], 2)).owners == (0,), "halves: the lower rank"
    plan = plan_of([(64, 64)] * 50 + [(64, 256)] * 50, 16, "stay")
    assert sum(map(len, plan.buckets)) <= 15 and sum(plan.moved_numel()) <= 15 * (64 * 256) // 2, "at 15 boundaries"


def test_balance_moves_no_more_than_it_must_to_be_as_even_as_lpt() -> None:
    # costs 7, 6, 5, 4, 3 on two ranks, longest first: 7 | 6, then 5 to 6, 4 to 7, 3 to 11; the busiest has 14
    atoms = [Atom(str(i), (1, 1), cost) for i, cost in enumerate([7, 6, 5, 4, 3])]
    layout = FlatPartition.build([1] * 5, 2)  # ranks store atoms 0-3 and 4 (partition of 4)
    ownership = balance(atoms, layout)
    # Rank 0 stores 22, so it gives away 7, which is within the 8 too many, then 4, the least with which it has room.
    assert layout.partition_numel == 4 and ownership.owners == (1, 0, 0, 1, 1)
    assert longest_first([3, 4, 5, 6, 7], [0, 0]) == 14 and longest_first([3, 4], [9, 0]) == 9
    assert ownership.loads == (11, 14) and ownership.imbalance == 14 / 12.5
    equal = balance([Atom(str(i), (1, 1), 5) for i in range(3)], FlatPartition.build([1, 1, 1], 2))
    assert equal.owners == (0, 0, 1), "one of the ranks has two in any deal, so nothing moves"
    halves = balance([Atom("a", (2, 2), 5)], FlatPartition.build([4], 2))
    assert halves.owners == (0,), "both ranks store a half: the lower one"


def test_auto_takes_the_shorter_modelled_step() -> None:
    # 2 x 3 by 5 steps: X X^T is 2*2*3*2 = 24 flops, A A is 2*2*2*2 = 16, B X is 24; 64 a step
    """The modelled step is the busiest rank's."""
    assert newton_schulz_flops((2, 3), 5) == newton_schulz_flops((3, 2), 5) == 5 * 64
    atoms = [Atom("a", (2, 4), 10), Atom("b", (3, 4), 30)]
    layout = FlatPartition.build([8, 12], 4)  # partitions of 6: a lies on ranks 0 and 1, b on 1, 2 and 3
    slow = Machine("slow", flops_per_second=10, bytes_per_second=2, latency_seconds=100)
    plan = plan_matrices(atoms, layout, Limits(numel=8), policy="stay", machine=slow, element_bytes=2)
    assert plan.ownership.owners == (0, 2) and len(plan.buckets) == 2
    ((_, time),) = plan.modelled
    # Rank 2 does 30 flops, and sends back what 1 and 3 lent it: 4 + 2 elements. Each bucket goes forth and back.
    assert (time.compute, time.wire, time.latency) == (3.0, max(plan.wire_bytes()) / 2, 400.0)
    assert plan.wire_bytes() == [4, 12, 12, 4] and time.total == 409.0
    # One huge matrix and many small ones: staying leaves rank 0 with all the work.
    plan = plan_of([(512, 512)] * 8 + [(1, 4096)] * 512, 2, "auto", bucket_numel=2**24)
    (best, best_time), (other, other_time) = plan.modelled
    assert (best, other) == ("balance", "stay") and best_time.total < other_time.total
    assert plan.ownership.policy == "balance"
    assert plan_of([(64, 64)] * 8, 2, "auto").ownership.policy == "stay", "already balanced, nothing to move"


def test_owners_have_least_load_and_the_nearest_copy() -> None:
    """Owners have least load, are where the matrix is, and take the nearest copy."""
    same = [(16, 16)] * 6
    busy = plan_spread(atoms_of(same), rows_over(same, 2), loads=[4 * newton_schulz_flops((16, 16)), 0])
    assert busy.owned_counts() == [1, 5], "rank 0 has work elsewhere, as much as of four of the six"
    shapes = [(1, 50), (8, 8), (1, 20)]
    plan = plan_spread(atoms_of(shapes), rows_over(shapes, 4))
    assert (plan.ownership.owners[0], plan.ownership.owners[2]) == (0, 0), "rank 0 stores them whole"
    assert [atom for bucket in plan.buckets for atom in bucket] == [1] and plan.local_atoms(0) == [0, 2]
    hybrid = LAYOUTS["hybrid"]
    assert [[part.rank for part in hybrid.sources(5, owner)] for owner in (3, 0)] == [[2, 3], [0, 1]]


def on_four(*dims: int | None, late: tuple[bool, bool] = (False, False)) -> MeshLayout:
    coordinates = tuple(itertools.product(range(2), range(2)))
    return MeshLayout(coordinates, tuple(Sharding(shape, (2, 2), dims, late) for shape in SMALL))


def test_rows_of_an_hsdp_mesh_own_equally_much_of_a_bucket() -> None:
    shapes, mesh = [(64, 16)] * 8, (8, 2)
    shardings = tuple(Sharding(shape, mesh, (None, 0), (False, False)) for shape in shapes)
    plan = plan_spread(atoms_of(shapes), MeshLayout(tuple(itertools.product(range(8), range(2))), shardings), Limits(8))
    rows = {owner // 2 for owner in plan.ownership.owners}
    assert len(rows) == 8, "8 matrices on 16 ranks, a row each: parts of the all-gather in a column need no padding"
    assert sum(plan.wire_bytes()) == 8 * 64 * 16 * 2 * (7 + 1), (
        "all copies but the owner's row, and half the way in and out"
    )


def test_seconds_of_hsdp() -> None:
    """Seconds of HSDP are those of links in a row and along a column."""
    machine = Machine("m", 1e30, 10.0, 0.0, node_size=2, node_bytes_per_second=100.0)
    sharding = Sharding((64, 16), (2, 2), (None, 0), (False, False))
    layout = MeshLayout(tuple(itertools.product(range(2), range(2))), (sharding,))
    plan = plan_spread(atoms_of([(64, 16)]), layout, Limits(1))
    half = 64 * 16 * 2 / 2  # bytes: in the node to the owner and back, and each rank's half along the column
    assert exchange_timeline(plan, Limits(machine=replace(machine, launch_seconds=0.0))).seconds == pytest.approx(
        2 * half / 100 + half / 10
    )


def hybrid(shapes: Sequence[Shape], copies: int, shards: int) -> MeshLayout:
    shardings = tuple(Sharding(shape, (copies, shards), (None, 0), (False, False)) for shape in shapes)
    return MeshLayout(tuple(itertools.product(range(copies), range(shards))), shardings)


def test_copies_share_the_work_where_that_is_sooner() -> None:
    """Narrow matrices are computed again sooner than updates arrive. Products alone would have it so up to a side of
    some 900; their element-wise work makes that some 400."""
    fast = Limits(machine=MACHINES["cuda"], batch_numel=2**26)
    small, large = [(256, 2048)] * 512, [(4096, 4096)] * 64
    apart = plan_copies(atoms_of(small), hybrid(small, 4, 8), fast)
    assert apart.instances is not None and apart.layout.world_size == 8 and apart.rows is None
    assert apart.of_mesh(apart.owned_counts()) == apart.owned_counts() * 4 == [64] * 32, "every copy's place does all"
    forced = plan_copies(atoms_of(small), hybrid(small, 4, 8), fast, share=True)
    assert forced.instances is None and forced.stored_numels() == [512 * 256 * 2048 // 8] * 32
    assert apart.compared == (device_bound(forced, fast), device_bound(apart, fast)) and apart.compared[1] < 2e-3
    nbytes = (44 + 28) * 512 * 256 * 2048 / 8
    assert apart.compared[1] > 64 * apart.atoms[0].cost / 4e14 + nbytes / 2.7e12, "products, and element-wise work"
    assert ElementwiseBytes.of() == ElementwiseBytes(44, 28), "of Muon in fp32: 11 of the state, 14 of the wire"
    assert ElementwiseBytes.of(param=2, grad=2, states=2, wire=4) == ElementwiseBytes(14 * 4 + 6 + 12, 56), "and casts"
    together = plan_copies(atoms_of(large), hybrid(large, 8, 8), fast)
    assert together.instances is None and together.compared is not None and together.compared[0] < together.compared[1]
    assert plan_copies(atoms_of(small), hybrid(small, 4, 8), Limits()).compared is None, "a CPU has no seconds"
    assert plan_copies(atoms_of(small), rows_over(small, 8), fast).compared is None, "there are no copies"
    uneven = [0, 7, 5, 0]  # work elsewhere, of ranks in copies 0 and 1: a place has that of the busier one
    alike = plan_copies(atoms_of([(64, 64)]), hybrid([(64, 64)], 2, 2), fast, share=False, loads=uneven)
    assert alike.ownership.loads == (5 + alike.atoms[0].cost, 7)


def tensor_parallel(store: Callable[[tuple[int, ...]], FlatPartition | Replicas]) -> TensorShards:
    cut = tuple(numel % 2 == 0 for numel in NUMELS)
    shards = tuple(numel // (1 + halved) for numel, halved in zip(NUMELS, cut))
    blocks = tuple(block for shape in SMALL for block in matrices_of(shape))
    places = tuple(itertools.product(range(2), range(2)))
    return TensorShards(store(shards), (*range(len(cut)),), blocks, places=places, cut=cut)


def test_ranks_beside_each_other_have_the_same_shards() -> None:
    """In data-parallel order, whatever the order in which ranks are numbered."""
    places = ((1, 1), (0, 0), (0, 1), (1, 0))  # tensor-parallel and data-parallel rank, of ranks 0 to 3
    shards = TensorShards(Replicas(2, (9,)), (0,), matrices_of((3, 3)), places=places, cut=(True,))
    assert [shards.beside(rank) for rank in range(4)] == [[3, 0], [1, 2], [1, 2], [3, 0]]


LAYOUTS = {
    "TP 2, stage 1": tensor_parallel(lambda shards: FlatPartition.build(shards, 2)),
    "TP 2, stage 0": tensor_parallel(lambda shards: Replicas(2, shards)),
    "rows over 3": rows_over(SMALL, 3),
    "rows over 4": rows_over(SMALL, 4),
    "hybrid": on_four(None, 0),
    "tiles": on_four(0, 1),
    "late": on_four(0, 0, late=(True, False)),
    "copies": on_four(None, None),
    "stage 0": Replicas(3, tuple(NUMELS)),
    "stage 3 on 3": ParameterPartition.build(NUMELS, 3),
    "stage 3 on 4": ParameterPartition.build(NUMELS, 4),
}
FLAT = ("stay", "balance")


def offsets_of(segments: Sequence[Segment]) -> list[int]:
    return list(itertools.accumulate((segment.numel for segment in segments), initial=0))[:-1]


def elements(atom: int, part: Segment | Fragment) -> list[tuple[int, int]]:
    runs = range(part.start, part.start + part.runs * part.pitch, part.pitch) if part.runs > 1 else [part.start]
    return [(atom, run + i) for run in runs for i in range(part.stop - part.start)]


def assert_arrives(ways: list[Transfer]) -> None:
    """An all-to-all of what all ranks send brings every rank what it expects, where it expects it."""
    parts = []  # by sender, then by receiver
    for way in ways:
        buffer: list[tuple[int, int] | None] = [None] * sum(way.send_splits)
        for segment, begin in zip(way.sends, offsets_of(way.sends)):
            place = slice(begin, begin + segment.numel)
            assert buffer[place] == [None] * segment.numel, "segments do not overlap, and there is room"
            buffer[place] = elements(segment.atom, segment)
        rest = iter(buffer)
        parts.append([list(itertools.islice(rest, split)) for split in way.send_splits])
    for rank, way in enumerate(ways):
        assert way.receive_splits == [len(of_sender[rank]) for of_sender in parts]
        received = list(itertools.chain(*(of_sender[rank] for of_sender in parts)))
        for segment, begin in zip(way.receives, offsets_of(way.receives)):
            assert received[begin : begin + segment.numel] == elements(segment.atom, segment)
        assert sum(segment.numel for segment in way.receives) == len(received) - received.count(None)


@pytest.mark.parametrize(
    ("where", "over"), [*itertools.product(FLAT, [1, 2, 3, 4, 7]), *((where, None) for where in LAYOUTS)]
)
def test_all_to_all_brings_every_element_there_and_back(where: str, over: Any) -> None:
    """Every element goes to its owner once, and every piece back."""
    spread = over is None
    plan = plan_spread(atoms_of(SMALL), LAYOUTS[where], Limits(2)) if spread else plan_of(SHAPES, over, where)
    layout: Layout = plan.layout
    ranks, moved, sent_back = range(layout.world_size), [0] * layout.world_size, [0] * layout.world_size
    rows, columns = plan.rows.groups() if plan.rows else ([tuple(ranks)], [(rank,) for rank in ranks])
    assert (rows, columns) == ([(0, 1), (2, 3)], [(0, 2), (1, 3)]) or where != "hybrid"
    met: list[set[int]] = [set() for _ in ranks]
    for bucket, members in enumerate(plan.buckets):
        forth = [plan.transfer(bucket, rank) for rank in ranks]
        back = [plan.way_back(bucket, rank) for rank in ranks]
        for row in rows:
            assert_arrives([forth[rank] for rank in row])
            assert_arrives([back[rank] for rank in row])
            for rank, way in ((rank, way[rank]) for way in (forth, back) for rank in row):
                met[rank] |= {row[s.peer] for s in (*way.sends, *way.receives) if s.numel}
        for column in columns:
            for rank in column:
                met[rank] |= set(column)
        received = [list(way.receives) for way in back]
        for column in columns if plan.rows else ():
            parts = [[(s.atom, s.start, s.stop) for s in back[rank].receives] for rank in column]
            longest = max(sum(s.numel for s in back[rank].receives) for rank in column)
            for rank in column:
                pieces = plan.pieces_of_column(bucket, rank)
                assert [[(s.atom, s.start, s.stop) for s in of_rank] for of_rank in pieces] == parts
                received[rank] = [*itertools.chain(*pieces)]
                sent_back[rank] += (len(column) - 1) * longest
        for atom, rank in itertools.product(members, ranks):
            arrived, returned = (
                [element for s in way if s.atom == atom for element in elements(atom, s)]
                for way in (forth[rank].receives, received[rank])
            )
            is_owner = plan.ownership.owners[atom] == rank
            assert sorted(arrived) == [(atom, i) for i in range(plan.atoms[atom].numel if is_owner else 0)]
            piece = layout.fragment(atom, rank)
            assert returned == ([] if piece is None else elements(atom, piece))
        for rank in ranks:
            me = next(row.index(rank) for row in rows if rank in row)
            sent, returned = (sum(way.send_splits) - way.send_splits[me] for way in (forth[rank], back[rank]))
            moved[rank] += 0 if plan.stays(bucket) else sent
            sent_back[rank] += returned
            if where in FLAT:
                assert (back[rank].sends, back[rank].receives) == (forth[rank].receives, forth[rank].sends)
        if where.startswith("stage"):  # stage 0's copies only come back, and their owner alone keeps the state
            assert plan.trips(bucket) == (1 if where == "stage 0" else 2)
            for atom, owner in ((atom, plan.ownership.owners[atom]) for atom in members):
                keepers = [owner] if where == "stage 0" else [part.rank for part in layout.fragments(atom)]
                assert [rank for rank in ranks if plan.keeps_state(atom, rank)] == keepers
    assert plan.wire_bytes() == [2 * sum(ways) for ways in zip(moved, sent_back)]
    assert plan.peers() == max(len(others - {rank}) for rank, others in enumerate(met))
    if where in FLAT:
        assert plan.moved_numel() == moved
        local = [atom for rank in ranks for atom in plan.local_atoms(rank)]
        assert sorted([*local, *itertools.chain(*plan.buckets)]) == list(range(len(SHAPES)))


def test_buckets_hold_at_most_their_size_or_one_matrix() -> None:
    atoms = atoms_of([(10, 10), (10, 10), (30, 30), (1, 1), (10, 20)])
    assert cut_buckets(atoms, range(5), 1, matrices=5, numel=201) == ((0, 1), (2,), (3, 4))
    assert cut_buckets(atoms, [], 1, numel=201) == ()
    atoms = atoms_of([(4, 4)] * 7)
    assert cut_buckets(atoms, range(7), 4, matrices=3) == ((0, 1, 2), (3, 4, 5, 6))
    assert cut_buckets(atoms, range(7), 1, matrices=8) == ((0, 1, 2, 3, 4, 5, 6),)
    assert cut_buckets(atoms, range(7), 1, matrices=3, numel=32) == ((0, 1), (2, 3), (4, 5), (6,))
    assert cut_buckets(atoms_of([(9, 9), (2, 2)]), range(2), 4, numel=10) == ((0,), (1,))


def test_a_bucket_has_work_for_all_ranks_at_the_same_time() -> None:
    def cut(costs: list[int], **more: Any) -> list[int]:
        atoms = [Atom(str(number), (1, 1), cost) for number, cost in enumerate(costs)]
        return [len(bucket) for bucket in cut_buckets(atoms, range(len(costs)), 2, **more)]

    assert cut([1] * 12) == [4, 4, 4] and cut([1] * 10) == [4, 4, 2], "two a rank; of the last one is enough"
    assert cut([1] * 9) == [4, 5], "one matrix that is left is none for the other rank"
    assert cut([5, 1, 1, 1, *[1] * 8]) == [6, 4, 2], "while rank 0 does 5, rank 1 has as much to do"
    assert cut([1, 1, 1, 1, 1, 1, 1, 1, 5]) == [3, 6], "filled from the end, where the costly one is"
    assert cut([1] * 12, before=[3, 0]) == [5, 4, 3], "the first makes up for what rank 1 has less to do before"


def test_bucket_leaves_when_the_wire_is_free() -> None:
    # wire     | b0 2 | b1 2 | - | b0 2 | b1 2 |
    # rank 0          | b0 3     |
    # rank 1                 | b1 3      |
    """A bucket leaves when the ranks get there and the wire is free."""
    halves = [BucketSeconds(2, 2, {0: (3, 0)}), BucketSeconds(2, 2, {1: (3, 0)})]
    two = (BucketTime((0, 2), (2, 5), (5, 7)), BucketTime((2, 4), (4, 7), (7, 9)))
    assert pipeline(halves, [0, 1], 0) == Timeline(9, two)
    assert pipeline([BucketSeconds(4, 4, {0: (3, 0), 1: (3, 0)})], [0, 1], 0).seconds == 11
    third = pipeline([*halves, BucketSeconds(1, 1, {0: (1, 0)})], [0, 0], 0)
    assert third.seconds == 11, "the third leaves after the first's return"
    slowly = pipeline([BucketSeconds(2, 2, {0: (1, 4)})] * 2, [0, 0], 1)
    assert slowly.seconds == 12, "a device waits for a host that launches slowly"
    assert pipeline([], [2, 3], 0) == Timeline(3), "all matrices are at home"
    shifted = BucketTime((9, 13), (13, 16), (16, 20))
    assert Timeline(9, two).then(pipeline([BucketSeconds(4, 4, {0: (3, 0)})], [0], 0)) == Timeline(20, (*two, shifted))


def test_buckets_are_as_many_as_make_the_modelled_step_shortest() -> None:
    atoms = public_models.atoms("llama3.1-8b")
    layout = rows_over([atom.shape for atom in atoms], 64)
    modelled, alone = Limits(machine=MACHINES["cuda"], batch_numel=2**24), Limits(matrices=len(atoms))
    chosen, one = (plan_spread(atoms, layout, limits) for limits in (modelled, alone))
    assert (len(chosen.buckets), len(one.buckets)) == (2, 1)
    assert exchange_timeline(chosen, modelled).seconds < 0.9 * exchange_timeline(one, modelled).seconds
    assert plan_spread(atoms, layout, replace(alone, machine=MACHINES["cuda"])).buckets == one.buckets, "a user's wins"
    small = atoms_of(GPT[:48])
    assert len(plan_spread(small, rows_over(GPT[:48], 4), modelled).buckets) == 1, "on a tie, the fewest"


def test_plan_is_the_same_whatever_the_hash_seed() -> None:
    """The plan is the same in every process."""
    assert succeeds([sys.executable, plans.__file__], ROOT, PYTHONHASHSEED="1") == f"{plans.everything()}\n"
    plan = plan_of(SHAPES, 2, "stay")
    assert plan.lines() != replace(plan, element_bytes=4).lines(), "the size of an element is part of it"


def test_planning_takes_one_pass_over_kinds_of_matrices() -> None:
    """Counted, not timed: 8,000 matrices on 1,024 ranks, and 4,000 of two kinds on a mesh of 256."""
    draw = random.Random(0)
    atoms = atoms_of([draw.choice([(64, 64), (64, 256), (256, 64)]) for _ in range(8000)])
    layout = FlatPartition.build([atom.numel for atom in atoms], 1024)
    original = FlatPartition.fragments
    with mock.patch.object(FlatPartition, "fragments", autospec=True, side_effect=original) as asked:
        plan_matrices(atoms, layout, Limits(numel=2**24), policy="auto", machine=MACHINES["cuda"], element_bytes=2)
    assert 0 < asked.call_count <= 10 * len(atoms)
    shapes, made = [(256, 64), (64, 256)] * 2000, []

    class Counted(Sharding):
        def fragment(self, rank: int, coordinate: tuple[int, ...]) -> Fragment | None:
            made.append(rank)
            return Sharding.fragment(self, rank, coordinate)

    plan = plan_spread(atoms_of(shapes), rows_over(shapes, 256, Counted))
    plan.wire_bytes()
    plan.transfer(0, 3)
    assert len(made) == 2 * 256
